// gather_rows: the rows of a KV pool that indices name become packed FP8, bf16 or fp16 rows for a sparse-attention kernel,
// in one launch, with the zero rows behind them that such a kernel may read.
//
//   const holdfast::nvfp4_rows<> pool{.data = {.data = kv, .rows = rows}, .scales = {.data = kv_scales, .rows = rows},
//                                     .global_scale = 100.0f / (448 * 6)};
//   auto kv = holdfast::gather_rows(stream, pool, indices, allocator);     // indices: [rows, topk], int32
//
//   auto kv = allocator.acquire(stream, rows * topk);                      // in two steps: the tail costs a memset
//   holdfast::gather_rows(stream, pool, indices, kv);
//   holdfast::gather_rows(stream, pool, indices, view, {.tail_rows = 128});          // or into any memory
//
//   source                elements   of the pool
//   fp8_rows                   512   512 B
//   nvfp4_rows<0>, <64>        512   256 B + 32 B in a second pool; 288 B + 36 B
//   flashmla_v32_rows          576   656 B
//   flashmla_v4_rows           512   pages: 576 B a row, then 8 B a row
//   flashmla_v41_rows          512   pages: 512 B a row, then 16 B a row
//   vllm_nvfp4_rows            576   352 B
//   formatted_rows<my_row>     any   a format of the caller's own: a small struct, see row_decoder.hpp
//
// `out` is [pairs, elements] of bf16 or fp16, or of e4m3 where a row has 512 elements: FP8 rows have no scales, so a value is
// rounded to e4m3 as it is.
//
// Pair p, counted row by row, is written to row p of `out`. An index is valid iff 0 <= index < pool rows (with a block
// table: iff its page is in the table, and the row that comes out is in the pool). An invalid one reads nothing at all
// and writes a row of zeros; so does a pair behind its row's length. Duplicates are fine: every pair is copied by itself.
//
// FP8 rows are copied to FP8 bit for bit. NVFP4 rows are dequantised to FP8 in this order of operations, on both devices bit
// for bit:
//
//   1. s = float(group scale) * global scale         one fp32 product; e4m3 to fp32 is exact, 0x7f and 0xff are NaN
//   2. p[m] = magnitude[m] * s                       one fp32 product for each of 0, 0.5, 1, 1.5, 2, 3, 4, 6
//   3. b[m] = e4m3(p[m])                             nearest, ties to even, saturating to +-448; NaN becomes 0x7f
//   4. byte of a value = b[nibble & 7] XOR 0x80 if the nibble's sign bit is set
//
//   In residual groups (the last 64 values of nvfp4_rows<64>), with s and t of main and residual scale, both as in 1:
//   2. p = (+-magnitude) * s,  q = (+-magnitude) * t one fp32 product each
//   3. byte = e4m3(p + q)                            one fp32 sum
//
// Products and sums are rounded to nearest, even; none is fused, no denormal is flushed. So: minus zero stays minus zero
// (0x80) in plain groups; zeros of a negative scale are 0x80, and 0x00 where the nibble is negative, too; in residual
// groups the sum rules (+0 + -0 is +0). A NaN scale (group or global) makes NaN of all its values: 0x7f, or 0xff where a
// plain group's nibble is negative. An infinite s makes 448 of every magnitude but zero, which becomes NaN.
//
// In all other cases a value is made in fp32 and rounded once to the output's type (nearest, ties to even):
//
//   fp8_rows              e4m3
//   nvfp4_rows<0>         (+-magnitude) * s, with s as above: one product
//   nvfp4_rows<64>        in residual groups (+-magnitude) * s + (+-magnitude) * t: two products and a sum
//   flashmla_v32_rows     e4m3 * scale: one product, whatever fp32 the scale is (NaN and infinity, too); RoPE: bf16
//   flashmla_v4_rows      e4m3 * 2^(scale - 127): one product; RoPE: bf16
//   flashmla_v41_rows     e4m3 * 2^(scale - 127): one product
//   vllm_nvfp4_rows       (+-magnitude) * s, as nvfp4_rows<0>; RoPE: e4m3
//
//   to e4m3               beyond 448 is 448 of its sign; NaN is 0x7f
//   to bf16, fp16         beyond the largest finite value is infinity, as every such cast does (fp16: from 65520 on); NaN is
//                         0x7fff. bf16 values reach bf16 unrounded, bit for bit, NaN payloads included
//
// Scales of the byte 0 are 2^-127, those of 255 NaN. Denormals are kept everywhere.
//
// Pools and strides may have any alignment, down to single bytes; where data or scales are not aligned (data: multiples of
// 16, or of 8) rows are read byte by byte, several times slower. Only outputs must be aligned.
//
// Here for host::stream_ref, in gather_rows.cuh for cudaStream_t.
//
// Not here: scales swizzled for GEMMs (128 x 4 tiles): rows of scales lie side by side, or it is another format. Choosing
// which rows to gather. Scatter.
#pragma once

