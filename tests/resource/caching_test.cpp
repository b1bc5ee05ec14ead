// The blocks of caching_resource: how they are cut, kept, merged and counted. One stream each; streams and shortage have
// files of their own.
#include "resource/caching_fixture.hpp"

#include <holdfast/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

namespace {

using support::mebibyte;

template <class Device>
class caching : public support::caching_test<Device> {};
TYPED_TEST_SUITE(caching, support::both_devices, support::device_names);

TYPED_TEST(caching, reuses_freed_memory_at_once_on_its_stream) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{1000}, mebibyte, 3 * mebibyte, 64 * mebibyte}) {
    void* const p = pool.allocate(s, bytes, 256);
    static_cast<void>(this->occupy(s));
    pool.deallocate(s, p, bytes, 256);
    EXPECT_EQ(pool.allocate(s, bytes, 256), p) << bytes;
    pool.deallocate(s, p, bytes, 256);
  }
}

TYPED_TEST(caching, asks_the_upstream_for_nothing_in_the_steady_state) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto round = [&] {
    std::vector<void*> blocks;
    for (std::size_t i = 0; i < 32; ++i) blocks.push_back(pool.allocate(s, (i + 1) * 100000, 256));
    for (std::size_t i = 0; i < 32; ++i) pool.deallocate(s, blocks[i], (i + 1) * 100000, 256);
  };
  round();
  const auto before = pool.statistics();
  for (int i = 0; i < 10; ++i) round();
  EXPECT_EQ(pool.statistics().upstream_allocations, before.upstream_allocations);
  EXPECT_EQ(pool.statistics().upstream_deallocations, before.upstream_deallocations);
}

TYPED_TEST(caching, requests_of_about_one_size_share_blocks) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1000000, 256);
  pool.deallocate(s, p, 1000000, 256);
  EXPECT_EQ(pool.allocate(s, 1010000, 256), p);
  pool.deallocate(s, p, 1010000, 256);
}

TYPED_TEST(caching, wastes_an_eighth_at_most_and_little_of_large_blocks) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  std::mt19937 random{3};
  for (int i = 0; i < 300; ++i) {
    const std::size_t bytes = 1 + random() % (std::size_t{1} << (1 + i % 25));
    void* const p = pool.allocate(s, bytes, 1);
    const std::size_t waste = pool.used_bytes() - bytes;
    EXPECT_LT(waste, std::max<std::size_t>(256, bytes / 8)) << bytes;
    EXPECT_LT(waste, std::size_t{128} << 10) << bytes;
    pool.deallocate(s, p, bytes, 1);
  }
}

TYPED_TEST(caching, cuts_small_blocks_from_one_segment) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  std::vector<void*> blocks;
  for (int i = 0; i < 1000; ++i) blocks.push_back(pool.allocate(s, 1000, 256));
  EXPECT_EQ(pool.statistics().upstream_allocations, 1U);
  EXPECT_EQ(pool.reserved_bytes(), 2 * mebibyte);
  for (void* const p : blocks) pool.deallocate(s, p, 1000, 256);
}

TYPED_TEST(caching, merges_neighbours_in_whatever_order_they_are_freed) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  std::vector<int> order{0, 1, 2, 3};
  do {
    std::vector<void*> quarters;
    for (int i = 0; i < 4; ++i) quarters.push_back(pool.allocate(s, 8 * mebibyte, 256));
    for (const int i : order) pool.deallocate(s, quarters[static_cast<std::size_t>(i)], 8 * mebibyte, 256);
    void* const whole = pool.allocate(s, 32 * mebibyte, 256);
    EXPECT_EQ(whole, *std::ranges::min_element(quarters));
    pool.deallocate(s, whole, 32 * mebibyte, 256);
  } while (std::ranges::next_permutation(order).found);
  EXPECT_EQ(pool.statistics().upstream_allocations, 1U);
}

TYPED_TEST(caching, merges_freed_memory_with_what_was_merged_before) {
  for (const bool forward : {false, true}) {
    auto pool = this->make_pool();
    const auto s = TestFixture::drive::make_stream();
    void* const a = pool.allocate(s, 8 * mebibyte, 256);
    void* const b = pool.allocate(s, 8 * mebibyte, 256);
    void* const c = pool.allocate(s, 16 * mebibyte, 256);
    pool.deallocate(s, forward ? b : a, 8 * mebibyte, 256);
    void* const small = pool.allocate(s, 1000, 256);  // there is none: so all that was freed is merged
    pool.deallocate(s, forward ? a : b, 8 * mebibyte, 256);
    EXPECT_EQ(pool.allocate(s, 16 * mebibyte, 256), a);
    pool.deallocate(s, a, 16 * mebibyte, 256);
    pool.deallocate(s, c, 16 * mebibyte, 256);
    pool.deallocate(s, small, 1000, 256);
  }
}

