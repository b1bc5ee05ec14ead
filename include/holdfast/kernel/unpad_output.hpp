// unpad_output: the real heads of what a consumer computed over padded heads.
//
//   holdfast::unpad_output(stream, attention_out, out);   // [rows, 64, 512] -> [rows, 16, 512]
//
// Here for host::stream_ref, in unpad_output.cuh for cudaStream_t. Whoever can go on with a strided view of the first
// heads needs no copy at all.
#pragma once

#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/version.hpp>

namespace holdfast::inline HOLDFAST_ABI {

/// Copies the first `out.extent(1)` heads of each row of `padded` to `out`, in stream order, as one kernel; none when
/// there is nothing to copy.
///
/// `padded` is an mdspan [rows, padded_heads, head_dim], `out` one of [rows, heads, head_dim] with heads <= padded_heads,
/// of the same trivially copyable element type (`padded` may be const), with any strides. The memory must stay until the
/// stream (or every launch of the graph it captures) is through with it. The two must not overlap, nor may elements of
/// `out` overlap each other: that is not checked.
///
/// Throws logic_error, and launches nothing, for more heads than there are, other extents that differ or are negative,
/// null data that should hold elements, offsets beyond 2^63 - 1 bytes, rows of more than 2^30 packets.
template <detail::mdspan_like Padded, detail::mdspan_like Out>
void unpad_output(host::stream_ref stream, const Padded& padded, const Out& out) {
  detail::run_copy(stream, detail::plan_copy("unpad_output", "padded", padded, "out", out, true));
}

}  // namespace holdfast::HOLDFAST_ABI
