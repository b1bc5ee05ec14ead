// guard_resource: where allocations lie, what is counted, and, in fault_cases.hpp, what faults. On a GPU that is
// guard_test.cu's.
#include "support/buffers.hpp"
#include "support/faulty_device.hpp"
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/resource/guard.hpp>
#include <holdfast/resource/tail_padded.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace resource_faults {

inline void read_bytes(holdfast::host::stream_ref stream, const void* p, std::size_t n) {
  stream.run([=] {
    for (std::size_t i = 0; i < n; ++i) {
      static_cast<void>(static_cast<unsigned char>(static_cast<const volatile unsigned char*>(p)[i]));
    }
  });
}

}  // namespace resource_faults

#include "resource/fault_cases.hpp"

namespace resource_faults {
INSTANTIATE_TYPED_TEST_SUITE_P(host, resource_faults, holdfast::host_device);
}

namespace {

using holdfast::guard_options;
using holdfast::guard_placement;

template <class Device>
class guard : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using guard_type = holdfast::guard_resource<Device>;

  void SetUp() override {
    support::device_test<Device>::SetUp();
    if (!this->IsSkipped()) granule_ = Device{}.granularity();
  }

  [[nodiscard]] std::size_t granule() const { return granule_; }
  /// Bytes from p to where its last granule ends.
  [[nodiscard]] std::size_t to_the_end(const void* p) const {
    return granule_ - reinterpret_cast<std::uintptr_t>(p) % granule_;
  }

 private:
  std::size_t granule_ = 0;
};
TYPED_TEST_SUITE(guard, support::both_devices, support::device_names);

TYPED_TEST(guard, ends_where_its_mapping_ends_but_for_its_alignment) {
  typename TestFixture::guard_type pool;
  const auto s = TestFixture::drive::make_stream();
  for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{100}, std::size_t{1000}}) {
      void* const p = pool.allocate(s, bytes, alignment);
      const std::size_t slack = (bytes + alignment - 1) / alignment * alignment - bytes;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % alignment, 0U);
      EXPECT_EQ(this->to_the_end(p), bytes + slack);
      EXPECT_EQ(pool.slack(bytes, alignment), slack);
      EXPECT_EQ(pool.slack_bytes(), slack);
      pool.deallocate(s, p, bytes, alignment);
    }
  }
}

TYPED_TEST(guard, leaves_12_bytes_behind_100_at_16_and_none_at_4) {
  static_assert(TestFixture::guard_type::slack(100, 16) == 12 && TestFixture::guard_type::slack(100, 4) == 0);
  typename TestFixture::guard_type aligned;
  typename TestFixture::guard_type strict{TypeParam{}, {.most_alignment = 4}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = aligned.allocate(s, 100, 16);
  void* const q = strict.allocate(s, 100, 16);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % 16, 0U);
  EXPECT_EQ(this->to_the_end(p), 112U);
  EXPECT_EQ(aligned.slack_bytes(), 12U);
  EXPECT_EQ(this->to_the_end(q), 100U);
  EXPECT_EQ(strict.slack_bytes(), 0U);
  aligned.deallocate(s, p, 100, 16);
  strict.deallocate(s, q, 100, 16);
}

TYPED_TEST(guard, keeps_lower_alignments_than_the_most) {
  typename TestFixture::guard_type pool{TypeParam{}, {.most_alignment = 16}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 13, 1);
  EXPECT_EQ(this->to_the_end(p), 13U);
  pool.deallocate(s, p, 13, 1);
}

TYPED_TEST(guard, honours_alignments_beyond_the_granule) {
  for (const auto placement : {guard_placement::end, guard_placement::start}) {
    typename TestFixture::guard_type pool{TypeParam{}, {.placement = placement}};
    const auto s = TestFixture::drive::make_stream();
    const std::size_t alignment = 4 * this->granule();
    void* const p = pool.allocate(s, 100, alignment);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % alignment, 0U);
    EXPECT_EQ(pool.held_bytes(), this->granule());
    pool.deallocate(s, p, 100, alignment);
  }
}

TYPED_TEST(guard, begins_where_its_mapping_begins_by_option) {
  typename TestFixture::guard_type pool{TypeParam{}, {.placement = guard_placement::start}};
  const auto s = TestFixture::drive::make_stream();
  for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
    void* const p = pool.allocate(s, 1001, alignment);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % this->granule(), 0U);
    EXPECT_EQ(pool.slack_bytes(), 0U);
    pool.deallocate(s, p, 1001, alignment);
  }
}

