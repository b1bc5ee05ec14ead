// failing_resource: the calls that shall fail do, the others don't.
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/failing.hpp>
#include <holdfast/resource/vmm.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace {

template <class Device>
class failing : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using any = holdfast::any_resource<Device>;
  using failing_type = holdfast::failing_resource<Device>;

  /// Which of `calls` allocations fail, by number.
  static std::vector<int> failures(failing_type& memory, int calls) {
    const auto s = drive::make_stream();
    std::vector<int> failed;
    for (int call = 1; call <= calls; ++call) {
      try {
        memory.deallocate(s, memory.allocate(s, 8, 8), 8, 8);
      } catch (const holdfast::out_of_memory& shortage) {
        EXPECT_EQ(shortage.requested(), 8U);
        failed.push_back(call);
      }
    }
    return failed;
  }
};
TYPED_TEST_SUITE(failing, support::both_devices, support::device_names);

using numbers = std::vector<int>;

TYPED_TEST(failing, fails_as_planned) {
  support::counting_resource<TypeParam> witness;
  typename TestFixture::failing_type memory{witness};
  EXPECT_EQ(this->failures(memory, 20), numbers{});
  memory.fail({.nth = 3});
  EXPECT_EQ(this->failures(memory, 20), numbers{3});
  memory.fail({.every = 4});
  EXPECT_EQ(this->failures(memory, 13), (numbers{4, 8, 12}));
  memory.fail({.nth = 1, .every = 3});
  EXPECT_EQ(this->failures(memory, 7), (numbers{1, 3, 6}));
  EXPECT_EQ(memory.calls(), 7U);
  EXPECT_EQ(memory.failures(), 7U);
  memory.fail({.every = 1, .allocate = false});
  EXPECT_EQ(this->failures(memory, 5), numbers{});
  EXPECT_EQ(memory.calls(), 0U);
  EXPECT_EQ(witness.allocations(), 20U + 20 + 13 + 7 + 5 - 7) << "failed calls reached the upstream";
  EXPECT_EQ(witness.live_bytes(), 0U);
}

TYPED_TEST(failing, draws_the_same_from_the_same_seed) {
  typename TestFixture::failing_type memory{support::counting_resource<TypeParam>{}, {.probability = 0.25, .seed = 1}};
  const numbers first = this->failures(memory, 1000);
  EXPECT_GT(first.size(), 200U);
  EXPECT_LT(first.size(), 300U);
  memory.fail({.probability = 0.25, .seed = 1});
  EXPECT_EQ(this->failures(memory, 1000), first);
  memory.fail({.probability = 0.25, .seed = 2});
  EXPECT_NE(this->failures(memory, 1000), first);
  memory.fail({.probability = 1, .seed = 0});
  EXPECT_EQ(this->failures(memory, 100).size(), 100U);
  memory.fail({.probability = 0, .seed = 0});
  EXPECT_EQ(this->failures(memory, 100), numbers{});
}

TYPED_TEST(failing, extensions_fail_as_if_there_were_no_room) {
  support::growing_resource<TypeParam> witness{holdfast::malloc_resource<TypeParam>{}, 1024};
  typename TestFixture::failing_type memory{witness, {.every = 2}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 8, 8);
  EXPECT_FALSE(memory.extend(s, p, 8, 16)) << "the second call";
  EXPECT_EQ(witness.extends(), 0U);
  EXPECT_TRUE(memory.extend(s, p, 8, 16));
  memory.fail({.every = 1, .extend = false});
  EXPECT_TRUE(memory.extend(s, p, 16, 32));
  EXPECT_EQ(memory.calls(), 0U);
  memory.fail({.every = 1, .allocate = false});
  EXPECT_FALSE(memory.extend(s, p, 32, 64));
  memory.deallocate(s, p, 32, 8);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TYPED_TEST(failing, resuming_fails_when_asked) {
  const std::size_t granule = TypeParam{}.granularity();
  typename TestFixture::failing_type memory{holdfast::vmm_resource<TypeParam>{}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, granule, 256);
  memory.decommit(s, p, granule);
  memory.fail({.nth = 1, .recommit = true});
  EXPECT_THROW(memory.recommit(s, p, granule), holdfast::out_of_memory);
  memory.recommit(s, p, granule);
  memory.fail({.every = 1});
  memory.decommit(s, p, granule);
  memory.recommit(s, p, granule);
  memory.deallocate(s, p, granule, 256);
}

TYPED_TEST(failing, what_the_rules_refuse_has_no_number) {
  typename TestFixture::failing_type memory{support::counting_resource<TypeParam>{}, {.nth = 1}};
  const auto s = TestFixture::drive::make_stream();
  EXPECT_EQ(memory.allocate(s, 0, 8), nullptr);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 8, 3)), holdfast::logic_error);
  int foreign = 0;
  EXPECT_FALSE(memory.extend(s, &foreign, 4, 8)) << "what is below cannot extend";
  EXPECT_EQ(memory.calls(), 0U);
  EXPECT_EQ(this->failures(memory, 3), numbers{1});
}

TYPED_TEST(failing, what_stays_fails_too) {
  typename TestFixture::failing_type memory{holdfast::default_resource(TypeParam{}), {.nth = 2}};
  typename TestFixture::any stays = memory.persistent();
  const auto s = TestFixture::drive::make_stream();
  memory.deallocate(s, memory.allocate(s, 8, 8), 8, 8);
  EXPECT_THROW(static_cast<void>(stays.allocate(s, 8, 8)), holdfast::out_of_memory);
  EXPECT_EQ(memory.failures(), 1U);
}

TYPED_TEST(failing, numbers_every_call_once_among_threads) {
  typename TestFixture::failing_type memory{holdfast::malloc_resource<TypeParam>{}, {.every = 5}};
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back(
        [&, mine = memory]() mutable { failed += static_cast<int>(this->failures(mine, 100).size()); });
  }
  for (std::thread& one : threads) one.join();
  EXPECT_EQ(failed, 80);
  EXPECT_EQ(memory.calls(), 400U);
}

}  // namespace
