// caching_resource when memory is short, or given back: limits, out of memory, trim, and the end.
#include "resource/caching_fixture.hpp"

#include <holdfast/detail/caching_barrier.hpp>
#include <holdfast/detail/process.hpp>
#include <holdfast/error.hpp>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace {

using support::mebibyte;

constexpr std::size_t bytes = 32 * mebibyte;  // a whole segment
constexpr std::size_t petabyte = std::size_t{1} << 50;

template <class Device>
class caching_shortage : public support::caching_test<Device> {
 public:
  using typename support::caching_test<Device>::drive;
  using typename support::caching_test<Device>::pool_type;
  using typename support::caching_test<Device>::stream_type;
};
TYPED_TEST_SUITE(caching_shortage, support::both_devices, support::device_names);

/// Leaves a whole segment that is free on `s`.
template <class Pool, class Stream>
void* leave_one(Pool& pool, const Stream& s, std::size_t size = bytes) {
  void* const p = pool.allocate(s, size, 256);
  pool.deallocate(s, p, size, 256);
  return p;
}

/// An upstream that can be seen to end.
template <class Device>
struct owned_upstream {
  using stream_type = typename Device::stream_type;

  void* allocate(stream_type s, std::size_t n, std::size_t alignment) { return memory.allocate(s, n, alignment); }
  void deallocate(stream_type s, void* p, std::size_t n, std::size_t alignment) noexcept {
    memory.deallocate(s, p, n, alignment);
  }
  [[nodiscard]] Device device() const { return memory.device(); }
  bool operator==(const owned_upstream&) const = default;

  holdfast::malloc_resource<Device> memory;
  std::shared_ptr<int> life = std::make_shared<int>();
};

template <class Device>
holdfast::caching_resource<Device> pool_over(const owned_upstream<Device>& upstream) {
  return holdfast::caching_resource<Device>{upstream};
}

TYPED_TEST(caching_shortage, keeps_to_the_limit_and_says_so) {
  auto pool = this->make_pool({.max_reserved_bytes = 2 * bytes});
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  void* const q = pool.allocate(s, bytes, 256);
  try {
    static_cast<void>(pool.allocate(s, bytes + 1, 256));
    ADD_FAILURE() << "the limit was passed";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(shortage.requested(), bytes + 1);
    EXPECT_EQ(shortage.held(), 2 * bytes);
    EXPECT_GT(shortage.free(), 0U);
  }
  EXPECT_EQ(this->upstream.allocations(), 2U) << "the upstream was not asked";
  pool.deallocate(s, p, bytes, 256);
  pool.deallocate(s, q, bytes, 256);
}

TYPED_TEST(caching_shortage, cached_segments_make_room_under_the_limit) {
  auto pool = this->make_pool({.max_reserved_bytes = 2 * bytes});
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  leave_one(pool, s);
  leave_one(pool, t);
  void* const p = pool.allocate(s, 2 * bytes, 256);
  EXPECT_EQ(pool.reserved_bytes(), 2 * bytes);
  pool.deallocate(s, p, 2 * bytes, 256);
}

TYPED_TEST(caching_shortage, gives_back_what_is_cached_and_asks_again) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  leave_one(pool, t);
  this->upstream.fail();
  void* const p = pool.allocate(s, 2 * bytes, 256);
  EXPECT_EQ(this->upstream.allocations(), 3U);
  EXPECT_EQ(this->upstream.deallocations(), 1U);
  EXPECT_EQ(this->upstream.live_count(), 1U);
  EXPECT_EQ(pool.reserved_bytes(), 2 * bytes);
  pool.deallocate(s, p, 2 * bytes, 256);
}

TYPED_TEST(caching_shortage, takes_over_a_segment_that_fits_rather_than_giving_it_back) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const cached = leave_one(pool, t);
  this->upstream.fail(0, 100);
  EXPECT_EQ(pool.allocate(s, bytes, 256), cached);
  EXPECT_EQ(pool.statistics().upstream_deallocations, 0U);
  pool.deallocate(s, cached, bytes, 256);
}

