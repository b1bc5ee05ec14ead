// fp32 to bf16 and fp16, bit for bit alike on both devices: nearest, ties to even, denormals included; what is beyond the
// largest finite value becomes infinity; NaN of either sign and any payload becomes 0x7fff.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_fp8.hpp>
#include <holdfast/version.hpp>

#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// What hosts, and devices before sm_80, convert with. Integers only, so no rounding mode or flag matters.
HOLDFAST_HOST_DEVICE constexpr std::uint32_t bf16_of_bits(std::uint32_t bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // carries into the exponent, up to infinity
}

HOLDFAST_HOST_DEVICE constexpr std::uint32_t fp16_of_bits(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and beyond
  if (magnitude >= 0x38800000) {                      // 2^-14 and beyond: normal
    const std::uint32_t rebiased = magnitude - ((127u - 15u) << 23);
    return sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13;
  }
  const std::uint32_t shift = 126 - (magnitude >> 23);  // from units of 2^(exponent - 150) to units of 2^-24
  if (shift > 25) return sign;                          // less than half a unit; fp32 denormals too
  const std::uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
  const std::uint32_t units = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  return sign | (units + (rest > half || (rest == half && (units & 1) != 0) ? 1 : 0));
}

/// Two values as two halves of a word, the first one lowest.
HOLDFAST_HOST_DEVICE inline std::uint32_t bf16_of_floats(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
#else
  return bf16_of_bits(bits_of(low)) | bf16_of_bits(bits_of(high)) << 16;
#endif
}

HOLDFAST_HOST_DEVICE inline std::uint32_t fp16_of_floats(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
#else
  return fp16_of_bits(bits_of(low)) | fp16_of_bits(bits_of(high)) << 16;
#endif
}

}  // namespace holdfast::HOLDFAST_ABI::detail
