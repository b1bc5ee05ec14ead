// norm_rope_pad by the book: the order of operations that its header states, in arithmetic of its own. Each operation is
// done in double, whose rounding to float is then the operation's own (double has more than twice the bits).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace norm_reference {

/// A 16-bit float with so many bits of mantissa, and exponents biased by `bias`.
struct half_format {
  int mantissa;
  int bias;
};
inline constexpr half_format bf16{7, 127};
inline constexpr half_format fp16{10, 15};

inline double decode(const half_format& format, std::uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> format.mantissa, most = 2 * format.bias + 1;
  const int fraction = bits & ((1 << format.mantissa) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == most)
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.bias - format.mantissa);
  return sign * std::ldexp(fraction + (1 << format.mantissa), exponent - format.bias - format.mantissa);
}

/// To the nearest, ties to even; NaN becomes 0x7fff.
inline std::uint16_t encode(const half_format& format, float value) {
  if (std::isnan(value)) return 0x7fff;
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  int exponent = std::isinf(magnitude) ? format.bias + 1 : std::max(std::ilogb(magnitude), 1 - format.bias);
  const auto infinity = static_cast<std::uint16_t>(sign | (2 * format.bias + 1) << format.mantissa);
  if (exponent > format.bias) return infinity;
  double units = std::nearbyint(std::ldexp(magnitude, format.mantissa - exponent));
  if (units == std::ldexp(2.0, format.mantissa)) {
    units /= 2;
    ++exponent;
  }
  if (exponent > format.bias) return infinity;
  const int hidden = 1 << format.mantissa, whole = static_cast<int>(units);
  const int biased = whole < hidden ? 0 : exponent + format.bias;  // below the hidden bit: a denormal, or zero
  return static_cast<std::uint16_t>(sign | biased << format.mantissa | (whole & (hidden - 1)));
}

/// Through memory: else a compiler that may fuse a product with a sum does.
inline float rounded(double exact) {
  const volatile float value = static_cast<float>(exact);
  return value;
}
inline float times(float a, float b) { return rounded(static_cast<double>(a) * static_cast<double>(b)); }
inline float plus(float a, float b) { return rounded(static_cast<double>(a) + static_cast<double>(b)); }
inline float minus(float a, float b) { return rounded(static_cast<double>(a) - static_cast<double>(b)); }

/// One head. `weight` is empty, or as long as `in`; `angles` 32 cosines and 32 sines.
inline std::vector<std::uint16_t> norm_and_rotate(const half_format& format, const std::vector<std::uint16_t>& in,
                                                  const std::vector<float>& weight, const float* angles,
                                                  bool half_split, float eps) {
  const std::size_t dim = in.size();
  std::vector<float> x(dim);
  for (std::size_t i = 0; i < dim; ++i) x[i] = static_cast<float>(decode(format, in[i]));

  const auto square_of = [&](std::size_t i) { return times(x[i], x[i]); };
  std::array<float, 32> sums{};
  for (std::size_t first = 0; first < dim; first += 8) {
    const auto two = [&](std::size_t i) { return plus(square_of(first + i), square_of(first + i + 1)); };
    const float packet = plus(plus(two(0), two(2)), plus(two(4), two(6)));
    float& sum = sums[first / 8 % 32];
    sum = first / 8 < 32 ? packet : plus(sum, packet);
  }
  // The butterfly's sum of lane 0: halves of the lanes meet, the farthest first.
  for (std::size_t half = 16; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] = plus(sums[lane], sums[lane + half]);

  const float inverse = rounded(1.0 / static_cast<double>(dim));
  const float mean = plus(times(sums[0], inverse), eps);
  const float root = rounded(std::sqrt(static_cast<double>(mean)));
  const float scale = rounded(1.0 / static_cast<double>(root));
  for (std::size_t i = 0; i < dim; ++i) {
    x[i] = times(x[i], scale);
    if (!weight.empty()) x[i] = times(x[i], weight[i]);
  }
  for (std::size_t i = 0; i < 32; ++i) {
    float& a = x[dim - 64 + (half_split ? i : 2 * i)];
    float& b = x[dim - 64 + (half_split ? i + 32 : 2 * i + 1)];
    const float cosine = angles[i], sine = angles[32 + i], before = a;
    a = minus(times(before, cosine), times(b, sine));
    b = plus(times(b, cosine), times(before, sine));
  }
  std::vector<std::uint16_t> out(dim);
  for (std::size_t i = 0; i < dim; ++i) out[i] = encode(format, x[i]);
  return out;
}

}  // namespace norm_reference
