// What gather_rows must do, wherever it runs: typed suites over a world (kernel_host_world.hpp, kernel_cuda_world.cuh).
// Here: to FP8, of the formats that have kernels of their own. gather_format_cases.hpp has all others.
#pragma once

#include "support/gather_bytes.hpp"
#include "support/gather_reference.hpp"
#include "support/gather_world.hpp"

#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gather_test {

/// A pool of random rows of a format.
template <class World, class Format>
class pool_of {
 public:
  using element = __nv_fp8_e4m3;
  static constexpr std::int64_t elements = 512;

  pool_of(World& world, std::int64_t rows, std::uint64_t seed = 1, const geometry& data = {},
          const geometry& scales = {})
      : pool_of(world, random_bytes(static_cast<std::size_t>(rows * Format::data_bytes), seed),
                random_bytes(static_cast<std::size_t>(rows * Format::scale_bytes), seed + 1000), data, scales) {}
  pool_of(World& world, byte_vector data_rows, byte_vector scale_rows, const geometry& data = {},
          const geometry& scales = {})
      : data_(world, std::move(data_rows), Format::data_bytes, data),
        scales_(world, std::move(scale_rows), Format::scale_bytes, scales) {}

  [[nodiscard]] auto given() const {
    if constexpr (Format::residual < 0) {
      return holdfast::fp8_rows{.data = data_.given(), .table = table};
    } else {
      return holdfast::nvfp4_rows<Format::residual>{.data = data_.given(),
                                                    .scales = scales_.given(),
                                                    .global_scale = global_scale,
                                                    .global_scale_at = global_scale_at,
                                                    .table = table};
    }
  }
  [[nodiscard]] std::int64_t rows() const { return data_.count(); }
  [[nodiscard]] row_bytes decoded(std::int64_t i) const {
    return Format::decode(data_.row(i), Format::scale_bytes == 0 ? nullptr : scales_.row(i), global_scale);
  }

  float global_scale = 100.0f / (448 * 6);
  const float* global_scale_at = nullptr;
  holdfast::block_table table{};

 private:
  placed_pool<World> data_, scales_;
};

// --- whatever the format -------------------------------------------------------------------------------------------------

template <class World, class Format, class Index>
struct subject {
  using world = World;
  using format = Format;
  using index = Index;
};

template <class World>
using every_subject =
    ::testing::Types<subject<World, fp8_format, std::int32_t>, subject<World, fp8_format, std::int64_t>,
                     subject<World, nvfp4_format, std::int32_t>, subject<World, nvfp4_format, std::int64_t>,
                     subject<World, nvfp4_residual_format, std::int32_t>,
                     subject<World, nvfp4_residual_format, std::int64_t>>;

template <class Subject>
class GatherOf : public WorldTest<typename Subject::world> {
 public:
  using its_world = typename Subject::world;
  using its_format = typename Subject::format;
  using its_index = typename Subject::index;
  using its_pool = pool_of<its_world, its_format>;
  using its_indices = std::vector<its_index>;
};
TYPED_TEST_SUITE_P(GatherOf);

TYPED_TEST_P(GatherOf, WritesTheRowOfEachIndexAndNothingElse) {
  using index = typename TestFixture::its_index;
  const typename TestFixture::its_pool pool(this->world(), 37);
  std::uint64_t seed = 0;
  for (const std::int64_t rows : {1, 3, 33})
    for (const std::int64_t topk : {1, 7, 8, 64}) {
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(topk));
      ++seed;
      this->expect_gather(pool, rows, random_indices<index>(rows * topk, 37, seed), static_cast<std::int64_t>(seed % 3),
                          poisons[seed % 2]);
    }
}

TYPED_TEST_P(GatherOf, ManyRowsAreGatheredSeveralAWarp) {
  using index = typename TestFixture::its_index;
  constexpr std::int64_t width = TestFixture::its_format::data_bytes;
  const struct {
    const char* what;
    geometry data, scales;
  } cases[] = {
      // whose addresses are multiples of 16 bytes (of scales with a residual, some)
      {"packed", {}, {}},
      {"shifted", {.shift = 16}, {.shift = 48}},
      {"with gaps", {.row_stride = width + 16}, {.row_stride = 48}},
      {"in pages", {.page_rows = 8}, {.page_rows = 4}},
      {"in padded pages",
       {.page_rows = 7, .page_stride = 7 * width + 16},
       {.row_stride = 48, .page_rows = 5, .page_stride = 5 * 48 + 16}},
      {"in one page", {.page_rows = 64, .page_stride = 64 * width + 1}, {.page_rows = 61, .page_stride = 61 * 36 + 4}},
      // others
      {"data shifted by 8", {.shift = 8}, {}},
      {"data shifted by 4", {.shift = 4}, {}},
      {"data shifted by 1", {.shift = 1}, {}},
      {"data with gaps of 8", {.row_stride = width + 8}, {}},
      {"data in pages padded by 8", {.page_rows = 7, .page_stride = 7 * width + 8}, {.page_rows = 4}},
      {"scales shifted by 8", {}, {.shift = 8}},
      {"scales shifted by 1", {}, {.shift = 1}},
      {"scales with gaps", {}, {.row_stride = 40}},
      {"scales in pages padded by 8", {.page_rows = 8}, {.row_stride = 48, .page_rows = 5, .page_stride = 5 * 48 + 8}},
  };
  std::uint64_t seed = 0;
  for (const auto& where : cases) {
    SCOPED_TRACE(where.what);
    ++seed;
    const typename TestFixture::its_pool pool(this->world(), 61, seed, where.data, where.scales);
    auto indices = random_indices<index>(many_pairs, 61, seed);
    std::fill_n(indices.begin() + 16, 48, index{-1});  // warps of nothing else
    this->expect_gather(pool, 1, indices, static_cast<std::int64_t>(seed % 2) * 40, poisons[seed / 2 % 2]);
  }
}

TYPED_TEST_P(GatherOf, TheFirstRowsBeyondASmallGather) {
  using index = typename TestFixture::its_index;
  const typename TestFixture::its_pool pool(this->world(), 61);
  for (const std::int64_t more : {0, 1, 15, 16}) {
    SCOPED_TRACE(more);
    const std::int64_t pairs = holdfast::detail::most_rows_of_small_gathers + more;
    this->expect_gather(pool, 1, random_indices<index>(pairs, 61, 3));
    this->expect_gather(pool, 1, random_indices<index>(pairs - 20, 61, 3), 20);
  }
}

