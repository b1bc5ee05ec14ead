// What is under concat_pad: checks and a plan on the host, and the row operation of both devices.
//
// A row's unit is the row; its parts are the packets of its heads, each head's of the first input before those of the
// second. Where the elements of a head lie side by side on all three sides, a packet is the widest of 16, 8, 4, 2 and 1
// bytes that divides both widths, all addresses and all strides in use; else it is an element.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_divisor.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/row_limit.hpp>
#include <holdfast/kernel/row_op.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Where the packets of one side are: bytes from one row, head and packet to the next.
struct concat_side {
  std::byte* data = nullptr;
  std::int64_t row = 0;
  std::int64_t head = 0;
  std::int64_t packet = 0;

  [[nodiscard]] HOLDFAST_HOST_DEVICE std::byte* at(std::int64_t in_rows, std::uint32_t in_heads,
                                                   std::uint32_t in_packets) const {
    return data + (in_rows * row + std::int64_t{in_heads} * head + std::int64_t{in_packets} * packet);
  }
};

struct concat_plan {
  concat_side first, second, out;
  std::int64_t rows = 0;  // 0: nothing to do
  std::int32_t row_packets = 0;
  std::int32_t head_packets = 0;
  std::uint32_t first_packets = 0;  // of a head
  int packet_bytes = 0;
  row_limit limit;
};

/// Throws logic_error, as the launchers say.
[[nodiscard]] inline concat_plan plan_concat(std::int64_t element_bytes, const copy_side& first,
                                             const copy_side& second, const copy_side& out, const row_limit& limit) {
  const auto refuse = [&](const std::string& why) {
    throw logic_error("concat_pad: " + why + "; " + to_text(first) + ", " + to_text(second) + ", " + to_text(out));
  };
  const std::array<const copy_side*, 3> sides{&first, &second, &out};
  for (const copy_side* side : sides)
    for (const std::int64_t extent : side->extents)
      if (extent < 0) refuse(std::string(side->name) + " has a negative extent");
  for (const copy_side* side : {&first, &second}) {
    if (side->extents[0] != out.extents[0]) refuse("the numbers of rows differ");
    if (side->extents[1] != out.extents[1]) refuse("the numbers of heads differ");
  }
  if (out.extents[2] - first.extents[2] != second.extents[2]) refuse("the widths do not add up");

  concat_plan plan;
  if (out.empty()) return plan;
  std::array<std::array<std::int64_t, 3>, 3> strides{};
  std::uint64_t bits = 0;
  bool together = true;  // the elements of every head
  for (std::size_t i = 0; i < 3; ++i) {
    const copy_side& side = *sides[i];
    if (side.empty()) continue;
    if (side.data == nullptr) refuse(std::string("the data of ") + side.name + " is null");
    strides[i] = byte_strides("concat_pad", side, side.extents, element_bytes, side, out);
    together = together && (side.extents[2] == 1 || strides[i][2] == element_bytes);
    bits |= reinterpret_cast<std::uintptr_t>(side.data) | static_cast<std::uint64_t>(strides[i][0] | strides[i][1]);
  }
  std::int64_t first_bytes = 0, head_bytes = 0;
  if (__builtin_mul_overflow(first.extents[2], element_bytes, &first_bytes) ||
      __builtin_mul_overflow(out.extents[2], element_bytes, &head_bytes))
    refuse("a head passes 2^63 - 1 bytes");
  if (together) {
    bits |= static_cast<std::uint64_t>(first_bytes | head_bytes);
    plan.packet_bytes = 16;
    while ((bits & static_cast<std::uint64_t>(plan.packet_bytes - 1)) != 0) plan.packet_bytes /= 2;
  } else {
    plan.packet_bytes = static_cast<int>(element_bytes);
    if ((bits & static_cast<std::uint64_t>(element_bytes - 1)) != 0) refuse("elements are not aligned to their size");
  }

  const std::int64_t head_packets = head_bytes / plan.packet_bytes;
  std::int64_t row_packets = 0;
  if (__builtin_mul_overflow(head_packets, out.extents[1], &row_packets) || row_packets > row_op_tiling::max_parts)
    refuse("a row takes more than " + std::to_string(row_op_tiling::max_parts) + " packets of " +
           std::to_string(plan.packet_bytes) + " bytes");
  const auto planned = [&](std::size_t i) {
    return concat_side{static_cast<std::byte*>(const_cast<void*>(sides[i]->data)), strides[i][0], strides[i][1],
                       together ? plan.packet_bytes : strides[i][2]};
  };
  plan.first = planned(0);
  plan.second = planned(1);
  plan.out = planned(2);
  plan.rows = out.extents[0];
  plan.row_packets = static_cast<std::int32_t>(row_packets);
  plan.head_packets = static_cast<std::int32_t>(head_packets);
  plan.first_packets = static_cast<std::uint32_t>(first_bytes / plan.packet_bytes);
  plan.limit = limit;
  return plan;
}

