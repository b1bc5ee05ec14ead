// SPDX-License-Identifier: Apache-2.0
// What an allocation from a warm pool and its release cost on the host, by size and by the number of threads, each with a
// stream of its own and all with one pool.
//
// The floor is the question that each of the two calls has to ask: what is this stream capturing? So batches of it and
// batches of pairs alternate on every thread, and `over_query_ns` is the median of a pair's time less two queries'. The
// goals on an H200, one thread: below 300 ns a pair in all (PyTorch's caching allocator), and half of cub's at most.
//
//   caching   caching_resource over malloc_resource
//   cub       cub_caching_resource
//   async     async_resource
//
// All of them ask; that is the price of any resource here. Runs on the GPU where there is one, else on the host device,
// whose figures say nothing about CUDA's.
#include <holdfast/holdfast.hpp>
#include <holdfast/resource/caching.hpp>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int batch = 1000;  // calls between two looks at the clock
constexpr int batches = 200;

void check(cudaError_t code) {
  if (code != cudaSuccess) {
    throw holdfast::device_error{static_cast<int>(code), cudaGetErrorString(code)};
  }
}

/// Nanoseconds of one call, over a batch.
template <class Call>
double nanoseconds(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < batch; ++i) {
    call();
  }
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / batch;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// --- a stream ---------------------------------------------------------------------------------------------------------

template <class Device>
class stream;

template <>
class stream<holdfast::host_device> {
 public:
  operator holdfast::host::stream_ref() const { return stream_; }

 private:
  holdfast::host::stream stream_;
};

template <>
class stream<holdfast::cuda_device> {
 public:
  stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  ~stream() { static_cast<void>(cudaStreamDestroy(stream_)); }

  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// --- the benchmark ----------------------------------------------------------------------------------------------------

/// What one thread saw, nanoseconds each.
struct seen {
  std::vector<double> queries, pairs, differences;
};

/// Alternates two queries and a pair on each thread; all threads run the same kind of batch at the same time.
template <class Device, class Resource>
void alternate(Resource pool, std::size_t bytes, std::barrier<>& together, seen& out) {
  const stream<Device> owner;
  const typename Device::stream_type on = owner;
  const auto query = [on] {
    for (int i = 0; i < 2; ++i) {
      auto capture = Device::capturing(on);
      benchmark::DoNotOptimize(capture);
    }
  };
  const auto pair = [&] {
    void* p = pool.allocate(on, bytes, 256);
    benchmark::DoNotOptimize(p);
    pool.deallocate(on, p, bytes, 256);
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

template <class Device, class Make>
void pairs(benchmark::State& state, Make make, std::size_t bytes, int threads) {
  for (auto _ : state) {
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
    state.counters["queries_ns"] = median(sum.queries);
    state.counters["pair_ns"] = median(sum.pairs);
    state.counters["over_query_ns"] = median(sum.differences);
    state.SetIterationTime(median(sum.pairs) * 1e-9);
  }
}

template <class Device, class Make>
void add(const std::string& name, Make make) {
  constexpr std::size_t kibibyte = 1024;
  struct size {
    const char* name;
    std::size_t bytes;
  };
  const std::array sizes{size{"256 B", 256}, size{"64 KiB", 64 * kibibyte}, size{"2 MiB", 2048 * kibibyte},
                         size{"64 MiB", 65536 * kibibyte}};
  for (const size& one : sizes) {
    for (const int threads : {1, 4, 16}) {
      const std::string title =
          std::string{Device::name} + "/" + name + "/" + one.name + "/threads:" + std::to_string(threads);
      benchmark::RegisterBenchmark(title.c_str(), pairs<Device, Make>, make, one.bytes, threads)
          ->UseManualTime()
          ->Unit(benchmark::kNanosecond)
          ->Iterations(1)
          ->Repetitions(5)
          ->ReportAggregatesOnly();
    }
  }
}

template <class Device>
void add_caching(Device device) {
  add<Device>("caching", [device] { return holdfast::caching_resource{holdfast::malloc_resource<Device>{device}}; });
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) {
    const holdfast::cuda_device device{0};
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device.ordinal));
    benchmark::AddCustomContext("gpu", properties.name);
    add_caching(device);
    add<holdfast::cuda_device>("cub", [device] { return holdfast::cub_caching_resource{device}; });
    add<holdfast::cuda_device>("async", [device] { return holdfast::async_resource{device}; });
  } else {
    static_cast<void>(cudaGetLastError());
    benchmark::AddCustomContext("gpu", "none");
    add_caching(holdfast::host_device{0});
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