#include <holdfast/detail/kernel_decode.hpp>
#include <holdfast/detail/kernel_formats.hpp>
#include <holdfast/detail/kernel_gather.hpp>
#include <holdfast/detail/kernel_gather_format.hpp>
#include <holdfast/detail/kernel_launch.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/kernel/elements.hpp>
#include <holdfast/kernel/row_decoder.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/tail_padded_allocator.hpp>
#include <holdfast/version.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI {

/// Where the rows of a pool are: device memory, any alignment, any strides (16-byte multiples are quickest, of NVFP4
/// scales, too). Rows are numbered flat: row `i` is at `i * row_stride_bytes`, or, with pages, at
/// `i / page_rows * page_stride_bytes + i % page_rows * row_stride_bytes`; so an index that was made as
/// `block * page_rows + offset` means what it says, whatever lies between pages.
struct row_pool {
  const void* data = nullptr;          ///< of row 0
  std::int64_t rows = 0;               ///< in all pages together; what valid indices are below
  std::int64_t row_stride_bytes = 0;   ///< 0: rows lie side by side
  std::int64_t page_rows = 0;          ///< 0: no pages
  std::int64_t page_stride_bytes = 0;  ///< 0: pages lie side by side
};

/// Which block (page of the pool) holds the n-th page of a request: int32 [requests, pages] in device memory. With one,
/// an index is a token's position in its request. Entries that are negative or beyond the pool are no page.
struct block_table {
  const std::int32_t* data = nullptr;  ///< null: indices are flat pool rows
  std::int64_t requests = 0;
  std::int64_t pages = 0;       ///< of each request
  std::int64_t row_stride = 0;  ///< elements from one request to the next; 0: `pages`
};

/// A pool of rows of 512 e4m3 values (`fp8_row`).
struct fp8_rows {
  row_pool data;
  block_table table{};
};

/// Two pools of the same number of rows: 256 (288) bytes of nibbles, and 32 (36) group scales (`nvfp4_row<Residual>`).
/// Each has a geometry of its own; a block table counts in the data's pages.
template <std::int32_t Residual = 0>
struct nvfp4_rows {
  row_pool data;
  row_pool scales;
  float global_scale = 1;
  const float* global_scale_at = nullptr;  ///< device memory, read when the kernel runs: used instead, unless null
  block_table table{};
};

/// A pool of rows of a format that has a decoder, the library's or the caller's.
///
/// Where the format has scale bytes, they are rows of a second pool (`scales`), or, if it has a `page_multiple`, they are in
/// the footer of each page: data has pages then, whose rows lie side by side; behind them are as many rows of scales. A
/// page stride of 0 means pages rounded up to that multiple.
template <row_decoder Format>
struct formatted_rows {
  row_pool data;
  row_pool scales{};  ///< of as many rows as data; none for a format without scale bytes, or with footers
  Format format{};
  block_table table{};
};

