// What gather_selected must do, wherever it runs: typed suites over a world (kernel_host_world.hpp,
// kernel_cuda_world.cuh). The reference is a std::set of the rows that are named. Output, remap, counts and workspace
// lie between canaries and start poisoned (a workspace by zeros, too: row 0, were it read); pools lie in buffers whose
// other bytes are 0x7f (NaN, should they be read), and so are all rows that no valid index names.
#pragma once

#if defined(__CUDACC__)
#include <holdfast/kernel/gather_selected.cuh>
#else
#include <holdfast/kernel/gather_selected.hpp>
#endif
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/tail_padded_allocator.hpp>
#include <holdfast/view.hpp>

#include "support/gather_reference.hpp"

#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace selected_test {

using gather_test::byte_vector;
using gather_test::fp8_format;
using gather_test::nvfp4_format;
using gather_test::nvfp4_residual_format;
using gather_test::row_bytes;

inline constexpr std::size_t canary = 256;
inline constexpr std::int32_t int_max = std::numeric_limits<std::int32_t>::max();

/// Device memory between canaries.
template <class World>
class guarded {
 public:
  guarded(World& world, std::size_t bytes, std::byte poison, std::size_t shift = 0)
      : world_(&world), bytes_(bytes), shift_(shift), all_(2 * canary + bytes, poison) {
    memory_ = world.allocate(all_.size());
    poison_again();
  }
  void poison_again() { world_->upload(memory_.get(), all_.data(), all_.size()); }
  template <class T = std::byte>
  [[nodiscard]] T* data() const {
    return reinterpret_cast<T*>(memory_.get() + canary - shift_);
  }
  template <class T = std::byte>
  [[nodiscard]] std::vector<T> now() {
    byte_vector read(all_.size());
    world_->download(read.data(), memory_.get(), read.size());
    const std::size_t begin = canary - shift_;
    for (std::size_t i = 0; i < read.size(); ++i)
      if (i < begin || i >= begin + bytes_) {
        EXPECT_EQ(read[i], all_[i]) << "a canary, byte " << i;
        if (read[i] != all_[i]) break;
      }
    std::vector<T> values(bytes_ / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), read.data() + begin, values.size() * sizeof(T));
    return values;
  }
  [[nodiscard]] std::span<std::byte> span() const { return {data(), bytes_}; }

 private:
  World* world_;
  std::size_t bytes_, shift_;
  byte_vector all_;
  std::shared_ptr<std::byte> memory_;
};

template <class World, class T>
class uploaded {
 public:
  uploaded(World& world, const std::vector<T>& values) : world_(&world) {
    memory_ = world.allocate(std::max<std::size_t>(values.size() * sizeof(T), 1));
    set(values);
  }
  void set(const std::vector<T>& values) {
    if (!values.empty()) world_->upload(memory_.get(), values.data(), values.size() * sizeof(T));
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.get()); }

 private:
  World* world_;
  std::shared_ptr<std::byte> memory_;
};

/// A pool of random rows, those in `live`; all others are NaN (for NVFP4: by their scales).
template <class World, class Format>
class pool_of {
 public:
  pool_of(World& world, std::int64_t rows, const std::set<std::int64_t>& live, std::int64_t page_rows = 0)
      : rows_(rows),
        page_rows_(page_rows),
        data_(bytes(rows * Format::data_bytes)),
        scales_(bytes(rows * Format::scale_bytes)) {
    std::mt19937_64 random(static_cast<std::uint64_t>(rows));
    for (const std::int64_t row : live) {
      for (std::int64_t i = 0; i < Format::data_bytes; ++i)
        data_[bytes(row * Format::data_bytes + i)] = static_cast<std::byte>(random() % 0x7f);
      for (std::int64_t i = 0; i < Format::scale_bytes; ++i)
        scales_[bytes(row * Format::scale_bytes + i)] = static_cast<std::byte>(0x20 + random() % 0x20);
    }
    for (std::int64_t row = 0; row < rows; ++row)
      if (!live.contains(row)) {
        std::fill_n(data_.begin() + row * Format::data_bytes, Format::data_bytes, std::byte{0x7f});
        std::fill_n(scales_.begin() + row * Format::scale_bytes, Format::scale_bytes, std::byte{0x7f});
      }
    on_device_ = std::make_unique<uploaded<World, std::byte>>(world, data_);
    scales_on_device_ = std::make_unique<uploaded<World, std::byte>>(world, scales_);
  }

