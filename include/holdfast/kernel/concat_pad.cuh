// concat_pad on CUDA. See concat_pad.hpp.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/concat_pad.hpp>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/version.hpp>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

HOLDFAST_HIDDEN inline void run_concat(cudaStream_t stream, const concat_plan& plan, bool programmatic) {
  with_concat_op(plan, [&]<class Op>(const Op& op) {
    constexpr row_op_shape usual = row_op_shape_of<Op>();
    constexpr row_op_shape early{usual.threads, usual.packets, usual.max_blocks, true};  // the same kernel
    programmatic ? run_row_op<early>(stream, op) : run_row_op<usual>(stream, op);
  });
}

}  // namespace detail

/// As the host's, on the stream's device; the current device is left as it was. Anything that converts to cudaStream_t is
/// accepted. Throws device_error, too, when the launch fails.
template <detail::mdspan_like Absorbed, detail::mdspan_like Rope, detail::mdspan_like Out>
void concat_pad(cudaStream_t stream, const Absorbed& absorbed, const Rope& rope, const Out& out,
                const concat_pad_options& options = {}) {
  detail::run_concat(stream, detail::plan_concat(absorbed, rope, out, options.rows), options.programmatic);
}

template <detail::mdspan_like Absorbed, detail::mdspan_like Rope, class T>
void concat_pad(cudaStream_t stream, const Absorbed& absorbed, const Rope& rope, const query_rows<T, cuda_device>& rows,
                const concat_pad_options& options = {}) {
  const auto plan = detail::plan_concat(absorbed, rope, rows.heads_view(), options.rows);
  rows.pin(stream);
  detail::run_concat(stream, plan, options.programmatic);
}

template <detail::mdspan_like Absorbed, detail::mdspan_like Rope, class T>
[[nodiscard]] query_rows<T, cuda_device> concat_pad(cudaStream_t stream, const Absorbed& absorbed, const Rope& rope,
                                                    padded_query_buffer<T, cuda_device>& buffer,
                                                    const concat_pad_options& options = {}) {
  return detail::fill_rows_of(
      buffer, "concat_pad", stream, detail::concat_extents(absorbed, rope),
      [&](const auto& rows) { concat_pad(stream, absorbed, rope, rows.heads_view(), options); });
}

}  // namespace holdfast::HOLDFAST_ABI
