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
  detail::with_gather(source, indices, out, options, [&]<std::int32_t Rows>(const auto& gather) {
    detail::launch_gather<Rows>(stream, gather, options.programmatic);
  });
}

template <row_source Source, detail::mdspan_like Indices, class T>
HOLDFAST_HIDDEN void gather_rows(cudaStream_t stream, const Source& source, const Indices& indices,
                                 const scratch<T, cuda_device>& rows,
                                 const gather_options<detail::index_of<Indices>>& options = {}) {
  detail::check_scratch(rows, options.tail_rows);
  bool pinned = false;
  detail::with_gather(source, indices, rows.view(), options, [&]<std::int32_t Rows>(const auto& gather) {
    rows.pin(stream);
    pinned = true;
    detail::launch_gather<Rows>(stream, gather, options.programmatic);
  });
  if (!pinned) rows.pin(stream);
}

template <row_source Source, detail::mdspan_like Indices, detail::scratch_allocator<cuda_device> Allocator>
[[nodiscard]] HOLDFAST_HIDDEN typename Allocator::handle gather_rows(
    cudaStream_t stream, const Source& source, const Indices& indices, Allocator& allocator,
    const gather_options<detail::index_of<Indices>>& options = {}) {
  return detail::gather_into<Source>(stream, indices, allocator, options, [&](const auto& out, const auto& with_tail) {
    gather_rows(stream, source, indices, out, with_tail);
  });
}

}  // namespace holdfast::HOLDFAST_ABI
