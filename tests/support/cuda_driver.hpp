// The driver of CUDA devices: the runtime API alone, so plain C++ compiles it.
#pragma once

#include "driver.hpp"

#include <holdfast/device/cuda.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace support {

template <>
struct driver<holdfast::cuda_device> {
  using device = holdfast::cuda_device;
  using stream_type = cudaStream_t;
  using graph_type = cudaGraph_t;

  class stream {
   public:
    stream() = default;
    explicit stream(cudaStream_t owned) : handle_(owned) {}
    stream(stream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    stream& operator=(stream&& other) noexcept {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
      return *this;
    }
    ~stream() { reset(); }

    [[nodiscard]] cudaStream_t get() const { return handle_; }
    operator cudaStream_t() const { return handle_; }  // NOLINT: as the host's
    void reset() {
      if (cudaStream_t const owned = std::exchange(handle_, nullptr)) static_cast<void>(cudaStreamDestroy(owned));
    }

   private:
    cudaStream_t handle_ = nullptr;
  };

  class graph {
   public:
    graph() = default;
    graph(cudaGraph_t handle, bool owned) : handle_(handle), owned_(owned) {}
    graph(graph&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)), owned_(other.owned_) {}
    graph& operator=(graph&& other) noexcept {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
      owned_ = other.owned_;
      return *this;
    }
    ~graph() { reset(); }

    [[nodiscard]] cudaGraph_t get() const { return handle_; }
    [[nodiscard]] explicit operator bool() const { return handle_ != nullptr; }
    void reset() {
      cudaGraph_t const former = std::exchange(handle_, nullptr);
      if (former != nullptr && owned_) {
        bodies::instance().forget(former);
        static_cast<void>(cudaGraphDestroy(former));
      }
    }

   private:
    cudaGraph_t handle_ = nullptr;
    bool owned_ = false;
  };

  /// Destroying it is an unsafe call, as it is for any user.
  class exec {
   public:
    exec() = default;
    explicit exec(cudaGraphExec_t owned) : handle_(owned) {}
    exec(exec&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    exec& operator=(exec&& other) noexcept {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
      return *this;
    }
    ~exec() { reset(); }

    [[nodiscard]] cudaGraphExec_t get() const { return handle_; }
    [[nodiscard]] explicit operator bool() const { return handle_ != nullptr; }
    void reset() {
      if (cudaGraphExec_t const owned = std::exchange(handle_, nullptr)) {
        static_cast<void>(cudaGraphExecDestroy(owned));
      }
    }

   private:
    cudaGraphExec_t handle_ = nullptr;
  };

  static std::string missing() {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return std::string{"no CUDA device: "} + cudaGetErrorString(code);
    }
    return count == 0 ? "no CUDA device: none found" : "";
  }

