// What every resource must do, by itself. Stream order, threads and captures: the files beside this one.
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>

#include <gtest/gtest.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

template <class Entry>
class resource_conformance : public support::resource_test<Entry> {};
TYPED_TEST_SUITE(resource_conformance, support::resources_under_test, support::resource_names);

TYPED_TEST(resource_conformance, gives_memory_that_holds_what_is_written) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{255}, std::size_t{4097}, std::size_t{3} << 20}) {
    void* const p = pool.allocate(s, bytes, 16);
    ASSERT_NE(p, nullptr);
    EXPECT_TRUE(this->works(s, p, bytes));
    pool.deallocate(s, p, bytes, 16);
  }
}

TYPED_TEST(resource_conformance, honours_every_alignment_to_4096) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{3}, std::size_t{256}, std::size_t{4095}}) {
      std::array<void*, 3> p{};
      for (void*& one : p) {
        one = pool.allocate(s, bytes, alignment);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(one) % alignment, 0U) << bytes << " bytes at " << alignment;
        EXPECT_TRUE(this->works(s, one, bytes));
      }
      for (void* const one : p) pool.deallocate(s, one, bytes, alignment);
    }
  }
}

TYPED_TEST(resource_conformance, refuses_alignments_that_are_no_power_of_two) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  const auto before = this->figures(pool);
  for (const std::size_t alignment : {std::size_t{0}, std::size_t{3}, std::size_t{48}}) {
    try {
      static_cast<void>(pool.allocate(s, 64, alignment));
      ADD_FAILURE() << "alignment " << alignment << " was accepted";
    } catch (const holdfast::logic_error& refused) {
      EXPECT_NE(std::string{refused.what()}.find("not " + std::to_string(alignment)), std::string::npos)
          << refused.what();
    }
  }
  EXPECT_EQ(this->figures(pool), before);
}

TYPED_TEST(resource_conformance, zero_bytes_are_null) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  const auto before = this->figures(pool);
  for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
    EXPECT_EQ(pool.allocate(s, 0, alignment), nullptr);
    pool.deallocate(s, nullptr, 0, alignment);
  }
  EXPECT_EQ(this->figures(pool), before);
}

TYPED_TEST(resource_conformance, sizes_that_overflow_are_out_of_memory_and_change_nothing) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  const auto before = this->figures(pool);
  for (std::size_t k = 0; k <= 600; ++k) {
    for (const std::size_t alignment : {std::size_t{1}, std::size_t{256}, std::size_t{4096}}) {
      EXPECT_THROW(static_cast<void>(pool.allocate(s, SIZE_MAX - k, alignment)), holdfast::out_of_memory)
          << "SIZE_MAX - " << k << " at " << alignment;
    }
  }
  EXPECT_THROW(static_cast<void>(pool.allocate(s, 1, ~(SIZE_MAX >> 1))), holdfast::out_of_memory) << "alignment 2^63";
  EXPECT_EQ(this->figures(pool), before);
  void* const p = pool.allocate(s, 64, 64);
  EXPECT_TRUE(this->works(s, p, 64));
  pool.deallocate(s, p, 64, 64);
}

TYPED_TEST(resource_conformance, out_of_memory_names_the_bytes_and_changes_nothing) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  void* const held = pool.allocate(s, 1000, 256);
  const auto before = this->figures(pool);
  for (const std::size_t alignment : {std::size_t{256}, std::size_t{4096}}) {
    try {
      static_cast<void>(pool.allocate(s, TestFixture::petabyte, alignment));
      ADD_FAILURE() << "a petabyte was had";
    } catch (const holdfast::out_of_memory& shortage) {
      EXPECT_EQ(shortage.requested(), TestFixture::petabyte);
      EXPECT_NE(std::string{shortage.what()}.find(std::to_string(TestFixture::petabyte) + " bytes asked"),
                std::string::npos)
          << shortage.what();
    }
  }
  EXPECT_EQ(this->figures(pool), before);
  EXPECT_TRUE(this->works(s, held, 1000));
  pool.deallocate(s, held, 1000, 256);
}

TYPED_TEST(resource_conformance, a_double_free_is_ignored) {
  auto pool = TypeParam::make();
  if constexpr (std::same_as<decltype(pool), typename TestFixture::any>) {
    GTEST_SKIP() << "a stranger's resource may do as it likes";
  } else {
    const auto s = TestFixture::drive::make_stream();
    void* const p = pool.allocate(s, 512, 256);
    pool.deallocate(s, p, 512, 256);
    pool.deallocate(s, p, 512, 256);
    void* const a = pool.allocate(s, 512, 256);
    void* const b = pool.allocate(s, 512, 256);
    EXPECT_NE(a, b);
    EXPECT_TRUE(this->works(s, a, 512));
    EXPECT_TRUE(this->works(s, b, 512));
    pool.deallocate(s, a, 512, 256);
    pool.deallocate(s, b, 512, 256);
  }
}

