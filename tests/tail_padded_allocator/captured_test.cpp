// Scratch acquired in captures: the lane's arena, what may be used again and when, what stays.
#include "support/buffers.hpp"

#include <holdfast/tail_padded_allocator.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace {

using holdfast::over_read;
using bytes = std::vector<unsigned char>;

constexpr std::size_t row_bytes = 512;

template <class Device>
class captured_scratch : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using allocator = holdfast::tail_padded_allocator<unsigned char, Device>;

  holdfast::lane<Device> lane{holdfast::any_resource<Device>{this->resource}};
  allocator scratch{lane, {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};

  /// A graph of `layers` calls: each fills its scratch with a value of its own and copies rows and tail to `output`.
  typename drive::graph capture(std::int64_t rows, int layers, unsigned char first, unsigned char* output) {
    const std::size_t all = (static_cast<std::size_t>(rows) + 128) * row_bytes;
    drive::begin_capture(this->stream.get());
    for (int layer = 0; layer < layers; ++layer) {
      const auto kv = scratch.acquire(this->stream.get(), rows);
      Device::fill(this->stream.get(), kv.data(), std::byte(first + layer), static_cast<std::size_t>(rows) * row_bytes);
      Device::copy(this->stream.get(), output + static_cast<std::size_t>(layer) * all, kv.data(), all);
    }
    return drive::end_capture(this->stream.get());
  }

  static bool right(const bytes& output, std::int64_t rows, int layers, unsigned char first) {
    const std::size_t real = static_cast<std::size_t>(rows) * row_bytes;
    bytes expected;
    for (int layer = 0; layer < layers; ++layer) {
      expected.insert(expected.end(), real, static_cast<unsigned char>(first + layer));
      expected.insert(expected.end(), 128 * row_bytes, 0);
    }
    return output == expected;
  }
};
TYPED_TEST_SUITE(captured_scratch, support::both_devices, support::device_names);

TYPED_TEST(captured_scratch, of_all_layers_and_buckets_holds_the_largest_call) {
  using driver = support::driver<TypeParam>;
  std::vector<typename driver::graph> graphs;
  for (const std::int64_t rows : {256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 1}) {  // largest first
    driver::begin_capture(this->stream.get());
    for (int layer = 0; layer < 61; ++layer) {
      static_cast<void>(this->scratch.acquire(this->stream.get(), rows));
    }
    graphs.push_back(driver::end_capture(this->stream.get()));
    ASSERT_TRUE(graphs.back());
  }
  EXPECT_EQ(this->lane.scratch_bytes(), (256 + 128) * row_bytes);
  EXPECT_EQ(this->resource.live_bytes(), (256 + 128) * row_bytes);
}

TYPED_TEST(captured_scratch, in_any_order_holds_the_largest_call_after_reserve) {
  using driver = support::driver<TypeParam>;
  this->scratch.reserve(256);
  std::vector<typename driver::graph> graphs;
  for (const std::int64_t rows : {1, 16, 64, 256}) {
    driver::begin_capture(this->stream.get());
    static_cast<void>(this->scratch.acquire(this->stream.get(), rows));
    static_cast<void>(this->scratch.acquire(this->stream.get(), rows));
    graphs.push_back(driver::end_capture(this->stream.get()));
  }
  EXPECT_EQ(this->lane.scratch_bytes(), (256 + 128) * row_bytes);
}

TYPED_TEST(captured_scratch, ascending_grows_geometrically) {
  using driver = support::driver<TypeParam>;
  std::vector<typename driver::graph> graphs;
  for (std::int64_t rows = 1; rows <= 256; ++rows) {
    driver::begin_capture(this->stream.get());
    static_cast<void>(this->scratch.acquire(this->stream.get(), rows));
    graphs.push_back(driver::end_capture(this->stream.get()));
  }
  EXPECT_LE(this->lane.scratch_bytes(), 4 * (256 + 128) * row_bytes);
  EXPECT_LE(this->resource.allocations(), 4U);
}

