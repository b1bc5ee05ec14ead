// pad_queries into a buffer and into acquired rows; included by a host and by a CUDA test, after their launchers.
#pragma once

#include "support/buffers.hpp"

#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/view.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace pad_queries_buffer {

using holdfast::query_shape;
using values = std::vector<std::uint16_t>;

template <class Device>
class pad_queries_buffer : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;

  void TearDown() override {
    for (void* p : memory_) {
      drive::deallocate(p);
    }
    support::buffer_test<Device>::TearDown();
  }

  /// Queries [rows, heads, dim] numbered from 1 in device memory.
  holdfast::view<const std::uint16_t, 3> queries(std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    values numbers(static_cast<std::size_t>(rows * heads * dim));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<std::uint16_t>(i + 1);
    }
    auto* const data = static_cast<std::uint16_t*>(drive::allocate(numbers.size() * sizeof(std::uint16_t)));
    memory_.push_back(data);
    drive::write(data, numbers);
    return holdfast::view<const std::uint16_t, 3>{data, holdfast::extents<3>{rows, heads, dim}};
  }

  static values padded(std::int64_t rows, const query_shape& shape) {
    values expected(static_cast<std::size_t>(rows * shape.padded_heads * shape.head_dim));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < shape.heads * shape.head_dim; ++i) {
        expected[static_cast<std::size_t>(row * shape.padded_heads * shape.head_dim + i)] =
            static_cast<std::uint16_t>(row * shape.heads * shape.head_dim + i + 1);
      }
    }
    return expected;
  }

 private:
  std::vector<void*> memory_;
};
TYPED_TEST_SUITE_P(pad_queries_buffer);

TYPED_TEST_P(pad_queries_buffer, acquires_fills_and_returns_the_rows) {
  const query_shape shape{.heads = 3, .padded_heads = 8, .head_dim = 16};
  auto buffer = this->template make<std::uint16_t>(shape);
  const auto rows = holdfast::pad_queries(this->stream.get(), this->queries(5, 3, 16), buffer);
  support::driver<TypeParam>::synchronize(this->stream.get());
  EXPECT_EQ(rows.rows(), 5);
  EXPECT_EQ(support::driver<TypeParam>::read(rows.data(), 5 * 8 * 16), this->padded(5, shape));
}

