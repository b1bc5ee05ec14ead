// pad_queries: packed (or any) query heads go where a consumer wants them, among more heads than there are.
//
//   auto q = holdfast::pad_queries(stream, q_in, buffer);        // q_in: [rows, 16, 512]; q: [rows, 64, 512]
//
//   auto q = buffer.acquire(stream, rows);                       // the same in two steps
//   holdfast::pad_queries(stream, q_in, q);
//   holdfast::pad_queries(stream, q_in, q.heads_view());         // or into any view; plain views pin nothing
//
// It writes the real heads and nothing else: the padding was zeroed once and is not touched. Here for host::stream_ref,
// in pad_queries.cuh for cudaStream_t. Fused producers (norm, RoPE) write into the same view instead.
#pragma once

#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/version.hpp>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

/// Copies every element of `in` to its place in `out`, in stream order, as one kernel; none when there is nothing to
/// copy.
///
/// Both are mdspans [rows, heads, head_dim] of the same trivially copyable element type (`in` may be const) and the same
/// extents, with any strides. `out` is the view of the real heads: usually strides {padded_heads * head_dim, head_dim, 1}.
/// The memory must stay until the stream (or every launch of the graph it captures) is through with it. `in` and `out`
/// must not overlap, nor may elements of `out` overlap each other: that is not checked.
///
/// Throws logic_error, and launches nothing, for extents that differ or are negative, null data that should hold
/// elements, offsets beyond 2^63 - 1 bytes, rows of more than 2^30 packets.
template <detail::mdspan_like In, detail::mdspan_like Out>
void pad_queries(host::stream_ref stream, const In& in, const Out& out) {
  detail::run_copy(stream, detail::plan_copy("pad_queries", "in", in, "out", out, false));
}

/// Into acquired rows. What `stream` captures owns their memory from now on, wherever they were acquired.
template <detail::mdspan_like In, class T>
void pad_queries(host::stream_ref stream, const In& in, const query_rows<T, host_device>& rows) {
  const auto plan = detail::plan_copy("pad_queries", "in", in, "rows", rows.heads_view(), false);
  rows.pin(stream);
  detail::run_copy(stream, plan);
}

namespace detail {

/// Acquires rows for `in` and has `pad` copy it there; borrows `in` where nothing is padded and it is packed.
template <class In, class T, class Device, class Pad>
[[nodiscard]] query_rows<T, Device> pad_into(typename Device::stream_type stream, const In& in,
                                             padded_query_buffer<T, Device>& buffer, Pad&& pad) {
  check_copy_types<In, strided_view<T, 3>>();
  const query_shape& shape = buffer.shape();
  const auto rows = static_cast<std::int64_t>(in.extent(0));
  if (static_cast<std::int64_t>(in.extent(1)) != shape.heads ||
      static_cast<std::int64_t>(in.extent(2)) != shape.head_dim) {
    throw logic_error{"pad_queries: " + to_text(side_of("in", in)) + ", but the buffer holds " +
                      std::to_string(shape.heads) + " heads of " + std::to_string(shape.head_dim)};
  }
  const bool packed = static_cast<std::int64_t>(in.stride(0)) == shape.heads * shape.head_dim &&
                      static_cast<std::int64_t>(in.stride(1)) == shape.head_dim &&
                      static_cast<std::int64_t>(in.stride(2)) == 1;
  if (shape.heads == shape.padded_heads && packed && rows > 0) {
    static_cast<void>(usable_capture<Device>(stream, [] { return std::string{"pad_queries"}; }));
    if (auto borrowed = buffer.borrow(in.data_handle(), rows)) {
      return std::move(*borrowed);
    }
  }
  query_rows<T, Device> acquired = buffer.acquire(stream, rows);
  pad(acquired);
  return acquired;
}

}  // namespace detail

/// Into rows of `buffer`, which are acquired (and so grown, pinned and ordered) first; returns them. When nothing has to
/// be padded (heads == padded_heads) and `in` is packed and aligned as the buffer, they are `in` itself, borrowed: not
/// pinned, and `in` must outlive their use. Throws what acquire does, too.
template <detail::mdspan_like In, class T>
[[nodiscard]] query_rows<T, host_device> pad_queries(host::stream_ref stream, const In& in,
                                                     padded_query_buffer<T, host_device>& buffer) {
  return detail::pad_into(stream, in, buffer, [&](const auto& rows) { pad_queries(stream, in, rows.heads_view()); });
}

}  // namespace holdfast::HOLDFAST_ABI
