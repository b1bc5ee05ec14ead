// tracking_resource: the books, the owners, the mistakes, and that nothing escapes them.
#include "support/resources.hpp"

#include <holdfast/block.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/tracking.hpp>
#include <holdfast/resource/vmm.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using holdfast::owner_scope;

template <class Device>
class tracking : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using any = holdfast::any_resource<Device>;
  using tracking_type = holdfast::tracking_resource<Device>;
  using counting_type = support::counting_resource<Device>;
};
TYPED_TEST_SUITE(tracking, support::both_devices, support::device_names);

bool says(const std::string& report, const std::string& text) { return report.find(text) != std::string::npos; }

TYPED_TEST(tracking, knows_what_is_live_and_was) {
  typename TestFixture::tracking_type memory{holdfast::malloc_resource<TypeParam>{}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 100, 256);
  void* const q = memory.allocate(s, 300, 16);
  const auto live = memory.live();
  ASSERT_EQ(live.size(), 2U);
  EXPECT_EQ(live[0].data, q) << "the largest first";
  EXPECT_EQ(live[0].bytes, 300U);
  EXPECT_EQ(live[0].alignment, 16U);
  EXPECT_TRUE(live[0].stream == s.get());
  EXPECT_EQ(live[0].sequence, 2U);
  EXPECT_EQ(live[1].data, p);
  EXPECT_EQ(live[1].sequence, 1U);
  memory.deallocate(s, p, 100, 256);
  memory.deallocate(s, memory.allocate(s, 50, 16), 50, 16);
  const auto counts = memory.counts();
  EXPECT_EQ(counts.live, 1U);
  EXPECT_EQ(counts.live_bytes, 300U);
  EXPECT_EQ(counts.peak_bytes, 400U);
  EXPECT_EQ(counts.peak_live, 2U);
  EXPECT_EQ(counts.allocations, 3U);
  EXPECT_EQ(counts.deallocations, 2U);
  EXPECT_EQ(counts.mistakes, 0U);
  memory.deallocate(s, q, 300, 16);
  EXPECT_EQ(memory.live_bytes(), 0U);
}

TYPED_TEST(tracking, failed_allocations_leave_no_trace) {
  typename TestFixture::counting_type witness;
  witness.fail();
  typename TestFixture::tracking_type memory{witness};
  const auto s = TestFixture::drive::make_stream();
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 8, 8)), holdfast::out_of_memory);
  EXPECT_EQ(memory.counts().allocations, 0U);
  EXPECT_EQ(memory.peak_bytes(), 0U);
}

// --- owners ----------------------------------------------------------------------------------------------------------

TYPED_TEST(tracking, reports_owners_the_largest_first) {
  typename TestFixture::tracking_type memory{holdfast::malloc_resource<TypeParam>{}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 64, 256);
  void* q = nullptr;
  void* r = nullptr;
  {
    const owner_scope outer{"kv scratch"};
    {
      const owner_scope inner{"logits"};
      q = memory.allocate(s, 4096, 256);
    }
    r = memory.allocate(s, 512, 256);
  }
  const std::string report = memory.report();
  EXPECT_TRUE(says(report, "tracking_resource: 3 live allocations, 4672 bytes (peak 4672 bytes), 0 mistakes\n"))
      << report;
  const auto first = report.find("4096 bytes by \"logits\": #2, 0x");
  const auto second = report.find("512 bytes by \"kv scratch\": #3, 0x");
  const auto third = report.find("64 bytes by nobody: #1, 0x");
  EXPECT_TRUE(first < second && second < third && third != std::string::npos) << report;
  memory.deallocate(s, p, 64, 256);
  memory.deallocate(s, q, 4096, 256);
  EXPECT_TRUE(says(memory.report(), "1 live allocation, 512 bytes")) << memory.report();
  memory.deallocate(s, r, 512, 256);
}

TEST(owner_scope, is_its_threads_own) {
  const owner_scope mine{"mine"};
  std::thread{[] {
    EXPECT_EQ(owner_scope::current(), "");
    const owner_scope theirs{"theirs"};
    EXPECT_EQ(owner_scope::current(), "theirs");
  }}.join();
  EXPECT_EQ(owner_scope::current(), "mine");
}

