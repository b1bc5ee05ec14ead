// acquire: where rows are, one handle at a time, several streams, and when it refuses.
#include "support/buffers.hpp"

#include <holdfast/anchored_scratch.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using holdfast::over_read;
using bytes = std::vector<unsigned char>;

constexpr std::size_t row_bytes = 512;

template <class Device>
class anchored_acquire : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using anchored = holdfast::anchored_scratch<unsigned char, Device>;

  anchored make_anchored(std::size_t reserve_bytes = 0) {
    return {this->lane(),
            {.row_elements = 512, .over_read = over_read::rows_beyond(128), .name = "decode kv"},
            reserve_bytes};
  }

  holdfast::lane<Device> lane() { return holdfast::lane<Device>{holdfast::any_resource<Device>{this->resource}}; }

  static std::size_t granule() { return Device{}.granularity(holdfast::physical_options{}); }
  static std::int64_t granule_rows() { return static_cast<std::int64_t>(granule() / row_bytes); }
};
TYPED_TEST_SUITE(anchored_acquire, support::both_devices, support::device_names);

TYPED_TEST(anchored_acquire, shows_the_rows_and_never_the_tail) {
  auto scratch = this->make_anchored();
  EXPECT_TRUE(scratch.anchored());
  const auto rows = scratch.acquire(this->stream.get(), 32);
  EXPECT_EQ(rows.rows(), 32);
  EXPECT_EQ(rows.row_elements(), 512);
  EXPECT_EQ(rows.view().extent(0), 32);
  EXPECT_EQ(rows.view().extent(1), 512);
  EXPECT_EQ(rows.view().data_handle(), rows.data());
  EXPECT_EQ(rows.tail_rows(), 128);
  EXPECT_TRUE(rows.tail_read_only());
}

TYPED_TEST(anchored_acquire, ends_where_it_always_ends) {
  auto scratch = this->make_anchored();
  EXPECT_EQ(scratch.data_end(), nullptr);
  unsigned char* const three = scratch.acquire(this->stream.get(), 3).data();
  unsigned char* const end = scratch.data_end();
  for (std::int64_t rows = 1; rows <= 4 * this->granule_rows(); rows *= 2) {
    EXPECT_EQ(scratch.acquire(this->stream.get(), rows).data() + static_cast<std::size_t>(rows) * row_bytes, end);
    EXPECT_EQ(scratch.acquire(this->stream.get(), 3).data(), three);
  }
  EXPECT_EQ(scratch.data_end(), end);
}

TYPED_TEST(anchored_acquire, keeps_rows_where_they_are_while_it_grows) {
  using driver = support::driver<TypeParam>;
  auto scratch = this->make_anchored();
  unsigned char* const rows = scratch.acquire(this->stream.get(), 8).data();
  TypeParam::fill(this->stream.get(), rows, std::byte{5}, 8 * row_bytes);
  scratch.reserve(5 * this->granule_rows());
  driver::synchronize(this->stream.get());
  EXPECT_EQ(driver::read(rows, 8 * row_bytes), bytes(8 * row_bytes, 5));
}

TYPED_TEST(anchored_acquire, grows_by_whole_granules_and_no_more_than_it_must) {
  auto scratch = this->make_anchored();
  EXPECT_EQ(scratch.capacity(), 0);
  scratch.reserve(1);
  EXPECT_EQ(scratch.capacity(), this->granule_rows());
  scratch.reserve(this->granule_rows() + 1);
  EXPECT_EQ(scratch.capacity(), 2 * this->granule_rows());
  static_cast<void>(scratch.acquire(this->stream.get(), 2 * this->granule_rows()));
  EXPECT_EQ(scratch.capacity(), 2 * this->granule_rows());
}

TYPED_TEST(anchored_acquire, counts_whole_rows_where_granules_hold_a_part) {
  holdfast::anchored_scratch<unsigned char, TypeParam> scratch{this->lane(), {.row_elements = 656, .alignment = 16}};
  scratch.reserve(1);
  EXPECT_EQ(scratch.capacity(), static_cast<std::int64_t>(this->granule() / 656));
  const std::int64_t most = scratch.capacity();
  TypeParam::fill(this->stream.get(), scratch.acquire(this->stream.get(), most).data(), std::byte{1},
                  static_cast<std::size_t>(most) * 656);
  EXPECT_EQ(scratch.capacity(), most);
}

TYPED_TEST(anchored_acquire, of_no_rows_has_its_tail) {
  auto scratch = this->make_anchored();
  const auto rows = scratch.acquire(this->stream.get(), 0);
  EXPECT_EQ(rows.rows(), 0);
  EXPECT_EQ(rows.data(), scratch.data_end());
  EXPECT_EQ(rows.tail_rows(), 128);
  EXPECT_EQ(support::driver<TypeParam>::read(rows.data(), 128 * row_bytes), bytes(128 * row_bytes, 0));
}

