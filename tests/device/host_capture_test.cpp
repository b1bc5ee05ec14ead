// Captures of the host device: what is recorded, and everything that breaks one.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using holdfast::capture_state;
using holdfast::host_device;
using holdfast::host::capture_mode;
using holdfast::host::event;
using holdfast::host::graph;
using holdfast::host::node_kind;
using holdfast::host::status;
using holdfast::host::stream;
using holdfast::host::stream_kind;
using holdfast::host::stream_ref;
using support::error_code;

constexpr int code(status s) { return static_cast<int>(s); }
constexpr capture_mode modes[] = {capture_mode::global, capture_mode::thread_local_, capture_mode::relaxed};

capture_state state(stream_ref s) { return host_device::capturing(s).state; }
void fork(stream_ref from, stream_ref to) { support::driver<host_device>::fork(from, to); }

/// Ends a capture that must have been invalidated.
void expect_broken(stream_ref s) {
  EXPECT_EQ(state(s), capture_state::invalidated);
  EXPECT_EQ(error_code([&] { (void)s.end_capture(); }), code(status::capture_invalidated));
  EXPECT_EQ(state(s), capture_state::none);
}

/// Ends a capture that must be intact.
void expect_intact(stream_ref s) {
  EXPECT_EQ(state(s), capture_state::active);
  EXPECT_EQ(error_code([&] { (void)s.end_capture(); }), 0);
}

TEST(host_capture, records_instead_of_running) {
  const stream s;
  std::vector<char> bytes(4);
  int runs = 0;
  s.begin_capture();
  s.run([&] { ++runs; });
  host_device::fill(s, bytes.data(), std::byte{1}, 4);
  host_device::fill_rows(s, bytes.data(), 2, std::byte{1}, 1, 2);
  host_device::copy(s, bytes.data(), bytes.data() + 2, 2);
  const graph g = s.end_capture();
  host_device::synchronize(s);
  EXPECT_EQ(runs, 0);
  std::vector<node_kind> kinds;
  for (const auto& node : g.nodes()) {
    EXPECT_EQ(node.after, kinds.empty() ? std::vector<std::size_t>{} : std::vector{kinds.size() - 1});
    kinds.push_back(node.kind);
  }
  EXPECT_EQ(kinds, (std::vector{node_kind::kernel, node_kind::memset, node_kind::memset, node_kind::memcpy}));
}

TEST(host_capture, nothing_to_do_leaves_no_node) {
  const stream s;
  char byte = 0;
  s.begin_capture();
  host_device::fill(s, &byte, std::byte{1}, 0);
  host_device::fill_rows(s, &byte, 1, std::byte{1}, 0, 1);
  host_device::fill_rows(s, &byte, 1, std::byte{1}, 1, 0);
  host_device::copy(s, &byte, &byte, 0);
  EXPECT_TRUE(s.end_capture().nodes().empty());
}

TEST(host_capture, reports_its_graph_and_an_id_that_a_recycled_handle_does_not_share) {
  stream s;
  const stream_ref handle = s;
  EXPECT_EQ(state(s), capture_state::none);
  s.begin_capture();
  const auto first = host_device::capturing(s);
  EXPECT_EQ(first.state, capture_state::active);
  const graph g = s.end_capture();
  EXPECT_EQ(first.graph, g.get());
  s.reset();
  const stream again;
  ASSERT_EQ(again.get(), handle);
  again.begin_capture();
  EXPECT_NE(host_device::capturing(again).id, first.id);
  EXPECT_NE(host_device::capturing(again).graph, first.graph);
  expect_intact(again);
}

TEST(host_capture, refuses_to_begin_twice_or_on_the_legacy_or_library_stream) {
  const stream s;
  s.begin_capture();
  EXPECT_EQ(error_code([&] { s.begin_capture(); }), code(status::illegal_state));
  expect_intact(s);
  EXPECT_EQ(error_code([&] { (void)s.end_capture(); }), code(status::illegal_state));
  EXPECT_EQ(error_code([&] { holdfast::host::legacy_stream().begin_capture(); }), code(status::capture_unsupported));
  EXPECT_THROW(host_device{}.library_stream().begin_capture(), holdfast::logic_error);
}

// --- forks -------------------------------------------------------------------------------------------------------------

TEST(host_capture, a_forked_stream_joins_the_capture_and_comes_back) {
  const stream s, side;
  s.begin_capture();
  s.run([] {});
  fork(s, side);
  EXPECT_EQ(host_device::capturing(side).id, host_device::capturing(s).id);
  side.run([] {});
  s.run([] {});
  fork(side, s);
  s.run([] {});
  const graph g = s.end_capture();
  EXPECT_EQ(state(side), capture_state::none);
  const auto nodes = g.nodes();
  ASSERT_EQ(nodes.size(), 4u);
  EXPECT_EQ(nodes[1].after, std::vector<std::size_t>{0});
  EXPECT_EQ(nodes[2].after, std::vector<std::size_t>{0});
  EXPECT_EQ(nodes[3].after, (std::vector<std::size_t>{2, 1}));
}

