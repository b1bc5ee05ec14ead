// norm_rope_pad, bit for bit against norm_reference.hpp; included by a host and by a CUDA test, after their launchers.
#pragma once

#include "support/norm_reference.hpp"
#include "support/queries.hpp"

#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/view.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace norm_rope_pad {

using holdfast::norm_rope_options;
using holdfast::rope_pairing;
using norm_reference::half_format;
using support::packed;
using support::queries;
using support::triple;

template <class T>
inline constexpr half_format format_of = std::is_same_v<T, __nv_bfloat16> ? norm_reference::bf16 : norm_reference::fp16;

enum class weighting { none, narrow, wide };

template <class Device>
class norm_rope_pad : public support::producer_test<Device> {
 protected:
  using drive = support::driver<Device>;

  void SetUp() override {
    support::producer_test<Device>::SetUp();
    if (this->IsSkipped()) return;
    std::mt19937 random(1);
    for (std::int64_t position = 0; position < table_rows; ++position)
      for (int i = 0; i < 64; ++i) {
        const double angle = static_cast<double>(position * 7 + 1) * std::pow(1e4, -(i % 32) / 32.0);
        table.push_back(static_cast<float>(i < 32 ? std::cos(angle) : std::sin(angle)));
      }
    device_table = this->array(table);
  }

  [[nodiscard]] holdfast::view<const float, 2> angles() const {
    return holdfast::view<const float, 2>{device_table, table_rows, 64};
  }
  template <class Index>
  holdfast::view<const Index, 1> positions_of(const std::vector<Index>& values) {
    return holdfast::view<const Index, 1>{this->array(values), static_cast<std::int64_t>(values.size())};
  }

  /// A weight on the device, and what it is.
  template <class T>
  struct weight {
    holdfast::norm_weight given;
    std::vector<float> values;
  };
  template <class T>
  weight<T> weight_of(weighting kind, std::int64_t dim) {
    std::mt19937 random(3);
    std::vector<float> wide;
    std::vector<std::uint16_t> narrow;
    for (std::int64_t i = 0; i < dim; ++i) {
      wide.push_back(std::ldexp(static_cast<float>(random()), -32 + static_cast<int>(random() % 3)));
      narrow.push_back(norm_reference::encode(format_of<T>, wide.back()));
    }
    if (kind == weighting::none) return {};
    if (kind == weighting::wide) return {this->array(wide), wide};
    for (std::size_t i = 0; i < wide.size(); ++i)
      wide[i] = static_cast<float>(norm_reference::decode(format_of<T>, narrow[i]));
    return {reinterpret_cast<const T*>(this->array(narrow)), wide};
  }

  /// What the image of `out` becomes. A row of a position below 0 is zeros.
  template <class T>
  void norm(const queries<Device, std::uint16_t>& in, const std::vector<std::int64_t>& positions,
            const std::vector<float>& weights, const norm_rope_options& options,
            queries<Device, std::uint16_t>& out) const {
    const auto [rows, heads, dim] = out.extents();
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t position = positions[static_cast<std::size_t>(row)];
        std::vector<std::uint16_t> values(static_cast<std::size_t>(dim));
        if (position >= 0) {
          for (std::int64_t i = 0; i < dim; ++i) values[static_cast<std::size_t>(i)] = in.at(row, head, i);
          values = norm_reference::norm_and_rotate(format_of<T>, values, weights, table.data() + position * 64,
                                                   options.pairing == rope_pairing::half_split, options.eps);
        }
        for (std::int64_t i = 0; i < dim; ++i) out.at(row, head, i) = values[static_cast<std::size_t>(i)];
      }
  }

  template <class T>
  void expect_norm(const queries<Device, std::uint16_t>& in, queries<Device, std::uint16_t> out,
                   weighting kind = weighting::none, norm_rope_options options = {}) {
    out.write();
    std::vector<std::int64_t> positions;
    for (std::int64_t row = 0; row < in.extents()[0]; ++row) positions.push_back((row * 5 + 2) % table_rows);
    const auto weights = weight_of<T>(kind, in.extents()[2]);
    options.weight = weights.given;
    holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(), positions_of(positions), angles(),
                            out.template view<T>(), options);
    drive::synchronize(this->stream.get());
    norm<T>(in, positions, weights.values, options, out);
    EXPECT_TRUE(out.as_imagined());
    EXPECT_TRUE(in.as_imagined()) << "the input";
  }

  /// Activations: around 1, both signs.
  template <class T>
  static void fill_usual(queries<Device, std::uint16_t>& in, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    in.fill([&](auto...) { return norm_reference::encode(format_of<T>, normal(random)); });
  }

  static constexpr std::int64_t table_rows = 13;
  std::vector<float> table;
  float* device_table = nullptr;
};
TYPED_TEST_SUITE_P(norm_rope_pad);

