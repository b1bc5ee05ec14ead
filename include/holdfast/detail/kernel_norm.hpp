// What is under norm_rope_pad: the arithmetic of one lane, which both devices run, and the host's warp of 32 of them.
//
// A head is a sequence of packets of 8 elements. Lane l has the packets l, l + 32, ..., `Slots` of them at most; where
// there are fewer, zeros, which change no sum. The last 64 elements, 8 packets, so lie in the last slot of 8 neighbouring
// lanes.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_divisor.hpp>
#include <holdfast/detail/kernel_exact.hpp>
#include <holdfast/detail/kernel_half.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/row_limit.hpp>
#include <holdfast/version.hpp>

#include <cuda_fp16.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace holdfast::inline HOLDFAST_ABI::detail {

// --- two kinds of 16-bit floats: two of them in a word, the first one low ----------------------------------------------

struct bf16_pairs {
  HOLDFAST_HOST_DEVICE static float_pair widen(std::uint32_t word) {
    return {float_of(word << 16), float_of(word & 0xffff0000)};
  }
  HOLDFAST_HOST_DEVICE static std::uint32_t narrow(float low, float high) { return bf16_of_floats(low, high); }
};

struct fp16_pairs {
  HOLDFAST_HOST_DEVICE static float_pair widen(std::uint32_t word) {
    __half2 halves;
    memcpy(static_cast<void*>(&halves), &word, sizeof halves);
    const float2 both = __half22float2(halves);
    return {both.x, both.y};
  }
  HOLDFAST_HOST_DEVICE static std::uint32_t narrow(float low, float high) { return fp16_of_floats(low, high); }
};

// --- arguments -----------------------------------------------------------------------------------------------------------

inline constexpr std::int32_t rope_dim = 64;
inline constexpr std::int32_t rope_packets = rope_dim / 8;
inline constexpr std::int32_t lanes = 32;
inline constexpr std::int32_t most_norm_slots = 4;

struct norm_rope {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t in_row = 0, in_head = 0, out_row = 0, out_head = 0;  // strides in bytes
  std::int64_t rows = 0;
  std::int64_t heads_in_all = 0;  // 0: nothing to do
  divisor64 by_heads;
  std::int32_t packets = 0;  // of a head
  float inverse_dim = 0;
  float eps = 0;
  const std::byte* weight = nullptr;
  bool wide_weight = false;  // fp32, not as the elements
  bool half_split = false;
  bool wide_positions = false;
  const std::byte* positions = nullptr;
  std::int64_t position_stride = 0;  // in bytes
  const float* table = nullptr;
  std::int64_t table_rows = 0;
  std::int64_t table_stride = 0;
  row_limit limit;

  struct place {
    std::int64_t row;
    std::int64_t head;
  };
  [[nodiscard]] HOLDFAST_HOST_DEVICE place place_of(std::int64_t number) const {
    const auto row = static_cast<std::int64_t>(by_heads.quotient(static_cast<std::uint64_t>(number)));
    return {row, number - row * by_heads.divisor};
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE const std::byte* from(const place& at) const {
    return in + (at.row * in_row + at.head * in_head);
  }
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::byte* to(const place& at) const {
    return out + (at.row * out_row + at.head * out_head);
  }

  /// Two words of a wide position, the one word of a narrow one twice: so a load waits for no branch.
  struct position {
    std::int32_t low;
    std::int32_t high;
  };
  [[nodiscard]] HOLDFAST_HOST_DEVICE position position_of(std::int64_t row) const {
    const std::byte* const at = positions + row * position_stride;
    return {load_packet<std::int32_t>(at), load_packet<std::int32_t>(at + (wide_positions ? 4 : 0))};
  }

  /// 32 cosines, before 32 sines; null where the position is not in the table.
  [[nodiscard]] HOLDFAST_HOST_DEVICE const float* angles_at(const position& words) const {
    const std::int64_t at = wide_positions
                                ? std::int64_t{words.high} * 0x100000000 + static_cast<std::uint32_t>(words.low)
                                : std::int64_t{words.low};
    return at >= 0 && at < table_rows ? table + at * table_stride : nullptr;
  }

  /// 1 / sqrt(mean + eps)
  [[nodiscard]] HOLDFAST_HOST_DEVICE float scale_of(float sum_of_squares) const {
    return exact_reciprocal(exact_root(exact_sum(exact_product(sum_of_squares, inverse_dim), eps)));
  }
};

// --- one lane's arithmetic -----------------------------------------------------------------------------------------------

struct eight_floats {
  float at[8];
};

template <class Pairs>
HOLDFAST_HOST_DEVICE inline eight_floats widen(const packet16& packet) {
  eight_floats values;
  for (int i = 0; i < 4; ++i) {
    const float_pair pair = Pairs::widen(packet.word[i]);
    values.at[2 * i] = pair.low;
    values.at[2 * i + 1] = pair.high;
  }
  return values;
}

template <class Pairs>
HOLDFAST_HOST_DEVICE inline packet16 narrow(const eight_floats& values) {
  packet16 packet;
  for (int i = 0; i < 4; ++i) packet.word[i] = Pairs::narrow(values.at[2 * i], values.at[2 * i + 1]);
  return packet;
}

/// 16 bytes that many heads read: they stay in L1. `Four` is float4 or uint4; a struct of ours would be four loads.
template <class Four>
HOLDFAST_HOST_DEVICE inline Four load_kept(const void* from) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const Four*>(from);
#else
  Four four;
  std::memcpy(&four, from, sizeof four);
  return four;
#endif
}

