// fp32 arithmetic that is one rounded operation, whatever the flags: never contracted into a fused multiply-add, and on
// the device never flushing denormals. (-use_fast_math turns even __fmul_rn into mul.rn.ftz; the instructions named here
// stay what they are.) The host needs its floating-point environment in its default state: round to nearest, denormals
// on. Also: two kinds of bit work that the device does in one instruction.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/version.hpp>

#include <bit>
#include <cmath>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

#if !defined(__CUDA_ARCH__)
/// The compiler knows nothing about `value` beyond here: it cannot fuse what made it with what uses it.
inline float opaque(float value) {
#if defined(__x86_64__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+m"(value));
#endif
  return value;
}
#endif

HOLDFAST_HOST_DEVICE inline float exact_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
#else
  return opaque(opaque(a) * opaque(b));
#endif
}

HOLDFAST_HOST_DEVICE inline float exact_sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
#else
  return opaque(opaque(a) + opaque(b));
#endif
}

/// Not exact_sum(a, -b): under -use_fast_math, even a minus sign flushes denormals.
HOLDFAST_HOST_DEVICE inline float exact_difference(float a, float b) {
#if defined(__CUDA_ARCH__)
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
#else
  return opaque(opaque(a) - opaque(b));
#endif
}

/// Rounded to nearest, as a square root of IEEE's is.
HOLDFAST_HOST_DEVICE inline float exact_root(float a) {
#if defined(__CUDA_ARCH__)
  float root;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(a));
  return root;
#else
  return opaque(std::sqrt(opaque(a)));
#endif
}

/// 1 / a, rounded to nearest.
HOLDFAST_HOST_DEVICE inline float exact_reciprocal(float a) {
#if defined(__CUDA_ARCH__)
  float reciprocal;
  asm("rcp.rn.f32 %0, %1;" : "=f"(reciprocal) : "f"(a));
  return reciprocal;
#else
  return opaque(1.0f / opaque(a));
#endif
}

/// Four bytes chosen from the eight of `low` and `high` by the four lowest nibbles of `selector`, each 0 to 7.
HOLDFAST_HOST_DEVICE inline std::uint32_t choose_bytes(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
  std::uint32_t chosen;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(low), "r"(high), "r"(selector));
  return chosen;
#else
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  std::uint32_t chosen = 0;
  for (std::uint32_t i = 0; i < 32; i += 8)
    chosen |= static_cast<std::uint32_t>(bytes >> (selector >> (i / 2) & 7) * 8 & 0xff) << i;
  return chosen;
#endif
}

struct float_pair {
  float low;
  float high;
};

/// The two halves (fp16, normal or zero) in a word.
HOLDFAST_HOST_DEVICE inline float_pair floats_of_halves(std::uint32_t halves) {
#if defined(__CUDA_ARCH__)
  float_pair pair;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.f32.f16 %0, low;\n\t"
      "cvt.f32.f16 %1, high;\n\t"
      "}"
      : "=f"(pair.low), "=f"(pair.high)
      : "r"(halves));
  return pair;
#else
  constexpr auto widen = [](std::uint32_t half) {
    const std::uint32_t magnitude = half & 0x7fff, sign = (half & 0x8000) << 16;
    return std::bit_cast<float>(magnitude == 0 ? sign : sign | (magnitude + ((127u - 15u) << 10)) << 13);
  };
  return {widen(halves & 0xffff), widen(halves >> 16)};
#endif
}

}  // namespace holdfast::HOLDFAST_ABI::detail
