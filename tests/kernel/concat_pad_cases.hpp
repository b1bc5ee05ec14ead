// concat_pad; included by a host and by a CUDA test, after their launchers.
#pragma once

#include "support/queries.hpp"

#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/view.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace concat_pad {

using support::packed;
using support::queries;
using support::triple;

template <class Device>
class concat_pad : public support::producer_test<Device> {
 protected:
  using drive = support::driver<Device>;

  template <class Bits>
  struct sides {
    queries<Device, Bits> first, second, out;

    void fill(std::uint64_t seed) {
      first.fill_random(seed);
      second.fill_random(seed + 1000);
      out.write();
    }
    /// What the image of `out` becomes when `rows` rows count.
    void concat(std::int64_t rows = std::numeric_limits<std::int64_t>::max()) {
      const std::int64_t width = first.extents()[2];
      out.each([&](std::int64_t row, std::int64_t head, std::int64_t i) {
        out.at(row, head, i) = row >= rows ? Bits{0}
                               : i < width ? first.at(row, head, i)
                                           : second.at(row, head, i - width);
      });
    }
    [[nodiscard]] ::testing::AssertionResult as_imagined() const {
      for (const queries<Device, Bits>* side : {&first, &second, &out})
        if (auto result = side->as_imagined(); !result)
          return result << (side == &first ? " (absorbed)" : side == &second ? " (rope)" : " (out)");
      return ::testing::AssertionSuccess();
    }
  };

  template <class Bits>
  void expect_concat(sides<Bits> all, std::uint64_t seed) {
    all.fill(seed);
    holdfast::concat_pad(this->stream.get(), all.first.template view<const Bits>(),
                         all.second.template view<const Bits>(), all.out.view());
    drive::synchronize(this->stream.get());
    all.concat();
    EXPECT_TRUE(all.as_imagined());
  }

  /// As engines have them: absorbed heads first, rows of 64 heads of 576.
  static sides<std::uint16_t> usual(std::int64_t rows, std::int64_t heads) {
    return {{{rows, heads, 512}, {512, rows * 512, 1}},
            {{rows, heads, 64}, {heads * 192, 192, 1}},
            {{rows, heads, 576}, {64 * 576, 576, 1}}};
  }
};
TYPED_TEST_SUITE_P(concat_pad);

TYPED_TEST_P(concat_pad, writes_the_real_heads_and_nothing_else) {
  std::uint64_t seed = 0;
  for (const std::int64_t rows : {1, 2, 33})
    for (const std::int64_t heads : {1, 8, 17, 64}) {
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(heads) + " heads");
      this->expect_concat(this->usual(rows, heads), ++seed);
    }
}

TYPED_TEST_P(concat_pad, of_any_widths_strides_and_alignment) {
  std::uint64_t seed = 0;
  const auto expect = [&]<class Bits>(Bits) {
    for (const auto& [a, b] :
         {std::array{16, 16}, std::array{24, 8}, std::array{5, 2}, std::array{0, 16}, std::array{16, 0}})
      for (const std::int64_t shift : {0, 1, 2})
        for (int layout = 0; layout < 4; ++layout) {
          SCOPED_TRACE(std::to_string(sizeof(Bits)) + "-byte elements, " + std::to_string(a) + " + " +
                       std::to_string(b) + ", shift " + std::to_string(shift) + ", layout " + std::to_string(layout));
          const auto strides = [&](std::int64_t width) -> triple {
            switch (layout) {
              case 0: return {3 * width, width, 1};
              case 1: return {width, 5 * width + 1, 1};  // heads outermost, odd gaps
              case 2: return {6 * width, 2 * width, 2};  // every second element
              default: return {3, 1, 15};                // elements outermost
            }
          };
          this->template expect_concat<Bits>({{{5, 3, a}, strides(a + 1), shift},
                                              {{5, 3, b}, strides(b + 1)},
                                              {{5, 3, a + b}, strides(a + b + layout / 2), shift / 2}},
                                             ++seed);
        }
  };
  expect(std::uint8_t{});
  expect(std::uint16_t{});
  expect(std::uint64_t{});
}

