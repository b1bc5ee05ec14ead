// norm_rope_pad: RMSNorm over a head, RoPE on its last 64 elements, written straight into the padded rows. One launch
// instead of three, and no copy.
//
//   // q_in: [rows, 16, 512] bf16; positions: int32 or int64 [rows]; cos_sin: fp32 [max_positions, 64]
//   auto q = holdfast::norm_rope_pad(stream, q_in, positions, cos_sin, buffer, {.eps = 1e-6f});
//
//   auto q = buffer.acquire(stream, rows);                                          // the same in two steps
//   holdfast::norm_rope_pad(stream, q_in, positions, cos_sin, q, {.eps = 1e-6f});
//   holdfast::norm_rope_pad(stream, q_in, positions, cos_sin, q.heads_view());      // or any view; that pins nothing
//
// It writes the real heads and nothing else. Here for host::stream_ref, in norm_rope_pad.cuh for cudaStream_t.
//
// Arithmetic. Both devices give the same bits, whatever the flags (-use_fast_math, -mfma), denormals included. All of it is
// fp32; each operation is rounded to nearest, none is fused. Of a head of n elements x:
//
//   1. Packet p is the elements 8p to 8p + 7; the sum of its squares is ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
//   2. Lane l, of 32, adds those of its packets in order: ((l + (l + 32)) + (l + 64)) + (l + 96), as far as there are.
//   3. All 32 sums are added as a butterfly: each lane's own plus that of lane ^ 16, then of ^ 8, ^ 4, ^ 2, ^ 1.
//   4. scale = 1 / sqrt(sum * (1 / n) + eps), where 1 / n is rounded, too.
//   5. y = x * scale; with a weight, y = (x * scale) * weight.
//   6. Of the last 64, a pair (a, b) becomes (a * cos - b * sin, b * cos + a * sin). Pair i is elements 2i and 2i + 1, or,
//      half split, i and i + 32; its cosine is element i of the position's row in the table, its sine element 32 + i.
//   7. The result is rounded to the element's type, ties to even; what is too great for it becomes infinity, NaN
//      0x7fff.
//
// A row whose position is not in the table, and one that does not count (norm_rope_options::rows), becomes zeros; nothing
// is read outside of the table.
//
// Not here: a norm or a rotation alone, rotations of another width, keys.
#pragma once

#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_into.hpp>
#include <holdfast/detail/kernel_launch.hpp>
#include <holdfast/detail/kernel_norm.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/elements.hpp>
#include <holdfast/kernel/row_limit.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/version.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI {

/// Which elements of the last 64 turn together.
enum class rope_pairing : unsigned char {
  adjacent,   ///< 2i and 2i + 1 ("interleaved", "GPT-J style"; DeepSeek's)
  half_split  ///< i and i + 32 ("NeoX style")
};

/// [head_dim] in device memory, at a multiple of 16 bytes: fp32, or of the queries' own type. Or none.
class norm_weight {
 public:
  constexpr norm_weight() noexcept = default;
  constexpr norm_weight(std::nullptr_t) noexcept {}
  constexpr norm_weight(const float* data) noexcept : data_(data), kind_(kind::fp32) {}
  template <class T>
    requires(holds_bf16<T> || holds_fp16<T>)
  constexpr norm_weight(const T* data) noexcept : data_(data), kind_(holds_bf16<T> ? kind::bf16 : kind::fp16) {}

  [[nodiscard]] constexpr const void* data() const noexcept { return data_; }
  [[nodiscard]] constexpr bool is_fp32() const noexcept { return kind_ == kind::fp32; }
  /// Whether it can be the weight of queries of T.
  template <class T>
  [[nodiscard]] constexpr bool suits() const noexcept {
    return data_ == nullptr || is_fp32() || kind_ == (holds_bf16<T> ? kind::bf16 : kind::fp16);
  }

 private:
  enum class kind : unsigned char { fp32, bf16, fp16 };
  const void* data_ = nullptr;
  kind kind_ = kind::fp32;
};

struct norm_rope_options {
  float eps = 1e-6f;  ///< not negative; with 0, a head of zeros becomes NaN
  norm_weight weight{};
  rope_pairing pairing = rope_pairing::adjacent;
  /// Only the first so many rows count.
  row_limit rows{};
  /// Launch so that the grid starts while its predecessor in the stream still runs, and waits for it before it reads or
  /// writes (see row_op_shape::programmatic). The host device ignores it.
  bool programmatic = false;
};

