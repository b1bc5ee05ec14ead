// The decoders of the library's own formats (row_format.hpp has their layouts). gather_rows.hpp specifies the order of
// operations, kernel/row_decoder.hpp what a decoder is.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_decode.hpp>
#include <holdfast/detail/kernel_exact.hpp>
#include <holdfast/detail/kernel_fp8.hpp>
#include <holdfast/detail/kernel_words.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/version.hpp>

#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

struct fp8_decoder : fp8_row {
  using packet = words<2>;

  template <class Row>
  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {
    return row.template data<8>(8 * at);
  }
  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& codes, Values& to) const {
    float values[8];
    floats_of_e4m3(codes, values);
    to.put(values);
  }
};

/// Of formats that have one: by value, or in device memory.
struct global_scale_of {
  float global_scale = 1;
  const float* global_scale_at = nullptr;

  [[nodiscard]] HOLDFAST_HOST_DEVICE float get() const {
    return global_scale_at == nullptr ? global_scale : *global_scale_at;
  }
};

template <std::int32_t Residual>
struct nvfp4_decoder : nvfp4_row<Residual> {
  using row = nvfp4_row<Residual>;
  static constexpr std::int32_t split_at = row::plain_groups * row::group_elements;

  struct packet {
    words<1> main, residual;
    std::uint32_t scales;  // main's, and residual's in the second byte
    bool sum;
  };

  global_scale_of global;

  [[nodiscard]] HOLDFAST_HOST_DEVICE nvfp4_decoder ready() const {
    nvfp4_decoder made = *this;
    made.global = {global.get(), nullptr};
    return made;
  }

  template <class Row>
  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const Row& from, std::int32_t at) const {
    const std::int32_t group = at / 2, half = at % 2 * 4;
    const std::int32_t place = group < row::plain_groups ? group : 2 * group - row::plain_groups;  // as in nvfp4_row
    packet loaded{};
    loaded.main = from.template data<4>(place * row::group_bytes + half);
    loaded.scales = from.template scales<1>(place).word[0];
    if constexpr (Residual != 0) {
      loaded.sum = group >= row::plain_groups;
      if (loaded.sum) {
        loaded.residual = from.template data<4>((place + 1) * row::group_bytes + half);
        loaded.scales |= from.template scales<1>(place + 1).word[0] << 8;
      }
    }
    return loaded;
  }

  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    float values[8];
    floats_of_e2m1(from.main, values);
    const float scale = exact_product(float_of_e4m3(from.scales), global.global_scale);
    if (Residual == 0 || !from.sum) return to.put_scaled(values, scale);
    float residuals[8];
    floats_of_e2m1(from.residual, residuals);
    const float residual_scale = exact_product(float_of_e4m3(from.scales >> 8), global.global_scale);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i)
      values[i] = exact_sum(exact_product(values[i], scale), exact_product(residuals[i], residual_scale));
    to.put(values);
  }
};

/// e4m3 values with scales, then bf16 values as they are: FlashMLA's V3.2 and V4 rows.
struct scaled_or_bf16 {
  words<4> raw;  // 8 bytes of e4m3, or 16 of bf16
  std::uint32_t scale;
  bool scaled;

  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(float scale_value, Values& to) const {
    if (!scaled) return to.put_bf16(raw);
    float values[8];
    floats_of_e4m3(words<2>{{raw.word[0], raw.word[1]}}, values);
    to.put_scaled(values, scale_value);
  }
};

struct flashmla_v32_decoder : flashmla_v32_row {
  static constexpr std::int32_t split_at = scaled_elements;
  using packet = scaled_or_bf16;

  template <class Row>
  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {
    if (at >= scaled_elements / 8) return {row.template data<16>(rope_at + (at - scaled_elements / 8) * 16), 0, false};
    const auto codes = row.template data<8>(8 * at);
    const auto scale = row.template data<4>(scales_at + 8 * at / group_elements * 4);
    return {{{codes.word[0], codes.word[1], 0, 0}}, scale.word[0], true};
  }
  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    from.decode(float_of(from.scale), to);
  }
};

struct flashmla_v4_decoder : flashmla_v4_row {
  static constexpr std::int32_t split_at = scaled_elements;
  using packet = scaled_or_bf16;

  template <class Row>
  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {
    if (at >= scaled_elements / 8) return {row.template data<16>(rope_at + (at - scaled_elements / 8) * 16), 0, false};
    const auto codes = row.template data<8>(8 * at);
    const auto scale = row.template scales<1>(8 * at / group_elements);
    return {{{codes.word[0], codes.word[1], 0, 0}}, scale.word[0], true};
  }
  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    from.decode(float_of_ue8m0(from.scale), to);
  }
};

struct flashmla_v41_decoder : flashmla_v41_row {
  struct packet {
    words<2> codes;
    std::uint32_t scale;
  };

  template <class Row>
  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {
    return {row.template data<8>(8 * at), row.template scales<1>(8 * at / group_elements).word[0]};
  }
  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    float values[8];
    floats_of_e4m3(from.codes, values);
    to.put_scaled(values, float_of_ue8m0(from.scale));
  }
};

struct vllm_nvfp4_decoder : vllm_nvfp4_row {
  static constexpr std::int32_t split_at = scaled_elements;

  struct packet {
    words<2> codes;  // 4 bytes of e2m1, or 8 of e4m3
    std::uint32_t scale;
    bool scaled;
  };

  global_scale_of global;

  [[nodiscard]] HOLDFAST_HOST_DEVICE vllm_nvfp4_decoder ready() const {
    vllm_nvfp4_decoder made = *this;
    made.global = {global.get(), nullptr};
    return made;
  }

  template <class Row>
  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {
    if (at >= scaled_elements / 8) return {row.template data<8>(rope_at + (at - scaled_elements / 8) * 8), 0, false};
    const std::int32_t group = at / 2, place = 8 * (group & 3) + (group >> 2);  // as in vllm_nvfp4_row
    const auto nibbles = row.template data<4>(4 * at);
    return {{{nibbles.word[0], 0}}, row.template data<1>(scales_at + place).word[0], true};
  }
  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    float values[8];
    if (from.scaled) {
      floats_of_e2m1(words<1>{{from.codes.word[0]}}, values);
      to.put_scaled(values, exact_product(float_of_e4m3(from.scale), global.global_scale));
    } else {
      floats_of_e4m3(from.codes, values);
      to.put(values);
    }
  }
};

}  // namespace holdfast::HOLDFAST_ABI::detail
