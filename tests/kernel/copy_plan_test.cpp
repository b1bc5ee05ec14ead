// How a copy is planned: what lies side by side, and how wide its packets may be.
#include <holdfast/detail/kernel_copy.hpp>

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace {

using triple = std::array<std::int64_t, 3>;

struct side {
  triple strides;
  std::uintptr_t address = 4096;
};

holdfast::detail::copy_plan plan(std::int64_t element_bytes, const triple& shape, const side& in, const side& out) {
  const auto made = [&](const char* name, const side& of) {
    return holdfast::detail::copy_side{name, reinterpret_cast<const void*>(of.address), shape, of.strides};
  };
  return holdfast::detail::plan_copy("pad_queries", element_bytes, made("in", in), made("out", out), false);
}

constexpr side packed(std::int64_t heads, std::int64_t head_dim) { return {{heads * head_dim, head_dim, 1}}; }

TEST(CopyPlan, PackedHeadsOfARowAreOneRunOf16BytePackets) {
  for (const std::int64_t heads : {8, 16, 17, 63, 64})
    for (const std::int64_t head_dim : {8, 512, 576, 584}) {
      const auto made = plan(2, {33, heads, head_dim}, packed(heads, head_dim), packed(64, head_dim));
      EXPECT_EQ(made.packet_bytes, 16);
      EXPECT_EQ(made.rows, 33);
      EXPECT_EQ(made.row_packets, heads * head_dim / 8);
      EXPECT_EQ(made.run_packets, made.row_packets);
      EXPECT_EQ(made.to_strides.row, 64 * head_dim * 2);
    }
}

TEST(CopyPlan, GapsBetweenHeadsMakeAHeadARun) {
  const auto made = plan(2, {4, 16, 512}, {{16 * 520, 520, 1}}, packed(64, 512));
  EXPECT_EQ(made.packet_bytes, 16);
  EXPECT_EQ(made.run_packets, 64);
  EXPECT_EQ(made.head_packets, 64);
  EXPECT_EQ(made.row_packets, 16 * 64);
  EXPECT_EQ(made.from_strides.head, 1040);
}

TEST(CopyPlan, AStrideInsideHeadsMakesAnElementARun) {
  const auto made = plan(2, {4, 16, 512}, {{16 * 1024, 1024, 2}}, packed(64, 512));
  EXPECT_EQ(made.packet_bytes, 2);
  EXPECT_EQ(made.run_packets, 1);
  EXPECT_EQ(made.head_packets, 512);
  EXPECT_EQ(made.row_packets, 16 * 512);
}

TEST(CopyPlan, PacketsAreAsWideAsAddressesAndStridesAllow) {
  const triple shape{4, 16, 512};
  const side out = packed(64, 512);
  for (const auto& [offset, width] : {std::pair{0, 16}, {1, 1}, {2, 2}, {4, 4}, {6, 2}, {8, 8}, {12, 4}, {16, 16}}) {
    const auto address = std::uintptr_t{4096} + static_cast<std::uintptr_t>(offset);
    EXPECT_EQ(plan(1, shape, {packed(16, 512).strides, address}, out).packet_bytes, width) << offset;
    EXPECT_EQ(plan(1, shape, packed(16, 512), {out.strides, address}).packet_bytes, width) << offset;
    EXPECT_EQ(plan(1, shape, {{16 * 512 + offset, 512, 1}}, out).packet_bytes, width) << offset;
    EXPECT_EQ(plan(1, shape, {{64 * 512, 512 + offset, 1}}, out).packet_bytes, width) << offset;
  }
  EXPECT_EQ(plan(1, {4, 1, 584}, packed(1, 584), packed(64, 584)).packet_bytes, 8);
  EXPECT_EQ(plan(12, {4, 2, 5}, {{20, 10, 2}}, packed(2, 5)).packet_bytes, 4) << "an element of three packets";
}

TEST(CopyPlan, StridesOfSingleItemsDoNotMatter) {
  const auto made = plan(2, {1, 1, 512}, {{333, 77, 1}}, {{55, 11, 1}});
  EXPECT_EQ(made.packet_bytes, 16);
  EXPECT_EQ(made.row_packets, 64);
  const auto single = plan(2, {4, 16, 1}, {{16, 1, 9}}, {{64, 1, 5}});
  EXPECT_EQ(single.packet_bytes, 16) << "head_dim 1: the heads lie side by side";
  EXPECT_EQ(single.row_packets, 2);
}

TEST(CopyPlan, NothingToCopyIsAnEmptyPlan) {
  EXPECT_EQ(plan(2, {0, 16, 512}, packed(16, 512), packed(64, 512)).rows, 0);
  EXPECT_EQ(plan(2, {4, 0, 512}, {packed(16, 512).strides, 0}, {packed(64, 512).strides, 0}).rows, 0);
}

}  // namespace
