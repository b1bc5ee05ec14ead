// Promise 3: padding is zero when it comes into being, and written by nothing else.
#include "support/buffers.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace {

using support::padding_is_zero;
using support::small_shape;

template <class Device>
class padded_query_buffer_padding : public support::buffer_test<Device> {};
TYPED_TEST_SUITE(padded_query_buffer_padding, support::both_devices, support::device_names);

TYPED_TEST(padded_query_buffer_padding, is_zero_in_every_row_of_fresh_memory) {
  auto buffer = this->make();
  buffer.reserve(33);
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 33, small_shape));
}

TYPED_TEST(padded_query_buffer_padding, is_zero_in_rows_added_by_growth) {
  auto buffer = this->make();
  buffer.reserve(4);
  static_cast<void>(buffer.acquire(this->stream.get(), 16));
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 16, small_shape));
}

TYPED_TEST(padded_query_buffer_padding, costs_no_fill_of_the_real_heads) {
  auto buffer = this->make();
  buffer.reserve(5);
  const auto first = support::driver<TypeParam>::template read<unsigned char>(
      reinterpret_cast<const unsigned char*>(buffer.data()), 3 * 16 * sizeof(float));
  EXPECT_EQ(first, std::vector<unsigned char>(first.size(), 0x7F)) << "what the resource gave";
}

TYPED_TEST(padded_query_buffer_padding, is_zero_before_a_graph_ran_that_was_captured_over_the_first_acquire) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  driver::begin_capture(this->stream.get());
  const auto rows = buffer.acquire(this->stream.get(), 8);
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_TRUE(padding_is_zero<TypeParam>(rows.data(), 8, small_shape));
}

TYPED_TEST(padded_query_buffer_padding, adds_no_node_to_a_graph) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  driver::begin_capture(this->stream.get());
  for (const std::int64_t rows : {8, 4, 16, 64}) {  // three of them allocate
    static_cast<void>(buffer.acquire(this->stream.get(), rows));
  }
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).total(), 0);
}

TYPED_TEST(padded_query_buffer_padding, stays_zero_while_producers_write_their_heads) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  for (const std::int64_t rows : {16, 3, 16}) {
    support::write_heads(this->stream.get(), buffer.acquire(this->stream.get(), rows), std::byte{0x55});
  }
  driver::synchronize(this->stream.get());
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 16, small_shape));
}

TYPED_TEST(padded_query_buffer_padding, of_none_when_the_heads_need_none) {
  const holdfast::query_shape full{.heads = 8, .padded_heads = 8, .head_dim = 16};
  auto buffer = this->make(full);
  const auto rows = buffer.acquire(this->stream.get(), 3);
  EXPECT_EQ(rows.heads_view().extent(1), 8);
  EXPECT_EQ(rows.heads_view().data_handle(), rows.data());
}

// --- lost and restored --------------------------------------------------------------------------------------------------

template <class Device>
class padded_query_buffer_restore : public support::buffer_test<Device> {
 protected:
  void lose_contents(const float* data, std::int64_t rows) {
    Device::fill(this->stream.get(), const_cast<float*>(data), std::byte{0xFF},
                 static_cast<std::size_t>(rows) * 8 * 16 * sizeof(float));
    support::driver<Device>::synchronize(this->stream.get());
  }
};
TYPED_TEST_SUITE(padded_query_buffer_restore, support::both_devices, support::device_names);

TYPED_TEST(padded_query_buffer_restore, acquire_is_refused_until_lost_padding_is_restored) {
  auto buffer = this->make();
  buffer.reserve(4);
  this->lose_contents(buffer.data(), 4);
  buffer.contents_lost();
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 4)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 40)), holdfast::logic_error);
  buffer.restore_padding(this->stream.get());
  EXPECT_NO_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 4)));
  support::driver<TypeParam>::synchronize(this->stream.get());
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 4, small_shape));
}

TYPED_TEST(padded_query_buffer_restore, of_blocks_that_only_graphs_hold_included) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  driver::begin_capture(this->stream.get());
  const float* const small = buffer.acquire(this->stream.get(), 4).data();
  auto graph = driver::end_capture(this->stream.get());
  buffer.reserve(8);
  this->lose_contents(small, 4);
  this->lose_contents(buffer.data(), 8);
  buffer.restore_padding(this->stream.get());
  driver::synchronize(this->stream.get());
  EXPECT_TRUE(padding_is_zero<TypeParam>(small, 4, small_shape));
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 8, small_shape));
}

TYPED_TEST(padded_query_buffer_restore, leaves_real_heads_alone) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  support::write_heads(this->stream.get(), buffer.acquire(this->stream.get(), 4), std::byte{0x11});
  buffer.restore_padding(this->stream.get());
  driver::synchronize(this->stream.get());
  float expected{};
  std::memset(&expected, 0x11, sizeof(expected));
  EXPECT_EQ(driver::template read<float>(buffer.data(), 3 * 16), std::vector<float>(3 * 16, expected));
}

TYPED_TEST(padded_query_buffer_restore, refuses_a_capturing_stream_and_leaves_its_capture_valid) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  buffer.reserve(4);
  driver::begin_capture(this->stream.get());
  EXPECT_THROW(buffer.restore_padding(this->stream.get()), holdfast::logic_error);
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).total(), 0);
}

TYPED_TEST(padded_query_buffer_restore, a_later_acquire_on_another_stream_waits_for_it) {
  using driver = support::driver<TypeParam>;
  auto other = driver::make_stream();  // streams outlive the blocks used on them
  auto buffer = this->make();
  constexpr std::int64_t many = 1 << 14;
  buffer.reserve(many);
  TypeParam::fill(this->stream.get(), const_cast<float*>(buffer.data()), std::byte{0xFF},
                  many * 8 * 16 * sizeof(float));
  buffer.contents_lost();
  buffer.restore_padding(this->stream.get());
  const auto rows = buffer.acquire(other.get(), many);
  driver::synchronize(other.get());
  EXPECT_TRUE(padding_is_zero<TypeParam>(rows.data(), many, small_shape));
}

}  // namespace