TYPED_TEST_P(GatherOf, InvalidIndicesAreZeroRows) {
  using index = typename TestFixture::its_index;
  const typename TestFixture::its_pool pool(this->world(), 5);
  typename TestFixture::its_indices indices{-1, 0, int_min, 4, int_max, 5, 1, -123456, 2147480000, 3, 6, -2};
  if constexpr (sizeof(index) == 8)
    indices.insert(indices.end(), {std::numeric_limits<index>::min(), std::numeric_limits<index>::max(), index{1} << 32,
                                   (index{1} << 32) + 1, -(index{1} << 32)});
  for (const std::byte poison : poisons) this->expect_gather(pool, 1, indices, 1, poison);
}

TYPED_TEST_P(GatherOf, InvalidIndicesReadNothing) {
  using index = typename TestFixture::its_index;
  using format = typename TestFixture::its_format;
  auto& world = this->world();
  typename TestFixture::its_pool pool(world, 5);
  auto source = pool.given();
  source.data.data = reinterpret_cast<const void*>(std::uintptr_t{256});  // whoever reads it faults
  if constexpr (format::residual >= 0) source.scales.data = source.data.data;
  const typename TestFixture::its_indices some{-1, int_min, int_max, 5, -123456, 2147480000, -2, 6};
  for (const auto& indices : {some, many_of(some)}) {
    const auto pairs = static_cast<std::int64_t>(indices.size());
    const device_array<typename TestFixture::its_world, index> on_device(world, indices);
    output<typename TestFixture::its_world> out(world, pairs, 0, poisons[0]);
    holdfast::gather_rows(world.stream(), source, flat<index>(on_device.data(), pairs), out.view());
    world.synchronize();
    EXPECT_TRUE(out.holds(pool, std::vector<std::int64_t>(indices.size(), -1)));
  }
}

TYPED_TEST_P(GatherOf, APoolWithoutRowsHasNoValidIndex) {
  using index = typename TestFixture::its_index;
  using format = typename TestFixture::its_format;
  auto& world = this->world();
  typename TestFixture::its_pool pool(world, 5);
  auto source = pool.given();
  source.data = {};
  if constexpr (format::residual >= 0) source.scales = {};
  const device_array<typename TestFixture::its_world, index> indices(world, {0, -1, 1});
  output<typename TestFixture::its_world> out(world, 3, 0, poisons[0]);
  holdfast::gather_rows(world.stream(), source, flat<index>(indices.data(), 3), out.view());
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {-1, -1, -1}));
}

TYPED_TEST_P(GatherOf, ALeadingChunkOfInvalidIndices) {
  using index = typename TestFixture::its_index;
  const typename TestFixture::its_pool pool(this->world(), 37);
  for (const std::int64_t invalid : {1, 16, 31, 32, 33, 64}) {
    SCOPED_TRACE(invalid);
    auto indices = random_indices<index>(128, 37, 9);
    std::fill_n(indices.begin(), invalid, index{-1});
    std::fill_n(indices.begin() + 64, 64, index{-1});  // and a row of nothing else
    this->expect_gather(pool, 2, indices);
  }
}

TYPED_TEST_P(GatherOf, DuplicatesAreEqualRowsEachTime) {
  const typename TestFixture::its_pool pool(this->world(), 9);
  for (int i = 0; i < 2; ++i) this->expect_gather(pool, 1, typename TestFixture::its_indices{5, 5, 5, -1});
}

TYPED_TEST_P(GatherOf, RowsOfNaNReachNobodyElse) {
  using format = typename TestFixture::its_format;
  byte_vector data = random_bytes(static_cast<std::size_t>(8 * format::data_bytes), 5);
  byte_vector scales(static_cast<std::size_t>(8 * format::scale_bytes), std::byte{0x38});
  for (std::int64_t row = 0; row < 8; ++row)
    for (std::int64_t i = 0; i < format::data_bytes; ++i) {
      auto& byte = data[static_cast<std::size_t>(row * format::data_bytes + i)];
      byte = row % 2 == 0 ? std::byte{0x7f} : byte & std::byte{0x3f};
    }
  for (std::int64_t i = 0; i < 8 * format::scale_bytes; ++i)
    if (i / std::max<std::int64_t>(format::scale_bytes, 1) % 2 == 0)
      scales[static_cast<std::size_t>(i)] = std::byte{0x7f};
  const typename TestFixture::its_pool pool(this->world(), data, scales);
  const typename TestFixture::its_indices indices{1, -1, 3, int_max, 5, 8, 7, -123456, int_min, 1};
  for (const std::int64_t row : named_by(indices, 8))
    for (const std::byte byte : row < 0 ? row_bytes{} : pool.decoded(row))
      ASSERT_NE(byte & std::byte{0x7f}, std::byte{0x7f}) << "a named row holds NaN";
  this->expect_gather(pool, 1, indices, 3);
}

TYPED_TEST_P(GatherOf, RowLengthsAreClamped) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 23);
  typename TestFixture::its_indices indices;
  for (int i = 0; i < 32; ++i) indices.push_back(static_cast<index>(i % 23));
  const device_array<world_type, index> on_device(world, indices);
  const device_array<world_type, std::int32_t> lengths(world, {3, -11147, 0, int_max});
  device_array<world_type, index> remap(world, typename TestFixture::its_indices(32, 77));
  output<world_type> out(world, 32, 4, poisons[1]);
  holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(on_device.data(), 4, 8), out.view(),
                        {.tail_rows = 4, .row_lengths = lengths.data(), .remap = remap.data()});
  world.synchronize();
  auto named = named_by(indices, 23);
  for (std::size_t p = 3; p < 24; ++p) named[p] = -1;
  EXPECT_TRUE(out.holds(pool, named));
  EXPECT_EQ(remap.now(), remap_of<index>(named));
}

