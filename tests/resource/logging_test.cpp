// logging_resource: what is written is what was done, can be read back, and never gets in the way.
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/logging.hpp>
#include <holdfast/resource/vmm.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <streambuf>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using holdfast::trace_event;
using holdfast::trace_op;

constexpr const char* header =
    "# holdfast trace 1\n"
    "time_ns,op,pointer,bytes,alignment,stream,thread,ok\n";

template <class Device>
class logging : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using any = holdfast::any_resource<Device>;
  using logging_type = holdfast::logging_resource<Device>;

  static std::vector<trace_event> read(const std::string& text) {
    std::istringstream in{text};
    return holdfast::read_trace(in);
  }
};
TYPED_TEST_SUITE(logging, support::both_devices, support::device_names);

TYPED_TEST(logging, writes_what_is_done_and_it_can_be_read_back) {
  std::ostringstream out;
  support::growing_resource<TypeParam> witness{holdfast::malloc_resource<TypeParam>{}, 1024};
  typename TestFixture::logging_type memory{witness, out};
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 100, 256);
  void* const q = memory.allocate(t, 200, 16);
  EXPECT_TRUE(memory.extend(s, p, 100, 1000));
  EXPECT_FALSE(memory.extend(s, p, 1000, 2000));
  memory.deallocate(t, q, 200, 16);
  witness.fail();
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 7, 1)), holdfast::out_of_memory);
  memory.deallocate(s, p, 1000, 256);

  std::vector<trace_event> events = TestFixture::read(out.str());
  std::string again = header;
  std::uint64_t last = 0;
  for (trace_event& event : events) {
    again += holdfast::detail::trace_line(event);
    EXPECT_GE(event.time_ns, last);
    last = event.time_ns;
    event.time_ns = 0;
  }
  EXPECT_EQ(again, out.str()) << "reading lost something";
  EXPECT_GT(last, 0U);
  const std::vector<trace_event> expected{
      {0, trace_op::allocate, 1, 100, 256, 0, 0, true},    {0, trace_op::allocate, 2, 200, 16, 1, 0, true},
      {0, trace_op::extend, 1, 1000, 0, 0, 0, true},       {0, trace_op::extend, 1, 2000, 0, 0, 0, false},
      {0, trace_op::deallocate, 2, 200, 16, 1, 0, true},   {0, trace_op::allocate, 0, 7, 1, 0, 0, false},
      {0, trace_op::deallocate, 1, 1000, 256, 0, 0, true},
  };
  EXPECT_EQ(events, expected) << out.str();
  EXPECT_EQ(memory.errors(), 0U);
}

TYPED_TEST(logging, writes_suspensions) {
  std::ostringstream out;
  const std::size_t granule = TypeParam{}.granularity();
  const holdfast::failing_resource<TypeParam> upstream{holdfast::vmm_resource<TypeParam>{},
                                                       {.nth = 1, .allocate = false, .recommit = true}};
  typename TestFixture::logging_type memory{upstream, out};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, granule, 256);
  memory.decommit(s, p, granule);
  EXPECT_THROW(memory.recommit(s, p, granule), holdfast::out_of_memory);
  memory.recommit(s, p, granule);
  memory.deallocate(s, p, granule, 256);
  const auto events = TestFixture::read(out.str());
  ASSERT_EQ(events.size(), 5U) << out.str();
  EXPECT_EQ(events[1].op, trace_op::decommit);
  EXPECT_TRUE(events[1].ok);
  EXPECT_EQ(events[2].op, trace_op::recommit);
  EXPECT_FALSE(events[2].ok);
  EXPECT_EQ(events[3].op, trace_op::recommit);
  EXPECT_TRUE(events[3].ok);
  EXPECT_EQ(events[3].pointer, 1U);
}

TYPED_TEST(logging, writes_nothing_for_what_the_rules_refuse) {
  std::ostringstream out;
  typename TestFixture::logging_type memory{holdfast::malloc_resource<TypeParam>{}, out};
  const auto s = TestFixture::drive::make_stream();
  EXPECT_EQ(memory.allocate(s, 0, 8), nullptr);
  memory.deallocate(s, nullptr, 0, 8);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 8, 3)), holdfast::logic_error);
  int foreign = 0;
  EXPECT_FALSE(memory.extend(s, &foreign, 4, 8)) << "what is below cannot extend";
  EXPECT_EQ(out.str(), header);
}

TYPED_TEST(logging, numbers_no_pointer_twice_though_addresses_come_again) {
  std::ostringstream out;
  typename TestFixture::logging_type memory{holdfast::vmm_resource<TypeParam>{}, out};
  const auto s = TestFixture::drive::make_stream();
  void* p = nullptr;
  for (int i = 0; i < 3; ++i) {
    p = memory.allocate(s, 8, 8);
    memory.deallocate(s, p, 8, 8);
  }
  memory.deallocate(s, p, 8, 8);
  const auto events = TestFixture::read(out.str());
  ASSERT_EQ(events.size(), 7U);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(events[i].pointer, i / 2 + 1);
  EXPECT_EQ(events[6].pointer, 0U) << "a double free";
}