  [[nodiscard]] auto given(const holdfast::block_table& table = {}) const {
    const holdfast::row_pool data{.data = on_device_->data(), .rows = rows_, .page_rows = page_rows_};
    if constexpr (Format::residual < 0) {
      return holdfast::fp8_rows{.data = data, .table = table};
    } else {
      return holdfast::nvfp4_rows<Format::residual>{
          .data = data,
          .scales = {.data = scales_on_device_->data(), .rows = rows_, .page_rows = page_rows_},
          .global_scale = global_scale,
          .table = table};
    }
  }
  [[nodiscard]] row_bytes decoded(std::int64_t row) const {
    return Format::decode(data_.data() + row * Format::data_bytes, scales_.data() + row * Format::scale_bytes,
                          global_scale);
  }
  [[nodiscard]] std::int64_t rows() const { return rows_; }

  static constexpr float global_scale = 100.0f / (448 * 6);

 private:
  static std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count); }

  std::int64_t rows_, page_rows_;
  byte_vector data_, scales_;
  std::unique_ptr<uploaded<World, std::byte>> on_device_, scales_on_device_;
};

/// What must come out for pairs that name these rows (-1: none).
struct expected {
  std::vector<std::int64_t> rows;   // of the output
  std::vector<std::int64_t> remap;  // of each pair
  std::int64_t selected = 0;

  expected(const std::vector<std::int64_t>& named, std::int64_t capacity) {
    std::set<std::int64_t> distinct(named.begin(), named.end());
    distinct.erase(-1);
    selected = static_cast<std::int64_t>(distinct.size());
    for (const std::int64_t row : distinct)
      if (static_cast<std::int64_t>(rows.size()) < capacity) rows.push_back(row);
    for (const std::int64_t row : named) {
      const auto at = std::find(rows.begin(), rows.end(), row);
      remap.push_back(at == rows.end() ? -1 : at - rows.begin());
    }
  }
};

template <class Index>
std::vector<std::int64_t> named_by(const std::vector<Index>& indices, std::int64_t rows) {
  std::vector<std::int64_t> named;
  for (const Index index : indices) named.push_back(index >= 0 && index < rows ? static_cast<std::int64_t>(index) : -1);
  return named;
}

inline std::set<std::int64_t> live_of(const std::vector<std::int64_t>& named) {
  std::set<std::int64_t> live(named.begin(), named.end());
  live.erase(-1);
  return live;
}

/// The bytes of the output and its tail.
template <class Pool>
byte_vector bytes_of(const Pool& pool, const expected& should, std::int64_t rows) {
  byte_vector bytes(static_cast<std::size_t>(rows * 512));
  for (std::size_t i = 0; i < should.rows.size(); ++i) {
    const row_bytes row = pool.decoded(should.rows[i]);
    std::memcpy(bytes.data() + i * 512, row.data(), 512);
  }
  return bytes;
}

template <class Index>
std::vector<std::int64_t> widened(const std::vector<Index>& values) {
  return {values.begin(), values.end()};
}

template <class World>
using device_of = std::conditional_t<std::is_same_v<typename World::stream_type, holdfast::host::stream_ref>,
                                     holdfast::host_device, holdfast::cuda_device>;

template <class World>
std::size_t workspace_bytes(const World& world, std::int64_t rows, std::int64_t capacity) {
  return holdfast::gather_selected_workspace_bytes(device_of<World>::of(world.stream()), rows, capacity);
}

/// All that one call writes, and what it is called with.
template <class World, class Index>
struct call {
  call(World& w, std::int64_t pool_rows, std::int64_t row_count, std::int64_t pair_count, std::int64_t cap,
       std::int64_t tail_rows, std::byte poison = std::byte{0xff})
      : world(w),
        rows(row_count),
        pairs(pair_count),
        capacity(cap),
        tail(tail_rows),
        out(w, static_cast<std::size_t>((cap + tail_rows) * 512), poison),
        remap(w, static_cast<std::size_t>(pair_count) * sizeof(Index), poison),
        workspace(w, workspace_bytes(w, pool_rows, cap), poison == std::byte{0xff} ? std::byte{0} : std::byte{0xff}),
        count(w, 4, poison),
        selected(w, 8, poison) {}

