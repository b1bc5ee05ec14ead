// acquire: what a handle shows, what it costs, and when it refuses.
#include "support/buffers.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

template <class Device>
class padded_query_buffer_acquire : public support::buffer_test<Device> {};
TYPED_TEST_SUITE(padded_query_buffer_acquire, support::both_devices, support::device_names);

TYPED_TEST(padded_query_buffer_acquire, shows_consumers_all_heads_packed) {
  auto buffer = this->make();
  const auto rows = buffer.acquire(this->stream.get(), 5);
  EXPECT_EQ(rows.view().data_handle(), rows.data());
  EXPECT_EQ(rows.view().extent(0), 5);
  EXPECT_EQ(rows.view().extent(1), 8);
  EXPECT_EQ(rows.view().extent(2), 16);
  static_assert(std::is_same_v<decltype(rows.data()), const float*>);
}

TYPED_TEST(padded_query_buffer_acquire, shows_producers_the_real_heads_alone) {
  auto buffer = this->make();
  const auto heads = buffer.acquire(this->stream.get(), 5).heads_view();
  EXPECT_EQ(heads.extent(0), 5);
  EXPECT_EQ(heads.extent(1), 3);
  EXPECT_EQ(heads.extent(2), 16);
  EXPECT_EQ(heads.stride(0), 8 * 16);
  EXPECT_EQ(heads.stride(1), 16);
  EXPECT_EQ(heads.stride(2), 1);
}

TYPED_TEST(padded_query_buffer_acquire, slices_start_at_row_0) {
  auto buffer = this->make();
  const float* const all = buffer.acquire(this->stream.get(), 64).data();
  EXPECT_EQ(buffer.acquire(this->stream.get(), 8).data(), all);
  EXPECT_EQ(buffer.acquire(this->stream.get(), 1).data(), all);
  EXPECT_EQ(buffer.data(), all);
}

TYPED_TEST(padded_query_buffer_acquire, within_capacity_allocates_nothing) {
  auto buffer = this->make();
  buffer.reserve(64);
  const auto allocations = this->resource.allocations();
  for (int i = 0; i < 100; ++i) {
    static_cast<void>(buffer.acquire(this->stream.get(), 1 + i % 64));
  }
  EXPECT_EQ(this->resource.allocations(), allocations);
  EXPECT_EQ(this->resource.deallocations(), 0U);
}

TEST(padded_query_buffer_acquire_host, within_capacity_launches_nothing_and_waits_for_nothing) {
  using holdfast::host_device;
  holdfast::host::stream stream;
  holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                           support::small_shape};
  buffer.reserve(64);
  static_cast<void>(buffer.acquire(stream, 64));
  const auto before = holdfast::host::activity();
  static_cast<void>(buffer.acquire(stream, 64));
  static_cast<void>(buffer.acquire(stream, 1));
  EXPECT_EQ(holdfast::host::activity(), before);
}

TYPED_TEST(padded_query_buffer_acquire, of_no_rows_gives_an_empty_handle_and_allocates_nothing) {
  auto buffer = this->make();
  const auto rows = buffer.acquire(this->stream.get(), 0);
  EXPECT_EQ(rows.rows(), 0);
  EXPECT_EQ(rows.data(), nullptr);
  EXPECT_EQ(rows.heads_view().extent(0), 0);
  EXPECT_FALSE(rows.borrowed());
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST(padded_query_buffer_acquire, of_negative_rows_is_refused_by_name_and_changes_nothing) {
  auto buffer = this->make(support::small_shape, {.name = "decode q"});
  buffer.reserve(4);
  try {
    static_cast<void>(buffer.acquire(this->stream.get(), -1));
    FAIL();
  } catch (const holdfast::logic_error& error) {
    EXPECT_EQ(std::string{error.what()}, "decode q [4 rows, 3 of 8 heads, 16]: cannot hold -1 rows of 512 bytes");
  }
  EXPECT_EQ(buffer.capacity(), 4);
  EXPECT_EQ(buffer.generation(), 1U);
}

TYPED_TEST(padded_query_buffer_acquire, on_the_legacy_stream_while_a_blocking_stream_captures_is_refused) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  buffer.reserve(4);
  auto blocking = driver::make_stream(support::stream_kind::blocking);
  driver::begin_capture(blocking.get());
  EXPECT_THROW(static_cast<void>(buffer.acquire(driver::legacy_stream(), 4)), holdfast::logic_error);
  EXPECT_TRUE(driver::end_capture(blocking.get())) << "and the capture survives";
}

