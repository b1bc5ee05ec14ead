// What gather_rows must write of the formats that have no kernel of their own, by the plainest loops there are; see
// gather_reference.hpp. A row is 32-bit floats, or bf16 values as they are; casts count units in the last place.
#pragma once

#include "support/gather_bytes.hpp"
#include "support/gather_reference.hpp"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace gather_test {

/// Nearest of the floating-point numbers with so many bits of mantissa and so small an exponent, ties to even.
inline double nearest(float value, int mantissa_bits, int least_exponent, double most) {
  const auto exact = static_cast<double>(value);
  if (exact == 0 || !std::isfinite(exact)) return exact;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(exact), least_exponent) - mantissa_bits);
  const double rounded = std::nearbyint(exact / unit) * unit;
  return std::fabs(rounded) > most ? std::copysign(std::numeric_limits<double>::infinity(), exact) : rounded;
}

/// The bits of a cast's result: sign, exponent, mantissa.
inline std::uint16_t bits_of_nearest(float value, int mantissa_bits, int least_exponent, double most) {
  if (std::isnan(value)) return 0x7fff;
  const int exponent_bits = 15 - mantissa_bits;
  const double rounded = nearest(value, mantissa_bits, least_exponent, most);
  const unsigned sign = std::signbit(rounded) ? 0x8000 : 0;
  if (std::isinf(rounded)) return static_cast<std::uint16_t>(sign | ((1u << exponent_bits) - 1) << mantissa_bits);
  if (rounded == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::max(std::ilogb(rounded), least_exponent);
  const auto units = static_cast<unsigned>(std::fabs(rounded) / std::ldexp(1.0, exponent - mantissa_bits));
  return static_cast<std::uint16_t>(sign + (static_cast<unsigned>(exponent - least_exponent) << mantissa_bits) + units);
}
inline std::uint16_t nearest_bf16(float value) { return bits_of_nearest(value, 7, -126, 0x1.fep127); }
inline std::uint16_t nearest_fp16(float value) { return bits_of_nearest(value, 10, -14, 65504); }

/// A value of a row on its way to the output.
struct row_value {
  float value = 0;
  int bf16 = -1;  // its bits, where it is bf16
};

enum class output_type { e4m3, bf16, fp16 };

inline byte_vector rounded_row(const std::vector<row_value>& row, output_type type) {
  byte_vector made;
  for (const row_value& each : row) {
    if (type == output_type::e4m3) {
      made.push_back(static_cast<std::byte>(nearest_e4m3(each.value)));
      continue;
    }
    const auto half = type == output_type::fp16 ? nearest_fp16(each.value)
                      : each.bf16 >= 0          ? static_cast<std::uint16_t>(each.bf16)
                                                : nearest_bf16(each.value);
    made.push_back(static_cast<std::byte>(half & 0xff));
    made.push_back(static_cast<std::byte>(half >> 8));
  }
  return made;
}

inline float value_of(std::byte e4m3) { return static_cast<float>(value_of_e4m3(std::to_integer<unsigned>(e4m3))); }
inline float value_of_ue8m0(std::byte scale) {
  const int exponent = std::to_integer<int>(scale);
  return exponent == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, exponent - 127);
}
inline float value_of_e2m1(unsigned nibble) { return std::copysign(magnitudes[nibble & 7], nibble & 8 ? -1.0f : 1.0f); }
inline row_value value_of_bf16(const std::byte* at) {
  const unsigned bits = std::to_integer<unsigned>(at[0]) | std::to_integer<unsigned>(at[1]) << 8;
  return {std::bit_cast<float>(bits << 16), static_cast<int>(bits)};
}

// --- formats -----------------------------------------------------------------------------------------------------------------

using row_values = std::vector<row_value>;

/// Scales that leave values in every output's range, most of the time.
inline std::byte tame_ue8m0(std::mt19937& random) { return static_cast<std::byte>(118 + random() % 12); }
inline void tame_fp32(std::byte* scale, std::mt19937& random) {
  const float value = std::ldexp(static_cast<float>(random() | 1u), -36 + static_cast<int>(random() % 6));
  std::memcpy(scale, &value, 4);
}

/// Rows of data and of scales that hold every code of a format, with every scale or with many.
struct every_code {
  byte_vector data, scales;
};

/// The bytes of all bf16 values, 64 a row.
inline void put_every_bf16(std::byte* to, std::size_t row) {
  for (std::size_t i = 0; i < 64; ++i) {
    to[2 * i] = static_cast<std::byte>((64 * row + i) & 0xff);
    to[2 * i + 1] = static_cast<std::byte>((64 * row + i) >> 8 & 0xff);
  }
}