  template <class Source>
  void run(const Source& source, const Index* indices, holdfast::gather_selected_options options = {}) const {
    options.tail_rows = tail;
    options.count = count.template data<std::int32_t>();
    options.selected = selected.template data<std::int64_t>();
    holdfast::gather_selected(
        world.stream(), source, holdfast::view<const Index, 2>(indices, rows, rows == 0 ? 0 : pairs / rows),
        holdfast::view<__nv_fp8_e4m3, 2>(out.template data<__nv_fp8_e4m3>(), capacity, 512),
        holdfast::view<Index, 2>(remap.template data<Index>(), rows, rows == 0 ? 0 : pairs / rows), workspace.span(),
        options);
  }

  template <class Pool>
  void expect(const Pool& pool, const std::vector<std::int64_t>& named) {
    const expected should(named, capacity);
    EXPECT_EQ(widened(remap.template now<Index>()), should.remap);
    EXPECT_TRUE(out.now() == bytes_of(pool, should, capacity + tail));
    EXPECT_EQ(count.template now<std::int32_t>()[0], static_cast<std::int64_t>(should.rows.size()));
    EXPECT_EQ(selected.template now<std::int64_t>()[0], should.selected);
    static_cast<void>(workspace.now());
  }

  void poison_again() {
    for (auto* each : {&out, &remap, &workspace, &count, &selected}) each->poison_again();
  }

  World& world;
  std::int64_t rows, pairs, capacity, tail;
  guarded<World> out, remap, workspace, count, selected;
};

template <class World>
class WorldTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* why = World::unavailable()) GTEST_SKIP() << "no GPU: " << why;
    world_ = std::make_unique<World>();
  }
  World& world() { return *world_; }

  template <class Format, class Index>
  void expect_selected(std::int64_t pool_rows, std::int64_t rows, const std::vector<Index>& indices,
                       std::int64_t capacity, std::int64_t tail) {
    const auto named = named_by(indices, pool_rows);
    const pool_of<World, Format> pool(world(), pool_rows, live_of(named));
    const uploaded<World, Index> on_device(world(), indices);
    for (const std::byte poison : {std::byte{0xff}, std::byte{0x7f}}) {
      call<World, Index> it(world(), pool_rows, rows, static_cast<std::int64_t>(indices.size()), capacity, tail,
                            poison);
      it.run(pool.given(), on_device.data());
      world().synchronize();
      it.expect(pool, named);
    }
  }

  /// Nothing of `work` reaches the stream, and it throws an Error that holds all of `words`.
  template <class Error = holdfast::logic_error, class Work>
  void expect_refused(const Work& work, const std::vector<std::string>& words) {
    auto recorded = world().record([&] {
      try {
        work();
        ADD_FAILURE() << "not refused; should say: " << words.back();
      } catch (const Error& error) {
        for (const auto& word : words)
          EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what() << "\nlacks: " << word;
      }
    });
    EXPECT_EQ(recorded.nodes(), 0u);
  }

 private:
  std::unique_ptr<World> world_;
};

// --- whatever the format and the index -------------------------------------------------------------------------------

template <class World, class Format, class Index>
struct subject {
  using world = World;
  using format = Format;
  using index = Index;
};

template <class World>
using every_subject =
    ::testing::Types<subject<World, fp8_format, std::int32_t>, subject<World, nvfp4_format, std::int64_t>,
                     subject<World, nvfp4_residual_format, std::int32_t>>;

template <class Subject>
class SelectedOf : public WorldTest<typename Subject::world> {
 protected:
  using its_index = typename Subject::index;

  void expect(std::int64_t pool_rows, std::int64_t rows, const std::vector<its_index>& indices, std::int64_t capacity,
              std::int64_t tail = 0) {
    SCOPED_TRACE(std::to_string(indices.size()) + " pairs, a capacity of " + std::to_string(capacity));
    this->template expect_selected<typename Subject::format>(pool_rows, rows, indices, capacity, tail);
  }
};
TYPED_TEST_SUITE_P(SelectedOf);

TYPED_TEST_P(SelectedOf, EveryTokenOnceInThePoolsOrder) {
  std::vector<typename TypeParam::index> indices;
  for (std::int32_t i = 0; i < 37; ++i) indices.push_back(static_cast<typename TypeParam::index>(i * 11 % 37));
  this->expect(37, 1, indices, 37, 3);
  std::reverse(indices.begin(), indices.end());
  this->expect(37, 37, indices, 40);
}

