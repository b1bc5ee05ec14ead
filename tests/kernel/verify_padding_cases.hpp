// verify_padding; included by a host and by a CUDA test, after their launchers.
#pragma once

#include "support/buffers.hpp"

#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/tail_padded_allocator.hpp>
#include <holdfast/view.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace verify_padding {

using holdfast::padding_check;
using holdfast::padding_report;
using holdfast::query_shape;

template <class Device>
class verify_padding : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;

  void SetUp() override {
    support::buffer_test<Device>::SetUp();
    if (!this->IsSkipped()) {
      check = static_cast<padding_check*>(allocate(sizeof(padding_check)));
      drive::write(reinterpret_cast<std::byte*>(check), std::vector<std::byte>(sizeof(padding_check)));
    }
  }
  void TearDown() override {
    if (!memory_.empty()) {
      drive::synchronize(this->stream.get());
    }
    for (void* p : memory_) {
      drive::deallocate(p);
    }
    support::buffer_test<Device>::TearDown();
  }

  void* allocate(std::size_t bytes) {
    memory_.push_back(drive::allocate(bytes));
    return memory_.back();
  }
  void set(const void* at, std::size_t offset, std::byte value, std::size_t bytes = 1) {
    Device::fill(this->stream.get(), static_cast<std::byte*>(const_cast<void*>(at)) + offset, value, bytes);
  }
  padding_report report() {
    drive::synchronize(this->stream.get());
    return drive::read(&check->report, 1)[0];
  }

  /// Rows of `T` whose padding is zero and whose real heads are not, `shift` elements from where memory begins.
  template <class T>
  holdfast::strided_view<T, 3> rows_of(std::int64_t rows, const query_shape& shape, std::int64_t shift = 0,
                                       std::int64_t gap = 0) {
    const std::int64_t head_bytes = shape.head_dim * std::int64_t{sizeof(T)},
                       stride = shape.padded_heads * shape.head_dim;
    auto* const data = static_cast<T*>(allocate(static_cast<std::size_t>(shift + rows * (stride + gap)) * sizeof(T)));
    set(data, 0, std::byte{0x7f}, static_cast<std::size_t>(shift + rows * (stride + gap)) * sizeof(T));
    for (std::int64_t row = 0; row < rows; ++row)
      set(data + shift + row * (stride + gap), static_cast<std::size_t>(shape.heads * head_bytes), std::byte{0},
          static_cast<std::size_t>((shape.padded_heads - shape.heads) * head_bytes));
    return holdfast::make_strided_view(data + shift, {rows, shape.padded_heads, shape.head_dim},
                                       {stride + gap, shape.head_dim, 1});
  }

  padding_check* check = nullptr;

 private:
  std::vector<void*> memory_;
};
TYPED_TEST_SUITE_P(verify_padding);

TYPED_TEST_P(verify_padding, of_what_nobody_wrote_is_clean) {
  auto buffer = this->template make<std::uint16_t>({.heads = 3, .padded_heads = 8, .head_dim = 16});
  EXPECT_TRUE(holdfast::verify_padding(this->stream.get(), buffer).clean()) << "no rows yet";
  auto rows = buffer.acquire(this->stream.get(), 5);
  support::write_heads(this->stream.get(), rows, std::byte{0xff});
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), rows), padding_report{});
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), buffer), padding_report{});
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), rows.view(), 3), padding_report{});
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), rows.view(), 8), padding_report{}) << "nothing is padded";
  EXPECT_FALSE(holdfast::verify_padding(this->stream.get(), rows.view(), 2).clean()) << "head 2 is real";
}

