// pad_queries on CUDA. See pad_queries.hpp.
#pragma once

#include <holdfast/detail/kernel_copy.cuh>
#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/pad_queries.hpp>
#include <holdfast/version.hpp>

namespace holdfast::inline HOLDFAST_ABI {

/// As the host's, on the stream's device; the current device is left as it was. Anything that converts to cudaStream_t is
/// accepted. Throws device_error, too, when the launch fails.
template <detail::mdspan_like In, detail::mdspan_like Out>
void pad_queries(cudaStream_t stream, const In& in, const Out& out) {
  detail::run_copy(stream, detail::plan_copy("pad_queries", "in", in, "out", out, false));
}

template <detail::mdspan_like In, class T>
void pad_queries(cudaStream_t stream, const In& in, const query_rows<T, cuda_device>& rows) {
  const auto plan = detail::plan_copy("pad_queries", "in", in, "rows", rows.heads_view(), false);
  rows.pin(stream);
  detail::run_copy(stream, plan);
}

template <detail::mdspan_like In, class T>
[[nodiscard]] query_rows<T, cuda_device> pad_queries(cudaStream_t stream, const In& in,
                                                     padded_query_buffer<T, cuda_device>& buffer) {
  return detail::pad_into(stream, in, buffer, [&](const auto& rows) { pad_queries(stream, in, rows.heads_view()); });
}

}  // namespace holdfast::HOLDFAST_ABI
