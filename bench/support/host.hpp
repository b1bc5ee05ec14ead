// What benchmarks of host code share: a clock, a stream of either device, and a main that runs them on the GPU where there
// is one, and else on the host device (whose figures say nothing about CUDA's).
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

namespace bench {

inline void check(cudaError_t error, const char* what = "a CUDA call of the benchmark") {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s failed: %s\n", what, cudaGetErrorString(error));
  std::exit(EXIT_FAILURE);
}

[[nodiscard]] inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Of one call, over a batch of them.
template <class Call>
[[nodiscard]] double nanoseconds(const Call& call, int batch = 1000) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < batch; ++i) call();
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / batch;
}

class stream {
 public:
  stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  operator cudaStream_t() const { return stream_; }

  void begin_capture() const { check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal)); }
  /// The graph lives as long as what is returned.
  [[nodiscard]] std::shared_ptr<CUgraph_st> end_capture() const {
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream_, &graph));
    return {graph, cudaGraphDestroy};
  }

 private:
  cudaStream_t stream_ = nullptr;
};

class host_stream {
 public:
  operator holdfast::host::stream_ref() const { return stream_; }
  void begin_capture() const { stream_.begin_capture(); }
  [[nodiscard]] holdfast::host::graph end_capture() const { return stream_.end_capture(); }

 private:
  holdfast::host::stream stream_;
};

template <class Device>
using stream_of = std::conditional_t<std::is_same_v<Device, holdfast::cuda_device>, stream, host_stream>;

/// Calls `add(device)`, which registers benchmarks, for the device there is; then runs them.
template <class Add>
int run_on_either(int argc, char** argv, const Add& add) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return EXIT_FAILURE;
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0));
    benchmark::AddCustomContext("gpu", properties.name);
    add(holdfast::cuda_device{0});
  } else {
    static_cast<void>(cudaGetLastError());
    benchmark::AddCustomContext("gpu", "none");
    add(holdfast::host_device{0});
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return EXIT_SUCCESS;
}

}  // namespace bench
