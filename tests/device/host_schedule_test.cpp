// The seeded schedule: reproducible, varied, and never against a dependency.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <set>
#include <string>

namespace {

using holdfast::host_device;
using holdfast::host::graph;
using holdfast::host::graph_exec;
using holdfast::host::seeded_schedule;
using holdfast::host::stream;

std::string two_streams(std::uint64_t seed) {
  const seeded_schedule schedule(seed);
  const stream s, t;
  std::string log;
  for (char c = 'a'; c <= 'd'; ++c) {
    s.run([&log, c] { log += c; });
    t.run([&log, c] { log += static_cast<char>(c - 'a' + 'A'); });
  }
  holdfast::host::device_synchronize();
  return log;
}

TEST(host_schedule, the_same_seed_gives_the_same_order) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) EXPECT_EQ(two_streams(seed), two_streams(seed));
}

TEST(host_schedule, seeds_give_many_orders_and_every_one_keeps_each_streams) {
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const std::string log = two_streams(seed);
    ASSERT_EQ(log.size(), 8u);
    std::string s, t;
    for (const char c : log) (c >= 'a' ? s : t) += c;
    EXPECT_EQ(s, "abcd");
    EXPECT_EQ(t, "ABCD");
    orders.insert(log);
  }
  EXPECT_GT(orders.size(), 30u);
}

TEST(host_schedule, a_launchs_nodes_interleave_with_other_streams_and_keep_their_dependencies) {
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    const seeded_schedule schedule(seed);
    const stream s, side, t;
    std::string log;
    const auto say = [&log](char c) { return [&log, c] { log += c; }; };
    s.begin_capture(holdfast::host::capture_mode::relaxed);
    s.run(say('a'));
    support::driver<host_device>::fork(s, side);
    s.run(say('b'));
    side.run(say('c'));
    support::driver<host_device>::fork(side, s);
    s.run(say('d'));
    const graph g = s.end_capture();
    const graph_exec exec = g.instantiate();
    exec.launch(s);
    t.run(say('x'));
    t.run(say('y'));
    holdfast::host::device_synchronize();
    ASSERT_EQ(log.size(), 6u);
    const auto at = [&log](char c) { return log.find(c); };
    EXPECT_LT(at('a'), at('b'));
    EXPECT_LT(at('a'), at('c'));
    EXPECT_LT(at('b'), at('d'));
    EXPECT_LT(at('c'), at('d'));
    EXPECT_LT(at('x'), at('y'));
    orders.insert(log);
  }
  // 2 orders of the diamond times 15 ways to interleave two more.
  EXPECT_EQ(orders.size(), 30u);
}

TEST(host_schedule, scopes_nest_and_the_order_of_enqueueing_comes_back) {
  {
    const seeded_schedule outer(1);
    const seeded_schedule inner(2);
  }
  for (int i = 0; i < 20; ++i) {
    const stream s, t;
    std::string log;
    t.run([&] { log += 'a'; });
    s.run([&] { log += 'b'; });
    holdfast::host::device_synchronize();
    ASSERT_EQ(log, "ab");
  }
}

}  // namespace
