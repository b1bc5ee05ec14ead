// The streams of caching_resource: who may have what another stream has freed, and when; streams that capture, that are
// gone, and that are another one in each thread.
#include "resource/caching_fixture.hpp"

#include <holdfast/error.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

using support::mebibyte;

constexpr std::size_t bytes = 32 * mebibyte;  // a whole segment

template <class Device>
class caching_streams : public support::caching_test<Device> {
 protected:
  using typename support::caching_test<Device>::drive;

  /// Whether memory at `p` can be used on `s`.
  static bool works(typename Device::stream_type s, void* p) {
    constexpr std::size_t some = 1000;
    Device::fill(s, p, std::byte{0x5A}, some);
    Device::synchronize(s);
    return drive::read(static_cast<const std::byte*>(p), some) == std::vector<std::byte>(some, std::byte{0x5A});
  }
};
TYPED_TEST_SUITE(caching_streams, support::both_devices, support::device_names);

TYPED_TEST(caching_streams, keep_what_they_freed) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  pool.deallocate(s, p, bytes, 256);
  TestFixture::drive::synchronize(s);
  std::vector<void*> others;
  for (int i = 0; i < 3; ++i) others.push_back(pool.allocate(t, bytes, 256));
  for (void* const q : others) EXPECT_NE(q, p);
  EXPECT_EQ(pool.allocate(s, bytes, 256), p);
  pool.deallocate(s, p, bytes, 256);
  for (void* const q : others) pool.deallocate(t, q, bytes, 256);
}

TYPED_TEST(caching_streams, give_what_they_release_to_others_once_its_work_is_done) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  const auto busy = this->occupy(s);
  pool.deallocate(s, p, bytes, 256);
  pool.release(s);
  void* const early = pool.allocate(t, bytes, 256);
  if (!busy.ready()) {
    EXPECT_NE(early, p);
  }
  TestFixture::drive::synchronize(s);
  void* const late = pool.allocate(t, bytes, 256);
  EXPECT_TRUE(early == p || late == p);
  EXPECT_EQ(pool.statistics().cross_stream_reuses, 1U);
  EXPECT_TRUE(this->works(t, p));
  pool.deallocate(t, early, bytes, 256);
  pool.deallocate(t, late, bytes, 256);
}

TYPED_TEST(caching_streams, take_back_what_they_released_as_anybody) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  pool.deallocate(s, p, bytes, 256);
  pool.release(s);
  TestFixture::drive::synchronize(s);
  EXPECT_EQ(pool.allocate(s, bytes, 256), p);
  EXPECT_EQ(pool.statistics().cross_stream_reuses, 0U);
  pool.deallocate(s, p, bytes, 256);
}

TYPED_TEST(caching_streams, release_nothing_that_is_in_use) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const used = pool.allocate(s, 8 * mebibyte, 256);
  void* const freed = pool.allocate(s, 8 * mebibyte, 256);
  pool.deallocate(s, freed, 8 * mebibyte, 256);
  pool.release(s);
  TestFixture::drive::synchronize(s);
  void* const other = pool.allocate(t, 16 * mebibyte, 256);
  EXPECT_EQ(pool.statistics().upstream_allocations, 2U);
  EXPECT_TRUE(this->works(s, used));
  EXPECT_EQ(pool.allocate(s, 8 * mebibyte, 256), freed);
  pool.deallocate(s, freed, 8 * mebibyte, 256);
  pool.deallocate(s, used, 8 * mebibyte, 256);
  pool.deallocate(t, other, 16 * mebibyte, 256);
}

TYPED_TEST(caching_streams, a_new_stream_of_a_released_handle_waits_for_the_old_ones_work) {
  auto pool = this->make_pool();
  auto old = std::optional{TestFixture::drive::make_stream()};
  void* const p = pool.allocate(*old, bytes, 256);
  const auto busy = this->occupy(*old);
  pool.deallocate(*old, p, bytes, 256);
  pool.release(*old);
  old.reset();
  const auto recycled = TestFixture::drive::make_stream();  // of the same handle on the host, and often on CUDA
  void* const q = pool.allocate(recycled, bytes, 256);
  if (!busy.ready()) {
    EXPECT_NE(q, p);
  }
  pool.deallocate(recycled, q, bytes, 256);
}

