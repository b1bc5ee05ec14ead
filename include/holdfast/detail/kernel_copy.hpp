// The one copy under pad_queries and unpad_output: [rows, heads, head_dim] with any strides on both sides.
//
// `plan_copy` checks and decides on the host, `strided_copy` is the row operation. A row's unit is the row; its parts are
// the packets of its real heads, one after the other. Which bytes lie side by side on BOTH sides decides how long a run
// is: all heads of a row (packed heads into the first rows of a padded buffer: the usual case), one head, or one element.
// The packet is the widest of 16, 8, 4, 2 and 1 bytes that divides the run, both addresses and all strides in use; so
// an element-wise copy moves elements, and a slice that begins at an odd byte moves bytes.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_divisor.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/row_op.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI::detail {

// --- views -----------------------------------------------------------------------------------------------------------

/// Anything shaped like an mdspan, of whichever library.
template <class View>
concept mdspan_like = requires(const View& view) {
  typename View::element_type;
  typename View::extents_type;
  typename View::layout_type;
  typename View::accessor_type;
  view.data_handle();
  view.extent(0);
  view.stride(0);
  { View::rank() } -> std::convertible_to<std::size_t>;
};

template <class From, class To>
constexpr void check_copy_types() {
  static_assert(From::rank() == 3 && To::rank() == 3, "holdfast: views must have rank 3: [rows, heads, head_dim]");
  static_assert(From::is_always_strided() && To::is_always_strided(), "holdfast: views must have a strided layout");
  static_assert(
      std::is_same_v<std::remove_cv_t<typename From::element_type>, std::remove_cv_t<typename To::element_type>>,
      "holdfast: both views must have the same element type (up to const)");
  static_assert(!std::is_const_v<typename To::element_type>, "holdfast: the view written to must not be const");
  static_assert(std::is_trivially_copyable_v<typename From::element_type>,
                "holdfast: elements must be trivially copyable");
  static_assert(std::is_pointer_v<typename From::data_handle_type> && std::is_pointer_v<typename To::data_handle_type>,
                "holdfast: views must be of plain memory, with a pointer for a data handle");
}

/// A view without its type: [rows, heads, head_dim], strides in elements.
struct copy_side {
  const char* name = nullptr;
  const void* data = nullptr;
  std::array<std::int64_t, 3> extents{};
  std::array<std::int64_t, 3> strides{};

  [[nodiscard]] bool empty() const { return extents[0] == 0 || extents[1] == 0 || extents[2] == 0; }
};

[[nodiscard]] inline std::string to_text(const std::array<std::int64_t, 3>& values) {
  const std::string text = "[";  // not "[" + ...: g++ 12 sees an overlap in there that isn't
  return text + std::to_string(values[0]) + ", " + std::to_string(values[1]) + ", " + std::to_string(values[2]) + "]";
}

/// "in is [3, 16, 512] with strides [8192, 512, 1]"
[[nodiscard]] inline std::string to_text(const copy_side& side) {
  return std::string(side.name) + " is " + to_text(side.extents) + " with strides " + to_text(side.strides);
}

[[noreturn]] inline void refuse_copy(const char* kernel, const std::string& why, const copy_side& from,
                                     const copy_side& to) {
  throw logic_error(std::string(kernel) + ": " + why + "; " + to_text(from) + ", " + to_text(to));
}

template <class View>
[[nodiscard]] copy_side side_of(const char* name, const View& view) {
  copy_side side{name, static_cast<const void*>(view.data_handle()), {}, {}};
  for (std::size_t i = 0; i < 3; ++i) {
    side.extents[i] = static_cast<std::int64_t>(view.extent(i));  // an unsigned one too big: refused as negative
    side.strides[i] = static_cast<std::int64_t>(view.stride(i));
  }
  return side;
}

// --- the plan --------------------------------------------------------------------------------------------------------

/// Bytes from one row, head and run to the next.
struct copy_strides {
  std::int64_t row = 0;
  std::int64_t head = 0;
  std::int64_t run = 0;
};

struct copy_plan {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::int64_t rows = 0;  // 0: nothing to do
  std::int32_t row_packets = 0;
  std::int32_t head_packets = 0;
  std::int32_t run_packets = 0;
  int packet_bytes = 0;
  copy_strides from_strides;
  copy_strides to_strides;
};