TYPED_TEST(captured_scratch, replays_right_between_eager_calls_and_other_lanes) {
  using driver = support::driver<TypeParam>;
  constexpr int layers = 3;
  const std::size_t large = layers * (64 + 128) * row_bytes;
  const std::size_t small = layers * (8 + 128) * row_bytes;
  auto* const output = static_cast<unsigned char*>(driver::allocate(large + small));
  auto graph_large = this->capture(64, layers, 10, output);
  auto graph_small = this->capture(8, layers, 20, output + large);
  auto exec_large = driver::instantiate(graph_large);
  auto exec_small = driver::instantiate(graph_small);
  holdfast::tail_padded_allocator<unsigned char, TypeParam> elsewhere{
      holdfast::any_resource<TypeParam>{this->resource},
      {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
  for (int i = 0; i < 3; ++i) {
    driver::launch(exec_large, this->stream.get());
    const auto eager = this->scratch.acquire(this->stream.get(), 16);
    TypeParam::fill(this->stream.get(), eager.data(), std::byte{0xEE}, 16 * row_bytes);
    const auto other = elsewhere.acquire(this->stream.get(), 16);
    TypeParam::fill(this->stream.get(), other.data(), std::byte{0xDD}, 16 * row_bytes);
    driver::launch(exec_small, this->stream.get());
    driver::synchronize(this->stream.get());
    EXPECT_TRUE(this->right(driver::read(output, large), 64, layers, 10));
    EXPECT_TRUE(this->right(driver::read(output + large, small), 8, layers, 20)) << "each graph writes its own tail";
  }
  driver::deallocate(output);
}

TYPED_TEST(captured_scratch, adds_one_node_for_a_tail_and_none_when_the_producer_writes_it) {
  using driver = support::driver<TypeParam>;
  driver::begin_capture(this->stream.get());
  static_cast<void>(this->scratch.acquire(this->stream.get(), 32));
  auto filled = driver::end_capture(this->stream.get());
  EXPECT_EQ(driver::count(filled).memsets, 1);
  EXPECT_EQ(driver::count(filled).total(), 1);
  driver::begin_capture(this->stream.get());
  static_cast<void>(this->scratch.acquire_unfilled(this->stream.get(), 32));
  auto unfilled = driver::end_capture(this->stream.get());
  EXPECT_EQ(driver::count(unfilled).total(), 0);
}

TYPED_TEST(captured_scratch, held_at_the_same_time_is_disjoint) {
  using driver = support::driver<TypeParam>;
  driver::begin_capture(this->stream.get());
  const auto a = this->scratch.acquire(this->stream.get(), 4);
  const auto b = this->scratch.acquire(this->stream.get(), 4);
  const auto c = this->scratch.acquire(this->stream.get(), 4);
  auto graph = driver::end_capture(this->stream.get());
  const auto apart = [](const auto& x, const auto& y) {
    return x.data() + 132 * row_bytes <= y.data() || y.data() + 132 * row_bytes <= x.data();
  };
  EXPECT_TRUE(apart(a, b));
  EXPECT_TRUE(apart(a, c));
  EXPECT_TRUE(apart(b, c));
}

TYPED_TEST(captured_scratch, is_used_again_on_its_own_stream_once_released) {
  using driver = support::driver<TypeParam>;
  driver::begin_capture(this->stream.get());
  const unsigned char* const first = this->scratch.acquire(this->stream.get(), 4).data();
  EXPECT_EQ(this->scratch.acquire(this->stream.get(), 4).data(), first);
  auto graph = driver::end_capture(this->stream.get());
}

TYPED_TEST(captured_scratch, is_not_used_again_on_a_fork_that_does_not_come_after) {
  using driver = support::driver<TypeParam>;
  auto side = driver::make_stream();
  driver::begin_capture(this->stream.get());
  driver::fork(this->stream.get(), side.get());
  auto first = this->scratch.acquire(this->stream.get(), 4);
  TypeParam::fill(this->stream.get(), first.data(), std::byte{1}, row_bytes);
  const unsigned char* const data = first.data();
  first.release();
  const auto beside = this->scratch.acquire(side.get(), 4);
  EXPECT_NE(beside.data(), data);
  driver::fork(side.get(), this->stream.get());
  auto graph = driver::end_capture(this->stream.get());
  EXPECT_TRUE(graph);
}

TYPED_TEST(captured_scratch, is_not_used_again_on_such_a_fork_after_many_other_captures_either) {
  using driver = support::driver<TypeParam>;
  auto other = driver::make_stream();
  auto third = driver::make_stream();
  driver::begin_capture(this->stream.get(), support::capture_mode::relaxed);
  driver::fork(this->stream.get(), other.get());
  const unsigned char* const first = this->scratch.acquire(this->stream.get(), 4).data();
  std::vector<typename driver::graph> graphs;
  for (int i = 0; i < 100; ++i) {
    driver::begin_capture(third.get(), support::capture_mode::relaxed);
    static_cast<void>(this->scratch.acquire(third.get(), 4));
    graphs.push_back(driver::end_capture(third.get()));
  }
  EXPECT_NE(this->scratch.acquire(other.get(), 4).data(), first);
  driver::fork(other.get(), this->stream.get());
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
}

TYPED_TEST(captured_scratch, is_used_again_on_a_fork_that_comes_after) {
  using driver = support::driver<TypeParam>;
  auto side = driver::make_stream();
  driver::begin_capture(this->stream.get());
  auto first = this->scratch.acquire(this->stream.get(), 4);
  TypeParam::fill(this->stream.get(), first.data(), std::byte{1}, row_bytes);
  const unsigned char* const data = first.data();
  first.release();
  driver::fork(this->stream.get(), side.get());
  const auto after = this->scratch.acquire(side.get(), 4);
  EXPECT_EQ(after.data(), data);
  driver::fork(side.get(), this->stream.get());
  auto graph = driver::end_capture(this->stream.get());
  EXPECT_TRUE(graph);
}

TYPED_TEST(captured_scratch, released_on_a_fork_is_used_again_only_after_the_join) {
  using driver = support::driver<TypeParam>;
  auto side = driver::make_stream();
  driver::begin_capture(this->stream.get());
  driver::fork(this->stream.get(), side.get());
  auto first = this->scratch.acquire(this->stream.get(), 4);
  driver::fork(this->stream.get(), side.get());
  const unsigned char* const data = first.data();
  TypeParam::fill(side.get(), first.data(), std::byte{1}, row_bytes);
  first.release(side.get());
  const unsigned char* const before = this->scratch.acquire(this->stream.get(), 4).data();
  driver::fork(side.get(), this->stream.get());
  const unsigned char* const after = this->scratch.acquire(this->stream.get(), 4).data();
  auto graph = driver::end_capture(this->stream.get());
  EXPECT_TRUE(graph);
  EXPECT_NE(before, data);
  EXPECT_EQ(after, data);
}

TYPED_TEST(captured_scratch, held_past_its_capture_is_nobody_elses) {
  using driver = support::driver<TypeParam>;
  driver::begin_capture(this->stream.get());
  auto held = this->scratch.acquire(this->stream.get(), 4);
  auto first = driver::end_capture(this->stream.get());
  const unsigned char* const data = held.data();
  driver::begin_capture(this->stream.get());
  EXPECT_NE(this->scratch.acquire(this->stream.get(), 4).data(), data);
  auto second = driver::end_capture(this->stream.get());
  held.release();
  driver::begin_capture(this->stream.get());
  EXPECT_EQ(this->scratch.acquire(this->stream.get(), 4).data(), data);
  auto third = driver::end_capture(this->stream.get());
}

TYPED_TEST(captured_scratch, used_eagerly_after_its_capture_and_released_in_another_is_not_given_back_too_early) {
  using driver = support::driver<TypeParam>;
  auto* const kept = static_cast<unsigned char*>(driver::allocate(row_bytes));
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const support::any_order<TypeParam> order{seed};
    {
      holdfast::tail_padded_allocator<unsigned char, TypeParam> own{this->resource, {.row_elements = row_bytes}};
      driver::begin_capture(this->stream.get());
      auto held = own.acquire(this->stream.get(), 1);
      auto graph = driver::end_capture(this->stream.get());
      TypeParam::fill(this->stream.get(), held.data(), std::byte{0x5A}, row_bytes);
      TypeParam::copy(this->stream.get(), kept, held.data(), row_bytes);
      driver::begin_capture(this->stream.get());
      held.release();
      graph = driver::end_capture(this->stream.get());
    }
    holdfast::collect(TypeParam{});
    driver::synchronize(TypeParam{}.library_stream());  // where memory goes back
    driver::synchronize(this->stream.get());
    EXPECT_EQ(driver::read(kept, row_bytes), std::vector<unsigned char>(row_bytes, 0x5A));
  }
  driver::deallocate(kept);
}

TYPED_TEST(captured_scratch, is_never_eager_scratch) {
  using driver = support::driver<TypeParam>;
  driver::begin_capture(this->stream.get());
  const unsigned char* const data = this->scratch.acquire(this->stream.get(), 4).data();
  auto graph = driver::end_capture(this->stream.get());
  const auto eager = this->scratch.acquire(this->stream.get(), 4);
  EXPECT_TRUE(eager.data() + 132 * row_bytes <= data || data + 132 * row_bytes <= eager.data());
}

TYPED_TEST(captured_scratch, of_two_lanes_is_apart) {
  using driver = support::driver<TypeParam>;
  holdfast::lane<TypeParam> other_lane{holdfast::any_resource<TypeParam>{this->resource}};
  typename TestFixture::allocator other{other_lane, this->scratch.options()};
  driver::begin_capture(this->stream.get());
  const unsigned char* const a = this->scratch.acquire(this->stream.get(), 4).data();
  const unsigned char* const b = other.acquire(this->stream.get(), 4).data();
  auto graph = driver::end_capture(this->stream.get());
  EXPECT_TRUE(a + 132 * row_bytes <= b || b + 132 * row_bytes <= a);
}

TYPED_TEST(captured_scratch, stays_while_a_graph_lives_whatever_becomes_of_lane_and_allocator) {
  using driver = support::driver<TypeParam>;
  const std::size_t all = (4 + 128) * row_bytes;
  auto* const output = static_cast<unsigned char*>(driver::allocate(all));
  support::counting_resource<TypeParam> counting;
  auto graph = [&] {
    typename TestFixture::allocator own{holdfast::any_resource<TypeParam>{counting}, this->scratch.options()};
    driver::begin_capture(this->stream.get());
    const auto kv = own.acquire(this->stream.get(), 4);
    TypeParam::fill(this->stream.get(), kv.data(), std::byte{7}, 4 * row_bytes);
    TypeParam::copy(this->stream.get(), output, kv.data(), all);
    return driver::end_capture(this->stream.get());
  }();
  auto exec = driver::instantiate(graph);
  graph.reset();
  holdfast::collect(TypeParam{});
  EXPECT_GT(counting.live_bytes(), 0U);
  driver::launch(exec, this->stream.get());
  driver::synchronize(this->stream.get());
  EXPECT_TRUE(this->right(driver::read(output, all), 4, 1, 7));
  exec.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return counting.live_bytes() == 0;
  }));
  driver::deallocate(output);
}

