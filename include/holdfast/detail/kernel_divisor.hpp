// Division by a number that is known before the launch: a multiplication and a shift instead of a division (a 64-bit
// one costs a GPU thread about a hundred instructions).
//
// The round-up method, for N-bit registers: with p = N - 1 + ceil(log2 d) and m = ceil(2^p / d), n / d is
// floor(n * m / 2^p) for every n < 2^(N-1). For m * d exceeds 2^p by some e < d <= 2^ceil(log2 d), so n * m / 2^p exceeds
// n / d by n * e / (d * 2^p) < 1 / d: too little to reach the next integer.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/version.hpp>

#include <bit>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

__extension__ using uint128 = unsigned __int128;

/// n / d for 0 <= n < 2^31 and 1 <= d < 2^31: one wide multiplication and a shift.
struct divisor32 {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = std::uint32_t{1} << 31;
  std::uint32_t shift = 31;

  divisor32() = default;
  explicit constexpr divisor32(std::int32_t d)
      : divisor(static_cast<std::uint32_t>(d)),
        multiplier(static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + log2_up(divisor))) + divisor - 1) / divisor)),
        shift(31 + log2_up(divisor)) {}

  HOLDFAST_HOST_DEVICE constexpr std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{n} * multiplier) >> shift);
  }

  static constexpr std::uint32_t log2_up(std::uint32_t d) { return static_cast<std::uint32_t>(std::bit_width(d - 1)); }
};

/// n / d for 0 <= n < 2^63 and 1 <= d < 2^31.
struct divisor64 {
  std::uint64_t multiplier = 0;
  std::uint32_t divisor = 1;
  std::uint32_t shift = 0;  // behind the upper half of the product; dividing by one needs no product

  divisor64() = default;
  explicit constexpr divisor64(std::int32_t d) : divisor(static_cast<std::uint32_t>(d)) {
    if (divisor == 1) return;
    const std::uint32_t log2 = divisor32::log2_up(divisor);
    multiplier = static_cast<std::uint64_t>(((uint128{1} << (63 + log2)) + divisor - 1) / divisor);
    shift = log2 - 1;
  }

  HOLDFAST_HOST_DEVICE constexpr std::uint64_t quotient(std::uint64_t n) const {
    return divisor == 1 ? n : upper_half(n, multiplier) >> shift;
  }

 private:
  HOLDFAST_HOST_DEVICE static constexpr std::uint64_t upper_half(std::uint64_t a, std::uint64_t b) {
    // nvcc turns the upper half of a 128-bit product into the same instructions as __umul64hi
    return static_cast<std::uint64_t>((uint128{a} * b) >> 64);
  }
};

}  // namespace holdfast::HOLDFAST_ABI::detail
