// Timing of device work against a ceiling measured in the same process, interleaved with it.
//
//   const auto turns = bench::rotation(bytes);                                 // so many buffers that none stays in L2
//   auto contest = bench::contest::of(stream, bytes, turns, {mine, ceiling, empty});  // each a function of the turn
//   for (auto _ : state) state.SetIterationTime(contest.round() * 1e-6);
//   bench::report(state, contest, bytes);                                      // the fraction of the ceiling, ...
//
// The ceiling of work that reads r and writes w bytes is a device-to-device cudaMemcpyAsync of (r + w) / 2 bytes. Work
// below 10 MB says little in bytes a second: there, compare microseconds a graph node, less an empty kernel's node.
#pragma once

#include "host.hpp"

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bench {

inline constexpr std::size_t small_work_bytes = 10'000'000;

inline std::size_t l2_bytes() {
  int bytes = 0, device = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device));
  return static_cast<std::size_t>(bytes);
}

/// Device memory.
class buffer {
 public:
  explicit buffer(std::size_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, std::max<std::size_t>(bytes, 1)), "allocating a benchmark's buffer");
    memory_.reset(static_cast<std::byte*>(p), [](std::byte* q) { static_cast<void>(cudaFree(q)); });
  }
  [[nodiscard]] std::byte* data() const { return memory_.get(); }

 private:
  std::shared_ptr<std::byte> memory_;
};

/// `count` buffers of `bytes` bytes, one after the other.
class buffers {
 public:
  buffers(std::size_t count, std::size_t bytes) : stride_((bytes + 511) / 512 * 512), memory_(count * stride_) {}
  [[nodiscard]] std::byte* operator[](std::size_t i) const { return memory_.data() + i * stride_; }
  [[nodiscard]] std::byte* data() const { return memory_.data(); }

 private:
  std::size_t stride_;
  buffer memory_;
};

/// How many sets of buffers to go through so that one turn touches at least three times the L2.
[[nodiscard]] inline std::size_t rotation(std::size_t bytes_a_call) {
  return std::max<std::size_t>(2, (3 * l2_bytes() + bytes_a_call - 1) / bytes_a_call);
}

/// Microseconds between two events around `work`.
class stopwatch {
 public:
  stopwatch() {
    check(cudaEventCreate(&begin_));
    check(cudaEventCreate(&end_));
  }
  ~stopwatch() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
  }
  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;

  template <class Work>
  double us(cudaStream_t stream, const Work& work) {
    check(cudaEventRecord(begin_, stream));
    work();
    check(cudaEventRecord(end_, stream));
    check(cudaEventSynchronize(end_), "timed work");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_));
    return static_cast<double>(ms) * 1e3;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// One call of something, on the buffers of a turn.
using call = std::function<void(std::size_t turn)>;

/// Calls recorded once into a graph.
class recorded {
 public:
  recorded(cudaStream_t stream, std::size_t calls, const call& work) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (std::size_t i = 0; i < calls; ++i) work(i);
    check(cudaStreamEndCapture(stream, &graph), "capturing a benchmark's graph");
    cudaGraphExec_t exec = nullptr;
    check(cudaGraphInstantiate(&exec, graph, 0));
    check(cudaGraphDestroy(graph));
    exec_.reset(exec, cudaGraphExecDestroy);
    check(cudaGraphUpload(exec, stream));
  }
  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(exec_.get(), stream)); }

 private:
  std::shared_ptr<CUgraphExec_st> exec_;
};

/// Times several kinds of calls in turn, round after round, so that all see the same clocks and temperatures. The first
/// round is thrown away.
class contest {
 public:
  /// Enough calls between two events that what surrounds them disappears. `bytes` are read and written by a call: where
  /// the host could not launch as fast as the device works, the calls are a graph.
  [[nodiscard]] static contest of(cudaStream_t stream, std::size_t bytes, std::size_t turns,
                                  const std::vector<call>& kinds) {
    constexpr std::size_t bytes_a_us = 4'000'000, eager_us = 50;
    const std::size_t least_us = bytes < small_work_bytes ? 0 : 2000, us_a_turn = turns * bytes / bytes_a_us + 1;
    const std::size_t calls = std::max<std::size_t>({1, (49 + turns) / turns, least_us / us_a_turn}) * turns;
    return bytes < eager_us * bytes_a_us ? of_graphs(stream, calls, turns, kinds)
                                         : contest(stream, calls, turns, kinds);
  }

