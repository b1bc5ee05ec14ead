// Growing: what moves, what stays, what is refused, and that a refusal changes nothing.
#include "support/buffers.hpp"

#include <gtest/gtest.h>

#include <string>

namespace {

using holdfast::growth;
using support::small_shape;

constexpr std::size_t row_bytes = 8 * 16 * sizeof(float);

template <class Device>
class padded_query_buffer_growth : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;

  /// A graph over `rows` rows whose node writes `value` to the real heads.
  typename drive::graph capture(holdfast::padded_query_buffer<float, Device>& buffer, std::int64_t rows,
                                std::byte value) {
    drive::begin_capture(this->stream.get());
    support::write_heads(this->stream.get(), buffer.acquire(this->stream.get(), rows), value);
    return drive::end_capture(this->stream.get());
  }
};
TYPED_TEST_SUITE(padded_query_buffer_growth, support::both_devices, support::device_names);

TYPED_TEST(padded_query_buffer_growth, an_unused_block_goes_back_when_it_is_outgrown) {
  auto buffer = this->make();
  buffer.reserve(4);
  buffer.reserve(8);
  EXPECT_EQ(this->resource.live_bytes(), 8 * row_bytes);
  EXPECT_EQ(buffer.retired_bytes(), 0U);
}

TYPED_TEST(padded_query_buffer_growth, a_block_that_a_handle_holds_is_retired_and_stays) {
  auto buffer = this->make();
  auto small = buffer.acquire(this->stream.get(), 4);
  const auto large = buffer.acquire(this->stream.get(), 8);
  EXPECT_NE(large.data(), small.data());
  EXPECT_TRUE(this->resource.is_live(small.data()));
  EXPECT_EQ(buffer.retired_bytes(), 4 * row_bytes);
  small.release();
  EXPECT_EQ(buffer.retired_bytes(), 0U);
  EXPECT_EQ(this->resource.live_count(), 1U);
}

TYPED_TEST(padded_query_buffer_growth, a_block_that_graphs_hold_is_retired_and_stays) {  // 9 captures, then a bit more
  auto buffer = this->make();
  buffer.reserve(64);
  const float* const first = buffer.data();
  std::vector<typename TestFixture::drive::graph> graphs;
  for (int i = 0; i < 8; ++i) {
    graphs.push_back(this->capture(buffer, 64 - i, std::byte{1}));
  }
  graphs.push_back(this->capture(buffer, 65, std::byte{1}));  // grows inside the ninth capture
  ASSERT_TRUE(graphs.back());
  EXPECT_TRUE(this->resource.is_live(first));
  EXPECT_EQ(this->resource.deallocations(), 0U);
  EXPECT_EQ(buffer.retired_bytes(), 64 * row_bytes);
  EXPECT_EQ(buffer.pinned_bytes(), (64 + 128) * row_bytes);
}

TYPED_TEST(padded_query_buffer_growth, a_retired_block_goes_back_when_its_last_graph_is_gone) {
  auto buffer = this->make();
  auto graph = this->capture(buffer, 4, std::byte{1});
  auto clone = TestFixture::drive::clone(graph);
  buffer.reserve(8);
  graph.reset();
  holdfast::collect(TypeParam{});
  EXPECT_EQ(this->resource.live_count(), 2U) << "the clone has it still";
  clone.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return this->resource.live_count() == 1;
  }));
  EXPECT_EQ(buffer.retired_bytes(), 0U);
}

TYPED_TEST(padded_query_buffer_growth, is_geometric_so_that_a_little_more_does_not_move_it_again) {
  auto buffer = this->make();
  buffer.reserve(64);
  static_cast<void>(buffer.acquire(this->stream.get(), 65));
  EXPECT_EQ(buffer.capacity(), 128);
}

TYPED_TEST(padded_query_buffer_growth, takes_exactly_what_is_asked_when_memory_is_short) {
  auto buffer = this->make();
  buffer.reserve(64);
  this->resource.fail();
  static_cast<void>(buffer.acquire(this->stream.get(), 65));
  EXPECT_EQ(buffer.capacity(), 65);
}

TYPED_TEST(padded_query_buffer_growth, reserve_takes_exactly_what_is_asked) {
  auto buffer = this->make();
  buffer.reserve(64);
  buffer.reserve(65);
  EXPECT_EQ(buffer.capacity(), 65);
  buffer.reserve(10);
  EXPECT_EQ(buffer.capacity(), 65);
}

TYPED_TEST(padded_query_buffer_growth, out_of_memory_changes_nothing) {
  auto buffer = this->make();
  buffer.reserve(4);
  const float* const address = buffer.data();
  this->resource.fail(0, 9);
  try {
    static_cast<void>(buffer.acquire(this->stream.get(), 8));
    FAIL();
  } catch (const holdfast::out_of_memory& error) {
    EXPECT_EQ(error.requested(), 8 * row_bytes);
  }
  EXPECT_FALSE(buffer.try_acquire(this->stream.get(), 8));
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.capacity(), 4);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(this->resource.live_count(), 1U);
}

TYPED_TEST(padded_query_buffer_growth, out_of_memory_inside_a_capture_leaves_the_capture_valid) {
  auto buffer = this->make();
  buffer.reserve(4);
  TestFixture::drive::begin_capture(this->stream.get(), support::capture_mode::global);
  this->resource.fail(0, 9);
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 8)), holdfast::out_of_memory);
  EXPECT_EQ(this->resource.deallocations(), 0U);
  EXPECT_TRUE(TestFixture::drive::end_capture(this->stream.get()));
}

