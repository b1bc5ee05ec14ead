// Gathers of any format that has a decoder (kernel/row_decoder.hpp), to e4m3, bf16 or fp16.
//
// A packet is 8 values: 16 bytes of bf16 or fp16. Where all addresses of a pool are multiples of 16, rows are staged:
// copied whole into shared memory, many at a time, and a lane reads its packets from there; so a warp has as many bytes
// under way as it has rows, whatever width the decoder loads. Else lanes load their packets from the pool, 8 bytes at once
// or, where that is not aligned, byte by byte.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_decode.hpp>
#include <holdfast/detail/kernel_gather.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/detail/kernel_words.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// How many packets of a row come before those that are decoded another way; all, where there are none.
template <class Format>
consteval std::int32_t plain_packets_of() {
  if constexpr (requires { Format::split_at; }) {
    static_assert(
        Format::split_at % values_of_a_packet == 0 && Format::split_at > 0 && Format::split_at <= Format::elements,
        "holdfast: a row's split is a multiple of 8 elements, and in the row");
    return Format::split_at / values_of_a_packet;
  } else {
    return Format::elements / values_of_a_packet;
  }
}

/// Rows of any length may be gathered; these fit into shared memory, several a warp.
template <class Format>
inline constexpr bool can_be_staged =
    Format::data_bytes % 16 == 0 && Format::scale_bytes % 4 == 0 && Format::data_bytes + Format::scale_bytes <= 1024;

/// `Width` divides the addresses of data: 8 or 1. With 16, those of the scales are multiples of 16, too (of 4, where a
/// row's scales are not a multiple of 16 bytes), and rows are staged.
template <class Format, element_kind Kind, class Index_, std::size_t Width>
struct gather_format {
  using Index = Index_;
  static constexpr bool staged = Width == 16, unrolled = staged;
  static constexpr std::int32_t packets_of_a_row = Format::elements / values_of_a_packet;
  // Of rows that are read in two ways, four make whole turns of each: 7 or 8 of one, and one of the other. What is staged is
  // read again soon enough: few registers matter more, and so more warps.
  static constexpr std::int32_t rows_of_a_warp = staged ? 8 : 4, rows_of_a_batch = staged ? 1 : 4, warps_of_a_block = 4;

  struct source {
    const std::byte* data;
    const std::byte* scales;
  };
  struct alignas(16) staged_row {
    std::byte data[Format::data_bytes];
    std::byte scales[Format::scale_bytes == 0 ? 16 : Format::scale_bytes];
  };
  static constexpr bool scales_are_copied = Format::scale_bytes != 0 && Format::scale_bytes % 16 == 0;
  static constexpr bool passed_on = false;
  static constexpr bool lanes_stage = Format::scale_bytes != 0 && !scales_are_copied;
  static constexpr std::uint32_t staged_bytes = Format::data_bytes + (scales_are_copied ? Format::scale_bytes : 0);
  using shared_values = Format;
  struct packet {
    typename Format::packet raw;
    bool valid;
  };

  gather_to<Index> to;
  pool_rows data;
  pool_rows scales;  // none, where a format has none
  Format format;

  [[nodiscard]] HOLDFAST_HOST_DEVICE source source_of(std::int64_t row) const {
    const std::int64_t found = to.pairs.find(row);
    to.pairs.report(row, found >= 0);
    if (found < 0) return {nullptr, nullptr};
    if constexpr (Format::scale_bytes == 0) {
      return {data.at(found), nullptr};
    } else {
      return {data.at(found), scales.at(found)};
    }
  }

  template <class Copy>
  HOLDFAST_HOST_DEVICE static void stage(const source& from, staged_row& to, const Copy& copy) {
    copy(to.data, from.data, std::uint32_t{sizeof to.data});
    if constexpr (scales_are_copied) {
      copy(to.scales, from.scales, std::uint32_t{sizeof to.scales});
    } else if constexpr (Format::scale_bytes != 0) {  // no bulk copy is so small, and more than its row's would be read
      for (std::int32_t i = 0; i < Format::scale_bytes; i += 4)
        store_packet(to.scales + i, load_words<4, 4>(from.scales + i));
    }
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE static source source_in(const staged_row& row) { return {row.data, row.scales}; }

  [[nodiscard]] HOLDFAST_HOST_DEVICE Format shared() const {
    if constexpr (requires { format.ready(); }) {
      return format.ready();
    } else {
      return format;
    }
  }

  /// First the packets of all rows that are decoded one way, then those of the other.
  template <std::int32_t Rows>
  [[nodiscard]] HOLDFAST_HOST_DEVICE static gather_place place_of(std::int32_t packet_of_warp) {
    constexpr auto plain = static_cast<std::uint32_t>(plain_packets_of<Format>());
    constexpr std::uint32_t others = packets_of_a_row - plain, all_plain = Rows * plain;
    const auto at = static_cast<std::uint32_t>(packet_of_warp);
    if constexpr (others != 0) {
      if (at >= all_plain)
        return {static_cast<std::int32_t>((at - all_plain) / others),
                static_cast<std::int32_t>(plain + (at - all_plain) % others)};
    }
    return {static_cast<std::int32_t>(at / plain), static_cast<std::int32_t>(at % plain)};
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const source& from, std::int32_t at) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    constexpr bool at_hand = false;  // nothing is staged there
#else
    constexpr bool at_hand = staged;
#endif
    if constexpr (at_hand) {
      return {format.load(row_at_hand{from.data, from.scales}, at), true};
    } else {
      return {format.load(rows_as_they_lie<(Width < 8 ? Width : 8)>{from.data, from.scales}, at), true};
    }
  }

  HOLDFAST_HOST_DEVICE void store(std::int64_t row, std::int32_t at, const packet& loaded, const Format& ready) const {
    values_of<Kind> values;
    if (loaded.valid) ready.decode(loaded.raw, values);  // a row of zeros is one, whatever the format makes of zeros
    store_packet(to.out + row * to.out_stride + std::int64_t{at} * sizeof values, values);
  }
};

/// Calls `run` with the gather and the rows of a warp; not at all when there is nothing to write.
template <element_kind Kind, class Format, class Index, class Run>
void with_format_gather(const gather_to<Index>& to, const pool_rows& data, const pool_rows& scales,
                        const Format& format, const Run& run) {
  if (to.rows == 0) return;
  if constexpr (can_be_staged<Format>) {
    using gather = gather_format<Format, Kind, Index, 16>;
    constexpr std::size_t scale_width = gather::scales_are_copied ? 16 : 4;
    if (to.rows > most_rows_of_small_gathers && load_width(data, 16) == 16 &&
        (Format::scale_bytes == 0 || load_width(scales, scale_width) == scale_width))
      return run.template operator()<gather::rows_of_a_warp>(gather{to, data, scales, format});
  }
  if (load_width(data, 8) == 8)
    return with_gather_shape(gather_format<Format, Kind, Index, 8>{to, data, scales, format}, run);
  using slow = gather_format<Format, Kind, Index, 1>;
  run.template operator()<slow::rows_of_a_warp>(slow{to, data, scales, format});
}

}  // namespace holdfast::HOLDFAST_ABI::detail