TYPED_TEST_P(norm_rope_pad, writes_the_real_heads_and_nothing_else) {
  using T = __nv_bfloat16;
  std::uint64_t seed = 0;
  for (const std::int64_t rows : {1, 2, 9})
    for (const std::int64_t heads : {1, 8, 17, 64}) {
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(heads) + " heads");
      queries<TypeParam, std::uint16_t> in{{rows, heads, 512}, packed({rows, heads, 512})};
      this->template fill_usual<T>(in, ++seed);
      this->template expect_norm<T>(in, {{rows, heads, 512}, {64 * 512, 512, 1}});
    }
}

TYPED_TEST_P(norm_rope_pad, of_every_kind_gives_the_reference_bits) {
  const auto expect = [&]<class T>(T) {
    std::uint64_t seed = 0;
    for (const std::int64_t dim : {64, 128, 192, 256, 320, 512, 576, 768, 832, 1024})
      for (const auto pairing : {rope_pairing::adjacent, rope_pairing::half_split})
        for (const auto kind : {weighting::none, weighting::narrow, weighting::wide}) {
          SCOPED_TRACE(std::to_string(dim) + " elements, pairing " + std::to_string(static_cast<int>(pairing)) +
                       ", weight " + std::to_string(static_cast<int>(kind)));
          queries<TypeParam, std::uint16_t> in{{3, 3, dim}, packed({3, 3, dim})};
          this->template fill_usual<T>(in, ++seed);
          this->template expect_norm<T>(in, {{3, 3, dim}, {5 * dim, dim, 1}}, kind, {.pairing = pairing});
        }
  };
  expect(__nv_bfloat16{});
  expect(__half{});
}

TYPED_TEST_P(norm_rope_pad, of_strided_heads) {
  using T = __half;
  for (const triple strides : {triple{192, 5 * 192, 1}, triple{8 + 3 * 192, 192 + 8, 1}, triple{0, 192, 1}})
    for (const std::int64_t shift : {0, 8, 24}) {  // 16-byte multiples, from 64
      queries<TypeParam, std::uint16_t> in{{5, 3, 192}, strides, shift};
      this->template fill_usual<T>(in, 1);
      this->template expect_norm<T>(in, {{5, 3, 192}, {7 * 192, 2 * 192, 1}, shift});
    }
}

TYPED_TEST_P(norm_rope_pad, of_extreme_values_gives_the_reference_bits) {
  const auto expect = [&]<class T>(T) {
    constexpr half_format format = format_of<T>;
    constexpr std::int64_t rows = 11, dim = 512;
    queries<TypeParam, std::uint16_t> in{{rows, 2, dim}, packed({rows, 2, dim})};
    std::mt19937_64 random(5);
    const auto infinity = static_cast<std::uint16_t>((2 * format.bias + 1) << format.mantissa);
    in.fill([&](std::int64_t row, std::int64_t, std::int64_t i) -> std::uint16_t {
      const auto bits = static_cast<std::uint16_t>(random());
      const auto fraction = static_cast<std::uint16_t>((1 << format.mantissa) - 1);
      switch (row) {
        case 0: return 0;
        case 1: return 0x8000;
        case 2: return bits & (0x8000 | fraction);                                    // denormals
        case 3: return bits & (0x8000 | fraction) & (i % 64 == 3 ? 0xffff : 0x8001);  // the least ones
        case 4:
          return static_cast<std::uint16_t>((bits & (0x8000 | fraction)) | (infinity - fraction - 1));  // the greatest
        case 5: return i == 77 ? infinity : bits & 0x3fff;
        case 6:
          return i == 500 ? static_cast<std::uint16_t>(infinity | 0x8001) : bits & 0x3fff;  // a NaN among the turned
        case 7: return i == 511 ? static_cast<std::uint16_t>(0x8000 | infinity) : std::uint16_t{0};
        case 8: return i == 300 ? 1 : 0;
        case 9: return (bits & 0x7fff) >= infinity ? std::uint16_t{1} : bits;  // anything finite
        default: return bits;                                                  // anything
      }
    });
    for (const float eps : {1e-6f, 0.0f, 1e-45f, 1e30f, std::numeric_limits<float>::infinity()})
      for (const auto pairing : {rope_pairing::adjacent, rope_pairing::half_split})
        for (const auto kind : {weighting::none, weighting::wide}) {
          SCOPED_TRACE("eps " + std::to_string(eps));
          this->template expect_norm<T>(in, {{rows, 2, dim}, {64 * dim, dim, 1}}, kind,
                                        {.eps = eps, .pairing = pairing});
        }
  };
  expect(__nv_bfloat16{});
  expect(__half{});
}

