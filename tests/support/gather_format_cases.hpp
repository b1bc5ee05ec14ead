// What gather_rows must do with every format, to every type of output, but for those that gather_cases.hpp covers: typed
// suites over a world (kernel_host_world.hpp, kernel_cuda_world.cuh). What no format changes (row lengths, tables, strides
// of indices) is tested once for each here, and thoroughly there.
#pragma once

#include "support/gather_bytes.hpp"
#include "support/gather_format_reference.hpp"
#include "support/gather_world.hpp"

#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/row_decoder.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/row_encode.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gather_test {

/// The caller's format: 24 signed bytes, an fp32 scale, 4 bytes of nothing.
struct signed_bytes {
  static constexpr std::int32_t elements = 24, data_bytes = 32, scale_bytes = 0;

  struct packet {
    holdfast::raw_bytes<8> codes;
    holdfast::raw_bytes<4> scale;
  };
  template <class Row>
  HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {
    return {row.template data<8>(8 * at), row.template data<4>(24)};
  }
  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    float values[8];
    for (int i = 0; i < 8; ++i) {
      const auto code = static_cast<std::int32_t>(from.codes.word[i / 4] << (24 - 8 * (i % 4))) >> 24;
      values[i] = holdfast::exact_product(static_cast<float>(code), holdfast::float_of_bits(from.scale.word[0]));
    }
    to.put(values);
  }
};

template <class Element>
inline constexpr output_type type_of = std::is_same_v<Element, __nv_bfloat16> ? output_type::bf16
                                       : std::is_same_v<Element, __half>      ? output_type::fp16
                                                                              : output_type::e4m3;

/// A pool of rows of a format that become rows of `Element`. `data` says where pages are that have footers, too.
template <class World, class Format, class Element>
class format_pool {
 public:
  using element = Element;
  static constexpr std::int64_t elements = Format::elements;
  static constexpr bool footers = Format::where == scales_are::in_footers;

  /// Random rows; of every second one, the scales are tame.
  format_pool(World& world, std::int64_t rows, std::uint64_t seed = 1, const geometry& data = {},
              const geometry& scales = {})
      : format_pool(world, random_bytes(static_cast<std::size_t>(rows * Format::data_bytes), seed),
                    random_bytes(static_cast<std::size_t>(rows * Format::scale_bytes), seed + 1000), data, scales,
                    seed) {}

  format_pool(World& world, byte_vector data_rows, byte_vector scale_rows, const geometry& data = {},
              const geometry& scales = {}, std::uint64_t tame_by = 0)
      : data_rows_(std::move(data_rows)), scale_rows_(std::move(scale_rows)) {
    if constexpr (requires(std::byte * p, std::mt19937 & random) { Format::tame(p, p, random); }) {
      std::mt19937 random(static_cast<std::mt19937::result_type>(tame_by));
      for (std::int64_t row = 1; tame_by != 0 && row < rows(); row += 2)
        Format::tame(data_rows_.data() + row * Format::data_bytes, scale_rows_.data() + row * Format::scale_bytes,
                     random);
    }
    if constexpr (footers) {
      place_pages(world, data);
    } else {
      data_.emplace_back(world, data_rows_, Format::data_bytes, data);
      if (Format::where == scales_are::in_a_pool) scales_.emplace_back(world, scale_rows_, Format::scale_bytes, scales);
    }
  }

  [[nodiscard]] std::int64_t rows() const { return static_cast<std::int64_t>(data_rows_.size()) / Format::data_bytes; }
  [[nodiscard]] byte_vector decoded(std::int64_t i) const {
    return rounded_row(Format::decode(data_rows_.data() + i * Format::data_bytes,
                                      scale_rows_.data() + i * Format::scale_bytes, global_scale),
                       type_of<Element>);
  }

