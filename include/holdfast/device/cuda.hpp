// The CUDA device: device/device.hpp's contract over the CUDA runtime. Plain C++: no nvcc, no GPU at compile time.
//
//   holdfast::cuda_device gpu{0};
//   holdfast::cuda_device::capturing(stream).state;   // what a cudaStream_t is capturing
//
// Driver functions (virtual memory) are looked up at run time, so nothing links libcuda and binaries start where there
// is no driver. Not here: wrappers for streams and graphs; cudaStream_t and cudaGraph_t are used as they are.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#if CUDART_VERSION < 13000
#error "Holdfast needs the CUDA toolkit 13.0 or newer"
#endif

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

[[noreturn]] inline void throw_cuda_error(cudaError_t code, const char* call) {
  static_cast<void>(cudaGetLastError());  // what our failing call left; our successful calls never touch the user's
  throw device_error{static_cast<int>(code),
                     std::string{call} + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code)};
}

inline void cuda_check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) [[unlikely]] {
    throw_cuda_error(code, call);
  }
}

template <class Function>
void look_up(const char* name, unsigned version, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cuda_check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess) {
    throw device_error{static_cast<int>(cudaErrorNotSupported), std::string{name} + ": not in this driver"};
  }
  function = reinterpret_cast<Function>(found);
}

/// The driver functions for streams and events that the runtime's twins, if there are any, don't do for; looked up once.
struct cuda_stream_driver {
  PFN_cuStreamGetCtx_v9020 stream_context;
  PFN_cuCtxGetDevice_v13000 context_device;
  PFN_cuEventQuery_v2000 event_query;

  static const cuda_stream_driver& get() {
    static const cuda_stream_driver functions{};
    return functions;
  }

 private:
  cuda_stream_driver() {
    look_up("cuStreamGetCtx", 9020, stream_context);
    look_up("cuCtxGetDevice", 13000, context_device);
    look_up("cuEventQuery", 2000, event_query);
  }
};

/// The driver's virtual memory functions, looked up once.
struct cuda_driver {
  PFN_cuMemAddressReserve_v10020 address_reserve;
  PFN_cuMemAddressFree_v10020 address_free;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
  PFN_cuDeviceGetAttribute_v2000 attribute;

  static const cuda_driver& get() {
    static const cuda_driver functions{};
    return functions;
  }

 private:
  cuda_driver() {
    look_up("cuMemAddressReserve", 10020, address_reserve);
    look_up("cuMemAddressFree", 10020, address_free);
    look_up("cuMemCreate", 10020, create);
    look_up("cuMemRelease", 10020, release);
    look_up("cuMemMap", 10020, map);
    look_up("cuMemUnmap", 10020, unmap);
    look_up("cuMemSetAccess", 10020, set_access);
    look_up("cuMemGetAllocationGranularity", 10020, granularity);
    look_up("cuDeviceGetAttribute", 2000, attribute);
  }
};

/// CUresult and cudaError_t share their numbers.
inline void cuda_check(CUresult code, const char* call) {
  if (code != CUDA_SUCCESS) [[unlikely]] {
    throw device_error{static_cast<int>(code),
                       std::string{call} + ": " + cudaGetErrorString(static_cast<cudaError_t>(code))};
  }
}

}  // namespace detail

/// A CUDA device by its ordinal.
struct cuda_device {
  int ordinal = 0;

  using stream_type = cudaStream_t;
  using graph_type = cudaGraph_t;
  using node_type = cudaGraphNode_t;
  using physical_type = CUmemGenericAllocationHandle;

  static constexpr const char* name = "cuda";

  friend bool operator==(const cuda_device&, const cuda_device&) = default;

  /// While one lives, no call of this thread's invalidates a capture, anybody's: measured on an H200 for every call made
  /// here. Device-wide and legacy-stream synchronisation would be the exceptions and are never used.
  class relaxed_scope {
   public:
    relaxed_scope() { exchange(); }
    ~relaxed_scope() { exchange(); }
    relaxed_scope(const relaxed_scope&) = delete;
    relaxed_scope& operator=(const relaxed_scope&) = delete;