TYPED_TEST_P(verify_padding, finds_one_bad_byte_wherever_it_is) {
  const query_shape shape{.heads = 3, .padded_heads = 5, .head_dim = 8};
  constexpr std::int64_t row_bytes = 5 * 8 * 2, real_bytes = 3 * 8 * 2;
  const auto view = this->template rows_of<std::uint16_t>(3, shape);
  for (std::int64_t at = 0; at < 3 * row_bytes; ++at) {
    const bool padding = at % row_bytes >= real_bytes;
    this->set(view.data_handle(), static_cast<std::size_t>(at), std::byte{0x01});
    holdfast::verify_padding_async(this->stream.get(), view, 3, this->check);
    EXPECT_EQ(this->report(), (padding ? padding_report{1, at} : padding_report{})) << at;
    this->set(view.data_handle(), static_cast<std::size_t>(at), std::byte{0});
  }
}

TYPED_TEST_P(verify_padding, counts_bad_bytes_of_any_width_and_alignment) {
  std::mt19937 random(1);
  const auto expect = [&]<class T>(T, const query_shape& shape, std::int64_t shift, std::int64_t gap) {
    SCOPED_TRACE(std::to_string(sizeof(T)) + "-byte elements, shifted by " + std::to_string(shift) + ", gaps of " +
                 std::to_string(gap));
    constexpr std::int64_t rows = 7;
    const auto view = this->template rows_of<T>(rows, shape, shift, gap);
    const std::int64_t head = shape.head_dim * std::int64_t{sizeof(T)}, real = shape.heads * head;
    padding_report should;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t byte = real; byte < shape.padded_heads * head; ++byte)
        if (random() % 3 == 0) {
          const std::int64_t at = row * (shape.padded_heads * shape.head_dim + gap) * std::int64_t{sizeof(T)} + byte;
          if (should.clean()) should.first_bad_offset = at;
          ++should.bad_bytes;
          this->set(view.data_handle(), static_cast<std::size_t>(at), static_cast<std::byte>(1U << random() % 8));
        }
    holdfast::verify_padding_async(this->stream.get(), view, shape.heads, this->check);
    EXPECT_EQ(this->report(), should);
  };
  expect(std::uint8_t{}, {.heads = 3, .padded_heads = 8, .head_dim = 16}, 0, 0);
  expect(std::uint8_t{}, {.heads = 3, .padded_heads = 8, .head_dim = 12}, 0, 4);
  expect(std::uint8_t{}, {.heads = 1, .padded_heads = 4, .head_dim = 13}, 1, 3);
  expect(std::uint16_t{}, {.heads = 2, .padded_heads = 3, .head_dim = 8}, 1, 0);
  expect(std::uint32_t{}, {.heads = 0, .padded_heads = 2, .head_dim = 8}, 1, 1);
  expect(double{}, {.heads = 1, .padded_heads = 2, .head_dim = 8}, 0, 2);
}

TYPED_TEST_P(verify_padding, of_many_rows_finds_the_first_and_the_last_byte) {
  const query_shape shape{.heads = 16, .padded_heads = 64, .head_dim = 512};
  constexpr std::int64_t rows = 1100, row_bytes = 64 * 512;  // beyond what blocks check without a second turn
  const auto view = this->template rows_of<std::uint16_t>(rows, shape);
  holdfast::verify_padding_async(this->stream.get(), view, 16, this->check);
  EXPECT_EQ(this->report(), padding_report{});
  this->set(view.data_handle(), rows * row_bytes * 2 - 1, std::byte{0x80});
  holdfast::verify_padding_async(this->stream.get(), view, 16, this->check);
  EXPECT_EQ(this->report(), (padding_report{1, rows * row_bytes * 2 - 1}));
  this->set(view.data_handle(), 16 * 512 * 2, std::byte{0x01});
  holdfast::verify_padding_async(this->stream.get(), view, 16, this->check);
  EXPECT_EQ(this->report(), (padding_report{2, 16 * 512 * 2}));
  holdfast::verify_padding_async(this->stream.get(), view, 15, this->check);
  EXPECT_EQ(this->report(), (padding_report{rows * 512 * 2 + 2, 15 * 512 * 2}));
}