/// Strides in bytes, 0 where there is no second item; refuses what does not fit in 63 bits.
[[nodiscard]] inline std::array<std::int64_t, 3> byte_strides(const char* kernel, const copy_side& side,
                                                              const std::array<std::int64_t, 3>& shape,
                                                              std::int64_t element_bytes, const copy_side& from,
                                                              const copy_side& to) {
  std::array<std::int64_t, 3> bytes{};
  std::int64_t lowest = 0, highest = element_bytes;
  bool fits = true;
  for (std::size_t i = 0; i < 3; ++i) {
    if (shape[i] == 1) continue;
    std::int64_t last = 0;
    fits = fits && !__builtin_mul_overflow(side.strides[i], element_bytes, &bytes[i]) &&
           !__builtin_mul_overflow(bytes[i], shape[i] - 1, &last) &&
           !__builtin_add_overflow(last < 0 ? lowest : highest, last, last < 0 ? &lowest : &highest);
  }
  if (!fits || lowest == std::numeric_limits<std::int64_t>::min())
    refuse_copy(kernel, std::string("the offsets of ") + side.name + " pass 2^63 - 1 bytes", from, to);
  return bytes;
}

/// What to copy: the shape of `to`, from the first heads of `from`. Throws logic_error, as the launchers say.
[[nodiscard]] inline copy_plan plan_copy(const char* kernel, std::int64_t element_bytes, const copy_side& from,
                                         const copy_side& to, bool from_may_have_more_heads) {
  for (const copy_side* side : {&from, &to})
    for (const std::int64_t extent : side->extents)
      if (extent < 0) refuse_copy(kernel, std::string(side->name) + " has a negative extent", from, to);
  if (from.extents[0] != to.extents[0]) refuse_copy(kernel, "the numbers of rows differ", from, to);
  if (from.extents[2] != to.extents[2]) refuse_copy(kernel, "the head dimensions differ", from, to);
  if (from_may_have_more_heads ? from.extents[1] < to.extents[1] : from.extents[1] != to.extents[1])
    refuse_copy(kernel,
                std::to_string(to.extents[1]) + " heads asked of " + to.name + ", but " + from.name + " has " +
                    std::to_string(from.extents[1]),
                from, to);

  copy_plan plan;
  if (to.empty()) return plan;
  for (const copy_side* side : {&from, &to})
    if (side->data == nullptr) refuse_copy(kernel, std::string("the data of ") + side->name + " is null", from, to);

  const auto [rows, heads, head_dim] = to.extents;
  const auto from_bytes = byte_strides(kernel, from, to.extents, element_bytes, from, to);
  const auto to_bytes = byte_strides(kernel, to, to.extents, element_bytes, from, to);

  // How many bytes lie side by side on both sides, and how many such runs make a head, and a row.
  const auto adjoin = [&](std::size_t dimension, std::int64_t count, std::int64_t bytes) {
    return count == 1 || (from_bytes[dimension] == bytes && to_bytes[dimension] == bytes);
  };
  std::int64_t run_bytes = element_bytes, head_runs = head_dim, row_heads = heads;
  if (adjoin(2, head_dim, element_bytes)) {
    head_runs = 1;
    bool fits = !__builtin_mul_overflow(head_dim, element_bytes, &run_bytes);
    if (fits && adjoin(1, heads, run_bytes)) {
      row_heads = 1;
      fits = !__builtin_mul_overflow(run_bytes, heads, &run_bytes);
    }
    if (!fits) refuse_copy(kernel, "a row passes 2^63 - 1 bytes", from, to);
  }
  plan.rows = rows;
  plan.from = static_cast<const std::byte*>(from.data);
  plan.to = static_cast<std::byte*>(const_cast<void*>(to.data));
  plan.from_strides = {from_bytes[0], row_heads == 1 ? 0 : from_bytes[1], head_runs == 1 ? 0 : from_bytes[2]};
  plan.to_strides = {to_bytes[0], row_heads == 1 ? 0 : to_bytes[1], head_runs == 1 ? 0 : to_bytes[2]};

  std::uint64_t bits = static_cast<std::uint64_t>(run_bytes);
  bits |= reinterpret_cast<std::uintptr_t>(plan.from) | reinterpret_cast<std::uintptr_t>(plan.to);
  for (const copy_strides& strides : {plan.from_strides, plan.to_strides})
    bits |= static_cast<std::uint64_t>(strides.row | strides.head | strides.run);
  plan.packet_bytes = 16;
  while ((bits & static_cast<std::uint64_t>(plan.packet_bytes - 1)) != 0) plan.packet_bytes /= 2;

  const std::int64_t run_packets = run_bytes / plan.packet_bytes;
  std::int64_t head_packets = 0, row_packets = 0;
  if (__builtin_mul_overflow(run_packets, head_runs, &head_packets) ||
      __builtin_mul_overflow(head_packets, row_heads, &row_packets) || row_packets > row_op_tiling::max_parts)
    refuse_copy(kernel,
                "a row takes more than " + std::to_string(row_op_tiling::max_parts) + " packets of " +
                    std::to_string(plan.packet_bytes) + " bytes",
                from, to);
  plan.run_packets = static_cast<std::int32_t>(run_packets);
  plan.head_packets = static_cast<std::int32_t>(head_packets);
  plan.row_packets = static_cast<std::int32_t>(row_packets);
  return plan;
}

