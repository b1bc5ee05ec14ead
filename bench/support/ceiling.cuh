// Timing of device work against a ceiling measured in the same process, interleaved with it.
//
//   const auto turns = bench::rotation(bytes);                    // so many buffers that none stays in L2
//   bench::compete(state, stream, bytes, turns, bench::copy_rate(stream), mine, ceiling);       // functions of the turn
//
//   fraction_of_ceiling   time of the ceiling, which moves as many bytes / time of the call
//   us_per_node           below 10 MB: one node of a graph of such calls, less an empty kernel's node
//   times_the_floor       below 10 MB: one node / the greater of an empty kernel's node and of bytes at the ceiling's rate
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

/// Reads `packets` times 16 bytes, and does nothing else: 8 loads in flight a thread.
__global__ static void __launch_bounds__(256) read_kernel(const uint4* from, std::size_t packets, unsigned* never) {
  constexpr unsigned loads = 8;
  const std::size_t first = std::size_t{blockIdx.x} * 256 * loads + threadIdx.x;
  uint4 read[loads]{};
#pragma unroll
  for (unsigned i = 0; i < loads; ++i)
    if (first + i * 256 < packets) read[i] = from[first + i * 256];
  unsigned all = 0;
#pragma unroll
  for (unsigned i = 0; i < loads; ++i) all |= read[i].x | read[i].y | read[i].z | read[i].w;
  if (all != 0) *never = all;  // what is read is zero
}

/// Reads `bytes` zeros, a multiple of 16.
inline void read_zeros(cudaStream_t stream, std::byte* from, std::size_t bytes) {
  const std::size_t packets = bytes / 16;
  read_kernel<<<static_cast<unsigned>((packets + 2047) / 2048), 256, 0, stream>>>(
      reinterpret_cast<const uint4*>(from), packets, reinterpret_cast<unsigned*>(from));
}

/// Bytes a microsecond that `work`, of so many bytes, moves: the median of some runs.
template <class Work>
[[nodiscard]] double rate_of(cudaStream_t stream, std::size_t bytes, const Work& work) {
  stopwatch watch;
  std::vector<double> us;
  for (int i = 0; i < 12; ++i) us.push_back(watch.us(stream, work));
  us.erase(us.begin());
  return static_cast<double>(bytes) / median(us);
}

inline constexpr std::size_t rate_bytes = std::size_t{1} << 30;

/// Read and written by a device-to-device copy, measured once a process.
[[nodiscard]] inline double copy_rate(cudaStream_t stream) {
  static const double rate = [&] {
    const buffer from(rate_bytes), to(rate_bytes);
    fill_random(stream, from.data(), rate_bytes);
    return rate_of(stream, 2 * rate_bytes, [&] {
      check(cudaMemcpyAsync(to.data(), from.data(), rate_bytes, cudaMemcpyDeviceToDevice, stream));
    });
  }();
  return rate;
}

/// Read by a kernel that does nothing else.
[[nodiscard]] inline double read_rate(cudaStream_t stream) {
  static const double rate = [&] {
    const buffer from(rate_bytes);
    check(cudaMemsetAsync(from.data(), 0, rate_bytes, stream));
    return rate_of(stream, rate_bytes, [&] { read_zeros(stream, from.data(), rate_bytes); });
  }();
  return rate;
}

/// The counters of work that moved `bytes`, from a contest of {the work, its ceiling, an empty kernel}. `rate` is the
/// ceiling's, of much work, in bytes a microsecond.
inline void report(benchmark::State& state, const contest& from, std::size_t bytes, double rate) {
  const double us = from.median_us(0), ceiling_us = from.median_us(1);
  state.counters["bytes"] = static_cast<double>(bytes);
  state.counters["us"] = us;
  state.counters["ceiling_us"] = ceiling_us;
  if (bytes < small_work_bytes) {
    const double empty_us = from.median_us(2);
    state.counters["us_per_node"] = us - empty_us;
    state.counters["ceiling_us_per_node"] = ceiling_us - empty_us;
    state.counters["empty_us"] = empty_us;
    state.counters["times_the_floor"] = us / std::max(empty_us, static_cast<double>(bytes) / rate);
  } else {
    state.counters["bytes/s"] = benchmark::Counter(static_cast<double>(bytes) / (us * 1e-6));
    state.counters["fraction_of_ceiling"] = ceiling_us / us;
  }
}

/// Runs `mine` in a contest with a ceiling that moves as many bytes, and fills in the counters.
inline void compete(benchmark::State& state, cudaStream_t stream, std::size_t bytes, std::size_t turns, double rate,
                    const call& mine, const call& ceiling) {
  auto race =
      contest::of(stream, bytes, turns, {mine, ceiling, [&](std::size_t) { empty_kernel<<<1, 32, 0, stream>>>(); }});
  for (auto _ : state) state.SetIterationTime(race.round() * 1e-6);
  report(state, race, bytes, rate);
}

/// Rows, from a decode step's to a prefill's, and heads of a rank (of 64 or 128, tensor parallel over 2 to 16).
inline void engine_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "heads"})->ArgsProduct({{32, 64, 256, 2048, 32768}, {8, 16, 32}});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
}

/// For comparisons: one of each kind.
inline void few_engine_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "heads"})->ArgsProduct({{32, 256, 2048, 32768}, {16}});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
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
