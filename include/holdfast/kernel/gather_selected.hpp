// gather_selected: of all the tokens that many rows of indices select, each one once. The context path of sparse
// attention: neighbouring queries select mostly the same tokens, so a row for each pair would be the same row many
// times.
//
//   const std::int64_t bound = std::max<std::int64_t>(1, std::min(pool_tokens, rows * topk));   // known on the host
//   const std::size_t size = holdfast::gather_selected_workspace_bytes(device, pool_tokens, bound);
//   auto scratch = kv.acquire_unfilled(stream, bound);                         // tail_padded_allocator, 512 e4m3 a row
//   auto work = bytes.acquire(stream, size);                                   // another, of std::byte
//   holdfast::gather_selected(stream, pool, indices, scratch.view(), remapped, {work.data(), size},
//                             {.tail_rows = scratch.tail_rows(), .count = live_rows});
//   sparse_attention(queries, scratch.data(), remapped);                       // indices into the scratch
//
// The selected rows are written in the pool's order, in gather_rows' formats and bit for bit as it writes them. The
// rows of `out` behind them, and the tail, are zeros. `remapped` says where each index's row is.
//
// An index is valid iff it names a row of the pool, as in gather_rows (block tables and row lengths included). An
// invalid one reads nothing and is -1 in the remap. `out` has room for the first `out.extent(0)` selected rows, its
// capacity; tokens beyond it are rejected: they are -1 in the remap, too, and never some other token's row. With a
// capacity that bounds the distinct tokens (the number of pairs does, and so does the pool's), none is.
//
// Everything is work in stream order: a memset, a mark of each selected row, an exclusive sum over the pool's rows
// (cub::DeviceScan on CUDA), a list of the marked rows, their gather, the remap. Nothing waits for the host, nothing is
// allocated; all of it can be captured, and replays look at what the indices are then.
//
// Here for host::stream_ref, in gather_selected.cuh for cudaStream_t.
//
// Not here: the choice of tokens; pools of 2^31 - 1 rows and more; indices remapped in place (a replay would find the
// remapped ones). The cost has a part that grows with the pool (about 20 bytes of traffic a row), whatever is selected:
// where few pairs share a token, or the pool is much larger than the selection, gather_rows does less.
#pragma once

#include <holdfast/detail/kernel_launch.hpp>
#include <holdfast/detail/kernel_selected.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/gather_rows.hpp>
#include <holdfast/kernel/row_op.hpp>
#include <holdfast/version.hpp>
#include <holdfast/view.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI {

/// A workspace smaller than what its kernel asks for. In bytes.
class workspace_too_small : public logic_error {
 public:
  workspace_too_small(const std::string& who, std::size_t wanted, std::size_t available)
      : logic_error(who + ": a workspace of " + std::to_string(available) + " bytes; " + std::to_string(wanted) +
                    " are needed"),
        wanted_(wanted),
        available_(available) {}
  [[nodiscard]] std::size_t wanted() const noexcept { return wanted_; }
  [[nodiscard]] std::size_t available() const noexcept { return available_; }

 private:
  std::size_t wanted_, available_;
};

/// Where a kernel leaves a count: an int32 or an int64 in device memory, or nowhere.
class device_count {
 public:
  constexpr device_count() noexcept = default;
  constexpr device_count(std::nullptr_t) noexcept {}
  constexpr device_count(std::int32_t* at) noexcept : at_{at, nullptr} {}
  constexpr device_count(std::int64_t* at) noexcept : at_{nullptr, at} {}
  [[nodiscard]] constexpr const detail::selected_counter& at() const noexcept { return at_; }

 private:
  detail::selected_counter at_;
};

/// What else is read and written. Pointers are to device memory and may be null.
struct gather_selected_options {
  /// So many rows behind those of `out`, in the same stride, become zero in the gather's launch.
  std::int64_t tail_rows = 0;
  /// [rows]: only the first so many indices of a row count. Rank-1 indices are one row.
  const std::int32_t* row_lengths = nullptr;
  /// [rows]: the request of each row, for the block table; null: row r is request r.
  const std::int32_t* row_requests = nullptr;
  /// Becomes the number of rows of `out` that hold a token: at most its capacity.
  device_count count{};
  /// Becomes the number of selected tokens, rejected ones included: more than the capacity iff any was rejected.
  device_count selected{};
};

/// What a workspace's address is a multiple of.
inline constexpr std::size_t gather_selected_workspace_alignment = detail::selected_alignment;

/// Bytes of workspace that gather_selected needs on the host device, for a pool of so many rows and an `out` of
/// `capacity` rows. Throws logic_error for counts that it would refuse.
[[nodiscard]] inline std::size_t gather_selected_workspace_bytes(const host_device&, std::int64_t pool_rows,
                                                                 std::int64_t capacity) {
  detail::check_selected_counts(pool_rows, capacity);
  return detail::lay_out_selected(pool_rows, capacity, 0).bytes;
}

