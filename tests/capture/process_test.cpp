// How processes end: with live graphs, static buffers, on another thread, forked. Each in a child process.
#include "support/buffers.hpp"

#include <holdfast/capture.hpp>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

namespace {

using support::small_shape;

template <class Device>
struct leftovers {
  using drive = support::driver<Device>;
  typename drive::stream stream = drive::make_stream();
  holdfast::padded_query_buffer<float, Device> buffer{
      holdfast::any_resource<Device>{holdfast::malloc_resource<Device>{Device{}}}, small_shape};
  std::optional<typename drive::graph> graph;
  std::optional<typename drive::exec> exec;
  holdfast::query_rows<float, Device> rows;

  leftovers() {
    drive::begin_capture(stream.get());
    support::write_heads(stream.get(), buffer.acquire(stream.get(), 4), std::byte{1});
    graph.emplace(drive::end_capture(stream.get()));
    exec.emplace(drive::instantiate(*graph));
    drive::launch(*exec, stream.get());
    rows = buffer.acquire(stream.get(), 16);
    support::write_heads(stream.get(), rows, std::byte{1});
  }
};

template <class Device>
[[noreturn]] void forks_and_exits() {
  auto inherited = std::make_unique<leftovers<Device>>();
  support::driver<Device>::synchronize(inherited->stream.get());
  support::counting_resource<Device> resource;
  holdfast::padded_query_buffer<float, Device> buffer{resource, small_shape};
  buffer.reserve(4);
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    inherited->rows.release();
    try {
      buffer.reserve(8);
    } catch (const holdfast::logic_error&) {
      refused = true;
    }
    { const holdfast::padded_query_buffer<float, Device> dropped{std::move(buffer)}; }
    holdfast::collect(Device{});
    _exit(refused && resource.allocations() == 1 && resource.deallocations() == 0 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  buffer.reserve(8);  // and the parent goes on
  _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
}

template <class Device>
class a_process : public support::device_test<Device> {
 protected:
  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) =
        "threadsafe";  // a fresh process, not a fork of one that has used the device
    support::device_test<Device>::SetUp();
  }
};
TYPED_TEST_SUITE(a_process, support::both_devices, support::device_names);

TYPED_TEST(a_process, exits_with_live_graphs_handles_and_work_in_flight) {
  EXPECT_EXIT(
      {
        static leftovers<TypeParam> global;
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TYPED_TEST(a_process, exits_when_what_is_left_was_leaked) {
  EXPECT_EXIT(
      {
        static_cast<void>(new leftovers<TypeParam>);
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TYPED_TEST(a_process, exits_from_another_thread) {
  EXPECT_EXIT(
      {
        static leftovers<TypeParam> global;
        std::thread{[] { std::exit(0); }}.join();
      },
      ::testing::ExitedWithCode(0), "");
}

TYPED_TEST(a_process, exits_when_the_buffer_is_destroyed_after_the_runtime_began_to_shut_down) {
  EXPECT_EXIT(
      {
        // constructed before the device is used, so destroyed after everything that the device's use registered
        static std::unique_ptr<leftovers<TypeParam>> early;
        early = std::make_unique<leftovers<TypeParam>>();
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TYPED_TEST(a_process, that_is_a_forked_child_drops_what_it_inherited_and_allocates_nothing) {
  EXPECT_EXIT(forks_and_exits<TypeParam>(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
