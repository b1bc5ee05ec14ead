// The host twins of the device's exact arithmetic: casts, products and sums that nothing fuses, byte permutation.
#include <holdfast/detail/kernel_decode.hpp>
#include <holdfast/detail/kernel_exact.hpp>
#include <holdfast/detail/kernel_fp8.hpp>
#include <holdfast/detail/kernel_half.hpp>
#include <holdfast/detail/kernel_nvfp4.hpp>

#include "support/gather_format_reference.hpp"
#include "support/gather_reference.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace gather_test {

namespace detail = holdfast::detail;

TEST(ExactArithmetic, EveryE4m3ByteBecomesItsValue) {
  for (unsigned byte = 0; byte < 256; ++byte) {
    const float value = detail::float_of_e4m3(byte);
    const double should = value_of_e4m3(byte);
    EXPECT_EQ(std::isnan(value), std::isnan(should)) << byte;
    if (!std::isnan(value)) {
      EXPECT_EQ(static_cast<double>(value), should) << byte;
      EXPECT_EQ(std::signbit(value), (byte & 0x80) != 0) << byte;
    }
  }
}

unsigned cast(float value) { return detail::e4m3_of_floats(value, 0, 0, 0); }

TEST(ExactArithmetic, EveryE4m3ByteSurvivesTheWayThereAndBack) {
  for (unsigned byte = 0; byte < 256; ++byte)
    EXPECT_EQ(cast(detail::float_of_e4m3(byte)), (byte & 0x7f) == 0x7f ? 0x7f : byte) << byte;
}

TEST(ExactArithmetic, CastsGoToTheNearest) {
  std::mt19937 random(1);
  const auto expect = [](std::uint32_t bits) {
    const auto value = std::bit_cast<float>(bits);
    ASSERT_EQ(cast(value), nearest_e4m3(value)) << std::hex << bits;
    if (!std::isnan(value)) {
      ASSERT_EQ(cast(value), __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)) << std::hex << bits;
    }
  };
  for (int i = 0; i < 1 << 20; ++i) expect(static_cast<std::uint32_t>(random()));
  for (unsigned byte = 0; byte < 127; ++byte) {  // every value, every middle, and their neighbours
    const auto here = std::bit_cast<std::uint32_t>(detail::float_of_e4m3(byte));
    const double next = byte == 126 ? 480 : value_of_e4m3(byte + 1);
    const auto middle = std::bit_cast<std::uint32_t>(static_cast<float>((value_of_e4m3(byte) + next) / 2));
    for (const std::uint32_t sign : {0u, 0x80000000u})
      for (std::uint32_t off = 0; off < 5; ++off) {
        expect(sign | (middle + off - 2));
        expect(sign | (here + off));
        if (here >= 4) expect(sign | (here - off));
      }
  }
  for (const std::uint32_t bits : {0x7f800000u, 0xff800000u, 0x7f7fffffu, 0x7f800001u, 0x7fffffffu, 0xffc00000u, 1u})
    expect(bits);
}

TEST(ExactArithmetic, HalvesGoToTheNearest) {
  const auto expect = [](std::uint32_t bits) {
    const auto value = std::bit_cast<float>(bits);
    const std::uint32_t bf16 = detail::bf16_of_bits(bits), fp16 = detail::fp16_of_bits(bits);
    ASSERT_EQ(bf16, nearest_bf16(value)) << std::hex << bits;
    ASSERT_EQ(fp16, nearest_fp16(value)) << std::hex << bits;
    ASSERT_EQ(bf16, __bfloat16_as_ushort(__float2bfloat16_rn(value))) << std::hex << bits;
    ASSERT_EQ(fp16, __half_as_ushort(__float2half_rn(value))) << std::hex << bits;
  };
  std::mt19937 random(1);
  for (int i = 0; i < 1 << 19; ++i) expect(static_cast<std::uint32_t>(random()));
  for (std::uint32_t upper = 0; upper < 1u << 16; ++upper)  // every bf16 value, every middle, and their neighbours
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      expect(upper << 16 | lower);
  for (std::uint32_t half = 0; half < 0x7c00; ++half) {  // every fp16 value and every middle
    const auto value = __half2float(__ushort_as_half(static_cast<std::uint16_t>(half)));
    const auto next = half == 0x7bff ? 65536.0f : __half2float(__ushort_as_half(static_cast<std::uint16_t>(half + 1)));
    const auto here = std::bit_cast<std::uint32_t>(value), middle = std::bit_cast<std::uint32_t>((value + next) / 2);
    for (const std::uint32_t sign : {0u, 0x80000000u})
      for (const std::uint32_t bits : {here, here + 1, middle - 1, middle, middle + 1}) expect(sign | bits);
  }
}