/// Pools of `flashmla_v32_row`.
using flashmla_v32_rows = formatted_rows<detail::flashmla_v32_decoder>;
/// Pools of pages of `flashmla_v4_row` and `flashmla_v41_row`.
using flashmla_v4_rows = formatted_rows<detail::flashmla_v4_decoder>;
using flashmla_v41_rows = formatted_rows<detail::flashmla_v41_decoder>;

/// A pool of `vllm_nvfp4_row`.
struct vllm_nvfp4_rows {
  row_pool data;
  float global_scale = 1;
  const float* global_scale_at = nullptr;  ///< device memory, read when the kernel runs: used instead, unless null
  block_table table{};
};

/// What else a gather reads and writes. Pointers are to device memory and may be null.
template <class Index>
struct gather_options {
  /// So many rows behind those of `out`, in the same stride, become zero in the same launch.
  std::int64_t tail_rows = 0;
  /// [rows]: only the first so many indices of a row count; below 0 is none, beyond topk all. Rank-1 indices are one row.
  const std::int32_t* row_lengths = nullptr;
  /// [rows]: the request of each row, for the block table; null: row r is request r. One that the table lacks has no pages.
  const std::int32_t* row_requests = nullptr;
  /// [rows, topk]: becomes the pair's number (the row of `out` that it is in), or -1 where the index is invalid. Memory of
  /// its own: it must not overlap the indices.
  Index* remap = nullptr;
  /// Elements from one row of `remap` to the next; 0: topk.
  std::int64_t remap_row_stride = 0;
  /// Launch so that the grid starts while its predecessor in the stream still runs, and waits for it before it reads or
  /// writes. Saves part of a launch, and gives up a part of stream order: the grid waits for its direct predecessor only,
  /// which covers the work before that only if the predecessor waited for it, too (see row_op_shape::programmatic). The
  /// host device ignores it.
  bool programmatic = false;
};