namespace detail {

template <class T>
using pairs_of = std::conditional_t<holds_bf16<T>, bf16_pairs, fp16_pairs>;

template <class In, class Positions, class Table, class Out>
[[nodiscard]] norm_rope plan_norm(const In& in, const Positions& positions, const Table& table, const Out& out,
                                  const norm_rope_options& options) {
  check_copy_types<In, Out>();
  using element = typename Out::element_type;
  using index = std::remove_cv_t<typename Positions::element_type>;
  static_assert(holds_bf16<element> || holds_fp16<element>, "holdfast: queries to norm are bf16 or fp16");
  static_assert(Positions::rank() == 1 && std::is_integral_v<index> && std::is_signed_v<index> &&
                    (sizeof(index) == 4 || sizeof(index) == 8),
                "holdfast: positions must be [rows] of 32-bit or 64-bit signed integers");
  static_assert(Table::rank() == 2 && std::is_same_v<std::remove_cv_t<typename Table::element_type>, float>,
                "holdfast: the table must be [positions, 64] of float");
  static_assert(Positions::is_always_strided() && Table::is_always_strided() &&
                    std::is_pointer_v<typename Positions::data_handle_type> &&
                    std::is_pointer_v<typename Table::data_handle_type>,
                "holdfast: views must be of plain memory, with a strided layout");
  if (!options.weight.suits<element>())
    throw logic_error("norm_rope_pad: the weight is of another 16-bit type than the queries");

  norm_rope op;
  op.eps = options.eps;
  op.weight = static_cast<const std::byte*>(options.weight.data());
  op.wide_weight = options.weight.is_fp32();
  op.half_split = options.pairing == rope_pairing::half_split;
  op.limit = options.rows;
  const position_side where{reinterpret_cast<const std::byte*>(positions.data_handle()), std::int64_t{sizeof(index)},
                            static_cast<std::int64_t>(positions.extent(0)),
                            static_cast<std::int64_t>(positions.stride(0))};
  const angle_side angles{table.data_handle(),
                          {static_cast<std::int64_t>(table.extent(0)), static_cast<std::int64_t>(table.extent(1))},
                          {static_cast<std::int64_t>(table.stride(0)), static_cast<std::int64_t>(table.stride(1))}};
  return plan_norm(op, side_of("in", in), where, angles, side_of("out", out));
}

template <class T>
void run_norm(host::stream_ref stream, const norm_rope& op, bool) {
  with_norm_kind(op, [&]<int Slots, bool HalfSplit>() {
    launch(stream, "norm_rope_pad", [op] {
      for (std::int64_t head = 0; head < op.heads_in_all; ++head)
        norm_head_on_host<pairs_of<T>, Slots, HalfSplit>(op, head);
    });
  });
}

}  // namespace detail

/// Norms and rotates every head of `in` into its place in `out`, in stream order, as one kernel; none when there are no
/// heads.
///
/// `in` and `out`: mdspans [rows, heads, head_dim] of bf16 or fp16, both the same; head_dim is a multiple of 64 up to 1024.
/// The elements of a head lie side by side; heads begin at multiples of 16 bytes, in any order. `out` may be `in`, place
/// for place; else they must not overlap, nor may heads of `out` overlap each other: that is not checked. `positions`: an
/// mdspan [rows] of int32 or int64, any stride. `cos_sin`: an mdspan [positions, 64] of float, 32 cosines and then 32 sines
/// a position, side by side, rows at multiples of 16 bytes. All memory must stay until the stream, or every launch of the
/// graph that it captures, is through with it; plain views pin nothing.
///
/// Throws logic_error, and launches nothing, for extents that do not fit each other or are negative, a head_dim, strides or
/// addresses other than these, null data that should hold something, a weight of another 16-bit type, a negative eps,
/// offsets beyond 2^63 - 1 bytes, more than 2^33 - 4 heads in all.
template <detail::mdspan_like In, detail::mdspan_like Positions, detail::mdspan_like Table, detail::mdspan_like Out>
void norm_rope_pad(host::stream_ref stream, const In& in, const Positions& positions, const Table& cos_sin,
                   const Out& out, const norm_rope_options& options = {}) {
  detail::run_norm<typename Out::element_type>(stream, detail::plan_norm(in, positions, cos_sin, out, options),
                                               options.programmatic);
}

/// Into acquired rows. What `stream` captures owns their memory from now on, wherever they were acquired.
template <detail::mdspan_like In, detail::mdspan_like Positions, detail::mdspan_like Table, class T>
void norm_rope_pad(host::stream_ref stream, const In& in, const Positions& positions, const Table& cos_sin,
                   const query_rows<T, host_device>& rows, const norm_rope_options& options = {}) {
  const auto op = detail::plan_norm(in, positions, cos_sin, rows.heads_view(), options);
  rows.pin(stream);
  detail::run_norm<T>(stream, op, options.programmatic);
}

/// Into rows of `buffer`, which are acquired (and so grown, pinned and ordered) first; returns them. Throws what acquire
/// does, too; inputs that do not fit each other are refused when the rows are acquired.
template <detail::mdspan_like In, detail::mdspan_like Positions, detail::mdspan_like Table, class T>
[[nodiscard]] query_rows<T, host_device> norm_rope_pad(host::stream_ref stream, const In& in,
                                                       const Positions& positions, const Table& cos_sin,
                                                       padded_query_buffer<T, host_device>& buffer,
                                                       const norm_rope_options& options = {}) {
  return detail::fill_rows_of(
      buffer, "norm_rope_pad", stream, detail::side_of("in", in).extents,
      [&](const auto& rows) { norm_rope_pad(stream, in, positions, cos_sin, rows.heads_view(), options); });
}

}  // namespace holdfast::HOLDFAST_ABI