TYPED_TEST(logging, tells_threads_and_their_streams_apart) {
  std::ostringstream out;
  typename TestFixture::logging_type memory{holdfast::malloc_resource<TypeParam>{}, out};
  const auto use = [&](typename TypeParam::stream_type s) { memory.deallocate(s, memory.allocate(s, 8, 8), 8, 8); };
  const auto s = TestFixture::drive::make_stream();
  use(s);
  use(TestFixture::drive::per_thread_stream());
  std::thread{[&] {
    use(s);
    use(TestFixture::drive::per_thread_stream());
  }}.join();
  const auto events = TestFixture::read(out.str());
  ASSERT_EQ(events.size(), 8U);
  EXPECT_EQ(events[0].stream, 0U);
  EXPECT_EQ(events[2].stream, 1U);
  EXPECT_EQ(events[2].thread, 0U);
  EXPECT_EQ(events[4].stream, 0U);
  EXPECT_EQ(events[4].thread, 1U);
  EXPECT_EQ(events[6].stream, 2U) << "another thread's per-thread stream";
}

TYPED_TEST(logging, sees_what_stays_too) {
  std::ostringstream out;
  typename TestFixture::logging_type memory{holdfast::default_resource(TypeParam{}), out};
  typename TestFixture::any stays = memory.persistent();
  const auto s = TestFixture::drive::make_stream();
  void* const p = stays.allocate(s, 8, 8);
  memory.deallocate(s, memory.allocate(s, 9, 8), 9, 8);
  stays.deallocate(s, p, 8, 8);
  const auto events = TestFixture::read(out.str());
  ASSERT_EQ(events.size(), 4U) << out.str();
  EXPECT_EQ(events[1].pointer, 2U);
  EXPECT_EQ(events[3].pointer, 1U);
}

TYPED_TEST(logging, writes_files) {
  const std::string path = ::testing::TempDir() + "holdfast_trace_" + TypeParam::name + ".csv";
  const auto s = TestFixture::drive::make_stream();
  {
    typename TestFixture::logging_type memory{holdfast::malloc_resource<TypeParam>{}, path};
    memory.deallocate(s, memory.allocate(s, 8, 8), 8, 8);
    memory.flush();
    std::ifstream now{path};
    EXPECT_EQ(holdfast::read_trace(now).size(), 2U);
    memory.deallocate(s, memory.allocate(s, 8, 8), 8, 8);
  }
  std::ifstream in{path};
  EXPECT_EQ(holdfast::read_trace(in).size(), 4U);
  EXPECT_EQ(std::remove(path.c_str()), 0);
  try {
    const typename TestFixture::logging_type memory{holdfast::malloc_resource<TypeParam>{}, "/nowhere/trace.csv"};
    ADD_FAILURE() << "it was opened";
  } catch (const holdfast::logic_error& refused) {
    EXPECT_STREQ(refused.what(), "logging_resource: /nowhere/trace.csv cannot be written");
  }
}

/// Takes `room` characters, and then no more; counts flushes.
class full_disk : public std::streambuf {
 public:
  explicit full_disk(std::size_t room) : room_(room) {}
  int flushes = 0;

 protected:
  int_type overflow(int_type c) override {
    if (room_ == 0) return traits_type::eof();
    --room_;
    return traits_type::not_eof(c);
  }
  int sync() override { return ++flushes, 0; }

 private:
  std::size_t room_;
};

TYPED_TEST(logging, a_stream_that_fails_is_counted_and_fails_nobody) {
  for (const auto exceptions : {std::ios::goodbit, std::ios::badbit}) {
    full_disk disk{100};
    std::ostream out{&disk};
    out.exceptions(exceptions);
    typename TestFixture::logging_type memory{holdfast::malloc_resource<TypeParam>{}, out};
    EXPECT_EQ(memory.errors(), 0U) << "the header fits";
    const auto s = TestFixture::drive::make_stream();
    void* const p = memory.allocate(s, 100, 256);
    void* const q = memory.allocate(s, 100, 256);
    EXPECT_GE(memory.errors(), 1U);
    const std::uint64_t before = memory.errors();
    memory.deallocate(s, p, 100, 256);
    memory.deallocate(s, q, 100, 256);
    EXPECT_EQ(memory.errors(), before + 2);
  }
  std::ostream null{nullptr};
  typename TestFixture::logging_type memory{holdfast::malloc_resource<TypeParam>{}, null};
  EXPECT_EQ(memory.errors(), 1U);
  memory.flush();
  EXPECT_EQ(memory.errors(), 2U);
}

