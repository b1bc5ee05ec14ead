// Where a device has no virtual memory management.
#include "support/buffers.hpp"

#include <holdfast/anchored_scratch.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace {

using bytes = std::vector<unsigned char>;

/// A device without it.
template <class Device>
struct flat : Device {
  flat() = default;
  explicit flat(int n) { this->ordinal = n; }
  static flat of(typename Device::stream_type s) { return flat{Device::of(s).ordinal}; }
  [[nodiscard]] static bool has_virtual_memory() { return false; }
};

template <class Device>
class anchored_fallback : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using anchored = holdfast::anchored_scratch<unsigned char, flat<Device>>;

  anchored make_anchored(std::int64_t row = 512, std::size_t alignment = 256) {
    return {holdfast::lane<flat<Device>>{holdfast::any_resource<flat<Device>>{this->resource, flat<Device>{}}},
            {.row_elements = row,
             .over_read = holdfast::over_read::rows_beyond(128),
             .alignment = alignment,
             .name = "kv"}};
  }
};
TYPED_TEST_SUITE(anchored_fallback, support::both_devices, support::device_names);

TYPED_TEST(anchored_fallback, is_a_tail_padded_allocator_and_says_so) {
  auto scratch = this->make_anchored();
  EXPECT_FALSE(scratch.anchored());
  {
    const auto rows = scratch.acquire(this->stream.get(), 32);
    EXPECT_EQ(rows.rows(), 32);
    EXPECT_EQ(rows.tail_rows(), 128);
    EXPECT_FALSE(rows.tail_read_only());
    support::driver<TypeParam>::synchronize(this->stream.get());
    EXPECT_EQ(support::driver<TypeParam>::read(rows.data() + 32 * 512, 128 * 512), bytes(128 * 512, 0));
    EXPECT_EQ(this->resource.live_bytes(), (32 + 128) * 512U);
  }
  EXPECT_EQ(scratch.data_end(), nullptr);
  EXPECT_EQ(scratch.capacity(), 0);
  scratch.reserve(64);
  EXPECT_EQ(this->resource.live_bytes(), (64 + 128) * 512U) << "for captures";
}

TYPED_TEST(anchored_fallback, leaves_the_tail_to_producers_that_write_it) {
  auto scratch = this->make_anchored();
  const auto rows = scratch.acquire_unfilled(this->stream.get(), 5);
  support::driver<TypeParam>::synchronize(this->stream.get());
  EXPECT_EQ(support::driver<TypeParam>::read(rows.data() + 5 * 512, 128 * 512), bytes(128 * 512, 0x7F));
}

TYPED_TEST(anchored_fallback, lends_to_one_at_a_time_too) {
  using driver = support::driver<TypeParam>;
  auto scratch = this->make_anchored();
  auto held = scratch.acquire(this->stream.get(), 3);
  try {
    static_cast<void>(scratch.acquire(this->stream.get(), 5));
    FAIL();
  } catch (const holdfast::in_use& error) {
    EXPECT_EQ(std::string{error.what()},
              "kv [0 rows of 512 elements]: 5 rows asked, but a handle of 3 rows lives; release it first");
  }
  held.release();
  driver::begin_capture(this->stream.get());
  held = scratch.acquire(this->stream.get(), 3);
  EXPECT_FALSE(scratch.try_acquire(this->stream.get(), 3));
  held.release();
  EXPECT_TRUE(scratch.try_acquire(this->stream.get(), 3));
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
}

TYPED_TEST(anchored_fallback, needs_rows_that_keep_the_alignment_too) {
  EXPECT_THROW(static_cast<void>(this->make_anchored(584, 16)), holdfast::logic_error);
}

}  // namespace