TYPED_TEST(anchored_acquire, of_nothing_is_null_and_allocates_nothing) {
  holdfast::anchored_scratch<unsigned char, TypeParam> scratch{this->lane(), {.row_elements = 512}};
  const auto rows = scratch.acquire(this->stream.get(), 0);
  EXPECT_EQ(rows.data(), nullptr);
  EXPECT_EQ(rows.row_elements(), 512);
  EXPECT_EQ(scratch.data_end(), nullptr);
  EXPECT_NO_THROW(static_cast<void>(scratch.acquire(this->stream.get(), 1))) << "an empty handle uses nothing";
}

// --- one handle at a time ----------------------------------------------------------------------------------------------

TYPED_TEST(anchored_acquire, of_a_second_handle_is_refused_by_name_until_the_first_is_released) {
  auto scratch = this->make_anchored();
  auto first = scratch.acquire(this->stream.get(), 3);
  const std::int64_t capacity = scratch.capacity();
  try {
    static_cast<void>(scratch.acquire(this->stream.get(), 1 << 20));
    FAIL();
  } catch (const holdfast::in_use& error) {
    EXPECT_EQ(std::string{error.what()}, "decode kv [" + std::to_string(capacity) +
                                             " rows of 512 elements]: 1048576 rows asked, but a handle of 3 rows "
                                             "lives; release it first");
  }
  EXPECT_FALSE(scratch.try_acquire(this->stream.get(), 1));
  EXPECT_EQ(scratch.capacity(), capacity);
  first.release();
  EXPECT_TRUE(scratch.try_acquire(this->stream.get(), 1));
}

TYPED_TEST(anchored_acquire, of_a_second_handle_is_refused_in_captures_too) {
  using driver = support::driver<TypeParam>;
  auto scratch = this->make_anchored();
  auto held = scratch.acquire(this->stream.get(), 3);
  driver::begin_capture(this->stream.get());
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), 3)), holdfast::in_use);
  held.release();
  held = scratch.acquire(this->stream.get(), 3);
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), 3)), holdfast::in_use);
}

TYPED_TEST(anchored_acquire, counts_a_moved_handle_once) {
  auto scratch = this->make_anchored();
  auto first = scratch.acquire(this->stream.get(), 4);
  auto moved = std::move(first);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): what is promised of it
  first.release();
  EXPECT_FALSE(scratch.try_acquire(this->stream.get(), 4));
  moved = {};
  EXPECT_TRUE(scratch.try_acquire(this->stream.get(), 4));
}

TYPED_TEST(anchored_acquire, knows_its_handle_after_it_was_moved) {
  auto scratch = this->make_anchored();
  auto held = scratch.acquire(this->stream.get(), 4);
  auto moved = std::move(scratch);
  EXPECT_FALSE(moved.try_acquire(this->stream.get(), 4));
  auto other = this->make_anchored();
  other = std::move(moved);
  EXPECT_FALSE(other.try_acquire(this->stream.get(), 4));
  held.release();
  EXPECT_TRUE(other.try_acquire(this->stream.get(), 4));
}

TYPED_TEST(anchored_acquire, a_handle_outlives_its_scratch) {
  using driver = support::driver<TypeParam>;
  auto rows = [&] {
    auto scratch = this->make_anchored();
    return scratch.acquire(this->stream.get(), 4);
  }();
  TypeParam::fill(this->stream.get(), rows.data(), std::byte{1}, 4 * row_bytes);
  driver::synchronize(this->stream.get());
  EXPECT_EQ(driver::read(rows.data() + 4 * row_bytes, 128 * row_bytes), bytes(128 * row_bytes, 0));
}

