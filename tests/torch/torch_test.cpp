// torch_resource: memory of PyTorch's allocator, and never of one of its private pools.
#include <holdfast/resource/torch.hpp>
// first, and alone

#include <holdfast/resource/caching.hpp>

#include <c10/cuda/CUDACachingAllocator.h>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace torch_allocator = c10::cuda::CUDACachingAllocator;
using holdfast::cuda_device;

constexpr std::size_t MiB = std::size_t{1} << 20;

TEST(TorchResource, BeforeTorchIsInitialisedIsALogicError) {
  if (torch_allocator::get()->initialized()) GTEST_SKIP() << "another test of this process initialised it";
  EXPECT_THROW(holdfast::torch_resource{}, holdfast::logic_error);
}

class torch_resource : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      static_cast<void>(cudaGetLastError());
      GTEST_SKIP() << "needs an NVIDIA GPU";
    }
    torch_allocator::init(count);
    ASSERT_EQ(cudaFree(nullptr), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

  /// The private pool that holds `p`; {0, 0} for ordinary memory.
  static c10::MempoolId_t pool_of(const void* p) {
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    for (const auto& segment : torch_allocator::snapshot().segments) {
      if (at >= segment.address && at < segment.address + segment.total_size) return segment.owner_private_pool_id;
    }
    ADD_FAILURE() << "torch does not know this memory";
    return {};
  }

  /// Allocates while `routed` says which streams go to a private pool; expects torch to route, and the resource not to be.
  void expect_ordinary_memory(const std::function<bool(cudaStream_t)>& routed, bool on_the_routed_stream) {
    static c10::CaptureId_t next = 1000;
    const c10::MempoolId_t pool{0, ++next};
    holdfast::torch_resource memory;
    torch_allocator::beginAllocateToPool(0, pool, routed);
    void* const theirs = torch_allocator::raw_alloc_with_stream(3 * MiB, stream_);
    const cudaStream_t ours = on_the_routed_stream ? stream_ : nullptr;
    void* const p = memory.allocate(ours, 3 * MiB, 256);
    torch_allocator::endAllocateToPool(0, pool);
    EXPECT_EQ(pool_of(theirs), pool) << "the test's own routing";
    EXPECT_EQ(pool_of(p), (c10::MempoolId_t{0, 0}));
    torch_allocator::raw_delete(theirs);
    torch_allocator::releasePool(0, pool);
    memory.deallocate(ours, p, 3 * MiB, 256);
  }

  cudaStream_t stream_ = nullptr;
};

TEST_F(torch_resource, CountsInTorchsFigures) {
  const auto allocated = [] {
    return torch_allocator::getDeviceStats(0)
        .allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
        .current;
  };
  const auto before = allocated();
  holdfast::torch_resource memory;
  void* const p = memory.allocate(stream_, 5 * MiB, 256);
  EXPECT_EQ(allocated() - before, static_cast<std::int64_t>(5 * MiB));
  EXPECT_GE(memory.held_bytes(), 5 * MiB);
  memory.deallocate(stream_, p, 5 * MiB, 256);
  EXPECT_EQ(allocated(), before);
}

TEST_F(torch_resource, IsAlignedAsAsked) {
  holdfast::torch_resource memory;
  for (const std::size_t alignment : {1u, 256u, 512u, 1024u, 4096u}) {
    void* const p = memory.allocate(stream_, 100, alignment);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % alignment, 0u);
    memory.deallocate(stream_, p, 100, alignment);
  }
}

// torch.cuda.graph routes the streams that take part in the capture.
TEST_F(torch_resource, IsNotOfTheGraphsPoolThatAStreamIsRoutedTo) {
  expect_ordinary_memory([this](cudaStream_t s) { return s == stream_; }, false);
}

// torch.cuda.use_mem_pool and inductor route all streams of a thread.
TEST_F(torch_resource, IsNotOfThePoolThatItsThreadIsRoutedTo) {
  expect_ordinary_memory(
      [self = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == self; }, true);
}

TEST_F(torch_resource, IsMadeInsideSomebodysCapture) {
  holdfast::torch_resource memory;
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, mode), cudaSuccess);
    void* const p = memory.allocate(other, 300 * MiB, 256);  // more than is cached: a cudaMalloc
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    memory.deallocate(other, p, 300 * MiB, 256);
    torch_allocator::emptyCache();
  }
  ASSERT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

TEST_F(torch_resource, OnACapturingStreamIsALogicError) {
  holdfast::torch_resource memory;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_THROW(static_cast<void>(memory.allocate(stream_, MiB, 256)), holdfast::logic_error);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(torch_resource, OutOfMemoryEmptiesTheCacheAndNamesWhatWasAsked) {
  holdfast::torch_resource memory;
  memory.deallocate(stream_, memory.allocate(stream_, 64 * MiB, 256), 64 * MiB, 256);
  const std::size_t too_much = std::size_t{1} << 45;
  try {
    static_cast<void>(memory.allocate(stream_, too_much, 256));
    FAIL() << "nobody has that much";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(shortage.requested(), too_much);
    EXPECT_NE(std::string{shortage.what()}.find("torch_resource"), std::string::npos);
    EXPECT_GT(shortage.free(), 0u);
  }
  EXPECT_LT(memory.held_bytes(), 64 * MiB);  // the cache was emptied
  static_cast<void>(cudaGetLastError());
}

TEST_F(torch_resource, OutOfMemoryInSomebodysCaptureLeavesItAlone) {
  holdfast::torch_resource memory;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  torch_allocator::beginAllocateToPool(0, {0, 900}, [this](cudaStream_t s) { return s == stream_; });
  cudaStream_t other = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_THROW(static_cast<void>(memory.allocate(other, std::size_t{1} << 45, 256)), holdfast::out_of_memory);
  torch_allocator::endAllocateToPool(0, {0, 900});
  torch_allocator::releasePool(0, {0, 900});
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(other), cudaSuccess);
  static_cast<void>(cudaGetLastError());
}

TEST_F(torch_resource, ManyThreadsAllocateAndRelease) {
  holdfast::torch_resource memory;
  std::atomic<int> misaligned{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&memory, &misaligned, t] {
      holdfast::torch_resource mine = memory;
      for (std::size_t i = 0; i < 200; ++i) {
        const std::size_t bytes = 512 * (i % 7 + 1) * (static_cast<std::size_t>(t) + 1);
        void* const p = mine.allocate(cudaStream_t{}, bytes, 256);
        if (p == nullptr || reinterpret_cast<std::uintptr_t>(p) % 256 != 0) ++misaligned;
        mine.deallocate(cudaStream_t{}, p, bytes, 256);
      }
    });
  }
  for (std::thread& one : threads) one.join();
  EXPECT_EQ(misaligned, 0);
}

TEST_F(torch_resource, IsAnUpstreamOfTheCache) {
  holdfast::caching_resource fast{holdfast::torch_resource{}};
  void* const first = fast.allocate(stream_, MiB, 256);
  fast.deallocate(stream_, first, MiB, 256);
  void* const second = fast.allocate(stream_, MiB, 256);
  EXPECT_EQ(first, second);
  fast.deallocate(stream_, second, MiB, 256);
}

}  // namespace