TYPED_TEST_P(concat_pad, writes_zeros_where_rows_do_not_count) {
  using driver = support::driver<TypeParam>;
  const auto expect = [&](auto limit, std::int64_t counted) {
    SCOPED_TRACE(limit);
    auto all = this->usual(5, 3);
    all.fill(1);
    holdfast::concat_pad(this->stream.get(), all.first.view(), all.second.view(), all.out.view(),
                         {.rows = this->array(std::vector{limit}), .programmatic = true});
    driver::synchronize(this->stream.get());
    all.concat(counted);
    EXPECT_TRUE(all.as_imagined());
  };
  expect(std::int32_t{-7}, 0);
  expect(std::int32_t{0}, 0);
  expect(std::int32_t{3}, 3);
  expect(std::int64_t{4}, 4);
  expect(std::int64_t{1} << 40, 5);
  expect(std::numeric_limits<std::int64_t>::min(), 0);
}

TYPED_TEST_P(concat_pad, of_nothing_queues_nothing) {
  using driver = support::driver<TypeParam>;
  using T = std::uint16_t;
  const auto view = [](const triple& extents) {
    return holdfast::make_strided_view<T, 3>(nullptr, {extents[0], extents[1], extents[2]}, {0, 0, 1});
  };
  driver::begin_capture(this->stream.get());
  holdfast::concat_pad(this->stream.get(), view({0, 8, 512}), view({0, 8, 64}), view({0, 8, 576}));
  holdfast::concat_pad(this->stream.get(), view({8, 0, 512}), view({8, 0, 64}), view({8, 0, 576}));
  holdfast::concat_pad(this->stream.get(), view({8, 8, 0}), view({8, 8, 0}), view({8, 8, 0}));
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).total(), 0);
}

TYPED_TEST_P(concat_pad, replayed_reads_the_input_of_the_day) {
  auto all = this->usual(9, 8);
  all.fill(1);
  auto* const live = this->array(std::vector<std::int32_t>{9});
  this->expect_replays(
      [&] {
        holdfast::concat_pad(this->stream.get(), all.first.view(), all.second.view(), all.out.view(), {.rows = live});
      },
      [&](std::uint64_t day, const auto& replay) {
        all.fill(day);
        support::driver<TypeParam>::write(live, std::vector{static_cast<std::int32_t>(2 * day)});
        replay();
        all.concat(static_cast<std::int64_t>(2 * day));
        EXPECT_TRUE(all.as_imagined());
      });
}

TYPED_TEST_P(concat_pad, into_a_buffer_acquires_and_pins_its_rows) {
  using driver = support::driver<TypeParam>;
  auto all = this->usual(5, 3);
  all.fill(1);
  all.concat();
  const auto expect = [&](const std::uint16_t* data) {
    driver::synchronize(this->stream.get());
    const auto now = driver::read(data, 5 * 64 * 576);
    all.out.each([&](std::int64_t row, std::int64_t head, std::int64_t i) {
      ASSERT_EQ(now[static_cast<std::size_t>((row * 64 + head) * 576 + i)], all.out.at(row, head, i));
    });
    EXPECT_TRUE((support::padding_is_zero<TypeParam>(data, 5, {.heads = 3, .padded_heads = 64, .head_dim = 576})));
  };
  auto buffer = this->template make<std::uint16_t>({.heads = 3, .padded_heads = 64, .head_dim = 576});
  {
    const auto rows = holdfast::concat_pad(this->stream.get(), all.first.view(), all.second.view(), buffer);
    EXPECT_EQ(rows.rows(), 5);
    expect(rows.data());
  }
  const auto before = buffer.acquire(this->stream.get(), 5);
  driver::begin_capture(this->stream.get());
  holdfast::concat_pad(this->stream.get(), all.first.view(), all.second.view(), before);
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).total(), 1);
  EXPECT_EQ(buffer.pinned_bytes(), 5U * 64 * 576 * 2);
  auto exec = driver::instantiate(graph);
  support::write_heads(this->stream.get(), before, std::byte{0x7f});
  driver::launch(exec, this->stream.get());
  expect(before.data());
  EXPECT_THROW(static_cast<void>(holdfast::concat_pad(this->stream.get(), all.first.view(), all.first.view(), buffer)),
               holdfast::logic_error);
}