namespace detail {

template <class Indices>
using index_of = std::remove_cv_t<typename Indices::element_type>;

template <class Indices, class Out>
constexpr void check_gather_types() {
  using index = index_of<Indices>;
  using element = typename Out::element_type;
  static_assert(Indices::rank() == 1 || Indices::rank() == 2, "holdfast: indices must be [pairs] or [rows, topk]");
  static_assert(std::is_integral_v<index> && std::is_signed_v<index> && (sizeof(index) == 4 || sizeof(index) == 8),
                "holdfast: indices must be 32-bit or 64-bit signed integers");
  static_assert(Out::rank() == 2, "holdfast: the output of a gather must be [pairs, elements of a row]");
  static_assert(!std::is_const_v<element>, "holdfast: the view written to must not be const");
  static_assert((holds_e4m3<element> && sizeof(element) == 1) ||
                    ((holds_bf16<element> || holds_fp16<element>)&&sizeof(element) == 2),
                "holdfast: a gather writes e4m3 values (or plain bytes), bf16 or fp16");
  static_assert(Indices::is_always_strided() && Out::is_always_strided(), "holdfast: views must have a strided layout");
  static_assert(
      std::is_pointer_v<typename Indices::data_handle_type> && std::is_pointer_v<typename Out::data_handle_type>,
      "holdfast: views must be of plain memory, with a pointer for a data handle");
}

inline void refuse_uneven(const row_pool& data, const row_pool& scales) {
  if (data.rows != scales.rows)
    refuse_gather("the pool of data has " + std::to_string(data.rows) + " rows, that of scales " +
                  std::to_string(scales.rows));
}

inline void refuse_null(const char* name, const row_pool& pool, std::int64_t pairs) {
  if (pool.data == nullptr && pool.rows > 0 && pairs > 0)
    refuse_gather(std::string("the pool of ") + name + " is null, but has " + std::to_string(pool.rows) + " rows");
}

template <class Out>
inline constexpr element_kind kind_of = holds_bf16<typename Out::element_type>   ? element_kind::bf16
                                        : holds_fp16<typename Out::element_type> ? element_kind::fp16
                                                                                 : element_kind::e4m3;

/// Elements of a row of a source's format.
template <class Source>
inline constexpr std::int32_t elements_of = 512;
template <class Format>
inline constexpr std::int32_t elements_of<formatted_rows<Format>> = Format::elements;
template <>
inline constexpr std::int32_t elements_of<vllm_nvfp4_rows> = vllm_nvfp4_row::elements;

template <class Source, class Indices, class Out>
[[nodiscard]] auto plan_gather_of(const Source& source, const Indices& indices, const Out& out,
                                  const gather_options<index_of<Indices>>& options) {
  auto to = plan_gather<index_of<Indices>>(index_side_of(indices), output_side_of(out), elements_of<Source>, options,
                                           source.data, source.table);
  refuse_null("data", source.data, to.pairs.pairs);
  return to;
}

/// The pool of scales that lie behind the rows of each page of `pages`, whose stride becomes explicit.
template <class Format>
[[nodiscard]] row_pool footers_of(row_pool& pages) {
  static_assert(Format::page_multiple > 0, "holdfast: pages are a multiple of 1 or more bytes");
  if (pages.page_rows <= 0 || pages.page_rows > std::numeric_limits<std::int32_t>::max())
    refuse_gather("scales in the footers of pages need a pool with pages; page_rows is " +
                  std::to_string(pages.page_rows));
  if (pages.row_stride_bytes != 0 && pages.row_stride_bytes != Format::data_bytes)
    refuse_gather("rows of a page with a footer lie side by side, " + std::to_string(Format::data_bytes) +
                  " bytes each; row_stride_bytes is " + std::to_string(pages.row_stride_bytes));
  const std::int64_t footer = pages.page_rows * Format::data_bytes;
  if (pages.page_stride_bytes == 0) pages.page_stride_bytes = page_bytes<Format>(pages.page_rows);
  if (pages.page_stride_bytes < footer + pages.page_rows * Format::scale_bytes)
    refuse_gather("pages of " + std::to_string(pages.page_rows) + " rows and their scales take " +
                  std::to_string(footer + pages.page_rows * Format::scale_bytes) + " bytes; page_stride_bytes is " +
                  std::to_string(pages.page_stride_bytes));
  row_pool scales = pages;
  if (pages.data != nullptr) scales.data = static_cast<const std::byte*>(pages.data) + footer;
  scales.row_stride_bytes = Format::scale_bytes;
  return scales;
}

template <class Format, class Indices, class Out, class Run>
void with_gather(formatted_rows<Format> source, const Indices& indices, const Out& out,
                 const gather_options<index_of<Indices>>& options, const Run& run) {
  check_gather_types<Indices, Out>();
  static_assert(kind_of<Out> != element_kind::e4m3 || Format::elements == fp8_row::elements,
                "holdfast: FP8 rows have 512 elements; gather rows of this format as bf16 or fp16");
  if constexpr (requires { Format::page_multiple; }) {
    if (source.scales.data != nullptr || source.scales.rows != 0)
      refuse_gather("the scales of this format are in its pages, but a pool of scales is given");
    [[maybe_unused]] const row_pool footers = footers_of<Format>(source.data);
    if constexpr (Format::scale_bytes != 0) source.scales = footers;
  }
  const pool_rows data = plan_pool("data", source.data, Format::data_bytes);
  pool_rows scales;
  if constexpr (Format::scale_bytes != 0) {
    scales = plan_pool("scales", source.scales, Format::scale_bytes);
    refuse_uneven(source.data, source.scales);
  } else if (source.scales.data != nullptr || source.scales.rows != 0) {
    refuse_gather("a pool of scales is given, but this format has none");
  }
  const auto to = plan_gather_of(source, indices, out, options);
  if constexpr (Format::scale_bytes != 0) refuse_null("scales", source.scales, to.pairs.pairs);
  with_format_gather<kind_of<Out>>(to, data, scales, source.format, run);
}

template <class Indices, class Out, class Run>
void with_gather(const fp8_rows& source, const Indices& indices, const Out& out,
                 const gather_options<index_of<Indices>>& options, const Run& run) {
  check_gather_types<Indices, Out>();
  if constexpr (kind_of<Out> != element_kind::e4m3) {
    with_gather(formatted_rows<fp8_decoder>{source.data, {}, {}, source.table}, indices, out, options, run);
  } else {
    const pool_rows pool = plan_pool("data", source.data, fp8_row::bytes);
    with_fp8_gather(plan_gather_of(source, indices, out, options), pool, run);
  }
}

template <std::int32_t Residual, class Indices, class Out, class Run>
void with_gather(const nvfp4_rows<Residual>& source, const Indices& indices, const Out& out,
                 const gather_options<index_of<Indices>>& options, const Run& run) {
  check_gather_types<Indices, Out>();
  if constexpr (kind_of<Out> != element_kind::e4m3) {
    nvfp4_decoder<Residual> format;
    format.global = {source.global_scale, source.global_scale_at};
    with_gather(formatted_rows<nvfp4_decoder<Residual>>{source.data, source.scales, format, source.table}, indices, out,
                options, run);
  } else {
    const pool_rows data = plan_pool("data", source.data, nvfp4_row<Residual>::data_bytes);
    const pool_rows scales = plan_pool("scales", source.scales, nvfp4_row<Residual>::scale_bytes);
    refuse_uneven(source.data, source.scales);
    const auto to = plan_gather_of(source, indices, out, options);
    refuse_null("scales", source.scales, to.pairs.pairs);
    with_nvfp4_gather<Residual>(to, data, scales, source.global_scale, source.global_scale_at, run);
  }
}

template <class Indices, class Out, class Run>
void with_gather(const vllm_nvfp4_rows& source, const Indices& indices, const Out& out,
                 const gather_options<index_of<Indices>>& options, const Run& run) {
  vllm_nvfp4_decoder format;
  format.global = {source.global_scale, source.global_scale_at};
  with_gather(formatted_rows<vllm_nvfp4_decoder>{source.data, {}, format, source.table}, indices, out, options, run);
}

template <class Source>
inline constexpr bool is_row_source = std::same_as<Source, fp8_rows> || std::same_as<Source, vllm_nvfp4_rows>;
template <std::int32_t Residual>
inline constexpr bool is_row_source<nvfp4_rows<Residual>> = true;
template <class Format>
inline constexpr bool is_row_source<formatted_rows<Format>> = true;

}  // namespace detail

