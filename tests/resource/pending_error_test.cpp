// CUDA's last error belongs to the user: our calls that succeed leave it alone, those that fail clear what they caused.
#include "support/resources.hpp"

#include <holdfast/error.hpp>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <concepts>
#include <cstddef>

namespace {

template <class Entry>
class pending_error : public support::resource_test<Entry> {};
using cuda_resources = ::testing::Types<support::cuda_malloc, support::cuda_async, support::cuda_cub,
                                        support::cuda_foreign, support::cuda_mr>;
TYPED_TEST_SUITE(pending_error, cuda_resources, support::resource_names);

TYPED_TEST(pending_error, survives_calls_that_succeed) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  for (int i = 0; i < 3; ++i) {
    void* const p = pool.allocate(s, 1000, 256);
    ASSERT_NE(p, nullptr);
    void* const q = pool.allocate(s, 1000, 4096);
    pool.deallocate(s, p, 1000, 256);
    pool.deallocate(s, q, 1000, 4096);
    if constexpr (requires { pool.trim(); }) pool.trim();
  }
  static_cast<void>(TypeParam::make());
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

TYPED_TEST(pending_error, is_not_left_by_calls_that_fail) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  EXPECT_THROW(static_cast<void>(pool.allocate(s, TestFixture::petabyte, 256)), holdfast::out_of_memory);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  int local = 0;
  if constexpr (!std::same_as<decltype(pool), typename TestFixture::any>) {
    pool.deallocate(s, &local, sizeof local, 4);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
}

}  // namespace
