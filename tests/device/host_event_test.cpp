// Events of the host device.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <string>
#include <utility>

namespace {

using holdfast::host_device;
using holdfast::host::event;
using holdfast::host::status;
using holdfast::host::stream;
using support::error_code;

constexpr int code(status s) { return static_cast<int>(s); }

TEST(host_event, is_ready_once_what_it_recorded_has_run) {
  const stream s;
  event e(host_device{});
  EXPECT_TRUE(e.ready()) << "nothing recorded";
  s.run([] {});
  e.record(s);
  EXPECT_FALSE(e.ready());
  EXPECT_FALSE(e.ready()) << "asking runs nothing";
  host_device::synchronize(s);
  EXPECT_TRUE(e.ready());
}

TEST(host_event, synchronising_runs_up_to_the_record_and_no_further) {
  const stream s;
  std::string log;
  event e(host_device{});
  s.run([&] { log += 'a'; });
  e.record(s);
  s.run([&] { log += 'b'; });
  e.synchronize();
  EXPECT_EQ(log, "a");
  host_device::synchronize(s);
}

TEST(host_event, a_stream_waits_for_another) {
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    const holdfast::host::seeded_schedule schedule(seed);
    const stream s, t;
    std::string log;
    event e(host_device{});
    s.run([&] { log += 'a'; });
    e.record(s);
    host_device::wait(t, e);
    t.run([&] { log += 'b'; });
    host_device::synchronize(t);
    ASSERT_EQ(log, "ab");
  }
}

TEST(host_event, without_a_wait_streams_are_not_ordered) {
  bool varied = false;
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    const holdfast::host::seeded_schedule schedule(seed);
    const stream s, t;
    std::string log;
    s.run([&] { log += 'a'; });
    t.run([&] { log += 'b'; });
    holdfast::host::device_synchronize();
    varied = varied || log == "ba";
  }
  EXPECT_TRUE(varied);
}

TEST(host_event, a_wait_is_for_what_was_recorded_then_not_for_later_records) {
  bool overtaken = false;
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    const holdfast::host::seeded_schedule schedule(seed);
    const stream s, t;
    std::string log;
    event e(host_device{});
    e.record(s);
    host_device::wait(t, e);
    s.run([&] { log += 'a'; });
    e.record(s);
    t.run([&] { log += 'b'; });
    holdfast::host::device_synchronize();
    overtaken = overtaken || log == "ba";
  }
  EXPECT_TRUE(overtaken);
}

TEST(host_event, may_go_before_what_waits_for_it) {
  const stream s, t;
  std::string log;
  s.run([&] { log += 'a'; });
  {
    event e(host_device{});
    e.record(s);
    host_device::wait(t, e);
  }
  t.run([&] { log += 'b'; });
  host_device::synchronize(t);
  EXPECT_EQ(log, "ab");
}

TEST(host_event, crosses_devices_when_waited_for_but_not_when_recorded) {
  const stream s(host_device{0}), t(host_device{1});
  std::string log;
  event e(host_device{0});
  EXPECT_EQ(error_code([&] { e.record(t); }), code(status::invalid_handle));
  s.run([&] { log += 'a'; });
  e.record(s);
  host_device::wait(t, e);
  t.run([&] { log += 'b'; });
  host_device::synchronize(t);
  EXPECT_EQ(log, "ab");
}

TEST(host_event, one_that_was_moved_from_is_refused) {
  const stream s;
  event e(host_device{});
  const event f = std::move(e);
  EXPECT_THROW(e.record(s), holdfast::logic_error);  // NOLINT(bugprone-use-after-move)
}

}  // namespace
