// gather_rows into scratch and through an allocator; included by a host and by a CUDA test, after their launchers.
#pragma once

#include "support/buffers.hpp"

#include <holdfast/anchored_scratch.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/tail_padded_allocator.hpp>
#include <holdfast/view.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

namespace gather_rows_scratch {

using bytes = std::vector<unsigned char>;
constexpr std::size_t row = 512;

template <class Device>
class gather_rows_scratch : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using allocator_type = holdfast::tail_padded_allocator<unsigned char, Device>;

  void SetUp() override {
    support::buffer_test<Device>::SetUp();
    if (!this->IsSkipped()) {
      pool_ = static_cast<unsigned char*>(drive::allocate(8 * row));
      bytes rows(8 * row);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<unsigned char>(1 + i / row);
      }
      drive::write(pool_, rows);
      indices_ = static_cast<std::int32_t*>(drive::allocate(4 * sizeof(std::int32_t)));
      drive::write(indices_, std::vector<std::int32_t>{7, -1, 0, 7});
    }
  }

  void TearDown() override {
    support::buffer_test<Device>::TearDown();
    if (pool_ != nullptr) {
      drive::deallocate(pool_);
      drive::deallocate(indices_);
    }
  }

  allocator_type make_allocator(holdfast::scratch_options options = {}) {
    options.row_elements = 512;
    options.over_read = holdfast::over_read::rows_beyond(128);
    return {holdfast::any_resource<Device>{this->resource}, options};
  }

  [[nodiscard]] holdfast::fp8_rows pool() const { return {.data = {.data = pool_, .rows = 8}}; }
  [[nodiscard]] holdfast::view<const std::int32_t, 2> indices() const {
    return holdfast::view<const std::int32_t, 2>{indices_, holdfast::extents<2>{2, 2}};
  }

  /// What indices() gather, and a tail of 128 rows of `tail`.
  static bytes expected(unsigned char tail) {
    bytes all;
    for (const unsigned char value : bytes{8, 0, 1, 8}) {
      all.insert(all.end(), row, value);
    }
    all.insert(all.end(), 128 * row, tail);
    return all;
  }

  bytes read(const unsigned char* p) {
    drive::synchronize(this->stream.get());
    return drive::read(p, (4 + 128) * row);
  }

 private:
  unsigned char* pool_ = nullptr;
  std::int32_t* indices_ = nullptr;
};
TYPED_TEST_SUITE_P(gather_rows_scratch);

TYPED_TEST_P(gather_rows_scratch, acquires_fills_and_returns_it_with_its_tail) {
  auto allocator = this->make_allocator();
  const auto kv = holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), allocator);
  EXPECT_EQ(kv.rows(), 4);
  EXPECT_EQ(this->read(kv.data()), this->expected(0));
}

TYPED_TEST_P(gather_rows_scratch, leaves_a_tail_that_is_merely_mapped) {
  auto allocator = this->make_allocator({.fill = holdfast::tail_fill::mapped_only});
  const auto kv = holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), allocator);
  EXPECT_EQ(this->read(kv.data()), this->expected(0x7F));
}

TYPED_TEST_P(gather_rows_scratch, given_a_handle_writes_its_rows_alone) {
  auto allocator = this->make_allocator();
  const auto kv = allocator.acquire_unfilled(this->stream.get(), 4);
  holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), kv);
  EXPECT_EQ(this->read(kv.data()), this->expected(0x7F));
}

TYPED_TEST_P(gather_rows_scratch, given_a_handle_refuses_more_tail_than_it_has) {
  auto allocator = this->make_allocator();
  const auto kv = allocator.acquire(this->stream.get(), 4);
  EXPECT_THROW(holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), kv, {.tail_rows = 129}),
               holdfast::logic_error);
}