HOLDFAST_HOST_DEVICE inline void load_floats(const float* from, float* to) {
  const auto four = load_kept<float4>(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

/// Of a packet: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
template <class Pairs>
HOLDFAST_HOST_DEVICE inline float sum_of_squares(const packet16& packet) {
  float sums[4];
  for (int i = 0; i < 4; ++i) {
    const float_pair pair = Pairs::widen(packet.word[i]);
    sums[i] = exact_sum(exact_product(pair.low, pair.low), exact_product(pair.high, pair.high));
  }
  return exact_sum(exact_sum(sums[0], sums[1]), exact_sum(sums[2], sums[3]));
}

/// Times the scale, and then times the weight.
template <class Pairs>
HOLDFAST_HOST_DEVICE inline eight_floats normalised(const norm_rope& op, const packet16& packet, std::int32_t number,
                                                    float scale) {
  eight_floats values = widen<Pairs>(packet);
  for (float& value : values.at) value = exact_product(value, scale);
  if (op.weight != nullptr) {
    eight_floats weights;
    if (op.wide_weight) {
      const float* const wide = reinterpret_cast<const float*>(op.weight) + 8 * number;
      load_floats(wide, weights.at);
      load_floats(wide + 4, weights.at + 4);
    } else {
      const auto narrow = load_kept<uint4>(op.weight + 16 * number);
      weights = widen<Pairs>({{narrow.x, narrow.y, narrow.z, narrow.w}});
    }
    for (int i = 0; i < 8; ++i) values.at[i] = exact_product(values.at[i], weights.at[i]);
  }
  return values;
}

/// What turns a packet: of half-split pairs eight of each, of adjacent ones four.
template <bool HalfSplit>
struct packet_angles {
  static constexpr int count = HalfSplit ? 8 : 4;
  float cosines[count];
  float sines[count];
};

/// `packet` counts from the first one that turns.
template <bool HalfSplit>
HOLDFAST_HOST_DEVICE inline packet_angles<HalfSplit> load_angles(const float* row, std::int32_t packet) {
  packet_angles<HalfSplit> angles;
  const std::int32_t first = HalfSplit ? packet % 4 * 8 : packet * 4;
  for (int i = 0; i < angles.count; i += 4) {
    load_floats(row + first + i, angles.cosines + i);
    load_floats(row + rope_dim / 2 + first + i, angles.sines + i);
  }
  return angles;
}

/// Pairs are neighbours.
HOLDFAST_HOST_DEVICE inline void rotate_adjacent(eight_floats& values, const packet_angles<false>& angles) {
  for (int i = 0; i < 4; ++i) {
    const float a = values.at[2 * i], b = values.at[2 * i + 1];
    const float cosine = angles.cosines[i], sine = angles.sines[i];
    values.at[2 * i] = exact_difference(exact_product(a, cosine), exact_product(b, sine));
    values.at[2 * i + 1] = exact_sum(exact_product(b, cosine), exact_product(a, sine));
  }
}

/// Pairs are 32 elements apart: `others` are those of the packet 4 further, or back.
HOLDFAST_HOST_DEVICE inline void rotate_half_split(eight_floats& values, const eight_floats& others,
                                                   std::int32_t packet, const packet_angles<true>& angles) {
  for (int i = 0; i < 8; ++i) {
    const float own = exact_product(values.at[i], angles.cosines[i]);
    const float other = exact_product(others.at[i], angles.sines[i]);
    values.at[i] = packet < 4 ? exact_difference(own, other) : exact_sum(own, other);
  }
}

// --- a warp on the host --------------------------------------------------------------------------------------------------

template <class Pairs, int Slots, bool HalfSplit>
void norm_head_on_host(const norm_rope& op, std::int64_t number) {
  const auto at = op.place_of(number);
  const float* const angles = at.row < op.limit.of(op.rows) ? op.angles_at(op.position_of(at.row)) : nullptr;
  if (angles == nullptr) {
    for (std::int32_t packet = 0; packet < op.packets; ++packet) store_packet(op.to(at) + 16 * packet, packet16{});
    return;
  }
  std::array<std::array<packet16, Slots>, lanes> in{};
  std::array<float, lanes> sums{};
  for (std::size_t lane = 0; lane < lanes; ++lane)
    for (std::size_t slot = 0; slot < Slots; ++slot) {
      const auto packet = static_cast<std::int32_t>(slot * lanes + lane);
      if (packet < op.packets) in[lane][slot] = load_packet<packet16>(op.from(at) + 16 * packet);
      const float sum = sum_of_squares<Pairs>(in[lane][slot]);
      sums[lane] = slot == 0 ? sum : exact_sum(sums[lane], sum);
    }
  for (std::size_t distance = lanes / 2; distance > 0; distance /= 2) {
    const auto before = sums;
    for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] = exact_sum(before[lane], before[lane ^ distance]);
  }
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const float scale = op.scale_of(sums[lane]);
    for (std::size_t slot = 0; slot < Slots; ++slot) {
      const auto packet = static_cast<std::int32_t>(slot * lanes + lane);
      if (packet >= op.packets) continue;
      eight_floats values = normalised<Pairs>(op, in[lane][slot], packet, scale);
      const std::int32_t turned = packet - (op.packets - rope_packets);
      if (turned >= 0) {
        const auto turning = load_angles<HalfSplit>(angles, turned);
        if constexpr (HalfSplit)
          rotate_half_split(values, normalised<Pairs>(op, in[lane ^ 4][slot], packet ^ 4, scale), turned, turning);
        else
          rotate_adjacent(values, turning);
      }
      store_packet(op.to(at) + 16 * packet, narrow<Pairs>(values));
    }
  }
}

