// Many threads on the host device at once; ThreadSanitizer is the judge.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using holdfast::host_device;
using holdfast::host::capture_mode;
using holdfast::host::event;
using holdfast::host::graph;
using holdfast::host::stream;

void on_threads(int n, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(f, i);
  for (auto& t : threads) t.join();
}

TEST(host_threads, each_sees_its_own_streams_work_done) {
  on_threads(4, [](int id) {
    const stream s;
    std::vector<unsigned char> bytes(64), copy(64);
    for (int i = 0; i < 200; ++i) {
      const auto value = static_cast<unsigned char>(i + id);
      host_device::fill(s, bytes.data(), std::byte{value}, bytes.size());
      host_device::copy(s, copy.data(), bytes.data(), bytes.size());
      host_device::synchronize(s);
      ASSERT_TRUE(std::ranges::all_of(copy, [&](unsigned char c) { return c == value; }));
    }
  });
}

TEST(host_threads, capture_at_the_same_time) {
  on_threads(4, [](int id) {
    const stream s;
    int runs = 0;
    for (int i = 0; i < 100; ++i) {
      s.begin_capture(static_cast<capture_mode>((i + id) % 3));
      s.run([&] { ++runs; });
      const auto g = s.end_capture();
      const host_device::relaxed_scope relaxed;
      g.instantiate().launch(s);
      host_device::synchronize(s);
    }
    EXPECT_EQ(runs, 100);
  });
}

TEST(host_threads, work_on_one_stream_is_serial) {
  const stream s;
  int sum = 0;  // only the stream's order keeps this from being a race
  on_threads(4, [&](int) {
    for (int i = 0; i < 200; ++i) {
      s.run([&] { ++sum; });
      if (i % 16 == 0) host_device::synchronize(s);
    }
  });
  host_device::synchronize(s);
  EXPECT_EQ(sum, 800);
}

TEST(host_threads, events_order_streams_of_different_threads) {
  const stream producer, consumer;
  int value = 0, seen = 0;
  event e(host_device{});
  std::thread([&] {
    producer.run([&] { value = 1; });
    e.record(producer);
  }).join();
  std::thread([&] {
    host_device::wait(consumer, e);
    consumer.run([&] { seen = value; });
    host_device::synchronize(consumer);
  }).join();
  EXPECT_EQ(seen, 1);
}

TEST(host_threads, kernels_may_take_locks_that_callers_of_the_device_hold) {
  std::mutex mutex;
  const stream s;
  int sum = 0;
  on_threads(4, [&](int) {
    for (int i = 0; i < 100; ++i) {
      {
        const std::lock_guard lock(mutex);
        s.run([&] {
          const std::lock_guard inner(mutex);
          ++sum;
        });
      }
      host_device::synchronize(s);
    }
  });
  EXPECT_EQ(sum, 400);
}

TEST(host_threads, memory_streams_graphs_and_retained_objects) {
  static std::atomic<int> destroyed;
  destroyed = 0;
  const host_device d{5};
  const std::size_t page = d.granularity();
  const std::size_t before = d.memory().free;
  on_threads(4, [&](int) {
    for (int i = 0; i < 50; ++i) {
      const stream s(d);
      char* const p = static_cast<char*>(d.reserve(page, 0));
      const auto memory = d.create(page);
      d.map(p, page, memory);
      d.allow(p, page, holdfast::access::read_write);
      d.destroy(memory);
      host_device::fill(s, p, std::byte{1}, page);
      holdfast::host::enqueue_free(s, [=] {
        d.unmap(p, page);
        d.unreserve(p, page);
      });
      const graph g = holdfast::host::make_graph();
      host_device::retain(g, nullptr, [](void*) { ++destroyed; });
      g.add_child(g.clone());
      g.instantiate().launch(s);
      if (i % 2 == 0) host_device::synchronize(s);
    }
  });
  holdfast::host::run_pending(d);
  EXPECT_EQ(d.memory().free, before);
  EXPECT_EQ(destroyed, 200);
}

}  // namespace
