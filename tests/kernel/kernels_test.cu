// The kernels' behaviours on a GPU: those that kernels_test.cpp runs on the host device, and what only CUDA has.
#include "support/kernel_cases.hpp"
#include "support/kernel_cuda_world.cuh"

namespace kernel_test {

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, CopyOf, every_element<cuda_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Kernels, ::testing::Types<cuda_world>);

class CudaKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* why = cuda_world::unavailable()) GTEST_SKIP() << "no GPU: " << why;
    world_ = std::make_unique<cuda_world>();
    static_cast<void>(cudaGetLastError());
  }
  cuda_world& world() { return *world_; }

  using T = __nv_bfloat16;
  const triple shape_{3, 16, 512};
  const placed_view<T> placed_ = place<T>(shape_, packed(shape_));

 private:
  std::unique_ptr<cuda_world> world_;
};

TEST_F(CudaKernels, APendingErrorOfTheUsersSurvives) {
  copy_buffers<cuda_world, T> buffers{world(), placed_, placed_};
  buffers.fill(1, poisons[0]);
  ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  holdfast::pad_queries(world().stream(), buffers.in_view(), buffers.out_view());
  holdfast::unpad_output(world().stream(), buffers.in_view(), buffers.out_view());
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  world().synchronize();
  EXPECT_TRUE(buffers.copied());
}

TEST_F(CudaKernels, AFailedLaunchLeavesNoError) {
  copy_buffers<cuda_world, T> buffers{world(), placed_, placed_};
  buffers.fill(1, poisons[0]);
  world().in_broken_capture([&] {
    EXPECT_THROW(holdfast::pad_queries(world().stream(), buffers.in_view(), buffers.out_view()),
                 holdfast::device_error);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  });
}

TEST_F(CudaKernels, ZeroSizesLeaveNoError) {
  const auto nothing = holdfast::make_strided_view<T, 3>(nullptr, {0, 16, 512}, {8192, 512, 1});
  holdfast::pad_queries(world().stream(), nothing, nothing);
  holdfast::unpad_output(world().stream(), nothing, nothing);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  world().synchronize();
}

TEST_F(CudaKernels, TheNodeIsOneKernel) {
  copy_buffers<cuda_world, T> buffers{world(), placed_, placed_};
  cudaGraph_t graph = nullptr;
  must(cudaStreamBeginCapture(world().stream(), cudaStreamCaptureModeThreadLocal));
  holdfast::pad_queries(world().stream(), buffers.in_view(), buffers.out_view());
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

TEST_F(CudaKernels, MorePacketsThan31BitsCount) {
  // one byte a row and a byte a packet: the flat packet index itself passes 2^31
  constexpr std::int64_t rows = (std::int64_t{1} << 31) + 5000;
  const auto in = world().allocate_vast(static_cast<std::size_t>(rows + 1));
  const auto out = in == nullptr ? nullptr : world().allocate_vast(static_cast<std::size_t>(rows + 1));
  if (out == nullptr) GTEST_SKIP() << "fewer than 6 GiB are free";
  must(cudaMemsetAsync(in.get(), 0x55, static_cast<std::size_t>(rows + 1), world().stream()));
  must(cudaMemsetAsync(out.get(), 0xff, static_cast<std::size_t>(rows + 1), world().stream()));
  constexpr std::size_t end = 8192;
  byte_vector last = random_bytes(end, 3), now(end);
  world().upload(in.get() + rows + 1 - end, last.data(), end);
  holdfast::pad_queries(
      world().stream(),
      holdfast::view<const std::uint8_t, 3>(reinterpret_cast<const std::uint8_t*>(in.get()), rows, 1, 1),
      holdfast::view<std::uint8_t, 3>(reinterpret_cast<std::uint8_t*>(out.get()), rows, 1, 1));
  world().download(now.data(), out.get() + rows + 1 - end, end);
  last.back() = std::byte{0xff};  // one past the last row
  EXPECT_TRUE(same(now, last));
  world().download(now.data(), out.get(), end);
  EXPECT_TRUE(same(now, byte_vector(end, std::byte{0x55})));
}

}  // namespace kernel_test