TYPED_TEST_P(SelectedOf, DuplicatesShareARow) {
  this->expect(9, 3, {8, 2, 8, 2, 2, 2, 5, 8, 2, 5, 5, 8}, 12, 1);
  this->expect(9, 12, std::vector<typename TypeParam::index>(12, 7), 1);
}

TYPED_TEST_P(SelectedOf, InvalidIndicesAreMinusOne) {
  std::vector<typename TypeParam::index> indices{
      -1, 0, int_max, 4, 5, -123456, 6, 0, std::numeric_limits<std::int32_t>::min()};
  if constexpr (sizeof(typename TypeParam::index) == 8)
    indices.insert(indices.end(), {std::int64_t{1} << 32, (std::int64_t{1} << 32) + 2,
                                   std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()});
  this->expect(5, 1, indices, 5, 2);
}

TYPED_TEST_P(SelectedOf, AllInvalidIsAllZeros) {
  this->expect(5, 2, {-1, 5, int_max, -123456}, 4, 3);
  this->expect(0, 2, {-1, 0, 1, int_max}, 1, 3);
}

TYPED_TEST_P(SelectedOf, NoPairsAtAll) {
  this->expect(5, 0, {}, 1, 3);
  this->expect(5, 0, {}, 0, 0);
  this->expect(0, 0, {}, 0, 2);
}

TYPED_TEST_P(SelectedOf, TokensBeyondTheCapacityAreRejected) {
  const std::vector<typename TypeParam::index> indices{30, 3, 19, 3, 7, 30, -1, 12, 25, 40, 19, 7};
  for (const std::int64_t capacity : {0, 1, 2, 5, 6, 7, 100}) this->expect(40, 3, indices, capacity, 2);
}

TYPED_TEST_P(SelectedOf, ManyTilesOfManyPairs) {
  // more rows than a tile of the scan, more pairs than rows
  std::mt19937_64 random(5);
  std::vector<typename TypeParam::index> indices;
  for (int i = 0; i < 64 * 400; ++i)
    indices.push_back(static_cast<typename TypeParam::index>(static_cast<std::int64_t>(random() % 9000) - 5));
  for (auto& index : indices)
    if (index > 200 && index % 7 != 0) index = static_cast<typename TypeParam::index>(index / 7 * 7);
  this->expect(8990, 64, indices, 2000, 128);
  this->expect(8990, 64, indices, 700, 1);
}

REGISTER_TYPED_TEST_SUITE_P(SelectedOf, EveryTokenOnceInThePoolsOrder, DuplicatesShareARow, InvalidIndicesAreMinusOne,
                            AllInvalidIsAllZeros, NoPairsAtAll, TokensBeyondTheCapacityAreRejected,
                            ManyTilesOfManyPairs);

// --- the rest --------------------------------------------------------------------------------------------------------

template <class World>
class Selected : public WorldTest<World> {};
TYPED_TEST_SUITE_P(Selected);

TYPED_TEST_P(Selected, ReplaysLookAtWhatTheIndicesAreThen) {
  using index = std::int32_t;
  auto& world = this->world();
  const std::vector<std::vector<index>> of_replays{
      {1, 5, 5, 9, -1, 1}, {9, 8, 7, 6, 5, 4}, {-1, -1, 10, int_max, -2, 99}, {0, 0, 0, 0, 0, 0}, {3, 1, 5, 5, 9, 3}};
  std::set<std::int64_t> live;
  for (const auto& indices : of_replays) live.merge(live_of(named_by(indices, 10)));
  const pool_of<TypeParam, nvfp4_format> pool(world, 10, live);
  uploaded<TypeParam, index> indices(world, of_replays[0]);
  call<TypeParam, index> it(world, 10, 2, 6, 4, 3);
  auto recorded = world.record([&] { it.run(pool.given(), indices.data()); });
  for (const auto& now : of_replays) {
    indices.set(now);
    it.poison_again();
    recorded.replay();
    it.expect(pool, named_by(now, 10));
  }
}