  [[nodiscard]] auto given() const {
    if constexpr (std::is_same_v<Format, v32_rows>) {
      return holdfast::flashmla_v32_rows{.data = data_[0].given(), .table = table};
    } else if constexpr (std::is_same_v<Format, v4_rows>) {
      return holdfast::flashmla_v4_rows{.data = pages_, .table = table};
    } else if constexpr (std::is_same_v<Format, v41_rows>) {
      return holdfast::flashmla_v41_rows{.data = pages_, .table = table};
    } else if constexpr (std::is_same_v<Format, vllm_rows>) {
      return holdfast::vllm_nvfp4_rows{
          .data = data_[0].given(), .global_scale = global_scale, .global_scale_at = global_scale_at, .table = table};
    } else if constexpr (std::is_same_v<Format, plain_fp8_rows>) {
      return holdfast::fp8_rows{.data = data_[0].given(), .table = table};
    } else if constexpr (Format::where == scales_are::in_a_pool) {
      return holdfast::nvfp4_rows < Format::elements == 512 && Format::data_bytes == 256
                 ? 0
                 : 64 > {.data = data_[0].given(),
                         .scales = scales_[0].given(),
                         .global_scale = global_scale,
                         .global_scale_at = global_scale_at,
                         .table = table};
    } else {
      return holdfast::formatted_rows<signed_bytes>{.data = data_[0].given(), .table = table};
    }
  }

  float global_scale = 100.0f / (448 * 6);
  const float* global_scale_at = nullptr;
  holdfast::block_table table{};

 private:
  void place_pages(World& world, const geometry& where) {
    const std::int64_t page_rows = where.page_rows == 0 ? 8 : where.page_rows;
    const std::int64_t footer = page_rows * Format::data_bytes;
    std::int64_t stride = where.page_stride;
    if constexpr (footers) {
      const std::int64_t bytes = footer + page_rows * Format::scale_bytes, multiple = Format::page_multiple;
      if (stride == 0) stride = (bytes + multiple - 1) / multiple * multiple;
    }
    std::int64_t end = 0;
    const auto place = [&](byte_vector* buffer) {
      for (std::int64_t i = 0; i < rows(); ++i) {
        const std::int64_t page = where.shift + i / page_rows * stride, row = i % page_rows;
        const std::int64_t data = page + row * Format::data_bytes, scales = page + footer + row * Format::scale_bytes;
        end = std::max(end, scales + Format::scale_bytes);
        if (buffer == nullptr) continue;
        std::memcpy(buffer->data() + data, data_rows_.data() + i * Format::data_bytes, Format::data_bytes);
        std::memcpy(buffer->data() + scales, scale_rows_.data() + i * Format::scale_bytes, Format::scale_bytes);
      }
    };
    place(nullptr);
    byte_vector buffer(static_cast<std::size_t>(std::max<std::int64_t>(end, 1)), std::byte{0x7f});
    place(&buffer);
    memory_ = world.allocate(buffer.size());  // the last page ends with its last row's scales
    world.upload(memory_.get(), buffer.data(), buffer.size());
    // The type is named because nvcc 13.0 takes an assigned list for one without names, in a template.
    pages_ = holdfast::row_pool{.data = memory_.get() + where.shift,
                                .rows = rows(),
                                .page_rows = page_rows,
                                .page_stride_bytes = where.page_stride};
  }

  byte_vector data_rows_, scale_rows_;
  std::vector<placed_pool<World>> data_, scales_;
  std::shared_ptr<std::byte> memory_;
  holdfast::row_pool pages_;
};

template <class World, class Format, class Element, class Index = std::int32_t>
struct format_subject {
  using world = World;
  using format = Format;
  using element = Element;
  using index = Index;
};

template <class World>
using every_format = ::testing::Types<
    format_subject<World, v32_rows, __nv_bfloat16>, format_subject<World, v32_rows, __half>,
    format_subject<World, v4_rows, __nv_bfloat16>, format_subject<World, v4_rows, __nv_fp8_e4m3>,
    format_subject<World, v41_rows, __nv_fp8_e4m3>, format_subject<World, v41_rows, __half>,
    format_subject<World, vllm_rows, __nv_bfloat16, std::int64_t>, format_subject<World, plain_fp8_rows, __nv_bfloat16>,
    format_subject<World, nvfp4_pool_rows<0>, __half>, format_subject<World, nvfp4_pool_rows<64>, __nv_bfloat16>,
    format_subject<World, callers_rows, __nv_bfloat16>>;