TYPED_TEST(padded_query_buffer_acquire, in_an_invalidated_capture_is_refused) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  buffer.reserve(4);
  driver::begin_capture(this->stream.get(), support::capture_mode::thread_local_);
  ASSERT_TRUE(driver::unsafe_call());
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 4)), holdfast::logic_error);
  EXPECT_FALSE(driver::end_capture(this->stream.get()));
  EXPECT_NO_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 4)));
}

TYPED_TEST(padded_query_buffer_acquire, try_acquire_is_empty_where_acquire_throws) {
  auto buffer = this->make(support::small_shape, {.strict = true});
  EXPECT_FALSE(buffer.try_acquire(this->stream.get(), 4));
  EXPECT_FALSE(buffer.try_acquire(this->stream.get(), -4));
  EXPECT_EQ(this->resource.allocations(), 0U);
  buffer.reserve(4);
  EXPECT_TRUE(buffer.try_acquire(this->stream.get(), 4));
}

TYPED_TEST(padded_query_buffer_acquire, handles_move_and_empty_ones_do_nothing) {
  auto buffer = this->make();
  holdfast::query_rows<float, TypeParam> none;
  auto first = buffer.acquire(this->stream.get(), 4);
  none = std::move(first);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): what is promised of it
  EXPECT_EQ(none.rows(), 4);
  first.release();
  none.release();
  none.release();
  EXPECT_EQ(none.data(), nullptr);
}

TYPED_TEST(padded_query_buffer_acquire, leaves_the_current_device_as_it_was) {
  auto buffer = this->make();
  const typename TypeParam::current_scope current{TypeParam{0}};
  static_cast<void>(buffer.acquire(this->stream.get(), 4));
  EXPECT_EQ(support::current_device<TypeParam>(), TypeParam{0});
}

TYPED_TEST(padded_query_buffer_acquire, a_handle_outlives_its_buffer) {
  using driver = support::driver<TypeParam>;
  auto rows = [&] {
    auto buffer = this->make();
    return buffer.acquire(this->stream.get(), 4);
  }();
  support::write_heads(this->stream.get(), rows, std::byte{1});
  driver::synchronize(this->stream.get());
  EXPECT_EQ(this->resource.deallocations(), 0U);
  EXPECT_TRUE(support::padding_is_zero<TypeParam>(rows.data(), 4, rows.shape()));
  rows.release();
  EXPECT_EQ(this->resource.deallocations(), 1U);
}

TYPED_TEST(padded_query_buffer_acquire, works_for_every_element_type_of_an_engine) {
  const auto zero_padding = [&]<class T>(T) {
    auto buffer = this->template make<T>();
    const auto rows = buffer.acquire(this->stream.get(), 3);
    EXPECT_TRUE(support::padding_is_zero<TypeParam>(rows.data(), 3, rows.shape()));
  };
  zero_padding(__nv_bfloat16{});
  zero_padding(__half{});
  zero_padding(__nv_fp8_e4m3{});
  zero_padding(float{});
}

// --- several streams --------------------------------------------------------------------------------------------------

TYPED_TEST(padded_query_buffer_acquire, on_another_stream_waits_for_the_earlier_use) {
  using driver = support::driver<TypeParam>;
  auto other = driver::make_stream();  // streams outlive the blocks used on them
  auto buffer = this->make();
  constexpr std::int64_t many = 1 << 14;  // work enough to be overtaken
  buffer.reserve(many);
  for (int round = 0; round < 20; ++round) {
    {
      auto rows = buffer.acquire(this->stream.get(), many);
      for (int i = 0; i < 8; ++i) {
        support::write_heads(this->stream.get(), rows, std::byte{0x11});
      }
    }
    auto rows = buffer.acquire(other.get(), many);
    support::write_heads(other.get(), rows, std::byte{0x22});
    driver::synchronize(other.get());
    const float last = driver::template read<float>(rows.heads_view().data_handle() + (many - 1) * 8 * 16, 1)[0];
    rows.release();
    driver::synchronize(this->stream.get());
    float expected{};
    std::memset(&expected, 0x22, sizeof(expected));
    ASSERT_EQ(last, expected);
    ASSERT_EQ(driver::template read<float>(buffer.data() + (many - 1) * 8 * 16, 1)[0], expected)
        << "the first stream's work ran after the second's";
  }
}