TYPED_TEST_P(Selected, AWorkspaceMayBeUsedByTheNextCall) {
  using index = std::int32_t;
  auto& world = this->world();
  const std::vector<index> a{3, 4, 3, 900, 12, 7}, b{0, 899, 2, 2, 2, -5};
  const pool_of<TypeParam, fp8_format> pool(world, 900, {0, 2, 3, 4, 7, 12, 899});
  const uploaded<TypeParam, index> first(world, a), second(world, b);
  call<TypeParam, index> one(world, 900, 2, 6, 6, 1), two(world, 900, 3, 6, 6, 1);
  two.workspace = one.workspace;
  one.run(pool.given(), first.data());
  two.run(pool.given(), second.data());
  world.synchronize();
  one.expect(pool, named_by(a, 900));
  two.expect(pool, named_by(b, 900));
}

TYPED_TEST_P(Selected, RowLengthsAndBlockTables) {
  using index = std::int64_t;
  auto& world = this->world();
  // requests of 3 pages of 4 rows, in a pool of 5 pages; two rows of pairs ask request 1
  const std::vector<std::int32_t> table{4, 0, -1, 2, 4, 7}, requests{1, 0, 1, 2}, lengths{5, 3, 9, 5};
  const std::vector<index> positions{0, 5, 8, 3, 7, 1, 4, 9, 0, 0, 0, 1, 2, 12, -1, 0, 1, 2, 3, 4};
  std::vector<std::int64_t> named;
  for (std::int64_t row = 0; row < 4; ++row)
    for (std::int64_t column = 0; column < 5; ++column) {
      const index position = positions[static_cast<std::size_t>(row * 5 + column)];
      const std::int32_t request = requests[static_cast<std::size_t>(row)];
      std::int64_t found = -1;
      if (column < lengths[static_cast<std::size_t>(row)] && request < 2 && position >= 0 && position < 12) {
        const std::int32_t page = table[static_cast<std::size_t>(request * 3 + position / 4)];
        if (page >= 0 && page < 5) found = page * 4 + position % 4;
      }
      named.push_back(found);
    }
  const pool_of<TypeParam, nvfp4_residual_format> pool(world, 20, live_of(named), 4);
  const uploaded<TypeParam, std::int32_t> tables(world, table), of_rows(world, requests), counts(world, lengths);
  const uploaded<TypeParam, index> indices(world, positions);
  call<TypeParam, index> it(world, 20, 4, 20, 20, 2);
  it.run(pool.given({.data = tables.data(), .requests = 2, .pages = 3}), indices.data(),
         {.row_lengths = counts.data(), .row_requests = of_rows.data()});
  world.synchronize();
  it.expect(pool, named);
  EXPECT_GT(live_of(named).size(), 5u);
}

TYPED_TEST_P(Selected, StridesRanksAndCountsOfEveryKind) {
  using index = std::int32_t;
  auto& world = this->world();
  const std::vector<index> some{5,  100, 3, 100, 5, 100,
                                -1, 100, 0, 100, 3, 100};  // 100: between the strides, a NaN row
  const pool_of<TypeParam, fp8_format> pool(world, 101, {0, 3, 5});
  const uploaded<TypeParam, index> indices(world, some);
  guarded<TypeParam> out(world, 7 * 528, std::byte{0x7f}), remap(world, 32 * 4, std::byte{0x7f}),
      workspace(world, workspace_bytes(world, 101, 4), std::byte{0xff}), wide(world, 8, std::byte{0xff}),
      narrow(world, 4, std::byte{0xff});
  const auto to = holdfast::make_strided_view<std::byte, 2>(out.data(), {4, 512}, {528, 1});
  // remap [3, 2]: rows 9 apart, columns 3 apart
  holdfast::gather_selected(
      world.stream(), pool.given(), holdfast::make_strided_view<const index, 2>(indices.data(), {3, 2}, {4, 2}), to,
      holdfast::make_strided_view<index, 2>(remap.template data<index>(), {3, 2}, {9, 3}), workspace.span(),
      {.tail_rows = 2, .count = wide.template data<std::int64_t>(), .selected = narrow.template data<std::int32_t>()});
  world.synchronize();
  std::vector<index> should(32, 0x7f7f7f7f);
  const std::vector<index> numbers{2, 1, 2, -1, 0, 1};
  for (std::size_t p = 0; p < 6; ++p) should[p / 2 * 9 + p % 2 * 3] = numbers[p];
  EXPECT_EQ(remap.template now<index>(), should);
  byte_vector bytes(7 * 528, std::byte{0x7f});
  for (std::size_t i = 0; i < 6; ++i) {
    const row_bytes row = i < 3 ? pool.decoded(std::vector<std::int64_t>{0, 3, 5}[i]) : row_bytes{};
    std::memcpy(bytes.data() + i * 528, row.data(), 512);
  }
  EXPECT_TRUE(out.now() == bytes);
  EXPECT_EQ(wide.template now<std::int64_t>()[0], 3);
  EXPECT_EQ(narrow.template now<std::int32_t>()[0], 3);

  // rank 1, no counts
  holdfast::gather_selected(world.stream(), pool.given(),
                            holdfast::make_strided_view<const index, 1>(indices.data(), {6}, {2}), to,
                            holdfast::view<index, 1>(remap.template data<index>(), 6), workspace.span());
  world.synchronize();
  const auto now = remap.template now<index>();
  EXPECT_EQ(std::vector<index>(now.begin(), now.begin() + 6), numbers);
}