TYPED_TEST(caching_shortage, waits_for_the_work_of_what_it_takes) {
  auto pool = this->make_pool({.max_reserved_bytes = bytes});
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  const auto busy = this->occupy(s);
  pool.deallocate(s, p, bytes, 256);
  EXPECT_EQ(pool.allocate(t, bytes, 256), p);
  EXPECT_TRUE(busy.ready());
  pool.deallocate(t, p, bytes, 256);
}

TYPED_TEST(caching_shortage, waits_for_work_that_came_after_a_release) {
  auto pool = this->make_pool({.max_reserved_bytes = 2 * bytes});
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  void* const released = leave_one(pool, s);
  pool.release(s);
  const auto busy = this->occupy(s);
  pool.deallocate(s, p, bytes, 256);
  void* const q = pool.allocate(t, bytes, 256);
  void* const r = pool.allocate(t, bytes, 256);
  EXPECT_EQ(q, released);
  EXPECT_EQ(r, p);
  EXPECT_TRUE(busy.ready());
  pool.deallocate(t, q, bytes, 256);
  pool.deallocate(t, r, bytes, 256);
}

TYPED_TEST(caching_shortage, prefers_what_is_ready_to_what_is_pending) {
  auto pool = this->make_pool({.max_reserved_bytes = 2 * bytes});
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  const auto u = TestFixture::drive::make_stream();
  void* const ready = leave_one(pool, s);
  pool.release(s);
  TestFixture::drive::synchronize(s);
  void* const pending = pool.allocate(t, 20 * mebibyte, 256);
  ASSERT_EQ(pending, ready) << "the only one there was";
  void* const other = pool.allocate(s, bytes, 256);
  pool.deallocate(s, other, bytes, 256);
  pool.release(s);
  TestFixture::drive::synchronize(s);
  const auto busy = this->occupy(t);
  pool.deallocate(t, pending, 20 * mebibyte, 256);
  pool.release(t);
  const bool was_busy = !busy.ready();
  void* const p = pool.allocate(u, bytes, 256);
  if (was_busy) {
    EXPECT_EQ(p, other);
  }
  pool.deallocate(u, p, bytes, 256);
}

TYPED_TEST(caching_shortage, asks_the_user_before_it_gives_up) {
  std::vector<std::size_t> asked;
  std::function<bool(std::size_t)> answer;
  auto pool = this->make_pool({.max_reserved_bytes = bytes, .on_out_of_memory = [&](std::size_t n) {
                                 asked.push_back(n);
                                 return answer(n);
                               }});
  const auto s = TestFixture::drive::make_stream();
  void* const held = pool.allocate(s, bytes, 256);

  answer = [](std::size_t) { return false; };
  EXPECT_THROW(static_cast<void>(pool.allocate(s, 5000, 256)), holdfast::out_of_memory);
  EXPECT_EQ(asked, std::vector<std::size_t>{5000});

  answer = [&](std::size_t) {
    pool.deallocate(s, held, bytes, 256);
    return true;
  };
  void* const p = pool.allocate(s, 7 * mebibyte, 256);
  EXPECT_EQ(asked, (std::vector<std::size_t>{5000, 7 * mebibyte}));
  pool.deallocate(s, p, 7 * mebibyte, 256);

  answer = [](std::size_t) -> bool { throw holdfast::logic_error{"enough"}; };
  EXPECT_EQ(pool.allocate(s, bytes, 256), held);
  EXPECT_THROW(static_cast<void>(pool.allocate(s, 5000, 256)), holdfast::logic_error);
  pool.deallocate(s, held, bytes, 256);
  EXPECT_EQ(leave_one(pool, s), held) << "and the pool goes on";
}