template <class Subject>
class GatherFormat : public WorldTest<typename Subject::world> {
 public:
  using its_world = typename Subject::world;
  using its_format = typename Subject::format;
  using its_element = typename Subject::element;
  using its_index = typename Subject::index;
  using its_pool = format_pool<its_world, its_format, its_element>;
  using its_indices = std::vector<its_index>;
  static constexpr std::int64_t row_width = its_format::elements * static_cast<std::int64_t>(sizeof(its_element));

  output<its_world> make_output(std::int64_t pairs, std::int64_t tail = 0, std::byte poison = poisons[0]) {
    return {this->world(), pairs, tail, poison, row_width, row_width};
  }
};
TYPED_TEST_SUITE_P(GatherFormat);

TYPED_TEST_P(GatherFormat, WritesTheRowOfEachIndexAndNothingElse) {
  using index = typename TestFixture::its_index;
  const typename TestFixture::its_pool pool(this->world(), 37);
  std::uint64_t seed = 0;
  for (const std::int64_t rows : {1, 3, 33})
    for (const std::int64_t topk : {1, 7, 64}) {
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(topk));
      ++seed;
      this->expect_gather(pool, rows, random_indices<index>(rows * topk, 37, seed), static_cast<std::int64_t>(seed % 3),
                          poisons[seed % 2]);
    }
}

TYPED_TEST_P(GatherFormat, ManyRowsInEveryGeometry) {
  using index = typename TestFixture::its_index;
  using format = typename TestFixture::its_format;
  constexpr std::int64_t width = format::data_bytes, scales = format::scale_bytes;
  // strides of data, and of scales in a pool of their own; pages with footers have only page strides
  std::vector<std::pair<geometry, geometry>> cases{{{}, {}}};
  if constexpr (TestFixture::its_pool::footers) {
    const auto page = [](std::int64_t rows) { return rows * (width + scales); };
    cases.insert(cases.end(), {{{.page_rows = 64}, {}},
                               {{.page_rows = 1}, {}},
                               {{.page_rows = 7}, {}},
                               {{.page_rows = 5, .page_stride = page(5)}, {}},  // no padding
                               {{.page_rows = 64, .page_stride = page(64) + 4096, .shift = 16}, {}},
                               {{.page_rows = 8, .page_stride = page(8) + 8}, {}},
                               {{.page_rows = 8, .page_stride = page(8) + 1}, {}},
                               {{.page_rows = 61, .page_stride = page(61) + 3}, {}},
                               {{.page_rows = 16, .shift = 8}, {}},
                               {{.page_rows = 16, .shift = 1}, {}}});
  } else {
    cases.insert(cases.end(), {{{.shift = 16}, {.shift = 4}},
                               {{.row_stride = width + 16}, {.row_stride = scales + 16}},
                               {{.page_rows = 7, .page_stride = 7 * width + 32}, {.page_rows = 5}},
                               {{.shift = 8}, {}},
                               {{.row_stride = width + 8}, {}},
                               {{.page_rows = 7, .page_stride = 7 * width + 8}, {}},
                               {{.shift = 4}, {.shift = 1}},
                               {{.row_stride = width + 1}, {.row_stride = scales + 1}}});
  }
  std::uint64_t seed = 0;
  for (const auto& [where, where_scales] : cases) {
    SCOPED_TRACE("row stride " + std::to_string(where.row_stride) + ", pages of " + std::to_string(where.page_rows) +
                 " with a stride of " + std::to_string(where.page_stride) + ", shifted by " +
                 std::to_string(where.shift));
    ++seed;
    const typename TestFixture::its_pool pool(this->world(), 61, seed, where, where_scales);
    auto indices = random_indices<index>(many_pairs, 61, seed);
    std::fill_n(indices.begin() + 16, 48, index{-1});  // warps of nothing else
    this->expect_gather(pool, 1, indices, static_cast<std::int64_t>(seed % 2) * 40, poisons[seed / 2 % 2]);
    this->expect_gather(pool, 1, random_indices<index>(29, 61, seed), 3);  // a few, in the same place
  }
}