TYPED_TEST(tracking, sees_what_buffers_take_for_good_under_their_owners) {
  typename TestFixture::tracking_type memory{holdfast::default_resource(TypeParam{})};
  const auto s = TestFixture::drive::make_stream();
  std::optional<holdfast::padded_query_buffer<float, TypeParam>> buffer;
  {
    const owner_scope owner{"queries"};
    buffer.emplace(memory, holdfast::query_shape{.heads = 3, .padded_heads = 8, .head_dim = 16});
    buffer->reserve(4);
  }
  EXPECT_TRUE(says(memory.report(), "by \"queries\"")) << memory.report();
  const std::size_t before = memory.live_bytes();
  buffer->reserve(1000);
  EXPECT_GT(memory.live_bytes(), before);
  EXPECT_EQ(memory.counts().allocations, 1U) << "it grew where it is";
  buffer->suspend(holdfast::quiescent);
  buffer->resume();
  buffer.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return memory.live_bytes() == 0;
  }));
  EXPECT_EQ(memory.mistakes(), 0U) << memory.report();
}

// --- leaks -----------------------------------------------------------------------------------------------------------

TYPED_TEST(tracking, tells_of_leaks_once_when_the_last_handle_goes) {
  typename TestFixture::counting_type witness;
  const auto s = TestFixture::drive::make_stream();
  std::vector<std::string> told;
  void* p = nullptr;
  {
    std::optional<typename TestFixture::any> stays;
    {
      typename TestFixture::tracking_type memory{witness,
                                                 {.on_leak = [&](const std::string& r) { told.push_back(r); }}};
      const owner_scope owner{"the leaky one"};
      p = memory.allocate(s, 77, 256);
      stays = memory.persistent();
    }
    EXPECT_TRUE(told.empty()) << "a handle is left";
  }
  ASSERT_EQ(told.size(), 1U);
  EXPECT_TRUE(says(told[0], "77 bytes by \"the leaky one\"")) << told[0];
  witness.deallocate(s, p, 77, 256);
}

TYPED_TEST(tracking, tells_nothing_without_leaks_and_survives_who_throws) {
  const auto s = TestFixture::drive::make_stream();
  int told = 0;
  typename TestFixture::counting_type witness;
  const holdfast::tracking_options options{.on_leak = [&](const std::string&) {
    ++told;
    throw std::runtime_error{"no"};
  }};
  {
    typename TestFixture::tracking_type memory{witness, options};
    memory.deallocate(s, memory.allocate(s, 8, 8), 8, 8);
  }
  EXPECT_EQ(told, 0);
  void* p = nullptr;
  {
    typename TestFixture::tracking_type memory{witness, options};
    p = memory.allocate(s, 8, 8);
  }
  EXPECT_EQ(told, 1);
  witness.deallocate(s, p, 8, 8);
}

// --- mistakes --------------------------------------------------------------------------------------------------------

TYPED_TEST(tracking, passes_no_wrong_deallocation_on) {
  typename TestFixture::counting_type witness;
  typename TestFixture::tracking_type memory{witness};
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* p = nullptr;
  {
    const owner_scope owner{"victim"};
    p = memory.allocate(s, 100, 256);
  }
  const auto expect = [&](std::uint64_t mistakes, const std::string& text) {
    EXPECT_EQ(memory.mistakes(), mistakes);
    EXPECT_TRUE(says(memory.report(), text)) << memory.report();
    EXPECT_EQ(witness.deallocations(), 0U) << text;
    EXPECT_EQ(memory.live_bytes(), 100U) << text;
  };
  memory.deallocate(s, p, 101, 256);
  expect(1, "100 bytes by \"victim\": #1, given back with another size (101 bytes)");
  memory.deallocate(s, p, 100, 128);
  expect(2, "100 bytes by \"victim\": #1, given back with another alignment");
  memory.deallocate(t, p, 100, 256);
  expect(3, "100 bytes by \"victim\": #1, given back on another stream");
  memory.deallocate(s, static_cast<std::byte*>(p) + 16, 84, 16);
  expect(4, "not of this resource, given back");

  memory.deallocate(s, p, 100, 256);
  EXPECT_EQ(witness.deallocations(), 1U);
  EXPECT_EQ(memory.mistakes(), 4U);
  memory.deallocate(s, p, 100, 256);
  EXPECT_EQ(witness.deallocations(), 1U) << "a double free";
  EXPECT_EQ(memory.mistakes(), 5U);
  EXPECT_TRUE(says(memory.report(), "100 bytes by \"victim\": #1, freed before, given back")) << memory.report();
}

