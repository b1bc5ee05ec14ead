// One API over both devices for what a test's user does: streams, captures, graphs, launches, plain memory. Typed tests
// read the same on each device. Specialisations: host_driver.hpp, cuda_driver.hpp.
//
//   template <class Device>                    all members are static
//   struct driver {
//     stream, graph, exec                      RAII, move-only; get(), reset(); graph and exec convert to bool explicitly
//     std::string missing()                    empty, or why this device's tests are skipped
//     stream make_stream(stream_kind = non_blocking, Device = {})
//     void begin_capture(stream_type, capture_mode = thread_local_)
//     graph end_capture(stream_type)           empty when the capture was invalidated or unjoined; never throws for that
//     void begin_capture_to(stream_type, graph_type, capture_mode = thread_local_)   into a graph or a conditional body;
//                                              end_capture then returns a graph that names it and doesn't own it
//     graph make_graph()
//     graph clone(const graph&)
//     void add_child(graph& parent, const graph& child)
//     graph_type add_conditional_body(graph& parent)     an if-node whose condition is true; returns its body
//     exec instantiate(const graph&)
//     bool update(exec&, const graph&)         false when the topology differs
//     void launch(exec&, stream_type)
//     node_counts count(const graph&)          recursive into children and bodies
//     void synchronize(stream_type)
//     void fork(stream_type from, stream_type to)        `to` waits for an event recorded on `from` (joins, too)
//     void* allocate(std::size_t bytes); void deallocate(void*)    device memory outside the library
//     std::vector<T> read(const T*, std::size_t n); void write(T*, const std::vector<T>&)
//                                              from and to the host, at once; they wait for no stream
//     bool unsafe_call()                       makes a call that invalidates captures unless the thread is relaxed;
//                                              returns whether it failed
//     capture_mode exchange_thread_mode(capture_mode)
//     stream_type legacy_stream(); stream_type per_thread_stream()
//   };
//
// "Kernels" of typed tests are Device::fill, fill_rows and copy. Setting up and tearing down (allocate, read, write,
// launch, synchronize, ...) is not relaxed by itself: a test does it outside its captures, or under a relaxed scope.
#pragma once

#include <gtest/gtest.h>

#include <holdfast/error.hpp>

#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <thread>

#include <sys/wait.h>

namespace support {

enum class capture_mode { global, thread_local_, relaxed };
inline constexpr capture_mode capture_modes[] = {capture_mode::global, capture_mode::thread_local_,
                                                 capture_mode::relaxed};

enum class stream_kind { non_blocking, blocking };
inline constexpr stream_kind stream_kinds[] = {stream_kind::non_blocking, stream_kind::blocking};

struct node_counts {
  int kernels = 0;
  int memsets = 0;
  int memcpys = 0;
  int memory = 0;  // allocations and frees
  int children = 0;
  int conditionals = 0;
  int others = 0;

  [[nodiscard]] int total() const { return kernels + memsets + memcpys + memory + children + conditionals + others; }
};

template <class Device>
struct driver;

/// Polls until `condition` holds; false when it doesn't in time. Callbacks of a device may be asynchronous.
inline bool eventually(const std::function<bool()>& condition,
                       std::chrono::milliseconds patience = std::chrono::seconds(5)) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// The code of the `device_error` that `call` throws; 0 when it throws nothing. Other exceptions pass.
template <class Call>
int error_code(Call&& call) {
  try {
    call();
    return 0;
  } catch (const holdfast::device_error& e) {
    return e.code();
  }
}

/// A predicate for EXPECT_EXIT: the child died of touching memory that isn't mapped, or not so. Sanitizers turn the
/// signal into a report and an exit status.
inline bool died_of_access(int status) {
  return (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) || (WIFEXITED(status) && WEXITSTATUS(status) != 0);
}

/// The base of typed fixtures: skips, with the reason, where the device is missing.
template <class Device>
class device_test : public ::testing::Test {
 protected:
  using drive = driver<Device>;

  void SetUp() override {
    if (const std::string reason = driver<Device>::missing(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

}  // namespace support