TYPED_TEST(caching, cuts_the_best_fit) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  void* const large = pool.allocate(s, 8 * mebibyte, 256);
  void* const wall = pool.allocate(s, 2 * mebibyte, 256);
  void* const fitting = pool.allocate(s, 4 * mebibyte, 256);
  void* const end = pool.allocate(s, 2 * mebibyte, 256);  // and 16 MiB are left
  pool.deallocate(s, fitting, 4 * mebibyte, 256);
  pool.deallocate(s, large, 8 * mebibyte, 256);
  void* const p = pool.allocate(s, 3 * mebibyte, 256);
  EXPECT_EQ(p, fitting);
  pool.deallocate(s, p, 3 * mebibyte, 256);
  pool.deallocate(s, wall, 2 * mebibyte, 256);
  pool.deallocate(s, end, 2 * mebibyte, 256);
}

TYPED_TEST(caching, a_growing_request_does_not_leave_its_predecessors_behind) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  for (std::size_t n = 1; n <= 200; ++n) {
    void* const p = pool.allocate(s, n * mebibyte, 256);
    EXPECT_LE(pool.reserved_bytes(), std::max<std::size_t>(34, n * 9 / 8 + 2) * mebibyte) << n;
    pool.deallocate(s, p, n * mebibyte, 256);
  }
  EXPECT_LE(pool.statistics().upstream_allocations, 26U);  // eight for each power of two, not one for each request
}

TYPED_TEST(caching, over_aligned_blocks_take_no_more_than_others) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  std::vector<void*> blocks;
  for (std::size_t alignment = 256; alignment <= 4 * mebibyte; alignment *= 2) {
    blocks.push_back(pool.allocate(s, 300, alignment));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back()) % alignment, 0U) << alignment;
  }
  EXPECT_EQ(pool.used_bytes(), blocks.size() * 512);
  pool.deallocate(s, blocks[4], 300, 4096);
  EXPECT_EQ(pool.allocate(s, 300, 4096), blocks[4]) << "it is kept like others";
  for (std::size_t i = 0; i < blocks.size(); ++i) pool.deallocate(s, blocks[i], 300, std::size_t{256} << i);
}

TYPED_TEST(caching, counts_bytes_beyond_32_bits) {
  if (TypeParam{}.memory().free < std::size_t{6} << 30) GTEST_SKIP() << "needs 6 GiB";
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const std::size_t bytes = (std::size_t{4} << 30) + mebibyte;
  void* const p = pool.allocate(s, bytes, 256);
  EXPECT_EQ(pool.used_bytes(), bytes);
  EXPECT_TRUE(this->upstream.is_live(static_cast<std::byte*>(p) + bytes - 1));
  pool.deallocate(s, p, bytes, 256);
}

TYPED_TEST(caching, settles_for_an_exact_segment_when_a_larger_one_is_not_to_be_had) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  this->upstream.fail();
  void* const p = pool.allocate(s, 3 * mebibyte, 256);
  EXPECT_EQ(pool.reserved_bytes(), 3 * mebibyte);
  pool.deallocate(s, p, 3 * mebibyte, 256);
}

TYPED_TEST(caching, asks_for_segments_of_the_size_it_is_told) {
  auto pool = this->make_pool({.segment_bytes = 8 * mebibyte});
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 3 * mebibyte, 256);
  EXPECT_EQ(pool.reserved_bytes(), 8 * mebibyte);
  pool.deallocate(s, p, 3 * mebibyte, 256);
}

TYPED_TEST(caching, counts_what_it_does) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 8 * mebibyte, 256);
  void* const q = pool.allocate(s, 16 * mebibyte, 256);
  pool.deallocate(s, p, 8 * mebibyte, 256);
  const auto now = pool.statistics();
  EXPECT_EQ(now.reserved_bytes, 32 * mebibyte);
  EXPECT_EQ(now.used_bytes, 16 * mebibyte);
  EXPECT_EQ(now.cached_bytes, 16 * mebibyte);
  EXPECT_EQ(now.peak_used_bytes, 24 * mebibyte);
  EXPECT_EQ(now.allocations, 2U);
  EXPECT_EQ(now.upstream_allocations, 1U);
  pool.deallocate(s, q, 16 * mebibyte, 256);
  pool.trim();
  const auto then = pool.statistics();
  EXPECT_EQ(then.reserved_bytes, 0U);
  EXPECT_EQ(then.peak_reserved_bytes, 32 * mebibyte);
  EXPECT_EQ(then.upstream_deallocations, 1U);
  EXPECT_EQ(then.errors, 0U);
}

