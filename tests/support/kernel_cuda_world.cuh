// Where kernel cases run: on a GPU. The members are kernel_host_world.hpp's.
#pragma once

#include <holdfast/device/cuda.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace kernel_test {

inline void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("the test's own call: ") + cudaGetErrorString(error));
}

class cuda_world {
 public:
  using stream_type = cudaStream_t;

  struct convertible_stream {
    stream_type stream;
    operator stream_type() const { return stream; }
  };

  static const char* unavailable() {
    static const cudaError_t error = [] {
      int count = 0;
      const cudaError_t found = cudaGetDeviceCount(&count);
      static_cast<void>(cudaGetLastError());
      return found == cudaSuccess && count == 0 ? cudaErrorNoDevice : found;
    }();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  }

  [[nodiscard]] stream_type stream() const { return stream_.get(); }
  void synchronize() { must(cudaStreamSynchronize(stream())); }

  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) {
    auto memory = try_allocate(bytes);
    if (bytes != 0 && memory == nullptr) throw std::runtime_error("the test's own memory: out of memory");
    return memory;
  }

  /// Null when less than twice as much is free.
  [[nodiscard]] std::shared_ptr<std::byte> allocate_vast(std::size_t bytes) {
    const holdfast::cuda_device::current_scope current(device_);
    std::size_t free = 0, total = 0;
    must(cudaMemGetInfo(&free, &total));
    return free / 2 < bytes ? nullptr : try_allocate(bytes);
  }

  void upload(std::byte* to, const void* from, std::size_t bytes) {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream()));
    synchronize();
  }
  void download(void* to, const std::byte* from, std::size_t bytes) {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream()));
    synchronize();
  }

  class recording {
   public:
    recording(cudaGraph_t graph, stream_type stream) : graph_(graph, cudaGraphDestroy), stream_(stream) {
      cudaGraphExec_t exec = nullptr;
      must(cudaGraphInstantiate(&exec, graph, 0));
      exec_.reset(exec, cudaGraphExecDestroy);
    }
    [[nodiscard]] std::size_t nodes() const {
      std::size_t count = 0;
      must(cudaGraphGetNodes(graph_.get(), nullptr, &count));
      return count;
    }
    void replay() {
      must(cudaGraphLaunch(exec_.get(), stream_));
      must(cudaStreamSynchronize(stream_));
    }

   private:
    std::shared_ptr<CUgraph_st> graph_;
    std::shared_ptr<CUgraphExec_st> exec_;
    stream_type stream_;
  };

  template <class Work>
  [[nodiscard]] recording record(const Work& work) {
    must(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
    work();
    cudaGraph_t graph = nullptr;
    must(cudaStreamEndCapture(stream(), &graph));
    return {graph, stream()};
  }

  template <class Work>
  void in_broken_capture(const Work& work) {
    must(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
    void* refused = nullptr;
    static_cast<void>(cudaMalloc(&refused, 1));
    static_cast<void>(cudaGetLastError());
    work();
    cudaGraph_t graph = nullptr;
    static_cast<void>(cudaStreamEndCapture(stream(), &graph));
    static_cast<void>(cudaGetLastError());
  }

  [[nodiscard]] static int devices() {
    int count = 0;
    must(cudaGetDeviceCount(&count));
    return count;
  }
  [[nodiscard]] static int current_device() {
    int ordinal = -1;
    must(cudaGetDevice(&ordinal));
    return ordinal;
  }
  [[nodiscard]] static cuda_world on_device(int ordinal) { return cuda_world{holdfast::cuda_device{ordinal}}; }

  explicit cuda_world(holdfast::cuda_device device = {}) : device_(device) {
    const holdfast::cuda_device::current_scope current(device_);
    cudaStream_t stream = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_.reset(stream, cudaStreamDestroy);
  }

 private:
  [[nodiscard]] std::shared_ptr<std::byte> try_allocate(std::size_t bytes) {
    const holdfast::cuda_device::current_scope current(device_);
    void* p = nullptr;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    return {static_cast<std::byte*>(p), [](std::byte* q) { static_cast<void>(cudaFree(q)); }};
  }

  holdfast::cuda_device device_;
  std::shared_ptr<CUstream_st> stream_;
};

}  // namespace kernel_test