TYPED_TEST(tracking, keeps_what_stays_and_the_rest_apart) {
  typename TestFixture::tracking_type memory{holdfast::default_resource(TypeParam{})};
  const typename TestFixture::any calls{memory};
  typename TestFixture::any stays = calls.persistent();
  EXPECT_FALSE(stays == calls);
  EXPECT_TRUE(stays == calls.persistent());
  EXPECT_TRUE(stays == stays.persistent());
  const auto s = TestFixture::drive::make_stream();
  void* const p = stays.allocate(s, 100, 256);
  EXPECT_EQ(memory.live_bytes(), 100U);
  memory.deallocate(s, p, 100, 256);
  EXPECT_EQ(memory.mistakes(), 1U);
  EXPECT_TRUE(says(memory.report(), "given back to another resource")) << memory.report();
  stays.deallocate(s, p, 100, 256);
  EXPECT_EQ(memory.live_bytes(), 0U);
  EXPECT_EQ(memory.mistakes(), 1U);
}

TYPED_TEST(tracking, a_reused_address_is_no_double_free) {
  typename TestFixture::tracking_type memory{holdfast::vmm_resource<TypeParam>{}};
  const auto s = TestFixture::drive::make_stream();
  void* p = nullptr;
  for (int i = 0; i < 1500; ++i) {  // more than it remembers
    p = memory.allocate(s, 64, 64);
    memory.deallocate(s, p, 64, 64);
  }
  EXPECT_EQ(memory.mistakes(), 0U) << memory.report();
  EXPECT_EQ(memory.counts().deallocations, 1500U);
  memory.deallocate(s, p, 64, 64);
  EXPECT_TRUE(says(memory.report(), "#1500, freed before")) << memory.report();
}

TYPED_TEST(tracking, forgets_old_frees) {
  typename TestFixture::counting_type witness;
  typename TestFixture::tracking_type memory{witness};
  const auto s = TestFixture::drive::make_stream();
  std::vector<void*> all(1025);
  for (void*& p : all) p = memory.allocate(s, 16, 16);
  for (void* const p : all) memory.deallocate(s, p, 16, 16);
  memory.deallocate(s, all[0], 16, 16);
  EXPECT_TRUE(says(memory.report(), "not of this resource")) << memory.report();
  memory.deallocate(s, all[1], 16, 16);
  EXPECT_TRUE(says(memory.report(), "#2, freed before")) << memory.report();
  EXPECT_EQ(witness.mistakes(), 0U);
}

TYPED_TEST(tracking, counts_mistakes_without_end_but_remembers_64) {
  typename TestFixture::tracking_type memory{holdfast::malloc_resource<TypeParam>{}};
  const auto s = TestFixture::drive::make_stream();
  int foreign = 0;
  for (int i = 0; i < 70; ++i) memory.deallocate(s, &foreign, 4, 4);
  EXPECT_EQ(memory.mistakes(), 70U);
  EXPECT_TRUE(says(memory.report(), "and 6 mistakes more")) << memory.report();
}

/// An upstream that gives what the test says.
template <class Device>
struct scripted {
  using stream_type = typename Device::stream_type;
  void** next;
  void* allocate(stream_type, std::size_t, std::size_t) { return *next; }
  void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept {}
  bool operator==(const scripted&) const = default;
};

