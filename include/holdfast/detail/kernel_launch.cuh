// One launch, and what becomes of its error.
//
// The launch alone is judged, never cudaGetLastError: a pending error of the user's survives a launch that succeeds, and
// is not taken for ours. A launch that fails clears the error that it left and throws device_error.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace holdfast::inline HOLDFAST_ABI::detail {

[[noreturn]] inline void throw_launch_error(cudaError_t error, const char* kernel, std::int64_t blocks,
                                            unsigned threads) {
  static_cast<void>(cudaGetLastError());
  throw device_error(static_cast<int>(error), std::string(kernel) + ": launching " + std::to_string(blocks) +
                                                  " blocks of " + std::to_string(threads) + " threads failed: " +
                                                  cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

/// Whether the code that this device runs of a kernel waits for its predecessors (wait_for_predecessors, sm_90 and newer):
/// a fat binary, or its PTX, may be older than the device. The last kernel that did is remembered.
inline bool waits_for_predecessors(const void* kernel, std::atomic<const void*>& known) {
  if (known.load(std::memory_order_relaxed) == kernel) return true;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  if (attributes.ptxVersion < 90) return false;
  known.store(kernel, std::memory_order_relaxed);
  return true;
}

/// Launches on the stream's device, whichever is current, and leaves the current one as it was. `blocks` is at least 1
/// and at most 2^31 - 1. Throws logic_error for the legacy stream while a blocking one captures, which a launch would
/// break; device_error.
template <class... Parameters, class... Arguments>
HOLDFAST_HIDDEN inline void launch(cudaStream_t stream, const char* name, std::int64_t blocks, unsigned threads,
                                   bool programmatic, void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;

  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks), 1, 1);
  config.blockDim = dim3(threads, 1, 1);
  config.stream = stream;
  config.attrs = &attribute;

  if (stream == nullptr || stream == cudaStreamLegacy) {
    if (const capture_state state = cuda_device::capturing(stream).state; state == capture_state::implicit)
      resource_rules::refuse_capture(name, state);
  }
  const cuda_device::relaxed_scope relaxed;  // a launch beside somebody's capture would break it
  const cuda_device::current_scope on_device(cuda_device::of(stream));
  static std::atomic<const void*> known{nullptr};
  config.numAttrs = programmatic && waits_for_predecessors(reinterpret_cast<const void*>(kernel), known) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) throw_launch_error(error, name, blocks, threads);
}

}  // namespace holdfast::HOLDFAST_ABI::detail
