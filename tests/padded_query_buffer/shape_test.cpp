// What a padded_query_buffer is made of, and what it refuses to be made of.
#include "support/buffers.hpp"

#include <holdfast/padded_query_buffer.hpp>

#include <gtest/gtest.h>

namespace {

using holdfast::padded_head_count;
using holdfast::query_shape;

TEST(padded_head_count, is_the_smallest_supported_count_that_holds_the_heads) {
  static_assert(padded_head_count(8) == 64);
  EXPECT_EQ(padded_head_count(1), 64);
  EXPECT_EQ(padded_head_count(64), 64);
  EXPECT_EQ(padded_head_count(65), 128);
  EXPECT_EQ(padded_head_count(96), 128);
  EXPECT_EQ(padded_head_count(128), 128);
  EXPECT_EQ(padded_head_count(16, {8, 16, 32, 64, 128}), 16);
}

TEST(padded_head_count, refuses_what_no_count_holds_and_says_so) {
  EXPECT_THROW(static_cast<void>(padded_head_count(0)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(padded_head_count(-8)), holdfast::logic_error);
  try {
    static_cast<void>(padded_head_count(129));
    FAIL();
  } catch (const holdfast::logic_error& error) {
    EXPECT_STREQ(error.what(), "padded_head_count: 129 heads cannot be padded to one of {64, 128}");
  }
}

template <class Device>
class padded_query_buffer_shape : public support::buffer_test<Device> {};
TYPED_TEST_SUITE(padded_query_buffer_shape, support::both_devices, support::device_names);

TYPED_TEST(padded_query_buffer_shape, is_refused_when_it_makes_no_sense) {
  const query_shape bad[] = {
      {.heads = 0, .padded_heads = 64, .head_dim = 512},
      {.heads = -1, .padded_heads = 64, .head_dim = 512},
      {.heads = 65, .padded_heads = 64, .head_dim = 512},
      {.heads = 8, .padded_heads = 64, .head_dim = 0},
      {.heads = 8, .padded_heads = 64, .head_dim = -8},
      {.heads = 8, .padded_heads = 64, .head_dim = 12},
      {.heads = 8, .padded_heads = 1LL << 40, .head_dim = 1LL << 40},
  };
  for (const query_shape& shape : bad) {
    EXPECT_THROW((holdfast::padded_query_buffer<float, TypeParam>{this->resource, shape}), holdfast::logic_error);
  }
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST(padded_query_buffer_shape, allocates_nothing_before_rows_are_asked_for) {
  auto buffer = this->make();
  EXPECT_EQ(this->resource.allocations(), 0U);
  EXPECT_EQ(buffer.capacity(), 0);
  EXPECT_EQ(buffer.data(), nullptr);
}

TYPED_TEST(padded_query_buffer_shape, takes_exactly_the_bytes_of_its_rows) {
  auto buffer = this->make({.heads = 2, .padded_heads = 4, .head_dim = 16});
  buffer.reserve(5);
  EXPECT_EQ(this->resource.live_bytes(), 5U * 4 * 16 * sizeof(float));
}

TYPED_TEST(padded_query_buffer_shape, past_64_bits_is_refused_before_anything_is_allocated) {
  auto buffer = this->make({.heads = 16, .padded_heads = 64, .head_dim = 512});
  EXPECT_THROW(buffer.reserve(std::int64_t{1} << 62), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), std::int64_t{1} << 62)), holdfast::logic_error);
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST(padded_query_buffer_shape, past_32_bits_asks_for_the_right_size) {
  // 65536 x 64 x 512 elements of 2 bytes: 2^31 elements, 4 GiB. A size in 32 bits would be 0.
  struct recording {
    using stream_type = typename TypeParam::stream_type;
    std::shared_ptr<std::size_t> asked = std::make_shared<std::size_t>(0);
    void* allocate(stream_type, std::size_t bytes, std::size_t) {
      *asked = bytes;
      throw holdfast::out_of_memory{"recording", bytes, 0, 0};
    }
    void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept {}
    bool operator==(const recording&) const = default;
  };
  recording sizes;
  holdfast::padded_query_buffer<std::uint16_t, TypeParam> buffer{holdfast::any_resource<TypeParam>{sizes, TypeParam{}},
                                                                 {.heads = 16, .padded_heads = 64, .head_dim = 512}};
  EXPECT_THROW(buffer.reserve(65536), holdfast::out_of_memory);
  EXPECT_EQ(*sizes.asked, std::size_t{1} << 32);
}

TYPED_TEST(padded_query_buffer_shape, every_row_is_aligned_for_16_byte_accesses) {
  for (const std::int64_t dim : {8, 512, 576, 584}) {
    auto buffer = this->template make<std::uint16_t>({.heads = 3, .padded_heads = 64, .head_dim = dim});
    const auto rows = buffer.acquire(this->stream.get(), 3);
    for (std::int64_t row = 0; row < 3; ++row) {
      const auto* const start = rows.data() + row * 64 * dim;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(start) % 16, 0U) << dim;
    }
  }
}

}  // namespace
