// What async_resource does beyond the conformance suite.
#include "support/resources.hpp"

#include <holdfast/resource/async.hpp>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

namespace {

using holdfast::cuda_device;

constexpr std::size_t mebibyte = std::size_t{1} << 20;

class async_resource : public support::device_test<cuda_device> {};

TEST_F(async_resource, keeps_freed_memory_by_default) {
  holdfast::async_resource pool;
  const auto s = drive::make_stream();
  void* const p = pool.allocate(s, 64 * mebibyte, 256);
  EXPECT_GE(pool.used_bytes(), 64 * mebibyte);
  pool.deallocate(s, p, 64 * mebibyte, 256);
  drive::synchronize(s);
  EXPECT_EQ(pool.used_bytes(), 0U);
  EXPECT_GE(pool.reserved_bytes(), 64 * mebibyte);
}

TEST_F(async_resource, gives_memory_back_at_a_synchronisation_beyond_its_threshold) {
  holdfast::async_resource pool{cuda_device{}, {.release_threshold = 0}};
  const auto s = drive::make_stream();
  void* const p = pool.allocate(s, 64 * mebibyte, 256);
  pool.deallocate(s, p, 64 * mebibyte, 256);
  drive::synchronize(s);
  EXPECT_EQ(pool.reserved_bytes(), 0U);
}

TEST_F(async_resource, trims_what_is_free_and_nothing_else) {
  holdfast::async_resource pool;
  const auto s = drive::make_stream();
  void* const kept = pool.allocate(s, 64 * mebibyte, 256);
  void* const freed = pool.allocate(s, 64 * mebibyte, 256);
  pool.deallocate(s, freed, 64 * mebibyte, 256);
  drive::synchronize(s);
  pool.trim();
  EXPECT_GE(pool.reserved_bytes(), 64 * mebibyte);
  EXPECT_LT(pool.reserved_bytes(), 128 * mebibyte);
  EXPECT_GE(pool.used_bytes(), 64 * mebibyte);
  pool.deallocate(s, kept, 64 * mebibyte, 256);
  drive::synchronize(s);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0U);
}

TEST_F(async_resource, trims_down_to_what_it_is_told_to_keep) {
  holdfast::async_resource pool;
  const auto s = drive::make_stream();
  void* const p = pool.allocate(s, 64 * mebibyte, 256);
  pool.deallocate(s, p, 64 * mebibyte, 256);
  drive::synchronize(s);
  pool.trim(64 * mebibyte);
  EXPECT_GE(pool.reserved_bytes(), 64 * mebibyte);
}

TEST_F(async_resource, leaves_the_default_pool_alone) {
  cudaMemPool_t standard = nullptr;
  ASSERT_EQ(cudaDeviceGetDefaultMemPool(&standard, 0), cudaSuccess);
  const auto used = [&] {
    std::uint64_t bytes = 0;
    EXPECT_EQ(cudaMemPoolGetAttribute(standard, cudaMemPoolAttrUsedMemCurrent, &bytes), cudaSuccess);
    return bytes;
  };
  std::uint64_t threshold = 0;
  ASSERT_EQ(cudaMemPoolGetAttribute(standard, cudaMemPoolAttrReleaseThreshold, &threshold), cudaSuccess);
  const std::uint64_t before = used();

  holdfast::async_resource pool;
  const auto s = drive::make_stream();
  void* const p = pool.allocate(s, 64 * mebibyte, 256);
  EXPECT_EQ(used(), before);
  std::uint64_t threshold_now = 0;
  ASSERT_EQ(cudaMemPoolGetAttribute(standard, cudaMemPoolAttrReleaseThreshold, &threshold_now), cudaSuccess);
  EXPECT_EQ(threshold_now, threshold);
  pool.deallocate(s, p, 64 * mebibyte, 256);
}

TEST_F(async_resource, refuses_a_device_that_is_not_there) {
  EXPECT_THROW(holdfast::async_resource(cuda_device{support::device_count<cuda_device>()}), holdfast::device_error);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

}  // namespace
