// How far consumers read: the arithmetic of tails.
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <gtest/gtest.h>

namespace {

using holdfast::over_read;

TEST(over_read, rows_beyond_are_the_same_for_any_shape) {
  for (const std::int64_t rows : {0, 1, 32, 127, 128, 300}) {
    EXPECT_EQ(over_read::rows_beyond(128).tail_rows(rows), 128);
  }
}

TEST(over_read, to_tile_end_completes_the_last_tile) {
  for (std::int64_t rows = 0; rows <= 300; ++rows) {
    const std::int64_t tail = over_read::to_tile_end(64).tail_rows(rows);
    EXPECT_EQ((rows + tail) % 64, 0);
    EXPECT_GE(tail, 0);
    EXPECT_LT(tail, 64);
  }
}

TEST(over_read, at_least_rows_fills_up_to_as_many) {
  EXPECT_EQ(over_read::at_least_rows(2048).tail_rows(0), 2048);
  EXPECT_EQ(over_read::at_least_rows(2048).tail_rows(2000), 48);
  EXPECT_EQ(over_read::at_least_rows(2048).tail_rows(2048), 0);
  EXPECT_EQ(over_read::at_least_rows(2048).tail_rows(5000), 0);
}

TEST(over_read, is_none_when_nothing_is_said) { EXPECT_EQ(over_read{}.tail_rows(100), 0); }

TEST(over_read, makes_no_sense_with_negative_rows_or_tiles_of_none) {
  EXPECT_FALSE(over_read::rows_beyond(-1).valid());
  EXPECT_FALSE(over_read::at_least_rows(-1).valid());
  EXPECT_FALSE(over_read::to_tile_end(0).valid());
  EXPECT_TRUE(over_read::rows_beyond(0).valid());
}

TEST(over_read, does_not_overflow) {
  EXPECT_EQ(over_read::to_tile_end(INT64_MAX).tail_rows(INT64_MAX), 0);
  EXPECT_EQ(over_read::to_tile_end(128).tail_rows(INT64_MAX), 1);
}

}  // namespace