/// The checks and the plan for two views. `kernel` and the names are what messages call them.
template <class From, class To>
[[nodiscard]] copy_plan plan_copy(const char* kernel, const char* from_name, const From& from, const char* to_name,
                                  const To& to, bool from_may_have_more_heads) {
  check_copy_types<From, To>();
  return plan_copy(kernel, std::int64_t{sizeof(typename To::element_type)}, side_of(from_name, from),
                   side_of(to_name, to), from_may_have_more_heads);
}

// --- the operation ---------------------------------------------------------------------------------------------------

template <class Packet>
struct strided_copy {
  /// One packet a thread: in a prototype on an H200, more of them in flight, or blocks that stay, made a pad slower.
  /// bench/pad_queries_bench.cu compares.
  static constexpr row_op_shape shape{.threads = 256, .packets = 1};

  const std::byte* from;
  std::byte* to;
  std::int64_t rows;
  std::int32_t row_packets;
  divisor32 by_head;
  divisor32 by_run;
  copy_strides from_strides;
  copy_strides to_strides;

  explicit strided_copy(const copy_plan& plan)
      : from(plan.from),
        to(plan.to),
        rows(plan.rows),
        row_packets(plan.row_packets),
        by_head(plan.head_packets),
        by_run(plan.run_packets),
        from_strides(plan.from_strides),
        to_strides(plan.to_strides) {}

  [[nodiscard]] std::int64_t units() const { return rows; }
  [[nodiscard]] std::int32_t parts() const { return row_packets; }

  [[nodiscard]] HOLDFAST_HOST_DEVICE Packet load(std::int64_t row, std::int32_t part) const {
    return load_packet<Packet>(from + offset(from_strides, row, part));
  }

  HOLDFAST_HOST_DEVICE void store(std::int64_t row, std::int32_t part, const Packet& packet) const {
    store_packet(to + offset(to_strides, row, part), packet);
  }

 private:
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t offset(const copy_strides& strides, std::int64_t row,
                                                         std::int32_t part) const {
    const auto in_row = static_cast<std::uint32_t>(part);
    const std::uint32_t head = by_head.quotient(in_row);
    const std::uint32_t in_head = in_row - head * by_head.divisor;
    const std::uint32_t run = by_run.quotient(in_head);
    const std::uint32_t in_run = in_head - run * by_run.divisor;
    return row * strides.row + std::int64_t{head} * strides.head + std::int64_t{run} * strides.run +
           std::int64_t{in_run} * std::int64_t{sizeof(Packet)};
  }
};

/// Calls `run` with the plan's operation; not at all when there is nothing to copy.
template <class Run>
void with_copy_op(const copy_plan& plan, const Run& run) {
  if (plan.rows == 0) return;
  switch (plan.packet_bytes) {
    case 16: return run(strided_copy<packet16>(plan));
    case 8: return run(strided_copy<std::uint64_t>(plan));
    case 4: return run(strided_copy<std::uint32_t>(plan));
    case 2: return run(strided_copy<std::uint16_t>(plan));
    default: return run(strided_copy<std::uint8_t>(plan));
  }
}

inline void run_copy(host::stream_ref stream, const copy_plan& plan) {
  with_copy_op(plan, [&](const auto& op) { run_row_op(stream, op); });
}

}  // namespace holdfast::HOLDFAST_ABI::detail