/// Two blocks of one segment: one stays in use, and the other's work is pending when it is freed.
template <class Device>
struct half_used {
  using drive = support::driver<Device>;
  static constexpr std::size_t size = 4096;

  template <class Pool>
  half_used(Pool& pool, typename Device::stream_type s) : used(pool.allocate(s, size, 256)) {
    freed = pool.allocate(s, size, 256);
    Device::fill(s, freed, std::byte{1}, size);
    Device::copy(s, kept, freed, size);
    Device::fill(s, used, std::byte{1}, size);
    Device::copy(s, kept + size, used, size);
    done.record(s);
    pool.deallocate(s, freed, size, 256);
  }
  half_used(const half_used&) = delete;
  half_used& operator=(const half_used&) = delete;
  ~half_used() { drive::deallocate(kept); }

  /// Once memory at `p` is usable on `s`, its work and this one's don't disturb each other.
  [[nodiscard]] bool undisturbed_by(typename Device::stream_type s, void* p) const {
    Device::fill(s, p, std::byte{2}, size);
    Device::synchronize(s);
    done.synchronize();
    return drive::read(kept, 2 * size) == std::vector<std::byte>(2 * size, std::byte{1}) &&
           drive::read(static_cast<const std::byte*>(p), size) == std::vector<std::byte>(size, std::byte{2});
  }

  void* used;
  void* freed;
  std::byte* kept = static_cast<std::byte*>(drive::allocate(2 * size));
  typename Device::event done{Device{}};
};

TYPED_TEST(caching_streams, of_a_released_handle_wait_for_the_work_of_what_was_left_beside_memory_in_use) {
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const support::any_order<TypeParam> order{seed};
    auto pool = this->make_pool();
    auto old = std::optional{TestFixture::drive::make_stream()};
    const half_used<TypeParam> left{pool, *old};
    pool.release(*old);
    old.reset();
    const auto recycled = TestFixture::drive::make_stream();
    void* const p = pool.allocate(recycled, left.size, 256);
    EXPECT_TRUE(left.undisturbed_by(recycled, p)) << seed;
    pool.deallocate(recycled, p, left.size, 256);
    pool.deallocate(recycled, left.used, left.size, 256);
    EXPECT_EQ(pool.errors(), 0U);
  }
}

TYPED_TEST(caching_streams, of_a_released_handle_wait_for_the_work_of_what_they_free_in_the_place_of_the_old_one) {
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const support::any_order<TypeParam> order{seed};
    auto pool = this->make_pool();
    auto old = std::optional{TestFixture::drive::make_stream()};
    const half_used<TypeParam> left{pool, *old};
    pool.release(*old);
    old.reset();
    const auto recycled = TestFixture::drive::make_stream();
    pool.deallocate(recycled, left.used, left.size, 256);
    void* const p = pool.allocate(recycled, left.size, 256);
    EXPECT_TRUE(left.undisturbed_by(recycled, p)) << seed;
    pool.deallocate(recycled, p, left.size, 256);
    EXPECT_EQ(pool.errors(), 0U);
  }
}

TYPED_TEST(caching_streams, of_a_released_handle_that_are_released_in_turn_pass_the_old_ones_work_on) {
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const support::any_order<TypeParam> order{seed};
    auto pool = this->make_pool();
    auto stream = std::optional{TestFixture::drive::make_stream()};
    const half_used<TypeParam> left{pool, *stream};
    for (int i = 0; i < 2; ++i) {  // the second one has not used the pool
      pool.release(*stream);
      stream.reset();
      stream.emplace(TestFixture::drive::make_stream());
    }
    void* const p = pool.allocate(*stream, left.size, 256);
    EXPECT_TRUE(left.undisturbed_by(*stream, p)) << seed;
    pool.deallocate(*stream, p, left.size, 256);
    pool.deallocate(*stream, left.used, left.size, 256);
    EXPECT_EQ(pool.errors(), 0U);
  }
}

