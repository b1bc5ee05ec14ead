// gather_rows' behaviours on a GPU: those that gather_rows_test.cpp runs on the host device, and what only CUDA has.
#include "support/gather_cases.hpp"
#include "support/kernel_cuda_world.cuh"

namespace gather_test {

using kernel_test::cuda_world;
using kernel_test::must;

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, GatherOf, every_subject<cuda_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, GatherRows, ::testing::Types<cuda_world>);

class CudaGatherRows : public WorldTest<cuda_world> {
 protected:
  void SetUp() override {
    WorldTest<cuda_world>::SetUp();
    static_cast<void>(cudaGetLastError());
  }
};

TEST_F(CudaGatherRows, TheNodeIsOneKernel) {
  const pool_of<cuda_world, nvfp4_format> pool(world(), 7);
  const device_array<cuda_world, std::int32_t> indices(world(), {6, 0});
  output<cuda_world> out(world(), 2, 128, poisons[0]);
  cudaGraph_t graph = nullptr;
  must(cudaStreamBeginCapture(world().stream(), cudaStreamCaptureModeThreadLocal));
  holdfast::gather_rows(world().stream(), pool.given(), flat<std::int32_t>(indices.data(), 2), out.view(),
                        {.tail_rows = 128});
  must(cudaStreamEndCapture(world().stream(), &graph));
  std::size_t count = 1;
  cudaGraphNode_t node = nullptr;
  must(cudaGraphGetNodes(graph, &node, &count));
  ASSERT_EQ(count, 1u);
  cudaGraphNodeType type{};
  must(cudaGraphNodeGetType(node, &type));
  EXPECT_EQ(type, cudaGraphNodeTypeKernel);
  must(cudaGraphDestroy(graph));
}

TEST_F(CudaGatherRows, OnlyProgrammaticOnesOverlapTheKernelBefore) {
  const pool_of<cuda_world, nvfp4_format> pool(world(), 7);
  const device_array<cuda_world, std::int32_t> indices(world(), {6, 0});
  output<cuda_world> out(world(), 2, 0, poisons[0]);
  for (const bool programmatic : {false, true}) {
    cudaGraph_t graph = nullptr;
    must(cudaStreamBeginCapture(world().stream(), cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 2; ++i)
      holdfast::gather_rows(world().stream(), pool.given(), flat<std::int32_t>(indices.data(), 2), out.view(),
                            {.programmatic = programmatic});
    must(cudaStreamEndCapture(world().stream(), &graph));
    std::size_t count = 1;
    cudaGraphNode_t from = nullptr, to = nullptr;
    cudaGraphEdgeData edge{};
    must(cudaGraphGetEdges(graph, &from, &to, &edge, &count));
    ASSERT_EQ(count, 1u);
    EXPECT_EQ(edge.type, programmatic ? cudaGraphDependencyTypeProgrammatic : cudaGraphDependencyTypeDefault);
    must(cudaGraphDestroy(graph));
  }
}

TEST_F(CudaGatherRows, APendingErrorOfTheUsersSurvives) {
  const pool_of<cuda_world, nvfp4_format> pool(world(), 7);
  const device_array<cuda_world, std::int32_t> indices(world(), {6, 0});
  output<cuda_world> out(world(), 2, 0, poisons[0]);
  ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  holdfast::gather_rows(world().stream(), pool.given(), flat<std::int32_t>(indices.data(), 2), out.view());
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  world().synchronize();
  EXPECT_TRUE(out.holds(pool, {6, 0}));
}

TEST_F(CudaGatherRows, AFailedLaunchLeavesNoError) {
  const pool_of<cuda_world, nvfp4_format> pool(world(), 7);
  const device_array<cuda_world, std::int32_t> indices(world(), {6, 0});
  output<cuda_world> out(world(), 2, 0, poisons[0]);
  world().in_broken_capture([&] {
    EXPECT_THROW(
        holdfast::gather_rows(world().stream(), pool.given(), flat<std::int32_t>(indices.data(), 2), out.view()),
        holdfast::device_error);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  });
}

TEST_F(CudaGatherRows, StagedOnesBeyondOneWave) { expect_rows_beyond_one_wave(world()); }

/// Device casts of every fp32 with these upper bits, one after the other.
__global__ void cast_kernel(std::uint32_t first, std::uint8_t* to) {
  const std::uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  const float value = __uint_as_float(first + at);
  to[at] = static_cast<std::uint8_t>(holdfast::detail::e4m3_of_floats(value, 0, 0, 0));
}

TEST_F(CudaGatherRows, CastsAgreeWithTheHostTwin) {
  // 2^16 neighbours from each of 2048 places: all exponents and signs, and every boundary of rounding and of range
  constexpr std::uint32_t count = 1 << 16;
  const auto memory = world().allocate(count);
  std::vector<std::uint8_t> now(count);
  std::mt19937 random(3);
  for (std::uint32_t i = 0; i < 2048; ++i) {
    const std::uint32_t first =
        (i << 21) + (i % 2 == 0 ? 0 : static_cast<std::uint32_t>(random() & 0x1f0000)) - count / 2;
    if ((first & 0x7fffffff) > 0x7f800000 && first >> 31 == 1) continue;  // negative NaN: no operation here makes one
    cast_kernel<<<count / 256, 256, 0, world().stream()>>>(first, reinterpret_cast<std::uint8_t*>(memory.get()));
    must(cudaGetLastError());
    world().download(now.data(), memory.get(), count);
    for (std::uint32_t k = 0; k < count; ++k) {
      if (((first + k) & 0x7fffffff) > 0x7f800000 && (first + k) >> 31 == 1) continue;
      ASSERT_EQ(now[k], holdfast::detail::e4m3_of_bits(first + k)) << std::hex << first + k;
    }
  }
}

}  // namespace gather_test