TEST(padded_query_buffer_acquire_host, on_another_stream_waits_under_every_schedule) {
  using holdfast::host_device;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const holdfast::host::seeded_schedule schedule{seed};
    holdfast::host::stream first;
    holdfast::host::stream second;
    holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                             support::small_shape};
    std::vector<int> order;
    {
      auto rows = buffer.acquire(first, 2);
      first.run([&] { order.push_back(1); });
    }
    {
      auto rows = buffer.acquire(second, 2);
      second.run([&] { order.push_back(2); });
    }
    {
      auto rows = buffer.acquire(first, 2);
      first.run([&] { order.push_back(3); });
    }
    holdfast::host::device_synchronize();
    ASSERT_EQ(order, (std::vector<int>{1, 2, 3})) << "seed " << seed;
  }
}

TEST(padded_query_buffer_acquire_host, in_one_capture_another_stream_waits_for_the_earlier_use) {
  using holdfast::host_device;
  using driver = support::driver<host_device>;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    auto origin = driver::make_stream();
    auto side = driver::make_stream();
    holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                             support::small_shape};
    std::vector<int> order;
    driver::begin_capture(origin.get());
    driver::fork(origin.get(), side.get());
    {
      auto rows = buffer.acquire(origin.get(), 2);
      origin.get().run([&] { order.push_back(1); });
    }
    {
      auto rows = buffer.acquire(side.get(), 2);
      side.get().run([&] { order.push_back(2); });
    }
    driver::fork(side.get(), origin.get());
    auto graph = driver::end_capture(origin.get());
    ASSERT_TRUE(graph);
    auto exec = driver::instantiate(graph);
    const holdfast::host::seeded_schedule schedule{seed};
    driver::launch(exec, origin.get());
    driver::synchronize(origin.get());
    ASSERT_EQ(order, (std::vector<int>{1, 2})) << "seed " << seed;
  }
}

TEST(padded_query_buffer_acquire_host, in_one_capture_waits_for_every_one_of_many_forks) {
  using holdfast::host_device;
  using driver = support::driver<host_device>;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    auto origin = driver::make_stream();
    std::vector<typename driver::stream> forks;
    holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                             support::small_shape};
    int running = 0;
    int seen = 0;
    driver::begin_capture(origin.get());
    std::vector<holdfast::query_rows<float, host_device>> held;
    for (int i = 0; i < 12; ++i) {
      forks.push_back(driver::make_stream());
      driver::fork(origin.get(), forks.back().get());
    }
    for (auto& fork : forks) {
      held.push_back(buffer.acquire(fork.get(), 2));
    }
    for (auto& fork : forks) {
      fork.get().run([&running] { ++running; });
    }
    held.clear();
    {
      const auto rows = buffer.acquire(origin.get(), 2);
      origin.get().run([&] { seen = running; });
    }
    for (auto& fork : forks) {
      driver::fork(fork.get(), origin.get());
    }
    auto graph = driver::end_capture(origin.get());
    ASSERT_TRUE(graph);
    auto exec = driver::instantiate(graph);
    const holdfast::host::seeded_schedule schedule{seed};
    driver::launch(exec, origin.get());
    driver::synchronize(origin.get());
    ASSERT_EQ(seen, 12) << "seed " << seed;
  }
}

TEST(padded_query_buffer_acquire_host, of_a_stream_of_another_device_is_refused_and_changes_nothing) {
  using holdfast::host_device;
  holdfast::host::stream elsewhere{host_device{1}};
  holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                           support::small_shape};
  EXPECT_THROW(static_cast<void>(buffer.acquire(elsewhere, 4)), holdfast::logic_error);
  EXPECT_EQ(buffer.capacity(), 0);
  buffer.reserve(4);
  EXPECT_THROW(static_cast<void>(buffer.acquire(elsewhere, 4)), holdfast::logic_error);
}

