// encode_row: fp32 values become a row of one of row_format.hpp's formats, on the host. For tests, examples and tools.
//
//   std::vector<std::byte> row(flashmla_v32_row::data_bytes);
//   holdfast::encode_row<holdfast::flashmla_v32_row>(values, row.data());
//   holdfast::encode_row<holdfast::flashmla_v4_row>(values, page + r * 576, page + page_rows * 576 + r * 8);
//
// Scales are made from a group's largest magnitude, so that it just fits: / 448 for e4m3 values (of at least 1e-4 / 448, as
// FlashMLA's writers have it; UE8M0 scales are the next power of two), / 6 / global scale for e2m1 ones (in e4m3, at least
// 2^-9 unless all values are zero). Values are divided by their scale, clamped to the largest one that the format has, and
// rounded to nearest, ties to even; RoPE is rounded to bf16 or e4m3 alike. All zeros become zeros, nothing becomes NaN, and
// no magnitude up to 2^127 infinity.
//
// Not here: speed; a GPU's kernel; the bits of anybody's writer, whose scales and roundings may differ.
#pragma once

#include <holdfast/detail/kernel_fp8.hpp>
#include <holdfast/detail/kernel_half.hpp>
#include <holdfast/error.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>

namespace holdfast::inline HOLDFAST_ABI {

struct encode_options {
  bool power_of_two_scales = false;  ///< of flashmla_v32_row, whose fp32 scales may be anything
  float global_scale = 1;            ///< of NVFP4 rows; positive and finite
};

namespace detail {

[[noreturn]] inline void refuse_encode(const std::string& why) { throw logic_error("encode_row: " + why); }

inline double largest_of(std::span<const float> values) {
  double most = 0;
  for (const float value : values) most = std::max(most, std::fabs(static_cast<double>(value)));
  return most;
}

inline std::byte to_e4m3(double value) {
  const auto clamped = static_cast<float>(std::clamp(value, -448.0, 448.0));
  return static_cast<std::byte>(e4m3_of_bits(std::bit_cast<std::uint32_t>(clamped)));
}
inline double from_e4m3(std::byte code) {
  return static_cast<double>(std::bit_cast<float>(bits_of_e4m3(std::to_integer<std::uint32_t>(code))));
}

inline void encode_bf16(std::span<const float> values, std::byte* to) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    constexpr float most = 0x1.fep127f;
    const auto half =
        static_cast<std::uint16_t>(bf16_of_bits(std::bit_cast<std::uint32_t>(std::clamp(values[i], -most, most))));
    std::memcpy(to + 2 * i, &half, 2);
  }
}

/// At least 1e-4 / 448, at most 2^127.
inline double scale_of_e4m3(std::span<const float> values, bool power_of_two) {
  const double scale = std::max(largest_of(values), 1e-4) / 448;
  if (!power_of_two) return static_cast<double>(static_cast<float>(scale));
  int exponent = 0;
  const double fraction = std::frexp(scale, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}
inline void encode_e4m3(std::span<const float> values, double scale, std::byte* to) {
  for (std::size_t i = 0; i < values.size(); ++i) to[i] = to_e4m3(static_cast<double>(values[i]) / scale);
}
inline std::byte to_ue8m0(double power_of_two) { return static_cast<std::byte>(127 + std::ilogb(power_of_two)); }

/// Of 16 values: 8 bytes of nibbles and a scale.
inline void encode_e2m1(std::span<const float> values, float global_scale, std::byte* to, std::byte& scale) {
  const double most = largest_of(values);
  scale = to_e4m3(most / 6 / static_cast<double>(global_scale));
  if (most > 0 && scale == std::byte{0}) scale = std::byte{1};
  const double unit = from_e4m3(scale) * static_cast<double>(global_scale);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double magnitude = unit == 0 ? 0 : std::fabs(static_cast<double>(values[i])) / unit;
    unsigned code = 0;
    while (code < 7) {
      const double middle =
          (static_cast<double>(e2m1_magnitudes[code]) + static_cast<double>(e2m1_magnitudes[code + 1])) / 2;
      if (magnitude < middle || (magnitude == middle && code % 2 == 0)) break;
      ++code;
    }
    if (std::signbit(values[i])) code |= 8;
    to[i / 2] = i % 2 == 0 ? static_cast<std::byte>(code) : to[i / 2] | static_cast<std::byte>(code << 4);
  }
}

/// What nibble `i` of `from` stands for.
inline double from_e2m1(const std::byte* from, std::size_t i, double unit) {
  const unsigned nibble = std::to_integer<unsigned>(from[i / 2]) >> (i % 2 == 0 ? 0 : 4) & 15;
  return (nibble & 8 ? -unit : unit) * static_cast<double>(e2m1_magnitudes[nibble & 7]);
}