/// Calls `run` with a number of slots that holds a head, and the pairing; not at all when there are no heads.
template <class Run>
void with_norm_kind(const norm_rope& op, const Run& run) {
  if (op.heads_in_all == 0) return;
  const auto with_pairing = [&]<int Slots>() {
    op.half_split ? run.template operator()<Slots, true>() : run.template operator()<Slots, false>();
  };
  switch ((op.packets + lanes - 1) / lanes) {
    case 1: return with_pairing.template operator()<1>();
    case 2: return with_pairing.template operator()<2>();
    case 3: return with_pairing.template operator()<3>();
    default: return with_pairing.template operator()<most_norm_slots>();
  }
}

// --- the plan ------------------------------------------------------------------------------------------------------------

/// Positions, without their type. The stride is in elements.
struct position_side {
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;  // of one
  std::int64_t count = 0;
  std::int64_t stride = 0;
};

/// Elements of the table, and how many from one position to the next.
struct angle_side {
  const float* data = nullptr;
  std::array<std::int64_t, 2> extents{};
  std::array<std::int64_t, 2> strides{};
};

inline constexpr std::int32_t norm_warps = 4;  // of a block

/// Throws logic_error, as the launchers say. `op` has what needs no check.
[[nodiscard]] inline norm_rope plan_norm(norm_rope op, const copy_side& in, const position_side& positions,
                                         const angle_side& table, const copy_side& out) {
  const auto refuse = [&](const std::string& why) { refuse_copy("norm_rope_pad", why, in, out); };
  for (const copy_side* side : {&in, &out})
    for (const std::int64_t extent : side->extents)
      if (extent < 0) refuse(std::string(side->name) + " has a negative extent");
  if (in.extents != out.extents) refuse("in and out have different extents");
  const auto [rows, heads, head_dim] = in.extents;
  if (positions.count != rows) refuse(std::to_string(positions.count) + " positions");
  if (table.extents[0] < 0 || table.extents[1] != rope_dim)
    refuse("a table [" + std::to_string(table.extents[0]) + ", " + std::to_string(table.extents[1]) +
           "]: a position has 32 cosines and 32 sines");
  if (!(op.eps >= 0)) refuse("eps is negative, or NaN");
  if (rows == 0 || heads == 0) return op;
  if (head_dim % rope_dim != 0 || head_dim < rope_dim || head_dim > most_norm_slots * lanes * 8)
    refuse("head_dim is a multiple of 64, and at most 1024");
  constexpr std::int64_t most_heads = std::int64_t{0x7fffffff} * norm_warps;
  if (heads > 0x7fffffff || __builtin_mul_overflow(rows, heads, &op.heads_in_all) || op.heads_in_all > most_heads)
    refuse("more than " + std::to_string(most_heads) + " heads in all");

  const auto check = [&](const copy_side& side) {
    const std::string name = side.name;
    if (side.data == nullptr) refuse("the data of " + name + " is null");
    if (side.strides[2] != 1) refuse("the elements of a head of " + name + " do not lie side by side");
    const auto bytes = byte_strides("norm_rope_pad", side, side.extents, 2, in, out);
    if (((reinterpret_cast<std::uintptr_t>(side.data) | static_cast<std::uint64_t>(bytes[0] | bytes[1])) & 15) != 0)
      refuse("heads of " + name + " do not begin at multiples of 16 bytes");
    return bytes;
  };
  const auto in_bytes = check(in), out_bytes = check(out);
  if (positions.data == nullptr) refuse("the positions are null");
  std::int64_t end = 0;
  if (__builtin_mul_overflow(positions.stride, positions.bytes, &op.position_stride) ||
      __builtin_mul_overflow(op.position_stride, rows, &end))
    refuse("the offsets of positions pass 2^63 - 1 bytes");
  if (table.extents[0] > 0) {
    if (table.data == nullptr) refuse("the table is null");
    if (table.strides[1] != 1 || table.strides[0] % 4 != 0 || reinterpret_cast<std::uintptr_t>(table.data) % 16 != 0)
      refuse("the table's rows do not lie side by side at multiples of 16 bytes");
    if (__builtin_mul_overflow(table.strides[0], table.extents[0], &end) ||
        __builtin_mul_overflow(end, std::int64_t{4}, &end))
      refuse("the offsets of the table pass 2^63 - 1 bytes");
  }
  if (reinterpret_cast<std::uintptr_t>(op.weight) % 16 != 0) refuse("the weight is not at a multiple of 16 bytes");

  op.in = static_cast<const std::byte*>(in.data);
  op.out = static_cast<std::byte*>(const_cast<void*>(out.data));
  op.in_row = in_bytes[0];
  op.in_head = in_bytes[1];
  op.out_row = out_bytes[0];
  op.out_head = out_bytes[1];
  op.rows = rows;
  op.by_heads = divisor64(static_cast<std::int32_t>(heads));
  op.packets = static_cast<std::int32_t>(head_dim / 8);
  op.inverse_dim = 1.0f / static_cast<float>(head_dim);
  op.positions = positions.data;
  op.wide_positions = positions.bytes == 8;
  op.table = table.data;
  op.table_rows = table.extents[0];
  op.table_stride = table.strides[0];
  return op;
}

}  // namespace holdfast::HOLDFAST_ABI::detail
