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
#include <utility>
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
    ASSERT_EQ(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(other_), cudaSuccess);
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

  /// A private pool that `routed` streams go to, while it lives.
  class routing {
   public:
    explicit routing(std::function<bool(cudaStream_t)> routed) {
      torch_allocator::beginAllocateToPool(0, pool(), std::move(routed));
    }
    ~routing() {
      end();
      torch_allocator::releasePool(0, pool());
    }
    routing(const routing&) = delete;
    routing& operator=(const routing&) = delete;
    void end() {
      if (std::exchange(on_, false)) torch_allocator::endAllocateToPool(0, pool());
    }
    [[nodiscard]] c10::MempoolId_t pool() const { return {0, number_}; }

   private:
    static inline c10::CaptureId_t numbers = 1000;
    c10::CaptureId_t number_ = ++numbers;
    bool on_ = true;
  };

  /// Allocates while `routed` says which streams go to a private pool; expects torch to route, and the resource not to be.
  void expect_ordinary_memory(std::function<bool(cudaStream_t)> routed) {
    holdfast::torch_resource memory;
    routing to{std::move(routed)};
    void* const theirs = torch_allocator::raw_alloc_with_stream(3 * MiB, stream_);
    void* const p = memory.allocate(other_, 3 * MiB, 256);
    to.end();
    EXPECT_EQ(pool_of(theirs), to.pool()) << "the test's own routing";
    EXPECT_EQ(pool_of(p), (c10::MempoolId_t{0, 0}));
    torch_allocator::raw_delete(theirs);
    memory.deallocate(other_, p, 3 * MiB, 256);
  }

  cudaStream_t other_ = nullptr;
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
  expect_ordinary_memory([this](cudaStream_t s) { return s == stream_; });
}

// torch.cuda.use_mem_pool and inductor route all streams of a thread.
TEST_F(torch_resource, IsNotOfThePoolThatItsThreadIsRoutedTo) {
  expect_ordinary_memory(
      [self = std::this_thread::get_id()](cudaStream_t) { return std::this_thread::get_id() == self; });
}

TEST_F(torch_resource, IsMadeInsideSomebodysCapture) {
  holdfast::torch_resource memory;
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  for (const cudaStream_t captured : {stream_, blocking}) {
    for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
      ASSERT_EQ(cudaStreamBeginCapture(captured, mode), cudaSuccess);
      void* p = nullptr;
      EXPECT_NO_THROW(p = memory.allocate(other_, 300 * MiB, 256));  // more than is cached: a cudaMalloc
      cudaGraph_t graph = nullptr;
      EXPECT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess);
      EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
      memory.deallocate(other_, p, 300 * MiB, 256);
      torch_allocator::emptyCache();
    }
  }
  ASSERT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
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

TEST_F(torch_resource, OutOfMemoryInSomebodysCaptureFreesNothing) {
  holdfast::torch_resource memory;
  memory.deallocate(other_, memory.allocate(other_, 64 * MiB, 256), 64 * MiB, 256);
  const auto held = memory.held_bytes();
  {
    const routing to{[this](cudaStream_t s) { return s == stream_; }};
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_THROW(static_cast<void>(memory.allocate(other_, std::size_t{1} << 45, 256)), holdfast::out_of_memory);
    EXPECT_EQ(memory.held_bytes(), held);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
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