TYPED_TEST_P(GatherFormat, InvalidIndicesAreZeroRows) {
  using index = typename TestFixture::its_index;
  using format = typename TestFixture::its_format;
  // rows of NaN in between: were they read, they would show
  auto data = random_bytes(static_cast<std::size_t>(6 * format::data_bytes), 3);
  auto scales = random_bytes(static_cast<std::size_t>(6 * format::scale_bytes), 4);
  for (const std::int64_t row : {1, 5}) {
    std::fill_n(data.begin() + row * format::data_bytes, format::data_bytes, std::byte{0xff});
    std::fill_n(scales.begin() + row * format::scale_bytes, format::scale_bytes, std::byte{0xff});
  }
  typename TestFixture::its_pool pool(this->world(), data, scales);
  pool.global_scale = std::numeric_limits<float>::quiet_NaN();  // of formats that have one: no zero row's business
  typename TestFixture::its_indices indices{-1, 0, int_min, 4, int_max, 6, 3, -123456, 2147480000, 2, 7, -2};
  if constexpr (sizeof(index) == 8)
    indices.insert(indices.end(), {std::numeric_limits<index>::min(), std::numeric_limits<index>::max(), index{1} << 32,
                                   (index{1} << 32) + 1, -(index{1} << 32)});
  for (const std::byte poison : poisons)
    for (const auto& all : {indices, many_of(indices)}) this->expect_gather(pool, 1, all, 2, poison);
}

TYPED_TEST_P(GatherFormat, InvalidIndicesReadNothing) {
  using index = typename TestFixture::its_index;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 5);
  auto source = pool.given();
  source.data.data = reinterpret_cast<const void*>(std::uintptr_t{256});  // whoever reads it faults
  if constexpr (TestFixture::its_format::where == scales_are::in_a_pool) source.scales.data = source.data.data;
  const typename TestFixture::its_indices some{-1, int_min, int_max, 5, -123456, 2147480000, -2, 6};
  for (const auto& indices : {some, many_of(some)}) {
    const auto pairs = static_cast<std::int64_t>(indices.size());
    const device_array<typename TestFixture::its_world, index> on_device(world, indices);
    auto out = this->make_output(pairs);
    holdfast::gather_rows(world.stream(), source, flat<index>(on_device.data(), pairs),
                          out.template view<typename TestFixture::its_element>());
    world.synchronize();
    EXPECT_TRUE(out.holds(pool, std::vector<std::int64_t>(indices.size(), -1)));
  }
}

TYPED_TEST_P(GatherFormat, NothingButATailIsZeros) {
  using index = typename TestFixture::its_index;
  using element = typename TestFixture::its_element;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 5);
  auto out = this->make_output(0, 128, poisons[1]);
  holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(nullptr, 4, 0), out.template view<element>(),
                        {.tail_rows = 128});
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {}));
  auto recorded = world.record([&] {
    holdfast::gather_rows(world.stream(), pool.given(), flat<index>(nullptr, 0),
                          holdfast::view<element, 2>(nullptr, 0, TestFixture::its_format::elements));
  });
  EXPECT_EQ(recorded.nodes(), 0u);
  auto none = pool.given();  // no rows, no memory, no valid index
  none.data.rows = 0;
  none.data.data = nullptr;
  if constexpr (TestFixture::its_format::where == scales_are::in_a_pool) none.scales = {};
  const device_array<typename TestFixture::its_world, index> indices(world, {0, -1, 1});
  auto three = this->make_output(3);
  holdfast::gather_rows(world.stream(), none, flat<index>(indices.data(), 3), three.template view<element>());
  world.synchronize();
  EXPECT_TRUE(three.holds(pool, {-1, -1, -1}));
}

