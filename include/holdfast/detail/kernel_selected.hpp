// What is under gather_selected: its checks, how its workspace is carved, and the row operations between the scan and
// the gather. Both devices run the same; what differs (the scan, how work is queued) is a `Steps` of the launcher's.
//
// The workspace holds `positions`, an int32 for each pool row and one more, and `sources`, an int32 for each row of the
// output. Positions are marks first (1: the row is selected), then, by the scan, how many selected rows come before.
// Row i is selected iff positions[i + 1] is another number than positions[i], and the last one is the number of them
// all.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_divisor.hpp>
#include <holdfast/detail/kernel_gather.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace holdfast::inline HOLDFAST_ABI::detail {

// --- the workspace ---------------------------------------------------------------------------------------------------

/// Offsets of its parts, in bytes; `positions` is at 0.
struct selected_layout {
  std::size_t sources = 0;
  std::size_t scan = 0;
  std::size_t bytes = 0;  ///< in all
};

/// Of rows that `check_selected_counts` accepts. Used by whoever asks for the size, and by the launchers.
[[nodiscard]] constexpr selected_layout lay_out_selected(std::int64_t pool_rows, std::int64_t capacity,
                                                         std::size_t scan_bytes) {
  constexpr auto rounded = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  selected_layout layout;
  layout.sources = rounded((static_cast<std::size_t>(pool_rows) + 1) * sizeof(std::int32_t));
  layout.scan = layout.sources + rounded(static_cast<std::size_t>(capacity) * sizeof(std::int32_t));
  layout.bytes = layout.scan + scan_bytes;
  return layout;
}

/// Of a workspace's address; cub aligns its own part further.
inline constexpr std::size_t selected_alignment = 16;

/// Positions are int32, and there is one more than rows.
inline constexpr std::int64_t most_rows_of_selected_pools = std::numeric_limits<std::int32_t>::max() - 1;

[[noreturn]] inline void refuse_selected(const std::string& why) { throw logic_error("gather_selected: " + why); }

inline void check_selected_counts(std::int64_t pool_rows, std::int64_t capacity) {
  if (pool_rows < 0 || pool_rows > most_rows_of_selected_pools)
    refuse_selected("a pool of " + std::to_string(pool_rows) + " rows; it has 0 to " +
                    std::to_string(most_rows_of_selected_pools));
  if (capacity < 0 || capacity > most_rows_of_gathers)
    refuse_selected("a capacity of " + std::to_string(capacity) + " rows; it is 0 to " +
                    std::to_string(most_rows_of_gathers));
}

// --- on both devices -------------------------------------------------------------------------------------------------

/// Several threads may mark one row, all with the same value: relaxed stores, so that it is no race.
HOLDFAST_HOST_DEVICE inline void mark(std::int32_t* position) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(position)), "r"(1) : "memory");
#else
  __atomic_store_n(position, 1, __ATOMIC_RELAXED);
#endif
}

/// A row operation: the pool row of each pair is marked.
template <class Index>
struct mark_selected {
  gathered_pairs<Index> pairs;
  std::int32_t* positions = nullptr;

  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t units() const { return pairs.pairs; }
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int32_t parts() const { return 1; }
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t load(std::int64_t pair, std::int32_t) const {
    return pairs.find(pair);
  }
  HOLDFAST_HOST_DEVICE void store(std::int64_t, std::int32_t, std::int64_t row) const {
    if (row >= 0) mark(positions + row);
  }
};

/// A counter on the device, of either width; none when both are null.
struct selected_counter {
  std::int32_t* narrow = nullptr;
  std::int64_t* wide = nullptr;

  HOLDFAST_HOST_DEVICE void set(std::int64_t count) const {
    if (narrow != nullptr) *narrow = static_cast<std::int32_t>(count);
    if (wide != nullptr) *wide = count;
  }
};

/// A row operation: `sources` becomes the pool row of each row of the output, -1 where there is none. Unit i looks at
/// pool row i and at output row i.
struct list_selected {
  const std::int32_t* positions = nullptr;
  std::int32_t* sources = nullptr;
  std::int64_t pool_rows = 0;
  std::int64_t capacity = 0;
  selected_counter count;
  selected_counter selected;

