// The arithmetic that finds a packet's unit, where 32 bits end and beyond.
#include <holdfast/kernel/row_op.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

using holdfast::detail::divisor32;
using holdfast::detail::divisor64;

std::vector<std::int32_t> divisors() {
  std::vector<std::int32_t> all{
      1, 2, 3, 5, 7, 64, 72, 73, 512, 576, 1024, (1 << 30) - 1, 1 << 30, std::numeric_limits<std::int32_t>::max()};
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) all.push_back(static_cast<std::int32_t>(random() >> (1 + random() % 30)) | 1);
  return all;
}

TEST(Divisors, Divide32Bits) {
  std::mt19937 random(2);
  for (const std::int32_t d : divisors()) {
    const auto u = static_cast<std::uint32_t>(d);
    const divisor32 by(d);
    std::vector<std::uint32_t> numbers{
        0, 1, u - 1, u, u + 1, 0x7fffffff, 0x7ffffffe, 0x7fffffff / u * u, 0x7fffffff / u * u - 1};
    for (int i = 0; i < 200; ++i) numbers.push_back(static_cast<std::uint32_t>(random()));
    for (std::uint32_t n : numbers) {
      n &= 0x7fffffff;
      ASSERT_EQ(by.quotient(n), n / u) << n << " / " << d;
    }
  }
}

TEST(Divisors, Divide63Bits) {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::mt19937_64 random(3);
  for (const std::int32_t d : divisors()) {
    const auto u = static_cast<std::uint64_t>(d);
    const divisor64 by(d);
    std::vector<std::uint64_t> numbers{0, 1, u - 1, u, most, most - 1, most / u * u, most / u * u - 1, most / 2};
    for (int i = 0; i < 200; ++i) numbers.push_back(random() >> (1 + random() % 62));
    for (std::uint64_t n : numbers) {
      n &= most;
      ASSERT_EQ(by.quotient(n), n / u) << n << " / " << d;
    }
  }
}

TEST(RowOpTiling, FindsPacketsFarBeyond32Bits) {
  std::mt19937_64 random(4);
  for (const holdfast::row_op_shape shape :
       {holdfast::row_op_shape{}, {.threads = 256, .packets = 1}, {.threads = 96, .packets = 3}})
    for (const std::int32_t parts : {1, 7, 576, 1024, 1 << 30}) {
      const std::int64_t units = (std::int64_t{1} << 62) / parts;
      const auto tiling = holdfast::detail::make_row_op_tiling(units, parts, shape);
      ASSERT_EQ(tiling.packets, units * parts);
      ASSERT_EQ(tiling.tiles, (tiling.packets + shape.tile() - 1) / shape.tile());
      for (int i = 0; i < 2000; ++i) {
        const auto tile =
            i == 0 ? tiling.tiles - 1
                   : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tiling.tiles)) >> random() % 50;
        const auto start = tiling.start_of(tile, shape.tile());
        const auto in_tile = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape.tile()));
        const auto place = tiling.place_of(start, static_cast<std::uint32_t>(in_tile));
        const std::int64_t packet = tile * shape.tile() + in_tile;
        ASSERT_EQ(start.packet, tile * shape.tile());
        ASSERT_EQ(place.unit, packet / parts) << packet << " / " << parts;
        ASSERT_EQ(place.part, packet % parts) << packet << " % " << parts;
      }
    }
}

}  // namespace