TYPED_TEST(padded_query_buffer_growth, changes_the_generation_exactly_when_the_address_may_have_changed) {
  auto buffer = this->make();
  EXPECT_EQ(buffer.generation(), 0U);
  buffer.reserve(4);
  EXPECT_EQ(buffer.generation(), 1U);
  static_cast<void>(buffer.acquire(this->stream.get(), 4));
  buffer.reserve(4);
  EXPECT_EQ(buffer.generation(), 1U);
  buffer.reserve(5);
  EXPECT_EQ(buffer.generation(), 2U) << "even if the resource gave the same address again";
}

TYPED_TEST(padded_query_buffer_growth, refused_once_captured_when_the_options_say_so) {
  auto buffer = this->make(small_shape, {.name = "decode q", .growth = growth::refuse});
  buffer.reserve(4);
  buffer.reserve(6);  // not captured yet
  auto graph = this->capture(buffer, 6, std::byte{1});
  const float* const address = buffer.data();
  try {
    static_cast<void>(buffer.acquire(this->stream.get(), 8));
    FAIL();
  } catch (const holdfast::captured_growth& error) {
    EXPECT_NE(std::string{error.what()}.find("decode q [6 rows, 3 of 8 heads, 16]: 8 rows asked"), std::string::npos);
  }
  EXPECT_FALSE(buffer.try_acquire(this->stream.get(), 8));
  EXPECT_THROW(buffer.reserve(8), holdfast::captured_growth);
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(this->resource.live_count(), 1U);
}

TYPED_TEST(padded_query_buffer_growth, is_allowed_again_when_the_graphs_are_gone) {
  auto buffer = this->make(small_shape, {.growth = growth::refuse});
  auto graph = this->capture(buffer, 6, std::byte{1});
  EXPECT_FALSE(buffer.wait_unpinned(std::chrono::milliseconds{1}));
  graph.reset();
  EXPECT_TRUE(buffer.wait_unpinned(std::chrono::nanoseconds::max()));
  EXPECT_NO_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 8)));
}

TYPED_TEST(padded_query_buffer_growth, of_a_strict_buffer_is_reserve_alone) {
  auto buffer = this->make(small_shape, {.strict = true});
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 1)), holdfast::logic_error);
  EXPECT_EQ(this->resource.allocations(), 0U);
  buffer.reserve(4);
  EXPECT_NO_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 4)));
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 5)), holdfast::logic_error);
  EXPECT_EQ(this->resource.allocations(), 1U);
}

TYPED_TEST(padded_query_buffer_growth, waits_for_the_work_that_uses_the_old_block_before_giving_it_back) {
  auto buffer = this->make();
  constexpr std::int64_t many = 1 << 13;
  {
    const auto rows = buffer.acquire(this->stream.get(), many);
    for (int i = 0; i < 16; ++i) {
      support::write_heads(this->stream.get(), rows, std::byte{0x11});
    }
  }
  buffer.reserve(many + 1);  // the old block is unmapped (host) or freed (cuda) in the stream's order, not at once
  EXPECT_NO_THROW(support::driver<TypeParam>::synchronize(this->stream.get()));
}

// --- in place ---------------------------------------------------------------------------------------------------------

template <class Device>
class padded_query_buffer_growth_in_place : public padded_query_buffer_growth<Device> {
 protected:
  support::growing_resource<Device> growing{holdfast::any_resource<Device>{holdfast::malloc_resource<Device>{Device{}}},
                                            64 * row_bytes};

  void SetUp() override {
    padded_query_buffer_growth<Device>::SetUp();
    growing.poison(std::byte{0x7F});
  }
};
TYPED_TEST_SUITE(padded_query_buffer_growth_in_place, support::both_devices, support::device_names);

TYPED_TEST(padded_query_buffer_growth_in_place, keeps_address_and_generation_captured_or_not) {
  holdfast::padded_query_buffer<float, TypeParam> buffer{this->growing, small_shape, {.growth = growth::refuse}};
  auto graph = this->capture(buffer, 4, std::byte{1});
  const float* const address = buffer.data();
  auto larger = this->capture(buffer, 32, std::byte{2});  // grows inside the capture
  ASSERT_TRUE(larger);
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(buffer.capacity(), 32);
  EXPECT_EQ(this->growing.allocations(), 1U);
  EXPECT_EQ(buffer.pinned_bytes(), 32 * row_bytes);
  EXPECT_TRUE(support::padding_is_zero<TypeParam>(buffer.data(), 32, small_shape));
}

TYPED_TEST(padded_query_buffer_growth_in_place, touches_only_new_rows) {
  using driver = support::driver<TypeParam>;
  holdfast::padded_query_buffer<float, TypeParam> buffer{this->growing, small_shape};
  support::write_heads(this->stream.get(), buffer.acquire(this->stream.get(), 4), std::byte{0x11});
  driver::synchronize(this->stream.get());
  buffer.reserve(8);
  const auto heads = driver::template read<float>(buffer.data(), 3 * 16);
  float expected{};
  std::memset(&expected, 0x11, sizeof(expected));
  EXPECT_EQ(heads, std::vector<float>(3 * 16, expected));
}

TYPED_TEST(padded_query_buffer_growth_in_place, falls_back_to_a_new_block_where_there_is_no_room) {
  holdfast::padded_query_buffer<float, TypeParam> buffer{this->growing, small_shape};
  buffer.reserve(64);
  this->growing.fail_extends(0, 9);
  const auto rows = buffer.acquire(this->stream.get(), 4);
  buffer.reserve(65);
  EXPECT_EQ(buffer.generation(), 2U);
  EXPECT_TRUE(this->growing.is_live(rows.data()));
}

}  // namespace
