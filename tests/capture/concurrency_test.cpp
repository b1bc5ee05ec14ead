// What is thread safe: pinning, dropping and collecting, while graphs end on their own threads.
#include "support/buffers.hpp"

#include <holdfast/capture.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace {

using support::small_shape;

template <class Device>
class many_threads : public support::buffer_test<Device> {};
TYPED_TEST_SUITE(many_threads, support::both_devices, support::device_names);

TYPED_TEST(many_threads, pin_one_block_into_their_own_graphs) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  const auto rows = buffer.acquire(this->stream.get(), 4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      auto own = driver::make_stream();
      for (int i = 0; i < 50; ++i) {
        driver::begin_capture(own.get(), support::capture_mode::thread_local_);
        EXPECT_TRUE(rows.pin(own.get()));
        auto graph = driver::end_capture(own.get());
        EXPECT_TRUE(graph);
        rows.pin(graph.get());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(buffer.wait_unpinned(std::chrono::seconds{5}));
  EXPECT_EQ(this->resource.deallocations(), 0U);
}

TYPED_TEST(many_threads, collect_while_others_capture_and_destroy_their_own_buffers) {
  using driver = support::driver<TypeParam>;
  std::atomic<bool> done{false};
  std::thread collector{[&] {
    while (!done.load()) {
      holdfast::collect(TypeParam{});
    }
  }};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      auto own = driver::make_stream();
      for (int i = 0; i < 25; ++i) {
        auto buffer = this->make();
        driver::begin_capture(own.get(), support::capture_mode::thread_local_);
        support::write_heads(own.get(), buffer.acquire(own.get(), 4), std::byte{1});
        support::write_heads(own.get(), buffer.acquire(own.get(), 9), std::byte{1});
        auto graph = driver::end_capture(own.get());
        EXPECT_TRUE(graph);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  done = true;
  collector.join();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return this->resource.live_bytes() == 0;
  }));
  EXPECT_EQ(this->resource.mistakes(), 0U);
}

}  // namespace
