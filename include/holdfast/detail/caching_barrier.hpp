// Waits on the host for all of a device's work, without naming a stream, and without harm to anybody's capture.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/version.hpp>

#include <cuda_runtime_api.h>

#include <utility>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Not thread safe. Its calls are made under a relaxed_scope, on the current device; it may end anywhere.
template <device Device>
class caching_barrier;

/// cudaFree "causes the GPU to synchronize across all executing CUDA streams" (CUDA Programming Guide, "Stream-Ordered
/// Memory Allocator"), and, unlike cudaDeviceSynchronize, invalidates no capture. It needs something to free: that is
/// allocated ahead, since there may be no memory left when it is needed.
template <>
class caching_barrier<cuda_device> {
 public:
  caching_barrier() = default;
  caching_barrier(const caching_barrier&) = delete;
  caching_barrier& operator=(const caching_barrier&) = delete;
  ~caching_barrier() {
    if (token_ != nullptr) {
      const cuda_device::relaxed_scope relaxed;
      static_cast<void>(cudaFree(token_));
    }
  }

  void prepare(cuda_device) {
    if (token_ == nullptr && cudaMalloc(&token_, 1) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      token_ = nullptr;
    }
  }

  /// All work that was queued on the device before is done. False: it could not be waited for.
  [[nodiscard]] bool wait(cuda_device device) {
    prepare(device);
    if (token_ == nullptr) {
      return false;
    }
    cuda_check(cudaFree(std::exchange(token_, nullptr)), "cudaFree");
    return true;
  }

 private:
  void* token_ = nullptr;
};

template <>
class caching_barrier<host_device> {
 public:
  void prepare(host_device) {}
  [[nodiscard]] bool wait(host_device device) {
    host::run_pending(device);
    return true;
  }
};

}  // namespace holdfast::HOLDFAST_ABI::detail
