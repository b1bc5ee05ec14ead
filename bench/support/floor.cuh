// What a call is compared with: a ceiling that the same run measures, and for small work the least that any node takes.
//
//   bench::compete(state, stream, bytes, turns, bench::copy_rate(stream), mine, ceiling);
//
//   fraction_of_ceiling   time of the ceiling, which moves as many bytes / time of the call
//   us_per_node           below 10 MB: one node of a graph of such calls, less an empty kernel's node
//   times_the_floor       below 10 MB: one node / the greater of an empty kernel's node and of bytes at the ceiling's rate
#pragma once

#include "ceiling.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bench {

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

/// Runs `mine` in a contest with a ceiling that moves as many bytes, and fills in the counters.
inline void compete(benchmark::State& state, cudaStream_t stream, std::size_t bytes, std::size_t turns, double rate,
                    const call& mine, const call& ceiling) {
  auto race =
      contest::of(stream, bytes, turns, {mine, ceiling, [&](std::size_t) { empty_kernel<<<1, 32, 0, stream>>>(); }});
  for (auto _ : state) state.SetIterationTime(race.round() * 1e-6);
  const double us = race.median_us(0), ceiling_us = race.median_us(1);
  state.counters["us"] = us;
  state.counters["ceiling_us"] = ceiling_us;
  if (bytes < small_work_bytes) {
    const double empty_us = race.median_us(2);
    state.counters["us_per_node"] = us - empty_us;
    state.counters["empty_us"] = empty_us;
    state.counters["times_the_floor"] = us / std::max(empty_us, static_cast<double>(bytes) / rate);
  } else {
    state.counters["bytes/s"] = benchmark::Counter(static_cast<double>(bytes) / (us * 1e-6));
    state.counters["fraction_of_ceiling"] = ceiling_us / us;
  }
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

}  // namespace bench