namespace detail {

template <class Source>
[[nodiscard]] Source without_table(Source source) {
  source.table = {};
  return source;
}

/// In the place of a gather's launch.
struct checked_only {
  template <std::int32_t Rows, class Gather>
  void operator()(const Gather&) const {}
};

/// Checks all there is to check, then queues all there is to do. `Steps` has what run_selected asks of it, and
/// scan_bytes(items) and gather(...), which is gather_rows.
template <class Steps, class Source, class Indices, class Out, class Remap>
void gather_selected_by(const Steps& steps, const Source& source, const Indices& indices, const Out& out,
                        const Remap& remap, std::span<std::byte> workspace, const gather_selected_options& options) {
  using index = index_of<Indices>;
  check_gather_types<Indices, Out>();
  static_assert(std::is_same_v<typename Remap::element_type, index> && Remap::rank() == Indices::rank(),
                "holdfast: a remap has the rank of the indices and their type, not const");
  static_assert(Remap::is_always_strided() && std::is_pointer_v<typename Remap::data_handle_type>,
                "holdfast: views must be of plain memory, with a strided layout");

  const auto capacity = static_cast<std::int64_t>(out.extent(0));
  check_selected_counts(source.data.rows, capacity);
  const auto plan =
      plan_selected<index>(index_side_of(indices), index_side_of(remap), options, source.data, source.table);
  const Source flat = without_table(source);
  const gather_options<std::int32_t> gather{.tail_rows = options.tail_rows};
  const auto some = reinterpret_cast<const std::int32_t*>(alignof(std::max_align_t));  // looked at, not read
  try {
    with_gather(flat, view<const std::int32_t, 1>(some, capacity), out, gather, checked_only{});
  } catch (const logic_error& refused) {
    refuse_selected(std::string("what would gather the selected rows says: ") + refused.what());
  }
  const auto layout =
      lay_out_selected(source.data.rows, capacity, steps.scan_bytes(source.data.rows + std::int64_t{1}));
  if (workspace.size() < layout.bytes) throw workspace_too_small("gather_selected", layout.bytes, workspace.size());
  if (reinterpret_cast<std::uintptr_t>(workspace.data()) % selected_alignment != 0)
    refuse_selected("the workspace begins " +
                    std::to_string(reinterpret_cast<std::uintptr_t>(workspace.data()) % selected_alignment) +
                    " bytes after a multiple of " + std::to_string(selected_alignment));

  list_selected list;
  list.pool_rows = source.data.rows;
  list.capacity = capacity;
  list.count = options.count.at();
  list.selected = options.selected.at();
  run_selected(steps, plan, list, workspace.data(), layout, [&](const std::int32_t* sources) {
    steps.gather(flat, view<const std::int32_t, 1>(sources, capacity), out, gather);
  });
}

struct selected_steps_on_host {
  host::stream_ref stream;

  void clear(void* data, std::size_t bytes) const {
    const host_device::relaxed_scope relaxed;
    host_device::fill(stream, data, std::byte{0}, bytes);
  }
  template <class Op>
  void run(const Op& op) const {
    run_row_op(stream, op);
  }
  [[nodiscard]] std::size_t scan_bytes(std::int64_t) const { return 0; }
  void scan(std::int32_t* marks, std::int64_t items, std::byte*, std::size_t) const {
    launch(stream, "gather_selected", [marks, items] { scan_on_host(marks, items); });
  }
  template <class Source, class Indices, class Out>
  void gather(const Source& source, const Indices& sources, const Out& out,
              const gather_options<std::int32_t>& options) const {
    gather_rows(stream, source, sources, out, options);
  }
};

}  // namespace detail

/// Writes each selected row once, the zeros behind them, and the remap, in stream order.
///
/// `indices`: an mdspan of int32 or int64, [pairs] (one row) or [rows, topk], any strides. `out`: an mdspan [capacity,
/// elements], as gather_rows wants it. `remap`: an mdspan of the extents and the type of the indices, any strides that let
/// no elements overlap. `workspace`: gather_selected_workspace_bytes or more, at a multiple of
/// gather_selected_workspace_alignment; it holds anything before, and is free again once this work has run: in stream
/// order, another call may use the same. All memory must stay until the stream, or every launch of the graph that it
/// captures, is through with it; plain views pin nothing. What is written must not overlap what is read, nor the
/// workspace either: that is not checked.
///
/// Throws workspace_too_small, and logic_error for: extents or counts that are negative or do not fit each other, null
/// data that should hold something, a remap that is the indices, a misaligned workspace, a pool of more than 2^31 - 2
/// rows, and all that gather_rows refuses. Nothing is queued then.
template <row_source Source, detail::mdspan_like Indices, detail::mdspan_like Out, detail::mdspan_like Remap>
void gather_selected(host::stream_ref stream, const Source& source, const Indices& indices, const Out& out,
                     const Remap& remap, std::span<std::byte> workspace, const gather_selected_options& options = {}) {
  detail::gather_selected_by(detail::selected_steps_on_host{stream}, source, indices, out, remap, workspace, options);
}

}  // namespace holdfast::HOLDFAST_ABI