TYPED_TEST(logging, flushes_only_when_told) {
  const auto s = TestFixture::drive::make_stream();
  for (const bool each : {false, true}) {
    full_disk disk{SIZE_MAX};
    std::ostream out{&disk};
    typename TestFixture::logging_type memory{holdfast::malloc_resource<TypeParam>{}, out, {.flush_each_line = each}};
    memory.deallocate(s, memory.allocate(s, 8, 8), 8, 8);
    EXPECT_EQ(disk.flushes, each ? 3 : 0);
    memory.flush();
    EXPECT_EQ(disk.flushes, each ? 4 : 1);
  }
}

/// An upstream of one address. While it takes that back, somebody else gets it: `meanwhile` is called, once.
template <class Device>
struct quick_upstream {
  using stream_type = typename Device::stream_type;
  void* p;
  std::function<void()>* meanwhile;
  void* allocate(stream_type, std::size_t, std::size_t) { return p; }
  void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept {
    if (*meanwhile) std::exchange(*meanwhile, nullptr)();
  }
  bool operator==(const quick_upstream&) const = default;
};

TYPED_TEST(logging, writes_a_deallocation_before_others_get_the_address) {
  std::ostringstream out;
  std::byte byte{};
  std::function<void()> meanwhile;
  typename TestFixture::any upstream{quick_upstream<TypeParam>{&byte, &meanwhile}, TypeParam{}};
  typename TestFixture::logging_type memory{upstream, out};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 1, 1);
  meanwhile = [&] { static_cast<void>(memory.allocate(s, 1, 1)); };
  memory.deallocate(s, p, 1, 1);
  memory.deallocate(s, p, 1, 1);
  const auto events = TestFixture::read(out.str());
  ASSERT_EQ(events.size(), 4U) << out.str();
  EXPECT_EQ(events[1].op, trace_op::deallocate);
  EXPECT_EQ(events[1].pointer, 1U);
  EXPECT_EQ(events[2].pointer, 2U);
  EXPECT_EQ(events[3].pointer, 2U);
}

TYPED_TEST(logging, its_order_is_possible_among_threads) {
  std::ostringstream out;
  typename TestFixture::logging_type memory{holdfast::vmm_resource<TypeParam>{}, out};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([memory]() mutable {
      const auto s = TestFixture::drive::make_stream();
      for (int round = 0; round < 100; ++round) memory.deallocate(s, memory.allocate(s, 100, 64), 100, 64);
    });
  }
  for (std::thread& one : threads) one.join();
  std::set<std::uint64_t> live;
  std::set<std::uint32_t> seen;
  for (const trace_event& event : TestFixture::read(out.str())) {
    seen.insert(event.thread);
    if (event.op == trace_op::allocate) {
      EXPECT_TRUE(live.insert(event.pointer).second);
    } else {
      EXPECT_EQ(live.erase(event.pointer), 1U) << "an address was given out before its deallocation was written";
    }
  }
  EXPECT_TRUE(live.empty());
  EXPECT_EQ(memory.errors(), 0U);
}

// --- reading ---------------------------------------------------------------------------------------------------------

std::string refusal(const std::string& text) {
  std::istringstream in{text};
  try {
    return std::to_string(holdfast::read_trace(in).size()) + " events";
  } catch (const holdfast::logic_error& refused) {
    return refused.what();
  }
}

TEST(read_trace, refuses_what_is_no_trace) {
  EXPECT_EQ(refusal(""), "read_trace: '# holdfast trace 1' expected, not ''");
  EXPECT_EQ(refusal("# holdfast trace 2\n"), "read_trace: '# holdfast trace 1' expected, not '# holdfast trace 2'");
  EXPECT_EQ(refusal("# holdfast trace 1\ntime\n"),
            "read_trace: 'time_ns,op,pointer,bytes,alignment,stream,thread,ok' expected, not 'time'");
  EXPECT_EQ(refusal(header), "0 events");
  const std::string good = header + std::string{"1,allocate,1,8,8,0,0,1\n"};
  EXPECT_EQ(refusal(good), "1 events");
  for (const char* const bad :
       {"", "1", "x,allocate,1,8,8,0,0,1", "1,allocat,1,8,8,0,0,1", "1,allocate,1,8,8,0,0", "1,allocate,1,8,8,0,0,2",
        "1,allocate,1,8,8,0,0,1,", "1,allocate,1,8,8,0,0,1 ", "1,allocate,,8,8,0,0,1", "1,allocate,-1,8,8,0,0,1",
        "1,allocate,99999999999999999999,8,8,0,0,1"}) {
    EXPECT_EQ(refusal(good + bad + "\n"), "read_trace: line 4 is no event: '" + std::string{bad} + "'");
  }
}

TEST(read_trace, leaves_out_a_last_line_that_was_cut) {
  EXPECT_EQ(refusal(header + std::string{"1,allocate,1,8,8,0,0,1\n2,deallocate,1,8,8,0,0,1"}), "1 events");
}

}  // namespace