  struct packet {
    std::int32_t position;
    std::int32_t next;
    std::int32_t all;
  };

  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t units() const {
    const std::int64_t more = pool_rows > capacity ? pool_rows : capacity;
    return more > 0 ? more : 1;  // the counters'
  }
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int32_t parts() const { return 1; }
  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(std::int64_t i, std::int32_t) const {
    packet loaded{0, 0, positions[pool_rows]};
    if (i < pool_rows) {
      loaded.position = positions[i];
      loaded.next = positions[i + 1];
    }
    return loaded;
  }
  HOLDFAST_HOST_DEVICE void store(std::int64_t i, std::int32_t, const packet& loaded) const {
    if (loaded.next != loaded.position && loaded.position < capacity)
      sources[loaded.position] = static_cast<std::int32_t>(i);
    if (i < capacity && i >= loaded.all) sources[i] = -1;
    if (i == 0) {
      count.set(loaded.all < capacity ? loaded.all : capacity);
      selected.set(loaded.all);
    }
  }
};

/// A row operation: each pair becomes the number of its row in the output, or -1.
template <class Index>
struct remap_selected {
  gathered_pairs<Index> pairs;
  const std::int32_t* positions = nullptr;
  std::int64_t capacity = 0;
  Index* remap = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;

  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t units() const { return pairs.pairs; }
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int32_t parts() const { return 1; }
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int32_t load(std::int64_t pair, std::int32_t) const {
    const std::int64_t row = pairs.find(pair);
    if (row < 0) return -1;
    const std::int32_t position = positions[row];
    return position < capacity ? position : -1;
  }
  HOLDFAST_HOST_DEVICE void store(std::int64_t pair, std::int32_t, std::int32_t number) const {
    const auto at = pairs.place_of(pair);
    remap[at.row * row_stride + at.column * column_stride] = static_cast<Index>(number);
  }
};

/// As cub's in-place exclusive sum.
inline void scan_on_host(std::int32_t* marks, std::int64_t items) {
  std::int32_t before = 0;
  for (std::int64_t i = 0; i < items; ++i) {
    const std::int32_t marked = marks[i];
    marks[i] = before;
    before += marked;
  }
}

// --- the plan --------------------------------------------------------------------------------------------------------

/// Both operations on pairs; what lies in the workspace is added later.
template <class Index>
struct selected_plan {
  mark_selected<Index> marked;
  remap_selected<Index> remapped;
};

/// Whether all offsets of a view that has elements are in 63 bits.
[[nodiscard]] inline bool offsets_fit(const index_side& side) {
  std::int64_t rows = 0, columns = 0, all = 0;
  return !__builtin_mul_overflow(side.row_stride, side.element_bytes, &rows) &&
         !__builtin_mul_overflow(rows, side.rows - 1, &rows) &&
         !__builtin_mul_overflow(side.column_stride, side.element_bytes, &columns) &&
         !__builtin_mul_overflow(columns, side.topk - 1, &columns) && !__builtin_add_overflow(rows, columns, &all);
}