TEST(anchored_acquire_host, gives_all_memory_back_when_it_is_destroyed) {
  using holdfast::host_device;
  constexpr host_device device{5};
  holdfast::host::stream stream{device};
  const auto use = [&] {
    holdfast::anchored_scratch<unsigned char, host_device> scratch{
        device, {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
    static_cast<void>(scratch.acquire(stream, 4));
    static_cast<void>(scratch.acquire(stream, 4000));
  };
  use();  // and makes the zero page
  const std::size_t before = device.memory().free;
  use();
  EXPECT_EQ(device.memory().free, before);
  EXPECT_EQ(holdfast::counts(device).pending_bytes(), 0U);
}

// --- several streams ---------------------------------------------------------------------------------------------------

TYPED_TEST(anchored_acquire, on_another_stream_waits_for_the_earlier_use) {
  using driver = support::driver<TypeParam>;
  auto other = driver::make_stream();  // streams outlive the blocks used on them
  auto scratch = this->make_anchored();
  constexpr std::int64_t many = 1 << 14;  // work enough to be overtaken
  constexpr std::size_t size = many * row_bytes;
  scratch.reserve(many);
  for (int round = 0; round < 20; ++round) {
    {
      const auto rows = scratch.acquire(this->stream.get(), many);
      for (int i = 0; i < 8; ++i) {
        TypeParam::fill(this->stream.get(), rows.data(), std::byte{1}, size);
      }
    }
    const auto rows = scratch.acquire(other.get(), many);
    TypeParam::fill(other.get(), rows.data(), std::byte{2}, size);
    driver::synchronize(other.get());
    driver::synchronize(this->stream.get());
    ASSERT_EQ(driver::read(rows.data() + size - row_bytes, row_bytes), bytes(row_bytes, 2));
  }
}

TEST(anchored_acquire_host, on_another_stream_waits_under_every_schedule) {
  using holdfast::host_device;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const holdfast::host::seeded_schedule schedule{seed};
    holdfast::host::stream first;
    holdfast::host::stream second;
    holdfast::host::stream third;
    holdfast::anchored_scratch<unsigned char, host_device> scratch{host_device{}, {.row_elements = 512}};
    std::vector<int> order;
    {
      const auto rows = scratch.acquire(first, 2);
      first.run([&] { order.push_back(1); });
    }
    {
      auto rows = scratch.acquire(second, 2);
      third.run([&] { order.push_back(2); });
      rows.release(third);  // where it was used last
    }
    {
      const auto rows = scratch.acquire(first, 2);
      first.run([&] { order.push_back(3); });
    }
    holdfast::host::device_synchronize();
    ASSERT_EQ(order.size(), 3U);
    ASSERT_EQ(order.back(), 3) << "seed " << seed;
  }
}

TEST(anchored_acquire_host, in_one_capture_another_stream_waits_for_the_earlier_use) {
  using holdfast::host_device;
  using driver = support::driver<host_device>;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    auto origin = driver::make_stream();
    auto side = driver::make_stream();
    holdfast::anchored_scratch<unsigned char, host_device> scratch{host_device{}, {.row_elements = 512}};
    std::vector<int> order;
    driver::begin_capture(origin.get());
    driver::fork(origin.get(), side.get());
    {
      const auto rows = scratch.acquire(origin.get(), 2);
      origin.get().run([&] { order.push_back(1); });
    }
    {
      const auto rows = scratch.acquire(side.get(), 2);
      side.get().run([&] { order.push_back(2); });
    }
    driver::fork(side.get(), origin.get());
    auto graph = driver::end_capture(origin.get());
    ASSERT_TRUE(graph);
    auto exec = driver::instantiate(graph);
    const holdfast::host::seeded_schedule schedule{seed};
    driver::launch(exec, origin.get());
    driver::synchronize(origin.get());
    ASSERT_EQ(order, (std::vector<int>{1, 2})) << "seed " << seed;
  }
}

// --- refusals ----------------------------------------------------------------------------------------------------------

TYPED_TEST(anchored_acquire, needs_rows_that_keep_the_alignment) {
  using scratch_type = typename TestFixture::anchored;
  try {
    const scratch_type refused{this->lane(), {.row_elements = 584, .alignment = 16}};
    FAIL();
  } catch (const holdfast::logic_error& error) {
    EXPECT_NE(std::string{error.what()}.find("rows of 584 bytes do not keep an alignment of 16"), std::string::npos)
        << error.what();
  }
  for (const std::int64_t row : {512, 528, 576, 656}) {
    scratch_type scratch{this->lane(), {.row_elements = row, .alignment = 16}};
    for (std::int64_t rows = 1; rows < 40; ++rows) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scratch.acquire(this->stream.get(), rows).data()) % 16, 0U);
    }
  }
  EXPECT_NO_THROW((scratch_type{this->lane(), {.row_elements = 1024, .alignment = 1024}}));
}

TYPED_TEST(anchored_acquire, refuses_options_that_make_no_sense) {
  const auto refused = [&](holdfast::scratch_options options, std::size_t reserve_bytes = 0) {
    EXPECT_THROW((holdfast::anchored_scratch<unsigned char, TypeParam>{this->lane(), options, reserve_bytes}),
                 holdfast::logic_error);
  };
  refused({.row_elements = 0});
  refused({.row_elements = 512, .over_read = over_read::rows_beyond(-1)});
  refused({.row_elements = 512, .over_read = over_read::to_tile_end(0)});
  refused({.row_elements = 512, .over_read = over_read::rows_beyond(INT64_MAX / 256)});
  refused({.row_elements = 512, .alignment = 48});
  refused({.row_elements = 2048, .alignment = 2048});
  refused({.row_elements = 512}, SIZE_MAX);
}