TYPED_TEST_P(GatherFormat, TablesLengthsStridesAndReplays) {
  using index = typename TestFixture::its_index;
  using element = typename TestFixture::its_element;
  using world_type = typename TestFixture::its_world;
  auto& world = this->world();
  typename TestFixture::its_pool pool(world, 6 * 4 + 2, 1, {.page_rows = 4}, {.page_rows = 4});  // a last page of 2
  const device_array<world_type, std::int32_t> table(world, {5, 0, 77, 6, 3});                   // rows of two, 3 apart
  pool.table = {.data = table.data(), .requests = 2, .pages = 2, .row_stride = 3};
  const device_array<world_type, std::int32_t> requests(world, {1, 0, 2, -1});
  device_array<world_type, std::int32_t> lengths(world, {3, int_max, 3, 3});
  device_array<world_type, index> indices(world, {0, 2, 7, 0, 7, 8, 0, 7, 1, 0, 7, 1});
  constexpr std::int64_t width = TestFixture::row_width, stride = width + 64;
  output<world_type> out(world, 12, 1, poisons[0], stride, width);
  auto recorded = world.record([&] {
    holdfast::gather_rows(world.stream(), pool.given(), rows_of<index>(indices.data(), 4, 3),
                          out.template view<element>(),
                          {.tail_rows = 1, .row_lengths = lengths.data(), .row_requests = requests.data()});
  });
  EXPECT_EQ(recorded.nodes(), 1u);
  EXPECT_TRUE(out.untouched());
  recorded.replay();
  EXPECT_TRUE(out.holds(pool, {24, -1, 15, 20, 3, -1, -1, -1, -1, -1, -1, -1}));
  lengths.set({1, 2, 0, -5});
  indices.set({1, 2, 7, 4, 5, 6, 0, 7, 1, 0, 7, 1});
  out.poison_again();
  recorded.replay();
  EXPECT_TRUE(out.holds(pool, {25, -1, -1, 0, 1, -1, -1, -1, -1, -1, -1, -1}));
}

TYPED_TEST_P(GatherFormat, ProgrammaticGathersWaitForThoseBefore) {
  using index = typename TestFixture::its_index;
  using element = typename TestFixture::its_element;
  auto& world = this->world();
  const typename TestFixture::its_pool pool(world, 61);
  const auto values = random_indices<index>(many_pairs, 61, 7);
  const device_array<typename TestFixture::its_world, index> indices(world, values);
  device_array<typename TestFixture::its_world, index> remap(world, std::vector<index>(values.size(), 3));
  auto first = this->make_output(many_pairs), second = this->make_output(many_pairs, 8, poisons[1]);
  holdfast::gather_rows(world.stream(), pool.given(), flat<index>(indices.data(), many_pairs),
                        first.template view<element>(), {.remap = remap.data(), .programmatic = true});
  holdfast::gather_rows(world.stream(), pool.given(), flat<const index>(remap.data(), many_pairs),
                        second.template view<element>(), {.tail_rows = 8, .programmatic = true});
  world.synchronize();
  const auto named = named_by(values, 61);
  EXPECT_TRUE(first.holds(pool, named));
  EXPECT_TRUE(second.holds(pool, named_by(remap_of<index>(named), 61)));
}

TYPED_TEST_P(GatherFormat, AnyAlignment) {
  using format = typename TestFixture::its_format;
  const typename TestFixture::its_indices indices{6, 1, -1, 0, 5};
  for (const std::int64_t shift : {0, 1, 2, 4, 8, 12, 15, 16}) {
    SCOPED_TRACE(shift);
    const typename TestFixture::its_pool pool(
        this->world(), 7, 5,
        {.row_stride = TestFixture::its_pool::footers ? 0 : format::data_bytes + shift % 5, .shift = shift},
        {.row_stride = format::scale_bytes + shift % 3, .shift = 16 - shift});
    this->expect_gather(pool, 1, indices, 1);
  }
}