   private:
    void exchange() noexcept { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&other_)); }
    cudaStreamCaptureMode other_ = cudaStreamCaptureModeRelaxed;
  };

  /// Makes `device` current for this thread; the former one comes back at the end.
  class current_scope {
   public:
    explicit current_scope(cuda_device device) {
      detail::cuda_check(cudaGetDevice(&former_), "cudaGetDevice");
      if (former_ != device.ordinal) {
        detail::cuda_check(cudaSetDevice(device.ordinal), "cudaSetDevice");
        changed_ = true;
      }
    }
    ~current_scope() {
      if (changed_) {
        static_cast<void>(cudaSetDevice(former_));
      }
    }
    current_scope(const current_scope&) = delete;
    current_scope& operator=(const current_scope&) = delete;

   private:
    int former_ = 0;
    bool changed_ = false;
  };

  class event {
   public:
    explicit event(cuda_device device) {
      const current_scope scope{device};
      detail::cuda_check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
    event(event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    event& operator=(event&& other) noexcept {
      std::swap(event_, other.event_);
      return *this;
    }
    ~event() {
      if (event_ != nullptr) {
        static_cast<void>(cudaEventDestroy(event_));
      }
    }

    void record(cudaStream_t stream) { detail::cuda_check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
    /// Whether what was recorded is done; true when nothing was. By the driver: the runtime's query would make "not yet"
    /// the thread's last error.
    [[nodiscard]] bool ready() const {
      const CUresult code = detail::cuda_stream_driver::get().event_query(event_);
      if (code == CUDA_ERROR_NOT_READY) {
        return false;
      }
      detail::cuda_check(code, "cuEventQuery");
      return true;
    }
    void synchronize() const { detail::cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
    [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }

   private:
    cudaEvent_t event_ = nullptr;
  };

  // --- streams -----------------------------------------------------------------------------------------------------
  /// By the stream's context: cudaStreamGetDevice (like cudaStreamGetId and cudaStreamGetFlags) fails on a capturing
  /// stream and invalidates its capture, in every mode and in a relaxed scope, too; cuStreamGetCtx does neither.
  [[nodiscard]] static cuda_device of(cudaStream_t stream) {
    cuda_device device;
    if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
      detail::cuda_check(cudaGetDevice(&device.ordinal), "cudaGetDevice");
    } else {
      const detail::cuda_stream_driver& driver = detail::cuda_stream_driver::get();
      CUcontext context = nullptr;
      detail::cuda_check(driver.stream_context(stream, &context), "cuStreamGetCtx");
      detail::cuda_check(driver.context_device(&device.ordinal, context), "cuCtxGetDevice");
    }
    return device;
  }

  [[nodiscard]] static capture_status<cudaGraph_t> capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaGraph_t graph = nullptr;
    const cudaError_t code = cudaStreamGetCaptureInfo(stream, &status, &id, &graph, nullptr, nullptr, nullptr);
    if (code == cudaSuccess && status == cudaStreamCaptureStatusNone) [[likely]] {
      return {};
    }
    if (code == cudaErrorStreamCaptureImplicit) {
      static_cast<void>(cudaGetLastError());
      return {capture_state::implicit, 0, nullptr};
    }
    detail::cuda_check(code, "cudaStreamGetCaptureInfo");
    if (status == cudaStreamCaptureStatusInvalidated) {
      return {capture_state::invalidated, 0, nullptr};
    }
    return {capture_state::active, id, graph};
  }

  [[nodiscard]] static bool thread_bound(cudaStream_t stream) noexcept {
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    return stream == cudaStreamPerThread || stream == nullptr;
#else
    return stream == cudaStreamPerThread;
#endif
  }

  static void fill(cudaStream_t stream, void* data, std::byte value, std::size_t bytes) {
    if (bytes != 0) {
      detail::cuda_check(cudaMemsetAsync(data, std::to_integer<int>(value), bytes, stream), "cudaMemsetAsync");
    }
  }

  static void fill_rows(cudaStream_t stream, void* data, std::size_t pitch, std::byte value, std::size_t width,
                        std::size_t rows) {
    if (width != 0 && rows != 0) {
      detail::cuda_check(cudaMemset2DAsync(data, pitch, std::to_integer<int>(value), width, rows, stream),
                         "cudaMemset2DAsync");
    }
  }

  static void copy(cudaStream_t stream, void* to, const void* from, std::size_t bytes) {
    if (bytes != 0) {
      detail::cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    }
  }

  static void synchronize(cudaStream_t stream) {
    detail::cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  static void wait(cudaStream_t stream, const event& event) {
    detail::cuda_check(cudaStreamWaitEvent(stream, event.get(), cudaEventWaitDefault), "cudaStreamWaitEvent");
  }

  // --- graphs ------------------------------------------------------------------------------------------------------
  static void retain(cudaGraph_t graph, void* object, void (*destroy)(void*)) {
    cudaUserObject_t owned = nullptr;
    const cudaError_t created = cudaUserObjectCreate(&owned, object, destroy, 1, cudaUserObjectNoDestructorSync);
    if (created != cudaSuccess) {
      destroy(object);
      detail::throw_cuda_error(created, "cudaUserObjectCreate");
    }
    const cudaError_t retained = cudaGraphRetainUserObject(graph, owned, 1, cudaGraphUserObjectMove);
    if (retained != cudaSuccess) {
      static_cast<void>(cudaUserObjectRelease(owned, 1));
      detail::throw_cuda_error(retained, "cudaGraphRetainUserObject");
    }
  }

  [[nodiscard]] static std::vector<cudaGraphNode_t> frontier(cudaStream_t stream) {
    const auto [nodes, edges, count] = next_dependencies(stream);
    static_cast<void>(edges);
    return {nodes, nodes + count};
  }

  [[nodiscard]] static bool comes_after(cudaStream_t stream, const std::vector<cudaGraphNode_t>& nodes) {
    std::unordered_set<cudaGraphNode_t> missing{nodes.begin(), nodes.end()};
    std::unordered_set<cudaGraphNode_t> seen;
    std::vector<cudaGraphNode_t> ahead;
    const auto go_to = [&](const cudaGraphNode_t* to, const cudaGraphEdgeData* edges, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i) {
        const bool full = edges == nullptr || edges[i].type == cudaGraphDependencyTypeDefault;
        if (full && seen.insert(to[i]).second) {
          missing.erase(to[i]);
          ahead.push_back(to[i]);
        }
      }
    };
    const auto [first, first_edges, first_count] = next_dependencies(stream);
    go_to(first, first_edges, first_count);
    std::vector<cudaGraphNode_t> before;
    std::vector<cudaGraphEdgeData> edges;
    while (!ahead.empty() && !missing.empty()) {
      const cudaGraphNode_t node = ahead.back();
      ahead.pop_back();
      std::size_t count = 0;
      detail::cuda_check(cudaGraphNodeGetDependencies(node, nullptr, nullptr, &count), "cudaGraphNodeGetDependencies");
      if (count != 0) {
        before.resize(count);
        edges.resize(count);
        detail::cuda_check(cudaGraphNodeGetDependencies(node, before.data(), edges.data(), &count),
                           "cudaGraphNodeGetDependencies");
        go_to(before.data(), edges.data(), count);
      }
    }
    return missing.empty();
  }

  // --- the device --------------------------------------------------------------------------------------------------
  [[nodiscard]] cudaStream_t library_stream() const {
    static constexpr std::size_t max_devices = 64;
    static std::array<std::atomic<cudaStream_t>, max_devices> streams{};
    static std::mutex making;
    if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= max_devices) {
      throw logic_error{"cuda_device " + std::to_string(ordinal) + ": ordinals go from 0 to 63"};
    }
    std::atomic<cudaStream_t>& stream = streams[static_cast<std::size_t>(ordinal)];
    if (stream.load(std::memory_order_acquire) == nullptr) {
      const std::lock_guard lock{making};
      if (stream.load(std::memory_order_relaxed) == nullptr) {
        const current_scope scope{*this};
        cudaStream_t made = nullptr;
        detail::cuda_check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        stream.store(made, std::memory_order_release);
      }
    }
    return stream.load(std::memory_order_acquire);
  }

  [[nodiscard]] memory_info memory() const {
    const current_scope scope{*this};
    memory_info info;
    detail::cuda_check(cudaMemGetInfo(&info.free, &info.total), "cudaMemGetInfo");
    return info;
  }

  // --- virtual memory ----------------------------------------------------------------------------------------------
  [[nodiscard]] bool has_virtual_memory() const {
    int supported = 0;
    detail::cuda_check(detail::cuda_driver::get().attribute(
                           &supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ordinal),
                       "cuDeviceGetAttribute");
    return supported != 0;
  }

  [[nodiscard]] std::size_t granularity(const physical_options& options = {}) const {
    const CUmemAllocationProp properties = allocation_properties(options);
    std::size_t bytes = 0;
    detail::cuda_check(
        detail::cuda_driver::get().granularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
    return bytes;
  }

  [[nodiscard]] void* reserve(std::size_t bytes, std::size_t alignment) const {
    const current_scope scope{*this};
    CUdeviceptr address = 0;
    const CUresult code = detail::cuda_driver::get().address_reserve(&address, bytes, alignment, 0, 0);
    constexpr std::size_t more_than_any_has = std::size_t{1} << 46;  // then it is called an invalid value
    if (code == CUDA_ERROR_OUT_OF_MEMORY || (code == CUDA_ERROR_INVALID_VALUE && bytes >= more_than_any_has)) {
      throw out_of_memory{"cuda_device " + std::to_string(ordinal) + ": addresses", bytes, 0, 0};
    }
    detail::cuda_check(code, "cuMemAddressReserve");
    return reinterpret_cast<void*>(address);
  }

  void unreserve(void* address, std::size_t bytes) const {
    detail::cuda_check(detail::cuda_driver::get().address_free(reinterpret_cast<CUdeviceptr>(address), bytes),
                       "cuMemAddressFree");
  }

  [[nodiscard]] CUmemGenericAllocationHandle create(std::size_t bytes, const physical_options& options = {}) const {
    const current_scope scope{*this};
    const CUmemAllocationProp properties = allocation_properties(options);
    CUmemGenericAllocationHandle physical = 0;
    const CUresult code = detail::cuda_driver::get().create(&physical, bytes, &properties, 0);
    if (code == CUDA_ERROR_OUT_OF_MEMORY) {
      throw out_of_memory{"cuda_device " + std::to_string(ordinal), bytes, 0, memory().free};
    }
    detail::cuda_check(code, "cuMemCreate");
    return physical;
  }

  void destroy(CUmemGenericAllocationHandle physical) const {
    detail::cuda_check(detail::cuda_driver::get().release(physical), "cuMemRelease");
  }

  void map(void* address, std::size_t bytes, CUmemGenericAllocationHandle physical) const {
    const current_scope scope{*this};
    detail::cuda_check(detail::cuda_driver::get().map(reinterpret_cast<CUdeviceptr>(address), bytes, 0, physical, 0),
                       "cuMemMap");
  }

  /// The current device is left out of it: a peer need not have a context.
  void allow(void* address, std::size_t bytes, access allowed) const {
    CUmemAccessDesc description{};
    description.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
    description.flags = allowed == access::read ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    detail::cuda_check(
        detail::cuda_driver::get().set_access(reinterpret_cast<CUdeviceptr>(address), bytes, &description, 1),
        "cuMemSetAccess");
  }

  void unmap(void* address, std::size_t bytes) const {
    detail::cuda_check(detail::cuda_driver::get().unmap(reinterpret_cast<CUdeviceptr>(address), bytes), "cuMemUnmap");
  }

 private:
  struct dependencies {
    const cudaGraphNode_t* nodes;
    const cudaGraphEdgeData* edges;
    std::size_t count;
  };

  /// Of the capture of `stream`; good until it captures more.
  [[nodiscard]] static dependencies next_dependencies(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    dependencies next{};
    detail::cuda_check(
        cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &next.nodes, &next.edges, &next.count),
        "cudaStreamGetCaptureInfo");
    return next;
  }

  [[nodiscard]] CUmemAllocationProp allocation_properties(const physical_options& options) const {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
    properties.requestedHandleTypes = options.sharing == sharing::fabric ? CU_MEM_HANDLE_TYPE_FABRIC
                                      : options.sharing == sharing::file_descriptor
                                          ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                                          : CU_MEM_HANDLE_TYPE_NONE;
    properties.allocFlags.compressionType =
        options.compressible ? CU_MEM_ALLOCATION_COMP_GENERIC : CU_MEM_ALLOCATION_COMP_NONE;
    return properties;
  }
};

static_assert(device<cuda_device>);

}  // namespace holdfast::HOLDFAST_ABI
