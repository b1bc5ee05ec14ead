// Scratch acquired outside captures: shape, tail, cost, release.
#include "support/buffers.hpp"

#include <holdfast/resource/tail_padded.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using holdfast::over_read;
using bytes = std::vector<unsigned char>;

constexpr std::size_t row_bytes = 512;

template <class Device>
class eager_scratch : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using allocator = holdfast::tail_padded_allocator<unsigned char, Device>;

  allocator make_allocator(over_read far = over_read::rows_beyond(128), holdfast::scratch_options options = {}) {
    options.row_elements = 512;
    options.over_read = far;
    return allocator{holdfast::any_resource<Device>{this->resource}, options};
  }

  bytes read(const unsigned char* p, std::size_t n) {
    drive::synchronize(this->stream.get());
    return drive::read(p, n);
  }
};
TYPED_TEST_SUITE(eager_scratch, support::both_devices, support::device_names);

TYPED_TEST(eager_scratch, shows_the_rows_and_never_the_tail) {
  auto scratch = this->make_allocator();
  const auto rows = scratch.acquire(this->stream.get(), 32);
  EXPECT_EQ(rows.rows(), 32);
  EXPECT_EQ(rows.view().extent(0), 32);
  EXPECT_EQ(rows.view().extent(1), 512);
  EXPECT_EQ(rows.view().data_handle(), rows.data());
  EXPECT_EQ(rows.tail_rows(), 128);
  EXPECT_EQ(this->resource.live_bytes(), (32 + 128) * row_bytes);
}

TYPED_TEST(eager_scratch, has_a_zero_tail_and_leaves_the_rows_alone) {
  auto scratch = this->make_allocator();
  const auto rows = scratch.acquire(this->stream.get(), 5);
  EXPECT_EQ(this->read(rows.data() + 5 * row_bytes, 128 * row_bytes), bytes(128 * row_bytes, 0));
  EXPECT_EQ(this->read(rows.data(), 5 * row_bytes), bytes(5 * row_bytes, 0x7F)) << "what the resource gave";
}

TYPED_TEST(eager_scratch, ends_at_a_tile_when_the_consumer_reads_tiles) {
  auto scratch = this->make_allocator(over_read::to_tile_end(128));
  const auto rows = scratch.acquire(this->stream.get(), 33);
  EXPECT_EQ(this->read(rows.data() + 33 * row_bytes, 95 * row_bytes), bytes(95 * row_bytes, 0));
  EXPECT_EQ(this->resource.live_bytes(), 128 * row_bytes);
  EXPECT_EQ(scratch.acquire(this->stream.get(), 128).tail_rows(), 0);
}

TYPED_TEST(eager_scratch, is_never_smaller_than_the_consumer_reads) {
  auto scratch = this->make_allocator(over_read::at_least_rows(64));
  const auto rows = scratch.acquire(this->stream.get(), 3);
  EXPECT_EQ(rows.tail_rows(), 61);
  EXPECT_EQ(this->resource.live_bytes(), 64 * row_bytes);
}

TYPED_TEST(eager_scratch, has_its_tail_without_any_rows) {
  auto scratch = this->make_allocator();
  const auto rows = scratch.acquire(this->stream.get(), 0);
  EXPECT_EQ(this->read(rows.data(), 128 * row_bytes), bytes(128 * row_bytes, 0));
}

