// Objects that the host device's graphs own: they live exactly as long as something may still run with them.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace {

using holdfast::capture_state;
using holdfast::host_device;
using holdfast::host::capture_mode;
using holdfast::host::graph;
using holdfast::host::graph_exec;
using holdfast::host::graph_ref;
using holdfast::host::make_graph;
using holdfast::host::status;
using holdfast::host::stream;
using support::error_code;

constexpr int code(status s) { return static_cast<int>(s); }

struct host_retain : testing::Test {
  static inline int destroyed = 0;
  static void destroy(void* object) {
    ++destroyed;
    *static_cast<bool*>(object) = false;
  }

  stream s;
  bool alive = false;

  void SetUp() override { destroyed = 0; }

  void retain(graph_ref g) {
    alive = true;
    host_device::retain(g, &alive, destroy);
  }
  graph owning() {
    graph g = make_graph();
    g.add_kernel([] {});
    retain(g);
    return g;
  }
  void expect_alive(const char* why) { EXPECT_TRUE(alive && destroyed == 0) << why; }
  void expect_gone(const char* why) { EXPECT_TRUE(!alive && destroyed == 1) << why; }
};

TEST_F(host_retain, by_a_graph) {
  graph g = owning();
  expect_alive("the graph");
  g.reset();
  expect_gone("at once");
}

TEST_F(host_retain, by_the_graph_of_a_capture) {
  s.begin_capture();
  retain(host_device::capturing(s).graph);
  graph g = s.end_capture();
  expect_alive("the graph");
  g = graph();
  expect_gone("at once");
}

TEST_F(host_retain, an_invalidated_capture_lets_go_at_its_end) {
  s.begin_capture();
  retain(host_device::capturing(s).graph);
  EXPECT_THROW(holdfast::host::unsafe_call("a call"), holdfast::device_error);
  expect_alive("not ended");
  EXPECT_THROW((void)s.end_capture(), holdfast::device_error);
  expect_gone("ended");
}

TEST_F(host_retain, an_unjoined_capture_lets_go_at_its_end) {
  const stream side;
  s.begin_capture();
  retain(host_device::capturing(s).graph);
  support::driver<host_device>::fork(s, side);
  side.run([] {});
  EXPECT_THROW((void)s.end_capture(), holdfast::device_error);
  expect_gone("ended");
}

TEST_F(host_retain, a_capture_whose_stream_is_destroyed_lets_go) {
  stream t;
  t.begin_capture();
  retain(host_device::capturing(t).graph);
  t.reset();
  expect_gone("with the stream");
}

TEST_F(host_retain, from_a_forked_stream_of_the_capture) {
  const stream side;
  s.begin_capture();
  support::driver<host_device>::fork(s, side);
  retain(host_device::capturing(side).graph);
  support::driver<host_device>::fork(side, s);
  graph g = s.end_capture();
  expect_alive("the graph");
  g.reset();
  expect_gone("at once");
}

TEST_F(host_retain, by_a_clone) {
  graph g = owning();
  graph clone = g.clone();
  g.reset();
  expect_alive("the clone");
  clone.reset();
  expect_gone("at once");
}

TEST_F(host_retain, by_an_executable) {
  graph g = owning();
  graph_exec exec = g.instantiate();
  g.reset();
  expect_alive("the executable");
  exec.launch(s);
  host_device::synchronize(s);
  expect_alive("after a launch");
  exec.reset();
  expect_gone("at once");
}

TEST_F(host_retain, by_a_launch_in_flight) {
  graph_exec exec = owning().instantiate();
  exec.launch(s);
  exec.reset();
  expect_alive("queued");
  host_device::synchronize(s);
  expect_gone("run");
}

TEST_F(host_retain, until_the_last_node_of_a_launch_has_run) {
  graph g = owning();
  g.add_kernel([this] { expect_alive("the last node"); });
  graph_exec exec = g.instantiate();
  exec.launch(s);
  g.reset();
  exec.reset();
  s.run([this] { expect_gone("before the next operation"); });
  host_device::synchronize(s);
}

TEST_F(host_retain, by_a_child_copy) {
  graph child = owning();
  graph parent = make_graph();
  parent.add_child(child);
  child.reset();
  expect_alive("the copy");
  graph_exec exec = parent.instantiate();
  parent.reset();
  expect_alive("the parent's executable");
  exec.reset();
  expect_gone("at once");
}

TEST_F(host_retain, by_a_conditional_body) {
  graph parent = make_graph();
  s.begin_capture_to(parent.add_conditional([] { return false; }));
  retain(host_device::capturing(s).graph);
  s.run([] {});
  EXPECT_THROW(host_device::synchronize(s), holdfast::device_error);
  EXPECT_THROW((void)s.end_capture(), holdfast::device_error);
  expect_alive("a broken capture into a graph that lives leaves it what it has");
  graph clone = parent.clone();
  parent.reset();
  expect_alive("the parent's clone");
  clone.reset();
  expect_gone("at once");
}