TYPED_TEST(tracking, notices_addresses_that_the_upstream_gives_twice) {
  std::byte bytes[16];
  void* next = bytes;
  typename TestFixture::tracking_type memory{typename TestFixture::any{scripted<TypeParam>{&next}, TypeParam{}}};
  const auto s = TestFixture::drive::make_stream();
  static_cast<void>(memory.allocate(s, 8, 8));
  void* const p = memory.allocate(s, 16, 8);
  EXPECT_EQ(memory.mistakes(), 1U);
  EXPECT_EQ(memory.live_bytes(), 16U);
  memory.deallocate(s, p, 16, 8);
  EXPECT_EQ(memory.live_bytes(), 0U);
}

TYPED_TEST(tracking, remembers_the_latest_free_of_an_address_that_came_again) {
  std::vector<std::byte> bytes(1025);
  void* next = nullptr;
  typename TestFixture::tracking_type memory{typename TestFixture::any{scripted<TypeParam>{&next}, TypeParam{}}};
  const auto s = TestFixture::drive::make_stream();
  const auto use = [&](std::size_t i) {
    next = &bytes[i];
    memory.deallocate(s, memory.allocate(s, 1, 1), 1, 1);
  };
  use(0);
  use(0);
  for (std::size_t i = 1; i < 1024; ++i) use(i);  // the first free of all is forgotten
  memory.deallocate(s, &bytes[0], 1, 1);
  EXPECT_TRUE(says(memory.report(), "#2, freed before")) << memory.report();
  use(1024);
  memory.deallocate(s, &bytes[0], 1, 1);
  EXPECT_TRUE(says(memory.report(), "not of this resource")) << memory.report();
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

TYPED_TEST(tracking, lets_others_have_an_address_while_the_upstream_takes_it_back) {
  std::byte byte{};
  std::function<void()> meanwhile;
  typename TestFixture::any upstream{quick_upstream<TypeParam>{&byte, &meanwhile}, TypeParam{}};
  typename TestFixture::tracking_type memory{upstream};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 1, 1);
  meanwhile = [&] { static_cast<void>(memory.allocate(s, 2, 1)); };
  memory.deallocate(s, p, 1, 1);
  EXPECT_EQ(memory.live_bytes(), 2U);
  memory.deallocate(s, p, 2, 1);
  EXPECT_EQ(memory.live_bytes(), 0U);
  EXPECT_EQ(memory.mistakes(), 0U) << memory.report();
}

TYPED_TEST(tracking, finds_nothing_wrong_with_a_pool_over_it) {
  typename TestFixture::tracking_type memory{holdfast::malloc_resource<TypeParam>{}};
  {
    holdfast::caching_resource<TypeParam> pool{memory};
    const auto s = TestFixture::drive::make_stream();
    const auto t = TestFixture::drive::make_stream();
    for (const std::size_t bytes : {100U, 5000U, 3U << 20, 9U << 20}) {
      for (const auto stream : {s.get(), t.get()}) {
        pool.deallocate(stream, pool.allocate(stream, bytes, 256), bytes, 256);
        pool.release(stream);
      }
    }
    TestFixture::drive::synchronize(s);
    TestFixture::drive::synchronize(t);
    EXPECT_GT(memory.live_bytes(), 0U);
    pool.trim();
  }
  EXPECT_EQ(memory.live_bytes(), 0U) << memory.report();
  EXPECT_EQ(memory.mistakes(), 0U) << memory.report();
}

// --- growth, suspension ----------------------------------------------------------------------------------------------

TYPED_TEST(tracking, follows_growth_in_place) {
  support::growing_resource<TypeParam> witness{holdfast::malloc_resource<TypeParam>{}, 1024};
  typename TestFixture::tracking_type memory{witness};
  const auto s = TestFixture::drive::make_stream();
  const auto other = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 100, 256);
  EXPECT_TRUE(memory.extend(other, p, 100, 1000)) << "the library's stream may differ";
  EXPECT_EQ(memory.live_bytes(), 1000U);
  EXPECT_FALSE(memory.extend(s, p, 1000, 2000));
  EXPECT_EQ(memory.live_bytes(), 1000U);
  EXPECT_EQ(memory.mistakes(), 0U);

  EXPECT_FALSE(memory.extend(s, p, 100, 1024)) << "another size";
  EXPECT_EQ(memory.mistakes(), 1U);
  EXPECT_FALSE(memory.extend(s, static_cast<std::byte*>(p) + 8, 100, 1024)) << "another pointer";
  EXPECT_EQ(memory.mistakes(), 2U);
  EXPECT_EQ(witness.extends(), 2U) << "wrong ones were passed on";

  memory.deallocate(s, p, 1000, 256);
  EXPECT_EQ(memory.peak_bytes(), 1000U);
  EXPECT_EQ(memory.mistakes(), 2U);
}