TYPED_TEST(eager_scratch, of_nothing_is_null_and_asks_nobody) {
  auto scratch = this->make_allocator(over_read{});
  const auto rows = scratch.acquire(this->stream.get(), 0);
  EXPECT_EQ(rows.data(), nullptr);
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST(eager_scratch, can_leave_the_tail_merely_mapped) {
  auto scratch = this->make_allocator(over_read::rows_beyond(128), {.fill = holdfast::tail_fill::mapped_only});
  const auto rows = scratch.acquire(this->stream.get(), 5);
  EXPECT_EQ(this->read(rows.data() + 5 * row_bytes, 128 * row_bytes), bytes(128 * row_bytes, 0x7F));
}

TYPED_TEST(eager_scratch, leaves_the_tail_to_producers_that_write_it) {
  auto scratch = this->make_allocator();
  const auto rows = scratch.acquire_unfilled(this->stream.get(), 5);
  EXPECT_EQ(rows.tail_rows(), 128);
  EXPECT_EQ(this->read(rows.data() + 5 * row_bytes, 128 * row_bytes), bytes(128 * row_bytes, 0x7F));
}

TYPED_TEST(eager_scratch, gives_small_metadata_a_tail_too) {
  holdfast::tail_padded_allocator<std::int32_t, TypeParam> metadata{
      holdfast::any_resource<TypeParam>{this->resource}, {.row_elements = 1, .over_read = over_read::rows_beyond(124)}};
  const auto four = metadata.acquire(this->stream.get(), 4);
  support::driver<TypeParam>::synchronize(this->stream.get());
  EXPECT_EQ(support::driver<TypeParam>::read(four.data() + 4, 124), std::vector<std::int32_t>(124, 0));
  EXPECT_EQ(this->resource.live_bytes(), 512U);
}

TYPED_TEST(eager_scratch, goes_back_when_its_handle_is_released) {
  auto scratch = this->make_allocator();
  {
    const auto rows = scratch.acquire(this->stream.get(), 32);
    EXPECT_EQ(this->resource.live_count(), 1U);
  }
  EXPECT_EQ(this->resource.live_count(), 0U);
  EXPECT_EQ(this->resource.mistakes(), 0U);
}

TYPED_TEST(eager_scratch, costs_one_resource_call_each_way) {
  auto scratch = this->make_allocator();
  for (int i = 1; i <= 5; ++i) {
    static_cast<void>(scratch.acquire(this->stream.get(), 32));
    EXPECT_EQ(this->resource.allocations(), static_cast<std::size_t>(i));
    EXPECT_EQ(this->resource.deallocations(), static_cast<std::size_t>(i));
  }
}

TEST(eager_scratch_host, costs_at_most_one_memset_and_no_wait) {
  using holdfast::host_device;
  holdfast::host::stream stream;
  holdfast::tail_padded_allocator<unsigned char, host_device> scratch{
      holdfast::any_resource<host_device>{support::foreign_pool<host_device>{}, host_device{}},
      {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
  const auto before = holdfast::host::activity();
  const auto rows = scratch.acquire(stream, 32);
  const auto after = holdfast::host::activity();
  EXPECT_EQ(after.operations - before.operations, 1U);
  EXPECT_EQ(after.waits, before.waits);
}

TYPED_TEST(eager_scratch, released_on_another_stream_goes_back_after_its_work) {
  using driver = support::driver<TypeParam>;
  auto other = driver::make_stream();
  auto scratch = this->make_allocator();
  auto rows = scratch.acquire(this->stream.get(), 4096);
  unsigned char* const data = rows.data();
  driver::fork(this->stream.get(), other.get());
  for (int i = 0; i < 16; ++i) {
    TypeParam::fill(other.get(), data, std::byte{1}, 4096 * row_bytes);
  }
  rows.release(other.get());
  const auto next = scratch.acquire(this->stream.get(), 4096);
  TypeParam::fill(this->stream.get(), next.data(), std::byte{2}, 4096 * row_bytes);
  driver::synchronize(other.get());
  EXPECT_EQ(this->read(next.data() + 4095 * row_bytes, row_bytes), bytes(row_bytes, 2));
}

TYPED_TEST(eager_scratch, pinned_stays_while_the_graph_lives) {
  using driver = support::driver<TypeParam>;
  auto scratch = this->make_allocator();
  auto rows = scratch.acquire(this->stream.get(), 4);
  const unsigned char* const data = rows.data();
  EXPECT_FALSE(rows.pin(this->stream.get())) << "not capturing";
  driver::begin_capture(this->stream.get());
  EXPECT_TRUE(rows.pin(this->stream.get()));
  auto graph = driver::end_capture(this->stream.get());
  rows.release();
  EXPECT_TRUE(this->resource.is_live(data));
  graph.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return !this->resource.is_live(data);
  }));
}

TYPED_TEST(eager_scratch, released_while_its_stream_captures_goes_back_after_the_capture) {
  using driver = support::driver<TypeParam>;
  auto scratch = this->make_allocator();
  auto rows = scratch.acquire(this->stream.get(), 4);
  driver::begin_capture(this->stream.get(), support::capture_mode::global);
  rows.release();
  holdfast::collect(TypeParam{});
  EXPECT_EQ(this->resource.live_count(), 1U);
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
  holdfast::collect(TypeParam{});
  EXPECT_EQ(this->resource.live_count(), 0U);
}

TEST(eager_scratch_host, released_while_its_per_thread_stream_captures_goes_back_by_that_thread_after_the_capture) {
  using holdfast::host_device;
  support::counting_resource<host_device> resource;
  holdfast::tail_padded_allocator<unsigned char, host_device> scratch{holdfast::any_resource<host_device>{resource},
                                                                      {.row_elements = 512}};
  const auto mine = holdfast::host::per_thread_stream();
  auto rows = scratch.acquire(mine, 4);
  mine.begin_capture();
  rows.release();
  holdfast::collect(host_device{});
  EXPECT_EQ(resource.live_count(), 1U);
  auto graph = mine.end_capture();
  std::thread{[] { holdfast::collect(host_device{}); }}.join();  // means another stream by the same handle
  EXPECT_EQ(resource.live_count(), 1U);
  holdfast::collect(host_device{});
  EXPECT_EQ(resource.live_count(), 0U);
}