TYPED_TEST(captured_scratch, leaves_every_capture_valid) {
  using driver = support::driver<TypeParam>;
  auto beside = driver::make_stream();
  for (const support::capture_mode mode : support::capture_modes) {
    for (const support::stream_kind kind : support::stream_kinds) {
      auto capturing = driver::make_stream(kind);
      typename TestFixture::allocator own{holdfast::any_resource<TypeParam>{this->resource}, this->scratch.options()};
      auto pinned = own.acquire(beside.get(), 4);
      driver::begin_capture(capturing.get(), mode);
      static_cast<void>(own.acquire(capturing.get(), 4));
      static_cast<void>(own.acquire(capturing.get(), 64));  // grows the arena
      auto held = own.acquire(capturing.get(), 4);
      static_cast<void>(own.acquire(beside.get(), 4));
      pinned.pin(capturing.get());
      pinned.release();
      own.reserve(4096);
      EXPECT_FALSE(own.try_acquire(capturing.get(), -1));
      EXPECT_TRUE(driver::end_capture(capturing.get())) << static_cast<int>(mode);
      EXPECT_TRUE(support::eventually([&] {  // the stream of pinned scratch outlives it
        holdfast::collect(TypeParam{});
        return own.pending_bytes() == 0 && own.pinned_bytes() == 0;
      }));
    }
  }
}