TEST(host_capture, an_unjoined_fork_is_an_error_that_ends_the_capture) {
  const stream s, side;
  s.begin_capture();
  fork(s, side);
  side.run([] {});
  EXPECT_EQ(error_code([&] { (void)s.end_capture(); }), code(status::capture_unjoined));
  EXPECT_EQ(state(s), capture_state::none);
  EXPECT_EQ(state(side), capture_state::none);
}

TEST(host_capture, work_after_the_join_is_unjoined_again) {
  const stream s, side;
  s.begin_capture();
  fork(s, side);
  side.run([] {});
  fork(side, s);
  side.run([] {});
  EXPECT_EQ(error_code([&] { (void)s.end_capture(); }), code(status::capture_unjoined));
}

TEST(host_capture, a_joined_forks_stream_may_go_before_the_end) {
  const stream s;
  s.begin_capture();
  {
    const stream side;
    fork(s, side);
    side.run([] {});
    fork(side, s);
  }
  EXPECT_EQ(s.end_capture().nodes().size(), 1u);
}

TEST(host_capture, ending_it_on_a_forked_stream_invalidates_it) {
  const stream s, side;
  s.begin_capture();
  fork(s, side);
  EXPECT_EQ(error_code([&] { (void)side.end_capture(); }), code(status::capture_unmatched));
  expect_broken(s);
}

TEST(host_capture, waiting_across_two_captures_invalidates_both) {
  const stream s, t;
  s.begin_capture();
  t.begin_capture();
  EXPECT_EQ(error_code([&] { fork(s, t); }), code(status::capture_merge));
  expect_broken(s);
  expect_broken(t);
}

TEST(host_capture, waiting_for_work_outside_invalidates_it) {
  const stream s, eager;
  event e(host_device{});
  e.record(eager);
  s.begin_capture();
  EXPECT_EQ(error_code([&] { host_device::wait(s, e); }), code(status::capture_isolation));
  expect_broken(s);
}

TEST(host_capture, an_event_of_a_capture_that_ended_cannot_be_waited_for_but_recorded_anew) {
  const stream s, t;
  event e(host_device{});
  s.begin_capture();
  e.record(s);
  expect_intact(s);
  EXPECT_EQ(error_code([&] { host_device::wait(t, e); }), code(status::captured_event));
  EXPECT_EQ(error_code([&] { (void)e.ready(); }), code(status::captured_event));
  e.record(t);
  e.synchronize();
  EXPECT_TRUE(e.ready());
}

// --- what breaks a capture -----------------------------------------------------------------------------------------------

TEST(host_capture, querying_or_synchronising_a_captured_event_invalidates_it) {
  const stream s;
  const std::function<void(event&)> looks[] = {[](event& e) { (void)e.ready(); }, [](event& e) { e.synchronize(); }};
  for (const auto& look : looks) {
    event e(host_device{});
    s.begin_capture();
    e.record(s);
    const host_device::relaxed_scope relaxed;
    EXPECT_EQ(error_code([&] { look(e); }), code(status::captured_event));
    expect_broken(s);
  }
}

TEST(host_capture, synchronising_the_capturing_stream_invalidates_it) {
  const stream s;
  const host_device::relaxed_scope relaxed;
  s.begin_capture(capture_mode::relaxed);
  EXPECT_EQ(error_code([&] { host_device::synchronize(s); }), code(status::capture_unsupported));
  EXPECT_EQ(error_code([&] { s.run([] {}); }), code(status::capture_invalidated));
  EXPECT_EQ(error_code([&] { host_device::synchronize(s); }), code(status::capture_invalidated));
  expect_broken(s);
  EXPECT_NO_THROW(s.run([] {}));
}

TEST(host_capture, device_synchronize_invalidates_every_capture_of_the_device_even_relaxed) {
  for (const capture_mode mode : modes) {
    const stream s, t, other(host_device{1});
    s.begin_capture(mode);
    t.begin_capture(mode);
    other.begin_capture(mode);
    const host_device::relaxed_scope relaxed;
    EXPECT_EQ(error_code([] { holdfast::host::device_synchronize(); }), code(status::capture_unsupported));
    expect_broken(s);
    expect_broken(t);
    expect_intact(other);
  }
}