TYPED_TEST(caching_streams, of_a_released_handle_lend_what_became_whole_behind_the_old_ones_work) {
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const support::any_order<TypeParam> order{seed};
    auto pool = this->make_pool({.max_reserved_bytes = 2 * mebibyte});
    const auto t = TestFixture::drive::make_stream();
    auto old = std::optional{TestFixture::drive::make_stream()};
    const half_used<TypeParam> left{pool, *old};
    pool.release(*old);
    old.reset();
    const auto recycled = TestFixture::drive::make_stream();
    pool.deallocate(recycled, left.used, left.size, 256);
    pool.release(recycled);
    void* const first = pool.allocate(t, left.size, 256);
    void* const p = pool.allocate(t, left.size, 256);
    EXPECT_EQ(p, left.freed);
    EXPECT_TRUE(left.undisturbed_by(t, p)) << seed;
    pool.deallocate(t, first, left.size, 256);
    pool.deallocate(t, p, left.size, 256);
  }
}

TYPED_TEST(caching_streams, that_are_gone_take_back_what_is_freed_on_another) {
  auto pool = this->make_pool();
  const auto t = TestFixture::drive::make_stream();
  auto gone = std::optional{TestFixture::drive::make_stream()};
  const half_used<TypeParam> left{pool, *gone};
  pool.release(*gone);
  gone.reset();
  pool.deallocate(t, left.used, left.size, 256);
  EXPECT_EQ(pool.errors(), 0U);
  EXPECT_EQ(pool.used_bytes(), 0U);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0U);
}

TYPED_TEST(caching_streams, may_be_gone_when_their_memory_is_trimmed) {
  auto pool = this->make_pool();
  auto gone = std::optional{TestFixture::drive::make_stream()};
  const typename TypeParam::stream_type handle = *gone;
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(handle, bytes, 256);
  void* const used = pool.allocate(handle, bytes, 256);
  pool.deallocate(handle, p, bytes, 256);
  TestFixture::drive::synchronize(handle);
  gone.reset();
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), bytes);
  EXPECT_EQ(this->upstream.live_count(), 1U);
  EXPECT_TRUE(this->upstream.is_live(used));
  pool.deallocate(s, used, bytes, 256);  // on another stream, since its own is gone
  EXPECT_EQ(pool.errors(), 0U);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0U);
}

TYPED_TEST(caching_streams, may_be_gone_when_memory_is_short) {
  auto pool = this->make_pool({.max_reserved_bytes = bytes});
  auto gone = std::optional{TestFixture::drive::make_stream()};
  void* const p = pool.allocate(*gone, bytes, 256);
  const auto s = TestFixture::drive::make_stream();  // while the other is there, so that it is not of the same handle
  const auto busy = this->occupy(*gone);
  pool.deallocate(*gone, p, bytes, 256);
  gone.reset();
  EXPECT_EQ(pool.allocate(s, bytes, 256), p);
  EXPECT_TRUE(busy.ready()) << "it was waited for";
  pool.deallocate(s, p, bytes, 256);
}

TYPED_TEST(caching_streams, may_be_gone_when_the_pool_goes) {
  auto pool = std::optional{this->make_pool()};
  {
    const auto gone = TestFixture::drive::make_stream();
    void* const p = pool->allocate(gone, bytes, 256);
    pool->deallocate(gone, p, bytes, 256);
    TestFixture::drive::synchronize(gone);
  }
  pool.reset();
  EXPECT_EQ(this->upstream.live_count(), 0U);
}

TYPED_TEST(caching_streams, a_free_that_names_another_stream_waits_for_its_work) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  TestFixture::drive::fork(s, t);
  const auto busy = this->occupy(t);
  pool.deallocate(t, p, bytes, 256);
  EXPECT_TRUE(busy.ready());
  EXPECT_EQ(pool.errors(), 0U);
  EXPECT_EQ(pool.allocate(s, bytes, 256), p);
  pool.deallocate(s, p, bytes, 256);
}

TYPED_TEST(caching_streams, use_a_new_segment_after_what_the_upstream_does_to_it) {
  const auto s = TestFixture::drive::make_stream();
  this->upstream.poison();  // filled on the stream that the upstream is asked on
  for (int round = 0; round < 8; ++round) {
    const support::any_order<TypeParam> order{static_cast<std::uint64_t>(round)};
    auto pool = this->make_pool();
    void* const p = pool.allocate(s, bytes, 256);
    EXPECT_TRUE(this->works(s, p)) << round;
    TestFixture::drive::synchronize(TypeParam{}.library_stream());
    EXPECT_TRUE(TestFixture::drive::read(static_cast<std::byte*>(p), 1000) ==
                std::vector<std::byte>(1000, std::byte{0x5A}))
        << round;
    pool.deallocate(s, p, bytes, 256);
  }
}