/// What can be gathered from: the sources above, and `formatted_rows` of a caller's own format.
template <class Source>
concept row_source = detail::is_row_source<Source>;

/// Writes the row of each index, and the tail, in stream order, as one kernel; none when there are no pairs and no tail.
///
/// `indices`: an mdspan of int32 or int64, [pairs] (one row) or [rows, topk], any strides. `out`: an mdspan [pairs,
/// elements] of `holds_e4m3`, `holds_bf16` or `holds_fp16` elements that lie side by side; its address and row stride are
/// multiples of 16 bytes. Its `tail_rows` further rows are memory of the caller's, which the view need not show (and must
/// not count). All memory must stay until the stream, or every launch of the graph that it captures, is through with it;
/// plain views pin nothing. What is written must not overlap what is read: that is not checked.
///
/// Throws logic_error, and launches nothing, for: extents or counts that are negative or do not fit each other, rows that
/// overlap, null data that should hold rows, an `out` that is not aligned, a table without pages (or the reverse), data and
/// scales with different numbers of rows, scales that the format has not, footers without pages, a remap that is the
/// indices or whose type cannot number the rows, and offsets beyond 2^63 - 1 bytes.
template <row_source Source, detail::mdspan_like Indices, detail::mdspan_like Out>
void gather_rows(host::stream_ref stream, const Source& source, const Indices& indices, const Out& out,
                 const gather_options<detail::index_of<Indices>>& options = {}) {
  detail::with_gather(source, indices, out, options, [&]<std::int32_t Rows>(const auto& gather) {
    detail::launch(stream, "gather_rows", [gather] { detail::run_gather_on_host<Rows>(gather); });
  });
}