  static stream make_stream(stream_kind kind = stream_kind::non_blocking, device d = {}) {
    const device::current_scope current{d};
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, kind == stream_kind::blocking ? cudaStreamDefault : cudaStreamNonBlocking),
          "cudaStreamCreateWithFlags");
    return stream{made};
  }

  static void begin_capture(cudaStream_t s, capture_mode mode = capture_mode::thread_local_) {
    check(cudaStreamBeginCapture(s, native(mode)), "cudaStreamBeginCapture");
  }

  static void begin_capture_to(cudaStream_t s, cudaGraph_t into, capture_mode mode = capture_mode::thread_local_) {
    const std::vector<cudaGraphNode_t> after = nodes(into);
    check(cudaStreamBeginCaptureToGraph(s, into, after.data(), nullptr, after.size(), native(mode)),
          "cudaStreamBeginCaptureToGraph");
    borrowed::instance().add(s);
  }

  static graph end_capture(cudaStream_t s) {
    cudaGraph_t ended = nullptr;
    const cudaError_t code = cudaStreamEndCapture(s, &ended);
    if (code == cudaErrorStreamCaptureInvalidated || code == cudaErrorStreamCaptureUnjoined) {
      static_cast<void>(cudaGetLastError());
      static_cast<void>(borrowed::instance().remove(s));
      return {};
    }
    check(code, "cudaStreamEndCapture");
    return {ended, !borrowed::instance().remove(s)};
  }

  static graph make_graph() {
    cudaGraph_t made = nullptr;
    check(cudaGraphCreate(&made, 0), "cudaGraphCreate");
    return {made, true};
  }

  static graph clone(const graph& g) {
    cudaGraph_t made = nullptr;
    check(cudaGraphClone(&made, g.get()), "cudaGraphClone");
    return {made, true};
  }

  static void add_child(graph& parent, const graph& child) {
    const std::vector<cudaGraphNode_t> after = nodes(parent.get());
    cudaGraphNode_t node = nullptr;
    check(cudaGraphAddChildGraphNode(&node, parent.get(), after.data(), after.size(), child.get()),
          "cudaGraphAddChildGraphNode");
  }

  static cudaGraph_t add_conditional_body(graph& parent) {
    cudaGraphNodeParams params{};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.type = cudaGraphCondTypeIf;
    params.conditional.size = 1;
    check(cudaGraphConditionalHandleCreate(&params.conditional.handle, parent.get(), 1, cudaGraphCondAssignDefault),
          "cudaGraphConditionalHandleCreate");
    const std::vector<cudaGraphNode_t> after = nodes(parent.get());
    cudaGraphNode_t node = nullptr;
    check(cudaGraphAddNode(&node, parent.get(), after.data(), nullptr, after.size(), &params), "cudaGraphAddNode");
    cudaGraph_t const body = params.conditional.phGraph_out[0];
    bodies::instance().add({parent.get(), node, body});
    return body;
  }

  static exec instantiate(const graph& g) {
    cudaGraphExec_t made = nullptr;
    check(cudaGraphInstantiate(&made, g.get(), 0), "cudaGraphInstantiate");
    return exec{made};
  }

  static bool update(exec& e, const graph& g) {
    cudaGraphExecUpdateResultInfo info{};
    const cudaError_t code = cudaGraphExecUpdate(e.get(), g.get(), &info);
    if (code == cudaErrorGraphExecUpdateFailure) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(code, "cudaGraphExecUpdate");
    return true;
  }

  static void launch(exec& e, cudaStream_t s) { check(cudaGraphLaunch(e.get(), s), "cudaGraphLaunch"); }

  /// Bodies are counted where add_conditional_body made them: the runtime (13.0) cannot list a clone's.
  static node_counts count(const graph& g) { return count(g.get()); }

  static void synchronize(cudaStream_t s) { device::synchronize(s); }

  static void fork(cudaStream_t from, cudaStream_t to) {
    device::event e{device::of(from)};
    e.record(from);
    device::wait(to, e);
  }

  static void* allocate(std::size_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes), "cudaMalloc");
    return p;
  }
  static void deallocate(void* p) { check(cudaFree(p), "cudaFree"); }

  template <class T>
  static std::vector<T> read(const T* p, std::size_t n) {
    std::vector<T> values(n);
    copy_now(values.data(), p, n * sizeof(T));
    return values;
  }

  template <class T>
  static void write(T* p, const std::vector<T>& values) {
    copy_now(p, values.data(), values.size() * sizeof(T));
  }

  static bool unsafe_call() {
    void* p = nullptr;
    const bool failed = cudaMalloc(&p, 1) != cudaSuccess || cudaFree(p) != cudaSuccess;
    if (failed) static_cast<void>(cudaGetLastError());
    return failed;
  }

  static capture_mode exchange_thread_mode(capture_mode mode) {
    cudaStreamCaptureMode other = native(mode);
    check(cudaThreadExchangeStreamCaptureMode(&other), "cudaThreadExchangeStreamCaptureMode");
    switch (other) {
      case cudaStreamCaptureModeGlobal: return capture_mode::global;
      case cudaStreamCaptureModeThreadLocal: return capture_mode::thread_local_;
      default: return capture_mode::relaxed;
    }
  }

  static cudaStream_t legacy_stream() { return cudaStreamLegacy; }
  static cudaStream_t per_thread_stream() { return cudaStreamPerThread; }

 private:
  static void check(cudaError_t code, const char* call) { holdfast::detail::cuda_check(code, call); }

  static cudaStreamCaptureMode native(capture_mode mode) {
    switch (mode) {
      case capture_mode::global: return cudaStreamCaptureModeGlobal;
      case capture_mode::thread_local_: return cudaStreamCaptureModeThreadLocal;
      default: return cudaStreamCaptureModeRelaxed;
    }
  }

  // A synchronous cudaMemcpy would wait for the legacy stream; this waits for a stream where nothing else ever is.
  static void copy_now(void* to, const void* from, std::size_t bytes) {
    thread_local const stream own = make_stream();
    device::copy(own, to, from, bytes);
    device::synchronize(own);
  }

  static std::vector<cudaGraphNode_t> nodes(cudaGraph_t g) {
    std::size_t n = 0;
    check(cudaGraphGetNodes(g, nullptr, &n), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> all(n);
    if (n != 0) check(cudaGraphGetNodes(g, all.data(), &n), "cudaGraphGetNodes");
    return all;
  }

  static void count(cudaGraph_t g, node_counts& sum) {
    for (cudaGraphNode_t const node : nodes(g)) {
      cudaGraphNodeType type{};
      check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
      switch (type) {
        case cudaGraphNodeTypeKernel: ++sum.kernels; break;
        case cudaGraphNodeTypeMemset: ++sum.memsets; break;
        case cudaGraphNodeTypeMemcpy: ++sum.memcpys; break;
        case cudaGraphNodeTypeMemAlloc:
        case cudaGraphNodeTypeMemFree: ++sum.memory; break;
        case cudaGraphNodeTypeGraph: {
          ++sum.children;
          cudaGraph_t child = nullptr;
          check(cudaGraphChildGraphNodeGetGraph(node, &child), "cudaGraphChildGraphNodeGetGraph");
          count(child, sum);
          break;
        }
        case cudaGraphNodeTypeConditional:
          ++sum.conditionals;
          if (cudaGraph_t const body = bodies::instance().of(g, node)) count(body, sum);
          break;
        default: ++sum.others;
      }
    }
  }

  static node_counts count(cudaGraph_t g) {
    node_counts sum;
    count(g, sum);
    return sum;
  }

  /// The streams whose capture goes into a graph that exists.
  class borrowed {
   public:
    static borrowed& instance() {
      static borrowed streams;
      return streams;
    }
    void add(cudaStream_t s) {
      const std::lock_guard lock{mutex_};
      streams_.insert(s);
    }
    bool remove(cudaStream_t s) {
      const std::lock_guard lock{mutex_};
      return streams_.erase(s) != 0;
    }

   private:
    std::mutex mutex_;
    std::set<cudaStream_t> streams_;
  };

  /// The conditional bodies that were made here, since the runtime cannot find them again.
  class bodies {
   public:
    struct body {
      cudaGraph_t parent;
      cudaGraphNode_t node;
      cudaGraph_t graph;
    };
    static bodies& instance() {
      static bodies known;
      return known;
    }
    void add(const body& b) {
      const std::lock_guard lock{mutex_};
      all_.push_back(b);
    }
    cudaGraph_t of(cudaGraph_t parent, cudaGraphNode_t node) {
      const std::lock_guard lock{mutex_};
      for (const body& b : all_) {
        if (b.parent == parent && b.node == node) return b.graph;
      }
      return nullptr;
    }
    void forget(cudaGraph_t parent) {
      const std::lock_guard lock{mutex_};
      erase(parent);
    }

   private:
    void erase(cudaGraph_t parent) {
      std::vector<cudaGraph_t> inner;
      std::erase_if(all_, [&](const body& b) {
        if (b.parent == parent) inner.push_back(b.graph);
        return b.parent == parent;
      });
      for (cudaGraph_t const graph : inner) erase(graph);
    }

    std::mutex mutex_;
    std::vector<body> all_;
  };
};

}  // namespace support