TYPED_TEST_P(gather_rows_scratch, refuses_an_allocator_of_other_rows_and_acquires_nothing) {
  holdfast::tail_padded_allocator<unsigned char, TypeParam> other{holdfast::any_resource<TypeParam>{this->resource},
                                                                  {.row_elements = 256}};
  EXPECT_THROW(static_cast<void>(holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), other)),
               holdfast::logic_error);
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TYPED_TEST_P(gather_rows_scratch, in_a_capture_is_one_kernel_node_tail_included) {
  using driver = support::driver<TypeParam>;
  auto allocator = this->make_allocator();
  driver::begin_capture(this->stream.get());
  const unsigned char* const data =
      holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), allocator).data();
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).kernels, 1);
  EXPECT_EQ(driver::count(graph).total(), 1);
  auto exec = driver::instantiate(graph);
  driver::launch(exec, this->stream.get());
  EXPECT_EQ(this->read(data), this->expected(0));
}

TYPED_TEST_P(gather_rows_scratch, pins_scratch_that_was_acquired_before_the_capture) {
  using driver = support::driver<TypeParam>;
  auto allocator = this->make_allocator();
  auto kv = allocator.acquire(this->stream.get(), 4);
  driver::begin_capture(this->stream.get());
  holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), kv);
  auto graph = driver::end_capture(this->stream.get());
  EXPECT_EQ(allocator.pinned_bytes(), (4 + 128) * row);
  kv.release();
  graph.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return this->resource.live_bytes() == 0;
  }));
}

TYPED_TEST_P(gather_rows_scratch, pins_scratch_of_no_rows_for_its_tail) {
  using driver = support::driver<TypeParam>;
  auto allocator = this->make_allocator();
  auto kv = allocator.acquire(this->stream.get(), 0);
  driver::begin_capture(this->stream.get());
  holdfast::gather_rows(this->stream.get(), this->pool(), holdfast::view<const std::int32_t, 1>(nullptr, 0), kv);
  auto graph = driver::end_capture(this->stream.get());
  EXPECT_EQ(allocator.pinned_bytes(), 128 * row);
}

TYPED_TEST_P(gather_rows_scratch, into_anchored_scratch_is_one_kernel_node_that_leaves_the_tail_alone) {
  using driver = support::driver<TypeParam>;
  holdfast::anchored_scratch<unsigned char, TypeParam> anchored{
      TypeParam{}, {.row_elements = 512, .over_read = holdfast::over_read::rows_beyond(128)}};
  {
    const auto kv = holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), anchored);
    EXPECT_EQ(kv.rows(), 4);
    EXPECT_EQ(this->read(kv.data()), this->expected(0));
    TypeParam::fill(this->stream.get(), kv.data(), std::byte{0x7F}, 4 * row);
    EXPECT_THROW(holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), kv, {.tail_rows = 1}),
                 holdfast::logic_error);
    EXPECT_THROW(static_cast<void>(holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), anchored)),
                 holdfast::in_use);
  }
  driver::begin_capture(this->stream.get());
  const unsigned char* const data =
      holdfast::gather_rows(this->stream.get(), this->pool(), this->indices(), anchored).data();
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  EXPECT_EQ(driver::count(graph).kernels, 1);
  EXPECT_EQ(driver::count(graph).total(), 1);
  auto exec = driver::instantiate(graph);
  driver::launch(exec, this->stream.get());
  EXPECT_EQ(this->read(data), this->expected(0));
}

REGISTER_TYPED_TEST_SUITE_P(gather_rows_scratch, acquires_fills_and_returns_it_with_its_tail,
                            leaves_a_tail_that_is_merely_mapped, given_a_handle_writes_its_rows_alone,
                            given_a_handle_refuses_more_tail_than_it_has,
                            refuses_an_allocator_of_other_rows_and_acquires_nothing,
                            in_a_capture_is_one_kernel_node_tail_included,
                            pins_scratch_that_was_acquired_before_the_capture, pins_scratch_of_no_rows_for_its_tail,
                            into_anchored_scratch_is_one_kernel_node_that_leaves_the_tail_alone);

}  // namespace gather_rows_scratch