TYPED_TEST_P(pad_queries_buffer, refuses_queries_of_another_shape_and_changes_nothing) {
  auto buffer = this->template make<std::uint16_t>({.heads = 3, .padded_heads = 8, .head_dim = 16});
  EXPECT_THROW(static_cast<void>(holdfast::pad_queries(this->stream.get(), this->queries(5, 4, 16), buffer)),
               holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(holdfast::pad_queries(this->stream.get(), this->queries(5, 3, 24), buffer)),
               holdfast::logic_error);
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST_P(pad_queries_buffer, borrows_packed_queries_where_nothing_is_padded) {
  auto buffer = this->template make<std::uint16_t>({.heads = 8, .padded_heads = 8, .head_dim = 16});
  const auto in = this->queries(5, 8, 16);
  const auto rows = holdfast::pad_queries(this->stream.get(), in, buffer);
  EXPECT_TRUE(rows.borrowed());
  EXPECT_EQ(rows.data(), in.data_handle());
  EXPECT_EQ(rows.rows(), 5);
  EXPECT_THROW(static_cast<void>(rows.heads_view()), holdfast::logic_error);
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST_P(pad_queries_buffer, copies_strided_queries_where_nothing_is_padded) {
  const query_shape shape{.heads = 4, .padded_heads = 4, .head_dim = 16};
  auto buffer = this->template make<std::uint16_t>(shape);
  const auto all = this->queries(5, 8, 16);
  const auto some = holdfast::make_strided_view(all.data_handle(), {5, 4, 16}, {8 * 16, 16, 1});
  const auto rows = holdfast::pad_queries(this->stream.get(), some, buffer);
  support::driver<TypeParam>::synchronize(this->stream.get());
  EXPECT_FALSE(rows.borrowed());
  EXPECT_EQ(support::driver<TypeParam>::read(rows.data() + 4 * 16, 1)[0], 8 * 16 + 1) << "row 1";
}

TYPED_TEST_P(pad_queries_buffer, of_no_rows_queues_nothing) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->template make<std::uint16_t>({.heads = 3, .padded_heads = 8, .head_dim = 16});
  const holdfast::view<const std::uint16_t, 3> none{nullptr, holdfast::extents<3>{0, 3, 16}};
  driver::begin_capture(this->stream.get());
  const auto rows = holdfast::pad_queries(this->stream.get(), none, buffer);
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(rows.rows(), 0);
  EXPECT_EQ(driver::count(graph).total(), 0);
}

TYPED_TEST_P(pad_queries_buffer, in_a_capture_is_one_kernel_node_whose_graph_owns_the_rows) {
  using driver = support::driver<TypeParam>;
  const query_shape shape{.heads = 3, .padded_heads = 8, .head_dim = 16};
  const std::uint16_t* data = nullptr;
  const auto in = this->queries(5, 3, 16);
  auto graph = [&] {
    auto buffer = this->template make<std::uint16_t>(shape);
    driver::begin_capture(this->stream.get());
    data = holdfast::pad_queries(this->stream.get(), in, buffer).data();
    return driver::end_capture(this->stream.get());
  }();
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).kernels, 1);
  EXPECT_EQ(driver::count(graph).total(), 1);
  EXPECT_TRUE(this->resource.is_live(data));
  auto exec = driver::instantiate(graph);
  driver::launch(exec, this->stream.get());
  driver::synchronize(this->stream.get());
  EXPECT_EQ(driver::read(data, 5 * 8 * 16), this->padded(5, shape));
}

TYPED_TEST_P(pad_queries_buffer, into_rows_acquired_before_the_capture_pins_them) {
  using driver = support::driver<TypeParam>;
  const auto in = this->queries(5, 3, 16);
  auto buffer = this->template make<std::uint16_t>({.heads = 3, .padded_heads = 8, .head_dim = 16});
  auto rows = buffer.acquire(this->stream.get(), 5);
  driver::begin_capture(this->stream.get());
  holdfast::pad_queries(this->stream.get(), in, rows);
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(buffer.pinned_bytes(), 5U * 8 * 16 * sizeof(std::uint16_t));
}

TYPED_TEST_P(pad_queries_buffer, leaves_every_capture_valid) {
  using driver = support::driver<TypeParam>;
  const auto in = this->queries(5, 3, 16);
  auto beside = driver::make_stream();  // streams outlive the blocks used on them
  for (const support::capture_mode mode : support::capture_modes) {
    for (const support::stream_kind kind : support::stream_kinds) {
      auto capturing = driver::make_stream(kind);
      auto buffer = this->template make<std::uint16_t>({.heads = 3, .padded_heads = 8, .head_dim = 16});
      driver::begin_capture(capturing.get(), mode);
      static_cast<void>(holdfast::pad_queries(capturing.get(), in, buffer));
      static_cast<void>(holdfast::pad_queries(beside.get(), in, buffer));
      EXPECT_TRUE(driver::end_capture(capturing.get())) << static_cast<int>(mode);
      driver::synchronize(beside.get());
      EXPECT_EQ(driver::read(buffer.data(), 1)[0], 1) << "the eager launch ran";
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(pad_queries_buffer, acquires_fills_and_returns_the_rows,
                            refuses_queries_of_another_shape_and_changes_nothing,
                            borrows_packed_queries_where_nothing_is_padded,
                            copies_strided_queries_where_nothing_is_padded, of_no_rows_queues_nothing,
                            in_a_capture_is_one_kernel_node_whose_graph_owns_the_rows,
                            into_rows_acquired_before_the_capture_pins_them, leaves_every_capture_valid);

}  // namespace pad_queries_buffer