TEST(padded_query_buffer_acquire_host, released_on_a_reader_of_another_device_is_waited_for) {
  using holdfast::host_device;
  holdfast::host::stream here;
  holdfast::host::stream peer{host_device{1}};
  holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                           support::small_shape};
  std::vector<int> order;
  auto rows = buffer.acquire(here, 2);
  peer.run([&] { order.push_back(1); });
  rows.release(peer);
  const holdfast::host::seeded_schedule schedule{3};
  const auto next = buffer.acquire(here, 2);
  here.run([&] { order.push_back(2); });
  host_device::synchronize(here);
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TYPED_TEST(padded_query_buffer_acquire, try_acquire_says_nothing_of_errors_that_are_none_of_its_own) {
  struct broken {
    using stream_type = typename TypeParam::stream_type;
    void* allocate(stream_type, std::size_t, std::size_t) { throw holdfast::device_error{999, "broken"}; }
    void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept {}
    bool operator==(const broken&) const = default;
  };
  holdfast::padded_query_buffer<float, TypeParam> buffer{holdfast::any_resource<TypeParam>{broken{}, TypeParam{}},
                                                         support::small_shape};
  EXPECT_THROW(static_cast<void>(buffer.try_acquire(this->stream.get(), 4)), holdfast::device_error);
}

TYPED_TEST(padded_query_buffer_acquire, borrows_only_rows_that_are_there_and_aligned) {
  auto buffer = this->make({.heads = 8, .padded_heads = 8, .head_dim = 16}, {.alignment = 64});
  alignas(64) static float input[256];
  EXPECT_TRUE(buffer.borrow(input, 2));
  EXPECT_FALSE(buffer.borrow(input + 1, 1));
  EXPECT_FALSE(buffer.borrow(nullptr, 1));
}

TYPED_TEST(padded_query_buffer_acquire, works_on_the_per_thread_default_stream_of_several_threads) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->make();
  for (int thread = 0; thread < 3; ++thread) {
    std::thread{[&] {
      const auto mine = driver::per_thread_stream();
      auto rows = buffer.acquire(mine, 4);
      support::write_heads(mine, rows, std::byte{1});
      rows.release();
      driver::synchronize(mine);
    }}.join();
  }
  EXPECT_TRUE(support::padding_is_zero<TypeParam>(buffer.data(), 4, buffer.shape()));
}

TEST(padded_query_buffer_acquire_host, takes_nobody_into_a_capture_that_began_before_a_release) {
  using holdfast::host_device;
  holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                           support::small_shape};
  const auto mine = holdfast::host::per_thread_stream();
  const holdfast::host::stream other{host_device{}};
  auto rows = buffer.acquire(mine, 2);
  mine.begin_capture();
  rows.release();
  rows = buffer.acquire(other, 2);
  EXPECT_EQ(host_device::capturing(other).state, holdfast::capture_state::none);
  auto graph = mine.end_capture();
  EXPECT_NO_THROW(rows = buffer.acquire(other, 2));
  EXPECT_NO_THROW(rows = buffer.acquire(mine, 2));
}

TEST(padded_query_buffer_acquire_host, the_per_thread_default_streams_of_two_threads_are_ordered) {
  using holdfast::host_device;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const holdfast::host::seeded_schedule schedule{seed};
    holdfast::padded_query_buffer<float, host_device> buffer{holdfast::malloc_resource<host_device>{host_device{}},
                                                             support::small_shape};
    std::vector<int> order;
    for (int turn = 0; turn < 3; ++turn) {
      std::thread{[&, turn] {
        const auto mine = holdfast::host::per_thread_stream();
        auto rows = buffer.acquire(mine, 2);
        mine.run([&order, turn] { order.push_back(turn); });
      }}.join();
    }
    holdfast::host::device_synchronize();
    ASSERT_EQ(order, (std::vector<int>{0, 1, 2})) << "seed " << seed;
  }
}

}  // namespace