TYPED_TEST_P(verify_padding, looks_only_at_rows_that_count) {
  const query_shape shape{.heads = 1, .padded_heads = 2, .head_dim = 8};
  const auto view = this->template rows_of<std::uint16_t>(4, shape);
  this->set(view.data_handle(), 2 * 32 + 16, std::byte{1}, 16);  // row 2
  this->set(view.data_handle(), 3 * 32 + 16, std::byte{1}, 16);
  const auto bad_below = [&](auto limit) {
    auto* const at = static_cast<decltype(limit)*>(this->allocate(sizeof limit));
    support::driver<TypeParam>::write(at, std::vector{limit});
    holdfast::verify_padding_async(this->stream.get(), view, 1, this->check, {.rows = at, .programmatic = true});
    return this->report().bad_bytes;
  };
  EXPECT_EQ(bad_below(std::int32_t{-1}), 0);
  EXPECT_EQ(bad_below(std::int32_t{0}), 0);
  EXPECT_EQ(bad_below(std::int32_t{2}), 0);
  EXPECT_EQ(bad_below(std::int64_t{3}), 16);
  EXPECT_EQ(bad_below(std::int64_t{4}), 32);
  EXPECT_EQ(bad_below(std::int64_t{1} << 40), 32);
}

TYPED_TEST_P(verify_padding, of_nothing_still_leaves_a_report) {
  const auto view = this->template rows_of<std::uint16_t>(1, {.heads = 1, .padded_heads = 2, .head_dim = 8});
  const auto none = holdfast::make_strided_view<std::uint16_t, 3>(nullptr, {0, 8, 16}, {128, 16, 1});
  this->set(view.data_handle(), 16, std::byte{1});
  holdfast::verify_padding_async(this->stream.get(), view, 1, this->check);
  EXPECT_FALSE(this->report().clean());
  holdfast::verify_padding_async(this->stream.get(), none, 3, this->check);
  EXPECT_EQ(this->report(), padding_report{});
}

TYPED_TEST_P(verify_padding, in_a_capture_is_one_kernel_that_sees_the_bytes_of_the_day) {
  using driver = support::driver<TypeParam>;
  const std::uint16_t* data = nullptr;
  auto graph = [&] {
    auto buffer = this->template make<std::uint16_t>({.heads = 1, .padded_heads = 2, .head_dim = 8});
    const auto rows = buffer.acquire(this->stream.get(), 4);
    data = rows.data();
    driver::synchronize(this->stream.get());
    driver::begin_capture(this->stream.get());
    holdfast::verify_padding_async(this->stream.get(), rows, this->check);
    return driver::end_capture(this->stream.get());
  }();
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).kernels, 1);
  EXPECT_EQ(driver::count(graph).total(), 1);
  EXPECT_TRUE(this->resource.is_live(data)) << "the graph owns the rows";
  auto exec = driver::instantiate(graph);
  for (const int bad : {0, 3, 0, 16}) {
    this->set(data, 16, std::byte{0}, 16);
    this->set(data, 16, std::byte{5}, static_cast<std::size_t>(bad));
    driver::launch(exec, this->stream.get());
    EXPECT_EQ(this->report(), (bad == 0 ? padding_report{} : padding_report{bad, 16}));
  }
}

TYPED_TEST_P(verify_padding, of_a_buffer_looks_at_all_rows_and_can_be_captured) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->template make<std::uint16_t>({.heads = 1, .padded_heads = 2, .head_dim = 8});
  buffer.reserve(6);
  this->set(buffer.data(), 5 * 32 + 31, std::byte{1});
  const auto rows = buffer.acquire(this->stream.get(), 5);
  EXPECT_TRUE(holdfast::verify_padding(this->stream.get(), rows).clean());
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), buffer), (padding_report{1, 5 * 32 + 31}));
  driver::begin_capture(this->stream.get());
  holdfast::verify_padding_async(this->stream.get(), buffer, this->check);
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).total(), 1);
  EXPECT_EQ(buffer.pinned_bytes(), 6U * 32);
}

