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

}  // namespace
