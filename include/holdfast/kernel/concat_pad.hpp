// concat_pad: the two halves of absorbed MLA queries, side by side where a consumer wants them, among more heads than there
// are.
//
//   // absorbed [rows, 16, 512], as the matrix product left it (often heads first); rope [rows, 16, 64]
//   auto q = holdfast::concat_pad(stream, absorbed, rope, buffer);           // q: [rows, 64, 576]
//
//   auto q = buffer.acquire(stream, rows);                                   // the same in two steps
//   holdfast::concat_pad(stream, absorbed, rope, q);
//   holdfast::concat_pad(stream, absorbed, rope, q.heads_view());            // or any view; plain views pin nothing
//
// Bits are copied; nothing but the real heads is written. Here for host::stream_ref, in concat_pad.cuh for cudaStream_t.
#pragma once

#include <holdfast/detail/kernel_concat.hpp>
#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_into.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/kernel/row_limit.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

struct concat_pad_options {
  /// Only the first so many rows count: the others become zeros, and nothing is read for them.
  row_limit rows{};
  /// Launch so that the grid starts while its predecessor in the stream still runs, and waits for it before it reads or
  /// writes (see row_op_shape::programmatic). The host device ignores it.
  bool programmatic = false;
};

/// Each head of `out` becomes that of `absorbed` followed by that of `rope`, in stream order, as one kernel; none when
/// there is nothing to write.
///
/// mdspans [rows, heads, a], [rows, heads, b] and [rows, heads, a + b] of one trivially copyable element type of 1 to 16
/// bytes (a power of two), with any strides. Heads whose elements lie side by side, at 16-byte multiples, are quickest.
/// The memory must stay until the stream (or every launch of the graph it captures) is through with it. `out` must not
/// overlap the inputs, nor its own elements each other: that is not checked.
///
/// Throws logic_error, and launches nothing, for extents that do not fit each other or are negative, null data that should
/// hold elements, offsets beyond 2^63 - 1 bytes, rows of more than 2^30 packets, strided elements that are not aligned.
template <detail::mdspan_like Absorbed, detail::mdspan_like Rope, detail::mdspan_like Out>
void concat_pad(host::stream_ref stream, const Absorbed& absorbed, const Rope& rope, const Out& out,
                const concat_pad_options& options = {}) {
  detail::run_concat(stream, detail::plan_concat(absorbed, rope, out, options.rows), options.programmatic);
}

/// Into acquired rows. What `stream` captures owns their memory from now on, wherever they were acquired.
template <detail::mdspan_like Absorbed, detail::mdspan_like Rope, class T>
void concat_pad(host::stream_ref stream, const Absorbed& absorbed, const Rope& rope,
                const query_rows<T, host_device>& rows, const concat_pad_options& options = {}) {
  const auto plan = detail::plan_concat(absorbed, rope, rows.heads_view(), options.rows);
  rows.pin(stream);
  detail::run_concat(stream, plan, options.programmatic);
}

namespace detail {

template <class First, class Second>
[[nodiscard]] std::array<std::int64_t, 3> concat_extents(const First& first, const Second& second) {
  const auto of = [](const auto& view, std::size_t i) { return static_cast<std::int64_t>(view.extent(i)); };
  std::int64_t width = 0;
  if (__builtin_add_overflow(of(first, 2), of(second, 2), &width)) width = -1;  // refused as such
  return {of(first, 0), of(first, 1), width};
}

}  // namespace detail

/// Into rows of `buffer`, which are acquired (and so grown, pinned and ordered) first; returns them. Throws what acquire
/// does, too; inputs that do not fit each other are refused when the rows are acquired.
template <detail::mdspan_like Absorbed, detail::mdspan_like Rope, class T>
[[nodiscard]] query_rows<T, host_device> concat_pad(host::stream_ref stream, const Absorbed& absorbed, const Rope& rope,
                                                    padded_query_buffer<T, host_device>& buffer,
                                                    const concat_pad_options& options = {}) {
  return detail::fill_rows_of(
      buffer, "concat_pad", stream, detail::concat_extents(absorbed, rope),
      [&](const auto& rows) { concat_pad(stream, absorbed, rope, rows.heads_view(), options); });
}

}  // namespace holdfast::HOLDFAST_ABI