TYPED_TEST(resource_conformance, memory_of_another_resource_is_ignored) {
  auto pool = TypeParam::make();
  if constexpr (std::same_as<decltype(pool), typename TestFixture::any>) {
    GTEST_SKIP() << "a stranger's resource may do as it likes";
  } else if constexpr (std::same_as<decltype(pool), holdfast::async_resource>) {
    GTEST_SKIP() << "cudaFreeAsync frees cudaMalloc's memory, too";
  } else {
    const auto s = TestFixture::drive::make_stream();
    void* const p = TestFixture::drive::allocate(512);
    const auto before = this->figures(pool);
    pool.deallocate(s, p, 512, 256);
    EXPECT_EQ(this->figures(pool), before);
    EXPECT_TRUE(this->works(s, p, 512)) << "it was freed";
    TestFixture::drive::deallocate(p);
  }
}

TYPED_TEST(resource_conformance, copies_are_equal_and_share) {
  auto pool = TypeParam::make();
  auto copy = pool;
  EXPECT_TRUE(pool == copy);
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 100, 256);
  copy.deallocate(s, p, 100, 256);
  TestFixture::device::synchronize(s);
}

TYPED_TEST(resource_conformance, two_pools_are_not_equal) {
  const auto one = TypeParam::make();
  const auto other = TypeParam::make();
  EXPECT_FALSE(one == other);
  EXPECT_TRUE(one != other);
}

TYPED_TEST(resource_conformance, any_resource_compares_what_it_holds) {
  using Any = typename TestFixture::any;
  const auto pool = TypeParam::make();
  const Any a{pool};
  const Any b{pool};
  const Any other{TypeParam::make()};
  EXPECT_TRUE(a == b);
  EXPECT_TRUE(a == Any{a});
  EXPECT_FALSE(a == other);
}

TYPED_TEST(resource_conformance, is_of_the_device_it_was_made_for) {
  const int devices = support::device_count<typename TestFixture::device>();
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    EXPECT_EQ(TypeParam::make(typename TestFixture::device{ordinal}).device().ordinal, ordinal);
  }
}

TYPED_TEST(resource_conformance, leaves_the_current_device_alone) {
  using Device = typename TestFixture::device;
  const int last = support::device_count<Device>() - 1;
  for (const auto& [of, current] : {std::pair{0, last}, std::pair{last, 0}}) {
    const typename Device::current_scope scope{Device{current}};
    auto pool = std::optional{TypeParam::make(Device{of})};
    const auto s = TestFixture::drive::make_stream(support::stream_kind::non_blocking, Device{of});
    EXPECT_EQ(support::current_device<Device>().ordinal, current);
    void* const p = pool->allocate(s, 100, 256);
    void* const q = pool->allocate(s, 100, 4096);
    EXPECT_EQ(support::current_device<Device>().ordinal, current);
    EXPECT_THROW(static_cast<void>(pool->allocate(s, TestFixture::petabyte, 256)), holdfast::out_of_memory);
    EXPECT_EQ(support::current_device<Device>().ordinal, current);
    pool->deallocate(s, p, 100, 256);
    pool->deallocate(s, q, 100, 4096);
    EXPECT_EQ(support::current_device<Device>().ordinal, current);
    pool.reset();
    EXPECT_EQ(support::current_device<Device>().ordinal, current);
  }
}

TYPED_TEST(resource_conformance, memory_outlives_the_handle_it_came_from) {
  auto pool = std::optional{TypeParam::make()};
  auto copy = *pool;
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool->allocate(s, 5000, 256);
  pool.reset();
  EXPECT_TRUE(this->works(s, p, 5000));
  copy.deallocate(s, p, 5000, 256);
  TestFixture::device::synchronize(s);
}

TYPED_TEST(resource_conformance, the_last_handle_may_go_while_freed_memory_has_work_pending) {
  const auto s = TestFixture::drive::make_stream();
  auto* const kept = static_cast<std::byte*>(TestFixture::drive::allocate(5000));
  {
    auto pool = TypeParam::make();
    void* const p = pool.allocate(s, 5000, 256);
    TestFixture::device::fill(s, p, std::byte{0x77}, 5000);
    TestFixture::device::copy(s, kept, p, 5000);
    pool.deallocate(s, p, 5000, 256);
  }
  TestFixture::device::synchronize(s);
  EXPECT_EQ(TestFixture::drive::read(kept, 5000), std::vector<std::byte>(5000, std::byte{0x77}));
  TestFixture::drive::deallocate(kept);
}

}  // namespace
