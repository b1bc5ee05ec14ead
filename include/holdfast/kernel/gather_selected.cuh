// gather_selected on CUDA. See gather_selected.hpp.
#pragma once

#include <holdfast/detail/kernel_selected.cuh>
#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/gather_rows.cuh>
#include <holdfast/kernel/gather_selected.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace holdfast::inline HOLDFAST_ABI {

/// As the host device's, with what cub::DeviceScan needs on this device. Throws device_error, too. Allowed while
/// anybody captures.
[[nodiscard]] HOLDFAST_HIDDEN inline std::size_t gather_selected_workspace_bytes(const cuda_device& device,
                                                                                 std::int64_t pool_rows,
                                                                                 std::int64_t capacity) {
  detail::check_selected_counts(pool_rows, capacity);
  return detail::lay_out_selected(pool_rows, capacity, detail::scan_bytes_with_cub(device, pool_rows + 1)).bytes;
}

/// As the host's, on the stream's device; the current device and a pending error are left as they were. Anything that
/// converts to cudaStream_t is accepted. Throws device_error, too, when a launch fails: what was queued before it runs.
template <row_source Source, detail::mdspan_like Indices, detail::mdspan_like Out, detail::mdspan_like Remap>
HOLDFAST_HIDDEN void gather_selected(cudaStream_t stream, const Source& source, const Indices& indices, const Out& out,
                                     const Remap& remap, std::span<std::byte> workspace,
                                     const gather_selected_options& options = {}) {
  detail::gather_selected_by(detail::selected_steps_on_cuda{stream}, source, indices, out, remap, workspace, options);
}

}  // namespace holdfast::HOLDFAST_ABI