/// Every power of two and what lies beside, what is no number, and random bits.
inline std::vector<float> many_fp32_scales(std::size_t count) {
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> made{0.0f, -0.0f, infinity, -infinity, nan, -nan, 1.0f / 3, -0.37f, 3.4e38f, -3.4e38f};
  for (int exponent = -149; exponent < 128; ++exponent) {
    made.push_back(std::ldexp(1.0f, exponent));
    made.push_back(std::nextafter(made.back(), infinity));
  }
  std::mt19937 random(6);
  while (made.size() < count) made.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  return made;
}

/// Where a format's scales are.
enum class scales_are { nowhere, in_a_pool, in_footers };

struct v32_rows {
  static constexpr std::int64_t elements = 576, data_bytes = 656, scale_bytes = 0;
  static constexpr scales_are where = scales_are::nowhere;
  static void tame(std::byte* data, std::byte* scales, std::mt19937& random) {
    for (int i = 0; i < 4; ++i) tame_fp32(data + 512 + 4 * i, random);
    static_cast<void>(scales);
  }
  static every_code exhaustive() {
    every_code made{byte_vector(1024 * 656), {}};
    const auto scales = many_fp32_scales(2048);
    for (std::size_t row = 0; row < 1024; ++row) {
      std::byte* const data = made.data.data() + row * 656;
      for (std::size_t i = 0; i < 512; ++i) data[i] = static_cast<std::byte>(i & 0xff);
      for (std::size_t group = 0; group < 4; ++group)
        std::memcpy(data + 512 + 4 * group, &scales[2 * row + group / 2], 4);
      put_every_bf16(data + 528, row);
    }
    return made;
  }
  static row_values decode(const std::byte* data, const std::byte*, float) {
    row_values row;
    for (int i = 0; i < 512; ++i) {
      float scale = 0;
      std::memcpy(&scale, data + 512 + i / 128 * 4, 4);
      row.push_back({multiply(value_of(data[i]), scale)});
    }
    for (int i = 0; i < 64; ++i) row.push_back(value_of_bf16(data + 528 + 2 * i));
    return row;
  }
};

struct v4_rows {
  static constexpr std::int64_t elements = 512, data_bytes = 576, scale_bytes = 8, page_multiple = 576;
  static constexpr scales_are where = scales_are::in_footers;
  static void tame(std::byte* data, std::byte* scales, std::mt19937& random) {
    for (int i = 0; i < 7; ++i) scales[i] = tame_ue8m0(random);
    static_cast<void>(data);
  }
  static every_code exhaustive() {
    every_code made{byte_vector(1024 * 576), byte_vector(1024 * 8)};
    for (std::size_t row = 0; row < 1024; ++row) {
      std::byte* const data = made.data.data() + row * 576;
      for (std::size_t group = 0; group < 7; ++group) {
        const std::size_t pair = (row * 7 + group) % 1024;  // a scale and a quarter of the codes
        made.scales[row * 8 + group] = static_cast<std::byte>(pair / 4);
        for (std::size_t i = 0; i < 64; ++i) data[64 * group + i] = static_cast<std::byte>(pair % 4 * 64 + i);
      }
      made.scales[row * 8 + 7] = static_cast<std::byte>(row & 0xff);  // means nothing
      put_every_bf16(data + 448, row);
    }
    return made;
  }
  static row_values decode(const std::byte* data, const std::byte* scales, float) {
    row_values row;
    for (int i = 0; i < 448; ++i) row.push_back({multiply(value_of(data[i]), value_of_ue8m0(scales[i / 64]))});
    for (int i = 0; i < 64; ++i) row.push_back(value_of_bf16(data + 448 + 2 * i));
    return row;
  }
};

struct v41_rows {
  static constexpr std::int64_t elements = 512, data_bytes = 512, scale_bytes = 16, page_multiple = 512;
  static constexpr scales_are where = scales_are::in_footers;
  static void tame(std::byte* data, std::byte* scales, std::mt19937& random) {
    for (int i = 0; i < 16; ++i) scales[i] = tame_ue8m0(random);
    static_cast<void>(data);
  }
  static every_code exhaustive() {
    every_code made{byte_vector(128 * 512), byte_vector(128 * 16)};
    for (std::size_t pair = 0; pair < 2048; ++pair) {  // a scale and an eighth of the codes
      made.scales[pair] = static_cast<std::byte>(pair / 8);
      for (std::size_t i = 0; i < 32; ++i) made.data[32 * pair + i] = static_cast<std::byte>(pair % 8 * 32 + i);
    }
    return made;
  }
  static row_values decode(const std::byte* data, const std::byte* scales, float) {
    row_values row;
    for (int i = 0; i < 512; ++i) row.push_back({multiply(value_of(data[i]), value_of_ue8m0(scales[i / 32]))});
    return row;
  }
};