TEST(captured_scratch_host, is_not_used_again_on_another_threads_stream_of_the_same_handle) {
  using holdfast::host_device;
  using driver = support::driver<host_device>;
  holdfast::tail_padded_allocator<unsigned char, host_device> scratch{
      holdfast::any_resource<host_device>{holdfast::malloc_resource<host_device>{host_device{}}}, {.row_elements = 64}};
  const auto handle = holdfast::host::per_thread_stream();
  auto origin = driver::make_stream();
  std::vector<const unsigned char*> used;
  driver::begin_capture(origin.get());
  for (int branch = 0; branch < 2; ++branch) {
    std::thread{[&] {
      driver::fork(origin.get(), handle);
      for (int i = 0; i < 2; ++i) {
        const auto rows = scratch.acquire(handle, 2);
        host_device::fill(handle, rows.data(), std::byte{1}, 128);
        used.push_back(rows.data());
      }
    }}.join();
  }
  EXPECT_EQ(used[0], used[1]);
  EXPECT_NE(used[1], used[2]);
  EXPECT_EQ(used[2], used[3]);
  EXPECT_FALSE(driver::end_capture(origin.get()));  // the threads' streams have not come back
}

TEST(captured_scratch_host, overlays_only_what_is_ordered_under_every_schedule) {
  using holdfast::host_device;
  using driver = support::driver<host_device>;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    auto origin = driver::make_stream();
    auto side = driver::make_stream();
    holdfast::tail_padded_allocator<unsigned char, host_device> scratch{
        holdfast::any_resource<host_device>{holdfast::malloc_resource<host_device>{host_device{}}},
        {.row_elements = 64}};
    int wrong = 0;
    const auto step = [&](typename driver::stream& on, unsigned char value) {
      auto rows = scratch.acquire(on.get(), 2);
      unsigned char* const data = rows.data();
      host_device::fill(on.get(), data, std::byte{value}, 128);
      on.get().run([&wrong, data, value] {
        for (int i = 0; i < 128; ++i) {
          wrong += data[i] != value;
        }
      });
    };
    driver::begin_capture(origin.get());
    step(origin, 1);
    driver::fork(origin.get(), side.get());
    for (unsigned char i = 0; i < 4; ++i) {
      step(origin, static_cast<unsigned char>(10 + i));
      step(side, static_cast<unsigned char>(20 + i));
    }
    driver::fork(side.get(), origin.get());
    step(origin, 2);
    auto graph = driver::end_capture(origin.get());
    ASSERT_TRUE(graph);
    auto exec = driver::instantiate(graph);
    const holdfast::host::seeded_schedule schedule{seed};
    driver::launch(exec, origin.get());
    driver::synchronize(origin.get());
    ASSERT_EQ(wrong, 0) << "seed " << seed;
  }
}

}  // namespace