TYPED_TEST(caching, keeps_its_books_through_a_long_random_life) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  struct block {
    std::uintptr_t start;
    std::size_t bytes;
    std::size_t alignment;
  };
  std::vector<block> live;
  std::size_t asked = 0;
  std::mt19937 random{11};
  for (int i = 0; i < 6000; ++i) {
    if (live.size() > 60 || (!live.empty() && random() % 2 == 0)) {
      std::swap(live[random() % live.size()], live.back());
      pool.deallocate(s, reinterpret_cast<void*>(live.back().start), live.back().bytes, live.back().alignment);
      asked -= live.back().bytes;
      live.pop_back();
    } else {
      const std::size_t bytes = 1 + random() % (std::size_t{1} << (1 + random() % 23));
      const std::size_t alignment = std::size_t{1} << random() % 17;
      void* const p = pool.allocate(s, bytes, alignment);
      ASSERT_TRUE(this->upstream.is_live(p) && this->upstream.is_live(static_cast<std::byte*>(p) + bytes - 1));
      live.push_back({reinterpret_cast<std::uintptr_t>(p), bytes, alignment});
      ASSERT_EQ(live.back().start % alignment, 0U);
      asked += bytes;
      for (std::size_t j = 0; j + 1 < live.size(); ++j) {
        ASSERT_TRUE(live[j].start + live[j].bytes <= live.back().start || live.back().start + bytes <= live[j].start);
      }
    }
    ASSERT_GE(pool.used_bytes(), asked);
  }
  for (const block& one : live) pool.deallocate(s, reinterpret_cast<void*>(one.start), one.bytes, one.alignment);
  EXPECT_EQ(pool.used_bytes(), 0U);
  EXPECT_EQ(pool.errors(), 0U);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0U) << "everything merged into whole segments";
  EXPECT_EQ(this->upstream.live_count(), 0U);
  EXPECT_EQ(this->upstream.mistakes(), 0U);
}

/// Eight threads allocate and free at random, on the streams that `stream_of` gives them.
template <class Fixture, class StreamOf>
void in_eight_threads(typename Fixture::pool_type pool, StreamOf stream_of, std::atomic<int>& wrong) {
  std::vector<std::thread> threads;
  for (unsigned owner = 0; owner < 8; ++owner) {
    threads.emplace_back([&, owner, mine = pool]() mutable {
      std::mt19937 random{owner};
      std::vector<std::pair<void*, std::size_t>> live;
      const auto s = stream_of(owner);
      for (int i = 0; i < 600; ++i) {
        if (live.size() > 12) {
          std::swap(live[random() % live.size()], live.back());
          mine.deallocate(s, live.back().first, live.back().second, 256);
          live.pop_back();
        }
        const std::size_t bytes = 1 + random() % (std::size_t{1} << (8 + random() % 14));
        live.emplace_back(mine.allocate(s, bytes, 256), bytes);
        if (live.back().first == nullptr) ++wrong;
        if (i % 200 == 199) mine.trim(4 * mebibyte);
        if (i % 100 == 99) mine.release(s);
      }
      for (const auto& [p, bytes] : live) mine.deallocate(s, p, bytes, 256);
    });
  }
  for (std::thread& one : threads) one.join();
}

template <class Device>
class caching_threads : public support::caching_test<Device> {
 public:
  using typename support::caching_test<Device>::pool_type;
};
TYPED_TEST_SUITE(caching_threads, support::both_devices, support::device_names);

TYPED_TEST(caching_threads, have_streams_of_their_own) {
  auto pool = this->make_pool();
  std::vector<decltype(TestFixture::drive::make_stream())> streams;
  for (int i = 0; i < 8; ++i) streams.push_back(TestFixture::drive::make_stream());
  std::atomic<int> wrong = 0;
  in_eight_threads<TestFixture>(
      pool, [&](unsigned i) { return streams[i].get(); }, wrong);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pool.errors(), 0U);
  EXPECT_EQ(pool.used_bytes(), 0U);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0U);
  EXPECT_EQ(this->upstream.mistakes(), 0U);
}

TYPED_TEST(caching_threads, share_a_stream) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  std::atomic<int> wrong = 0;
  in_eight_threads<TestFixture>(
      pool, [&](unsigned) { return s.get(); }, wrong);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(pool.errors(), 0U);
  EXPECT_EQ(pool.used_bytes(), 0U);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0U);
}

TYPED_TEST(caching_threads, meet_in_one_pool_for_the_first_time) {
  for (int round = 0; round < 20; ++round) {
    auto pool = this->make_pool();
    std::vector<decltype(TestFixture::drive::make_stream())> streams;
    for (int i = 0; i < 40; ++i)
      streams.push_back(TestFixture::drive::make_stream());  // more than the first table holds
    std::vector<std::thread> threads;
    for (unsigned owner = 0; owner < 4; ++owner) {
      threads.emplace_back([&, owner, mine = pool]() mutable {
        for (unsigned i = 0; i < streams.size(); ++i) {
          const auto& s = streams[(i + 10 * owner) % streams.size()];
          void* const p = mine.allocate(s, 1000, 256);
          mine.deallocate(s, p, 1000, 256);
        }
      });
    }
    for (std::thread& one : threads) one.join();
    EXPECT_EQ(pool.errors(), 0U);
    EXPECT_EQ(pool.statistics().allocations, 160U);
  }
}

}  // namespace
