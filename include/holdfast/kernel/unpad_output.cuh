// unpad_output on CUDA. See unpad_output.hpp.
#pragma once

#include <holdfast/detail/kernel_copy.cuh>
#include <holdfast/kernel/unpad_output.hpp>
#include <holdfast/version.hpp>

namespace holdfast::inline HOLDFAST_ABI {

/// As the host's, on the stream's device; the current device is left as it was. Anything that converts to cudaStream_t is
/// accepted. Throws device_error, too, when the launch fails.
template <detail::mdspan_like Padded, detail::mdspan_like Out>
void unpad_output(cudaStream_t stream, const Padded& padded, const Out& out) {
  detail::run_copy(stream, detail::plan_copy("unpad_output", "padded", padded, "out", out, true));
}

}  // namespace holdfast::HOLDFAST_ABI
