// Graphs of the host device: what launches run.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <stdexcept>
#include <string>
#include <vector>

namespace {

using holdfast::host_device;
using holdfast::host::capture_mode;
using holdfast::host::graph;
using holdfast::host::graph_exec;
using holdfast::host::make_graph;
using holdfast::host::node_kind;
using holdfast::host::status;
using holdfast::host::stream;
using support::error_code;

constexpr int code(status s) { return static_cast<int>(s); }

struct host_graph : testing::Test {
  stream s;
  std::string log;

  std::function<void()> say(char c) {
    return [this, c] { log += c; };
  }
  graph saying(const std::string& text) {
    graph g = make_graph();
    for (const char c : text) g.add_kernel(say(c));
    return g;
  }
  std::string launched(const graph_exec& exec) {
    log.clear();
    exec.launch(s);
    EXPECT_EQ(log, "");
    host_device::synchronize(s);
    return log;
  }
};

TEST_F(host_graph, replays_what_was_captured) {
  s.begin_capture();
  s.run(say('a'));
  s.run(say('b'));
  const graph g = s.end_capture();
  const graph_exec exec = g.instantiate();
  EXPECT_EQ(launched(exec), "ab");
  EXPECT_EQ(launched(exec), "ab");
}

TEST_F(host_graph, an_executable_is_the_graph_as_it_was) {
  graph g = saying("a");
  const graph_exec exec = g.instantiate();
  g.add_kernel(say('b'));
  EXPECT_EQ(launched(exec), "a");
  g.reset();
  EXPECT_EQ(launched(exec), "a");
}

TEST_F(host_graph, a_chain_of_empty_children_in_a_child_launches) {
  graph two = make_graph();
  two.add_child(make_graph());
  two.add_child(make_graph());
  graph outer = make_graph();
  outer.add_child(two);
  outer.add_kernel(say('a'));
  EXPECT_EQ(launched(outer.instantiate()), "a");
}

TEST_F(host_graph, an_empty_graph_launches) {
  graph g = make_graph();
  EXPECT_EQ(launched(g.instantiate()), "");
  const graph empty = make_graph();
  g.add_child(empty);
  g.add_child(empty);
  g.add_kernel(say('a'));
  EXPECT_EQ(launched(g.instantiate()), "a");
}

TEST_F(host_graph, a_clone_is_independent) {
  graph g = saying("a");
  const graph clone = g.clone();
  g.add_kernel(say('b'));
  EXPECT_EQ(launched(clone.instantiate()), "a");
  EXPECT_EQ(launched(g.instantiate()), "ab");
}

TEST_F(host_graph, a_child_is_a_copy_and_runs_in_its_place) {
  graph child = saying("bc");
  graph parent = saying("a");
  parent.add_child(child);
  parent.add_kernel(say('d'));
  child.reset();
  EXPECT_EQ(launched(parent.instantiate()), "abcd");
  const auto nodes = parent.nodes();
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[1].kind, node_kind::child);
  EXPECT_EQ(nodes[1].inner.nodes().size(), 2u);
}

TEST_F(host_graph, a_condition_is_asked_at_each_launch) {
  graph g = saying("a");
  bool yes = true;
  const auto body = g.add_conditional([&] { return yes; });
  g.add_kernel(say('d'));
  body.add_kernel(say('b'));
  s.begin_capture_to(body);
  s.run(say('c'));
  (void)s.end_capture();
  const graph_exec exec = g.instantiate();
  EXPECT_EQ(launched(exec), "abcd");
  yes = false;
  EXPECT_EQ(launched(exec), "ad");
}

TEST_F(host_graph, conditional_bodies_nest) {
  graph g = make_graph();
  const auto outer = g.add_conditional([] { return true; });
  const auto inner = outer.add_conditional([] { return true; });
  inner.add_kernel(say('a'));
  outer.add_kernel(say('b'));
  const auto never = outer.add_conditional([] { return false; });
  never.add_kernel(say('x'));
  g.add_kernel(say('c'));
  EXPECT_EQ(launched(g.clone().instantiate()), "abc");
}

TEST_F(host_graph, launches_of_one_executable_follow_each_other) {
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    const holdfast::host::seeded_schedule schedule(seed);
    const stream t;
    const graph_exec exec = saying("ab").instantiate();
    log.clear();
    exec.launch(s);
    exec.launch(t);
    holdfast::host::device_synchronize();
    ASSERT_EQ(log, "abab");
  }
}

TEST_F(host_graph, updates_to_the_same_topology_only) {
  graph_exec exec = saying("ab").instantiate();
  EXPECT_TRUE(exec.update(saying("cd")));
  EXPECT_EQ(launched(exec), "cd");
  EXPECT_FALSE(exec.update(saying("c")));
  graph parallel = make_graph();
  const stream side;
  s.begin_capture_to(parallel);
  support::driver<host_device>::fork(s, side);
  s.run(say('x'));
  side.run(say('y'));
  support::driver<host_device>::fork(side, s);
  (void)s.end_capture();
  EXPECT_FALSE(exec.update(parallel)) << "the same nodes with other dependencies";
  EXPECT_EQ(launched(exec), "cd");
}

TEST_F(host_graph, an_update_leaves_launches_in_flight_alone) {
  graph_exec exec = saying("a").instantiate();
  exec.launch(s);
  ASSERT_TRUE(exec.update(saying("b")));
  exec.launch(s);
  host_device::synchronize(s);
  EXPECT_EQ(log, "ab");
}

TEST_F(host_graph, a_launch_on_a_capturing_stream_is_a_child) {
  graph_exec exec = saying("ab").instantiate();
  s.begin_capture(capture_mode::thread_local_);
  exec.launch(s);
  s.run(say('c'));
  const graph g = s.end_capture();
  exec.reset();
  ASSERT_EQ(g.nodes().size(), 2u);
  EXPECT_EQ(g.nodes()[0].kind, node_kind::child);
  EXPECT_EQ(launched(g.instantiate()), "abc");
}

TEST_F(host_graph, graph_and_executable_may_go_while_in_flight) {
  {
    graph g = saying("ab");
    g.instantiate().launch(s);
  }
  host_device::synchronize(s);
  EXPECT_EQ(log, "ab");
}

TEST_F(host_graph, a_nodes_exception_leaves_the_synchronising_call_and_the_node_counts_as_done) {
  graph g = make_graph();
  g.add_kernel([] { throw std::runtime_error("node"); });
  g.add_kernel(say('a'));
  g.instantiate().launch(s);
  EXPECT_THROW(host_device::synchronize(s), std::runtime_error);
  host_device::synchronize(s);
  EXPECT_EQ(log, "a");
}

TEST_F(host_graph, handles_of_graphs_that_are_gone_are_refused) {
  graph g = saying("a");
  const auto named = g.get();
  const auto body = g.add_conditional([] { return true; });
  g.reset();
  EXPECT_EQ(error_code([&] { (void)named.nodes(); }), code(status::invalid_handle));
  EXPECT_EQ(error_code([&] { (void)body.instantiate(); }), code(status::invalid_handle));
  EXPECT_THROW((void)g.clone(), holdfast::logic_error);
  EXPECT_THROW(graph_exec{}.launch(s), holdfast::logic_error);
}

}  // namespace
