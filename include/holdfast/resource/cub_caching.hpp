// cub::CachingDeviceAllocator as a resource: a private instance, made safe to share.
//
//   holdfast::cub_caching_resource pool{holdfast::cuda_device{0}};
//   void* p = pool.allocate(stream, bytes, 256);       // a cached block of the same bin, or cudaMalloc
//   pool.deallocate(stream, p, bytes, 256);            // back to its bin
//   pool.trim();                                       // cudaFree of all that is cached
//
// For engines that have it already, and devices without memory pools. Where there are pools, async_resource wastes less:
// a bin rounds sizes up to a power of two. What upstream needs around it, and gets here:
//   - every call under one mutex: upstream lists a freed block before it records the event that says when the block may
//     be reused, and takes any error of that event's query, a captured event's included, for "ready";
//   - a thread whose last CUDA error is clear: upstream takes a pending error of the user's for its own failure (and
//     loses what it had just allocated), clears it, and mistakes its own query of a busy block for a failure;
//   - pointers that are its own: upstream frees a foreign or doubly freed pointer all the same;
//   - per-thread default streams are waited for: they share one handle, which upstream takes for one stream.
// It prints only where CUB_STDERR or CUB_DEBUG_LOG is defined.
//
// Not here: protection from recycled stream handles. A block that was freed on a stream is handed to whoever allocates on
// a stream of the same handle: destroy a stream when its work is done, or keep it.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cub/util_allocator.cuh>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

/// In cub's terms: a bin holds blocks of bin_growth^n bytes, min_bin <= n <= max_bin. Smaller requests are rounded up;
/// larger ones are not cached (their deallocation waits for the stream, and calls cudaFree).
struct cub_caching_options {
  unsigned bin_growth = 2;
  unsigned min_bin = 9;   ///< 512 B
  unsigned max_bin = 28;  ///< 256 MiB: a decode buffer of 2048 rows is 128 MiB
  std::size_t max_cached_bytes = std::numeric_limits<std::size_t>::max();
};

namespace detail {

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // newer CCCLs discourage it; engines have it

class cub_caching_impl {
 public:
  using device_type = cuda_device;
  static constexpr const char* name = "cub_caching_resource";
  static constexpr std::size_t max_alignment = 256;  // its blocks are cudaMalloc's

  cub_caching_impl(cuda_device d, cub_caching_options options)
      : device(d),
        cub_(options.bin_growth, options.min_bin, options.max_bin, options.max_cached_bytes, /*skip_cleanup=*/true) {}

  cub_caching_impl(const cub_caching_impl&) = delete;
  cub_caching_impl& operator=(const cub_caching_impl&) = delete;

  ~cub_caching_impl() {
    try {
      trim();
    } catch (...) {  // the runtime is gone, and the memory with it
    }
  }

  void* allocate(cudaStream_t stream, std::size_t bytes, std::size_t) {
    const std::lock_guard lock{mutex_};
    void* p = nullptr;
    const auto call = [&] { return cub_.DeviceAllocate(device.ordinal, &p, bytes, explicit_handle(stream)); };
    cudaError_t code = isolated(call);
    if (code == cudaErrorNotReady) {  // its own query of a cached block in use: once more without the cached ones
      cub::CachingDeviceAllocator::CachedBlocks aside{cub_.cached_blocks.key_comp()};
      aside.swap(cub_.cached_blocks);
      code = isolated(call);
      cub_.cached_blocks.merge(aside);
      if (code == cudaErrorMemoryAllocation) {
        free_cached();
        code = isolated(call);
      }
    }
    if (code == cudaErrorMemoryAllocation) [[unlikely]] {
      throw out_of_memory{name, bytes, held(), device.memory().free};
    }
    cuda_check(code, "cub::CachingDeviceAllocator::DeviceAllocate");
    return p;
  }