TYPED_TEST(anchored_acquire, refuses_row_counts_that_make_no_sense_and_changes_nothing) {
  auto scratch = this->make_anchored();
  for (const std::int64_t rows : {std::int64_t{-1}, INT64_MIN, INT64_MAX, INT64_MAX / 512 + 1}) {
    EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), rows)), holdfast::logic_error);
    EXPECT_FALSE(scratch.try_acquire(this->stream.get(), rows));
    EXPECT_THROW(scratch.reserve(rows), holdfast::logic_error);
  }
  EXPECT_EQ(scratch.capacity(), 0);
  EXPECT_EQ(scratch.data_end(), nullptr);
}

TYPED_TEST(anchored_acquire, beyond_its_addresses_is_out_of_memory_and_changes_nothing) {
  auto scratch = this->make_anchored(3 * this->granule());
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), 4 * this->granule_rows())),
               holdfast::out_of_memory);
  EXPECT_EQ(scratch.data_end(), nullptr);
  scratch.reserve(2 * this->granule_rows());
  try {
    static_cast<void>(scratch.acquire(this->stream.get(), 3 * this->granule_rows() + 1));
    FAIL();
  } catch (const holdfast::out_of_memory& error) {
    EXPECT_EQ(error.requested(), 4 * this->granule());
    EXPECT_EQ(error.held(), 2 * this->granule());
    EXPECT_NE(std::string{error.what()}.find("decode kv"), std::string::npos);
  }
  EXPECT_EQ(scratch.capacity(), 2 * this->granule_rows());
  EXPECT_TRUE(scratch.try_acquire(this->stream.get(), 3 * this->granule_rows())) << "as far as the addresses go";
}

TEST(anchored_acquire_host, without_memory_changes_nothing_and_goes_on_when_there_is_some) {
  using holdfast::host_device;
  constexpr host_device device{4};
  holdfast::host::stream stream{device};
  holdfast::anchored_scratch<unsigned char, host_device> scratch{
      device, {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
  scratch.reserve(8);
  const std::size_t total = device.memory().total;
  const std::int64_t capacity = scratch.capacity();
  unsigned char* const end = scratch.data_end();
  holdfast::host::set_memory_size(device, total - device.memory().free + 4 * device.granularity());
  EXPECT_THROW(static_cast<void>(scratch.acquire(stream, 6 * capacity)), holdfast::out_of_memory);
  EXPECT_EQ(device.memory().free, 4 * device.granularity());
  EXPECT_EQ(scratch.capacity(), capacity);
  EXPECT_EQ(scratch.acquire(stream, 5 * capacity).data() + 5 * capacity * 512, end);
  EXPECT_EQ(device.memory().free, 0U);
  holdfast::host::set_memory_size(device, total);
}

TEST(anchored_acquire_host, of_a_stream_of_another_device_is_refused_and_changes_nothing) {
  using holdfast::host_device;
  holdfast::host::stream elsewhere{host_device{1}};
  holdfast::anchored_scratch<unsigned char, host_device> scratch{host_device{}, {.row_elements = 512}};
  EXPECT_THROW(static_cast<void>(scratch.acquire(elsewhere, 4)), holdfast::logic_error);
  EXPECT_EQ(scratch.capacity(), 0);
  scratch.reserve(4);
  EXPECT_THROW(static_cast<void>(scratch.acquire(elsewhere, 4)), holdfast::logic_error);
}

TYPED_TEST(anchored_acquire, in_an_invalidated_capture_is_refused) {
  using driver = support::driver<TypeParam>;
  auto scratch = this->make_anchored();
  driver::begin_capture(this->stream.get(), support::capture_mode::thread_local_);
  ASSERT_TRUE(driver::unsafe_call());
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), 4)), holdfast::logic_error);
  EXPECT_FALSE(driver::end_capture(this->stream.get()));
  EXPECT_NO_THROW(static_cast<void>(scratch.acquire(this->stream.get(), 4)));
}

TYPED_TEST(anchored_acquire, leaves_the_current_device_as_it_was) {
  const typename TypeParam::current_scope current{TypeParam{0}};
  auto scratch = this->make_anchored();
  static_cast<void>(scratch.acquire(this->stream.get(), 4));
  EXPECT_EQ(support::current_device<TypeParam>(), TypeParam{0});
}

}  // namespace