TYPED_TEST(eager_scratch, pinned_goes_back_though_the_stream_it_was_released_on_is_gone) {
  using driver = support::driver<TypeParam>;
  auto other = std::make_unique<typename driver::stream>(driver::make_stream());
  auto scratch = this->make_allocator();
  auto rows = scratch.acquire(this->stream.get(), 4);
  driver::begin_capture(this->stream.get());
  EXPECT_TRUE(rows.pin(this->stream.get()));
  auto graph = driver::end_capture(this->stream.get());
  rows.release(other->get());
  driver::synchronize(other->get());
  other.reset();
  graph.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return this->resource.live_count() == 0;
  }));
}

TYPED_TEST(eager_scratch, released_on_a_stream_that_captures_is_that_graphs) {
  using driver = support::driver<TypeParam>;
  auto other = driver::make_stream();
  auto scratch = this->make_allocator();
  auto rows = scratch.acquire(this->stream.get(), 4);
  const unsigned char* const data = rows.data();
  driver::begin_capture(other.get());
  rows.release(other.get());
  auto graph = driver::end_capture(other.get());
  holdfast::collect(TypeParam{});
  EXPECT_TRUE(this->resource.is_live(data));
  graph.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return !this->resource.is_live(data);
  }));
}

TYPED_TEST(eager_scratch, outlives_its_allocator) {
  std::optional<typename TestFixture::allocator> scratch{this->make_allocator()};
  auto rows = scratch->acquire(this->stream.get(), 4);
  scratch.reset();
  EXPECT_EQ(this->read(rows.data() + 4 * row_bytes, 128 * row_bytes), bytes(128 * row_bytes, 0));
}

TYPED_TEST(eager_scratch, refuses_what_makes_no_sense_and_changes_nothing) {
  auto scratch = this->make_allocator();
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), -1)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), INT64_MAX)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), INT64_MAX / 512)), holdfast::logic_error);
  EXPECT_FALSE(scratch.try_acquire(this->stream.get(), -1));
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST(eager_scratch, refuses_options_that_make_no_sense) {
  const auto refused = [&](holdfast::scratch_options options) {
    EXPECT_THROW((typename TestFixture::allocator{holdfast::any_resource<TypeParam>{this->resource}, options}),
                 holdfast::logic_error);
  };
  refused({.row_elements = 0});
  refused({.row_elements = 512, .over_read = over_read::rows_beyond(-1)});
  refused({.row_elements = 512, .over_read = over_read::to_tile_end(0)});
  refused({.row_elements = 512, .alignment = 48});
  refused({.row_elements = 512, .alignment = 2048});
  refused({.row_elements = 584, .row_alignment = 16});
}

TYPED_TEST(eager_scratch, that_cannot_be_had_says_how_much_was_asked) {
  auto scratch = this->make_allocator();
  this->resource.fail(0, 9);
  try {
    static_cast<void>(scratch.acquire(this->stream.get(), 32));
    FAIL();
  } catch (const holdfast::out_of_memory& error) {
    EXPECT_EQ(error.requested(), (32 + 128) * row_bytes);
  }
}

TYPED_TEST(eager_scratch, moves) {
  auto scratch = this->make_allocator();
  auto rows = scratch.acquire(this->stream.get(), 4);
  auto moved = std::move(rows);
  EXPECT_EQ(rows.data(), nullptr);  // NOLINT(bugprone-use-after-move): what is promised of it
  rows = std::move(moved);
  EXPECT_EQ(rows.rows(), 4);
  EXPECT_EQ(this->resource.live_count(), 1U);
}

// --- a tail for somebody's pool ---------------------------------------------------------------------------------------

TYPED_TEST(eager_scratch, tail_padded_resource_gives_every_allocation_a_zero_tail) {
  using driver = support::driver<TypeParam>;
  holdfast::tail_padded_resource<TypeParam> padded{holdfast::any_resource<TypeParam>{this->resource}, 1000};
  auto* const p = static_cast<unsigned char*>(padded.allocate(this->stream.get(), 24, 16));
  EXPECT_EQ(this->read(p, 24), bytes(24, 0x7F));
  EXPECT_EQ(this->read(p + 24, 1000), bytes(1000, 0));
  padded.deallocate(this->stream.get(), p, 24, 16);
  EXPECT_EQ(this->resource.mistakes(), 0U);
  EXPECT_EQ(this->resource.live_count(), 0U);
  driver::synchronize(this->stream.get());
}

TYPED_TEST(eager_scratch, tail_padded_resource_refuses_sizes_that_overflow) {
  holdfast::tail_padded_resource<TypeParam> padded{holdfast::any_resource<TypeParam>{this->resource}, 1000};
  EXPECT_THROW(static_cast<void>(padded.allocate(this->stream.get(), SIZE_MAX - 5, 16)), holdfast::out_of_memory);
  EXPECT_EQ(padded.allocate(this->stream.get(), 0, 16), nullptr);
  EXPECT_EQ(this->resource.live_count(), 0U);
}

}  // namespace