TEST_F(host_retain, by_a_graph_while_somebody_captures_into_it) {
  graph g = owning();
  s.begin_capture_to(g);
  g.reset();
  expect_alive("the capture");
  (void)s.end_capture();
  expect_gone("ended");
}

TEST_F(host_retain, by_the_graph_that_a_launch_was_captured_into) {
  graph_exec exec = owning().instantiate();
  s.begin_capture(capture_mode::relaxed);
  exec.launch(s);
  graph g = s.end_capture();
  exec.reset();
  expect_alive("the child");
  g.reset();
  expect_gone("at once");
}

TEST_F(host_retain, an_update_lets_go_of_the_old_and_keeps_the_new) {
  bool other = true;
  graph plain = make_graph();
  plain.add_kernel([] {});
  host_device::retain(plain, &other, destroy);
  graph_exec exec = owning().instantiate();
  ASSERT_TRUE(exec.update(plain));
  expect_gone("updated away");
  plain.reset();
  EXPECT_TRUE(other);
  exec.reset();
  EXPECT_FALSE(other);
}

TEST_F(host_retain, an_update_waits_for_the_launch_in_flight) {
  graph plain = make_graph();
  plain.add_kernel([] {});
  graph_exec exec = owning().instantiate();
  exec.launch(s);
  ASSERT_TRUE(exec.update(plain));
  expect_alive("in flight");
  host_device::synchronize(s);
  expect_gone("run");
}

TEST_F(host_retain, a_failed_update_changes_nothing) {
  graph_exec exec = owning().instantiate();
  EXPECT_FALSE(exec.update(make_graph()));
  expect_alive("the executable");
}

TEST_F(host_retain, once_per_retain_even_of_the_same_object) {
  graph g = owning();
  retain(g);
  g.reset();
  EXPECT_EQ(destroyed, 2);
}

TEST_F(host_retain, in_a_graph_that_is_gone_destroys_the_object) {
  graph g = make_graph();
  const graph_ref named = g;
  g.reset();
  EXPECT_EQ(error_code([&] { retain(named); }), code(status::invalid_handle));
  EXPECT_EQ(destroyed, 1);
  EXPECT_THROW(retain({}), holdfast::logic_error);
  EXPECT_EQ(destroyed, 2);
}

TEST_F(host_retain, destroy_may_not_call_the_device) {
  struct caller {
    stream* s;
    int refused = 0;
    static void destroy(void* self) {
      auto& me = *static_cast<caller*>(self);
      const auto expect_refused = [&](auto call) {
        try {
          call();
        } catch (const holdfast::logic_error&) {
          ++me.refused;
        }
      };
      expect_refused([&] { me.s->run([] {}); });
      expect_refused([&] { host_device::synchronize(*me.s); });
      expect_refused([&] { (void)host_device::capturing(*me.s); });
      expect_refused([&] { (void)host_device{}.reserve(4096, 0); });
      expect_refused([&] { (void)make_graph(); });
    }
  } object{&s};
  {
    const graph g = make_graph();
    host_device::retain(g, &object, caller::destroy);
  }
  EXPECT_EQ(object.refused, 5);
  EXPECT_NO_THROW(s.run([] {})) << "the refusal ends with it";
}

TEST_F(host_retain, destroy_holds_no_lock_of_the_device) {
  // Were one held, the other thread's device calls would wait for it for ever.
  struct waiter {
    static void destroy(void*) {
      std::thread([] {
        const stream t;
        t.run([] {});
        host_device::synchronize(t);
      }).join();
    }
  };
  graph_exec exec;
  {
    const graph g = make_graph();
    host_device::retain(g, nullptr, waiter::destroy);
    exec = g.instantiate();
  }
  exec.launch(s);
  exec.reset();
  host_device::synchronize(s);
}

TEST_F(host_retain, what_a_kernel_captured_is_let_go_of_without_a_lock) {
  auto value = std::shared_ptr<int>(new int(0), [](int* p) {
    std::thread([] { (void)host_device{}.memory(); }).join();
    delete p;
  });
  const std::weak_ptr<int> watch = value;
  graph g = make_graph();
  g.add_kernel([value] {});
  s.run([value = std::move(value)] {});
  host_device::synchronize(s);
  EXPECT_FALSE(watch.expired()) << "the graph's node";
  g.reset();
  EXPECT_TRUE(watch.expired());
}

TEST_F(host_retain, the_last_owner_may_let_go_on_any_thread) {
  static std::atomic<int> count;
  count = 0;
  constexpr int rounds = 200;
  for (int i = 0; i < rounds; ++i) {
    graph g = make_graph();
    g.add_kernel([] {});
    host_device::retain(g, nullptr, [](void*) { ++count; });
    graph_exec exec = g.instantiate();
    std::thread other([exec = std::move(exec)]() mutable {
      const host_device::relaxed_scope relaxed;
      const stream t;
      exec.launch(t);
      exec.reset();
      host_device::synchronize(t);
    });
    g.reset();
    other.join();
  }
  EXPECT_EQ(count, rounds);
}

}  // namespace
