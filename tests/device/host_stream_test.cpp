// Streams of the host device: lazy, in order, recycled.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using holdfast::host_device;
using holdfast::logic_error;
using holdfast::host::status;
using holdfast::host::stream;
using holdfast::host::stream_kind;
using support::error_code;

constexpr int code(status s) { return static_cast<int>(s); }

struct host_stream : testing::Test {
  std::string log;
  std::function<void()> say(char c) {
    return [this, c] { log += c; };
  }
};

TEST_F(host_stream, runs_nothing_until_somebody_synchronises) {
  const stream s;
  s.run(say('a'));
  EXPECT_EQ(log, "");
  host_device::synchronize(s);
  EXPECT_EQ(log, "a");
}

TEST_F(host_stream, runs_work_in_order) {
  const stream s;
  for (char c = 'a'; c <= 'f'; ++c) s.run(say(c));
  host_device::synchronize(s);
  EXPECT_EQ(log, "abcdef");
}

TEST_F(host_stream, runs_streams_in_the_order_of_enqueueing) {
  const stream s, t;
  s.run(say('a'));
  t.run(say('b'));
  s.run(say('c'));
  t.run(say('d'));
  host_device::synchronize(s);
  EXPECT_EQ(log, "abc") << "what was enqueued after the goal stays queued";
  host_device::synchronize(t);
  EXPECT_EQ(log, "abcd");
}

TEST_F(host_stream, fills_and_copies) {
  const stream s;
  std::vector<unsigned char> a(8, 1), b(8, 2);
  host_device::fill(s, a.data(), std::byte{7}, 4);
  host_device::copy(s, b.data(), a.data(), 6);
  host_device::fill(s, nullptr, std::byte{7}, 0);
  host_device::synchronize(s);
  EXPECT_EQ(a, (std::vector<unsigned char>{7, 7, 7, 7, 1, 1, 1, 1}));
  EXPECT_EQ(b, (std::vector<unsigned char>{7, 7, 7, 7, 1, 1, 2, 2}));
}

TEST_F(host_stream, fills_rows_and_leaves_what_is_between) {
  const stream s;
  std::vector<unsigned char> a(10, 1);
  host_device::fill_rows(s, a.data() + 1, 4, std::byte{9}, 2, 2);
  host_device::synchronize(s);
  EXPECT_EQ(a, (std::vector<unsigned char>{1, 9, 9, 1, 1, 9, 9, 1, 1, 1}));
  EXPECT_EQ(error_code([&] { host_device::fill_rows(s, a.data(), 2, std::byte{9}, 3, 2); }),
            code(status::invalid_value));
}

TEST_F(host_stream, a_destroyed_streams_work_still_runs) {
  {
    const stream s;
    s.run(say('a'));
  }
  const stream t;
  t.run(say('b'));
  EXPECT_EQ(log, "");
  host_device::synchronize(t);
  EXPECT_EQ(log, "ab");
}

TEST_F(host_stream, handles_are_recycled_lowest_first) {
  stream a, b, c;
  const auto handle_a = a.get(), handle_c = c.get();
  c.reset();
  a.reset();
  const stream d, e;
  EXPECT_EQ(d.get(), handle_a);
  EXPECT_EQ(e.get(), handle_c);
  EXPECT_EQ(std::hash<holdfast::host::stream_ref>{}(d), std::hash<holdfast::host::stream_ref>{}(handle_a));
}

TEST_F(host_stream, null_and_destroyed_streams_are_refused) {
  stream s;
  const auto handle = s.get();
  s.reset();
  EXPECT_FALSE(s);
  EXPECT_THROW(s.run([] {}), logic_error);
  EXPECT_THROW((void)host_device::capturing(host_device::stream_type{}), logic_error);
  EXPECT_EQ(error_code([&] { handle.run([] {}); }), code(status::invalid_handle));
  EXPECT_EQ(error_code([&] { (void)host_device::capturing(handle); }), code(status::invalid_handle));
}

TEST_F(host_stream, the_legacy_stream_is_ordered_with_blocking_streams_both_ways) {
  // With the schedule left to chance, only the dependencies are left to keep the order.
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    log.clear();
    const holdfast::host::seeded_schedule schedule(seed);
    const stream blocking({}, stream_kind::blocking);
    const auto legacy = holdfast::host::legacy_stream();
    blocking.run(say('a'));
    legacy.run(say('b'));
    blocking.run(say('c'));
    host_device::synchronize(blocking);
    ASSERT_EQ(log, "abc");
  }
}

TEST_F(host_stream, the_legacy_stream_is_not_ordered_with_non_blocking_streams) {
  bool varied = false;
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    log.clear();
    const holdfast::host::seeded_schedule schedule(seed);
    const stream s;
    s.run(say('a'));
    holdfast::host::legacy_stream().run(say('b'));
    holdfast::host::device_synchronize();
    varied = varied || log == "ba";
  }
  EXPECT_TRUE(varied);
}