template <class First, class Second, class Out>
[[nodiscard]] concat_plan plan_concat(const First& absorbed, const Second& rope, const Out& out,
                                      const row_limit& limit) {
  check_copy_types<First, Out>();
  check_copy_types<Second, Out>();
  constexpr std::size_t bytes = sizeof(typename Out::element_type);
  static_assert(std::has_single_bit(bytes) && bytes <= 16, "holdfast: elements have 1, 2, 4, 8 or 16 bytes");
  return plan_concat(std::int64_t{bytes}, side_of("absorbed", absorbed), side_of("rope", rope), side_of("out", out),
                     limit);
}

template <class Packet>
struct concat_heads {
  static constexpr row_op_shape shape = strided_copy<Packet>::shape;

  concat_side first, second, out;
  std::int64_t rows;
  std::int32_t row_packets;
  std::uint32_t first_packets;
  divisor32 by_head;
  row_limit limit;

  explicit concat_heads(const concat_plan& plan)
      : first(plan.first),
        second(plan.second),
        out(plan.out),
        rows(plan.rows),
        row_packets(plan.row_packets),
        first_packets(plan.first_packets),
        by_head(plan.head_packets),
        limit(plan.limit) {}

  [[nodiscard]] std::int64_t units() const { return rows; }
  [[nodiscard]] std::int32_t parts() const { return row_packets; }

  [[nodiscard]] HOLDFAST_HOST_DEVICE Packet load(std::int64_t row, std::int32_t part) const {
    if (row >= limit.of(rows)) return Packet{};
    const auto [head, packet] = place_of(part);
    const bool behind = packet >= first_packets;
    const concat_side from{behind ? second.data : first.data, behind ? second.row : first.row,
                           behind ? second.head : first.head, behind ? second.packet : first.packet};
    return load_packet<Packet>(from.at(row, head, behind ? packet - first_packets : packet));
  }

  HOLDFAST_HOST_DEVICE void store(std::int64_t row, std::int32_t part, const Packet& packet) const {
    const auto at = place_of(part);
    store_packet(out.at(row, at.head, at.packet), packet);
  }

 private:
  struct place {
    std::uint32_t head;
    std::uint32_t packet;
  };
  [[nodiscard]] HOLDFAST_HOST_DEVICE place place_of(std::int32_t part) const {
    const auto in_row = static_cast<std::uint32_t>(part);
    const std::uint32_t head = by_head.quotient(in_row);
    return {head, in_row - head * by_head.divisor};
  }
};

/// Calls `run` with the plan's operation; not at all when there is nothing to write.
template <class Run>
void with_concat_op(const concat_plan& plan, const Run& run) {
  if (plan.rows == 0) return;
  switch (plan.packet_bytes) {
    case 16: return run(concat_heads<packet16>(plan));
    case 8: return run(concat_heads<std::uint64_t>(plan));
    case 4: return run(concat_heads<std::uint32_t>(plan));
    case 2: return run(concat_heads<std::uint16_t>(plan));
    default: return run(concat_heads<std::uint8_t>(plan));
  }
}

inline void run_concat(host::stream_ref stream, const concat_plan& plan, bool) {
  with_concat_op(plan, [&](const auto& op) { run_row_op(stream, op); });
}

}  // namespace holdfast::HOLDFAST_ABI::detail
