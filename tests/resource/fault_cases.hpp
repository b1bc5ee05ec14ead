// What faults, and what doesn't; included by a host and by a CUDA test, after a launcher that reads:
//
//   void read_bytes(stream, const void* p, std::size_t n);      // work on `stream` that reads n bytes from p on
//
// What faults does so in a child process of its own: a CUDA context is of no use after it.
#pragma once

#include "support/devices.hpp"

#include <holdfast/kernel/gather_rows.hpp>
#include <holdfast/resource/guard.hpp>
#include <holdfast/resource/tail_padded.hpp>
#include <holdfast/resource/vmm.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace resource_faults {

using support::faulted;
using support::illegal_address;

template <class Device>
class resource_faults : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using guard_type = holdfast::guard_resource<Device>;
  using any = holdfast::any_resource<Device>;
  using allocator = holdfast::tail_padded_allocator<unsigned char, Device>;

  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";  // a fresh process
    support::device_test<Device>::SetUp();
    if (!this->IsSkipped()) made_.emplace(drive::make_stream());
  }

  void TearDown() override {
    for (const auto& give_back : borrowed_) give_back();
  }

  [[nodiscard]] typename Device::stream_type stream() const { return made_->get(); }

  /// Memory until the end of the test.
  template <class Resource>
  void* borrow(Resource& from, std::size_t bytes, std::size_t alignment) {
    void* const p = from.allocate(stream(), bytes, alignment);
    borrowed_.push_back(
        [this, from, p, bytes, alignment] { Resource{from}.deallocate(stream(), p, bytes, alignment); });
    return p;
  }

  /// Reads n bytes on the device. Where that faults, the host's process dies, and CUDA's error is thrown.
  void read(const void* p, std::size_t n) const {
    read_bytes(stream(), p, n);
    Device::synchronize(stream());
  }

  /// For a child: ends as `faulted` wants to see it, if it does.
  void read_and_die(const void* p, std::size_t n) const {
    try {
      read(p, n);
    } catch (const holdfast::device_error& error) {
      _exit(error.code() == static_cast<int>(cudaErrorIllegalAddress) ? illegal_address : 1);
    }
  }

  static allocator make_allocator(any resource, std::int64_t tail_rows) {
    return {std::move(resource), {.row_elements = 512, .over_read = holdfast::over_read::rows_beyond(tail_rows)}};
  }

 private:
  std::optional<typename drive::stream> made_;
  std::vector<std::function<void()>> borrowed_;
};
TYPED_TEST_SUITE_P(resource_faults);

#define EXPECT_FAULT(p, n) EXPECT_EXIT(this->read_and_die(p, n), faulted<TypeParam>, "")

TYPED_TEST_P(resource_faults, one_byte_past_the_end) {
  typename TestFixture::guard_type guard;
  const auto* const p = static_cast<const std::byte*>(this->borrow(guard, 1001, 1));
  this->read(p, 1001);
  EXPECT_FAULT(p + 1001, 1);
}

TYPED_TEST_P(resource_faults, one_byte_past_whole_granules) {
  const std::size_t granule = TypeParam{}.granularity();
  typename TestFixture::guard_type guard;
  const auto* const p = static_cast<const std::byte*>(this->borrow(guard, granule, 4096));
  static_cast<void>(this->borrow(guard, granule, 4096));  // nor is this one's memory there
  this->read(p, granule);
  EXPECT_FAULT(p + granule, 1);
}

TYPED_TEST_P(resource_faults, entry_4_of_4) {
  typename TestFixture::guard_type guard;
  const auto* const p = static_cast<const std::int32_t*>(this->borrow(guard, 16, 16));
  this->read(p, 16);
  EXPECT_FAULT(p + 4, 4);
}

TYPED_TEST_P(resource_faults, a_tile_of_128_rows_behind_scratch_without_a_tail) {
  auto plain = TestFixture::make_allocator(typename TestFixture::guard_type{}, 0);
  const auto rows = plain.acquire(this->stream(), 32);
  this->read(rows.data(), 32 * 512);
  EXPECT_FAULT(rows.data() + 32 * 512, 128 * 512);
}