  void deallocate(cudaStream_t stream, void* p, std::size_t, std::size_t) {
    const std::lock_guard lock{mutex_};
    const auto block = cub_.live_blocks.find({p, device.ordinal});
    if (block == cub_.live_blocks.end()) {
      return;
    }
    const bool cached = block->bin != cub::CachingDeviceAllocator::INVALID_BIN &&
                        cub_.cached_bytes[device.ordinal].free + block->bytes <= cub_.max_cached_bytes;
    if (!cached || cuda_device::thread_bound(stream)) {
      wait_for_work(device, stream);
    }
    cuda_check(isolated([&] { return cub_.DeviceFree(device.ordinal, p); }), "cub::CachingDeviceAllocator::DeviceFree");
  }

  void trim() {
    const cuda_device::relaxed_scope relaxed;
    const cuda_device::current_scope current{device};
    const std::lock_guard lock{mutex_};
    free_cached();
  }

  [[nodiscard]] std::size_t cached_bytes() {
    const std::lock_guard lock{mutex_};
    return cub_.cached_bytes[device.ordinal].free;
  }

  [[nodiscard]] std::size_t used_bytes() {
    const std::lock_guard lock{mutex_};
    return cub_.cached_bytes[device.ordinal].live;
  }

  const cuda_device device;

 private:
  // Runs a call of cub's where no CUDA error is pending: here, or on a thread of its own when the user has one.
  template <class Call>
  cudaError_t isolated(const Call& call) {
    if (cudaPeekAtLastError() == cudaSuccess) [[likely]] {
      const cudaError_t code = call();
      static_cast<void>(cudaGetLastError());  // its own: a busy block's cudaErrorNotReady, say
      return code;
    }
    cudaError_t code = cudaErrorUnknown;
    std::thread{[&] {
      try {
        const cuda_device::relaxed_scope relaxed;
        const cuda_device::current_scope current{device};
        code = call();
      } catch (...) {
      }
    }}.join();
    return code;
  }

  void free_cached() {
    for (const auto& block : cub_.cached_blocks) {  // before cudaFree, which waits today but promises nothing
      cuda_check(cudaEventSynchronize(block.ready_event), "cudaEventSynchronize");
    }
    cuda_check(isolated([&] { return cub_.FreeAllCached(); }), "cub::CachingDeviceAllocator::FreeAllCached");
  }

  [[nodiscard]] std::size_t held() {
    const auto& bytes = cub_.cached_bytes[device.ordinal];
    return bytes.live + bytes.free;
  }

  // cub compares and records handles, and is compiled once a program: null must not depend on who compiled it.
  static cudaStream_t explicit_handle(cudaStream_t stream) {
    if (stream != nullptr) {
      return stream;
    }
    return cuda_device::thread_bound(stream) ? cudaStreamPerThread : cudaStreamLegacy;
  }

  std::mutex mutex_;
  cub::CachingDeviceAllocator cub_;
};

#pragma GCC diagnostic pop

}  // namespace detail

/// Memory of one private cub::CachingDeviceAllocator. Copies share it; two made apart are not equal. The last handle
/// frees what is cached; memory never given back stays with the process. Thread safe.
///
/// A block is usable in the order of the stream it was allocated on, which must be the one it is deallocated on, and
/// which must outlive it. Sizes are rounded up to bin_growth^n bytes. Aligned to 256 bytes; larger alignments cost the
/// difference in bytes. A pointer that is not this resource's, or was given back before, is ignored.
class cub_caching_resource : public detail::resource_handle<detail::cub_caching_impl> {
 public:
  explicit cub_caching_resource(cuda_device device = {}, cub_caching_options options = {})
      : resource_handle(std::in_place, device, options) {}

  /// Gives all cached memory back to the device; waits on the host for the work that used it. Throws `device_error`.
  void trim() { impl().trim(); }

  /// Bytes cached: free, but not the device's.
  [[nodiscard]] std::size_t cached_bytes() const { return impl().cached_bytes(); }

  /// Bytes handed out, as the bins round them.
  [[nodiscard]] std::size_t used_bytes() const { return impl().used_bytes(); }
};

static_assert(memory_resource<cub_caching_resource>);

}  // namespace holdfast::HOLDFAST_ABI
