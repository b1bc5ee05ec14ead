// The byte layouts against the formats they describe, spelled out.
#include <holdfast/row_format.hpp>

#include <gtest/gtest.h>

#include <cstdint>

namespace {

TEST(RowFormat, Fp8RowsAre512Bytes) {
  EXPECT_EQ(holdfast::fp8_row::bytes, 512);
  EXPECT_EQ(holdfast::fp8_row::elements, 512);
}

TEST(RowFormat, PlainNvfp4GroupsFollowEachOther) {
  using row = holdfast::nvfp4_row<>;
  EXPECT_EQ(row::data_bytes, 256);
  EXPECT_EQ(row::scale_bytes, 32);
  for (std::int32_t group = 0; group < 32; ++group) {
    EXPECT_EQ(row::data_offset(group), 8 * group);
    EXPECT_EQ(row::scale_offset(group), group);
  }
}

TEST(RowFormat, ResidualGroupsInterleaveMainAndResidual) {
  using row = holdfast::nvfp4_row<64>;
  EXPECT_EQ(row::data_bytes, 288);
  EXPECT_EQ(row::scale_bytes, 36);
  EXPECT_EQ(row::plain_groups, 28);
  for (std::int32_t group = 0; group < 28; ++group) {
    EXPECT_EQ(row::data_offset(group), 8 * group);
    EXPECT_EQ(row::scale_offset(group), group);
  }
  for (std::int32_t group = 28; group < 32; ++group) {
    EXPECT_EQ(row::data_offset(group), 224 + 16 * (group - 28));
    EXPECT_EQ(row::scale_offset(group), 28 + 2 * (group - 28));
  }
}

TEST(RowFormat, V32RowsHoldTheirScales) {
  using row = holdfast::flashmla_v32_row;
  EXPECT_EQ(row::elements, 512 + 64);
  EXPECT_EQ(row::scales_at, 512);
  EXPECT_EQ(row::rope_at, row::scales_at + 512 / row::group_elements * 4);
  EXPECT_EQ(row::data_bytes, row::rope_at + 64 * 2);
  EXPECT_EQ(row::data_bytes % 16, 0);
  EXPECT_NE(row::data_bytes % 32, 0);
}

TEST(RowFormat, PagesWithFootersAreRoundedUp) {
  using v4 = holdfast::flashmla_v4_row;
  EXPECT_EQ(v4::data_bytes + v4::scale_bytes, 584);
  EXPECT_EQ(v4::rope_at + 64 * 2, v4::data_bytes);
  EXPECT_EQ(v4::scaled_elements / v4::group_elements, 7);
  EXPECT_EQ(holdfast::page_bytes<v4>(1), 2 * 576);
  EXPECT_EQ(holdfast::page_bytes<v4>(64), 37440);  // 64 * 584 is 37376
  EXPECT_EQ(holdfast::page_bytes<v4>(72), 73 * 576);
  using v41 = holdfast::flashmla_v41_row;
  EXPECT_EQ(v41::data_bytes + v41::scale_bytes, 528);
  EXPECT_EQ(v41::elements / v41::group_elements, v41::scale_bytes);
  EXPECT_EQ(holdfast::page_bytes<v41>(1), 1024);
  for (const std::int64_t rows : {32, 64, 128, 256})
    EXPECT_EQ(holdfast::page_bytes<v41>(rows), rows * 528);  // no padding
  EXPECT_EQ(holdfast::page_bytes<v4>(std::int64_t{1} << 40), (((std::int64_t{584} << 40) + 575) / 576) * 576);
}

TEST(RowFormat, ScalesOfVllmsNvfp4RowsArePermuted) {
  using row = holdfast::vllm_nvfp4_row;
  EXPECT_EQ(row::rope_at, 512 / 2);
  EXPECT_EQ(row::scales_at, row::rope_at + 64);
  EXPECT_EQ(row::data_bytes, row::scales_at + 512 / 16);
  bool seen[32] = {};
  for (std::int32_t group = 0; group < 32; ++group) {
    const std::int32_t at = row::scale_offset(group);
    EXPECT_EQ(at, group % 4 * 8 + group / 4);
    EXPECT_FALSE(seen[at]);
    seen[at] = true;
  }
}

}  // namespace
