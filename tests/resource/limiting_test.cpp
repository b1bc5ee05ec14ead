// limiting_resource: never a byte beyond, and no byte lost.
#include "support/resources.hpp"

#include <holdfast/block.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/limiting.hpp>
#include <holdfast/resource/vmm.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace {

template <class Device>
class limiting : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using any = holdfast::any_resource<Device>;
  using limiting_type = holdfast::limiting_resource<Device>;
};
TYPED_TEST_SUITE(limiting, support::both_devices, support::device_names);

TYPED_TEST(limiting, gives_the_last_byte_and_none_beyond) {
  support::counting_resource<TypeParam> witness;
  typename TestFixture::limiting_type memory{witness, 1000};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 600, 256);
  try {
    static_cast<void>(memory.allocate(s, 401, 1));
    ADD_FAILURE() << "beyond the limit";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(shortage.requested(), 401U);
    EXPECT_EQ(shortage.held(), 600U);
    EXPECT_NE(std::string{shortage.what()}.find("limiting_resource of 1000 bytes: "), std::string::npos)
        << shortage.what();
  }
  EXPECT_THROW(static_cast<void>(memory.allocate(s, PTRDIFF_MAX, 1)), holdfast::out_of_memory);
  EXPECT_EQ(witness.allocations(), 1U) << "the upstream was asked";
  EXPECT_EQ(memory.refusals(), 1U) << "more than PTRDIFF_MAX with its alignment is refused before";
  void* const q = memory.allocate(s, 400, 256);
  EXPECT_EQ(memory.held_bytes(), memory.limit_bytes());
  memory.deallocate(s, p, 600, 256);
  EXPECT_EQ(memory.held_bytes(), 400U);
  void* const r = memory.allocate(s, 600, 256);
  memory.deallocate(s, q, 400, 256);
  memory.deallocate(s, r, 600, 256);
  EXPECT_EQ(memory.held_bytes(), 0U);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TYPED_TEST(limiting, failed_calls_cost_nothing) {
  support::growing_resource<TypeParam> witness{holdfast::malloc_resource<TypeParam>{}, 512};
  typename TestFixture::limiting_type memory{witness, 1000};
  const auto s = TestFixture::drive::make_stream();
  witness.fail();
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 1000, 16)), holdfast::out_of_memory);
  EXPECT_EQ(memory.held_bytes(), 0U);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 8, 3)), holdfast::logic_error);
  EXPECT_EQ(memory.allocate(s, 0, 16), nullptr);
  EXPECT_EQ(memory.held_bytes(), 0U);
  void* const p = memory.allocate(s, 100, 16);
  EXPECT_FALSE(memory.extend(s, p, 100, 513)) << "the upstream's room";
  EXPECT_EQ(memory.held_bytes(), 100U);
  EXPECT_EQ(memory.refusals(), 0U);
  memory.deallocate(s, nullptr, 100, 16);
  EXPECT_EQ(memory.held_bytes(), 100U);
  memory.deallocate(s, p, 100, 16);
}

TYPED_TEST(limiting, counts_growth_in_place) {
  support::growing_resource<TypeParam> witness{holdfast::malloc_resource<TypeParam>{}, 2000};
  typename TestFixture::limiting_type memory{witness, 1000};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 100, 16);
  EXPECT_FALSE(memory.extend(s, p, 100, 1001));
  EXPECT_EQ(memory.refusals(), 1U);
  EXPECT_EQ(witness.extends(), 0U);
  EXPECT_TRUE(memory.extend(s, p, 100, 1000));
  EXPECT_EQ(memory.held_bytes(), 1000U);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 1, 1)), holdfast::out_of_memory);
  memory.deallocate(s, p, 1000, 16);
  EXPECT_EQ(memory.held_bytes(), 0U);
}

