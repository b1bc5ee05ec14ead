// One launch, and what becomes of its error.
//
// The launch alone is judged, never cudaGetLastError: a pending error of the user's survives a launch that succeeds, and
// is not taken for ours. A launch that fails clears the error that it left and throws device_error.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <cuda_runtime_api.h>

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

/// Launches on the stream's device, whichever is current, and leaves the current one as it was. `blocks` is at least 1
/// and at most 2^31 - 1.
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
  config.numAttrs = programmatic ? 1 : 0;

  const cuda_device::relaxed_scope relaxed;  // a launch beside somebody's capture would break it
  const cuda_device::current_scope on_device(cuda_device::of(stream));
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) throw_launch_error(error, name, blocks, threads);
}

}  // namespace holdfast::HOLDFAST_ABI::detail
