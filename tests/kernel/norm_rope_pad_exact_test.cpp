// The host twins of norm_rope_pad's arithmetic: 16-bit floats, roots and reciprocals, and that nothing is fused where the
// machine could.
#include <holdfast/detail/kernel_exact.hpp>
#include <holdfast/detail/kernel_norm.hpp>

#include "support/norm_reference.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

namespace norm_rope_pad_exact {

namespace detail = holdfast::detail;

std::uint32_t bits(float value) { return std::isnan(value) ? 0x7fffffff : std::bit_cast<std::uint32_t>(value); }

template <class Pairs>
void expect_every_half(const norm_reference::half_format& format) {
  for (std::uint32_t half = 0; half < 0x10000; ++half) {
    const auto [low, high] = Pairs::widen(half | (half ^ 0xffff) << 16);
    ASSERT_EQ(bits(low), bits(static_cast<float>(norm_reference::decode(format, static_cast<std::uint16_t>(half)))));
    ASSERT_EQ(bits(high),
              bits(static_cast<float>(norm_reference::decode(format, static_cast<std::uint16_t>(half ^ 0xffff)))));
    ASSERT_EQ(Pairs::narrow(low, 0), std::isnan(low) ? 0x7fff : half);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 1 << 20; ++i) {
    const auto some = static_cast<std::uint32_t>(random());
    // anything, and what lies halfway between two halves
    for (const std::uint32_t word : {some, some & 0xffff8000, some & 0xfffff000, (some & 0x807fffff) | 0x38000000}) {
      const auto value = std::bit_cast<float>(word);
      ASSERT_EQ(Pairs::narrow(value, -value) & 0xffff, norm_reference::encode(format, value)) << std::hex << word;
    }
  }
}

TEST(NormRopePadExact, Bf16) { expect_every_half<detail::bf16_pairs>(norm_reference::bf16); }
TEST(NormRopePadExact, Fp16) { expect_every_half<detail::fp16_pairs>(norm_reference::fp16); }

TEST(NormRopePadExact, RootsReciprocalsAndDifferences) {
  std::mt19937 random(2);
  for (int i = 0; i < 1 << 20; ++i) {
    const auto a = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    const auto b = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    ASSERT_EQ(bits(detail::exact_root(a)), bits(norm_reference::rounded(std::sqrt(static_cast<double>(a)))));
    ASSERT_EQ(bits(detail::exact_reciprocal(a)), bits(norm_reference::rounded(1.0 / static_cast<double>(a))));
    ASSERT_EQ(bits(detail::exact_difference(a, b)), bits(norm_reference::minus(a, b)));
  }
}

#if defined(__x86_64__) && !defined(__clang__)
#define NORM_TEST_FMA __attribute__((target("fma"), optimize("O2"), noinline, flatten))  // below O2, g++ fuses nothing
#elif defined(__x86_64__)
#define NORM_TEST_FMA __attribute__((target("fma"), noinline, flatten))
#else
#define NORM_TEST_FMA __attribute__((noinline))
#endif

NORM_TEST_FMA float sum_of_squares(const detail::packet16& packet) {
  return detail::sum_of_squares<detail::fp16_pairs>(packet);
}
NORM_TEST_FMA void rotate(detail::eight_floats& values, const detail::packet_angles<false>& angles) {
  detail::rotate_adjacent(values, angles);
}

TEST(NormRopePadExact, NothingIsFused) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) GTEST_SKIP() << "this processor has no fused multiply-add";
#endif
  using norm_reference::minus;
  using norm_reference::plus;
  using norm_reference::times;
  std::mt19937 random(3);
  int fused_differs = 0;
  for (int i = 0; i < 100000; ++i) {
    detail::packet16 packet;
    for (std::uint32_t& word : packet.word) word = static_cast<std::uint32_t>(random()) & 0x7bff7bff;
    float squares[8];
    for (int k = 0; k < 8; ++k) {
      const auto pair = detail::fp16_pairs::widen(packet.word[k / 2]);
      squares[k] = times(k % 2 == 0 ? pair.low : pair.high, k % 2 == 0 ? pair.low : pair.high);
    }
    ASSERT_EQ(sum_of_squares(packet), plus(plus(plus(squares[0], squares[1]), plus(squares[2], squares[3])),
                                           plus(plus(squares[4], squares[5]), plus(squares[6], squares[7]))));

    const auto draw = [&] { return std::ldexp(static_cast<float>(random() | 1u), -32); };
    detail::eight_floats values;
    detail::packet_angles<false> angles;
    for (float& value : values.at) value = draw();
    for (float& cosine : angles.cosines) cosine = draw();
    for (float& sine : angles.sines) sine = draw();
    detail::eight_floats turned = values;
    rotate(turned, angles);
    for (int k = 0; k < 4; ++k) {
      const float a = values.at[2 * k], b = values.at[2 * k + 1], c = angles.cosines[k], s = angles.sines[k];
      ASSERT_EQ(turned.at[2 * k], minus(times(a, c), times(b, s)));
      ASSERT_EQ(turned.at[2 * k + 1], plus(times(b, c), times(a, s)));
      fused_differs += std::fma(a, c, -times(b, s)) != turned.at[2 * k];
    }
  }
  EXPECT_GT(fused_differs, 1000) << "else this test shows nothing";
}

}  // namespace norm_rope_pad_exact
