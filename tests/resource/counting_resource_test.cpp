// The doubles do what other tests rely on.
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace {

template <class Device>
class counting_resource : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  static std::vector<std::byte> read(const void* p, std::size_t n) {
    return drive::read(static_cast<const std::byte*>(p), n);
  }
};
TYPED_TEST_SUITE(counting_resource, support::both_devices, support::device_names);

TYPED_TEST(counting_resource, counts) {
  support::counting_resource<TypeParam> witness;
  auto copy = witness;
  const auto s = TestFixture::drive::make_stream();
  void* const p = copy.allocate(s, 100, 256);
  void* const q = copy.allocate(s, 50, 16);
  EXPECT_EQ(witness.allocations(), 2U);
  EXPECT_EQ(witness.live_bytes(), 150U);
  EXPECT_TRUE(witness.is_live(static_cast<std::byte*>(p) + 99));
  copy.deallocate(s, p, 100, 256);
  EXPECT_EQ(witness.deallocations(), 1U);
  EXPECT_EQ(witness.live_bytes(), 50U);
  EXPECT_EQ(witness.peak_bytes(), 150U);
  EXPECT_EQ(witness.live_count(), 1U);
  EXPECT_FALSE(witness.is_live(p));
  copy.deallocate(s, q, 50, 16);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TYPED_TEST(counting_resource, notices_mistakes) {
  support::counting_resource<TypeParam> witness;
  const auto s = TestFixture::drive::make_stream();
  const auto t = TestFixture::drive::make_stream();
  void* const p = witness.allocate(s, 100, 256);
  witness.deallocate(t, p, 100, 256);
  EXPECT_EQ(witness.mistakes(), 1U) << "another stream";
  witness.deallocate(s, p, 100, 256);
  EXPECT_EQ(witness.mistakes(), 2U) << "a double free";
}

TYPED_TEST(counting_resource, fails_when_told) {
  support::counting_resource<TypeParam> witness;
  const auto s = TestFixture::drive::make_stream();
  witness.fail(1, 2);
  void* const first = witness.allocate(s, 8, 8);
  EXPECT_THROW(static_cast<void>(witness.allocate(s, 8, 8)), holdfast::out_of_memory);
  EXPECT_THROW(static_cast<void>(witness.allocate(s, 8, 8)), holdfast::out_of_memory);
  void* const last = witness.allocate(s, 8, 8);
  EXPECT_EQ(witness.live_count(), 2U);
  witness.deallocate(s, first, 8, 8);
  witness.deallocate(s, last, 8, 8);
}

TYPED_TEST(counting_resource, poisons_fresh_memory) {
  support::growing_resource<TypeParam> witness{holdfast::malloc_resource<TypeParam>{}, 256};
  witness.poison();
  const auto s = TestFixture::drive::make_stream();
  void* const p = witness.allocate(s, 100, 16);
  ASSERT_TRUE(witness.extend(s, p, 100, 256));
  TestFixture::drive::synchronize(s);
  EXPECT_EQ(this->read(p, 256), std::vector<std::byte>(256, std::byte{0xFF}));
  witness.deallocate(s, p, 256, 16);
}

TYPED_TEST(counting_resource, extends_within_its_room) {
  support::growing_resource<TypeParam> witness{holdfast::malloc_resource<TypeParam>{}, 256};
  const auto s = TestFixture::drive::make_stream();
  void* const p = witness.allocate(s, 100, 16);
  EXPECT_TRUE(witness.extend(s, p, 100, 200));
  EXPECT_EQ(witness.live_bytes(), 200U);
  witness.fail_extends();
  EXPECT_FALSE(witness.extend(s, p, 200, 256));
  EXPECT_TRUE(witness.extend(s, p, 200, 256));
  EXPECT_FALSE(witness.extend(s, p, 256, 257));
  EXPECT_EQ(witness.extends(), 4U);
  witness.deallocate(s, p, 256, 16);
  EXPECT_EQ(witness.mistakes(), 0U);
}

}  // namespace