TYPED_TEST_P(concat_pad, reaches_beyond_32_bits) {
  using driver = support::driver<TypeParam>;
  constexpr std::int64_t far = (std::int64_t{1} << 32) + 64;
  const auto memory = this->vast(static_cast<std::size_t>(far + 4096));
  if (memory == nullptr) GTEST_SKIP() << "fewer than 8 GiB are free";
  queries<TypeParam, std::uint8_t> first{{2, 2, 48}, packed({2, 2, 48})}, second{{2, 2, 16}, packed({2, 2, 16})};
  first.fill_random(1);
  second.fill_random(2);
  auto* const out = reinterpret_cast<std::uint8_t*>(memory.get());
  for (const triple strides : {triple{far, 64, 1}, triple{64, far, 1}}) {
    holdfast::concat_pad(this->stream.get(), first.view(), second.view(),
                         holdfast::make_strided_view<std::uint8_t, 3>(out, {2, 2, 64}, {strides[0], strides[1], 1}));
    driver::synchronize(this->stream.get());
    for (std::int64_t row = 0; row < 2; ++row)
      for (std::int64_t head = 0; head < 2; ++head) {
        const auto now = driver::read(out + row * strides[0] + head * strides[1], 64);
        for (std::int64_t i = 0; i < 64; ++i)
          ASSERT_EQ(now[static_cast<std::size_t>(i)], i < 48 ? first.at(row, head, i) : second.at(row, head, i - 48));
      }
  }
}

TYPED_TEST_P(concat_pad, refuses_what_makes_no_sense) {
  using T = std::uint16_t;
  alignas(16) static T somewhere[8];
  const auto view = [](const triple& extents, std::int64_t row_stride, T* data) {
    return holdfast::make_strided_view<T, 3>(data, {extents[0], extents[1], extents[2]}, {row_stride, extents[2], 1});
  };
  const auto a = view({4, 16, 512}, 8192, somewhere), b = view({4, 16, 64}, 1024, somewhere);
  const auto out = view({4, 16, 576}, 64 * 576, somewhere);
  const auto refused = [&](const auto& absorbed, const auto& rope, const auto& to,
                           const std::vector<std::string>& words) {
    this->expect_refused([&] { holdfast::concat_pad(this->stream.get(), absorbed, rope, to); }, words);
  };
  refused(view({3, 16, 512}, 8192, somewhere), b, out, {"concat_pad", "rows differ", "absorbed is [3, 16, 512]"});
  refused(a, view({4, 15, 64}, 1024, somewhere), out, {"heads differ", "rope is [4, 15, 64]"});
  refused(a, a, out, {"widths do not add up", "out is [4, 16, 576]"});
  refused(view({4, 16, -512}, 8192, somewhere), b, out, {"absorbed has a negative extent"});
  refused(view({4, 16, 512}, 8192, nullptr), b, out, {"data of absorbed is null"});
  refused(a, view({4, 16, 64}, 1024, nullptr), out, {"data of rope is null"});
  refused(a, b, view({4, 16, 576}, 64 * 576, nullptr), {"data of out is null"});
  refused(a, view({4, 16, 64}, std::int64_t{1} << 62, somewhere), out, {"offsets of rope", "2^63"});
  constexpr std::int64_t vast = std::int64_t{1} << 35;
  refused(view({1, 1, vast}, 0, somewhere), view({1, 1, vast}, 0, somewhere), view({1, 1, 2 * vast}, 0, somewhere),
          {"more than 1073741824 packets of 16 bytes"});
}

REGISTER_TYPED_TEST_SUITE_P(concat_pad, writes_the_real_heads_and_nothing_else, of_any_widths_strides_and_alignment,
                            writes_zeros_where_rows_do_not_count, of_nothing_queues_nothing,
                            replayed_reads_the_input_of_the_day, into_a_buffer_acquires_and_pins_its_rows,
                            reaches_beyond_32_bits, refuses_what_makes_no_sense);

}  // namespace concat_pad
