// any_resource: what it adds to what it holds.
#include "support/resources.hpp"

#include <holdfast/memory_resource.hpp>

#include <gtest/gtest.h>

#include <concepts>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

template <class Device>
class any_resource : public support::device_test<Device> {};
TYPED_TEST_SUITE(any_resource, support::both_devices, support::device_names);

TYPED_TEST(any_resource, asks_nobody_for_zero_bytes) {
  support::counting_resource<TypeParam> witness;
  holdfast::any_resource<TypeParam> any{witness};
  const auto s = support::driver<TypeParam>::make_stream();
  EXPECT_EQ(any.allocate(s, 0, 256), nullptr);
  any.deallocate(s, nullptr, 0, 256);
  EXPECT_EQ(witness.allocations(), 0U);
  EXPECT_EQ(witness.deallocations(), 0U);
}

TYPED_TEST(any_resource, asks_nobody_for_what_it_refuses) {
  support::counting_resource<TypeParam> witness;
  holdfast::any_resource<TypeParam> any{witness};
  const auto s = support::driver<TypeParam>::make_stream();
  EXPECT_THROW(static_cast<void>(any.allocate(s, 8, 48)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(any.allocate(s, SIZE_MAX - 5, 1)), holdfast::out_of_memory);
  EXPECT_THROW(static_cast<void>(any.allocate(s, SIZE_MAX - 5, 4096)), holdfast::out_of_memory);
  support::driver<TypeParam>::begin_capture(s);
  EXPECT_THROW(static_cast<void>(any.allocate(s, 8, 8)), holdfast::logic_error);
  static_cast<void>(support::driver<TypeParam>::end_capture(s));
  EXPECT_EQ(witness.allocations(), 0U);
}

TYPED_TEST(any_resource, passes_bytes_and_alignment_on_as_they_are) {
  support::counting_resource<TypeParam> witness;
  holdfast::any_resource<TypeParam> any{witness};
  const auto s = support::driver<TypeParam>::make_stream();
  void* const p = any.allocate(s, 32, 32);
  ASSERT_EQ(witness.requests().size(), 1U);
  EXPECT_EQ(witness.requests()[0].bytes, 32U);
  EXPECT_EQ(witness.requests()[0].alignment, 32U);
  any.deallocate(s, p, 32, 32);
  EXPECT_EQ(witness.mistakes(), 0U);
  EXPECT_EQ(witness.live_bytes(), 0U);
}

TYPED_TEST(any_resource, extends_only_what_can) {
  const support::counting_resource<TypeParam> plain;
  holdfast::any_resource<TypeParam> any{plain};
  EXPECT_FALSE(any.extensible());
  const auto s = support::driver<TypeParam>::make_stream();
  void* const p = any.allocate(s, 32, 32);
  EXPECT_FALSE(any.extend(s, p, 32, 64));
  any.deallocate(s, p, 32, 32);

  support::growing_resource<TypeParam> growing{holdfast::malloc_resource<TypeParam>{}, 4096};
  any = growing;
  EXPECT_TRUE(any.extensible());
  void* const q = any.allocate(s, 32, 32);
  EXPECT_TRUE(any.extend(s, q, 32, 4096));
  EXPECT_FALSE(any.extend(s, q, 4096, 4097));
  any.deallocate(s, q, 4096, 32);
  EXPECT_EQ(growing.mistakes(), 0U);
}

TYPED_TEST(any_resource, names_what_it_holds) {
  EXPECT_STREQ(holdfast::any_resource<TypeParam>{support::counting_resource<TypeParam>{}}.name(), "counting_resource");
  const holdfast::any_resource<TypeParam> foreign{support::foreign_pool<TypeParam>{}, TypeParam{}};
  EXPECT_STREQ(foreign.name(), "resource");
}

TYPED_TEST(any_resource, keeps_the_pool_alive) {
  struct pool {
    using stream_type = typename TypeParam::stream_type;
    std::shared_ptr<int> life = std::make_shared<int>();
    void* allocate(stream_type, std::size_t, std::size_t) { return life.get(); }
    void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept {}
    bool operator==(const pool&) const = default;
  };
  std::weak_ptr<int> life;
  std::optional<holdfast::any_resource<TypeParam>> any;
  {
    const pool mine;
    life = mine.life;
    any.emplace(mine, TypeParam{});
  }
  auto copy = *any;
  any.reset();
  EXPECT_FALSE(life.expired());
  copy = holdfast::any_resource<TypeParam>{pool{}, TypeParam{}};
  EXPECT_TRUE(life.expired());
}

TYPED_TEST(any_resource, is_a_value_in_containers) {
  using any = holdfast::any_resource<TypeParam>;
  const any one{support::counting_resource<TypeParam>{}};
  std::map<int, any> by_number;
  by_number.try_emplace(1, one);
  std::tuple<any&&> moved{any{one}};
  const std::tuple<any, int> packed{one, 1};
  const std::vector<any> many(3, one);
  EXPECT_TRUE(by_number.at(1) == one);
  EXPECT_TRUE(std::get<0>(packed) == many[2]);
  static_cast<void>(moved);
}

/// A policy: made from any resource, and a resource itself.
template <class Device>
struct policy {
  using stream_type = typename Device::stream_type;
  explicit policy(holdfast::any_resource<Device> up) : upstream(std::move(up)) {}
  void* allocate(stream_type s, std::size_t n, std::size_t a) { return upstream.allocate(s, n, a); }
  void deallocate(stream_type s, void* p, std::size_t n, std::size_t a) noexcept { upstream.deallocate(s, p, n, a); }
  Device device() const { return upstream.device(); }
  bool operator==(const policy&) const = default;
  holdfast::any_resource<Device> upstream;
};

TYPED_TEST(any_resource, holds_policies_that_are_made_from_it) {
  static_assert(holdfast::memory_resource<policy<TypeParam>>);
  const holdfast::any_resource<TypeParam> inner{support::counting_resource<TypeParam>{}};
  const holdfast::any_resource<TypeParam> outer{policy<TypeParam>{inner}};
  EXPECT_TRUE(outer == holdfast::any_resource<TypeParam>{policy<TypeParam>{inner}});
  EXPECT_FALSE(outer == inner);
}

struct no_resource {
  using stream_type = holdfast::host::stream_ref;
};
struct throwing_free {
  using stream_type = holdfast::host::stream_ref;
  void* allocate(stream_type, std::size_t, std::size_t);
  void deallocate(stream_type, void*, std::size_t, std::size_t);
  bool operator==(const throwing_free&) const = default;
  holdfast::host_device device() const;
};
static_assert(!holdfast::memory_resource<no_resource>);
static_assert(!holdfast::memory_resource<throwing_free>);
static_assert(!std::convertible_to<throwing_free, holdfast::any_resource<holdfast::host_device>>);
static_assert(!std::convertible_to<holdfast::async_resource, holdfast::any_resource<holdfast::host_device>>);
static_assert(std::regular<holdfast::cuda_device> &&
              !std::default_initializable<holdfast::any_resource<holdfast::cuda_device>>);

}  // namespace
