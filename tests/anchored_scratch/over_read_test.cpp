// The tail: what consumers find there, what it costs, and that nobody can write to it.
#include "support/buffers.hpp"

#include <holdfast/anchored_scratch.hpp>

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

using holdfast::over_read;
using bytes = std::vector<unsigned char>;

constexpr std::size_t row_bytes = 512;
constexpr std::int64_t megabyte_rows = (1 << 20) / 512;

template <class Device>
class anchored_tail : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using anchored = holdfast::anchored_scratch<unsigned char, Device>;

  anchored make_anchored(over_read far = over_read::rows_beyond(128)) {
    return {holdfast::lane<Device>{holdfast::any_resource<Device>{this->resource}},
            {.row_elements = 512, .over_read = far}};
  }

  /// A producer writes all rows, a consumer reads on to the end of the tail: whether it found zeros there.
  ::testing::AssertionResult reads_zeros_behind(anchored& scratch, std::int64_t rows, unsigned char value) {
    const auto acquired = scratch.acquire(this->stream.get(), rows);
    const auto real = static_cast<std::size_t>(rows) * row_bytes;
    const auto tail = static_cast<std::size_t>(acquired.tail_rows()) * row_bytes;
    Device::fill(this->stream.get(), acquired.data(), std::byte{value}, real);
    drive::synchronize(this->stream.get());
    bytes expected(real, value);
    expected.resize(real + tail, 0);
    return drive::read(acquired.data(), real + tail) == expected
               ? ::testing::AssertionSuccess()
               : ::testing::AssertionFailure() << rows << " rows and a tail of " << acquired.tail_rows();
  }
};
TYPED_TEST_SUITE(anchored_tail, support::both_devices, support::device_names);

TYPED_TEST(anchored_tail, of_128_rows_is_zero_behind_any_number_of_rows) {
  auto scratch = this->make_anchored();
  for (const std::int64_t rows : {0, 1, 5, 32, 127, 128, 300, 10000}) {
    EXPECT_TRUE(this->reads_zeros_behind(scratch, rows, 0x7F));
  }
}

TYPED_TEST(anchored_tail, completes_tiles) {
  auto scratch = this->make_anchored(over_read::to_tile_end(128));
  for (const std::int64_t rows : {1, 33, 127, 128, 129}) {
    EXPECT_EQ(scratch.acquire(this->stream.get(), rows).tail_rows(), (128 - rows % 128) % 128);
    EXPECT_TRUE(this->reads_zeros_behind(scratch, rows, 0x7F));
  }
}

TYPED_TEST(anchored_tail, of_topk_rows_is_longest_behind_none) {
  auto scratch = this->make_anchored(over_read::at_least_rows(2048));
  for (const std::int64_t rows : {0, 1, 2047, 2048, 3000}) {
    EXPECT_EQ(scratch.acquire(this->stream.get(), rows).tail_rows(), rows < 2048 ? 2048 - rows : 0);
    EXPECT_TRUE(this->reads_zeros_behind(scratch, rows, 0x7F));
  }
}

TYPED_TEST(anchored_tail, of_topk_rows_is_there_when_only_no_rows_need_its_last_granule) {
  const auto granule = TypeParam{}.granularity(holdfast::physical_options{});
  auto scratch = this->make_anchored(over_read::at_least_rows(static_cast<std::int64_t>(granule / row_bytes) + 1));
  EXPECT_TRUE(this->reads_zeros_behind(scratch, 0, 0x7F));
}

TYPED_TEST(anchored_tail, of_16_MiB_is_zero) {
  auto scratch = this->make_anchored(over_read::rows_beyond(16 * megabyte_rows));
  EXPECT_TRUE(this->reads_zeros_behind(scratch, 32, 0x7F));
}

TYPED_TEST(anchored_tail, of_256_MiB_can_be_read_to_its_last_byte) {
  auto scratch = this->make_anchored(over_read::rows_beyond(256 * megabyte_rows));
  const auto rows = scratch.acquire(this->stream.get(), 1);
  for (std::size_t at = 0; at < 256; at += 17) {
    EXPECT_EQ(support::driver<TypeParam>::read(scratch.data_end() + (at << 20), row_bytes), bytes(row_bytes, 0));
  }
  EXPECT_EQ(support::driver<TypeParam>::read(scratch.data_end() + (256 << 20) - 1, 1), bytes(1, 0));
}

TYPED_TEST(anchored_tail, is_zero_after_any_number_of_uses) {
  auto scratch = this->make_anchored();
  for (int i = 1; i <= 50; ++i) {
    ASSERT_TRUE(this->reads_zeros_behind(scratch, 1 + 7 * i % 40, static_cast<unsigned char>(i)));
  }
}

