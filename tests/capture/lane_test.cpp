// Lanes: how buffers are shared.
#include "support/buffers.hpp"

#include <holdfast/capture.hpp>

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace {

using support::small_shape;

template <class Device>
class lane : public support::buffer_test<Device> {
 protected:
  holdfast::lane<Device> shared{holdfast::any_resource<Device>{this->resource}};
};
TYPED_TEST_SUITE(lane, support::both_devices, support::device_names);

TYPED_TEST(lane, has_one_buffer_for_a_type_and_shape) {
  auto& first = this->shared.template padded_queries<float>(small_shape);
  EXPECT_EQ(&first, &this->shared.template padded_queries<float>(small_shape));
  const holdfast::lane<TypeParam> copy = this->shared;
  EXPECT_EQ(copy, this->shared);
}

TYPED_TEST(lane, has_different_buffers_for_different_types_and_shapes) {
  void* const buffers[] = {
      &this->shared.template padded_queries<float>(small_shape),
      &this->shared.template padded_queries<std::int32_t>(small_shape),
      &this->shared.template padded_queries<float>({.heads = 4, .padded_heads = 8, .head_dim = 16}),
      &this->shared.template padded_queries<float>({.heads = 3, .padded_heads = 16, .head_dim = 16}),
      &this->shared.template padded_queries<float>({.heads = 3, .padded_heads = 8, .head_dim = 24}),
  };
  for (const void* const& a : buffers) {
    for (const void* const& b : buffers) {
      EXPECT_EQ(a == b, &a == &b);
    }
  }
}

TYPED_TEST(lane, shares_memory_between_layers_and_not_with_other_lanes) {
  holdfast::lane<TypeParam> other{holdfast::any_resource<TypeParam>{this->resource}};
  EXPECT_NE(other, this->shared);
  for (int layer = 0; layer < 61; ++layer) {
    static_cast<void>(this->shared.template padded_queries<float>(small_shape).acquire(this->stream.get(), 4));
  }
  static_cast<void>(other.template padded_queries<float>(small_shape).acquire(this->stream.get(), 4));
  EXPECT_EQ(this->resource.allocations(), 2U);
}

TYPED_TEST(lane, refuses_other_options_than_the_buffer_was_made_with) {
  auto& buffer = this->shared.template padded_queries<float>(small_shape, {.strict = true});
  EXPECT_EQ(&this->shared.template padded_queries<float>(small_shape), &buffer) << "none said: as it is";
  EXPECT_EQ(&this->shared.template padded_queries<float>(small_shape, {.strict = true}), &buffer);
  EXPECT_THROW(static_cast<void>(this->shared.template padded_queries<float>(small_shape, {.strict = false})),
               holdfast::logic_error);
}

TYPED_TEST(lane, is_looked_up_by_many_threads_at_once) {
  std::vector<void*> found(8);
  std::vector<std::thread> threads;
  for (void*& buffer : found) {
    threads.emplace_back([&] { buffer = &this->shared.template padded_queries<float>(small_shape); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(found, std::vector<void*>(8, found[0]));
}

TYPED_TEST(lane, tries_again_after_a_shape_was_refused) {
  const holdfast::query_shape bad{.heads = 0, .padded_heads = 8, .head_dim = 16};
  EXPECT_THROW(static_cast<void>(this->shared.template padded_queries<float>(bad)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(this->shared.template padded_queries<float>(bad)), holdfast::logic_error);
}

TYPED_TEST(lane, deduces_its_device_from_the_resource) {
  holdfast::lane deduced{this->resource};
  static_assert(std::is_same_v<decltype(deduced), holdfast::lane<TypeParam>>);
  EXPECT_EQ(deduced.device(), TypeParam{});
}

}  // namespace