TYPED_TEST_P(norm_rope_pad, rounds_each_operation_in_its_order) {
  // Results of 16 bits hide the last bits of fp32. Here they are all that is left: a pair's products differ by little.
  using T = __half;
  constexpr std::int64_t rows = 40, dim = 1024;
  std::mt19937_64 random(7);
  const auto fraction = [&] { return 1 + std::ldexp(static_cast<float>(random() % (1 << 23)), -23); };
  std::vector<float> weights(dim, 1.0f), angles(64);
  for (std::size_t i = 0; i < 32; ++i) {
    angles[i] = angles[32 + i] = fraction();
    weights[dim - 64 + 2 * i] = fraction();
    weights[dim - 64 + 2 * i + 1] = weights[dim - 64 + 2 * i] * (1 + std::ldexp(1.0f, -21));
  }
  queries<TypeParam, std::uint16_t> in{{rows, 1, dim}, packed({rows, 1, dim})},
      out{{rows, 1, dim}, packed({rows, 1, dim})};
  in.fill([&](std::int64_t, std::int64_t, std::int64_t i) -> std::uint16_t {
    const auto exponent = static_cast<int>(i < dim - 64 ? 6 + random() % 12 : 15);  // sums of squares round everywhere
    return static_cast<std::uint16_t>(exponent << 10 | (i < dim - 64 ? static_cast<int>(random() % 1024) : 0));
  });
  out.write();
  holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(),
                          this->positions_of(std::vector<std::int32_t>(rows)),
                          holdfast::view<const float, 2>{this->array(angles), 1, 64}, out.template view<T>(),
                          {.weight = this->array(weights)});
  support::driver<TypeParam>::synchronize(this->stream.get());
  std::vector<std::uint16_t> head(dim);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < dim; ++i) head[static_cast<std::size_t>(i)] = in.at(row, 0, i);
    const auto should =
        norm_reference::norm_and_rotate(norm_reference::fp16, head, weights, angles.data(), false, 1e-6f);
    for (std::int64_t i = 0; i < dim; ++i) out.at(row, 0, i) = should[static_cast<std::size_t>(i)];
  }
  EXPECT_TRUE(out.as_imagined());
}

TYPED_TEST_P(norm_rope_pad, of_zeros_is_zero) {
  using T = __nv_bfloat16;
  queries<TypeParam, std::uint16_t> in{{2, 3, 512}, packed({2, 3, 512})}, out{{2, 3, 512}, packed({2, 3, 512})};
  in.fill([](auto...) { return std::uint16_t{0}; });
  out.write();
  holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(),
                          this->positions_of(std::vector<std::int32_t>{0, 0}), this->angles(), out.template view<T>());
  support::driver<TypeParam>::synchronize(this->stream.get());
  out.each([&](std::int64_t row, std::int64_t head, std::int64_t i) { out.at(row, head, i) = 0; });
  EXPECT_TRUE(out.as_imagined());
}