// --- streams that stay: declared before the pool, which they outlive ----------------------------------------------------

TYPED_TEST(caching_streams, that_stay_share_what_they_freed_once_they_are_idle) {
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  auto pool = this->make_pool({.streams_stay = true});
  void* const p = pool.allocate(s, bytes, 256);
  pool.deallocate(s, p, bytes, 256);
  std::vector<void*> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(pool.allocate(t, bytes, 256));
    TestFixture::drive::synchronize(s);
  }
  EXPECT_NE(blocks[0], p) << "s may be about to need it again";
  EXPECT_TRUE(blocks[1] == p || blocks[2] == p);
  EXPECT_EQ(pool.statistics().cross_stream_reuses, 1U);
  for (void* const q : blocks) pool.deallocate(t, q, bytes, 256);
}

TYPED_TEST(caching_streams, that_stay_keep_what_they_may_be_about_to_need) {
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  auto pool = this->make_pool({.streams_stay = true});
  void* const p = pool.allocate(s, bytes, 256);
  static_cast<void>(this->occupy(s));
  pool.deallocate(s, p, bytes, 256);
  void* const other = pool.allocate(t, bytes, 256);
  EXPECT_EQ(pool.allocate(s, bytes, 256), p);
  pool.deallocate(s, p, bytes, 256);
  pool.deallocate(t, other, bytes, 256);
}

TYPED_TEST(caching_streams, that_stay_wait_for_each_other_without_the_host_when_memory_is_short) {
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  auto pool = this->make_pool({.max_reserved_bytes = bytes, .streams_stay = true});
  auto* const kept = static_cast<std::byte*>(TestFixture::drive::allocate(1000));
  for (int round = 0; round < 8; ++round) {
    const support::any_order<TypeParam> order{static_cast<std::uint64_t>(round)};
    void* const p = pool.allocate(s, bytes, 256);
    const auto busy = this->occupy(s);
    TypeParam::fill(s, p, std::byte{1}, 1000);
    TypeParam::copy(s, kept, p, 1000);
    pool.deallocate(s, p, bytes, 256);
    EXPECT_EQ(pool.allocate(t, bytes, 256), p);
    if (support::is_host<TypeParam>) {
      EXPECT_FALSE(busy.ready());
    }
    TypeParam::fill(t, p, std::byte{2}, 1000);
    TestFixture::drive::synchronize(t);
    TestFixture::drive::synchronize(s);
    EXPECT_EQ(TestFixture::drive::read(kept, 1000), std::vector<std::byte>(1000, std::byte{1}));
    EXPECT_EQ(TestFixture::drive::read(static_cast<std::byte*>(p), 1000), std::vector<std::byte>(1000, std::byte{2}));
    pool.deallocate(t, p, bytes, 256);
    pool.trim();
  }
  TestFixture::drive::deallocate(kept);
}

TYPED_TEST(caching_streams, that_stay_are_not_touched_while_they_capture) {
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  auto pool = this->make_pool({.streams_stay = true});
  void* const p = pool.allocate(s, bytes, 256);
  pool.deallocate(s, p, bytes, 256);
  TestFixture::drive::synchronize(s);
  auto* const some = TestFixture::drive::allocate(64);
  TestFixture::drive::begin_capture(s, support::capture_mode::global);
  TypeParam::fill(s, some, std::byte{1}, 64);
  std::vector<void*> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(pool.allocate(t, bytes, 256));
  for (void* const q : blocks) EXPECT_NE(q, p);
  const auto graph = TestFixture::drive::end_capture(s);
  ASSERT_TRUE(graph);
  EXPECT_EQ(TestFixture::drive::count(graph).total(), 1);
  for (int i = 0; i < 2; ++i) {
    blocks.push_back(pool.allocate(t, bytes, 256));
    TestFixture::drive::synchronize(s);
  }
  EXPECT_TRUE(blocks[3] == p || blocks[4] == p) << "it can be had again";
  for (void* const q : blocks) pool.deallocate(t, q, bytes, 256);
  TestFixture::drive::deallocate(some);
}

