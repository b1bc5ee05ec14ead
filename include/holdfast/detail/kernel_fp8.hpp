// e4m3 to fp32 and back, bit for bit alike on both devices.
//
// To e4m3: round to nearest, ties to even, denormals (multiples of 2^-9) included; beyond 448 and infinity becomes 448
// (0x7e, "saturate to finite"), NaN of either sign 0x7f. From e4m3: exact; 0x7f and 0xff are NaN.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/version.hpp>

#include <bit>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// What hosts, and devices before sm_89, convert with. Integers only, so no rounding mode or flag matters.
HOLDFAST_HOST_DEVICE constexpr std::uint32_t e4m3_of_bits(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
  if (magnitude > 0x7f800000) return 0x7f;
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448 and beyond
  if (magnitude >= 0x3c800000) {                    // 2^-6 and beyond: normal
    const std::uint32_t rebiased = magnitude - ((127u - 7u) << 23);
    return sign | (rebiased + 0x7ffff + (rebiased >> 20 & 1)) >> 20;
  }
  const std::uint32_t exponent = magnitude >> 23;
  const std::uint32_t shift = 141 - exponent;  // from units of 2^(exponent - 150) to units of 2^-9
  if (shift > 25) return sign;                 // less than half a unit; fp32 denormals too
  const std::uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
  const std::uint32_t units = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  return sign | (units + (rest > half || (rest == half && (units & 1) != 0) ? 1 : 0));
}

HOLDFAST_HOST_DEVICE constexpr std::uint32_t bits_of_e4m3(std::uint32_t value) {
  const std::uint32_t magnitude = value & 0x7f, sign = (value & 0x80) << 24;
  if (magnitude == 0x7f) return 0x7fffffff;
  if (magnitude >= 8) return sign | ((magnitude << 20) + ((127u - 7u) << 23));
  if (magnitude == 0) return sign;
  const auto top = static_cast<std::uint32_t>(magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0);  // value: magnitude * 2^-9
  return sign | (127 - 9 + top) << 23 | (magnitude << (23 - top) & 0x7fffff);
}

#if !defined(__CUDA_ARCH__)
inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
#else
__device__ inline std::uint32_t bits_of(float value) { return __float_as_uint(value); }
__device__ inline float float_of(std::uint32_t bits) { return __uint_as_float(bits); }
#endif

/// The value of an e4m3 byte (its bits above the eighth are ignored).
HOLDFAST_HOST_DEVICE inline float float_of_e4m3(std::uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  float widened;  // by way of fp16, which holds every e4m3 value
  asm("{\n\t"
      ".reg .b16 pair, low, high;\n\t"
      ".reg .b32 halves;\n\t"
      "cvt.u16.u32 pair, %1;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, pair;\n\t"
      "mov.b32 {low, high}, halves;\n\t"
      "cvt.f32.f16 %0, low;\n\t"
      "}"
      : "=f"(widened)
      : "r"(value));
  return widened;
#else
  return float_of(bits_of_e4m3(value & 0xff));
#endif
}

/// Four values as four bytes, the first one lowest.
HOLDFAST_HOST_DEVICE inline std::uint32_t e4m3_of_floats(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t bytes;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
#else
  return e4m3_of_bits(bits_of(a)) | e4m3_of_bits(bits_of(b)) << 8 | e4m3_of_bits(bits_of(c)) << 16 |
         e4m3_of_bits(bits_of(d)) << 24;
#endif
}

}  // namespace holdfast::HOLDFAST_ABI::detail