TYPED_TEST(caching_shortage, gives_nothing_back_for_what_is_hopeless) {
  bool asked = false;
  auto pool = this->make_pool({.on_out_of_memory = [&](std::size_t) { return asked = true; }});
  const auto s = TestFixture::drive::make_stream();
  leave_one(pool, s);
  EXPECT_THROW(static_cast<void>(pool.allocate(s, petabyte, 256)), holdfast::out_of_memory);
  EXPECT_EQ(pool.reserved_bytes(), bytes);
  EXPECT_FALSE(asked);
}

TYPED_TEST(caching_shortage, an_upstream_that_throws_changes_nothing) {
  struct broken {
    using stream_type = typename TestFixture::stream_type;
    static void* allocate(stream_type, std::size_t, std::size_t) { throw holdfast::device_error{999, "broken"}; }
    static void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept {}
    bool operator==(const broken&) const = default;
  };
  holdfast::caching_resource<TypeParam> pool{holdfast::any_resource<TypeParam>{broken{}, TypeParam{}}};
  const auto s = TestFixture::drive::make_stream();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(support::error_code([&] { static_cast<void>(pool.allocate(s, 1000, 256)); }), 999);
    EXPECT_EQ(pool.reserved_bytes(), 0U);
    EXPECT_EQ(pool.used_bytes(), 0U);
  }
}

// --- trim -----------------------------------------------------------------------------------------------------------------

TYPED_TEST(caching_shortage, trims_down_to_what_it_is_told_to_keep) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  std::array<void*, 4> blocks{};
  for (void*& p : blocks) p = pool.allocate(s, bytes, 256);
  for (void* const p : blocks) pool.deallocate(s, p, bytes, 256);
  pool.trim(4 * bytes);
  EXPECT_EQ(pool.reserved_bytes(), 4 * bytes);
  pool.trim(2 * bytes);
  EXPECT_EQ(pool.reserved_bytes(), 2 * bytes);
  EXPECT_EQ(this->upstream.live_bytes(), 2 * bytes);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0U);
}

TYPED_TEST(caching_shortage, trims_nothing_that_is_in_use) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  void* const used = pool.allocate(s, 1000, 256);
  leave_one(pool, s, 500);
  leave_one(pool, s);
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 2 * mebibyte);
  EXPECT_TRUE(this->upstream.is_live(used));
  pool.deallocate(s, used, 1000, 256);
}

TYPED_TEST(caching_shortage, trims_released_memory_behind_its_work_and_without_waiting) {
  auto* const kept = static_cast<std::byte*>(TestFixture::drive::allocate(1000));
  for (int round = 0; round < 8; ++round) {
    const support::any_order<TypeParam> order{static_cast<std::uint64_t>(round)};
    auto pool = this->make_pool();
    const auto s = TestFixture::drive::make_stream();
    void* const p = pool.allocate(s, bytes, 256);
    const auto busy = this->occupy(s);
    TypeParam::fill(s, p, std::byte{7}, 1000);
    TypeParam::copy(s, kept, p, 1000);
    pool.deallocate(s, p, bytes, 256);
    pool.release(s);
    pool.trim();
    EXPECT_EQ(pool.reserved_bytes(), 0U);
    EXPECT_EQ(this->upstream.live_count(), 0U);
    if (support::is_host<TypeParam>) {  // cudaFree, the upstream's, waits
      EXPECT_FALSE(busy.ready());
    }
    TestFixture::drive::synchronize(TypeParam{}.library_stream());  // frees it: the work faults if it comes later
    TestFixture::drive::synchronize(s);
    EXPECT_EQ(TestFixture::drive::read(kept, 1000), std::vector<std::byte>(1000, std::byte{7}));
  }
  TestFixture::drive::deallocate(kept);
}

TYPED_TEST(caching_shortage, waits_for_the_device_to_trim_what_was_not_released) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, bytes, 256);
  const auto busy = this->occupy(s);
  pool.deallocate(s, p, bytes, 256);
  pool.trim();
  EXPECT_TRUE(busy.ready());
  EXPECT_EQ(pool.reserved_bytes(), 0U);
}