TYPED_TEST_P(Selected, RefusalsNameWhatIsWrong) {
  using index = std::int32_t;
  auto& world = this->world();
  constexpr std::int64_t rows = 3000;
  const std::size_t wanted = workspace_bytes(world, rows, 8);
  guarded<TypeParam> memory(world, 4096 + wanted, std::byte{0xff});
  std::byte* const somewhere = memory.data();
  const std::span<std::byte> good{somewhere, wanted};
  const holdfast::row_pool pool{.data = somewhere, .rows = rows};
  const auto* some = reinterpret_cast<const index*>(somewhere);
  auto* other = reinterpret_cast<index*>(somewhere + 64);
  const auto of = [](auto* data, std::int64_t r, std::int64_t topk) {
    return holdfast::view<std::remove_pointer_t<decltype(data)>, 2>(data, r, topk);
  };
  const auto out = [&](std::int64_t capacity, std::int64_t elements = 512, std::int64_t shift = 0) {
    return holdfast::view<std::byte, 2>(somewhere + shift, capacity, elements);
  };
  const auto refused = [&](const std::vector<std::string>& words, const holdfast::fp8_rows& source, const auto& indices,
                           const auto& to, const auto& remap, std::span<std::byte> workspace,
                           const holdfast::gather_selected_options& options = {}) {
    std::vector<std::string> all{"gather_selected"};
    all.insert(all.end(), words.begin(), words.end());
    this->expect_refused(
        [&] { holdfast::gather_selected(world.stream(), source, indices, to, remap, workspace, options); }, all);
  };
  const holdfast::fp8_rows source{.data = pool};
  const auto indices = of(some, 2, 4);
  const auto remap = of(other, 2, 4);

  // the workspace
  refused({std::to_string(wanted - 1), std::to_string(wanted) + " are needed"}, source, indices, out(8), remap,
          good.first(wanted - 1));
  refused({"0 bytes", "needed"}, source, indices, out(8), remap, {});
  refused({"4 bytes after a multiple of 16"}, source, indices, out(8), remap, {somewhere + 4, wanted});
  try {
    holdfast::gather_selected(world.stream(), source, indices, out(8), remap, good.first(7));
    ADD_FAILURE() << "not refused";
  } catch (const holdfast::workspace_too_small& error) {
    EXPECT_EQ(error.wanted(), wanted);
    EXPECT_EQ(error.available(), 7u);
  }

  // views
  refused({"different extents", "[2, 4]", "[2, 3]"}, source, indices, out(8), of(other, 2, 3), good);
  refused({"different extents"}, source, indices, out(8), of(other, 1, 4), good);
  refused({"negative extent", "[-2, 4]"}, source, of(some, -2, 4), out(8), of(other, -2, 4), good);
  refused({"remap is indices itself"}, source, indices, out(8), of(const_cast<index*>(some), 2, 4), good);
  refused({"data of indices is null"}, source, of(static_cast<const index*>(nullptr), 2, 4), out(8), remap, good);
  refused({"data of remap is null"}, source, indices, out(8), of(static_cast<index*>(nullptr), 2, 4), good);
  refused({"offsets of indices"}, source,
          holdfast::make_strided_view<const index, 2>(some, {2, 4}, {std::int64_t{1} << 61, 1}), out(8), remap, good);
  refused({"offsets of remap"}, source, indices, out(8),
          holdfast::make_strided_view<index, 2>(other, {2, 4}, {1, std::int64_t{1} << 61}), good);

  // what gather_rows judges, and the counts
  refused({"511 elements, not 512"}, source, indices, out(8, 511), remap, good);
  refused({"16 bytes"}, source, indices, out(8, 512, 8), remap, good);
  refused({"tail_rows is -1"}, source, indices, out(8), remap, good, {.tail_rows = -1});
  refused({"pool of data is null"}, {.data = {.rows = rows}}, indices, out(8), remap, good);
  refused({"a capacity of -1 rows"}, source, indices, out(-1), remap, good);
  refused({"a pool of -1 rows"}, {.data = {.data = somewhere, .rows = -1}}, indices, out(8), remap, good);
  refused({"a pool of 2147483647 rows"}, {.data = {.data = somewhere, .rows = int_max}}, indices, out(8), remap, good);
  const auto device = device_of<TypeParam>::of(world.stream());
  EXPECT_THROW(static_cast<void>(holdfast::gather_selected_workspace_bytes(device, int_max, 1)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(holdfast::gather_selected_workspace_bytes(device, 1, -1)), holdfast::logic_error);

  // tables
  const holdfast::row_pool paged{.data = somewhere, .rows = rows, .page_rows = 64};
  refused({"needs a pool with pages"}, {.data = pool, .table = {.data = some, .requests = 1, .pages = 2}}, indices,
          out(8), remap, good);
  refused({"[-1, 2]"}, {.data = paged, .table = {.data = some, .requests = -1, .pages = 2}}, indices, out(8), remap,
          good);
  refused({"null, but [1, 2]"}, {.data = paged, .table = {.requests = 1, .pages = 2}}, indices, out(8), remap, good);
  refused({"row_requests needs a block table"}, source, indices, out(8), remap, good, {.row_requests = some});
  for (const std::byte byte : memory.now()) ASSERT_EQ(byte, std::byte{0xff});
}

TYPED_TEST_P(Selected, AnAllocatorsScratchIsAWorkspace) {
  using index = std::int32_t;
  using device = device_of<TypeParam>;
  auto& world = this->world();
  const std::vector<index> some{5, 3, 5, -1, 0, 3};
  const pool_of<TypeParam, nvfp4_format> pool(world, 6, {0, 3, 5});
  const uploaded<TypeParam, index> indices(world, some);
  holdfast::lane<device> lane{holdfast::default_resource(device::of(world.stream()))};
  holdfast::tail_padded_allocator<__nv_fp8_e4m3, device> rows{
      lane, {.row_elements = 512, .over_read = holdfast::over_read::rows_beyond(128)}};
  holdfast::tail_padded_allocator<std::byte, device> bytes{lane, {.row_elements = 1}};
  call<TypeParam, index> it(world, 6, 2, 6, 4, 128);
  const auto run = [&] {
    const std::size_t size = workspace_bytes(world, 6, 4);
    auto scratch = rows.acquire_unfilled(world.stream(), 4);
    auto work = bytes.acquire(world.stream(), static_cast<std::int64_t>(size));
    holdfast::gather_selected(world.stream(), pool.given(), holdfast::view<const index, 2>(indices.data(), 2, 3),
                              scratch.view(), holdfast::view<index, 2>(it.remap.template data<index>(), 2, 3),
                              {work.data(), size},
                              {.tail_rows = scratch.tail_rows(),
                               .count = it.count.template data<std::int32_t>(),
                               .selected = it.selected.template data<std::int64_t>()});
    device::copy(world.stream(), it.out.data(), scratch.data(), static_cast<std::size_t>((4 + 128) * 512));
  };
  run();
  world.synchronize();
  it.expect(pool, named_by(some, 6));
  it.poison_again();
  auto recorded = world.record(run);
  recorded.replay();
  it.expect(pool, named_by(some, 6));
}

REGISTER_TYPED_TEST_SUITE_P(Selected, ReplaysLookAtWhatTheIndicesAreThen, AWorkspaceMayBeUsedByTheNextCall,
                            RowLengthsAndBlockTables, StridesRanksAndCountsOfEveryKind, RefusalsNameWhatIsWrong,
                            AnAllocatorsScratchIsAWorkspace);

}  // namespace selected_test