TYPED_TEST(guard, reports_the_largest_slack_that_is_live) {
  typename TestFixture::guard_type pool;
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1, 256);
  void* const q = pool.allocate(s, 1, 16);
  EXPECT_EQ(pool.slack_bytes(), 255U);
  pool.deallocate(s, p, 1, 256);
  EXPECT_EQ(pool.slack_bytes(), 15U);
  pool.deallocate(s, q, 1, 16);
  EXPECT_EQ(pool.slack_bytes(), 0U);
}

TYPED_TEST(guard, keeps_unmapped_addresses_around_each_allocation) {
  const std::size_t unmapped = 8 * this->granule() - 1;
  typename TestFixture::guard_type pool{TypeParam{}, {.unmapped_bytes = unmapped}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 100, 4);
  EXPECT_EQ(pool.address_bytes(), (8 + 1 + 8) * this->granule());
  EXPECT_EQ(pool.held_bytes(), this->granule());
  pool.deallocate(s, p, 100, 4);
}

TYPED_TEST(guard, takes_whole_granules_and_gives_them_back_as_the_device_counts) {
  typename TestFixture::guard_type pool;
  const auto s = TestFixture::drive::make_stream();
  pool.deallocate(s, pool.allocate(s, 1, 1), 1, 1);  // what the device takes for itself, it has now
  void* const p = pool.allocate(s, this->granule() + 1, 4);
  const std::size_t free = TypeParam{}.memory().free;
  EXPECT_EQ(pool.held_bytes(), 2 * this->granule());
  pool.deallocate(s, p, this->granule() + 1, 4);
  EXPECT_EQ(pool.held_bytes(), 0U);
  EXPECT_EQ(TypeParam{}.memory().free, free + 2 * this->granule());
}

TYPED_TEST(guard, keeps_the_addresses_of_what_was_freed_for_a_while) {
  constexpr std::size_t most = 5;
  typename TestFixture::guard_type pool{TypeParam{}, {.quarantine = most}};
  const auto s = TestFixture::drive::make_stream();
  void* const first = pool.allocate(s, 100, 4);
  const std::size_t each = pool.address_bytes();
  std::set<void*> freed{first};
  pool.deallocate(s, first, 100, 4);
  for (std::size_t i = 1; i < 4 * most; ++i) {
    EXPECT_EQ(pool.address_bytes(), std::min(i, most) * each);
    void* const p = pool.allocate(s, 100, 4);
    if (i <= most) {
      EXPECT_TRUE(freed.insert(p).second) << "freed " << i << " ago";
    }
    pool.deallocate(s, p, 100, 4);
  }
  EXPECT_EQ(pool.address_bytes(), most * each);
}

TYPED_TEST(guard, keeps_no_addresses_without_a_quarantine) {
  typename TestFixture::guard_type pool{TypeParam{}, {.quarantine = 0}};
  const auto s = TestFixture::drive::make_stream();
  for (int i = 0; i < 3; ++i) {
    void* const p = pool.allocate(s, 100, 4);
    pool.deallocate(s, p, 100, 4);
    EXPECT_EQ(pool.address_bytes(), 0U);
  }
}

TYPED_TEST(guard, refuses_options_that_make_no_sense) {
  using made = typename TestFixture::guard_type;
  EXPECT_THROW((made{TypeParam{}, {.most_alignment = 48}}), holdfast::logic_error);
  EXPECT_THROW((made{TypeParam{}, {.unmapped_bytes = SIZE_MAX}}), holdfast::logic_error);
}

TYPED_TEST(guard, never_extends) {
  typename TestFixture::guard_type pool;
  holdfast::any_resource<TypeParam> any{pool};
  const auto s = TestFixture::drive::make_stream();
  EXPECT_FALSE(any.extensible());
  EXPECT_FALSE(any.suspendable());
  EXPECT_FALSE(any.omits_tails());
  void* const p = any.allocate(s, 100, 4);
  EXPECT_FALSE(any.extend(s, p, 100, 101));
  any.deallocate(s, p, 100, 4);
}

TYPED_TEST(guard, waits_for_the_streams_work_before_it_unmaps) {
  typename TestFixture::guard_type pool;
  const auto s = TestFixture::drive::make_stream();
  auto* const kept = static_cast<std::byte*>(TestFixture::drive::allocate(5000));
  void* const p = pool.allocate(s, 5000, 4);
  TypeParam::fill(s, p, std::byte{0x42}, 5000);
  TypeParam::copy(s, kept, p, 5000);
  pool.deallocate(s, p, 5000, 4);
  TypeParam::synchronize(s);
  EXPECT_EQ(TestFixture::drive::read(kept, 5000), std::vector<std::byte>(5000, std::byte{0x42}));
  TestFixture::drive::deallocate(kept);
}