TYPED_TEST(caching_streams, that_stay_are_not_touched_while_another_captures_what_would_depend_on_them) {
  const auto legacy = TestFixture::drive::legacy_stream();
  const auto blocking = TestFixture::drive::make_stream(support::stream_kind::blocking);
  const auto t = TestFixture::drive::make_stream();
  auto pool = this->make_pool({.streams_stay = true});
  void* const p = pool.allocate(legacy, bytes, 256);
  pool.deallocate(legacy, p, bytes, 256);
  auto* const some = TestFixture::drive::allocate(64);
  TestFixture::drive::begin_capture(blocking);
  TypeParam::fill(blocking, some, std::byte{1}, 64);
  std::vector<void*> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(pool.allocate(t, bytes, 256));
  EXPECT_TRUE(TestFixture::drive::end_capture(blocking)) << "the capture was broken";
  for (void* const q : blocks) pool.deallocate(t, q, bytes, 256);
  TestFixture::drive::deallocate(some);
}

// --- captures -------------------------------------------------------------------------------------------------------------

TYPED_TEST(caching_streams, that_capture_lend_what_they_freed_before_when_memory_is_short) {
  for (const auto mode : support::capture_modes) {
    for (const auto kind : support::stream_kinds) {
      auto pool = this->make_pool({.max_reserved_bytes = bytes});
      const auto s = TestFixture::drive::make_stream(kind);
      const auto t = TestFixture::drive::make_stream();
      void* const p = pool.allocate(s, bytes, 256);
      const auto busy = this->occupy(s);
      pool.deallocate(s, p, bytes, 256);
      auto* const some = TestFixture::drive::allocate(64);
      TestFixture::drive::begin_capture(s, mode);
      TypeParam::fill(s, some, std::byte{1}, 64);
      void* const q = pool.allocate(t, bytes, 256);
      EXPECT_EQ(q, p);
      {
        const typename TypeParam::relaxed_scope relaxed;
        EXPECT_TRUE(busy.ready());
      }
      pool.deallocate(t, q, bytes, 256);
      pool.trim();
      EXPECT_EQ(pool.reserved_bytes(), 0U);
      const auto graph = TestFixture::drive::end_capture(s);
      EXPECT_TRUE(graph) << "the capture was broken";
      TestFixture::drive::deallocate(some);
    }
  }
}

TYPED_TEST(caching_streams, refuse_a_release_while_they_capture) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  auto* const some = TestFixture::drive::allocate(64);
  TestFixture::drive::begin_capture(s);
  TypeParam::fill(s, some, std::byte{1}, 64);
  EXPECT_THROW(pool.release(s), holdfast::logic_error);
  EXPECT_TRUE(TestFixture::drive::end_capture(s));
  TestFixture::drive::deallocate(some);
}

// --- one handle, many streams -----------------------------------------------------------------------------------------------

TYPED_TEST(caching_streams, of_each_thread_reuse_their_own) {
  auto pool = this->make_pool();
  const auto mine = TestFixture::drive::per_thread_stream();
  void* const p = pool.allocate(mine, 1000, 256);
  pool.deallocate(mine, p, 1000, 256);
  EXPECT_EQ(pool.allocate(mine, 1000, 256), p);
  pool.deallocate(mine, p, 1000, 256);
}