inline void encode_as(fp8_row, std::span<const float> values, std::byte* data, std::byte*, const encode_options&) {
  encode_e4m3(values, 1, data);
}

template <std::int32_t Residual>
void encode_as(nvfp4_row<Residual>, std::span<const float> values, std::byte* data, std::byte* scales,
               const encode_options& options) {
  using row = nvfp4_row<Residual>;
  for (std::int32_t group = 0; group < row::groups; ++group) {
    const auto some = values.subspan(static_cast<std::size_t>(group * row::group_elements), row::group_elements);
    std::byte* const to = data + row::data_offset(group);
    std::byte* const scale = scales + row::scale_offset(group);
    encode_e2m1(some, options.global_scale, to, *scale);
    if (group < row::plain_groups) continue;
    float rest[row::group_elements];
    for (std::size_t i = 0; i < some.size(); ++i)
      rest[i] = static_cast<float>(static_cast<double>(some[i]) -
                                   from_e2m1(to, i, from_e4m3(*scale) * static_cast<double>(options.global_scale)));
    encode_e2m1(rest, options.global_scale, to + row::group_bytes, scale[1]);
  }
}

inline void encode_as(flashmla_v32_row, std::span<const float> values, std::byte* data, std::byte*,
                      const encode_options& options) {
  using row = flashmla_v32_row;
  for (std::int32_t at = 0; at < row::scaled_elements; at += row::group_elements) {
    const auto group = values.subspan(static_cast<std::size_t>(at), row::group_elements);
    const double scale = scale_of_e4m3(group, options.power_of_two_scales);
    encode_e4m3(group, scale, data + at);
    const auto stored = static_cast<float>(scale);
    std::memcpy(data + row::scales_at + at / row::group_elements * 4, &stored, 4);
  }
  encode_bf16(values.subspan(row::scaled_elements), data + row::rope_at);
}

inline void encode_as(flashmla_v4_row, std::span<const float> values, std::byte* data, std::byte* scales,
                      const encode_options&) {
  using row = flashmla_v4_row;
  for (std::int32_t at = 0; at < row::scaled_elements; at += row::group_elements) {
    const auto group = values.subspan(static_cast<std::size_t>(at), row::group_elements);
    const double scale = scale_of_e4m3(group, true);
    encode_e4m3(group, scale, data + at);
    scales[at / row::group_elements] = to_ue8m0(scale);
  }
  scales[row::scale_bytes - 1] = std::byte{0};
  encode_bf16(values.subspan(row::scaled_elements), data + row::rope_at);
}

inline void encode_as(flashmla_v41_row, std::span<const float> values, std::byte* data, std::byte* scales,
                      const encode_options&) {
  using row = flashmla_v41_row;
  for (std::int32_t at = 0; at < row::elements; at += row::group_elements) {
    const auto group = values.subspan(static_cast<std::size_t>(at), row::group_elements);
    const double scale = scale_of_e4m3(group, true);
    encode_e4m3(group, scale, data + at);
    scales[at / row::group_elements] = to_ue8m0(scale);
  }
}

inline void encode_as(vllm_nvfp4_row, std::span<const float> values, std::byte* data, std::byte*,
                      const encode_options& options) {
  using row = vllm_nvfp4_row;
  for (std::int32_t group = 0; group < row::scaled_elements / row::group_elements; ++group)
    encode_e2m1(values.subspan(static_cast<std::size_t>(group * row::group_elements), row::group_elements),
                options.global_scale, data + group * row::group_elements / 2,
                data[row::scales_at + row::scale_offset(group)]);
  encode_e4m3(values.subspan(row::scaled_elements), 1, data + row::rope_at);
}

}  // namespace detail

/// Writes `Row::data_bytes` bytes to `data` and `Row::scale_bytes` to `scales`. `values` are Row::elements finite numbers.
/// Throws logic_error for another number of values, for values that are not finite, for null memory, and for a global scale
/// that is not positive and finite.
template <class Row>
void encode_row(std::span<const float> values, std::byte* data, std::byte* scales = nullptr,
                const encode_options& options = {}) {
  if (values.size() != std::size_t{Row::elements})
    detail::refuse_encode(std::to_string(values.size()) + " values for a row of " + std::to_string(Row::elements));
  if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }))
    detail::refuse_encode("values must be finite");
  if (data == nullptr || (Row::scale_bytes != 0 && scales == nullptr)) detail::refuse_encode("null memory");
  if (!(options.global_scale > 0 && options.global_scale <= std::numeric_limits<float>::max()))
    detail::refuse_encode("a global scale of " + std::to_string(options.global_scale));
  detail::encode_as(Row{}, values, data, scales, options);
}

}  // namespace holdfast::HOLDFAST_ABI