/// The checks of indices, remap and table. Throws logic_error, as the launchers say.
template <class Index, class Options, class Pool, class Table>
[[nodiscard]] selected_plan<Index> plan_selected(const index_side& indices, const index_side& remap,
                                                 const Options& options, const Pool& pool, const Table& table) {
  const auto refuse = [&](const std::string& why) {
    refuse_selected(why + "; " + to_text(indices) + ", remap is [" + std::to_string(remap.rows) + ", " +
                    std::to_string(remap.topk) + "] with strides [" + std::to_string(remap.row_stride) + ", " +
                    std::to_string(remap.column_stride) + "]");
  };
  selected_plan<Index> plan;
  gathered_pairs<Index> pairs;
  pairs.pool_rows = pool.rows;
  if (indices.rows < 0 || indices.topk < 0) refuse("indices has a negative extent");
  if (indices.rows != remap.rows || indices.topk != remap.topk) refuse("indices and remap have different extents");
  if (__builtin_mul_overflow(indices.rows, indices.topk, &pairs.pairs)) refuse("more than 2^63 - 1 indices");

  const bool translated = table.data != nullptr;
  if (translated) {
    if (pool.page_rows <= 0 || pool.page_rows > std::numeric_limits<std::int32_t>::max())
      refuse("a block table needs a pool with pages, and page_rows is " + std::to_string(pool.page_rows));
    pairs.table = static_cast<const std::int32_t*>(table.data);
    pairs.table_requests = table.requests;
    pairs.table_pages = table.pages;
    pairs.table_stride = table.row_stride == 0 ? table.pages : table.row_stride;
    std::int64_t entries = 0;
    if (table.requests < 0 || table.pages < 0 || pairs.table_stride < table.pages ||
        __builtin_mul_overflow(table.requests, pairs.table_stride, &entries) ||
        __builtin_mul_overflow(entries, std::int64_t{4}, &entries))
      refuse("a block table of [" + std::to_string(table.requests) + ", " + std::to_string(table.pages) +
             "] with a row stride of " + std::to_string(table.row_stride));
    pairs.by_page = divisor64(static_cast<std::int32_t>(pool.page_rows));
  } else {
    if (table.requests != 0 || table.pages != 0)
      refuse("the block table is null, but [" + std::to_string(table.requests) + ", " + std::to_string(table.pages) +
             "]");
    if (options.row_requests != nullptr) refuse("row_requests needs a block table");
  }
  if (pairs.pairs != 0) {
    if (indices.data == nullptr) refuse("the data of indices is null");
    if (remap.data == nullptr) refuse("the data of remap is null");
    if (indices.data == remap.data) refuse("remap is indices itself: it must be memory of its own");
    if (!offsets_fit(indices)) refuse("the offsets of indices pass 2^63 - 1 bytes");
    if (!offsets_fit(remap)) refuse("the offsets of remap pass 2^63 - 1 bytes");
  }
  pairs.indices = static_cast<const Index*>(indices.data);
  pairs.row_stride = indices.row_stride;
  pairs.column_stride = indices.column_stride;
  pairs.row_lengths = options.row_lengths;
  pairs.row_requests = options.row_requests;

  // Where rows follow each other in the same strides and nothing is asked of a row, there need be no rows.
  pairs.one_row = indices.rows == 1 ||
                  (indices.row_stride == indices.topk * indices.column_stride &&
                   remap.row_stride == remap.topk * remap.column_stride && !translated && pairs.row_lengths == nullptr);
  if (!pairs.one_row && pairs.pairs != 0) {
    if (indices.topk > std::numeric_limits<std::int32_t>::max()) refuse("rows of more than 2^31 - 1 indices");
    pairs.by_topk = divisor64(static_cast<std::int32_t>(indices.topk));
  }
  plan.marked.pairs = pairs;
  plan.remapped.pairs = pairs;
  plan.remapped.remap = static_cast<Index*>(const_cast<void*>(remap.data));
  plan.remapped.row_stride = remap.row_stride;
  plan.remapped.column_stride = remap.column_stride;
  return plan;
}

/// In stream order. `Steps` has clear(data, bytes), run(row operation) and scan(marks, items, temporary, its bytes).
template <class Index, class Steps, class Gather>
void run_selected(const Steps& steps, selected_plan<Index> plan, list_selected list, std::byte* workspace,
                  const selected_layout& layout, const Gather& gather) {
  auto* positions = reinterpret_cast<std::int32_t*>(workspace);
  auto* sources = reinterpret_cast<std::int32_t*>(workspace + layout.sources);
  plan.marked.positions = positions;
  plan.remapped.positions = positions;
  plan.remapped.capacity = list.capacity;
  list.positions = positions;
  list.sources = sources;

  const std::int64_t items = list.pool_rows + 1;
  steps.clear(positions, static_cast<std::size_t>(items) * sizeof(std::int32_t));
  steps.run(plan.marked);
  steps.scan(positions, items, workspace + layout.scan, layout.bytes - layout.scan);
  steps.run(list);
  gather(sources);
  steps.run(plan.remapped);
}

}  // namespace holdfast::HOLDFAST_ABI::detail
