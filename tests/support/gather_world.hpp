// What tests of gathers share: device memory that holds vectors, pools that lie in any geometry, outputs between canaries.
// Every byte of an output's buffer is compared: it starts poisoned, and all that the kernel was not asked to write must
// still be poison. Pools lie in buffers whose other bytes are 0x7f: NaN, should they be read.
#pragma once

#if defined(__CUDACC__)
#include <holdfast/kernel/gather_rows.cuh>
#else
#include <holdfast/kernel/gather_rows.hpp>
#endif
#include <holdfast/error.hpp>
#include <holdfast/view.hpp>

#include "support/gather_bytes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace gather_test {

inline constexpr std::int64_t canary = 256;
inline constexpr std::byte poisons[] = {std::byte{0xff}, std::byte{0x7f}};
inline constexpr std::int32_t int_max = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int32_t int_min = std::numeric_limits<std::int32_t>::min();

inline ::testing::AssertionResult same(const byte_vector& is, const byte_vector& should) {
  if (is == should) return ::testing::AssertionSuccess();
  const auto at =
      static_cast<std::size_t>(std::mismatch(is.begin(), is.end(), should.begin(), should.end()).first - is.begin());
  return ::testing::AssertionFailure() << "byte " << at << " of " << is.size() << " is " << std::to_integer<int>(is[at])
                                       << ", should be " << std::to_integer<int>(should[at]);
}

/// Device memory that holds a vector's bytes.
template <class World, class T>
class device_array {
 public:
  device_array(World& world, std::vector<T> values) : world_(&world), values_(std::move(values)) {
    if (values_.empty()) return;
    memory_ = world.allocate(values_.size() * sizeof(T));
    set(values_);
  }
  void set(const std::vector<T>& values) {
    values_ = values;
    world_->upload(memory_.get(), values_.data(), values_.size() * sizeof(T));
  }
  [[nodiscard]] std::vector<T> now() {
    std::vector<T> read(values_.size());
    world_->download(read.data(), memory_.get(), read.size() * sizeof(T));
    return read;
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.get()); }
  [[nodiscard]] const std::vector<T>& values() const { return values_; }

 private:
  World* world_;
  std::vector<T> values_;
  std::shared_ptr<std::byte> memory_;
};

/// Where rows lie. Zeros mean packed and unpaged, as in row_pool.
struct geometry {
  std::int64_t row_stride = 0;
  std::int64_t page_rows = 0;
  std::int64_t page_stride = 0;
  std::int64_t shift = 0;  // bytes off the 256-byte alignment
};

/// Rows of a pool on the device, and on the host.
template <class World>
class placed_pool {
 public:
  placed_pool(World& world, byte_vector rows, std::int64_t width, const geometry& where)
      : rows_(std::move(rows)), width_(width), where_(where) {
    if (where_.row_stride == 0) where_.row_stride = width;
    if (where_.page_stride == 0) where_.page_stride = where_.page_rows * where_.row_stride;
    std::int64_t end = 0;
    for (std::int64_t i = 0; i < count(); ++i) end = std::max(end, offset(i) + width_);
    buffer_.assign(static_cast<std::size_t>(where_.shift + end), std::byte{0x7f});
    for (std::int64_t i = 0; i < count(); ++i)
      std::memcpy(buffer_.data() + where_.shift + offset(i), row(i), static_cast<std::size_t>(width_));
    memory_ = world.allocate(std::max<std::size_t>(buffer_.size(), 1));
    world.upload(memory_.get(), buffer_.data(), buffer_.size());
    given_ = {.data = memory_.get() + where.shift,
              .rows = count(),
              .row_stride_bytes = where.row_stride,
              .page_rows = where.page_rows,
              .page_stride_bytes = where.page_stride};
  }

  [[nodiscard]] std::int64_t count() const {
    return width_ == 0 ? 0 : static_cast<std::int64_t>(rows_.size()) / width_;
  }
  [[nodiscard]] const std::byte* row(std::int64_t i) const { return rows_.data() + i * width_; }
  [[nodiscard]] const holdfast::row_pool& given() const { return given_; }

 private:
  [[nodiscard]] std::int64_t offset(std::int64_t i) const {
    if (where_.page_rows == 0) return i * where_.row_stride;
    return i / where_.page_rows * where_.page_stride + i % where_.page_rows * where_.row_stride;
  }

  byte_vector rows_, buffer_;
  std::int64_t width_;
  geometry where_;
  std::shared_ptr<std::byte> memory_;
  holdfast::row_pool given_;
};

/// The output of a gather: poisoned, between canaries.
template <class World>
class output {
 public:
  /// `width` and `stride` are of a row, in bytes.
  output(World& world, std::int64_t pairs, std::int64_t tail, std::byte poison, std::int64_t stride = 512,
         std::int64_t width = 512)
      : world_(world), pairs_(pairs), tail_(tail), stride_(stride), width_(width) {
    should_.assign(static_cast<std::size_t>(2 * canary + (pairs + tail) * stride), poison);
    memory_ = world.allocate(should_.size());
    poison_again();
  }
  void poison_again() {
    std::fill(should_.begin(), should_.end(), should_[0]);
    world_.upload(memory_.get(), should_.data(), should_.size());
  }