TYPED_TEST(limiting, takes_growth_back_when_the_upstream_throws) {
  struct throwing : support::counting_resource<TypeParam> {
    bool extend(typename TypeParam::stream_type, void*, std::size_t, std::size_t) {
      throw holdfast::device_error{1, "as told"};
    }
    throwing() : support::counting_resource<TypeParam>{TypeParam{}} {}
    bool operator==(const throwing&) const = default;
  };
  typename TestFixture::limiting_type memory{throwing{}, 1000};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 100, 16);
  EXPECT_THROW(static_cast<void>(memory.extend(s, p, 100, 200)), holdfast::device_error);
  EXPECT_EQ(memory.held_bytes(), 100U);
  memory.deallocate(s, p, 100, 16);
}

TYPED_TEST(limiting, covers_what_stays_too) {
  typename TestFixture::limiting_type memory{holdfast::default_resource(TypeParam{}), 1000};
  typename TestFixture::any stays = memory.persistent();
  const auto s = TestFixture::drive::make_stream();
  void* const p = stays.allocate(s, 900, 256);
  EXPECT_EQ(memory.held_bytes(), 900U);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 101, 256)), holdfast::out_of_memory);
  stays.deallocate(s, p, 900, 256);
  EXPECT_EQ(memory.held_bytes(), 0U);
}

TYPED_TEST(limiting, keeps_the_quota_of_what_is_suspended) {
  const std::size_t granule = TypeParam{}.granularity();
  typename TestFixture::limiting_type memory{holdfast::vmm_resource<TypeParam>{}, granule};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, granule, 256);
  memory.decommit(s, p, granule);
  EXPECT_EQ(memory.held_bytes(), granule);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 1, 1)), holdfast::out_of_memory);
  memory.recommit(s, p, granule);
  memory.deallocate(s, p, granule, 256);
  EXPECT_EQ(memory.held_bytes(), 0U);
}

TYPED_TEST(limiting, a_double_free_makes_no_room_from_nothing) {
  typename TestFixture::limiting_type memory{support::counting_resource<TypeParam>{}, 1000};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 600, 256);
  memory.deallocate(s, p, 600, 256);
  memory.deallocate(s, p, 600, 256);
  EXPECT_EQ(memory.held_bytes(), 0U);
}

TYPED_TEST(limiting, a_buffer_that_cannot_grow_stays_as_it_is) {
  constexpr holdfast::query_shape shape{.heads = 3, .padded_heads = 8, .head_dim = 16};
  typename TestFixture::limiting_type memory{holdfast::default_resource(TypeParam{}), std::size_t{64} << 10};
  holdfast::padded_query_buffer<float, TypeParam> buffer{memory, shape};
  buffer.reserve(4);
  const std::size_t before = memory.held_bytes();
  EXPECT_THROW(buffer.reserve(1000), holdfast::out_of_memory);
  EXPECT_EQ(memory.held_bytes(), before);
  EXPECT_GE(memory.refusals(), 1U);
  buffer.reserve(8);
}

TYPED_TEST(limiting, never_overshoots_among_threads) {
  support::counting_resource<TypeParam> witness;
  typename TestFixture::limiting_type memory{witness, 1000};
  std::atomic<int> had = 0;
  std::atomic<int> refused = 0;
  std::atomic<bool> beyond = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, mine = memory]() mutable {
      const auto s = TestFixture::drive::make_stream();
      for (int round = 0; round < 300; ++round) {
        try {
          void* const p = mine.allocate(s, 400, 64);
          ++had;
          std::this_thread::yield();
          if (mine.held_bytes() > 1000) beyond = true;
          mine.deallocate(s, p, 400, 64);
        } catch (const holdfast::out_of_memory&) {
          ++refused;
        }
        TestFixture::drive::synchronize(s);
      }
    });
  }
  for (std::thread& one : threads) one.join();
  EXPECT_FALSE(beyond);
  EXPECT_LE(witness.peak_bytes(), 1000U);
  EXPECT_EQ(had + refused, 1200);
  EXPECT_EQ(memory.refusals(), static_cast<std::uint64_t>(refused));
  EXPECT_EQ(memory.held_bytes(), 0U);
}

}  // namespace