  /// Eager: `calls` of each kind between two events.
  contest(cudaStream_t stream, std::size_t calls, std::size_t turns, const std::vector<call>& kinds)
      : stream_(stream), calls_(calls), us_(kinds.size()) {
    for (std::size_t kind = 0; kind < kinds.size(); ++kind)
      runs_.emplace_back([work = kinds[kind], calls, turns, turn = std::size_t{0}]() mutable {
        for (std::size_t i = 0; i < calls; ++i) work(turn++ % turns);
      });
  }

  /// As graphs of `calls` nodes.
  [[nodiscard]] static contest of_graphs(cudaStream_t stream, std::size_t calls, std::size_t turns,
                                         const std::vector<call>& kinds) {
    contest made(stream, calls, turns, {});
    made.us_.resize(kinds.size());
    for (const call& kind : kinds) {
      const recorded graph(stream, calls, [&](std::size_t i) { kind(i % turns); });
      made.runs_.emplace_back([graph, stream] { graph.launch(stream); });
    }
    return made;
  }

  /// Runs every kind once; microseconds a call of the first.
  double round() {
    for (std::size_t kind = 0; kind < runs_.size(); ++kind) {
      const double us = stopwatch_->us(stream_, runs_[kind]) / static_cast<double>(calls_);
      if (warm_) us_[kind].push_back(us);
    }
    if (!std::exchange(warm_, true)) return round();
    return us_[0].back();
  }

  /// Microseconds a call.
  [[nodiscard]] double median_us(std::size_t kind) const { return median(us_[kind]); }

 private:
  cudaStream_t stream_;
  std::size_t calls_;
  std::vector<std::function<void()>> runs_;
  std::vector<std::vector<double>> us_;
  std::shared_ptr<stopwatch> stopwatch_ = std::make_shared<stopwatch>();
  bool warm_ = false;
};

__global__ static void empty_kernel() {}

/// The counters of work that moved `bytes`, from a contest of {the work, its ceiling, an empty kernel}.
inline void report(benchmark::State& state, const contest& from, std::size_t bytes) {
  const double us = from.median_us(0), ceiling_us = from.median_us(1), empty_us = from.median_us(2);
  state.counters["bytes"] = static_cast<double>(bytes);
  state.counters["us"] = us;
  state.counters["ceiling_us"] = ceiling_us;
  if (bytes < small_work_bytes) {
    state.counters["us_per_node"] = us - empty_us;
    state.counters["ceiling_us_per_node"] = ceiling_us - empty_us;
    state.counters["empty_us"] = empty_us;
  } else {
    state.counters["bytes/s"] = benchmark::Counter(static_cast<double>(bytes) / (us * 1e-6));
    state.counters["fraction_of_ceiling"] = ceiling_us / us;
  }
}

__global__ static void fill_random_kernel(std::uint64_t* words, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    std::uint64_t x = (i + seed) * 0x9e3779b97f4a7c15;  // the splitmix64 generator
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    words[i] = x ^ (x >> 31);
  }
}

/// Random bytes (a constant would compress, and flatter the memory system).
inline void fill_random(cudaStream_t stream, std::byte* data, std::size_t bytes, std::uint64_t seed = 1) {
  fill_random_kernel<<<1024, 256, 0, stream>>>(reinterpret_cast<std::uint64_t*>(data), bytes / 8, seed);
  check(cudaGetLastError(), "filling a benchmark's buffer");
}

/// Runs the registered benchmarks and says which GPU they ran on; says why it runs none where there is no GPU.
inline int run(int argc, char** argv) {
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, 0); error != cudaSuccess) {
    std::fprintf(stderr, "skipped: needs an NVIDIA GPU: %s\n", cudaGetErrorString(error));
    return EXIT_SUCCESS;
  }
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("gpu_l2_bytes", std::to_string(properties.l2CacheSize));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return EXIT_FAILURE;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return EXIT_SUCCESS;
}

}  // namespace bench
