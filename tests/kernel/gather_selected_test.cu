// gather_selected's behaviours on a GPU: those that gather_selected_test.cpp runs on the host device, and what only
// CUDA has.
#include "support/kernel_cuda_world.cuh"
#include "support/selected_cases.hpp"

namespace selected_test {

using kernel_test::cuda_world;
using kernel_test::must;

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, SelectedOf, every_subject<cuda_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Selected, ::testing::Types<cuda_world>);

class CudaSelected : public WorldTest<cuda_world> {
 protected:
  void SetUp() override {
    WorldTest<cuda_world>::SetUp();
    static_cast<void>(cudaGetLastError());
  }
};

TEST_F(CudaSelected, APendingErrorOfTheUsersSurvives) {
  // 5000 rows: several rounds of the scan that then stands in for cub's
  std::vector<std::int32_t> some;
  for (std::int32_t i = 0; i < 3000; ++i) some.push_back(i * 7 % 5003);
  const auto named = named_by(some, 5000);
  const pool_of<cuda_world, nvfp4_format> pool(world(), 5000, live_of(named));
  const uploaded<cuda_world, std::int32_t> indices(world(), some);
  const std::size_t bytes = workspace_bytes(world(), 5000, 2000);
  call<cuda_world, std::int32_t> it(world(), 5000, 3, 3000, 2000, 5);
  ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  EXPECT_EQ(workspace_bytes(world(), 5000, 2000), bytes);
  it.run(pool.given(), indices.data());
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  world().synchronize();
  it.expect(pool, named);

  it.poison_again();
  auto recorded = world().record([&] {
    ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
    it.run(pool.given(), indices.data());
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  });
  recorded.replay();
  it.expect(pool, named);
}

TEST_F(CudaSelected, AFailedLaunchLeavesNoError) {
  const pool_of<cuda_world, nvfp4_format> pool(world(), 7, {0, 6});
  const uploaded<cuda_world, std::int32_t> indices(world(), {6, 0});
  call<cuda_world, std::int32_t> it(world(), 7, 1, 2, 2, 1);
  world().in_broken_capture([&] {
    EXPECT_THROW(it.run(pool.given(), indices.data()), holdfast::device_error);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  });
}

TEST_F(CudaSelected, SomebodyElsesCaptureIsLeftAlone) {
  const pool_of<cuda_world, fp8_format> pool(world(), 7, {0, 6});
  const uploaded<cuda_world, std::int32_t> indices(world(), {6, 0});
  call<cuda_world, std::int32_t> it(world(), 7, 1, 2, 2, 1);
  cuda_world other;
  static_cast<void>(other.record([&] {
    static_cast<void>(workspace_bytes(world(), 7, 2));
    it.run(pool.given(), indices.data());
  }));
  world().synchronize();
  it.expect(pool, {6, 0});
}

TEST_F(CudaSelected, CallsRunOnTheStreamsDevice) {
  if (cuda_world::devices() < 2) GTEST_SKIP() << "one GPU only";
  const int current = cuda_world::current_device();
  auto other = cuda_world::on_device(1 - current);
  const pool_of<cuda_world, fp8_format> pool(other, 7, {0, 6});
  const uploaded<cuda_world, std::int32_t> indices(other, {6, 0});
  call<cuda_world, std::int32_t> it(other, 7, 1, 2, 2, 1);
  it.run(pool.given(), indices.data());
  EXPECT_EQ(cuda_world::current_device(), current);
  other.synchronize();
  it.expect(pool, {6, 0});
}

}  // namespace selected_test
