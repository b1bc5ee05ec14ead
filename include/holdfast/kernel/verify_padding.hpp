// verify_padding: whether padding is still zero, bit for bit. For tests, canaries and debug builds of engines: a producer
// that writes one head too many is found where it happens, not where attention goes wrong.
//
//   const auto report = holdfast::verify_padding(stream, q_pad);          // waits for the stream
//   if (!report.clean()) complain(report.bad_bytes, report.first_bad_offset);
//
//   cudaMemsetAsync(check, 0, sizeof *check, stream);                     // once, before its first use
//   holdfast::verify_padding_async(stream, q, check);                     // one kernel, capturing or not
//   ... later: check->report, in device memory
//
// What is looked at: the padding heads of a view's rows, of acquired rows (query_rows), or of all rows that a
// padded_query_buffer holds; the tail of scratch. Every byte must be zero, so a negative zero is bad.
//
// Here for host::stream_ref, in verify_padding.cuh for cudaStream_t.
//
// Not here: memory that a buffer has grown out of and only graphs and older handles still hold.
#pragma once

#include <holdfast/capture.hpp>
#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_launch.hpp>
#include <holdfast/detail/kernel_verify.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/row_limit.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/tail_padded_allocator.hpp>
#include <holdfast/version.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI {

struct padding_report {
  std::int64_t bad_bytes = 0;  ///< that are not zero
  std::int64_t first_bad_offset =
      -1;  ///< of the lowest one, in bytes from row 0's first (real) byte; -1: there is none

  [[nodiscard]] HOLDFAST_HOST_DEVICE constexpr bool clean() const { return bad_bytes == 0; }
  friend bool operator==(const padding_report&, const padding_report&) = default;
};

/// Device memory for a report and for the kernel that makes it. All its bytes are zero before its first use; after that
/// each check leaves its report, and the rest ready for the next check. One check at a time may use it.
struct padding_check {
  padding_report report;  ///< of the last check
  detail::padding_found found;
  std::uint32_t arrived = 0;
};

struct verify_padding_options {
  /// Only the first so many rows are looked at; of scratch, so many of its tail's.
  row_limit rows{};
  /// Launch so that the grid starts while its predecessor in the stream still runs, and waits for it before it reads (see
  /// row_op_shape::programmatic). The host device ignores it.
  bool programmatic = false;
};

namespace detail {

template <class View>
[[nodiscard]] padding_bytes padding_of(const View& view, std::int64_t heads) {
  static_assert(View::rank() == 3, "holdfast: views must have rank 3: [rows, padded_heads, head_dim]");
  static_assert(View::is_always_strided() && std::is_pointer_v<typename View::data_handle_type>,
                "holdfast: views must be of plain memory, with a strided layout");
  return padding_of(side_of("the view", view), std::int64_t{sizeof(typename View::element_type)}, heads);
}

template <class T, class Device>
[[nodiscard]] padding_bytes padding_of(const query_rows<T, Device>& rows) {
  return padding_of(rows.view(), rows.shape().heads);
}

/// Rows of nothing but padding, behind those that are not.
template <class T, class Device>
[[nodiscard]] padding_bytes padding_of(const scratch<T, Device>& rows) {
  const std::int64_t row_bytes = rows.row_elements() * std::int64_t{sizeof(T)};
  if (rows.tail_rows() == 0) return {};
  const auto* const data = reinterpret_cast<const std::byte*>(rows.data());
  return {data, rows.rows() * row_bytes, row_bytes, row_bytes, rows.tail_rows()};
}

/// Handles whose padding is known.
template <class Handle, class Device>
inline constexpr bool is_padded_handle = false;
template <class T, class Device>
inline constexpr bool is_padded_handle<query_rows<T, Device>, Device> = true;
template <class T, class Device>
inline constexpr bool is_padded_handle<scratch<T, Device>, Device> = true;

inline void refuse_null(const padding_check* check) {
  if (check == nullptr) refuse_verify("the padding_check is null");
}

inline void run_check(host::stream_ref stream, const padding_bytes& padding, padding_check* check,
                      const verify_padding_options& options) {
  refuse_null(check);
  with_checked_padding(padding, options.rows, [&](const auto& op) {
    const auto tiling = make_row_op_tiling(op.rows, op.row_packets, verify_shape);
    launch(stream, "verify_padding", [op, tiling, check] {
      const padding_found found = check_on_host(op, tiling);
      check->report = {static_cast<std::int64_t>(found.bad_bytes), static_cast<std::int64_t>(~found.inverted_first)};
    });
  });
}

/// A check whose report the host waits for. `enqueue(check)` queues it on `stream`.
template <class Device, class Enqueue>
[[nodiscard]] padding_report check_and_wait(typename Device::stream_type stream, const Enqueue& enqueue) {
  constexpr auto who = [] { return std::string{"verify_padding"}; };
  if (usable_capture<Device>(stream, who).state == capture_state::active)
    refuse_verify("the stream is capturing, and cannot be waited for; verify_padding_async can be captured");

  struct memory {
    any_resource<Device> resource;
    typename Device::stream_type stream;
    void* data = resource.allocate(stream, sizeof(padding_check), alignof(padding_check));
    memory(any_resource<Device> from, typename Device::stream_type on) : resource(std::move(from)), stream(on) {}
    memory(const memory&) = delete;
    memory& operator=(const memory&) = delete;
    ~memory() { resource.deallocate(stream, data, sizeof(padding_check), alignof(padding_check)); }
  };
  const Device device = Device::of(stream);
  const memory check(default_resource(device), stream);
  const typename Device::relaxed_scope relaxed;
  const typename Device::current_scope current(device);
  padding_report report;
  Device::fill(stream, check.data, std::byte{0}, sizeof(padding_check));
  enqueue(static_cast<padding_check*>(check.data));
  Device::copy(stream, &report, &static_cast<padding_check*>(check.data)->report, sizeof report);
  wait_for_work(device, stream);
  return report;
}

}  // namespace detail

