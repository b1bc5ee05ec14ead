// Resources and captures: a resource never works on a capturing stream, and never disturbs anybody's capture.
#include "support/resources.hpp"

#include <holdfast/error.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace {

template <class Entry>
class resource_capture : public support::resource_test<Entry> {
 protected:
  using typename support::resource_test<Entry>::drive;
  using typename support::resource_test<Entry>::device;
  using typename support::resource_test<Entry>::stream_type;

  static constexpr std::size_t bytes = 4096;

  void SetUp() override {
    support::resource_test<Entry>::SetUp();
    if (!this->IsSkipped()) memory_ = drive::allocate(bytes);
  }
  void TearDown() override {
    if (memory_ != nullptr) drive::deallocate(memory_);
  }

  /// One node for the capture of `s`.
  void record(stream_type s) const { device::fill(s, memory_, std::byte{0x3C}, bytes); }

  /// Whether the capture of `s` ends as if nothing had happened, with `nodes` nodes, and its graph runs.
  bool ends_well(stream_type s, int nodes) const {
    auto graph = drive::end_capture(s);
    if (!graph || drive::count(graph).total() != nodes) return false;
    auto exec = drive::instantiate(graph);
    drive::launch(exec, s);
    drive::synchronize(s);
    return drive::read(static_cast<const std::byte*>(memory_), bytes) == std::vector<std::byte>(bytes, std::byte{0x3C});
  }

  /// Somebody's capture, on this thread or another, around `meanwhile`. Whether it ends well.
  template <class Meanwhile>
  bool during_a_capture(support::capture_mode mode, support::stream_kind kind, bool elsewhere, Meanwhile meanwhile) {
    const auto s = drive::make_stream(kind);
    std::promise<void> begun;
    std::promise<void> done;
    bool well = false;
    const auto begin = [&] {
      drive::begin_capture(s, mode);
      record(s);
    };
    const auto end = [&] {
      record(s);
      well = ends_well(s, 2);
    };
    if (elsewhere) {
      std::thread theirs{[&] {
        begin();
        begun.set_value();
        done.get_future().wait();
        end();
      }};
      begun.get_future().wait();
      meanwhile();
      done.set_value();
      theirs.join();
    } else {
      begin();
      meanwhile();
      end();
    }
    return well;
  }

  template <class Test>
  void in_every_way(Test test) {
    for (const auto mode : support::capture_modes) {
      for (const auto kind : support::stream_kinds) {
        for (const bool elsewhere : {false, true}) {
          SCOPED_TRACE("capture mode " + std::to_string(static_cast<int>(mode)) + ", stream kind " +
                       std::to_string(static_cast<int>(kind)) + (elsewhere ? ", another thread's" : ", this thread's"));
          test(mode, kind, elsewhere);
        }
      }
    }
  }

 private:
  void* memory_ = nullptr;
};
TYPED_TEST_SUITE(resource_capture, support::resources_under_test, support::resource_names);

TYPED_TEST(resource_capture, refuses_to_allocate_on_a_capturing_stream_which_survives) {
  auto pool = TypeParam::make();
  for (const auto mode : support::capture_modes) {
    for (const auto kind : support::stream_kinds) {
      const auto s = TestFixture::drive::make_stream(kind);
      TestFixture::drive::begin_capture(s, mode);
      this->record(s);
      for (const std::size_t size : {std::size_t{64}, std::size_t{1} << 20, std::size_t{0}}) {
        EXPECT_THROW(static_cast<void>(pool.allocate(s, size, 256)), holdfast::logic_error);
      }
      EXPECT_TRUE(this->ends_well(s, 1));
    }
  }
}

TYPED_TEST(resource_capture, refuses_a_stream_that_joined_a_capture) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  const auto joined = TestFixture::drive::make_stream();
  TestFixture::drive::begin_capture(s);
  this->record(s);
  TestFixture::drive::fork(s, joined);
  EXPECT_THROW(static_cast<void>(pool.allocate(joined, 64, 256)), holdfast::logic_error);
  this->record(joined);
  TestFixture::drive::fork(joined, s);
  EXPECT_TRUE(this->ends_well(s, 2));
}

TYPED_TEST(resource_capture, refuses_a_stream_whose_capture_was_invalidated) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  TestFixture::drive::begin_capture(s, support::capture_mode::global);
  ASSERT_TRUE(TestFixture::drive::unsafe_call());
  try {
    static_cast<void>(pool.allocate(s, 64, 256));
    ADD_FAILURE() << "it was accepted";
  } catch (const holdfast::logic_error& refused) {
    EXPECT_NE(std::string{refused.what()}.find("invalidated"), std::string::npos) << refused.what();
  }
  EXPECT_FALSE(TestFixture::drive::end_capture(s));
}

