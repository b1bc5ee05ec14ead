// What is thread safe: pinning, dropping and collecting, while graphs end on their own threads.
#include "support/buffers.hpp"

#include <holdfast/capture.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
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

TYPED_TEST(many_threads, each_collect_what_is_its_devices) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  static_cast<void>(buffer.acquire(this->stream.get(), 4));
  driver::begin_capture(this->stream.get());
  { auto dropped = std::move(buffer); }  // its stream captures: deferred
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
  EXPECT_EQ(holdfast::collect(TypeParam{1}), 0U);
  EXPECT_GT(holdfast::collect(TypeParam{0}), 0U);
}

TYPED_TEST(many_threads, may_drop_the_last_handle_of_a_pool_while_one_captures) {
  using driver = support::driver<TypeParam>;
  struct pool {  // its end makes a call that would invalidate a capture, and knows nothing of captures
    using stream_type = typename TypeParam::stream_type;
    struct memory {
      ~memory() { EXPECT_FALSE(driver::unsafe_call()) << "must be relaxed"; }
    };
    std::shared_ptr<memory> state = std::make_shared<memory>();
    void* allocate(stream_type, std::size_t bytes, std::size_t) { return driver::allocate(bytes); }
    void deallocate(stream_type, void* p, std::size_t, std::size_t) noexcept { driver::deallocate(p); }
    bool operator==(const pool&) const = default;
  };
  std::optional<holdfast::padded_query_buffer<float, TypeParam>> buffer{
      std::in_place, holdfast::any_resource<TypeParam>{pool{}, TypeParam{}}, small_shape};
  buffer->reserve(4);
  auto graph = [&] {
    driver::begin_capture(this->stream.get());
    static_cast<void>(buffer->acquire(this->stream.get(), 4));
    return driver::end_capture(this->stream.get());
  }();
  buffer.reset();
  driver::begin_capture(this->stream.get());
  graph.reset();
  EXPECT_TRUE(support::eventually([&] { return holdfast::collect(TypeParam{}) != 0; }));
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
}

}  // namespace