TYPED_TEST(anchored_tail, is_none_where_the_resource_omits_tails) {
  struct bare : support::counting_resource<TypeParam> {
    using support::counting_resource<TypeParam>::counting_resource;
    [[nodiscard]] static bool omits_tails() { return true; }
  };
  holdfast::anchored_scratch<unsigned char, TypeParam> scratch{
      holdfast::lane<TypeParam>{holdfast::any_resource<TypeParam>{bare{}}},
      {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
  EXPECT_EQ(scratch.acquire(this->stream.get(), 4).tail_rows(), 0);
  EXPECT_EQ(scratch.acquire(this->stream.get(), 0).data(), nullptr);
}

TYPED_TEST(anchored_tail, takes_no_memory_as_the_device_counts) {
  auto warm = this->make_anchored();
  warm.reserve(1);  // makes the zero page, which is the device's
  const std::size_t granule = TypeParam{}.granularity(holdfast::physical_options{});
  const std::size_t before = TypeParam{}.memory().free;
  auto scratch = this->make_anchored(over_read::rows_beyond(64 * megabyte_rows));
  scratch.reserve(1);
  const std::size_t taken = before - TypeParam{}.memory().free;
  if constexpr (support::is_host<TypeParam>) {
    EXPECT_EQ(taken, granule);
  } else {
    EXPECT_GE(taken, granule);
    EXPECT_LE(taken, 8 * granule) << "what the driver takes for itself included";
  }
  EXPECT_EQ(this->resource.allocations(), 0U) << "the lane's resource is not asked";
}

TYPED_TEST(anchored_tail, of_many_threads_scratch_is_zero) {
  using driver = support::driver<TypeParam>;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      auto own = driver::make_stream();
      holdfast::anchored_scratch<unsigned char, TypeParam> scratch{
          TypeParam{}, {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
      for (std::int64_t rows = 1; rows <= 64; rows *= 2) {
        const auto acquired = scratch.acquire(own.get(), rows);
        EXPECT_EQ(driver::read(scratch.data_end(), 128 * row_bytes), bytes(128 * row_bytes, 0));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(anchored_tail_host, costs_no_operation_and_no_node) {
  using holdfast::host_device;
  using driver = support::driver<host_device>;
  auto stream = driver::make_stream();
  holdfast::anchored_scratch<unsigned char, host_device> scratch{
      host_device{}, {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
  scratch.reserve(32);
  static_cast<void>(scratch.acquire(stream.get(), 32));
  const auto before = holdfast::host::activity();
  static_cast<void>(scratch.acquire(stream.get(), 32));
  static_cast<void>(scratch.acquire(stream.get(), 1));
  static_cast<void>(scratch.acquire_unfilled(stream.get(), 0));
  driver::begin_capture(stream.get());
  static_cast<void>(scratch.acquire(stream.get(), 32));
  auto graph = driver::end_capture(stream.get());
  EXPECT_EQ(holdfast::host::activity(), before);
}

// --- writes behind the end, each in a child process --------------------------------------------------------------------

/// Exits with 0 when a byte `offset` bytes behind the end of 8 rows could be written (or, if not `writing`, read).
template <class Device>
[[noreturn]] void touch_behind_the_end(std::ptrdiff_t offset, bool writing) {
  auto stream = support::driver<Device>::make_stream();
  holdfast::anchored_scratch<unsigned char, Device> scratch{
      Device{}, {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
  static_cast<void>(support::driver<Device>::allocate(8 << 20));  // so that somebody's memory may lie next to it
  const auto rows = scratch.acquire(stream.get(), 8);
  unsigned char* const at = scratch.data_end() + offset;
  unsigned char got = 1;
  try {
    if (writing) {
      Device::fill(stream.get(), at, std::byte{1}, 1);
    } else {
      Device::copy(stream.get(), &got, at, 1);
    }
    Device::synchronize(stream.get());
  } catch (...) {
    _exit(1);
  }
  _exit(writing || got == 0 ? 0 : 2);
}

template <class Device>
class anchored_tail_death : public support::device_test<Device> {
 protected:
  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";  // a fresh process: a fork's device cannot be used
    support::device_test<Device>::SetUp();
  }
  static constexpr std::ptrdiff_t tail = 128 * row_bytes;
};
TYPED_TEST_SUITE(anchored_tail_death, support::both_devices, support::device_names);

TYPED_TEST(anchored_tail_death, cannot_be_written) {
  EXPECT_EXIT(touch_behind_the_end<TypeParam>(-1, true), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(touch_behind_the_end<TypeParam>(0, true), support::died_of_access, "");
  EXPECT_EXIT(touch_behind_the_end<TypeParam>(this->tail - 1, true), support::died_of_access, "");
}

TYPED_TEST(anchored_tail_death, ends_with_its_last_granule) {
  const auto granule = static_cast<std::ptrdiff_t>(TypeParam{}.granularity(holdfast::physical_options{}));
  const std::ptrdiff_t end = (this->tail + granule - 1) / granule * granule;
  EXPECT_EXIT(touch_behind_the_end<TypeParam>(end - 1, false), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(touch_behind_the_end<TypeParam>(end, false), support::died_of_access, "");
}

}  // namespace