TYPED_TEST_P(verify_padding, of_scratch_looks_at_its_tail) {
  holdfast::tail_padded_allocator<std::uint8_t, TypeParam> kv{
      this->resource, {.row_elements = 48, .over_read = holdfast::over_read::rows_beyond(3)}};
  const auto rows = kv.acquire(this->stream.get(), 5);
  this->set(rows.data(), 0, std::byte{0x7f}, 5 * 48);
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), rows), padding_report{});
  this->set(rows.data(), 5 * 48 + 50, std::byte{0x80}, 2);
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), rows), (padding_report{2, 5 * 48 + 50}));
  const auto none = kv.acquire(this->stream.get(), 0);
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), none), padding_report{}) << "a tail without rows";
  this->set(none.data(), 0, std::byte{1});
  EXPECT_EQ(holdfast::verify_padding(this->stream.get(), none), (padding_report{1, 0}));
}

TYPED_TEST_P(verify_padding, that_waits_refuses_a_capture_and_leaves_it_valid) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->template make<std::uint16_t>({.heads = 1, .padded_heads = 2, .head_dim = 8});
  auto beside = driver::make_stream();
  static_cast<void>(holdfast::verify_padding(beside.get(), buffer));  // once before, as first calls do more
  for (const support::capture_mode mode : support::capture_modes) {
    auto capturing = driver::make_stream();
    driver::begin_capture(capturing.get(), mode);
    EXPECT_THROW(static_cast<void>(holdfast::verify_padding(capturing.get(), buffer)), holdfast::logic_error);
    EXPECT_TRUE(holdfast::verify_padding(beside.get(), buffer).clean());
    EXPECT_TRUE(driver::end_capture(capturing.get())) << static_cast<int>(mode);
  }
}

TYPED_TEST_P(verify_padding, refuses_what_makes_no_sense) {
  const auto on = this->stream.get();
  const auto view = this->template rows_of<std::uint16_t>(2, {.heads = 1, .padded_heads = 4, .head_dim = 8});
  const auto refused = [&](const auto& of, std::int64_t heads) {
    EXPECT_THROW(holdfast::verify_padding_async(on, of, heads, this->check), holdfast::logic_error);
  };
  auto* const data = view.data_handle();
  EXPECT_THROW(holdfast::verify_padding_async(on, view, 1, nullptr), holdfast::logic_error);
  refused(view, -1);
  refused(view, 5);
  refused(holdfast::make_strided_view<std::uint16_t, 3>(nullptr, {2, 4, 8}, {32, 8, 1}), 1);
  refused(holdfast::make_strided_view<std::uint16_t, 3>(data, {-2, 4, 8}, {32, 8, 1}), 1);
  refused(holdfast::make_strided_view<std::uint16_t, 3>(data, {1, 4, 8}, {32, 16, 1}), 1);  // gaps between heads
  refused(holdfast::make_strided_view<std::uint16_t, 3>(data, {1, 4, 8}, {32, 8, 2}), 1);
  refused(holdfast::make_strided_view<std::uint16_t, 3>(data, {4, 4, 8}, {std::int64_t{1} << 62, 8, 1}), 1);
}

REGISTER_TYPED_TEST_SUITE_P(verify_padding, of_what_nobody_wrote_is_clean, finds_one_bad_byte_wherever_it_is,
                            counts_bad_bytes_of_any_width_and_alignment, of_many_rows_finds_the_first_and_the_last_byte,
                            looks_only_at_rows_that_count, of_nothing_still_leaves_a_report,
                            in_a_capture_is_one_kernel_that_sees_the_bytes_of_the_day,
                            of_a_buffer_looks_at_all_rows_and_can_be_captured, of_scratch_looks_at_its_tail,
                            that_waits_refuses_a_capture_and_leaves_it_valid, refuses_what_makes_no_sense);

}  // namespace verify_padding