TYPED_TEST_P(resource_faults, one_byte_past_a_declared_tail_which_is_fine) {
  auto padded = TestFixture::make_allocator(typename TestFixture::guard_type{}, 128);
  const auto rows = padded.acquire(this->stream(), 32);
  this->read(rows.data(), (32 + 128) * 512);
  EXPECT_EQ(TestFixture::drive::read(rows.data() + 32 * 512, 128 * 512), std::vector<unsigned char>(128 * 512));
  EXPECT_FAULT(rows.data() + (32 + 128) * 512, 1);
}

TYPED_TEST_P(resource_faults, the_tail_where_tails_are_omitted) {
  const typename TestFixture::guard_type guard{TypeParam{}, {.omit_tails = true}};
  auto padded = TestFixture::make_allocator(guard, 128);
  const auto rows = padded.acquire(this->stream(), 32);
  this->read(rows.data(), 32 * 512);
  EXPECT_FAULT(rows.data() + 32 * 512, 1);
}

TYPED_TEST_P(resource_faults, the_tail_of_a_padded_pool_where_tails_are_omitted) {
  const typename TestFixture::guard_type guard{TypeParam{}, {.omit_tails = true}};
  holdfast::tail_padded_resource<TypeParam> padded{guard, 65536};
  const auto* const p = static_cast<const std::byte*>(this->borrow(padded, 1024, 256));
  EXPECT_FAULT(p + 1024, 1);
}

TYPED_TEST_P(resource_faults, what_a_lower_alignment_uncovers) {
  typename TestFixture::guard_type guard{TypeParam{}, {.most_alignment = 4}};
  const auto* const p = static_cast<const std::byte*>(this->borrow(guard, 100, 256));
  this->read(p, 100);
  EXPECT_FAULT(p + 100, 1);
}

TYPED_TEST_P(resource_faults, one_byte_before_an_exact_start) {
  typename TestFixture::guard_type guard{TypeParam{}, {.placement = holdfast::guard_placement::start}};
  const auto* const p = static_cast<const std::byte*>(this->borrow(guard, 1000, 16));
  this->read(p, 1000);
  EXPECT_FAULT(p - 1, 1);
}

TYPED_TEST_P(resource_faults, what_was_freed) {
  typename TestFixture::guard_type guard;
  void* const p = guard.allocate(this->stream(), 1000, 16);
  guard.deallocate(this->stream(), p, 1000, 16);
  for (int i = 0; i < 8; ++i) {
    EXPECT_NE(this->borrow(guard, 1000, 16), p);
  }
  EXPECT_FAULT(p, 1);
}

TYPED_TEST_P(resource_faults, addresses_of_a_vmm_resource_that_reuses_none) {
  holdfast::vmm_resource<TypeParam> vmm{TypeParam{}, {.reuse_addresses = false}};
  void* const p = vmm.allocate(this->stream(), 1000, 16);
  vmm.deallocate(this->stream(), p, 1000, 16);
  static_cast<void>(this->borrow(vmm, 1000, 16));
  EXPECT_FAULT(p, 1);
}

TYPED_TEST_P(resource_faults, a_vmm_allocation_that_was_decommitted) {
  holdfast::vmm_resource<TypeParam> vmm;
  void* const p = this->borrow(vmm, 1000, 16);
  vmm.decommit(this->stream(), p, 1000);
  EXPECT_FAULT(p, 1);
}

TYPED_TEST_P(resource_faults, another_device_that_is_no_peer) {
  if (support::is_host<TypeParam> || support::device_count<TypeParam>() < 2) {
    GTEST_SKIP() << "needs two devices that can be told apart";
  }
  typename TestFixture::guard_type shared{TypeParam{0}, {.peers = {1}}};
  typename TestFixture::guard_type own;
  const auto there = TestFixture::drive::make_stream(support::stream_kind::non_blocking, TypeParam{1});
  void* const seen = this->borrow(shared, 1000, 16);
  void* const hidden = this->borrow(own, 1000, 16);
  read_bytes(there.get(), seen, 1000);
  TypeParam::synchronize(there.get());
  const auto read_there = [&] {
    read_bytes(there.get(), hidden, 1000);
    try {
      TypeParam::synchronize(there.get());
    } catch (const holdfast::device_error&) {
      _exit(illegal_address);
    }
  };
  EXPECT_EXIT(read_there(), faulted<TypeParam>, "");
}

