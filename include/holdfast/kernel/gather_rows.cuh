// gather_rows on CUDA. See gather_rows.hpp.
#pragma once

#include <holdfast/detail/kernel_gather.cuh>
#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/gather_rows.hpp>
#include <holdfast/version.hpp>

namespace holdfast::inline HOLDFAST_ABI {

/// As the host's, on the stream's device; the current device is left as it was. Anything that converts to cudaStream_t is
/// accepted. Throws device_error, too, when the launch fails.
template <row_source Source, detail::mdspan_like Indices, detail::mdspan_like Out>
HOLDFAST_HIDDEN void gather_rows(cudaStream_t stream, const Source& source, const Indices& indices, const Out& out,
                                 const gather_options<detail::index_of<Indices>>& options = {}) {
  detail::with_gather(source, indices, out, options,
                      [&]<std::int32_t Rows>(const auto& gather) { detail::launch_gather<Rows>(stream, gather); });
}

}  // namespace holdfast::HOLDFAST_ABI