TEST(ExactArithmetic, TwoHalvesAreAWord) {
  EXPECT_EQ(detail::bf16_of_floats(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(detail::fp16_of_floats(1.0f, -2.0f), 0xc0003c00u);
}

TEST(ExactArithmetic, CodesOfAWordAreTheirValues) {
  float values[8];
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(std::isnan(detail::float_of_ue8m0(byte)), byte == 255);
    if (byte < 255) {
      EXPECT_EQ(detail::float_of_ue8m0(byte), std::ldexp(1.0f, static_cast<int>(byte) - 127));
    }
    detail::floats_of_e2m1({{byte << 8}}, values);
    EXPECT_EQ(values[2], value_of_e2m1(byte & 15));
    EXPECT_EQ(values[3], value_of_e2m1(byte >> 4));
    EXPECT_EQ(std::signbit(values[2]), (byte & 8) != 0);
    if ((byte & 0x7f) == 0x7f) continue;
    detail::floats_of_e4m3({{byte << 16, byte}}, values);
    EXPECT_EQ(static_cast<double>(values[2]), value_of_e4m3(byte));
    EXPECT_EQ(static_cast<double>(values[4]), value_of_e4m3(byte));
  }
}

TEST(ExactArithmetic, FourCastsAreFourBytes) {
  EXPECT_EQ(detail::e4m3_of_floats(1.0f, -2.0f, 1e9f, 0.5f), 0x307ec038u);
}

TEST(ExactArithmetic, BytesAreChosenByNibbles) {
  EXPECT_EQ(detail::choose_bytes(0x33221100, 0x77665544, 0x3210), 0x33221100u);
  EXPECT_EQ(detail::choose_bytes(0x33221100, 0x77665544, 0x0427), 0x00442277u);
}

TEST(ExactArithmetic, HalvesOfMagnitudesAreExact) {
  for (unsigned nibble = 0; nibble < 16; ++nibble) {
    std::uint32_t bytes[2];
    detail::look_up({detail::e2m1_half_low, detail::e2m1_half_high}, nibble, bytes);
    const float value = detail::floats_of_halves((bytes[0] & 0xff) << 8).low;
    EXPECT_EQ(value, nibble & 8 ? -magnitudes[nibble & 7] : magnitudes[nibble & 7]) << nibble;
    EXPECT_EQ(std::signbit(value), (nibble & 8) != 0) << nibble;
  }
}

#if defined(__x86_64__) && !defined(__clang__)
#define GATHER_TEST_FMA __attribute__((target("fma"), optimize("O2"), noinline))  // below O2, g++ fuses nothing
#elif defined(__x86_64__)
#define GATHER_TEST_FMA __attribute__((target("fma"), noinline))
#else
#define GATHER_TEST_FMA __attribute__((noinline))
#endif

/// Compiled where the machine can fuse a product with a sum.
GATHER_TEST_FMA float sum_of_products(float a, float b, float c, float d) {
  return detail::exact_sum(detail::exact_product(a, b), detail::exact_product(c, d));
}

TEST(ExactArithmetic, NothingIsFused) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) GTEST_SKIP() << "this processor has no fused multiply-add";
#endif
  std::mt19937 random(2);
  int fused_differs = 0;
  for (int i = 0; i < 100000; ++i) {
    const auto draw = [&] {
      return std::ldexp(static_cast<float>(random() | 1u), -32 + static_cast<int>(random() % 4));
    };
    const float a = draw(), b = draw(), c = draw(), d = -draw();
    const float should = add(multiply(a, b), multiply(c, d));
    ASSERT_EQ(sum_of_products(a, b, c, d), should);
    fused_differs += std::fma(a, b, multiply(c, d)) != should;
  }
  EXPECT_GT(fused_differs, 1000) << "else this test shows nothing";
}

TEST(ExactArithmetic, DenormalsAreNotFlushed) {
  constexpr float least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(detail::exact_product(3 * least, 0.5f), 2 * least);
  EXPECT_EQ(detail::exact_sum(least, least), 2 * least);
}

}  // namespace gather_test