TYPED_TEST_P(GatherOf, AllLengthsZeroIsAllZeros) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 23);
  for (const std::int64_t batch : {32, 33, 64}) {
    const device_array<world_type, index> indices(
        world, typename TestFixture::its_indices(static_cast<std::size_t>(4 * batch), 1));
    const device_array<world_type, std::int32_t> lengths(world,
                                                         std::vector<std::int32_t>(static_cast<std::size_t>(batch), 0));
    output<world_type> out(world, 4 * batch, 0, poisons[0]);
    holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(indices.data(), batch, 4), out.view(),
                          {.row_lengths = lengths.data()});
    world.synchronize();
    EXPECT_TRUE(out.holds(pool, std::vector<std::int64_t>(static_cast<std::size_t>(4 * batch), -1)));
  }
}

TYPED_TEST_P(GatherOf, ALengthOfRankOneIndicesIsThatOfTheirOnlyRow) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 23);
  const device_array<world_type, index> indices(world, {4, 3, 2, 1});
  const device_array<world_type, std::int32_t> lengths(world, {2});
  output<world_type> out(world, 4, 0, poisons[0]);
  holdfast::gather_rows(world.stream(), pool.given(), flat<index>(indices.data(), 4), out.view(),
                        {.row_lengths = lengths.data()});
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {4, 3, -1, -1}));
}

TYPED_TEST_P(GatherOf, ABlockTableTranslatesPositions) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  // 5 blocks of 64 rows; one request of two pages; the second of two rows has no request
  typename TestFixture::its_pool pool(world, 5 * 64, 1, {.page_rows = 64}, {.page_rows = 64});
  const device_array<world_type, std::int32_t> table(world, {3, 1});
  pool.table = {.data = table.data(), .requests = 1, .pages = 2};
  const typename TestFixture::its_indices indices{0, 127, 128, -1, 0, 127, 128, -1};
  const device_array<world_type, index> on_device(world, indices);
  device_array<world_type, index> remap(world, typename TestFixture::its_indices(8, 77));
  output<world_type> out(world, 8, 0, poisons[0]);
  holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(on_device.data(), 2, 4), out.view(),
                        {.remap = remap.data()});
  world.synchronize();
  const std::vector<std::int64_t> named{3 * 64, 64 + 63, -1, -1, -1, -1, -1, -1};
  EXPECT_TRUE(out.holds(pool, named));
  EXPECT_EQ(remap.now(), remap_of<index>(named));
}

TYPED_TEST_P(GatherOf, BlocksOutsideThePoolAreInvalid) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  typename TestFixture::its_pool pool(world, 2 * 64 + 10, 1, {.page_rows = 64},
                                      {.page_rows = 64});  // a last page of 10
  const device_array<world_type, std::int32_t> table(world, {-1, 2, 3, int_max, int_min, 0});
  pool.table = {.data = table.data(), .requests = 1, .pages = 6};
  const device_array<world_type, index> indices(world, {0, 64, 64 + 9, 64 + 10, 128, 192, 256, 320, 383, 384, int_max});
  output<world_type> out(world, 11, 0, poisons[0]);
  holdfast::gather_rows(world.stream(), pool.given(), flat<index>(indices.data(), 11), out.view());
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {-1, 128, 128 + 9, -1, -1, -1, -1, 0, 63, -1, -1}));
}

TYPED_TEST_P(GatherOf, BlocksMayHoldOneRow) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  typename TestFixture::its_pool pool(world, 7, 1, {.page_rows = 1}, {.page_rows = 1});
  const device_array<world_type, std::int32_t> table(world, {6, 0, 7});
  pool.table = {.data = table.data(), .requests = 1, .pages = 3};
  const device_array<world_type, index> indices(world, {0, 1, 2, 3, -1, -2, int_min, int_max});
  output<world_type> out(world, 8, 0, poisons[0]);
  holdfast::gather_rows(world.stream(), pool.given(), flat<index>(indices.data(), 8), out.view());
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {6, 0, -1, -1, -1, -1, -1, -1}));
}

TYPED_TEST_P(GatherOf, RowsNameTheirRequests) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  typename TestFixture::its_pool pool(world, 6 * 4, 1, {.page_rows = 4, .page_stride = 4 * 512 + 64}, {.page_rows = 4});
  // two requests of two pages, rows of the table 3 apart; the element between belongs to nobody
  const device_array<world_type, std::int32_t> table(world, {5, 0, 2, 1, 3});
  pool.table = {.data = table.data(), .requests = 2, .pages = 2, .row_stride = 3};
  const device_array<world_type, std::int32_t> requests(world, {1, 0, 2, -1, int_max, 1});
  const device_array<world_type, index> indices(world, {0, 7, 0, 7, 0, 7, 0, 7, 0, 7, 8, 5});
  output<world_type> out(world, 12, 1, poisons[0]);
  holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(indices.data(), 6, 2), out.view(),
                        {.tail_rows = 1, .row_requests = requests.data()});
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {4, 15, 20, 3, -1, -1, -1, -1, -1, -1, -1, 13}));
}

TYPED_TEST_P(GatherOf, PagesAreWhereTheirStrideSays) {
  using format = typename TestFixture::its_format;
  const geometry data[] = {
      {.row_stride = 584,
       .page_rows = 64,
       .page_stride = 37440},  // rows of 584 bytes, pages padded to a multiple of 576
      {.row_stride = 584, .page_rows = 64},
      {.row_stride = 528, .page_rows = 64, .page_stride = 64 * 528 + 64 * 16},
      {.page_rows = 7, .page_stride = 7 * 512 + 1},
      {.page_rows = 1, .page_stride = 1024},
      {.row_stride = 130 * 512, .page_rows = 65, .page_stride = 512},  // pages interleaved
      {.row_stride = 640},
  };
  const geometry scales[] = {{},
                             {.row_stride = 40},
                             {.row_stride = 36, .page_rows = 16, .page_stride = 4096},
                             {.row_stride = 37, .page_rows = 3, .page_stride = 113}};
  typename TestFixture::its_indices indices{0, 63, 64, 127, 129, 128, 1, -1, 65, 130};
  for (const auto& where : data)
    for (const auto& where_scales : scales) {
      SCOPED_TRACE("row stride " + std::to_string(where.row_stride) + ", page stride " +
                   std::to_string(where.page_stride) + "; of scales " + std::to_string(where_scales.row_stride) + ", " +
                   std::to_string(where_scales.page_stride));
      const typename TestFixture::its_pool pool(this->world(), 130, 4, where, where_scales);
      this->expect_gather(pool, 1, indices);
      if (format::scale_bytes == 0) break;
    }
}

