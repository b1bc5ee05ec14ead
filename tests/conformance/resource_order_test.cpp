// Stream order and threads: memory belongs to one user at a time, on the device's clock as well as on the host's.
#include "support/resources.hpp"

#include <holdfast/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace {

template <class Entry>
class resource_order : public support::resource_test<Entry> {
 protected:
  using typename support::resource_test<Entry>::drive;
  using typename support::resource_test<Entry>::device;
  using typename support::resource_test<Entry>::stream_type;

  static constexpr std::size_t bytes = support::is_host<device> ? 20000 : std::size_t{8} << 20;
  static constexpr int rounds = 24;

  void SetUp() override {
    support::resource_test<Entry>::SetUp();
    if (this->IsSkipped()) return;
    for (auto*& one : kept_) one = static_cast<std::byte*>(drive::allocate(bytes));
    ballast_ = drive::allocate(ballast_bytes);
  }

  void TearDown() override {
    for (auto* one : kept_) {
      if (one != nullptr) drive::deallocate(one);
    }
    if (ballast_ != nullptr) drive::deallocate(ballast_);
  }

  /// Work that takes a while, and then: `p` is all `value`, and what it was then is kept at `slot`.
  void use(stream_type s, void* p, std::byte value, std::size_t slot) {
    for (int i = 0; i < (support::is_host<device> ? 1 : 16); ++i) {
      device::fill(s, ballast_, std::byte{0}, ballast_bytes);
    }
    device::fill(s, p, value, bytes);
    device::copy(s, kept_[slot], p, bytes);
  }

  [[nodiscard]] bool kept(std::size_t slot, std::byte value) const {
    return drive::read(kept_[slot], bytes) == std::vector<std::byte>(bytes, value);
  }

 private:
  static constexpr std::size_t ballast_bytes = support::is_host<device> ? 64 : std::size_t{64} << 20;
  std::byte* kept_[2] = {};
  void* ballast_ = nullptr;
};
TYPED_TEST_SUITE(resource_order, support::resources_under_test, support::resource_names);

TYPED_TEST(resource_order, freed_memory_with_work_pending_goes_to_no_other_stream_before) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  for (int round = 0; round < TestFixture::rounds; ++round) {
    const support::any_order<typename TestFixture::device> order{static_cast<std::uint64_t>(round)};
    void* const a = pool.allocate(s, TestFixture::bytes, 256);
    this->use(s, a, std::byte{0x11}, 0);
    pool.deallocate(s, a, TestFixture::bytes, 256);
    void* const b = pool.allocate(t, TestFixture::bytes, 256);
    this->use(t, b, std::byte{0x22}, 1);
    pool.deallocate(t, b, TestFixture::bytes, 256);
    TestFixture::drive::synchronize(t);
    TestFixture::drive::synchronize(s);
    ASSERT_TRUE(this->kept(0, std::byte{0x11})) << "round " << round;
    ASSERT_TRUE(this->kept(1, std::byte{0x22})) << "round " << round;
  }
}

TYPED_TEST(resource_order, memory_used_on_a_joined_stream_is_free_after_that_use) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  const auto side = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  for (int round = 0; round < TestFixture::rounds; ++round) {
    const support::any_order<typename TestFixture::device> order{static_cast<std::uint64_t>(round)};
    void* const a = pool.allocate(s, TestFixture::bytes, 256);
    TestFixture::drive::fork(s, side);
    this->use(side, a, std::byte{0x33}, 0);
    TestFixture::drive::fork(side, s);
    pool.deallocate(s, a, TestFixture::bytes, 256);
    void* const b = pool.allocate(t, TestFixture::bytes, 256);
    this->use(t, b, std::byte{0x44}, 1);
    pool.deallocate(t, b, TestFixture::bytes, 256);
    TestFixture::drive::synchronize(t);
    TestFixture::drive::synchronize(s);
    ASSERT_TRUE(this->kept(0, std::byte{0x33})) << "round " << round;
    ASSERT_TRUE(this->kept(1, std::byte{0x44})) << "round " << round;
  }
}

TYPED_TEST(resource_order, memory_is_reused_on_its_stream_in_order) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  for (int round = 0; round < TestFixture::rounds; ++round) {
    for (const std::size_t turn : {std::size_t{0}, std::size_t{1}}) {
      void* const p = pool.allocate(s, TestFixture::bytes, 256);
      this->use(s, p, static_cast<std::byte>(0x50 + turn), turn);
      pool.deallocate(s, p, TestFixture::bytes, 256);
    }
  }
  TestFixture::drive::synchronize(s);
  EXPECT_TRUE(this->kept(0, std::byte{0x50}));
  EXPECT_TRUE(this->kept(1, std::byte{0x51}));
}