/// Not a fault: gather_rows keeps to the rows there are, of the pool, the indices and the output.
TYPED_TEST_P(resource_faults, not_indices_that_are_out_of_range) {
  for (const auto placement : {holdfast::guard_placement::end, holdfast::guard_placement::start}) {
    typename TestFixture::guard_type guard{TypeParam{}, {.placement = placement}};
    auto* const pool = static_cast<unsigned char*>(this->borrow(guard, 8 * 512, 256));
    auto* const indices = static_cast<std::int32_t*>(this->borrow(guard, 4 * sizeof(std::int32_t), 16));
    auto* const out = static_cast<unsigned char*>(this->borrow(guard, 4 * 512, 256));
    TypeParam::fill(this->stream(), pool, std::byte{0x11}, 8 * 512);
    TypeParam::synchronize(this->stream());
    TestFixture::drive::write(indices, std::vector<std::int32_t>{-1, 7, 8, INT32_MIN});
    holdfast::gather_rows(this->stream(), holdfast::fp8_rows{.data = {.data = pool, .rows = 8}},
                          holdfast::view<const std::int32_t, 1>{indices, holdfast::extents<1>{4}},
                          holdfast::view<unsigned char, 2>{out, holdfast::extents<2>{4, 512}});
    TypeParam::synchronize(this->stream());
    std::vector<unsigned char> expected(4 * 512);
    std::fill_n(expected.begin() + 512, 512, static_cast<unsigned char>(0x11));
    EXPECT_EQ(TestFixture::drive::read(out, 4 * 512), expected);
  }
}

/// Through an allocator, gather_rows writes the tail if there is one.
TYPED_TEST_P(resource_faults, not_a_gather_into_scratch_whose_tail_is_omitted) {
  const typename TestFixture::guard_type guard{TypeParam{}, {.omit_tails = true}};
  auto padded = TestFixture::make_allocator(guard, 128);
  auto* const pool = static_cast<unsigned char*>(TestFixture::drive::allocate(2 * 512));
  auto* const indices = static_cast<std::int32_t*>(TestFixture::drive::allocate(2 * sizeof(std::int32_t)));
  TypeParam::fill(this->stream(), pool, std::byte{0x22}, 2 * 512);
  TypeParam::synchronize(this->stream());
  TestFixture::drive::write(indices, std::vector<std::int32_t>{1, 0});
  {
    const auto rows =
        holdfast::gather_rows(this->stream(), holdfast::fp8_rows{.data = {.data = pool, .rows = 2}},
                              holdfast::view<const std::int32_t, 1>{indices, holdfast::extents<1>{2}}, padded);
    TypeParam::synchronize(this->stream());
    EXPECT_EQ(rows.tail_rows(), 0);
    EXPECT_EQ(TestFixture::drive::read(rows.data(), 2 * 512), std::vector<unsigned char>(2 * 512, 0x22));
  }
  TestFixture::drive::deallocate(pool);
  TestFixture::drive::deallocate(indices);
}

REGISTER_TYPED_TEST_SUITE_P(resource_faults, one_byte_past_the_end, one_byte_past_whole_granules, entry_4_of_4,
                            a_tile_of_128_rows_behind_scratch_without_a_tail,
                            one_byte_past_a_declared_tail_which_is_fine, the_tail_where_tails_are_omitted,
                            the_tail_of_a_padded_pool_where_tails_are_omitted, what_a_lower_alignment_uncovers,
                            one_byte_before_an_exact_start, what_was_freed,
                            addresses_of_a_vmm_resource_that_reuses_none, a_vmm_allocation_that_was_decommitted,
                            another_device_that_is_no_peer, not_indices_that_are_out_of_range,
                            not_a_gather_into_scratch_whose_tail_is_omitted);

}  // namespace resource_faults