TYPED_TEST_P(norm_rope_pad, writes_zeros_where_a_position_is_not_in_the_table) {
  using T = __nv_bfloat16;
  queries<TypeParam, std::uint16_t> in{{6, 2, 128}, packed({6, 2, 128})};
  this->template fill_usual<T>(in, 1);
  const auto expect = [&](const auto& given) {
    queries<TypeParam, std::uint16_t> out{{6, 2, 128}, {4 * 128, 128, 1}};
    out.write();
    std::vector<std::int64_t> valid;
    for (const auto position : given)
      valid.push_back(position >= 0 && position < this->table_rows ? static_cast<std::int64_t>(position) : -1);
    // every second one, and rows of the table farther apart
    auto doubled = given;
    doubled.clear();
    for (const auto position : given) doubled.insert(doubled.end(), {position, 0});
    using index = typename std::remove_cvref_t<decltype(given)>::value_type;
    std::vector<float> spread;
    for (std::size_t i = 0; i < this->table.size(); i += 64) {
      spread.insert(spread.end(), this->table.begin() + static_cast<std::ptrdiff_t>(i),
                    this->table.begin() + static_cast<std::ptrdiff_t>(i + 64));
      spread.resize(spread.size() + 4, std::numeric_limits<float>::quiet_NaN());
    }
    holdfast::norm_rope_pad(
        this->stream.get(), in.template view<const T>(),
        holdfast::make_strided_view<const index>(this->array(doubled), {6}, {2}),
        holdfast::make_strided_view<const float>(this->array(spread), {this->table_rows, 64}, {68, 1}),
        out.template view<T>());
    support::driver<TypeParam>::synchronize(this->stream.get());
    this->template norm<T>(in, valid, {}, {}, out);
    EXPECT_TRUE(out.as_imagined());
  };
  ASSERT_EQ(this->table_rows, 13);
  expect(std::vector<std::int32_t>{-1, 0, 12, 13, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()});
  expect(std::vector<std::int64_t>{-1, 12, 13, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 1,
                                   -(std::int64_t{1} << 32) + 5});
}

TYPED_TEST_P(norm_rope_pad, writes_zeros_where_rows_do_not_count) {
  using T = __nv_bfloat16;
  queries<TypeParam, std::uint16_t> in{{5, 3, 512}, packed({5, 3, 512})};
  this->template fill_usual<T>(in, 1);
  const auto expect = [&](auto limit, std::int64_t counted) {
    SCOPED_TRACE(limit);
    queries<TypeParam, std::uint16_t> out{{5, 3, 512}, {8 * 512, 512, 1}};
    out.write();
    const norm_rope_options options{.rows = this->array(std::vector{limit}), .programmatic = true};
    std::vector<std::int64_t> positions{1, 2, 3, 4, 5};
    holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(), this->positions_of(positions),
                            this->angles(), out.template view<T>(), options);
    support::driver<TypeParam>::synchronize(this->stream.get());
    for (std::int64_t row = counted; row < 5; ++row) positions[static_cast<std::size_t>(row)] = -1;
    this->template norm<T>(in, positions, {}, options, out);
    EXPECT_TRUE(out.as_imagined());
  };
  expect(std::int32_t{-7}, 0);
  expect(std::int32_t{3}, 3);
  expect(std::int64_t{0}, 0);
  expect(std::int64_t{1} << 40, 5);
}

TYPED_TEST_P(norm_rope_pad, in_place) {
  using T = __nv_bfloat16;
  queries<TypeParam, std::uint16_t> both{{3, 5, 512}, {8 * 512, 512, 1}};
  this->template fill_usual<T>(both, 1);
  holdfast::norm_rope_pad(this->stream.get(), both.template view<const T>(),
                          this->positions_of(std::vector<std::int32_t>{1, 2, 3}), this->angles(),
                          both.template view<T>(), {.pairing = rope_pairing::half_split});
  support::driver<TypeParam>::synchronize(this->stream.get());
  const auto before = both;
  this->template norm<T>(before, {1, 2, 3}, {}, {.pairing = rope_pairing::half_split}, both);
  EXPECT_TRUE(both.as_imagined());
}

TYPED_TEST_P(norm_rope_pad, of_nothing_queues_nothing) {
  using T = __nv_bfloat16;
  using driver = support::driver<TypeParam>;
  const auto none = [](std::int64_t rows, std::int64_t heads) {
    return holdfast::make_strided_view<T, 3>(nullptr, {rows, heads, 512}, {heads * 512, 512, 1});
  };
  const holdfast::view<const std::int32_t, 1> no_positions{nullptr, 0};
  driver::begin_capture(this->stream.get());
  holdfast::norm_rope_pad(this->stream.get(), none(0, 8), no_positions, this->angles(), none(0, 8));
  holdfast::norm_rope_pad(this->stream.get(), none(0, 0), no_positions, this->angles(), none(0, 0));
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).total(), 0);
}

TYPED_TEST_P(norm_rope_pad, replayed_reads_the_input_of_the_day) {
  using T = __nv_bfloat16;
  using driver = support::driver<TypeParam>;
  queries<TypeParam, std::uint16_t> in{{4, 3, 512}, packed({4, 3, 512})}, out{{4, 3, 512}, {8 * 512, 512, 1}};
  auto* const positions = this->array(std::vector<std::int64_t>{0, 0, 0, 0});
  this->expect_replays(
      [&] {
        holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(),
                                holdfast::view<const std::int64_t, 1>{positions, 4}, this->angles(),
                                out.template view<T>());
      },
      [&](std::uint64_t day, const auto& replay) {
        this->template fill_usual<T>(in, day);
        out.write();
        const auto first = static_cast<std::int64_t>(day);
        const std::vector<std::int64_t> today{first, first + 1, first + 2, -1};
        driver::write(positions, today);
        replay();
        this->template norm<T>(in, today, {}, {}, out);
        EXPECT_TRUE(out.as_imagined());
      });
}