TEST(host_capture, using_the_legacy_stream_while_a_blocking_stream_captures_invalidates_it) {
  const stream_ref legacy = holdfast::host::legacy_stream();
  event e(host_device{}), done(host_device{});
  done.record(holdfast::host::stream{});
  const std::function<void()> uses[] = {[&] { legacy.run([] {}); }, [&] { host_device::synchronize(legacy); },
                                        [&] { e.record(legacy); }, [&] { host_device::wait(legacy, done); }};
  for (const auto& use : uses) {
    const stream blocking({}, stream_kind::blocking), free;
    EXPECT_EQ(state(legacy), capture_state::none);
    free.begin_capture(capture_mode::relaxed);
    EXPECT_EQ(state(legacy), capture_state::none);
    blocking.begin_capture(capture_mode::relaxed);
    EXPECT_EQ(state(legacy), capture_state::implicit);
    EXPECT_EQ(state(holdfast::host::legacy_stream({1})), capture_state::none);
    const host_device::relaxed_scope relaxed;
    EXPECT_EQ(error_code(use), code(status::capture_implicit));
    expect_broken(blocking);
    expect_intact(free);
    EXPECT_EQ(error_code(use), 0);
  }
}

TEST(host_capture, the_legacy_stream_cannot_join_one) {
  const stream s;
  s.begin_capture();
  EXPECT_EQ(error_code([&] { fork(s, holdfast::host::legacy_stream()); }), code(status::capture_implicit));
  expect_broken(s);
}

TEST(host_capture, the_librarys_stream_cannot_join_one_and_leaves_it_intact) {
  const stream s;
  s.begin_capture();
  EXPECT_THROW(fork(s, host_device{}.library_stream()), holdfast::logic_error);
  expect_intact(s);
}

/// Every unsafe call, on streams that don't capture.
struct unsafe {
  const char* name;
  std::function<void()> call;
};

struct host_capture_matrix : testing::Test {
  stream s, blocking{{}, stream_kind::blocking}, eager;
  event recorded{host_device{}};
  char byte = 0;
  graph kernel = holdfast::host::make_graph();
  holdfast::host::graph_exec exec = kernel.instantiate();
  std::vector<unsafe> unsafe_calls{
      {"run", [this] { eager.run([] {}); }},
      {"fill", [this] { host_device::fill(eager, &byte, std::byte{1}, 1); }},
      {"fill_rows", [this] { host_device::fill_rows(eager, &byte, 1, std::byte{1}, 1, 1); }},
      {"copy", [this] { host_device::copy(eager, &byte, &byte, 1); }},
      {"launch", [this] { exec.launch(eager); }},
      {"synchronize", [this] { host_device::synchronize(eager); }},
      {"event query", [this] { (void)recorded.ready(); }},
      {"event synchronize", [this] { recorded.synchronize(); }},
      {"enqueue_free", [this] { holdfast::host::enqueue_free(eager, [] {}); }},
      {"run_pending", [] { holdfast::host::run_pending(); }},
      {"unsafe_call", [] { holdfast::host::unsafe_call("a call"); }},
      {"executable's end", [this] {
         auto dying = kernel.instantiate();
         const auto before = state(s), before_blocking = state(blocking);
         dying.reset();  // can't throw: say so here
         if (state(s) != before || state(blocking) != before_blocking) {
           throw holdfast::device_error(code(status::capture_unsupported), "invalidated");
         }
       }}};

  void SetUp() override { recorded.record(eager); }

  void elsewhere(bool other_thread, const std::function<void()>& f) {
    if (other_thread) {
      std::thread(f).join();
    } else {
      f();
    }
  }
};

TEST_F(host_capture_matrix, unsafe_calls_break_what_forbids_them_and_nothing_else) {
  for (const unsafe& each : unsafe_calls) {
    for (const stream_ref capturing : {s.get(), blocking.get()}) {
      for (const capture_mode mode : modes) {
        for (const bool other_thread : {false, true}) {
          SCOPED_TRACE(std::string(each.name) + ", mode " + std::to_string(static_cast<int>(mode)) +
                       (other_thread ? ", another thread" : ", same thread"));
          const bool forbidden = mode == capture_mode::global || (mode == capture_mode::thread_local_ && !other_thread);
          capturing.begin_capture(mode);
          elsewhere(other_thread,
                    [&] { EXPECT_EQ(error_code(each.call), forbidden ? code(status::capture_unsupported) : 0); });
          forbidden ? expect_broken(capturing) : expect_intact(capturing);
        }
      }
    }
  }
}

TEST_F(host_capture_matrix, a_relaxed_threads_unsafe_calls_break_nothing) {
  for (const unsafe& each : unsafe_calls) {
    for (const stream_ref capturing : {s.get(), blocking.get()}) {
      for (const capture_mode mode : modes) {
        for (const bool other_thread : {false, true}) {
          SCOPED_TRACE(std::string(each.name) + ", mode " + std::to_string(static_cast<int>(mode)));
          capturing.begin_capture(mode);
          elsewhere(other_thread, [&] {
            const host_device::relaxed_scope relaxed;
            EXPECT_EQ(error_code(each.call), 0);
          });
          expect_intact(capturing);
        }
      }
    }
  }
}

