// NVFP4 to e4m3, 16 values at a time. gather_rows.hpp specifies the order of operations.
//
// A group of 16 has one scale, so only eight magnitudes can occur: they are made once, as eight bytes, and each nibble
// chooses one (a byte permutation chooses four at once). Signs are put on afterwards.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_exact.hpp>
#include <holdfast/detail/kernel_fp8.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/version.hpp>

#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// The nibbles of one group, element 0 in the lowest nibble of `low`.
struct alignas(8) e2m1_group {
  std::uint32_t low;
  std::uint32_t high;
};

/// What each magnitude stands for, as a byte: magnitudes 0 to 3 in `low`, 4 to 7 in `high`.
struct magnitude_bytes {
  std::uint32_t low;
  std::uint32_t high;
};

/// Eight nibbles become eight bytes (`to[0]` and `to[1]`): a magnitude's byte with the nibble's sign XORed into bit 7.
HOLDFAST_HOST_DEVICE inline void look_up(const magnitude_bytes& table, std::uint32_t nibbles, std::uint32_t to[2]) {
  const std::uint32_t magnitudes = nibbles & 0x77777777, even_signs = nibbles << 4, odd_signs = nibbles;
  to[0] = choose_bytes(table.low, table.high, magnitudes) ^ (choose_bytes(even_signs, odd_signs, 0x5140) & 0x80808080);
  to[1] = choose_bytes(table.low, table.high, magnitudes >> 16) ^
          (choose_bytes(even_signs, odd_signs, 0x7362) & 0x80808080);
}

/// e4m3 of magnitude * scale, sign put on afterwards.
HOLDFAST_HOST_DEVICE inline packet16 e4m3_of_group(const e2m1_group& group, float scale) {
  const magnitude_bytes table{
      e4m3_of_floats(exact_product(0.0f, scale), exact_product(0.5f, scale), scale, exact_product(1.5f, scale)),
      e4m3_of_floats(exact_product(2.0f, scale), exact_product(3.0f, scale), exact_product(4.0f, scale),
                     exact_product(6.0f, scale))};
  packet16 values;
  look_up(table, group.low, values.word);
  look_up(table, group.high, values.word + 2);
  return values;
}

/// The upper bytes of the magnitudes as fp16; the lower bytes are all zero.
inline constexpr std::uint32_t e2m1_half_low = 0x3e3c3800, e2m1_half_high = 0x46444240;

/// e4m3 of main * main_scale + residual * residual_scale: two products and a sum, each rounded to fp32.
HOLDFAST_HOST_DEVICE inline packet16 e4m3_of_residual_group(const e2m1_group& main, float main_scale,
                                                            const e2m1_group& residual, float residual_scale) {
  const magnitude_bytes halves{e2m1_half_low, e2m1_half_high};
  std::uint32_t main_bytes[4], residual_bytes[4];
  look_up(halves, main.low, main_bytes);
  look_up(halves, main.high, main_bytes + 2);
  look_up(halves, residual.low, residual_bytes);
  look_up(halves, residual.high, residual_bytes + 2);
  packet16 values;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    float sums[4];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int pair = 0; pair < 2; ++pair) {
      const std::uint32_t selector = pair == 0 ? 0x1404 : 0x3424;  // two bytes, each above a zero one
      const float_pair a = floats_of_halves(choose_bytes(main_bytes[i], 0, selector));
      const float_pair b = floats_of_halves(choose_bytes(residual_bytes[i], 0, selector));
      sums[2 * pair] = exact_sum(exact_product(a.low, main_scale), exact_product(b.low, residual_scale));
      sums[2 * pair + 1] = exact_sum(exact_product(a.high, main_scale), exact_product(b.high, residual_scale));
    }
    values.word[i] = e4m3_of_floats(sums[0], sums[1], sums[2], sums[3]);
  }
  return values;
}

}  // namespace holdfast::HOLDFAST_ABI::detail