TYPED_TEST_P(norm_rope_pad, into_a_buffer_acquires_and_pins_its_rows) {
  using T = __nv_bfloat16;
  using driver = support::driver<TypeParam>;
  const holdfast::query_shape shape{.heads = 3, .padded_heads = 8, .head_dim = 512};
  queries<TypeParam, std::uint16_t> in{{5, 3, 512}, packed({5, 3, 512})}, out{{5, 3, 512}, packed({5, 3, 512})};
  this->template fill_usual<T>(in, 1);
  const std::vector<std::int64_t> positions{1, 2, 3, 4, 5};
  const auto where = this->positions_of(positions);
  this->template norm<T>(in, positions, {}, {}, out);
  const auto expect = [&](const T* rows) {
    driver::synchronize(this->stream.get());
    const auto now = driver::read(reinterpret_cast<const std::uint16_t*>(rows), 5 * 8 * 512);
    out.each([&](std::int64_t row, std::int64_t head, std::int64_t i) {
      ASSERT_EQ(now[static_cast<std::size_t>((row * 8 + head) * 512 + i)], out.at(row, head, i));
    });
    EXPECT_TRUE(support::padding_is_zero<TypeParam>(reinterpret_cast<const std::uint16_t*>(rows), 5, shape));
  };
  auto buffer = this->template make<T>(shape);
  {
    const auto rows =
        holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(), where, this->angles(), buffer);
    EXPECT_EQ(rows.rows(), 5);
    expect(rows.data());
  }
  const auto before = buffer.acquire(this->stream.get(), 5);
  driver::begin_capture(this->stream.get());
  holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(), where, this->angles(), before);
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).total(), 1);
  EXPECT_EQ(buffer.pinned_bytes(), 5U * 8 * 512 * 2);
  auto exec = driver::instantiate(graph);
  support::write_heads(this->stream.get(), before, std::byte{0x7f});
  driver::launch(exec, this->stream.get());
  expect(before.data());

  queries<TypeParam, std::uint16_t> other{{5, 4, 512}, packed({5, 4, 512})};
  EXPECT_THROW(static_cast<void>(holdfast::norm_rope_pad(this->stream.get(), other.template view<const T>(), where,
                                                         this->angles(), buffer)),
               holdfast::logic_error);
}

TYPED_TEST_P(norm_rope_pad, reaches_beyond_32_bits) {
  using T = __nv_bfloat16;
  using driver = support::driver<TypeParam>;
  constexpr std::int64_t far = (std::int64_t{1} << 31) + 64;  // elements
  const auto memory = this->vast(static_cast<std::size_t>(2 * far + 4096));
  if (memory == nullptr) GTEST_SKIP() << "fewer than 8 GiB are free";
  queries<TypeParam, std::uint16_t> in{{2, 2, 64}, packed({2, 2, 64})}, out{{2, 2, 64}, packed({2, 2, 64})};
  this->template fill_usual<T>(in, 1);
  this->template norm<T>(in, {3, 4}, {}, {}, out);
  auto* const data = reinterpret_cast<T*>(memory.get());
  for (const triple strides : {triple{far, 64, 1}, triple{64, far, 1}}) {
    holdfast::norm_rope_pad(this->stream.get(), in.template view<const T>(),
                            this->positions_of(std::vector<std::int32_t>{3, 4}), this->angles(),
                            holdfast::make_strided_view<T, 3>(data, {2, 2, 64}, {strides[0], strides[1], 1}));
    driver::synchronize(this->stream.get());
    for (std::int64_t row = 0; row < 2; ++row)
      for (std::int64_t head = 0; head < 2; ++head) {
        const auto now =
            driver::read(reinterpret_cast<const std::uint16_t*>(data + row * strides[0] + head * strides[1]), 64);
        for (std::int64_t i = 0; i < 64; ++i) ASSERT_EQ(now[static_cast<std::size_t>(i)], out.at(row, head, i));
      }
  }
}

