// What gather_rows must write, by the plainest loops there are. Nothing here is shared with the library: e4m3 is a table
// of all its values, casts search it, and the order of operations is that of gather_rows.hpp's opening comment.
#pragma once

#include "support/gather_bytes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace gather_test {

using row_bytes = std::array<std::byte, 512>;

inline constexpr float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

/// The value of a byte, by the definition of e4m3: S.EEEE.MMM, bias 7, no infinities.
inline double value_of_e4m3(unsigned byte) {
  const unsigned exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, static_cast<int>(exponent) - 10);
  return byte & 0x80 ? -magnitude : magnitude;
}

/// Nearest of all finite values, ties to the even code; beyond the largest, the largest.
inline unsigned nearest_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  static const auto values = [] {
    std::array<double, 127> made{};
    for (unsigned code = 0; code < 127; ++code) made[code] = value_of_e4m3(code);
    return made;
  }();
  const double magnitude = std::fabs(static_cast<double>(value));
  unsigned best = 126;
  if (magnitude < values[126]) {
    const auto above =
        static_cast<unsigned>(std::upper_bound(values.begin(), values.end(), magnitude) - values.begin());
    const double up = values[above] - magnitude, down = magnitude - values[above - 1];
    best = up < down || (up == down && above % 2 == 0) ? above : above - 1;
  }
  return best | (std::signbit(value) ? 0x80u : 0u);
}

/// One rounded operation: what is volatile cannot be fused with anything.
inline float multiply(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float add(float a, float b) {
  volatile float sum = a + b;
  return sum;
}

inline unsigned nibble_of(const std::byte* data, int element) {
  const auto byte = std::to_integer<unsigned>(data[element / 2]);
  return element % 2 == 0 ? byte & 15 : byte >> 4;
}

inline float scale_of(std::byte scale, float global_scale) {
  return multiply(static_cast<float>(value_of_e4m3(std::to_integer<unsigned>(scale))), global_scale);
}

/// 16 values of one term.
inline void decode_group(const std::byte* data, std::byte scale, float global_scale, std::byte* to) {
  const float s = scale_of(scale, global_scale);
  for (int i = 0; i < 16; ++i) {
    const unsigned nibble = nibble_of(data, i);
    to[i] = static_cast<std::byte>(nearest_e4m3(multiply(magnitudes[nibble & 7], s)) ^ (nibble & 8 ? 0x80u : 0u));
  }
}

/// 16 sums of two terms: `data` holds 8 bytes of main and 8 of residual nibbles, `scales` one scale of each.
inline void decode_residual_group(const std::byte* data, const std::byte* scales, float global_scale, std::byte* to) {
  const float s = scale_of(scales[0], global_scale), t = scale_of(scales[1], global_scale);
  const auto signed_value = [](unsigned nibble) {
    return std::copysign(magnitudes[nibble & 7], nibble & 8 ? -1.0f : 1.0f);
  };
  for (int i = 0; i < 16; ++i)
    to[i] = static_cast<std::byte>(nearest_e4m3(
        add(multiply(signed_value(nibble_of(data, i)), s), multiply(signed_value(nibble_of(data + 8, i)), t))));
}

// --- formats, as tests see them ------------------------------------------------------------------------------------------

struct fp8_format {
  static constexpr std::int64_t data_bytes = 512, scale_bytes = 0;
  static constexpr int residual = -1;
  static row_bytes decode(const std::byte* data, const std::byte*, float) {
    row_bytes row;
    std::memcpy(row.data(), data, 512);
    return row;
  }
};

struct nvfp4_format {
  static constexpr std::int64_t data_bytes = 256, scale_bytes = 32;
  static constexpr int residual = 0;
  static row_bytes decode(const std::byte* data, const std::byte* scales, float global_scale) {
    row_bytes row;
    for (int group = 0; group < 32; ++group)
      decode_group(data + 8 * group, scales[group], global_scale, row.data() + 16 * group);
    return row;
  }
};

struct nvfp4_residual_format {
  static constexpr std::int64_t data_bytes = 288, scale_bytes = 36;
  static constexpr int residual = 64;
  static row_bytes decode(const std::byte* data, const std::byte* scales, float global_scale) {
    row_bytes row;
    for (int group = 0; group < 28; ++group)
      decode_group(data + 8 * group, scales[group], global_scale, row.data() + 16 * group);
    for (int group = 0; group < 4; ++group)
      decode_residual_group(data + 224 + 16 * group, scales + 28 + 2 * group, global_scale,
                            row.data() + 448 + 16 * group);
    return row;
  }
};

}  // namespace gather_test