TYPED_TEST_P(GatherOf, AnyAlignment) {
  using format = typename TestFixture::its_format;
  const typename TestFixture::its_indices indices{6, 1, -1, 0, 5};
  for (std::int64_t shift = 0; shift <= 16; ++shift)
    for (const std::int64_t gap : {0, 1, 2, 4, 8, 24}) {
      SCOPED_TRACE(std::to_string(shift) + " bytes off, " + std::to_string(gap) + " between rows");
      const typename TestFixture::its_pool pool(
          this->world(), 7, 5, {.row_stride = format::data_bytes + gap, .shift = shift},
          {.row_stride = format::scale_bytes == 0 ? 0 : format::scale_bytes + gap, .shift = 16 - shift});
      this->expect_gather(pool, 1, indices, 1);
    }
}

TYPED_TEST_P(GatherOf, ATailIsZeroRows) {
  using index = typename TestFixture::its_index;
  const typename TestFixture::its_pool pool(this->world(), 50);
  for (const std::byte poison : poisons)  // 33 rows and a tile of 128
    this->expect_gather(pool, 1, random_indices<index>(33, 50, 6), 128 - 33, poison);
  this->expect_gather(pool, 1, random_indices<index>(32, 50, 6), 128);
}

TYPED_TEST_P(GatherOf, ATailBehindNothingIsStillWritten) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 5);
  output<world_type> out(world, 0, 128, poisons[0]);
  holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(nullptr, 4, 0), out.view(), {.tail_rows = 128});
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {}));
}

TYPED_TEST_P(GatherOf, NothingToWriteIsNoNode) {
  using index = typename TestFixture::its_index;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 5);
  const holdfast::view<__nv_fp8_e4m3, 2> nothing(nullptr, 0, 512);
  auto recorded = world.record([&] {
    holdfast::gather_rows(world.stream(), pool.given(), flat<index>(nullptr, 0), nothing);
    holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(nullptr, 0, 8), nothing);
    holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(nullptr, 8, 0), nothing);
  });
  EXPECT_EQ(recorded.nodes(), 0u);
  holdfast::gather_rows(world.stream(), pool.given(), flat<index>(nullptr, 0), nothing);  // eagerly, too
  world.synchronize();
}

TYPED_TEST_P(GatherOf, IndicesOutputAndRemapMayHaveStrides) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 23);
  constexpr std::int64_t rows = 5, topk = 6;
  for (const auto& [row_stride, column_stride] :
       {std::pair<std::int64_t, std::int64_t>{6, 1}, {9, 1}, {1, 5}, {12, 2}, {0, 1}}) {
    SCOPED_TRACE(std::to_string(row_stride) + ", " + std::to_string(column_stride));
    const auto buffer = random_indices<index>((rows - 1) * row_stride + (topk - 1) * column_stride + 1, 23, 8);
    const device_array<world_type, index> on_device(world, buffer);
    const auto indices =
        holdfast::make_strided_view<const index, 2>(on_device.data(), {rows, topk}, {row_stride, column_stride});
    std::vector<index> remap_should(rows * 8, 77);
    device_array<world_type, index> remap(world, remap_should);
    output<world_type> out(world, rows * topk, 2, poisons[0], 1040);
    holdfast::gather_rows(world.stream(), pool.given(), indices, out.view(),
                          {.tail_rows = 2, .remap = remap.data(), .remap_row_stride = 8});
    world.synchronize();
    std::vector<std::int64_t> named;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t column = 0; column < topk; ++column) {
        named.push_back(buffer[static_cast<std::size_t>(row * row_stride + column * column_stride)]);
        remap_should[static_cast<std::size_t>(row * 8 + column)] =
            static_cast<index>(named.back() < 0 ? -1 : row * topk + column);
      }
    EXPECT_TRUE(out.holds(pool, named));
    EXPECT_EQ(remap.now(), remap_should);
  }
}

TYPED_TEST_P(GatherOf, BytesAndFrameworkStreamsAreAccepted) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 23);
  const device_array<world_type, index> indices(world, {4, 22});
  const typename world_type::convertible_stream stream{world.stream()};
  output<world_type> out(world, 2, 0, poisons[0]);
  holdfast::gather_rows(stream, pool.given(), flat<index>(indices.data(), 2), out.template view<std::byte>());
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {4, 22}));
  out.poison_again();
  const holdfast::view<index, 1> mutable_indices(indices.data(), 2);
  holdfast::gather_rows(stream, pool.given(), mutable_indices, out.template view<unsigned char>());
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {4, 22}));
}

TYPED_TEST_P(GatherOf, ReplayReadsTheIndicesOfTheDay) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 23);
  device_array<world_type, index> indices(world, random_indices<index>(32, 23, 1));
  device_array<world_type, std::int32_t> lengths(world, {8, 8, 8, 8});
  output<world_type> out(world, 32, 128, poisons[0]);
  auto recorded = world.record([&] {
    holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(indices.data(), 4, 8), out.view(),
                          {.tail_rows = 128, .row_lengths = lengths.data()});
  });
  EXPECT_EQ(recorded.nodes(), 1u) << "the tail costs no node";
  EXPECT_TRUE(out.untouched()) << "recording must not run it";
  for (std::int32_t day = 2; day < 5; ++day) {
    indices.set(random_indices<index>(32, 23, static_cast<std::uint64_t>(day)));
    lengths.set({day, 0, 8, 1});
    out.poison_again();
    recorded.replay();
    auto named = named_by(indices.values(), 23);
    for (std::size_t p = 0; p < 32; ++p)
      if (static_cast<std::int32_t>(p % 8) >= lengths.values()[p / 8]) named[p] = -1;
    EXPECT_TRUE(out.holds(pool, named));
  }
}