TYPED_TEST(guard, out_of_memory_has_figures) {
  typename TestFixture::guard_type pool;
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 100, 4);
  const std::size_t addresses = pool.address_bytes();
  const std::size_t more = 2 * TypeParam{}.memory().total;
  try {
    static_cast<void>(pool.allocate(s, more, 4));
    ADD_FAILURE() << "there is not as much";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(shortage.requested(), more);
    EXPECT_EQ(shortage.held(), this->granule());
    EXPECT_GT(shortage.free(), 0U);
    EXPECT_NE(std::string{shortage.what()}.find("guard_resource"), std::string::npos);
  }
  EXPECT_EQ(pool.held_bytes(), this->granule());
  EXPECT_EQ(pool.address_bytes(), addresses);
  pool.deallocate(s, p, 100, 4);
}

// --- tails -----------------------------------------------------------------------------------------------------------

TYPED_TEST(guard, omits_tails_by_option) {
  const typename TestFixture::guard_type pool{TypeParam{}, {.omit_tails = true}};
  const holdfast::any_resource<TypeParam> any{pool};
  EXPECT_TRUE(any.omits_tails());
  holdfast::tail_padded_allocator<float, TypeParam> scratch{
      any, {.row_elements = 512, .over_read = holdfast::over_read::at_least_rows(2048)}};
  const auto s = TestFixture::drive::make_stream();
  {
    const auto none = scratch.acquire(s, 0);
    const auto rows = scratch.acquire(s, 3);
    EXPECT_EQ(none.data(), nullptr);
    EXPECT_EQ(rows.rows(), 3);
    EXPECT_EQ(rows.tail_rows(), 0);
    EXPECT_EQ(this->to_the_end(rows.data() + 3 * 512 - 1), sizeof(float));
  }
  holdfast::tail_padded_resource<TypeParam> padded{any, 65536};
  const holdfast::any_resource<TypeParam> again{padded};
  EXPECT_EQ(padded.tail_bytes(), 0U);
  EXPECT_TRUE(again.omits_tails());
  void* const p = padded.allocate(s, 1000, 8);
  EXPECT_EQ(this->to_the_end(p), 1000U);
  padded.deallocate(s, p, 1000, 8);
  TypeParam::synchronize(s);
}

TYPED_TEST(guard, counts_declared_tails_as_asked_for) {
  const typename TestFixture::guard_type pool;
  holdfast::tail_padded_allocator<unsigned char, TypeParam> scratch{
      holdfast::any_resource<TypeParam>{pool},
      {.row_elements = 512, .over_read = holdfast::over_read::rows_beyond(128)}};
  holdfast::tail_padded_resource<TypeParam> padded{pool, 24};
  const auto s = TestFixture::drive::make_stream();
  {
    const auto rows = scratch.acquire(s, 3);
    EXPECT_EQ(rows.tail_rows(), 128);
    EXPECT_EQ(this->to_the_end(rows.data() + 131 * 512 - 1), 1U);
  }
  auto* const p = static_cast<std::byte*>(padded.allocate(s, 1000, 8));
  EXPECT_EQ(padded.tail_bytes(), 24U);
  EXPECT_EQ(this->to_the_end(p), 1024U);
  padded.deallocate(s, p, 1000, 8);
  TypeParam::synchronize(s);
}

// --- captures --------------------------------------------------------------------------------------------------------

TYPED_TEST(guard, serves_captures_that_grow_buffers_and_replays_after) {
  using driver = typename TestFixture::drive;
  for (const auto mode : support::capture_modes) {
    const auto s = driver::make_stream();
    const typename TestFixture::guard_type pool;
    holdfast::padded_query_buffer<float, TypeParam> buffer{holdfast::any_resource<TypeParam>{pool},
                                                           support::small_shape};
    buffer.reserve(4);
    driver::begin_capture(s, mode);
    const float* small = nullptr;
    const float* large = nullptr;
    {
      auto rows = buffer.acquire(s, 4);
      support::write_heads(s.get(), rows, std::byte{1});
      small = rows.data();
    }
    {
      auto rows = buffer.acquire(s, 4000);
      support::write_heads(s.get(), rows, std::byte{2});
      large = rows.data();
    }
    auto graph = driver::end_capture(s);
    ASSERT_TRUE(graph);
    EXPECT_NE(small, large) << "growth moves";
    auto exec = driver::instantiate(graph);
    driver::launch(exec, s);
    driver::synchronize(s);
    EXPECT_TRUE(support::padding_is_zero<TypeParam>(small, 4, support::small_shape));
    EXPECT_TRUE(support::padding_is_zero<TypeParam>(large, 4000, support::small_shape));
  }
}