TYPED_TEST(caching_shortage, the_barrier_waits_for_every_stream_and_harms_no_capture) {
  for (const auto mode : support::capture_modes) {
    for (const auto kind : support::stream_kinds) {
      const auto busy_one = TestFixture::drive::make_stream(support::stream_kind::non_blocking);
      const auto busy_too = TestFixture::drive::make_stream(support::stream_kind::blocking);
      const auto capturing = TestFixture::drive::make_stream(kind);
      holdfast::detail::caching_barrier<TypeParam> barrier;
      {
        const typename TypeParam::relaxed_scope relaxed;
        barrier.prepare(TypeParam{});
      }
      auto* const some = TestFixture::drive::allocate(64);
      const auto one = this->occupy(busy_one);
      const auto too = this->occupy(busy_too);
      TestFixture::drive::begin_capture(capturing, mode);
      TypeParam::fill(capturing, some, std::byte{1}, 64);
      {
        const typename TypeParam::relaxed_scope relaxed;
        EXPECT_TRUE(barrier.wait(TypeParam{}));
        EXPECT_TRUE(one.ready());
        EXPECT_TRUE(too.ready());
      }
      const auto graph = TestFixture::drive::end_capture(capturing);
      EXPECT_TRUE(graph) << "the capture was broken";
      TestFixture::drive::deallocate(some);
    }
  }
}

// --- mistakes ---------------------------------------------------------------------------------------------------------------

TYPED_TEST(caching_shortage, ignores_and_counts_wrong_deallocations) {
  auto pool = this->make_pool();
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  auto* const p = static_cast<std::byte*>(pool.allocate(s, 5000, 256));
  void* const q = pool.allocate(s, 5000, 256);
  pool.deallocate(s, q, 5000, 256);
  std::uint64_t errors = 0;
  int local = 0;
  const auto wrong = [&](const auto& on, void* what, std::size_t size) {
    const auto before = pool.statistics();
    pool.deallocate(on, what, size, 256);
    EXPECT_EQ(pool.errors(), ++errors);
    const auto now = pool.statistics();
    EXPECT_EQ(now.used_bytes, before.used_bytes);
    EXPECT_EQ(now.reserved_bytes, before.reserved_bytes);
  };
  wrong(s, &local, sizeof local);  // foreign
  wrong(s, p + 256, 5000);         // inside
  wrong(s, p, 5001);               // another size
  wrong(s, p, 0);
  wrong(t, p, 4000);  // on a stream that the pool has not seen
  wrong(s, q, 5000);  // twice
  wrong(s, q, 0);
  pool.deallocate(s, p, 5000, 256);
  wrong(s, p, 5000);
  void* const a = pool.allocate(s, 5000, 256);
  void* const b = pool.allocate(s, 5000, 256);
  EXPECT_NE(a, b);
  pool.deallocate(s, a, 5000, 256);
  pool.deallocate(s, b, 5000, 256);
}

// --- the end ----------------------------------------------------------------------------------------------------------------

TYPED_TEST(caching_shortage, blocks_outlive_the_last_handle_and_are_reported) {
  std::vector<std::size_t> leaks;
  auto pool = std::optional{this->make_pool({.on_leak = [&](std::size_t n) { leaks.push_back(n); }})};
  auto s = std::optional{TestFixture::drive::make_stream()};
  void* const used = pool->allocate(*s, 1000, 256);
  leave_one(*pool, *s);
  TestFixture::drive::synchronize(*s);
  s.reset();
  pool.reset();
  EXPECT_EQ(leaks, std::vector<std::size_t>{1024});
  EXPECT_TRUE(this->upstream.is_live(used));
  EXPECT_EQ(this->upstream.live_count(), 1U);
}

TYPED_TEST(caching_shortage, the_upstream_outlives_the_last_handle_with_the_blocks_in_use) {
  const auto s = TestFixture::drive::make_stream();
  for (const bool used : {false, true}) {
    std::optional<owned_upstream<TypeParam>> mine{std::in_place};
    const std::weak_ptr<int> life = mine->life;
    auto pool = std::optional{pool_over(*mine)};
    mine.reset();
    void* const p = pool->allocate(s, 1000, 256);
    if (!used) pool->deallocate(s, p, 1000, 256);
    pool.reset();
    EXPECT_EQ(life.expired(), !used);
  }
}