TYPED_TEST_P(GatherFormat, OffsetsPass32Bits) {
  using index = typename TestFixture::its_index;
  using element = typename TestFixture::its_element;
  using format = typename TestFixture::its_format;
  auto& world = this->world();
  const auto vast = world.allocate_vast(std::size_t{5} << 30);
  if (vast == nullptr) GTEST_SKIP() << "fewer than 10 GiB are free";
  constexpr std::int64_t stride = std::int64_t{1} << 30;  // a page of one row each GiB
  const typename TestFixture::its_pool pool(world, 5, 11, {.page_rows = 1}, {.page_rows = 1});
  auto source = pool.given();
  const std::int64_t now = TestFixture::its_pool::footers ? 2 * format::data_bytes : format::data_bytes;
  constexpr std::int64_t bytes = format::data_bytes + (TestFixture::its_pool::footers ? format::scale_bytes : 0);
  if constexpr (TestFixture::its_pool::footers) {
    ASSERT_EQ(holdfast::page_bytes<format>(1), now);
  }
  for (std::int64_t row = 0; row < 5; ++row) {
    byte_vector one(static_cast<std::size_t>(bytes));
    world.download(one.data(), static_cast<const std::byte*>(source.data.data) + row * now, one.size());
    world.upload(vast.get() + row * stride, one.data(), one.size());
  }
  source.data.data = vast.get();
  source.data.page_rows = 1;
  source.data.page_stride_bytes = stride;
  const typename TestFixture::its_indices some{4, 0, 3, 1, 2, 5};
  for (const auto& indices : {some, many_of(some)}) {
    const auto pairs = static_cast<std::int64_t>(indices.size());
    const device_array<typename TestFixture::its_world, index> on_device(world, indices);
    auto out = this->make_output(pairs);
    holdfast::gather_rows(world.stream(), source, flat<index>(on_device.data(), pairs), out.template view<element>());
    world.synchronize();
    EXPECT_TRUE(out.holds(pool, named_by(indices, 5)));
  }
}