TYPED_TEST(caching_streams, of_a_thread_that_is_gone_leave_their_memory_to_others_after_their_work) {
  auto* const kept = static_cast<std::byte*>(TestFixture::drive::allocate(2000));
  for (int round = 0; round < 16; ++round) {
    const support::any_order<TypeParam> order{static_cast<std::uint64_t>(round)};
    auto pool = this->make_pool();
    const auto handle = TestFixture::drive::per_thread_stream();
    // Threads one after the other: the identity of the first may come back.
    for (const std::size_t turn : {std::size_t{0}, std::size_t{1}}) {
      std::thread{[&, mine = pool]() mutable {
        void* const p = mine.allocate(handle, bytes, 256);
        static_cast<void>(this->occupy(handle));
        TypeParam::fill(handle, p, static_cast<std::byte>(turn + 1), 1000);
        TypeParam::copy(handle, kept + 1000 * turn, p, 1000);
        mine.deallocate(handle, p, bytes, 256);
        if (turn == 1) TestFixture::drive::synchronize(handle);
      }}.join();
    }
    pool.trim();
    EXPECT_EQ(pool.reserved_bytes(), 0U);
    const auto s = TestFixture::drive::make_stream();
    void* const p = pool.allocate(s, bytes, 256);
    pool.deallocate(s, p, bytes, 256);
    TestFixture::drive::synchronize(
        TypeParam{}.library_stream());  // trim has queued the frees behind the threads' work
    EXPECT_EQ(TestFixture::drive::read(kept, 1000), std::vector<std::byte>(1000, std::byte{1})) << round;
    EXPECT_EQ(TestFixture::drive::read(kept + 1000, 1000), std::vector<std::byte>(1000, std::byte{2})) << round;
  }
  TestFixture::drive::deallocate(kept);
}

TYPED_TEST(caching_streams, of_a_thread_whose_identity_comes_back_are_waited_for_all_the_same) {
  auto* const kept = static_cast<std::byte*>(TestFixture::drive::allocate(1000));
  for (const bool release : {false, true}) {
    for (std::uint64_t seed = 0; seed < 16; ++seed) {
      const support::any_order<TypeParam> order{seed};
      auto pool = this->make_pool({.max_reserved_bytes = 2 * bytes});
      const auto handle = TestFixture::drive::per_thread_stream();
      void* p = nullptr;
      void* q = nullptr;
      typename TypeParam::event done{TypeParam{}};
      std::thread{[&, mine = pool]() mutable {
        p = mine.allocate(handle, bytes, 256);
        q = mine.allocate(handle, bytes, 256);
        TypeParam::fill(handle, p, std::byte{1}, 1000);
        TypeParam::copy(handle, kept, p, 1000);
        done.record(handle);
        mine.deallocate(handle, p, bytes, 256);
      }}.join();
      std::thread{[&, mine = pool]() mutable {
        if (!release) {
          mine.deallocate(handle, q, bytes, 256);
        } else {
          mine.release(handle);
        }
      }}.join();
      const auto t = TestFixture::drive::make_stream();
      if (release) pool.deallocate(t, q, bytes, 256);  // its stream is gone
      std::vector<void*> blocks;
      for (int i = 0; i < 2; ++i) {
        blocks.push_back(pool.allocate(t, bytes, 256));
        TypeParam::fill(t, blocks.back(), std::byte{2}, 1000);
      }
      TestFixture::drive::synchronize(t);
      done.synchronize();
      EXPECT_EQ(TestFixture::drive::read(kept, 1000), std::vector<std::byte>(1000, std::byte{1})) << seed;
      EXPECT_EQ(TestFixture::drive::read(static_cast<std::byte*>(p), 1000), std::vector<std::byte>(1000, std::byte{2}))
          << seed;
      for (void* const one : blocks) pool.deallocate(t, one, bytes, 256);
      EXPECT_EQ(pool.errors(), 0U);
    }
  }
  TestFixture::drive::deallocate(kept);
}

TYPED_TEST(caching_streams, of_other_threads_get_nothing_whose_work_is_pending) {
  auto pool = this->make_pool();
  const auto handle = TestFixture::drive::per_thread_stream();
  void* const p = pool.allocate(handle, bytes, 256);
  const auto busy = this->occupy(handle);
  pool.deallocate(handle, p, bytes, 256);
  std::thread{[&, mine = pool]() mutable {
    for (int i = 0; i < 3; ++i) {
      void* const q = mine.allocate(handle, bytes * 2, 256);
      void* const r = mine.allocate(handle, bytes, 256);
      if (!busy.ready()) {
        EXPECT_NE(r, p);
      }
      mine.deallocate(handle, r, bytes, 256);
      mine.deallocate(handle, q, bytes * 2, 256);
    }
  }}.join();
  TestFixture::drive::synchronize(handle);
}

}  // namespace
