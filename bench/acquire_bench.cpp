// SPDX-License-Identifier: Apache-2.0
// What padded_query_buffer::acquire costs within capacity, on the host, in the steady state.
//
// The floor is the question that has to be asked each time: what is this stream capturing? So batches of it and batches
// of acquire and release alternate in one process, and `over_query_ns` is the median of their differences. The goal on
// an H200 is 60 ns at most. For comparison, a pair of calls of the allocators that engines use.
//
//   acquire/eager      one stream, not capturing
//   acquire/captured   the same inside a capture that has recorded the buffer already; release asks once more whether
//                      the capture still runs
//   cub, async         an allocation from a warm cache and its release
//
// Runs on the GPU where there is one, else on the host device, whose figures say nothing about CUDA's.
#include <holdfast/holdfast.hpp>

#include "support/host.hpp"

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace {

constexpr std::int64_t rows = 64;
constexpr std::size_t bytes = rows * 64 * 512 * 2;

using bench::check;
using bench::median;
using bench::nanoseconds;

/// Alternates the query and `call`; an iteration is a batch of each.
template <class Device, class Call>
void against_query(benchmark::State& state, typename Device::stream_type on, const Call& call) {
  const auto query = [on] {
    auto capture = Device::capturing(on);
    benchmark::DoNotOptimize(capture);
  };
  static_cast<void>(nanoseconds(query));
  static_cast<void>(nanoseconds(call));

  std::vector<double> queries, calls, differences;
  for (auto _ : state) {
    queries.push_back(nanoseconds(query));
    calls.push_back(nanoseconds(call));
    differences.push_back(calls.back() - queries.back());
    state.SetIterationTime(calls.back() * 1e-9);
  }
  state.counters["query_ns"] = median(queries);
  state.counters["call_ns"] = median(calls);
  state.counters["over_query_ns"] = median(differences);
}

template <class Device>
void acquire(benchmark::State& state, Device device, bool captured) {
  const bench::stream_of<Device> on;  // outlives the buffers used on it
  holdfast::lane decode{holdfast::default_resource(device)};
  auto& q_pad = decode.template padded_queries<std::uint16_t>({.heads = 16, .padded_heads = 64, .head_dim = 512});
  q_pad.reserve(rows);
  if (captured) {
    on.begin_capture();
  }
  against_query<Device>(state, on, [&, s = typename Device::stream_type{on}] {
    auto q = q_pad.acquire(s, rows);
    benchmark::DoNotOptimize(q.data());
  });
  if (captured) {
    static_cast<void>(on.end_capture());
  }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // newer CCCLs discourage it; engines have it

void cub_pair(benchmark::State& state) {
  cub::CachingDeviceAllocator cub{2, 9, 28};
  const bench::stream on;
  against_query<holdfast::cuda_device>(state, on, [&] {
    void* p = nullptr;
    check(cub.DeviceAllocate(&p, bytes, on));
    check(cub.DeviceFree(p));
  });
}

#pragma GCC diagnostic pop

void async_pair(benchmark::State& state) {
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, 0));
  std::uint64_t keep_all = UINT64_MAX;
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep_all));
  const bench::stream on;
  against_query<holdfast::cuda_device>(state, on, [&] {
    void* p = nullptr;
    check(cudaMallocAsync(&p, bytes, on));
    check(cudaFreeAsync(p, on));
  });
  check(cudaStreamSynchronize(on));
}

template <class Benchmark, class... Arguments>
void add(const std::string& name, Benchmark benchmark, Arguments... arguments) {
  benchmark::RegisterBenchmark(name.c_str(), benchmark, arguments...)
      ->UseManualTime()
      ->Unit(benchmark::kNanosecond)
      ->Iterations(200)
      ->Repetitions(11)
      ->ReportAggregatesOnly();
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_on_either(argc, argv, []<class Device>(Device device) {
    add(std::string{Device::name} + "/acquire/eager", acquire<Device>, device, false);
    add(std::string{Device::name} + "/acquire/captured", acquire<Device>, device, true);
    if constexpr (std::is_same_v<Device, holdfast::cuda_device>) {
      add("cuda/cub DeviceAllocate + DeviceFree", cub_pair);
      add("cuda/cudaMallocAsync + cudaFreeAsync", async_pair);
    }
  });
}