TYPED_TEST(resource_order, live_memory_never_overlaps) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  struct block {
    std::uintptr_t start;
    std::size_t size;
    std::size_t alignment;
  };
  std::vector<block> live;
  std::mt19937 random{7};
  for (int i = 0; i < 400; ++i) {
    if (live.size() > 40) {
      const std::size_t victim = random() % live.size();
      pool.deallocate(s, reinterpret_cast<void*>(live[victim].start), live[victim].size, live[victim].alignment);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    const std::size_t size = 1 + random() % 9000;
    const std::size_t alignment = std::size_t{1} << random() % 13;
    live.push_back({reinterpret_cast<std::uintptr_t>(pool.allocate(s, size, alignment)), size, alignment});
    auto sorted = live;
    std::ranges::sort(sorted, {}, &block::start);
    for (std::size_t j = 1; j < sorted.size(); ++j) {
      ASSERT_LE(sorted[j - 1].start + sorted[j - 1].size, sorted[j].start);
    }
  }
  for (const block& one : live) pool.deallocate(s, reinterpret_cast<void*>(one.start), one.size, one.alignment);
}

TYPED_TEST(resource_order, threads_never_see_each_others_bytes) {
  using Device = typename TestFixture::device;
  using Driver = typename TestFixture::drive;
  auto pool = TypeParam::make();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int owner = 0; owner < 8; ++owner) {
    threads.emplace_back([&, owner, mine = pool]() mutable {
      const auto s = Driver::make_stream();
      std::mt19937 random{static_cast<std::mt19937::result_type>(owner)};
      auto* const kept = static_cast<std::byte*>(Driver::allocate(1 << 14));
      for (int i = 0; i < 120; ++i) {
        const std::size_t size = 1 + random() % (1 << 14);
        const std::size_t alignment = std::size_t{1} << random() % 13;
        const auto value = static_cast<std::byte>(16 * owner + i % 16);
        void* const p = mine.allocate(s, size, alignment);
        Device::fill(s, p, value, size);
        std::this_thread::yield();
        Device::copy(s, kept, p, size);
        mine.deallocate(s, p, size, alignment);
        Device::synchronize(s);
        if (Driver::read(kept, size) != std::vector<std::byte>(size, value)) ++wrong;
      }
      Driver::deallocate(kept);
    });
  }
  for (std::thread& one : threads) one.join();
  EXPECT_EQ(wrong, 0);
}

TYPED_TEST(resource_order, zero_bytes_are_null_on_many_threads_at_once) {
  auto pool = TypeParam::make();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int owner = 0; owner < 8; ++owner) {
    threads.emplace_back([&, mine = pool]() mutable {
      const auto s = TestFixture::drive::make_stream();
      for (int i = 0; i < 10000; ++i) {
        void* const p = mine.allocate(s, 0, 256);
        if (p != nullptr) ++wrong;
        mine.deallocate(s, p, 0, 256);
      }
    });
  }
  for (std::thread& one : threads) one.join();
  EXPECT_EQ(wrong, 0);
}

TYPED_TEST(resource_order, memory_may_be_freed_by_another_thread) {
  auto pool = TypeParam::make();
  const auto s = TestFixture::drive::make_stream();
  for (int i = 0; i < 32; ++i) {
    void* const p = pool.allocate(s, 3000, 512);
    std::thread{[&] { pool.deallocate(s, p, 3000, 512); }}.join();
    void* const q = pool.allocate(s, 3000, 512);
    ASSERT_TRUE(this->works(s, q, 3000));
    pool.deallocate(s, q, 3000, 512);
  }
}

TYPED_TEST(resource_order, per_thread_streams_are_different_streams) {
  auto pool = TypeParam::make();
  for (int round = 0; round < 4; ++round) {
    // This thread's work is pending, its memory freed, when another thread allocates on the handle of the same value.
    const auto mine = TestFixture::drive::per_thread_stream();
    void* const a = pool.allocate(mine, TestFixture::bytes, 256);
    this->use(mine, a, std::byte{0x61}, 0);
    pool.deallocate(mine, a, TestFixture::bytes, 256);
    std::thread{[&] {
      const auto theirs = TestFixture::drive::per_thread_stream();
      void* const b = pool.allocate(theirs, TestFixture::bytes, 256);
      this->use(theirs, b, std::byte{0x62}, 1);
      pool.deallocate(theirs, b, TestFixture::bytes, 256);
      TestFixture::drive::synchronize(theirs);
    }}.join();
    TestFixture::drive::synchronize(mine);
    ASSERT_TRUE(this->kept(0, std::byte{0x61})) << "round " << round;
    ASSERT_TRUE(this->kept(1, std::byte{0x62})) << "round " << round;
  }
}

}  // namespace
