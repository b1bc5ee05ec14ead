// Encoders against the plain decoders of the tests: how far values move, and that nothing becomes NaN.
#include <holdfast/error.hpp>
#include <holdfast/row_encode.hpp>

#include "support/gather_format_reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace {

using gather_test::byte_vector;

template <class Row, class Format>
struct pair_of {
  using row = Row;
  using format = Format;
};

template <class Pair>
class RowEncode : public ::testing::Test {
 public:
  using its_row = typename Pair::row;
  using its_format = typename Pair::format;

  std::vector<float> there_and_back(const std::vector<float>& values, const holdfast::encode_options& options = {}) {
    data_.assign(its_row::data_bytes, std::byte{0xff});
    scales_.assign(std::max(its_row::scale_bytes, 1), std::byte{0xff});
    holdfast::encode_row<its_row>(values, data_.data(), scales_.data(), options);
    std::vector<float> decoded;
    for (const auto& each : its_format::decode(data_.data(), scales_.data(), options.global_scale))
      decoded.push_back(each.value);
    return decoded;
  }

  byte_vector data_, scales_;
};

using every_row = ::testing::Types<pair_of<holdfast::fp8_row, gather_test::plain_fp8_rows>,
                                   pair_of<holdfast::nvfp4_row<0>, gather_test::nvfp4_pool_rows<0>>,
                                   pair_of<holdfast::nvfp4_row<64>, gather_test::nvfp4_pool_rows<64>>,
                                   pair_of<holdfast::flashmla_v32_row, gather_test::v32_rows>,
                                   pair_of<holdfast::flashmla_v4_row, gather_test::v4_rows>,
                                   pair_of<holdfast::flashmla_v41_row, gather_test::v41_rows>,
                                   pair_of<holdfast::vllm_nvfp4_row, gather_test::vllm_rows>>;
TYPED_TEST_SUITE(RowEncode, every_row);

TYPED_TEST(RowEncode, LayoutsAgree) {
  EXPECT_EQ(TestFixture::its_row::elements, TestFixture::its_format::elements);
  EXPECT_EQ(TestFixture::its_row::data_bytes, TestFixture::its_format::data_bytes);
  EXPECT_EQ(TestFixture::its_row::scale_bytes, TestFixture::its_format::scale_bytes);
}

TYPED_TEST(RowEncode, ZerosStayZeros) {
  const std::vector<float> zeros(TestFixture::its_row::elements, 0.0f);
  EXPECT_EQ(this->there_and_back(zeros), zeros);
}

TYPED_TEST(RowEncode, ExtremesStayFinite) {
  for (const float extreme : {1e-45f, 1e-30f, 1e-4f, 479.0f, 1e30f, 1.7e38f})
    for (const bool everywhere : {false, true})
      for (const float global_scale : {1.0f, 0.0372f}) {
        std::vector<float> values(TestFixture::its_row::elements, everywhere ? extreme : 0.0f);
        values[5] = -extreme;
        values.back() = extreme;
        for (const float value : this->there_and_back(values, {.global_scale = global_scale}))
          ASSERT_TRUE(std::isfinite(value)) << extreme;
        for (const float value : this->there_and_back(values, {.power_of_two_scales = true}))
          ASSERT_TRUE(std::isfinite(value)) << extreme;
      }
}

TYPED_TEST(RowEncode, ValuesMoveNoFurtherThanTheFormatAsks) {
  using row = typename TestFixture::its_row;
  constexpr bool is_e2m1 = row::data_bytes < row::elements;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const float sigma : {0.01f, 1.0f, 60.0f})
    for (const bool power_of_two : {false, true}) {
      std::vector<float> values(row::elements);
      for (float& value : values) value = std::clamp(normal(random) * sigma, -400.0f, 400.0f);
      const auto back = this->there_and_back(values, {.power_of_two_scales = power_of_two, .global_scale = 0.1f});
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto first = values.begin() + static_cast<std::ptrdiff_t>(i / 16 * 16);
        const float most = std::fabs(
            *std::max_element(first, first + 16, [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
        // e4m3: half of an eighth, or half the least step; e2m1: half its widest step, which is a sixth of the largest
        // value, and the scale's own error
        const bool of_e2m1 = is_e2m1 && i < 512;
        const float allowed = of_e2m1 ? most * (1.0f / 6 + 1.0f / 15) + 1e-4f : std::fabs(values[i]) / 15 + sigma / 500;
        ASSERT_NEAR(back[i], values[i], allowed + 0.001f) << i << " of sigma " << sigma;
      }
    }
}

TYPED_TEST(RowEncode, WhatDoesNotFitIsRefused) {
  using row = typename TestFixture::its_row;
  byte_vector data(row::data_bytes), scales(64);
  std::vector<float> values(row::elements + 1);
  const auto encode = [&](std::size_t count, std::byte* to, std::byte* scales_to, float global_scale = 1) {
    holdfast::encode_row<row>(std::span<const float>(values).first(count), to, scales_to,
                              {.global_scale = global_scale});
  };
  constexpr std::size_t right = row::elements;
  EXPECT_NO_THROW(encode(right, data.data(), scales.data()));
  EXPECT_THROW(encode(right + 1, data.data(), scales.data()), holdfast::logic_error);
  EXPECT_THROW(encode(right - 1, data.data(), scales.data()), holdfast::logic_error);
  EXPECT_THROW(encode(right, nullptr, scales.data()), holdfast::logic_error);
  if (row::scale_bytes != 0) {
    EXPECT_THROW(encode(right, data.data(), nullptr), holdfast::logic_error);
  }
  for (const float bad :
       {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_THROW(encode(right, data.data(), scales.data(), bad), holdfast::logic_error);
  }
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    values[7] = bad;
    EXPECT_THROW(encode(right, data.data(), scales.data()), holdfast::logic_error);
  }
}

TEST(RowEncodeV32, PowerOfTwoScalesArePowersOfTwo) {
  std::vector<float> values(576);
  for (std::size_t i = 0; i < 512; ++i) values[i] = static_cast<float>(i + 1);
  byte_vector row(656);
  float scales[4];
  holdfast::encode_row<holdfast::flashmla_v32_row>(values, row.data(), nullptr, {.power_of_two_scales = true});
  std::memcpy(scales, row.data() + 512, 16);
  for (const auto& [scale, should] :
       {std::pair{scales[0], 0.5f}, {scales[1], 1.0f}, {scales[2], 1.0f}, {scales[3], 2.0f}})
    EXPECT_EQ(scale, should);  // 128 / 448, 256 / 448, 384 / 448, 512 / 448
  holdfast::encode_row<holdfast::flashmla_v32_row>(values, row.data());
  std::memcpy(scales, row.data() + 512, 16);
  EXPECT_EQ(scales[3], 512.0f / 448.0f);
}

}  // namespace