  template <class T = __nv_fp8_e4m3>
  [[nodiscard]] holdfast::strided_view<T, 2> view() const {
    constexpr std::int64_t bytes = sizeof(T);
    return holdfast::make_strided_view<T, 2>(reinterpret_cast<T*>(memory_.get() + canary), {pairs_, width_ / bytes},
                                             {stride_ / bytes, 1});
  }

  /// Nothing was written.
  [[nodiscard]] ::testing::AssertionResult untouched() {
    byte_vector now(should_.size());
    world_.download(now.data(), memory_.get(), now.size());
    return same(now, should_);
  }

  /// Row p is that of `named[p]`, zeros where it is negative, and the tail is zeros.
  template <class Pool>
  [[nodiscard]] ::testing::AssertionResult holds(const Pool& pool, const std::vector<std::int64_t>& named) {
    std::map<std::int64_t, byte_vector> decoded{{-1, byte_vector(static_cast<std::size_t>(width_))}};
    for (std::int64_t p = 0; p < pairs_ + tail_; ++p) {
      const std::int64_t row = p < pairs_ ? named[static_cast<std::size_t>(p)] : -1;
      auto at = decoded.find(row);
      if (at == decoded.end()) {
        const auto bytes = pool.decoded(row);
        at = decoded.emplace(row, byte_vector(bytes.begin(), bytes.end())).first;
      }
      std::memcpy(should_.data() + canary + p * stride_, at->second.data(), static_cast<std::size_t>(width_));
    }
    return untouched();
  }

 private:
  World& world_;
  std::int64_t pairs_, tail_, stride_, width_;
  byte_vector should_;
  std::shared_ptr<std::byte> memory_;
};

/// Pairs of a flat pool: the index where it is one of its rows, else -1.
template <class Index>
std::vector<std::int64_t> named_by(const std::vector<Index>& indices, std::int64_t rows) {
  std::vector<std::int64_t> named;
  for (const Index index : indices) named.push_back(index >= 0 && index < rows ? static_cast<std::int64_t>(index) : -1);
  return named;
}

/// What the remap of these pairs is.
template <class Index>
std::vector<Index> remap_of(const std::vector<std::int64_t>& named) {
  std::vector<Index> made;
  for (std::size_t p = 0; p < named.size(); ++p) made.push_back(named[p] < 0 ? Index{-1} : static_cast<Index>(p));
  return made;
}

/// More than a small gather's rows, and than whole warps of any shape.
inline constexpr std::int64_t many_pairs = holdfast::detail::most_rows_of_small_gathers + 33;

/// `some`, over and over.
template <class Index>
std::vector<Index> many_of(const std::vector<Index>& some) {
  std::vector<Index> made;
  for (std::size_t p = 0; p < std::size_t{many_pairs}; ++p) made.push_back(some[p % some.size()]);
  return made;
}

template <class Index>
std::vector<Index> random_indices(std::int64_t count, std::int64_t rows, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Index> made;
  for (std::int64_t i = 0; i < count; ++i)
    made.push_back(random() % 8 == 0 ? static_cast<Index>(-1)
                                     : static_cast<Index>(random() % static_cast<std::uint64_t>(rows)));
  return made;
}

template <class Index>
holdfast::view<const Index, 1> flat(const Index* data, std::int64_t pairs) {
  return holdfast::view<const Index, 1>(data, pairs);
}
template <class Index>
holdfast::view<const Index, 2> rows_of(const Index* data, std::int64_t rows, std::int64_t topk) {
  return holdfast::view<const Index, 2>(data, rows, topk);
}

template <class World>
class WorldTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* why = World::unavailable()) GTEST_SKIP() << "no GPU: " << why;
    world_ = std::make_unique<World>();
  }
  World& world() { return *world_; }

  /// Gathers `indices` [rows, topk] and compares output and remap.
  template <class Pool, class Index>
  void expect_gather(const Pool& pool, std::int64_t rows, const std::vector<Index>& indices, std::int64_t tail = 0,
                     std::byte poison = poisons[0]) {
    const auto pairs = static_cast<std::int64_t>(indices.size());
    const device_array<World, Index> on_device(world(), indices);
    device_array<World, Index> remap(world(), std::vector<Index>(indices.size(), 77));
    using element = typename Pool::element;
    constexpr std::int64_t width = Pool::elements * sizeof(element);
    output<World> out(world(), pairs, tail, poison, width, width);
    holdfast::gather_rows(world().stream(), pool.given(), rows_of<Index>(on_device.data(), rows, pairs / rows),
                          out.template view<element>(), {.tail_rows = tail, .remap = remap.data()});
    world().synchronize();
    const auto named = named_by(indices, pool.rows());
    EXPECT_TRUE(out.holds(pool, named));
    EXPECT_EQ(remap.now(), remap_of<Index>(named));
  }

  /// Nothing of `work` reaches the stream, and it throws a logic_error that holds all of `words`.
  template <class Work>
  void expect_refused(const Work& work, const std::vector<std::string>& words) {
    auto recorded = world().record([&] {
      try {
        work();
        ADD_FAILURE() << "not refused; should say: " << words.back();
      } catch (const holdfast::logic_error& error) {
        for (const auto& word : words)
          EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what() << "\nlacks: " << word;
      }
    });
    EXPECT_EQ(recorded.nodes(), 0u);
  }

 private:
  std::unique_ptr<World> world_;
};

}  // namespace gather_test