TYPED_TEST_P(GatherOf, ProgrammaticGathersWaitForThoseBefore) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  for (const std::int64_t pairs : {std::int64_t{64}, many_pairs}) {
    SCOPED_TRACE(pairs);
    const typename TestFixture::its_pool pool(world, pairs);
    const auto values = random_indices<index>(pairs, pairs, 7);
    const std::vector<index> elsewhere(values.size(), 3);
    const device_array<world_type, index> indices(world, values);
    device_array<world_type, index> remap(world, elsewhere);
    output<world_type> first(world, pairs, 0, poisons[0]), second(world, pairs, 8, poisons[1]);
    const auto both = [&] {  // the second one's indices are the first one's remap
      holdfast::gather_rows(world.stream(), pool.given(), flat<index>(indices.data(), pairs), first.view(),
                            {.remap = remap.data(), .programmatic = true});
      holdfast::gather_rows(world.stream(), pool.given(), flat<const index>(remap.data(), pairs), second.view(),
                            {.tail_rows = 8, .programmatic = true});
    };
    const auto named = named_by(values, pairs);
    const auto renamed = named_by(remap_of<index>(named), pairs);
    both();
    world.synchronize();
    EXPECT_TRUE(first.holds(pool, named));
    EXPECT_TRUE(second.holds(pool, renamed));
    auto recorded = world.record(both);
    EXPECT_EQ(recorded.nodes(), 2u);
    remap.set(elsewhere);
    first.poison_again();
    second.poison_again();
    recorded.replay();
    EXPECT_TRUE(first.holds(pool, named));
    EXPECT_TRUE(second.holds(pool, renamed));
  }
}

TYPED_TEST_P(GatherOf, OffsetsPass32Bits) {
  using index = typename TestFixture::its_index;
  using world_type = typename TestFixture::its_world;
  using format = typename TestFixture::its_format;
  auto& world = this->world();
  constexpr std::int64_t far_row = 8'400'000, far_bytes = std::int64_t{5} << 30;
  const auto vast = world.allocate_vast(static_cast<std::size_t>(far_bytes));
  if (vast == nullptr) GTEST_SKIP() << "fewer than 10 GiB are free";
  // data far away and scales near, then the other way round; both by row stride, by page stride, and by many rows
  for (const bool far_data : {true, false})
    for (const bool paged : {false, true}) {
      if (!far_data && format::scale_bytes == 0) continue;
      SCOPED_TRACE(std::string(far_data ? "data" : "scales") + (paged ? " in pages" : ""));
      const std::int64_t width = far_data ? format::data_bytes : format::scale_bytes;
      const std::int64_t stride = std::int64_t{1} << 30;
      const typename TestFixture::its_pool pool(world, 5, 11);
      auto source = pool.given();
      auto& far = [&]() -> holdfast::row_pool& {
        if constexpr (format::scale_bytes != 0)
          if (!far_data) return source.scales;
        return source.data;
      }();
      for (std::int64_t row = 0; row < 5; ++row) {
        byte_vector bytes(static_cast<std::size_t>(width));
        world.download(bytes.data(), static_cast<const std::byte*>(far.data) + row * width, bytes.size());
        world.upload(vast.get() + row * stride, bytes.data(), bytes.size());
      }
      far.data = vast.get();
      (paged ? far.page_stride_bytes : far.row_stride_bytes) = stride;
      if (paged) far.page_rows = 1;
      const device_array<world_type, index> indices(world, {4, 0, 3, 1, 2, 5});
      output<world_type> out(world, 6, 0, poisons[0]);
      holdfast::gather_rows(world.stream(), source, flat<index>(indices.data(), 6), out.view());
      world.synchronize();
      EXPECT_TRUE(out.holds(pool, {4, 0, 3, 1, 2, -1}));
    }
  // a pool of packed rows: the last one, and one past it
  const typename TestFixture::its_pool pool(world, 2, 12);
  auto source = pool.given();
  std::shared_ptr<std::byte> vast_scales;
  const auto move = [&](holdfast::row_pool& rows, std::byte* to, std::int64_t width) {
    for (const std::int64_t row : {0, 1}) {
      byte_vector bytes(static_cast<std::size_t>(width));
      world.download(bytes.data(), static_cast<const std::byte*>(rows.data) + row * width, bytes.size());
      world.upload(to + (row == 0 ? 0 : far_row) * width, bytes.data(), bytes.size());
    }
    rows = {.data = to, .rows = far_row + 1};
  };
  move(source.data, vast.get(), format::data_bytes);
  if constexpr (format::scale_bytes != 0) {
    vast_scales = world.allocate_vast(static_cast<std::size_t>((far_row + 1) * format::scale_bytes));
    if (vast_scales == nullptr) GTEST_SKIP() << "too little memory is free";
    move(source.scales, vast_scales.get(), format::scale_bytes);
  }
  const device_array<world_type, index> indices(world, {far_row, 0, far_row + 1});
  output<world_type> out(world, 3, 0, poisons[0]);
  holdfast::gather_rows(world.stream(), source, flat<index>(indices.data(), 3), out.view());
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {1, 0, -1}));
}

REGISTER_TYPED_TEST_SUITE_P(GatherOf, WritesTheRowOfEachIndexAndNothingElse, ManyRowsAreGatheredSeveralAWarp,
                            TheFirstRowsBeyondASmallGather, ProgrammaticGathersWaitForThoseBefore,
                            InvalidIndicesAreZeroRows, InvalidIndicesReadNothing, APoolWithoutRowsHasNoValidIndex,
                            ALeadingChunkOfInvalidIndices, DuplicatesAreEqualRowsEachTime, RowsOfNaNReachNobodyElse,
                            RowLengthsAreClamped, AllLengthsZeroIsAllZeros, ALengthOfRankOneIndicesIsThatOfTheirOnlyRow,
                            ABlockTableTranslatesPositions, BlocksOutsideThePoolAreInvalid, BlocksMayHoldOneRow,
                            RowsNameTheirRequests, PagesAreWhereTheirStrideSays, AnyAlignment, ATailIsZeroRows,
                            ATailBehindNothingIsStillWritten, NothingToWriteIsNoNode,
                            IndicesOutputAndRemapMayHaveStrides, BytesAndFrameworkStreamsAreAccepted,
                            ReplayReadsTheIndicesOfTheDay, OffsetsPass32Bits);

// --- NVFP4, and refusals ---------------------------------------------------------------------------------------------------

/// What refused views point to.
alignas(16) inline std::byte somewhere[64];

