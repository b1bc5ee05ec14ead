// How a copy is planned: what lies side by side, and how wide its packets may be.
#include <holdfast/detail/kernel_copy.hpp>

#include <gtest/gtest.h>

#include <algorithm>
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

using holdfast::detail::chunked_copy;

TEST(CopyPlan, LongRunsAreCutIntoChunks) {
  const auto made = plan(2, {3, 17, 584}, packed(17, 584), packed(64, 584));
  const chunked_copy copy(made);
  constexpr std::int64_t row = 17 * 584 * 2, pitch = 64 * 584 * 2, of_row = row / 2048 + 1;
  ASSERT_EQ(copy.chunks, 3 * of_row);
  for (std::int64_t i = 0; i < copy.chunks; ++i) {
    const auto chunk = copy.chunk(i);
    const auto piece = copy.piece(i, 0);
    const std::int64_t in_row = i % of_row * 2048;
    EXPECT_EQ(chunk.pieces, 1);
    EXPECT_EQ(piece.from, made.from + i / of_row * row + in_row);
    EXPECT_EQ(piece.at, 0u);
    EXPECT_EQ(chunk.to, made.to + i / of_row * pitch + in_row);
    EXPECT_EQ(chunk.bytes, std::min<std::int64_t>(2048, row - in_row));
    EXPECT_EQ(piece.bytes, chunk.bytes);
  }
}

TEST(CopyPlan, HeadsApartAreChunksOfTheirOwn) {
  const auto made = plan(2, {2, 3, 1536}, {{5 * 1544, 1544, 1}}, packed(64, 1536));
  const chunked_copy copy(made);
  ASSERT_EQ(copy.chunks, 2 * 3 * 2);
  const auto last = copy.chunk(11);  // row 1, head 2, from 2048 on
  EXPECT_EQ(copy.piece(11, 0).from, made.from + 5 * 1544 * 2 + 2 * 1544 * 2 + 2048);
  EXPECT_EQ(last.to, made.to + 64 * 1536 * 2 + 2 * 1536 * 2 + 2048);
  EXPECT_EQ(last.bytes, 1024u);
}

TEST(CopyPlan, ShortOrNarrowOrTooManyRunsAreNotCutIntoChunks) {
  EXPECT_EQ(chunked_copy(plan(2, {3, 1, 248}, packed(1, 248), packed(64, 248))).chunks, 0) << "496 bytes";
  EXPECT_EQ(chunked_copy(plan(2, {3, 1, 256}, packed(1, 256), packed(64, 256))).chunks, 3) << "512 bytes";
  EXPECT_EQ(chunked_copy(plan(2, {3, 16, 512}, {packed(16, 512).strides, 4104}, packed(64, 512))).chunks, 0);
  EXPECT_EQ(chunked_copy(plan(2, {3, 16, 512}, {{16 * 1024, 1024, 2}}, packed(64, 512))).chunks, 0);
  for (const std::int64_t bytes : {std::int64_t{1} << 31, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 4096})
    EXPECT_EQ(chunked_copy(plan(2, {1, 1, bytes / 2}, packed(1, bytes / 2), packed(64, bytes / 2))).chunks, 0) << bytes;
  EXPECT_EQ(chunked_copy(plan(2, {std::int64_t{1} << 31, 1, 512}, {{0, 0, 1}}, {{0, 0, 1}})).chunks, 0);
}

}  // namespace