TYPED_TEST_P(norm_rope_pad, refuses_what_makes_no_sense) {
  using T = __nv_bfloat16;
  alignas(16) static T here[8];
  alignas(16) static float floats[8];
  static std::int32_t numbers[4];
  const auto view = [](const triple& extents, const triple& strides, T* data) {
    return holdfast::make_strided_view<T, 3>(data, {extents[0], extents[1], extents[2]},
                                             {strides[0], strides[1], strides[2]});
  };
  const triple strides{8192, 512, 1};
  const auto good = view({4, 16, 512}, strides, here);
  const holdfast::view<const std::int32_t, 1> four{numbers, 4};
  const holdfast::view<const float, 2> angles{floats, 100, 64};
  const auto refused = [&](const auto& in, const auto& positions, const auto& cos_sin, const auto& out,
                           const std::vector<std::string>& words, const norm_rope_options& options = {}) {
    this->expect_refused([&] { holdfast::norm_rope_pad(this->stream.get(), in, positions, cos_sin, out, options); },
                         words);
  };
  refused(view({3, 16, 512}, strides, here), four, angles, good,
          {"norm_rope_pad", "different extents", "in is [3, 16, 512]"});
  refused(view({-4, 16, 512}, strides, here), four, angles, view({-4, 16, 512}, strides, here),
          {"in has a negative extent"});
  refused(good, holdfast::view<const std::int32_t, 1>{numbers, 3}, angles, good, {"3 positions"});
  refused(good, holdfast::view<const std::int32_t, 1>{nullptr, 4}, angles, good, {"positions are null"});
  refused(good, four, holdfast::view<const float, 2>{floats, 100, 32}, good, {"a table [100, 32]"});
  refused(good, four, holdfast::view<const float, 2>{nullptr, 100, 64}, good, {"table is null"});
  refused(good, four, holdfast::view<const float, 2>{floats + 1, 100, 64}, good, {"table", "16 bytes"});
  refused(good, four, holdfast::make_strided_view<const float, 2>(floats, {100, 64}, {66, 1}), good,
          {"table", "16 bytes"});
  refused(good, four, holdfast::make_strided_view<const float, 2>(floats, {std::int64_t{1} << 60, 64}, {64, 1}), good,
          {"offsets of the table"});
  refused(view({4, 16, 96}, strides, here), four, angles, view({4, 16, 96}, strides, here), {"multiple of 64"});
  refused(view({4, 16, 1088}, strides, here), four, angles, view({4, 16, 1088}, strides, here), {"at most 1024"});
  refused(view({4, 16, 512}, strides, nullptr), four, angles, good, {"data of in is null"});
  refused(good, four, angles, view({4, 16, 512}, strides, nullptr), {"data of out is null"});
  refused(view({4, 16, 512}, strides, here + 1), four, angles, good, {"heads of in", "16 bytes"});
  refused(good, four, angles, view({4, 16, 512}, {8192, 516, 1}, here), {"heads of out", "16 bytes"});
  refused(view({4, 16, 512}, {16384, 1024, 2}, here), four, angles, good, {"in do not lie side by side"});
  refused(view({4, 16, 512}, {std::int64_t{1} << 62, 512, 1}, here), four, angles, good, {"offsets of in"});
  refused(good, four, angles, good, {"eps"}, {.eps = -1});
  refused(good, four, angles, good, {"eps"}, {.eps = std::numeric_limits<float>::quiet_NaN()});
  refused(good, four, angles, good, {"weight", "16 bytes"}, {.weight = floats + 1});
  refused(good, four, angles, good, {"another 16-bit type"}, {.weight = reinterpret_cast<const __half*>(here)});
  const auto many = view({4, std::int64_t{1} << 32, 64}, {0, 0, 1}, here);
  refused(many, four, angles, many, {"heads in all"});
}

REGISTER_TYPED_TEST_SUITE_P(norm_rope_pad, writes_the_real_heads_and_nothing_else,
                            of_every_kind_gives_the_reference_bits, of_strided_heads,
                            of_extreme_values_gives_the_reference_bits, rounds_each_operation_in_its_order,
                            of_zeros_is_zero, writes_zeros_where_a_position_is_not_in_the_table,
                            writes_zeros_where_rows_do_not_count, in_place, of_nothing_queues_nothing,
                            replayed_reads_the_input_of_the_day, into_a_buffer_acquires_and_pins_its_rows,
                            reaches_beyond_32_bits, refuses_what_makes_no_sense);

}  // namespace norm_rope_pad