/// Powers of two over the whole range (denormal products included), production's, thirds, random ones, and what breaks.
inline std::vector<float> many_global_scales() {
  std::vector<float> scales{1.0f, 100.0f / 2688.0f, 1.0f / 3.0f, 2.0f / 3.0f, 0.1f, 0.0f, -1.0f, -0.37f, 1e30f, 3e38f};
  for (const int exponent :
       {-149, -140, -133, -126, -120, -40, -20, -14, -10, -9, -8, -6, -3, -1, 1, 2, 5, 9, 40, 119, 127})
    scales.push_back(std::ldexp(1.0f, exponent));
  std::mt19937 random(5);
  for (int i = 0; i < 24; ++i)
    scales.push_back(std::ldexp(static_cast<float>(random() | 1u), -32 + static_cast<int>(random() % 24) - 12));
  scales.push_back(std::numeric_limits<float>::infinity());
  scales.push_back(std::numeric_limits<float>::quiet_NaN());
  return scales;
}

template <class World>
class GatherRows : public WorldTest<World> {};
TYPED_TEST_SUITE_P(GatherRows);

TYPED_TEST_P(GatherRows, EveryScaleWithEveryNibbleIsExact) {
  // 8 rows of 32 groups: 256 scale bytes; a group of 16: all nibbles
  byte_vector data(8 * 256), scales(256);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i % 8 * 0x22 + 0x10);
  for (std::size_t i = 0; i < 256; ++i) scales[i] = static_cast<std::byte>(i);
  pool_of<TypeParam, nvfp4_format> pool(this->world(), data, scales);
  const std::vector<std::int32_t> rows{0, 1, 2, 3, 4, 5, 6, 7};
  for (const float global_scale : many_global_scales()) {
    SCOPED_TRACE(global_scale);
    pool.global_scale = global_scale;
    this->expect_gather(pool, 1, rows);
  }
  for (const float global_scale : {1.0f, 100.0f / 2688.0f, 1.0f / 3.0f, std::ldexp(1.0f, -133), -3e38f}) {
    SCOPED_TRACE(global_scale);
    pool.global_scale = global_scale;
    this->expect_gather(pool, 1, many_of(rows));  // staged
  }
}

TYPED_TEST_P(GatherRows, ResidualsAddTwoExactProducts) {
  // 4 residual groups of 16 elements a row: in 4 rows each pair of nibbles; for every main scale some residual ones
  constexpr std::size_t scale_pairs = 256 * 4, rows = scale_pairs * 4;
  byte_vector data = random_bytes(rows * 288, 3), scales = random_bytes(rows * 36, 4);
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t group = 0; group < 4; ++group) {
      const std::size_t main_nibble = row % 4 * 4 + group, pair = row / 4;
      for (std::size_t i = 0; i < 8; ++i) {
        data[row * 288 + 224 + 16 * group + i] = static_cast<std::byte>(main_nibble * 0x11);
        data[row * 288 + 232 + 16 * group + i] = static_cast<std::byte>(i * 0x22 + 0x10);
      }
      scales[row * 36 + 28 + 2 * group] = static_cast<std::byte>(pair / 4);
      if (pair % 4 != 3)  // the others: random
        scales[row * 36 + 29 + 2 * group] = static_cast<std::byte>(pair / 4 + std::size_t{19} * (pair % 4) + 250);
    }
  pool_of<TypeParam, nvfp4_residual_format> pool(this->world(), data, scales);
  std::vector<std::int32_t> indices(rows);
  for (std::size_t i = 0; i < rows; ++i) indices[i] = static_cast<std::int32_t>(i);
  for (const float global_scale : {1.0f, 100.0f / 2688.0f, 1.0f / 3.0f, std::ldexp(1.0f, -133), -3e38f}) {
    SCOPED_TRACE(global_scale);
    pool.global_scale = global_scale;
    this->expect_gather(pool, 1, indices);
  }
}

TYPED_TEST_P(GatherRows, SignsOfZeroAndNaNAreAsSpecified) {
  auto& world = this->world();
  // nibbles +0 and -0 in turn; scales 1, -1, NaN, -NaN, 0
  byte_vector data(256), scales(32);
  std::fill(data.begin(), data.end(), std::byte{0x80});
  const std::array<unsigned, 5> some{0x38, 0xb8, 0x7f, 0xff, 0x00};
  for (std::size_t i = 0; i < 5; ++i) scales[i] = static_cast<std::byte>(some[i]);
  pool_of<TypeParam, nvfp4_format> pool(world, data, scales);
  pool.global_scale = 1;
  const std::array<std::array<unsigned, 2>, 5> should{
      {{0x00, 0x80}, {0x80, 0x00}, {0x7f, 0xff}, {0x7f, 0xff}, {0x00, 0x80}}};
  const auto row = pool.decoded(0);
  for (std::size_t group = 0; group < 5; ++group)
    for (std::size_t i = 0; i < 16; ++i)
      EXPECT_EQ(std::to_integer<unsigned>(row[16 * group + i]), should[group][i % 2]) << group << ", " << i;
  this->expect_gather(pool, 1, std::vector<std::int32_t>{0});
}

TYPED_TEST_P(GatherRows, ZerosAndExtremeScalesStayFinite) {
  auto& world = this->world();
  byte_vector data = random_bytes(3 * 256, 2), scales(3 * 32, std::byte{0x01});
  std::fill_n(data.begin(), 256, std::byte{0});  // row 0: zeros with scales of zero
  std::fill_n(scales.begin(), 32, std::byte{0});
  std::fill_n(scales.begin() + 64, 32, std::byte{0x7e});  // row 2: the largest scale
  pool_of<TypeParam, nvfp4_format> pool(world, data, scales);
  for (const float global_scale : {1e-30f, 1.0f, 1e30f}) {
    pool.global_scale = global_scale;
    for (const std::byte byte : pool.decoded(0)) ASSERT_EQ(byte, std::byte{0});
    for (const std::int64_t row : {1, 2})
      for (const std::byte byte : pool.decoded(row)) ASSERT_NE(byte & std::byte{0x7f}, std::byte{0x7f});
    this->expect_gather(pool, 1, std::vector<std::int32_t>{0, 1, 2});
  }
}