TYPED_TEST(tracking, stacks_have_the_features_of_what_is_below) {
  const auto s = TestFixture::drive::make_stream();
  typename TestFixture::any plain = support::policies<TypeParam>(holdfast::malloc_resource<TypeParam>{});
  EXPECT_FALSE(plain.extensible());
  EXPECT_FALSE(plain.suspendable());
  EXPECT_FALSE(plain.omits_tails());
  void* const p = plain.allocate(s, 8, 8);
  EXPECT_FALSE(plain.extend(s, p, 8, 16));
  EXPECT_THROW(plain.decommit(s, p, 8), holdfast::logic_error);
  EXPECT_THROW(plain.recommit(s, p, 8), holdfast::logic_error);
  plain.deallocate(s, p, 8, 8);

  const std::size_t granule = TypeParam{}.granularity();
  typename TestFixture::any rich = support::policies<TypeParam>(holdfast::vmm_resource<TypeParam>{});
  EXPECT_TRUE(rich.extensible());
  EXPECT_TRUE(rich.suspendable());
  void* const q = rich.allocate(s, granule, 256);
  EXPECT_TRUE(rich.extend(s, q, granule, 3 * granule));
  rich.decommit(s, q, 3 * granule);
  rich.recommit(s, q, 3 * granule);
  rich.deallocate(s, q, 3 * granule, 256);

  const holdfast::guard_resource<TypeParam> bare{TypeParam{}, {.omit_tails = true}};
  EXPECT_TRUE(typename TestFixture::any{support::policies<TypeParam>(bare)}.omits_tails());

  const typename TestFixture::any split = support::policies<TypeParam>(holdfast::default_resource(TypeParam{}));
  EXPECT_FALSE(split.extensible());
  EXPECT_TRUE(split.persistent().extensible());
  EXPECT_TRUE(split.persistent().suspendable());
  EXPECT_STREQ(split.persistent().name(), "tracking_resource");
}

TYPED_TEST(tracking, frees_on_capturing_streams_change_nothing) {
  typename TestFixture::tracking_type memory{holdfast::malloc_resource<TypeParam>{}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 8, 8);
  TestFixture::drive::begin_capture(s);
  memory.deallocate(s, p, 8, 8);
  static_cast<void>(TestFixture::drive::end_capture(s));
  EXPECT_EQ(memory.live_bytes(), 8U);
  memory.deallocate(s, p, 8, 8);
  EXPECT_EQ(memory.live_bytes(), 0U);
  EXPECT_EQ(memory.mistakes(), 0U);
}

TYPED_TEST(tracking, keeps_its_books_among_threads) {
  typename TestFixture::tracking_type memory{holdfast::malloc_resource<TypeParam>{}};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([memory, i]() mutable {
      const owner_scope owner{std::to_string(i)};
      const auto s = TestFixture::drive::make_stream();
      for (int round = 0; round < 200; ++round) {
        void* const p = memory.allocate(s, 100, 64);
        if (round % 50 == 0) static_cast<void>(memory.report());
        memory.deallocate(s, p, 100, 64);
        TestFixture::drive::synchronize(s);
      }
    });
  }
  for (std::thread& one : threads) one.join();
  const auto counts = memory.counts();
  EXPECT_EQ(counts.allocations, 800U);
  EXPECT_EQ(counts.deallocations, 800U);
  EXPECT_EQ(counts.live_bytes, 0U);
  EXPECT_LE(counts.peak_bytes, 400U);
  EXPECT_EQ(counts.mistakes, 0U);
}

}  // namespace