// --- failures --------------------------------------------------------------------------------------------------------

template <class Device>
class guard_failures : public guard<Device> {
 protected:
  using device = support::faulty<Device>;
  void TearDown() override { device::heal(); }
};
TYPED_TEST_SUITE(guard_failures, support::both_devices, support::device_names);

TYPED_TEST(guard_failures, of_an_allocation_change_nothing) {
  using faulty = typename TestFixture::device;
  const auto nothing = faulty::given_out();
  {
    holdfast::guard_resource<faulty> pool{faulty{}, {.quarantine = 0}};
    const auto s = TestFixture::drive::make_stream();
    void* const held = pool.allocate(s, 100, 4);
    const auto before = faulty::given_out();
    const std::size_t addresses = pool.address_bytes();
    for (const support::step at : support::steps_that_give) {
      for (const auto how : {support::failure::error, support::failure::memory}) {
        SCOPED_TRACE("step " + std::to_string(static_cast<int>(at)));
        faulty::fail(at, 0, how);
        try {
          static_cast<void>(pool.allocate(s, 1000, 4));
          ADD_FAILURE() << "nothing failed";
        } catch (const holdfast::device_error& error) {
          EXPECT_EQ(how, support::failure::error);
          EXPECT_EQ(error.code(), faulty::code);
        } catch (const holdfast::out_of_memory& shortage) {
          EXPECT_EQ(how, support::failure::memory);
          EXPECT_EQ(shortage.requested(), 1000U);
          EXPECT_EQ(shortage.held(), this->granule());
        }
        EXPECT_EQ(faulty::given_out(), before);
        EXPECT_EQ(pool.held_bytes(), this->granule());
        EXPECT_EQ(pool.address_bytes(), addresses);
        faulty::heal();
        void* const p = pool.allocate(s, 1000, 4);
        TypeParam::fill(s, p, std::byte{1}, 1000);
        pool.deallocate(s, p, 1000, 4);
        EXPECT_EQ(faulty::given_out(), before);
      }
    }
    pool.deallocate(s, held, 100, 4);
  }
  EXPECT_EQ(faulty::given_out(), nothing);
}

TYPED_TEST(guard_failures, of_a_release_leave_the_memory_to_be_released_again) {
  using faulty = typename TestFixture::device;
  const auto nothing = faulty::given_out();
  holdfast::guard_resource<faulty> pool{faulty{}, {.quarantine = 0}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1000, 4);
  faulty::fail(support::step::unmap);
  pool.deallocate(s, p, 1000, 4);
  EXPECT_EQ(pool.held_bytes(), this->granule());
  faulty::heal();
  TypeParam::fill(s, p, std::byte{1}, 1000);
  pool.deallocate(s, p, 1000, 4);
  EXPECT_EQ(pool.held_bytes(), 0U);
  EXPECT_EQ(faulty::given_out(), nothing);
}

TYPED_TEST(guard_failures, for_want_of_addresses_take_those_of_what_was_freed) {
  using faulty = typename TestFixture::device;
  holdfast::guard_resource<faulty> pool;
  const auto s = TestFixture::drive::make_stream();
  for (int i = 0; i < 3; ++i) pool.deallocate(s, pool.allocate(s, 100, 4), 100, 4);
  EXPECT_GT(pool.address_bytes(), 0U);
  faulty::fail(support::step::reserve, 0, support::failure::memory);
  EXPECT_THROW(static_cast<void>(pool.allocate(s, 100, 4)), holdfast::out_of_memory);
  EXPECT_EQ(pool.address_bytes(), 0U);
}

TYPED_TEST(guard_failures, leave_quarantined_addresses_with_nobody_when_the_resource_goes) {
  using faulty = typename TestFixture::device;
  const auto nothing = faulty::given_out();
  {
    holdfast::guard_resource<faulty> pool;
    const auto s = TestFixture::drive::make_stream();
    for (int i = 0; i < 3; ++i) pool.deallocate(s, pool.allocate(s, 100, 4), 100, 4);
    EXPECT_EQ(faulty::given_out().reservations, nothing.reservations + 3);
  }
  EXPECT_EQ(faulty::given_out(), nothing);
}

}  // namespace