TYPED_TEST_P(GatherRows, ABrokenGlobalScaleLeavesInvalidRowsZero) {
  pool_of<TypeParam, nvfp4_format> pool(this->world(), 3);
  pool_of<TypeParam, nvfp4_residual_format> residual_pool(this->world(), 3);
  const std::vector<std::int32_t> indices{-1, 0, 3, -1};
  for (const float global_scale : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(),
                                   -std::numeric_limits<float>::infinity(), -1.0f}) {
    pool.global_scale = residual_pool.global_scale = global_scale;
    for (const auto& all : {indices, many_of(indices)}) {
      this->expect_gather(pool, 1, all, 2);
      this->expect_gather(residual_pool, 1, all, 2);
    }
  }
}

TYPED_TEST_P(GatherRows, AGlobalScaleInDeviceMemoryIsReadWhenItRuns) {
  auto& world = this->world();
  device_array<TypeParam, float> scale(world, {0.25f});
  pool_of<TypeParam, nvfp4_format> pool(world, 7);
  pool.global_scale = 1000;  // not used
  pool.global_scale_at = scale.data();
  const device_array<TypeParam, std::int32_t> indices(world, {6, 0});
  output<TypeParam> out(world, 2, 0, poisons[0]);
  auto recorded = world.record(
      [&] { holdfast::gather_rows(world.stream(), pool.given(), flat<std::int32_t>(indices.data(), 2), out.view()); });
  for (const float today : {0.25f, 100.0f / 2688.0f}) {
    scale.set({today});
    recorded.replay();
    pool.global_scale = today;  // what the reference uses
    EXPECT_TRUE(out.holds(pool, {6, 0}));
  }
}

TYPED_TEST_P(GatherRows, OutputsThatArriveUnalignedAreRefused) {
  auto& world = this->world();
  const auto memory = world.allocate(8192);
  const holdfast::fp8_rows source{.data = {.data = memory.get(), .rows = 4}};
  const auto* indices = reinterpret_cast<const std::int32_t*>(memory.get());
  const auto into = [&](std::int64_t shift, std::int64_t stride) {
    return [&world, source, indices, shift, stride, p = memory.get()] {
      holdfast::gather_rows(world.stream(), source, flat(indices, 2),
                            holdfast::make_strided_view<std::byte, 2>(p + 4096 + shift, {2, 512}, {stride, 1}));
    };
  };
  for (const std::int64_t shift : {1, 4, 8, 15}) this->expect_refused(into(shift, 512), {"gather_rows", "16"});
  for (const std::int64_t stride : {513, 520})
    this->expect_refused(into(0, stride), {"gather_rows", "multiples of 16"});
  this->expect_refused(into(0, 496), {"gather_rows", "rows of out overlap", "[496, 1]"});
}

TYPED_TEST_P(GatherRows, RefusalsNameWhatIsWrong) {
  auto& world = this->world();
  using index = std::int32_t;
  const auto* some = reinterpret_cast<const index*>(somewhere);
  const holdfast::row_pool good{.data = somewhere, .rows = 100};
  const auto out = [](std::int64_t rows, std::int64_t elements = 512, void* data = somewhere, std::int64_t step = 1) {
    return holdfast::make_strided_view<std::byte, 2>(static_cast<std::byte*>(data), {rows, elements}, {512, step});
  };
  const auto gather = [&](const auto& source, const auto& indices, const auto& to,
                          const holdfast::gather_options<index>& options = {}) {
    return
        [&world, source, indices, to, options] { holdfast::gather_rows(world.stream(), source, indices, to, options); };
  };
  const auto fp8 = [](const holdfast::row_pool& pool, const holdfast::block_table& table = {}) {
    return holdfast::fp8_rows{.data = pool, .table = table};
  };
  const auto pool = [&](const holdfast::row_pool& bad) { return gather(fp8(bad), flat(some, 8), out(8)); };
  constexpr std::int64_t vast = std::int64_t{1} << 62;

  // shapes
  this->expect_refused(gather(fp8(good), rows_of(some, 2, 4), out(7)),
                       {"gather_rows", "out has 7 rows for 8 indices", "[2, 4] of int32", "[7, 512]"});
  this->expect_refused(gather(fp8(good), rows_of(some, 2, 4), out(9)), {"gather_rows", "out has 9 rows for 8"});
  this->expect_refused(gather(fp8(good), rows_of(some, -2, 4), out(8)), {"indices has a negative extent", "[-2, 4]"});
  this->expect_refused(gather(fp8(good), flat(some, 8), out(8, 576)), {"576 elements, not 512"});
  this->expect_refused(gather(fp8(good), flat(some, 8), out(8, 512, somewhere, 2)), {"side by side", "[512, 2]"});
  this->expect_refused(gather(fp8(good), flat(some, 8), out(8), {.tail_rows = -1}), {"tail_rows is negative", "is -1"});
  this->expect_refused(gather(fp8(good), rows_of(some, vast, 2), out(8)), {"2^63"});
  this->expect_refused(gather(fp8(good), flat(some, 8), out(8), {.tail_rows = vast}), {"more than 4294967296"});

  // null data
  this->expect_refused(gather(fp8(good), flat<index>(nullptr, 8), out(8)), {"data of indices is null"});
  this->expect_refused(gather(fp8(good), flat(some, 8), out(8, 512, nullptr)), {"data of out is null"});
  this->expect_refused(gather(fp8(good), flat<index>(nullptr, 0), out(0, 512, nullptr), {.tail_rows = 1}),
                       {"data of out is null", "tail_rows is 1"});
  this->expect_refused(pool({.data = nullptr, .rows = 3}), {"pool of data is null", "3 rows"});

  // pools
  this->expect_refused(pool({.data = somewhere, .rows = -1}), {"pool of data has a negative", "-1 rows"});
  this->expect_refused(pool({.data = somewhere, .rows = 3, .row_stride_bytes = 511}),
                       {"rows that overlap", "511", "512"});
  this->expect_refused(pool({.data = somewhere, .rows = 3, .row_stride_bytes = -512}), {"negative", "-512"});
  this->expect_refused(pool({.data = somewhere, .rows = 3, .page_rows = 2, .page_stride_bytes = 100}),
                       {"pages that overlap", "100"});
  this->expect_refused(pool({.data = somewhere, .rows = 3, .page_stride_bytes = 100}), {"page stride, but no pages"});
  this->expect_refused(pool({.data = somewhere, .rows = 3, .page_rows = vast}), {"more than 2^31 - 1 rows"});
  this->expect_refused(pool({.data = somewhere, .rows = vast}), {"passes 2^63 - 1 bytes"});
  this->expect_refused(pool({.data = somewhere, .rows = 4, .row_stride_bytes = vast}), {"passes 2^63 - 1 bytes"});
  this->expect_refused(pool({.data = somewhere, .rows = 9, .page_rows = 2, .page_stride_bytes = vast}),
                       {"passes 2^63 - 1 bytes"});
  const holdfast::nvfp4_rows<> uneven{.data = good, .scales = {.data = somewhere, .rows = 99}};
  this->expect_refused(gather(uneven, flat(some, 8), out(8)), {"data has 100 rows, that of scales 99"});
  const holdfast::nvfp4_rows<64> narrow{.data = good,
                                        .scales = {.data = somewhere, .rows = 100, .row_stride_bytes = 32}};
  this->expect_refused(gather(narrow, flat(some, 8), out(8)), {"pool of scales has rows that overlap", "32", "36"});
  const holdfast::nvfp4_rows<> no_scales{.data = good, .scales = {.rows = 100}};
  this->expect_refused(gather(no_scales, flat(some, 8), out(8)), {"pool of scales is null"});

  // tables
  const holdfast::row_pool paged{.data = somewhere, .rows = 128, .page_rows = 64};
  this->expect_refused(gather(fp8(good, {.data = some, .requests = 1, .pages = 2}), flat(some, 8), out(8)),
                       {"block table needs a pool with pages"});
  this->expect_refused(gather(fp8(paged, {.requests = 1, .pages = 2}), flat(some, 8), out(8)),
                       {"block table is null, but [1, 2]"});
  this->expect_refused(gather(fp8(paged, {.data = some, .requests = -1, .pages = 2}), flat(some, 8), out(8)),
                       {"[-1, 2]"});
  this->expect_refused(
      gather(fp8(paged, {.data = some, .requests = 1, .pages = 2, .row_stride = 1}), flat(some, 8), out(8)),
      {"[1, 2] with a row stride of 1"});
  this->expect_refused(gather(fp8(paged, {.data = some, .requests = vast, .pages = 8}), flat(some, 8), out(8)),
                       {"block table passes 2^63"});
  this->expect_refused(gather(fp8(good), flat(some, 8), out(8), {.row_requests = some}),
                       {"row_requests needs a block table"});

  // the remap
  this->expect_refused(gather(fp8(good), flat(some, 8), out(8), {.remap = const_cast<index*>(some)}),
                       {"remap is indices"});
  auto* other = const_cast<index*>(some) + 1;
  this->expect_refused(gather(fp8(good), rows_of(some, 2, 4), out(8), {.remap = other, .remap_row_stride = 3}),
                       {"rows of remap overlap"});
  constexpr std::int64_t many = (std::int64_t{1} << 31) + 1;
  this->expect_refused(gather(fp8(good), flat(some, many), out(many), {.remap = other}), {"cannot number"});
  const auto far = holdfast::make_strided_view<const index, 2>(some, {4, 2}, {vast / 2, 1});
  this->expect_refused(gather(fp8(good), far, out(8)), {"offsets of indices"});
}

