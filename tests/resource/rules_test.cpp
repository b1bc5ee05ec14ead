// The rules of the library's own resources: over-alignment by allocating more, over an upstream that does the least.
#include "support/devices.hpp"

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

struct call {
  std::uintptr_t p;
  std::size_t bytes;
  std::size_t alignment;
  friend bool operator==(const call&, const call&) = default;
};

struct book {
  std::vector<call> allocated;
  std::vector<call> freed;
};

/// Gives addresses that are odd multiples of 256 (nobody touches them).
struct odd_impl {
  using device_type = holdfast::host_device;
  static constexpr const char* name = "odd_resource";
  static constexpr std::size_t max_alignment = 256;

  explicit odd_impl(book* b) : calls(b) {}

  void* allocate(holdfast::host::stream_ref, std::size_t bytes, std::size_t alignment) {
    calls->allocated.push_back({next, bytes, alignment});
    const std::uintptr_t p = next;
    next += 512 * (1 + (bytes + 511) / 512);
    return reinterpret_cast<void*>(p);
  }
  void deallocate(holdfast::host::stream_ref, void* p, std::size_t bytes, std::size_t alignment) {
    calls->freed.push_back({reinterpret_cast<std::uintptr_t>(p), bytes, alignment});
  }

  holdfast::host_device device;
  book* calls;
  std::uintptr_t next = 256 * 0x100001;
};

struct odd_resource : holdfast::detail::resource_handle<odd_impl> {
  explicit odd_resource(book& b) : resource_handle(std::in_place, &b) {}
};
static_assert(holdfast::memory_resource<odd_resource>);
static_assert(holdfast::detail::applies_resource_rules<odd_resource>);

class resource_rules : public ::testing::Test {
 protected:
  book calls;
  odd_resource pool{calls};
  holdfast::host::stream s;
};

TEST_F(resource_rules, aligns_by_allocating_more_and_frees_the_same) {
  for (std::size_t alignment = 512; alignment <= 4096; alignment *= 2) {
    void* const p = pool.allocate(s, 100, alignment);
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    const call up = calls.allocated.back();
    EXPECT_EQ(at % alignment, 0U);
    EXPECT_GE(at, up.p);
    EXPECT_LE(at + 100, up.p + up.bytes);
    pool.deallocate(s, p, 100, alignment);
    EXPECT_EQ(calls.freed.back(), up);
  }
}

TEST_F(resource_rules, asks_for_little_more_than_asked) {
  void* const p = pool.allocate(s, 32, 32);
  EXPECT_GE(calls.allocated.back().bytes, 32U);
  EXPECT_LE(calls.allocated.back().bytes, 32U + 256U);
  pool.deallocate(s, p, 32, 32);
  EXPECT_EQ(calls.freed, calls.allocated);
}

TEST_F(resource_rules, ignores_over_aligned_memory_that_is_not_its_own) {
  void* const p = pool.allocate(s, 100, 1024);
  pool.deallocate(s, static_cast<std::byte*>(p) + 1024, 100, 1024);
  EXPECT_TRUE(calls.freed.empty());
  pool.deallocate(s, p, 100, 1024);
  pool.deallocate(s, p, 100, 1024);
  EXPECT_EQ(calls.freed.size(), 1U);
}

TEST_F(resource_rules, asks_nobody_for_sizes_that_overflow) {
  for (std::size_t k = 0; k <= 600; ++k) {
    for (std::size_t alignment = 1; alignment != 0; alignment *= 2) {
      EXPECT_THROW(static_cast<void>(pool.allocate(s, SIZE_MAX - k, alignment)), holdfast::out_of_memory);
    }
  }
  EXPECT_TRUE(calls.allocated.empty());
}

}  // namespace
