// The host's malloc_resource as the reference: what is wrong with its memory faults, at once and every time.
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/resource/malloc.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using holdfast::host_device;
namespace host = holdfast::host;

/// A device of this test's own, whose memory is as it was afterwards.
class malloc_host : public ::testing::Test {
 protected:
  static constexpr host_device device{6};

  void SetUp() override {
    host::run_pending(device);
    total_ = device.memory().total;
  }
  void TearDown() override { host::set_memory_size(device, total_); }

  [[nodiscard]] static std::size_t page() { return device.granularity(); }

  holdfast::malloc_resource<host_device> pool{device};
  host::stream s{device};

 private:
  std::size_t total_ = 0;
};

using malloc_host_death = malloc_host;

volatile std::byte sink;

void touch(const void* p) { sink = *static_cast<const volatile std::byte*>(p); }

TEST_F(malloc_host, ends_where_its_pages_end) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{100}, page() - 1, page(), page() + 1}) {
    auto* const p = static_cast<std::byte*>(pool.allocate(s, bytes, 1));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p + bytes) % page(), 0U);
    pool.deallocate(s, p, bytes, 1);
  }
}

TEST_F(malloc_host, leaves_less_than_its_alignment_behind_the_end) {
  for (std::size_t alignment = 1; alignment <= page(); alignment *= 2) {
    auto* const p = static_cast<std::byte*>(pool.allocate(s, 1000, alignment));
    const std::size_t behind = (page() - reinterpret_cast<std::uintptr_t>(p + 1000) % page()) % page();
    EXPECT_LT(behind, alignment);
    pool.deallocate(s, p, 1000, alignment);
  }
}

TEST_F(malloc_host, honours_alignments_beyond_the_page) {
  for (std::size_t alignment = page(); alignment <= (std::size_t{64} << 20); alignment *= 4) {
    auto* const p = static_cast<std::byte*>(pool.allocate(s, 100, alignment));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % alignment, 0U);
    p[99] = std::byte{1};
    pool.deallocate(s, p, 100, alignment);
  }
}

TEST_F(malloc_host_death, reading_past_the_end_faults) {
  const auto* const p = static_cast<const std::byte*>(pool.allocate(s, 1000, 8));
  touch(p + 999);
  EXPECT_DEATH(touch(p + 1000), "");
}

TEST_F(malloc_host_death, reading_before_the_first_page_faults) {
  const auto* const p = static_cast<const std::byte*>(pool.allocate(s, page(), 8));
  touch(p);
  EXPECT_DEATH(touch(p - 1), "");
}

TEST_F(malloc_host_death, using_freed_memory_faults) {
  void* const p = pool.allocate(s, 1000, 8);
  pool.deallocate(s, p, 1000, 8);
  touch(p);  // the stream has not got there
  host_device::synchronize(s);
  EXPECT_DEATH(touch(p), "");
}

TEST_F(malloc_host_death, work_that_was_queued_after_the_free_faults) {
  const auto use_after_free = [&] {
    void* const p = pool.allocate(s, 1000, 8);
    pool.deallocate(s, p, 1000, 8);
    host_device::fill(s, p, std::byte{1}, 1000);
    host_device::synchronize(s);
  };
  EXPECT_DEATH(use_after_free(), "");  // all of it in the child: queued work is the whole process's
}

TEST_F(malloc_host, takes_whole_pages_and_gives_them_back_in_stream_order) {
  const std::size_t free = device.memory().free;
  void* const p = pool.allocate(s, page() + 1, 8);
  EXPECT_EQ(device.memory().free, free - 2 * page());
  EXPECT_EQ(pool.held_bytes(), 2 * page());
  pool.deallocate(s, p, page() + 1, 8);
  EXPECT_EQ(device.memory().free, free - 2 * page());
  EXPECT_EQ(pool.held_bytes(), 2 * page());
  host_device::synchronize(s);
  EXPECT_EQ(device.memory().free, free);
  EXPECT_EQ(pool.held_bytes(), 0U);
}

TEST_F(malloc_host, runs_out_at_the_devices_memory_size) {
  host::set_memory_size(device, device.memory().total - device.memory().free + 4 * page());
  void* const p = pool.allocate(s, 3 * page(), 8);
  try {
    static_cast<void>(pool.allocate(s, page() + 7, 8));
    ADD_FAILURE() << "there were only 4 pages";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(shortage.requested(), page() + 7);
    EXPECT_EQ(shortage.held(), 3 * page());
    EXPECT_EQ(shortage.free(), page());
  }
  void* const last = pool.allocate(s, page(), 8);
  pool.deallocate(s, last, page(), 8);
  pool.deallocate(s, p, 3 * page(), 8);
  host_device::synchronize(s);
}

TEST_F(malloc_host, runs_pending_work_before_it_gives_up) {
  host::set_memory_size(device, device.memory().total - device.memory().free + 4 * page());
  bool ran = false;
  void* const p = pool.allocate(s, 3 * page(), 8);
  s.run([&] { ran = true; });
  pool.deallocate(s, p, 3 * page(), 8);
  void* const q = pool.allocate(s, 4 * page(), 8);
  EXPECT_TRUE(ran);
  pool.deallocate(s, q, 4 * page(), 8);
  host_device::synchronize(s);
}

TEST_F(malloc_host, is_an_unsafe_call_only_where_nothing_relaxes_it) {
  host::stream captured{device};
  captured.begin_capture(host::capture_mode::global);
  void* const p = pool.allocate(s, 100, 8);  // relaxed by the rules
  pool.deallocate(s, p, 100, 8);
  EXPECT_NO_THROW(static_cast<void>(captured.end_capture()));
}

TEST_F(malloc_host, frees_on_a_stream_that_is_gone_change_nothing) {
  host::stream gone{device};
  const host::stream_ref handle = gone.get();
  void* const p = pool.allocate(handle, 100, 8);
  gone.reset();
  pool.deallocate(handle, p, 100, 8);
  EXPECT_EQ(pool.held_bytes(), page());
  touch(p);
  pool.deallocate(s, p, 100, 8);
  host_device::synchronize(s);
  EXPECT_EQ(pool.held_bytes(), 0U);
}

}  // namespace
