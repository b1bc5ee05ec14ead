// What cub_caching_resource does beyond the conformance suite.
#include "support/resources.hpp"

#include <holdfast/resource/cub_caching.hpp>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>

namespace {

using holdfast::cuda_device;

constexpr std::size_t mebibyte = std::size_t{1} << 20;

class cub_caching : public support::device_test<cuda_device> {};

TEST_F(cub_caching, reuses_a_freed_block_on_its_stream) {
  holdfast::cub_caching_resource pool;
  const auto s = drive::make_stream();
  void* const p = pool.allocate(s, 3 * mebibyte, 256);
  EXPECT_EQ(pool.used_bytes(), 4 * mebibyte);
  pool.deallocate(s, p, 3 * mebibyte, 256);
  EXPECT_EQ(pool.used_bytes(), 0U);
  EXPECT_EQ(pool.cached_bytes(), 4 * mebibyte);
  EXPECT_EQ(pool.allocate(s, 4 * mebibyte, 256), p);
  pool.deallocate(s, p, 4 * mebibyte, 256);
}

TEST_F(cub_caching, allocates_afresh_while_another_streams_block_is_busy) {
  holdfast::cub_caching_resource pool;
  const auto s = drive::make_stream();
  const auto t = drive::make_stream();
  void* const p = pool.allocate(s, 256 * mebibyte, 256);
  for (int i = 0; i < 64; ++i) cuda_device::fill(s, p, std::byte{1}, 256 * mebibyte);
  pool.deallocate(s, p, 256 * mebibyte, 256);
  void* const q = pool.allocate(t, 256 * mebibyte, 256);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_NE(p, q) << "or the fills were done by then";
  EXPECT_EQ(pool.cached_bytes(), 256 * mebibyte);
  EXPECT_EQ(pool.used_bytes(), 256 * mebibyte);
  pool.deallocate(t, q, 256 * mebibyte, 256);
  drive::synchronize(s);
}

TEST_F(cub_caching, trims_all_that_is_cached_as_the_device_counts) {
  holdfast::cub_caching_resource pool;
  const auto s = drive::make_stream();
  void* const kept = pool.allocate(s, mebibyte, 256);
  void* const p = pool.allocate(s, 128 * mebibyte, 256);
  const std::size_t free = cuda_device{}.memory().free;
  for (int i = 0; i < 16; ++i) cuda_device::fill(s, p, std::byte{1}, 128 * mebibyte);
  pool.deallocate(s, p, 128 * mebibyte, 256);
  pool.trim();
  EXPECT_EQ(pool.cached_bytes(), 0U);
  EXPECT_EQ(pool.used_bytes(), mebibyte);
  EXPECT_GE(cuda_device{}.memory().free, free + 100 * mebibyte);
  cuda_device::fill(s, kept, std::byte{1}, mebibyte);
  drive::synchronize(s);
  pool.deallocate(s, kept, mebibyte, 256);
}

TEST_F(cub_caching, caches_nothing_beyond_its_largest_bin) {
  holdfast::cub_caching_resource pool{cuda_device{}, {.max_bin = 20}};
  const auto s = drive::make_stream();
  void* const p = pool.allocate(s, mebibyte + 1, 256);
  pool.deallocate(s, p, mebibyte + 1, 256);
  EXPECT_EQ(pool.cached_bytes(), 0U);
  EXPECT_EQ(pool.used_bytes(), 0U);
}

TEST_F(cub_caching, caches_no_more_than_its_limit) {
  holdfast::cub_caching_resource pool{cuda_device{}, {.max_cached_bytes = 3 * mebibyte}};
  const auto s = drive::make_stream();
  void* const a = pool.allocate(s, 2 * mebibyte, 256);
  void* const b = pool.allocate(s, 2 * mebibyte, 256);
  pool.deallocate(s, a, 2 * mebibyte, 256);
  pool.deallocate(s, b, 2 * mebibyte, 256);
  EXPECT_EQ(pool.cached_bytes(), 2 * mebibyte);
}

}  // namespace
