// CUDA's stream-ordered allocator, on a pool of our own.
//
//   holdfast::async_resource pool{holdfast::cuda_device{0}};
//   void* p = pool.allocate(stream, bytes, 256);       // cudaMallocFromPoolAsync
//   pool.deallocate(stream, p, bytes, 256);            // cudaFreeAsync
//   pool.trim();                                       // gives back to the device what nobody uses
//
// The device's default pool is never touched: others may change its threshold or trim it. Not here: memory nodes (the
// rules refuse capturing streams), sharing between processes, access from other devices.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

struct async_options {
  /// Bytes the pool keeps when a stream, event or device is synchronised; what is free beyond goes back to the device
  /// then. The runtime's own default is 0, which makes the next allocation as slow as cudaMalloc.
  std::uint64_t release_threshold = std::numeric_limits<std::uint64_t>::max();
};

namespace detail {

class async_impl {
 public:
  using device_type = cuda_device;
  static constexpr const char* name = "async_resource";
  static constexpr std::size_t max_alignment = 256;  // CUDA C++ Programming Guide, "Device Memory Accesses"

  async_impl(cuda_device d, async_options options) : device(d) {
    const cuda_device::relaxed_scope relaxed;
    const cuda_device::current_scope current{device};
    int supported = 0;
    cuda_check(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device.ordinal),
               "cudaDeviceGetAttribute");
    if (supported == 0) {
      throw device_error{static_cast<int>(cudaErrorNotSupported),
                         "async_resource: device " + std::to_string(device.ordinal) +
                             " has no memory pools (cudaDevAttrMemoryPoolsSupported is 0); use malloc_resource or "
                             "cub_caching_resource"};
    }
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device.ordinal;
    cuda_check(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
    const cudaError_t code =
        cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &options.release_threshold);
    if (code != cudaSuccess) {
      static_cast<void>(cudaMemPoolDestroy(pool_));
      throw_cuda_error(code, "cudaMemPoolSetAttribute");
    }
  }

  async_impl(const async_impl&) = delete;
  async_impl& operator=(const async_impl&) = delete;

  // The runtime keeps the pool until the last memory of it is freed; all errors (of a runtime that is gone, say) end here.
  ~async_impl() {
    const cuda_device::relaxed_scope relaxed;
    if (cudaMemPoolDestroy(pool_) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
    }
  }

  void* allocate(cudaStream_t stream, std::size_t bytes, std::size_t) {
    void* p = nullptr;
    const cudaError_t code = cudaMallocFromPoolAsync(&p, bytes, pool_, stream);
    if (code == cudaErrorMemoryAllocation) [[unlikely]] {
      static_cast<void>(cudaGetLastError());
      throw out_of_memory{name, bytes, attribute(cudaMemPoolAttrReservedMemCurrent), device.memory().free};
    }
    cuda_check(code, "cudaMallocFromPoolAsync");
    return p;
  }

  static void deallocate(cudaStream_t stream, void* p, std::size_t, std::size_t) {
    cuda_check(cudaFreeAsync(p, stream), "cudaFreeAsync");
  }

  void trim(std::size_t keep_bytes) {
    const cuda_device::relaxed_scope relaxed;
    cuda_check(cudaMemPoolTrimTo(pool_, keep_bytes), "cudaMemPoolTrimTo");
  }

  [[nodiscard]] std::uint64_t attribute(cudaMemPoolAttr which) const {
    const cuda_device::relaxed_scope relaxed;
    std::uint64_t value = 0;
    cuda_check(cudaMemPoolGetAttribute(pool_, which, &value), "cudaMemPoolGetAttribute");
    return value;
  }

  const cuda_device device;

 private:
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace detail

/// Memory of one private cudaMemPool. Copies share the pool; two made apart are not equal. The pool goes with the last
/// handle, or once the last memory of it is freed, whichever is later. Thread safe.
///
/// `allocate` and `deallocate` are ordered by their stream and never wait on the host. Aligned to 256 bytes; larger
/// alignments cost the difference in bytes. A double free is refused by the runtime, and nothing changes; other memory
/// of the runtime's, cudaMalloc's included, it would really free, in the order of the stream.
class async_resource : public detail::resource_handle<detail::async_impl> {
 public:
  /// Makes the pool. Throws `device_error`: the device has no memory pools (some virtual GPUs), or there is no such device.
  explicit async_resource(cuda_device device = {}, async_options options = {})
      : resource_handle(std::in_place, device, options) {}

  /// Gives free memory back to the device until the pool holds `keep_bytes` or less, or nothing more is free. What was
  /// deallocated counts as free once its stream has got there. Never waits, and never touches memory in use.
  void trim(std::size_t keep_bytes = 0) { impl().trim(keep_bytes); }

  /// Bytes the pool holds of the device.
  [[nodiscard]] std::uint64_t reserved_bytes() const { return impl().attribute(cudaMemPoolAttrReservedMemCurrent); }

  /// Bytes handed out, as the runtime rounds them.
  [[nodiscard]] std::uint64_t used_bytes() const { return impl().attribute(cudaMemPoolAttrUsedMemCurrent); }
};

static_assert(memory_resource<async_resource>);

}  // namespace holdfast::HOLDFAST_ABI