struct vllm_rows {
  static constexpr std::int64_t elements = 576, data_bytes = 352, scale_bytes = 0;
  static constexpr scales_are where = scales_are::nowhere;
  static every_code exhaustive() {
    every_code made{byte_vector(8 * 352), {}};
    for (std::size_t row = 0; row < 8; ++row) {
      std::byte* const data = made.data.data() + row * 352;
      for (std::size_t i = 0; i < 256; ++i) data[i] = static_cast<std::byte>(i % 8 * 0x22 + 0x10);
      for (std::size_t i = 0; i < 64; ++i) data[256 + i] = static_cast<std::byte>(row % 4 * 64 + i);
      for (std::size_t i = 0; i < 32; ++i) data[320 + i] = static_cast<std::byte>(row * 32 + i);
    }
    return made;
  }
  static row_values decode(const std::byte* data, const std::byte*, float global_scale) {
    row_values row;
    for (int i = 0; i < 512; ++i) {
      const int group = i / 16;
      const float scale = scale_of(data[320 + 8 * (group % 4) + group / 4], global_scale);
      row.push_back({multiply(value_of_e2m1(nibble_of(data, i)), scale)});
    }
    for (int i = 0; i < 64; ++i) row.push_back({value_of(data[256 + i])});
    return row;
  }
};

struct plain_fp8_rows {
  static constexpr std::int64_t elements = 512, data_bytes = 512, scale_bytes = 0;
  static constexpr scales_are where = scales_are::nowhere;
  static every_code exhaustive() {
    every_code made{byte_vector(512), {}};
    for (std::size_t i = 0; i < 512; ++i) made.data[i] = static_cast<std::byte>(i & 0xff);
    return made;
  }
  static row_values decode(const std::byte* data, const std::byte*, float) {
    row_values row;
    for (int i = 0; i < 512; ++i) row.push_back({value_of(data[i])});
    return row;
  }
};

template <int Residual>
struct nvfp4_pool_rows {
  static constexpr std::int64_t elements = 512, data_bytes = 256 + Residual / 2, scale_bytes = 32 + Residual / 16;
  static constexpr scales_are where = scales_are::in_a_pool;
  static every_code exhaustive() {  // with a residual: every pair of nibbles, and some of scales
    constexpr std::size_t rows = Residual == 0 ? 8 : 256;
    every_code made{random_bytes(rows * data_bytes, 3), random_bytes(rows * scale_bytes, 4)};
    for (std::size_t i = 0; i < made.scales.size(); ++i)
      if (Residual == 0) made.scales[i] = static_cast<std::byte>(i);
    for (std::size_t i = 0; i < made.data.size(); ++i)
      if (Residual == 0) made.data[i] = static_cast<std::byte>(i % 8 * 0x22 + 0x10);
    return made;
  }
  static row_values decode(const std::byte* data, const std::byte* scales, float global_scale) {
    row_values row;
    for (int i = 0; i < 512; ++i) {
      const int group = i / 16, plain = 32 - Residual / 16;
      const bool sum = group >= plain;
      const int place = sum ? 2 * group - plain : group;
      const float main =
          multiply(value_of_e2m1(nibble_of(data + 8 * place, i % 16)), scale_of(scales[place], global_scale));
      row.push_back({sum ? add(main, multiply(value_of_e2m1(nibble_of(data + 8 * place + 8, i % 16)),
                                              scale_of(scales[place + 1], global_scale)))
                         : main});
    }
    return row;
  }
};

/// A caller's: 24 signed bytes, an fp32 scale, 4 bytes of nothing.
struct callers_rows {
  static constexpr std::int64_t elements = 24, data_bytes = 32, scale_bytes = 0;
  static constexpr scales_are where = scales_are::nowhere;
  static void tame(std::byte* data, std::byte* scales, std::mt19937& random) {
    tame_fp32(data + 24, random);
    static_cast<void>(scales);
  }
  static row_values decode(const std::byte* data, const std::byte*, float) {
    float scale = 0;
    std::memcpy(&scale, data + 24, 4);
    row_values row;
    for (int i = 0; i < 24; ++i)
      row.push_back({multiply(static_cast<float>(static_cast<std::int8_t>(data[i])), scale)});
    return row;
  }
};

}  // namespace gather_test