/// Looks at the heads behind the first `heads` ones of each row, in stream order, as one kernel, and leaves the report in
/// `check`; with nothing to look at, too (it is clean then).
///
/// `view` is an mdspan [rows, padded_heads, head_dim] of any element type; rows have any stride, what a row holds lies
/// side by side. The view and `check` must stay until the stream (or every launch of the graph it captures) is through
/// with them. Throws logic_error, and launches nothing, for a null `check`, extents or heads that make no sense, padding
/// that does not lie side by side, null data that should hold padding, offsets beyond 2^63 - 1 bytes, padding of more than
/// 2^30 packets a row.
template <detail::mdspan_like View>
void verify_padding_async(host::stream_ref stream, const View& view, std::int64_t heads, padding_check* check,
                          const verify_padding_options& options = {}) {
  detail::run_check(stream, detail::padding_of(view, heads), check, options);
}

/// Of acquired rows, or of scratch's tail. What `stream` captures owns their memory from now on.
template <class Handle>
  requires detail::is_padded_handle<Handle, host_device>
void verify_padding_async(host::stream_ref stream, const Handle& rows, padding_check* check,
                          const verify_padding_options& options = {}) {
  const auto padding = detail::padding_of(rows);
  detail::refuse_null(check);
  rows.pin(stream);
  detail::run_check(stream, padding, check, options);
}

/// Of all rows that the buffer holds, acquired (and so pinned and ordered) for it. Throws what acquire does, too.
template <class T>
void verify_padding_async(host::stream_ref stream, padded_query_buffer<T, host_device>& buffer, padding_check* check,
                          const verify_padding_options& options = {}) {
  verify_padding_async(stream, buffer.acquire(stream, buffer.capacity()), check, options);
}

/// The same, and waits for the stream. Not on a capturing stream: throws logic_error. Throws out_of_memory where the
/// default resource lacks the few bytes of a padding_check.
template <detail::mdspan_like View>
[[nodiscard]] padding_report verify_padding(host::stream_ref stream, const View& view, std::int64_t heads,
                                            const verify_padding_options& options = {}) {
  return detail::check_and_wait<host_device>(
      stream, [&](padding_check* check) { verify_padding_async(stream, view, heads, check, options); });
}

template <class Padded>
  requires(!detail::mdspan_like<Padded>)
[[nodiscard]] padding_report verify_padding(host::stream_ref stream, Padded&& padded,
                                            const verify_padding_options& options = {}) {
  return detail::check_and_wait<host_device>(
      stream, [&](padding_check* check) { verify_padding_async(stream, padded, check, options); });
}

}  // namespace holdfast::HOLDFAST_ABI