TYPED_TEST_P(GatherRows, ACallBesideSomebodysCaptureLeavesItWhole) {
  auto& world = this->world();
  pool_of<TypeParam, fp8_format> pool(world, 7);
  const device_array<TypeParam, std::int32_t> indices(world, {6, 0});
  output<TypeParam> out(world, 2, 0, poisons[0]);
  TypeParam somebody;
  const auto recorded = somebody.record([&] {  // in the global mode, which forbids unsafe calls to everybody
    holdfast::gather_rows(world.stream(), pool.given(), flat<std::int32_t>(indices.data(), 2), out.view());
  });
  EXPECT_EQ(recorded.nodes(), 0u);
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {6, 0}));
}

TYPED_TEST_P(GatherRows, CallsRunOnTheStreamsDevice) {
  if (TypeParam::devices() < 2) GTEST_SKIP() << "one GPU only";
  const int current = TypeParam::current_device();
  auto other = TypeParam::on_device(1 - current);
  pool_of<TypeParam, fp8_format> pool(other, 7);
  const device_array<TypeParam, std::int32_t> indices(other, {6, 0});
  output<TypeParam> out(other, 2, 0, poisons[0]);
  holdfast::gather_rows(other.stream(), pool.given(), flat<std::int32_t>(indices.data(), 2), out.view());
  EXPECT_EQ(TypeParam::current_device(), current);
  other.synchronize();
  EXPECT_TRUE(out.holds(pool, {6, 0}));
}

REGISTER_TYPED_TEST_SUITE_P(GatherRows, EveryScaleWithEveryNibbleIsExact, ResidualsAddTwoExactProducts,
                            SignsOfZeroAndNaNAreAsSpecified, ZerosAndExtremeScalesStayFinite,
                            ABrokenGlobalScaleLeavesInvalidRowsZero, AGlobalScaleInDeviceMemoryIsReadWhenItRuns,
                            OutputsThatArriveUnalignedAreRefused, RefusalsNameWhatIsWrong,
                            ACallBesideSomebodysCaptureLeavesItWhole, CallsRunOnTheStreamsDevice);

/// Staged gathers of more rows than are under way at once take another shape.
template <class World>
void expect_rows_beyond_one_wave(World& world) {
  constexpr std::int64_t rows = 61, pairs = holdfast::detail::most_rows_of_one_wave + 33, tail = 5;
  const pool_of<World, nvfp4_format> pool(world, rows);
  const auto named = random_indices<std::int32_t>(pairs, rows, 3);
  const device_array<World, std::int32_t> indices(world, named);
  output<World> out(world, pairs, tail, poisons[0]);
  holdfast::gather_rows(world.stream(), pool.given(), flat<std::int32_t>(indices.data(), pairs), out.view(),
                        {.tail_rows = tail});
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, named_by(named, rows)));
}

}  // namespace gather_test