TEST_F(host_stream, synchronising_the_legacy_stream_runs_blocking_streams) {
  const stream blocking({}, stream_kind::blocking);
  holdfast::host::legacy_stream().run(say('a'));
  blocking.run(say('b'));
  host_device::synchronize(holdfast::host::legacy_stream());
  EXPECT_EQ(log, "ab");
}

TEST_F(host_stream, the_per_thread_handle_names_a_stream_of_each_thread) {
  const auto s = holdfast::host::per_thread_stream();
  EXPECT_TRUE(host_device::thread_bound(s));
  EXPECT_FALSE(host_device::thread_bound(holdfast::host::legacy_stream()));
  s.begin_capture(holdfast::host::capture_mode::thread_local_);
  std::thread([&] {
    EXPECT_EQ(host_device::capturing(s).state, holdfast::capture_state::none);
    s.run(say('a'));
    host_device::synchronize(s);
  }).join();
  EXPECT_EQ(log, "a");
  s.run(say('b'));
  EXPECT_EQ(s.end_capture().nodes().size(), 1u);
}

TEST_F(host_stream, a_thread_that_ends_while_its_stream_captures_leaves_no_capture_behind) {
  std::thread([] { holdfast::host::per_thread_stream().begin_capture(); }).join();
  EXPECT_NO_THROW(holdfast::host::unsafe_call("anything"));
}

TEST_F(host_stream, knows_its_device) {
  const stream s(host_device{3});
  EXPECT_EQ(host_device::of(s), host_device{3});
  EXPECT_EQ(host_device::of(host_device{5}.library_stream()), host_device{5});
  EXPECT_THROW(stream(host_device{8}), logic_error);
  EXPECT_THROW(stream(host_device{-1}), logic_error);
}

TEST_F(host_stream, the_current_device_is_restored) {
  holdfast::host::set_current_device({1});
  {
    const host_device::current_scope scope(host_device{2});
    EXPECT_EQ(holdfast::host::current_device(), host_device{2});
  }
  EXPECT_EQ(holdfast::host::current_device(), host_device{1});
  EXPECT_THROW(const host_device::current_scope scope(host_device{9}), logic_error);
  EXPECT_EQ(holdfast::host::current_device(), host_device{1});
  holdfast::host::set_current_device({0});
}

TEST_F(host_stream, a_kernels_exception_leaves_the_synchronising_call_and_the_kernel_counts_as_done) {
  const stream s;
  s.run([] { throw std::runtime_error("kernel"); });
  s.run(say('a'));
  EXPECT_THROW(host_device::synchronize(s), std::runtime_error);
  EXPECT_NO_THROW(host_device::synchronize(s));
  EXPECT_EQ(log, "a");
}

TEST_F(host_stream, a_kernel_may_not_call_the_device) {
  const stream s, t;
  s.run([&] { host_device::synchronize(t); });
  EXPECT_THROW(host_device::synchronize(s), logic_error);
  s.run([&] { (void)host_device{}.memory(); });
  EXPECT_THROW(host_device::synchronize(s), logic_error);
  s.run([&] { t.run([] {}); });
  EXPECT_THROW(host_device::synchronize(s), logic_error);
  EXPECT_NO_THROW(t.run([] {})) << "the refusal ends with the kernel";
}

TEST_F(host_stream, a_free_operation_may_unmap_but_nothing_else) {
  const stream s, t;
  const host_device d;
  const std::size_t page = d.granularity();
  void* const p = d.reserve(page, 0);
  const auto memory = d.create(page);
  d.map(p, page, memory);
  d.allow(p, page, holdfast::access::read_write);
  d.destroy(memory);
  const std::size_t held = d.memory().free;
  host_device::fill(s, p, std::byte{1}, page);
  holdfast::host::enqueue_free(s, [=] { d.unmap(p, page); });
  EXPECT_EQ(d.memory().free, held);
  host_device::synchronize(s);
  EXPECT_EQ(d.memory().free, held + page);
  d.unreserve(p, page);
  holdfast::host::enqueue_free(s, [&] { t.run([] {}); });
  EXPECT_THROW(host_device::synchronize(s), logic_error);
}

TEST_F(host_stream, run_pending_runs_everything_of_its_device) {
  const stream s, t, other(host_device{1});
  s.run(say('a'));
  t.run(say('b'));
  other.run(say('x'));
  holdfast::host::run_pending();
  EXPECT_EQ(log, "ab");
  holdfast::host::run_pending({1});
  EXPECT_EQ(log, "abx");
}

TEST_F(host_stream, activity_counts_what_was_asked) {
  const stream s;
  const auto before = holdfast::host::activity();
  EXPECT_EQ(before, holdfast::host::activity());
  s.run([] {});
  host_device::synchronize(s);
  const auto after = holdfast::host::activity();
  EXPECT_EQ(after.operations - before.operations, 1u);
  EXPECT_EQ(after.waits - before.waits, 1u);
}

}  // namespace
