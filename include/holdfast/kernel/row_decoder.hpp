// row_decoder: what gather_rows asks of a format of KV rows. Whoever writes one small struct has a format of their own:
//
//   struct my_row {                                                  // 512 e4m3 values, then an fp32 scale for each half
//     static constexpr std::int32_t elements = 512;                  // a multiple of 8
//     static constexpr std::int32_t data_bytes = 520;                // that are read of a row
//     static constexpr std::int32_t scale_bytes = 0;                 // and of its scales elsewhere; 0: there are none
//
//     struct packet {                                                // 8 values, as they lie in memory
//       holdfast::raw_bytes<8> codes;
//       holdfast::raw_bytes<4> scale;
//     };
//     template <class Row>
//     HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {           // values 8 at to 8 at + 7
//       return {row.template data<8>(8 * at), row.template data<4>(512 + at / 32 * 4)};
//     }
//     template <class Values>
//     HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
//       float values[8];
//       holdfast::floats_of_e4m3(from.codes, values);
//       to.put_scaled(values, holdfast::float_of_bits(from.scale.word[0]));
//     }
//   };
//   holdfast::gather_rows(stream, holdfast::formatted_rows<my_row>{.data = pool}, indices, out);
//
// Loads and arithmetic are apart because a thread loads several packets before it decodes the first. A packet is small and
// trivially copyable; a decoder is, too (it is a kernel's argument), and may have members: a global scale, say.
//
// `row.data<Bytes>(offset)` and `row.scales<Bytes>(offset)` give 1, 2, 4, 8 or 16 bytes of the row; the offset is a multiple
// of Bytes. Whatever the pool's address, they do so: rows that are not aligned are read byte by byte. `to.put(values)` rounds 8
// values, once, to what the output holds; `to.put_scaled(values, scale)` rounds their products; `to.put_bf16(raw)` takes 8
// bf16 values, which reach a bf16 output bit for bit.
//
// Both devices run the same struct and write the same bits, if it decodes with integers, float_of_bits, floats_of_e4m3,
// floats_of_e2m1, float_of_ue8m0, exact_product and exact_sum. (Plain `*` and `+` may be fused, or flush denormals under
// -use_fast_math.)
//
// Scales that are elsewhere have a pool of their own (formatted_rows::scales), or lie in the footers of pages: see
// page_multiple.
//
// Optional members:
//   static constexpr std::int32_t page_multiple   a page of P rows is P * data_bytes, then P * scale_bytes, then as much as
//                                                 makes its size a multiple of this (1: nothing), unless the pool's page
//                                                 stride says otherwise
//   static constexpr std::int32_t split_at        a multiple of 8: values from here on are loaded or decoded another way. No
//                                                 warp then does both at once
//   my_row ready() const                          is called once by each thread; the result decodes. Here device memory may
//                                                 be read that holds a parameter
//
// Rows of which all addresses, and data_bytes, are multiples of 16 are copied to shared memory first (up to 1 KiB a row;
// scales of 4-byte multiples): the decoder does not notice.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_decode.hpp>
#include <holdfast/version.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI {

/// Some bytes of a row as little-endian words: `word[0]` has the first byte lowest. What no byte fills is zero.
template <std::size_t Bytes>
using raw_bytes = detail::words<(Bytes + 3) / 4>;

/// fp32 operations of one rounding, to nearest, even; never fused, no denormal flushed.
using detail::exact_product, detail::exact_sum;

/// An fp32 value from its bits.
using detail::float_of_bits;

/// 8 e4m3 values, exactly; 0x7f and 0xff are NaN.
using detail::floats_of_e4m3;

/// 8 e2m1 values, exactly: two a byte, the even one in the low nibble.
using detail::floats_of_e2m1;

/// The value of an e4m3 byte, exactly.
using detail::float_of_e4m3;

/// 2^(byte - 127), exactly: 0 is the denormal 2^-127, 255 is NaN.
using detail::float_of_ue8m0;

/// A format of rows, as above.
template <class Format>
concept row_decoder = std::is_trivially_copyable_v<Format> && std::is_trivially_copyable_v<typename Format::packet> &&
    requires(const Format format, const typename Format::packet packet, const detail::rows_as_they_lie<1> row,
             detail::values_of<detail::element_kind::bf16> to, std::int32_t at) {
  requires Format::elements >
  0 && Format::elements % detail::values_of_a_packet == 0;
  requires Format::data_bytes >
  0 && Format::scale_bytes >= 0;
  { format.load(row, at) } -> std::same_as<typename Format::packet>;
  format.decode(packet, to);
};

}  // namespace holdfast::HOLDFAST_ABI