TEST_F(host_capture_matrix, a_thread_local_thread_may_disturb_only_its_own) {
  s.begin_capture(capture_mode::global);
  std::thread([&] {
    EXPECT_EQ(holdfast::host::exchange_capture_mode(capture_mode::thread_local_), capture_mode::global);
    for (const unsafe& each : unsafe_calls) EXPECT_EQ(error_code(each.call), 0) << each.name;
    blocking.begin_capture(capture_mode::global);
    EXPECT_EQ(error_code([] { holdfast::host::unsafe_call("a call"); }), code(status::capture_unsupported));
    expect_broken(blocking);
  }).join();
  expect_intact(s);
}

TEST_F(host_capture_matrix, safe_calls_break_nothing) {
  const host_device d;
  const std::size_t page = d.granularity();
  struct nothing {
    static void destroy(void*) {}
  };
  for (const capture_mode mode : modes) {
    s.begin_capture(mode);
    const auto capture = host_device::capturing(s);
    const stream made, made_blocking({}, stream_kind::blocking);
    event e(d);
    e.record(eager);
    host_device::wait(made, e);
    host_device::retain(capture.graph, nullptr, nothing::destroy);
    void* const p = d.reserve(page, 0);
    const auto memory = d.create(page);
    d.map(p, page, memory);
    d.allow(p, page, holdfast::access::read);
    d.unmap(p, page);
    d.destroy(memory);
    d.unreserve(p, page);
    (void)d.memory();
    (void)d.library_stream();
    (void)host_device::capturing(eager);
    (void)host_device::capturing(holdfast::host::legacy_stream());
    const graph clone = capture.graph.clone();
    expect_intact(s);
  }
}

TEST_F(host_capture_matrix, a_relaxed_scope_nests_and_ends) {
  {
    const host_device::relaxed_scope outer;
    { const host_device::relaxed_scope inner; }
    s.begin_capture();
    EXPECT_NO_THROW(holdfast::host::unsafe_call("a call"));
    expect_intact(s);
  }
  s.begin_capture();
  EXPECT_EQ(error_code([] { holdfast::host::unsafe_call("a call"); }), code(status::capture_unsupported));
  expect_broken(s);
}

TEST(host_capture, enqueue_free_on_a_capturing_stream_is_refused_and_breaks_nothing) {
  const stream s;
  s.begin_capture();
  EXPECT_THROW(holdfast::host::enqueue_free(s, [] {}), holdfast::logic_error);
  expect_intact(s);
}

TEST(host_capture, only_a_relaxed_one_may_be_ended_by_another_thread) {
  for (const capture_mode mode : modes) {
    const stream s;
    s.begin_capture(mode);
    const int expected = mode == capture_mode::relaxed ? 0 : code(status::capture_wrong_thread);
    std::thread([&] { EXPECT_EQ(error_code([&] { (void)s.end_capture(); }), expected); }).join();
    if (expected != 0) expect_intact(s);
    EXPECT_EQ(state(s), capture_state::none);
  }
}

TEST(host_capture, destroying_its_stream_ends_it) {
  const stream side;
  {
    const stream s;
    s.begin_capture();
    fork(s, side);
    EXPECT_EQ(state(side), capture_state::active);
  }
  EXPECT_EQ(state(side), capture_state::none);
  EXPECT_NO_THROW(holdfast::host::unsafe_call("a call"));
}

// --- into an existing graph ------------------------------------------------------------------------------------------------

TEST(host_capture, captures_into_an_existing_graph) {
  const stream s;
  std::string log;
  const graph g = holdfast::host::make_graph();
  for (const char c : {'a', 'b'}) {
    s.begin_capture_to(g);
    EXPECT_EQ(host_device::capturing(s).graph, g.get());
    s.run([&log, c] { log += c; });
    EXPECT_FALSE(s.end_capture()) << "the graph has an owner";
  }
  EXPECT_EQ(g.nodes().size(), 2u);
  g.instantiate().launch(s);
  host_device::synchronize(s);
  EXPECT_EQ(log, "ab");
}

TEST(host_capture, into_a_graph_that_is_gone_is_refused) {
  const stream s;
  graph g = holdfast::host::make_graph();
  const auto named = g.get();
  g.reset();
  EXPECT_EQ(error_code([&] { s.begin_capture_to(named); }), code(status::invalid_handle));
  EXPECT_THROW(s.begin_capture_to({}), holdfast::logic_error);
  EXPECT_EQ(state(s), capture_state::none);
}

}  // namespace
