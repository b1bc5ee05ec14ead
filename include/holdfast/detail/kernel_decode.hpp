// What a decoder (kernel/row_decoder.hpp) loads from, decodes with, and writes to.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_exact.hpp>
#include <holdfast/detail/kernel_fp8.hpp>
#include <holdfast/detail/kernel_half.hpp>
#include <holdfast/detail/kernel_nvfp4.hpp>
#include <holdfast/detail/kernel_words.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// 16 bytes of bf16 or fp16: what a thread stores at once.
inline constexpr std::int32_t values_of_a_packet = 8;

// --- rows to load from -----------------------------------------------------------------------------------------------

/// A row where its pool has it. `Width` divides the addresses of its data; its scales' are any.
template <std::size_t Width>
struct rows_as_they_lie {
  const std::byte* data_;
  const std::byte* scales_;

  template <std::size_t Bytes>
  [[nodiscard]] HOLDFAST_HOST_DEVICE words<(Bytes + 3) / 4> data(std::int32_t offset) const {
    return load_words<Bytes, Width>(data_ + offset);
  }
  template <std::size_t Bytes>
  [[nodiscard]] HOLDFAST_HOST_DEVICE words<(Bytes + 3) / 4> scales(std::int32_t offset) const {
    return load_words<Bytes, 1>(scales_ + offset);
  }
};

/// A row that was copied to memory of the warp's own, at a multiple of 16. That may be shared memory, or what the compiler
/// sees that it is.
struct row_at_hand {
  const std::byte* data_;
  const std::byte* scales_;

  template <std::size_t Bytes>
  [[nodiscard]] HOLDFAST_HOST_DEVICE words<(Bytes + 3) / 4> data(std::int32_t offset) const {
    return load<Bytes>(data_ + offset);
  }
  template <std::size_t Bytes>
  [[nodiscard]] HOLDFAST_HOST_DEVICE words<(Bytes + 3) / 4> scales(std::int32_t offset) const {
    return load<Bytes>(scales_ + offset);
  }

 private:
  template <std::size_t Bytes>
  struct alignas(Bytes) aligned {
    std::uint32_t word[(Bytes + 3) / 4];
  };
  template <std::size_t Bytes>
  [[nodiscard]] HOLDFAST_HOST_DEVICE static words<(Bytes + 3) / 4> load(const std::byte* from) {
    words<(Bytes + 3) / 4> loaded{};
#if defined(__CUDA_ARCH__)
    if constexpr (Bytes >= 4) {
      const auto at_once = *reinterpret_cast<const aligned<Bytes>*>(from);
#pragma unroll
      for (std::size_t i = 0; i < Bytes / 4; ++i) loaded.word[i] = at_once.word[i];
    } else {
#pragma unroll
      for (std::size_t i = 0; i < Bytes; ++i) loaded.word[0] |= static_cast<std::uint32_t>(from[i]) << i * 8;
    }
#else
    std::memcpy(loaded.word, from, Bytes);
#endif
    return loaded;
  }
};

// --- numbers ---------------------------------------------------------------------------------------------------------

HOLDFAST_HOST_DEVICE inline float float_of_bits(std::uint32_t bits) { return float_of(bits); }

HOLDFAST_HOST_DEVICE inline float float_of_ue8m0(std::uint32_t byte) {
  return float_of(byte == 0 ? 0x00400000 : byte == 0xff ? 0x7fffffff : byte << 23);
}

/// The four e4m3 values of a word.
HOLDFAST_HOST_DEVICE inline void floats_of_e4m3(std::uint32_t codes, float* to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n\t"
      ".reg .b16 low, high, a, b, c, d;\n\t"
      ".reg .b32 lower, upper;\n\t"
      "mov.b32 {low, high}, %4;\n\t"
      "cvt.rn.f16x2.e4m3x2 lower, low;\n\t"
      "cvt.rn.f16x2.e4m3x2 upper, high;\n\t"
      "mov.b32 {a, b}, lower;\n\t"
      "mov.b32 {c, d}, upper;\n\t"
      "cvt.f32.f16 %0, a;\n\t"
      "cvt.f32.f16 %1, b;\n\t"
      "cvt.f32.f16 %2, c;\n\t"
      "cvt.f32.f16 %3, d;\n\t"
      "}"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(codes));
#else
  for (int i = 0; i < 4; ++i) to[i] = float_of_e4m3(codes >> 8 * i & 0xff);
#endif
}

HOLDFAST_HOST_DEVICE inline void floats_of_e4m3(const words<2>& codes, float (&to)[8]) {
  floats_of_e4m3(codes.word[0], to);
  floats_of_e4m3(codes.word[1], to + 4);
}

HOLDFAST_HOST_DEVICE inline void floats_of_e2m1(const words<1>& nibbles, float (&to)[8]) {
  std::uint32_t uppers[2];  // of fp16, whose lower bytes are zero
  look_up({e2m1_half_low, e2m1_half_high}, nibbles.word[0], uppers);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    const float_pair pair = floats_of_halves(choose_bytes(uppers[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424));
    to[2 * i] = pair.low;
    to[2 * i + 1] = pair.high;
  }
}

/// 8 bf16 values, exactly.
HOLDFAST_HOST_DEVICE inline void floats_of_bf16(const words<4>& halves, float (&to)[8]) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = float_of(halves.word[i] << 16);
    to[2 * i + 1] = float_of(halves.word[i] & 0xffff0000);
  }
}

// --- what is written ---------------------------------------------------------------------------------------------------

enum class element_kind { e4m3, bf16, fp16 };

inline constexpr std::size_t bytes_of(element_kind kind) { return kind == element_kind::e4m3 ? 1 : 2; }

/// 8 values of an output, packed; zeros until something is put.
template <element_kind Kind>
struct alignas(values_of_a_packet* bytes_of(Kind)) values_of {
  std::uint32_t word[values_of_a_packet * bytes_of(Kind) / 4] = {};

  HOLDFAST_HOST_DEVICE void put(const float (&values)[8]) {
    if constexpr (Kind == element_kind::e4m3) {
      put_scaled(values, 1.0f);  // GPUs keep the sign of a NaN here; but no product of theirs is a NaN with a sign
    } else {
      round(values);
    }
  }

  HOLDFAST_HOST_DEVICE void put_scaled(const float (&values)[8], float scale) {
    float products[8];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) products[i] = exact_product(values[i], scale);
    round(products);
  }

  HOLDFAST_HOST_DEVICE void put_bf16(const words<4>& halves) {
    if constexpr (Kind == element_kind::bf16) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int i = 0; i < 4; ++i) word[i] = halves.word[i];
    } else {
      float values[8];
      floats_of_bf16(halves, values);
      put(values);
    }
  }

 private:
  HOLDFAST_HOST_DEVICE void round(const float (&values)[8]) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::size_t i = 0; i < sizeof word / 4; ++i) {
      if constexpr (Kind == element_kind::e4m3) {
        word[i] = e4m3_of_floats(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
      } else if constexpr (Kind == element_kind::bf16) {
        word[i] = bf16_of_floats(values[2 * i], values[2 * i + 1]);
      } else {
        word[i] = fp16_of_floats(values[2 * i], values[2 * i + 1]);
      }
    }
  }
};

}  // namespace holdfast::HOLDFAST_ABI::detail