TYPED_TEST_P(GatherFormat, EveryCodeWithEveryScaleIsExact) {
  using format = typename TestFixture::its_format;
  using index = typename TestFixture::its_index;
  if constexpr (requires { format::exhaustive(); }) {
    const every_code codes = format::exhaustive();
    typename TestFixture::its_pool pool(this->world(), codes.data, codes.scales);
    std::vector<index> rows;
    for (std::int64_t row = 0; row < pool.rows(); ++row) rows.push_back(static_cast<index>(row));
    for (const float global_scale : {1.0f, 100.0f / 2688.0f, 1.0f / 3.0f, std::ldexp(1.0f, -133), -3e38f,
                                     std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      SCOPED_TRACE(global_scale);
      pool.global_scale = global_scale;
      this->expect_gather(pool, 1, rows);
      this->expect_gather(pool, 1, many_of(rows));
      if (format::where != scales_are::in_a_pool && !std::is_same_v<format, vllm_rows>) break;  // it has none
    }
  } else {
    GTEST_SKIP() << "random rows will do";
  }
}

TYPED_TEST_P(GatherFormat, AGlobalScaleInDeviceMemoryIsReadWhenItRuns) {
  using format = typename TestFixture::its_format;
  using index = typename TestFixture::its_index;
  auto& world = this->world();
  if (format::where != scales_are::in_a_pool && !std::is_same_v<format, vllm_rows>) GTEST_SKIP() << "it has none";
  device_array<typename TestFixture::its_world, float> scale(world, {0.25f});
  typename TestFixture::its_pool pool(world, 7);
  pool.global_scale = 1000;  // not used
  pool.global_scale_at = scale.data();
  const device_array<typename TestFixture::its_world, index> indices(world, {6, 0});
  auto out = this->make_output(2);
  auto recorded = world.record([&] {
    holdfast::gather_rows(world.stream(), pool.given(), flat<index>(indices.data(), 2),
                          out.template view<typename TestFixture::its_element>());
  });
  for (const float today : {0.25f, 100.0f / 2688.0f}) {
    scale.set({today});
    recorded.replay();
    pool.global_scale = today;  // what the reference uses
    EXPECT_TRUE(out.holds(pool, {6, 0}));
  }
}

/// The library's row of a format, to encode.
template <class Format>
struct row_of;
template <>
struct row_of<v32_rows> : std::type_identity<holdfast::flashmla_v32_row> {};
template <>
struct row_of<v4_rows> : std::type_identity<holdfast::flashmla_v4_row> {};
template <>
struct row_of<v41_rows> : std::type_identity<holdfast::flashmla_v41_row> {};
template <>
struct row_of<vllm_rows> : std::type_identity<holdfast::vllm_nvfp4_row> {};
template <>
struct row_of<plain_fp8_rows> : std::type_identity<holdfast::fp8_row> {};
template <int Residual>
struct row_of<nvfp4_pool_rows<Residual>> : std::type_identity<holdfast::nvfp4_row<Residual>> {};

TYPED_TEST_P(GatherFormat, EncodedRowsComeBack) {
  using format = typename TestFixture::its_format;
  using index = typename TestFixture::its_index;
  if constexpr (requires { typename row_of<format>::type; }) {
    using row = typename row_of<format>::type;
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> values;
    for (std::int64_t i = 0; i < 9 * row::elements; ++i)
      values.push_back(i < row::elements ? 0 : std::ldexp(normal(random), static_cast<int>(i / row::elements) - 4));
    byte_vector data(9 * row::data_bytes), scales(9 * row::scale_bytes + 1);
    for (std::int64_t i = 0; i < 9; ++i)
      holdfast::encode_row<row>(std::span<const float>(values).subspan(static_cast<std::size_t>(i * row::elements),
                                                                       std::size_t{row::elements}),
                                data.data() + i * row::data_bytes, scales.data() + i * row::scale_bytes,
                                {.global_scale = 0.0372f});
    scales.pop_back();
    typename TestFixture::its_pool pool(this->world(), data, scales);
    pool.global_scale = 0.0372f;
    this->expect_gather(pool, 1, std::vector<index>{0, 1, 2, 3, 4, 5, 6, 7, 8});
    for (std::int64_t i = 0; i < 9; ++i) {  // and what was gathered is what was encoded, as well as the format can
      const auto decoded =
          format::decode(data.data() + i * row::data_bytes, scales.data() + i * row::scale_bytes, 0.0372f);
      for (std::int64_t at = 0; at < row::elements; ++at) {
        const float value = values[static_cast<std::size_t>(i * row::elements + at)];
        const float coarse = i == 0 ? 0 : std::ldexp(1.5f, static_cast<int>(i) - 4);  // e2m1 of a group up to 4 sigma
        ASSERT_NEAR(decoded[static_cast<std::size_t>(at)].value, value, std::fabs(value) / 16 + coarse)
            << "row " << i << ", " << at;
      }
    }
  } else {
    GTEST_SKIP() << "nobody encodes it";
  }
}

REGISTER_TYPED_TEST_SUITE_P(GatherFormat, WritesTheRowOfEachIndexAndNothingElse, ManyRowsInEveryGeometry,
                            InvalidIndicesAreZeroRows, InvalidIndicesReadNothing, NothingButATailIsZeros,
                            TablesLengthsStridesAndReplays, ProgrammaticGathersWaitForThoseBefore, AnyAlignment,
                            OffsetsPass32Bits, EveryCodeWithEveryScaleIsExact,
                            AGlobalScaleInDeviceMemoryIsReadWhenItRuns, EncodedRowsComeBack);

// --- whatever the world ------------------------------------------------------------------------------------------------------

/// What refused views point to.
alignas(16) inline std::byte format_memory[64];

template <class World>
class GatherFormats : public WorldTest<World> {
 public:
  using its_device = std::conditional_t<std::is_same_v<typename World::stream_type, holdfast::host::stream_ref>,
                                        holdfast::host_device, holdfast::cuda_device>;
};
TYPED_TEST_SUITE_P(GatherFormats);

TYPED_TEST_P(GatherFormats, ScratchHoldsRowsOf576Elements) {
  using device = typename TestFixture::its_device;
  auto& world = this->world();
  const format_pool<TypeParam, v32_rows, __nv_bfloat16> pool(world, 37);
  holdfast::tail_padded_allocator<__nv_bfloat16, device> allocator{
      holdfast::default_resource(device{0}), {.row_elements = 576, .over_read = holdfast::over_read::rows_beyond(3)}};
  const device_array<TypeParam, std::int32_t> indices(world, {4, -1, 36, 37});
  const auto rows =
      holdfast::gather_rows(world.stream(), pool.given(), flat<std::int32_t>(indices.data(), 4), allocator);
  byte_vector now(7 * 1152), should;
  world.synchronize();
  world.download(now.data(), reinterpret_cast<const std::byte*>(rows.data()), now.size());
  for (const std::int64_t row : {4, -1, 36, -1, -1, -1, -1}) {
    const auto bytes = row < 0 ? byte_vector(1152) : pool.decoded(row);
    should.insert(should.end(), bytes.begin(), bytes.end());
  }
  EXPECT_TRUE(same(now, should));
  holdfast::tail_padded_allocator<__nv_bfloat16, device> narrow{holdfast::default_resource(device{0}),
                                                                {.row_elements = 512}};
  this->expect_refused(
      [&] {
        static_cast<void>(
            holdfast::gather_rows(world.stream(), pool.given(), flat<std::int32_t>(indices.data(), 4), narrow));
      },
      {"rows of 512 elements", "it has rows of 576"});
}

TYPED_TEST_P(GatherFormats, RefusalsNameWhatIsWrong) {
  auto& world = this->world();
  const auto* some = reinterpret_cast<const std::int32_t*>(format_memory);
  const auto gather = [&]<class Element = __nv_bfloat16>(const auto& source, std::int64_t elements,
                                                         std::int64_t stride = 576, std::int64_t shift = 0) {
    return [&world, some, source, elements, stride, shift] {
      holdfast::gather_rows(world.stream(), source, flat(some, 8),
                            holdfast::make_strided_view(reinterpret_cast<Element*>(format_memory + shift),
                                                        {std::int64_t{8}, elements}, {stride, std::int64_t{1}}));
    };
  };
  const holdfast::row_pool good{.data = format_memory, .rows = 100};
  // outputs
  this->expect_refused(gather(holdfast::flashmla_v32_rows{.data = good}, 512), {"512 elements, not 576"});
  this->expect_refused(gather(holdfast::flashmla_v32_rows{.data = good}, 576, 575), {"rows of out overlap"});
  this->expect_refused(gather(holdfast::flashmla_v32_rows{.data = good}, 576, 577), {"multiples of 16"});
  this->expect_refused(gather(holdfast::flashmla_v32_rows{.data = good}, 576, 576, 8), {"8 bytes after a multiple"});
  this->expect_refused(gather(holdfast::flashmla_v32_rows{.data = good}, 576, std::int64_t{1} << 62), {"2^63"});
  // pools
  this->expect_refused(gather(holdfast::flashmla_v32_rows{.data = {.rows = 3}}, 576), {"pool of data is null"});
  this->expect_refused(
      gather(holdfast::flashmla_v32_rows{.data = {.data = format_memory, .rows = 3, .row_stride_bytes = 640}}, 576),
      {"rows that overlap", "656"});
  this->expect_refused(gather(holdfast::flashmla_v32_rows{.data = good, .scales = good}, 576),
                       {"scales is given, but this format has none"});
  this->expect_refused(gather(holdfast::vllm_nvfp4_rows{.data = {.data = format_memory, .rows = -1}}, 576),
                       {"negative"});
  // footers
  const auto pages = [&](const holdfast::row_pool& bad) {
    return gather(holdfast::flashmla_v4_rows{.data = bad}, 512);
  };
  this->expect_refused(pages(good), {"footers", "page_rows is 0"});
  this->expect_refused(pages({.data = format_memory, .rows = 3, .row_stride_bytes = 584, .page_rows = 64}),
                       {"side by side", "576", "584"});
  this->expect_refused(pages({.data = format_memory, .rows = 3, .page_rows = 64, .page_stride_bytes = 64 * 584 - 1}),
                       {"37376", "37375"});
  this->expect_refused(pages({.data = format_memory, .rows = 3, .page_rows = std::int64_t{1} << 40}), {"page_rows is"});
  this->expect_refused(pages({.data = format_memory, .rows = std::int64_t{1} << 60, .page_rows = 64}), {"2^63"});
  this->expect_refused(pages({.rows = 3, .page_rows = 64}), {"is null"});
  this->expect_refused(
      gather(holdfast::flashmla_v41_rows{.data = {.data = format_memory, .rows = 3, .page_rows = 64}, .scales = good},
             512),
      {"in its pages"});
}

REGISTER_TYPED_TEST_SUITE_P(GatherFormats, ScratchHoldsRowsOf576Elements, RefusalsNameWhatIsWrong);

}  // namespace gather_test