TYPED_TEST(caching_shortage, nothing_is_reported_when_all_came_back) {
  bool leaked = false;
  {
    auto pool = this->make_pool({.on_leak = [&](std::size_t) { leaked = true; }});
    const auto s = TestFixture::drive::make_stream();
    leave_one(pool, s);
  }
  EXPECT_FALSE(leaked);
  EXPECT_EQ(this->upstream.live_count(), 0U);
  EXPECT_EQ(this->upstream.mistakes(), 0U);
}

TYPED_TEST(caching_shortage, the_last_handle_waits_for_the_work_of_what_it_gives_back) {
  const auto s = TestFixture::drive::make_stream();
  auto pool = std::optional{this->make_pool()};
  void* const p = pool->allocate(s, bytes, 256);
  const auto busy = this->occupy(s);
  pool->deallocate(s, p, bytes, 256);
  pool.reset();
  EXPECT_TRUE(busy.ready());
  EXPECT_EQ(this->upstream.live_count(), 0U);
}

TYPED_TEST(caching_shortage, the_last_handle_harms_no_capture) {
  for (const auto mode : support::capture_modes) {
    auto pool = std::optional{this->make_pool()};
    auto barrier = std::make_optional<holdfast::detail::caching_barrier<TypeParam>>();
    const auto s = TestFixture::drive::make_stream();
    const auto capturing = TestFixture::drive::make_stream();
    leave_one(*pool, s);
    barrier->prepare(TypeParam{});
    TestFixture::drive::synchronize(s);
    auto* const some = TestFixture::drive::allocate(64);
    TestFixture::drive::begin_capture(capturing, mode);
    TypeParam::fill(capturing, some, std::byte{1}, 64);
    pool.reset();
    barrier.reset();
    EXPECT_TRUE(TestFixture::drive::end_capture(capturing)) << "the capture was broken";
    EXPECT_EQ(this->upstream.live_count(), 0U);
    TestFixture::drive::deallocate(some);
  }
}

TYPED_TEST(caching_shortage, a_forked_child_calls_nothing) {
  auto pool = std::optional{this->make_pool()};
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool->allocate(s, 1000, 256);
  leave_one(*pool, s);
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      static_cast<void>(pool->allocate(s, 1000, 256));
    } catch (const holdfast::logic_error&) {
      refused = true;
    }
    const std::size_t allocations = this->upstream.allocations();
    pool->deallocate(s, p, 1000, 256);
    pool.reset();
    _exit(refused && this->upstream.allocations() == allocations && this->upstream.deallocations() == 0 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  pool->deallocate(s, p, 1000, 256);
  EXPECT_EQ(pool->errors(), 0U) << "and the parent goes on";
}

// --- CUDA's last error belongs to the user ------------------------------------------------------------------------------------

class caching_pending_error : public support::caching_test<holdfast::cuda_device> {};

TEST_F(caching_pending_error, survives_everything_that_succeeds) {
  auto pool = std::optional{make_pool({.max_reserved_bytes = bytes})};
  const auto s = drive::make_stream();
  const auto t = drive::make_stream();
  ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  for (int i = 0; i < 3; ++i) {
    void* const p = pool->allocate(s, bytes, 256);
    const auto busy = occupy(s);
    pool->deallocate(s, p, bytes, 256);
    pool->release(s);  // its event is asked, and says "not yet"
    pool->deallocate(t, pool->allocate(t, bytes, 256), bytes, 256);
    pool->trim();
    const auto per_thread = drive::per_thread_stream();
    pool->deallocate(per_thread, pool->allocate(per_thread, 1000, 256), 1000, 256);
    pool->trim();
  }
  pool.reset();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

}  // namespace