TYPED_TEST(resource_capture, keeps_memory_that_is_freed_on_a_capturing_stream) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1000, 256);
  const auto before = this->figures(pool);
  TestFixture::drive::begin_capture(s);
  this->record(s);
  pool.deallocate(s, p, 1000, 256);
  EXPECT_TRUE(this->ends_well(s, 1));
  EXPECT_EQ(this->figures(pool), before);
  EXPECT_TRUE(this->works(s, p, 1000));
  pool.deallocate(s, p, 1000, 256);
}

TYPED_TEST(resource_capture, refuses_the_legacy_stream_while_a_blocking_stream_captures) {
  auto pool = TypeParam::make();
  const auto legacy = TestFixture::drive::legacy_stream();
  for (const auto mode : support::capture_modes) {
    const auto s = TestFixture::drive::make_stream(support::stream_kind::blocking);
    TestFixture::drive::begin_capture(s, mode);
    this->record(s);
    EXPECT_THROW(static_cast<void>(pool.allocate(legacy, 64, 256)), holdfast::logic_error);
    EXPECT_TRUE(this->ends_well(s, 1));
  }
}

TYPED_TEST(resource_capture, serves_the_legacy_stream_while_a_non_blocking_stream_captures) {
  auto pool = TypeParam::make();
  const auto legacy = TestFixture::drive::legacy_stream();
  for (const auto mode : support::capture_modes) {
    const auto s = TestFixture::drive::make_stream(support::stream_kind::non_blocking);
    TestFixture::drive::begin_capture(s, mode);
    this->record(s);
    void* const p = pool.allocate(legacy, 64, 256);
    EXPECT_NE(p, nullptr);
    pool.deallocate(legacy, p, 64, 256);
    EXPECT_TRUE(this->ends_well(s, 1));
  }
}

TYPED_TEST(resource_capture, allocates_and_frees_while_others_capture) {
  using Device = typename TestFixture::device;
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  this->in_every_way([&](auto mode, auto kind, bool elsewhere) {
    EXPECT_TRUE(this->during_a_capture(mode, kind, elsewhere, [&] {
      void* const p = pool.allocate(s, std::size_t{3} << 20, 256);
      void* const q = pool.allocate(s, 100, 4096);
      {
        const typename Device::relaxed_scope relaxed;
        Device::fill(s, p, std::byte{1}, std::size_t{3} << 20);
        Device::fill(s, q, std::byte{2}, 100);
      }
      pool.deallocate(s, p, std::size_t{3} << 20, 256);
      pool.deallocate(s, q, 100, 4096);
    }));
    TestFixture::drive::synchronize(s);
  });
}

TYPED_TEST(resource_capture, runs_out_of_memory_while_others_capture) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  this->in_every_way([&](auto mode, auto kind, bool elsewhere) {
    EXPECT_TRUE(this->during_a_capture(mode, kind, elsewhere, [&] {
      EXPECT_THROW(static_cast<void>(pool.allocate(s, TestFixture::petabyte, 256)), holdfast::out_of_memory);
      EXPECT_THROW(static_cast<void>(pool.allocate(s, SIZE_MAX - 5, 256)), holdfast::out_of_memory);
      EXPECT_THROW(static_cast<void>(pool.allocate(s, 64, 3)), holdfast::logic_error);
    }));
  });
}

TYPED_TEST(resource_capture, is_made_and_dropped_while_others_capture) {
  if constexpr (requires { TypeParam::breaks_captures_when_made; }) {
    GTEST_SKIP() << "a stranger's pool, to be made before anybody captures";
  }
  const auto s = TestFixture::drive::make_stream();
  this->in_every_way([&](auto mode, auto kind, bool elsewhere) {
    EXPECT_TRUE(this->during_a_capture(mode, kind, elsewhere, [&] {
      auto pool = TypeParam::make();
      void* const p = pool.allocate(s, 10000, 256);
      pool.deallocate(s, p, 10000, 256);
    }));
    TestFixture::drive::synchronize(s);
  });
}

TYPED_TEST(resource_capture, is_trimmed_while_others_capture) {
  auto pool = TypeParam::make();
  if constexpr (requires { pool.trim(); }) {
    const auto s = TestFixture::drive::make_stream();
    this->in_every_way([&](auto mode, auto kind, bool elsewhere) {
      void* const p = pool.allocate(s, 10000, 256);
      pool.deallocate(s, p, 10000, 256);
      EXPECT_TRUE(this->during_a_capture(mode, kind, elsewhere, [&] {
        static_cast<void>(this->figures(pool));
        pool.trim();
      }));
    });
  } else {
    GTEST_SKIP() << "it caches nothing";
  }
}

}  // namespace