namespace detail {

/// A tail_padded_allocator or an anchored_scratch.
template <class Allocator, class Device>
concept scratch_allocator = std::same_as<typename Allocator::handle, scratch<typename Allocator::element_type, Device>>;

/// Acquires scratch for `indices` and has `gather` write it, tail included where that can be written.
template <class Source, class Indices, class Allocator, class Options, class Gather>
[[nodiscard]] typename Allocator::handle gather_into(typename Allocator::stream_type stream, const Indices& indices,
                                                     Allocator& allocator, Options options, Gather&& gather) {
  std::int64_t pairs = 1;
  for (std::size_t i = 0; i < Indices::rank(); ++i) {
    if (__builtin_mul_overflow(pairs, static_cast<std::int64_t>(indices.extent(i)), &pairs)) {
      refuse_gather("the indices are more than 2^63 - 1");
    }
  }
  if (allocator.options().row_elements != elements_of<Source> || options.tail_rows != 0) {
    refuse_gather("rows of " + std::to_string(allocator.options().row_elements) + " elements and a tail of " +
                  std::to_string(options.tail_rows) + " asked of an allocator; it has rows of " +
                  std::to_string(elements_of<Source>) + ", and knows its tail");
  }
  typename Allocator::handle rows = allocator.acquire_unfilled(stream, pairs);
  options.tail_rows = allocator.options().fill == tail_fill::zero && !rows.tail_read_only() ? rows.tail_rows() : 0;
  gather(rows.view(), options);
  return rows;
}

template <class T, class Device>
void check_scratch(const scratch<T, Device>& rows, std::int64_t tail_rows) {
  if (tail_rows > rows.tail_rows()) {
    refuse_gather("a tail of " + std::to_string(tail_rows) + " rows asked, but the scratch has " +
                  std::to_string(rows.tail_rows()));
  }
  if (tail_rows != 0 && rows.tail_read_only()) {
    refuse_gather("a tail of " + std::to_string(tail_rows) + " rows asked, but the scratch's is zero and read only");
  }
}

}  // namespace detail

/// Into acquired scratch: its rows, and as much of its tail as `options` say (none; it was filled when it was acquired).
/// What `stream` captures owns the memory from now on, wherever it was acquired.
template <row_source Source, detail::mdspan_like Indices, class T>
void gather_rows(host::stream_ref stream, const Source& source, const Indices& indices,
                 const scratch<T, host_device>& rows, const gather_options<detail::index_of<Indices>>& options = {}) {
  detail::check_scratch(rows, options.tail_rows);
  bool pinned = false;
  detail::with_gather(source, indices, rows.view(), options, [&]<std::int32_t Rows>(const auto& gather) {
    rows.pin(stream);
    pinned = true;
    detail::launch(stream, "gather_rows", [gather] { detail::run_gather_on_host<Rows>(gather); });
  });
  if (!pinned) rows.pin(stream);  // nothing to write, but a tail to read
}

/// Into scratch of `allocator` (a tail_padded_allocator or an anchored_scratch), acquired first; returns it. The same
/// launch writes the tail, unless that is zero for good. Throws what acquire does, too; what does not fit is refused when
/// the scratch is there, and gives it back.
template <row_source Source, detail::mdspan_like Indices, detail::scratch_allocator<host_device> Allocator>
[[nodiscard]] typename Allocator::handle gather_rows(host::stream_ref stream, const Source& source,
                                                     const Indices& indices, Allocator& allocator,
                                                     const gather_options<detail::index_of<Indices>>& options = {}) {
  return detail::gather_into<Source>(stream, indices, allocator, options, [&](const auto& out, const auto& with_tail) {
    gather_rows(stream, source, indices, out, with_tail);
  });
}

}  // namespace holdfast::HOLDFAST_ABI
