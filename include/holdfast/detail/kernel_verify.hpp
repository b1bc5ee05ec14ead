// What is under verify_padding: which bytes are padding, and how a packet of them is judged. Both devices run the same.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/row_limit.hpp>
#include <holdfast/kernel/row_op.hpp>
#include <holdfast/version.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// `width` bytes of padding in each row, at `offset` bytes from a row's start. Offsets of bad bytes count from `base`.
struct padding_bytes {
  const std::byte* base = nullptr;
  std::int64_t offset = 0;
  std::int64_t pitch = 0;
  std::int64_t width = 0;
  std::int64_t rows = 0;
};

[[noreturn]] inline void refuse_verify(const std::string& why) { throw logic_error("verify_padding: " + why); }

/// The heads behind the first `heads` ones of a view [rows, padded_heads, head_dim].
[[nodiscard]] inline padding_bytes padding_of(const copy_side& side, std::int64_t element_bytes, std::int64_t heads) {
  const auto refuse = [&](const std::string& why) { refuse_verify(why + "; " + to_text(side)); };
  const auto [rows, padded_heads, head_dim] = side.extents;
  if (rows < 0 || padded_heads < 0 || head_dim < 0) refuse("a negative extent");
  if (heads < 0 || heads > padded_heads) refuse(std::to_string(heads) + " real heads");
  const std::int64_t behind = padded_heads - heads;
  if (rows == 0 || behind == 0 || head_dim == 0) return {};
  if (side.data == nullptr) refuse("the data is null");
  if ((head_dim > 1 && side.strides[2] != 1) || (behind > 1 && side.strides[1] != head_dim))
    refuse("the padding of a row does not lie side by side");
  const auto bytes = byte_strides("verify_padding", side, side.extents, element_bytes, side, side);
  padding_bytes padding{static_cast<const std::byte*>(side.data), 0, bytes[0], 0, rows};
  if (__builtin_mul_overflow(behind * element_bytes, head_dim, &padding.width) ||
      __builtin_mul_overflow(heads * element_bytes, padded_heads > 1 ? side.strides[1] : head_dim, &padding.offset))
    refuse("a row passes 2^63 - 1 bytes");
  if (padding.pitch < 0 || padding.offset < 0) refuse("rows or heads go backwards");
  return padding;
}

/// What was found so far; all zero: nothing.
struct padding_found {
  unsigned long long bad_bytes = 0;
  unsigned long long inverted_first = 0;  ///< ~offset: the greatest is the first one's
};

template <class Packet>
struct checked_padding {
  const std::byte* first = nullptr;  ///< of row 0
  std::int64_t offset = 0;           ///< of `first` from where offsets count
  std::int64_t pitch = 0;
  std::int64_t rows = 0;
  std::int32_t row_packets = 0;
  row_limit limit;

  [[nodiscard]] HOLDFAST_HOST_DEVICE Packet load(const row_op_tiling::place& at) const {
    return load_packet<Packet>(first + in_rows(at));
  }

  /// For a packet that is not zero.
  HOLDFAST_HOST_DEVICE void add(const row_op_tiling::place& at, const Packet& packet, padding_found& found) const {
    std::int64_t byte = offset + in_rows(at);
    for (const std::uint32_t word : words_of(packet).word)
      for (int shift = 0; shift < 32; shift += 8, ++byte)
        if ((word >> shift & 0xff) != 0) {
          const auto inverted = ~static_cast<unsigned long long>(byte);
          if (inverted > found.inverted_first) found.inverted_first = inverted;
          ++found.bad_bytes;
        }
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE static bool is_zero(const Packet& packet) {
    const packet16 words = words_of(packet);
    return (words.word[0] | words.word[1] | words.word[2] | words.word[3]) == 0;
  }

 private:
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t in_rows(const row_op_tiling::place& at) const {
    return at.unit * pitch + std::int64_t{at.part} * std::int64_t{sizeof(Packet)};
  }
  [[nodiscard]] HOLDFAST_HOST_DEVICE static packet16 words_of(const packet16& packet) { return packet; }
  [[nodiscard]] HOLDFAST_HOST_DEVICE static packet16 words_of(std::uint32_t packet) { return {{packet, 0, 0, 0}}; }
};

/// Calls `run` with the check of the widest packet that fits; with nothing to look at, too: its report is due.
template <class Run>
void with_checked_padding(const padding_bytes& padding, const row_limit& limit, const Run& run) {
  const std::byte* const first = padding.base + padding.offset;
  const auto bits = static_cast<std::uint64_t>(padding.pitch | padding.width) | reinterpret_cast<std::uintptr_t>(first);
  const auto run_with = [&]<class Packet>(Packet) {
    const std::int64_t packets = padding.width / std::int64_t{sizeof(Packet)};
    if (packets > row_op_tiling::max_parts)
      refuse_verify("the padding of a row takes more than " + std::to_string(row_op_tiling::max_parts) +
                    " packets of " + std::to_string(sizeof(Packet)) + " bytes");
    run(checked_padding<Packet>{first, padding.offset, padding.pitch, padding.rows, static_cast<std::int32_t>(packets),
                                limit});
  };
  if (bits % 16 == 0) return run_with(packet16{});
  if (bits % 4 == 0) return run_with(std::uint32_t{});
  return run_with(std::uint8_t{});
}

/// How a check is spread over a GPU. Blocks loop rather than be many: each ends with an atomic on one address.
inline constexpr row_op_shape verify_shape{.threads = 256, .packets = 4, .max_blocks = 2112};

template <class Packet>
[[nodiscard]] padding_found check_on_host(const checked_padding<Packet>& check, const row_op_tiling& tiling) {
  padding_found found;
  const std::int64_t packets = check.limit.of(check.rows) * check.row_packets;
  for (std::int64_t tile = 0; tile * verify_shape.tile() < packets; ++tile) {
    const auto start = tiling.start_of(tile, verify_shape.tile());
    for (std::uint32_t i = 0; i < verify_shape.tile() && i < packets - start.packet; ++i) {
      const auto at = tiling.place_of(start, i);
      const Packet packet = check.load(at);
      if (!check.is_zero(packet)) check.add(at, packet, found);
    }
  }
  return found;
}

}  // namespace holdfast::HOLDFAST_ABI::detail
