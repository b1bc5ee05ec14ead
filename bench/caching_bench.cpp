// SPDX-License-Identifier: Apache-2.0
// What an allocation from a warm pool and its release cost on the host, by size and by the number of threads, each with a
// stream of its own and all with one pool.
//
//   caching           caching_resource over malloc_resource. It has to ask twice what the stream is capturing; how long that
//                     takes is measured beside it, and `over_query_ns` is the median of a pair's time less two queries'
//   cub, cudaMallocAsync, PyTorch, RMM pool      as their users call them, which ask nothing (foreign/; the last two where
//                     they are found)
//
// The goals on an H200: the fastest of all at one thread, half of cub's at most, and no slower at 16 threads. Runs on the
// GPU where there is one, else on the host device, whose figures say nothing about CUDA's.
#include "foreign/foreign.hpp"
#include "support/host.hpp"
#include "support/pools.hpp"

#include <benchmark/benchmark.h>

#include <array>
#include <barrier>
#include <cstddef>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr int batches = 40;  // of 1000 calls, between two looks at the clock

using bench::median;
using bench::nanoseconds;

/// What one thread saw, nanoseconds each.
struct seen {
  std::vector<double> queries, pairs, differences;
};

/// Alternates two queries and a pair on each thread; all threads run the same kind of batch at the same time.
template <class Device, class Pool>
void alternate(Pool pool, std::size_t bytes, std::barrier<>& together, seen& out) {
  const bench::stream_of<Device> owner;
  const typename Device::stream_type on = owner;
  const auto query = [on] {
    for (int i = 0; i < 2; ++i) {
      auto capture = Device::capturing(on);
      benchmark::DoNotOptimize(capture);
    }
  };
  const auto pair = [&] {
    void* p = pool.allocate(on, bytes);
    benchmark::DoNotOptimize(p);
    pool.deallocate(on, p, bytes);
  };
  static_cast<void>(nanoseconds(query));
  static_cast<void>(nanoseconds(pair));
  for (int i = 0; i < batches; ++i) {
    together.arrive_and_wait();
    out.queries.push_back(nanoseconds(query));
    together.arrive_and_wait();
    out.pairs.push_back(nanoseconds(pair));
    out.differences.push_back(out.pairs.back() - out.queries.back());
  }
  Device::synchronize(on);
}

/// What all threads saw.
template <class Device, class Make>
seen on_threads(Make make, std::size_t bytes, int threads) {
  const auto pool = make();
  std::barrier<> together{threads};
  std::vector<seen> all(static_cast<std::size_t>(threads));
  std::vector<std::thread> workers;
  for (seen& one : all) {
    workers.emplace_back([&] { alternate<Device>(pool, bytes, together, one); });
  }
  for (std::thread& one : workers) {
    one.join();
  }
  seen sum;
  for (const seen& one : all) {
    sum.queries.insert(sum.queries.end(), one.queries.begin(), one.queries.end());
    sum.pairs.insert(sum.pairs.end(), one.pairs.begin(), one.pairs.end());
    sum.differences.insert(sum.differences.end(), one.differences.begin(), one.differences.end());
  }
  return sum;
}

template <class Device, class Make>
void pairs(benchmark::State& state, Make make, std::size_t bytes) {
  for (auto _ : state) {
    const seen alone = on_threads<Device>(make, bytes, 1);
    state.counters["queries_ns"] = median(alone.queries);
    state.counters["over_query_ns"] = median(alone.differences);
    state.counters["pair_ns"] = median(alone.pairs);
    for (const int threads : {4, 16}) {
      state.counters["pair_ns, " + std::to_string(threads) + " threads"] =
          median(on_threads<Device>(make, bytes, threads).pairs);
    }
    state.SetIterationTime(median(alone.pairs) * 1e-9);
  }
}

struct size {
  const char* name;
  std::size_t bytes;
};
constexpr std::array sizes{size{"256 B", 256}, size{"64 KiB", 64 << 10}, size{"2 MiB", 2 << 20},
                           size{"64 MiB", 64 << 20}};

template <class Device, class Make>
void add(const std::string& name, Make make) {
  for (const size& one : sizes) {
    benchmark::RegisterBenchmark((name + "/" + one.name).c_str(), pairs<Device, Make>, make, one.bytes)
        ->UseManualTime()
        ->Unit(benchmark::kNanosecond)
        ->Iterations(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_on_either(argc, argv, []<class Device>(Device device) {
    add<Device>("caching", [device] { return bench::caching_pool<Device>{device}; });
    if constexpr (std::is_same_v<Device, holdfast::cuda_device>) {
      for (const bench::foreign_kind& kind : bench::foreign_kinds()) {
        add<Device>(kind.name, [make = kind.make] { return bench::foreign_handle{make()}; });
      }
    }
  });
}
