// padded_head_vector: values per head, padded with the heads.
#include "support/buffers.hpp"

#include <holdfast/padded_head_vector.hpp>

#include <gtest/gtest.h>

#include <malloc.h>

#include <limits>
#include <utility>
#include <vector>

namespace {

constexpr float neutral = -std::numeric_limits<float>::infinity();

template <class Device>
class padded_head_vector : public support::buffer_test<Device> {
 protected:
  using vector_type = holdfast::padded_head_vector<float, Device>;
  vector_type make_vector() { return {this->resource, {.heads = 3, .padded_heads = 8, .fill = neutral}}; }
  std::vector<float> values(vector_type& from) {
    return support::driver<Device>::read(from.acquire(this->stream.get()).data(), 8);
  }
};
TYPED_TEST_SUITE(padded_head_vector, support::both_devices, support::device_names);

TYPED_TEST(padded_head_vector, starts_filled) {
  auto sink = this->make_vector();
  EXPECT_EQ(this->values(sink), std::vector<float>(8, neutral));
}

TYPED_TEST(padded_head_vector, keeps_the_fill_behind_assigned_values) {
  auto sink = this->make_vector();
  const std::vector<float> weights{1, 2, 3};
  sink.assign(this->stream.get(), weights.data());
  EXPECT_EQ(this->values(sink), (std::vector<float>{1, 2, 3, neutral, neutral, neutral, neutral, neutral}));
}

TYPED_TEST(padded_head_vector, assigns_after_the_work_queued_before) {
  using driver = support::driver<TypeParam>;
  auto sink = this->make_vector();
  auto* const weights = static_cast<float*>(driver::allocate(3 * sizeof(float)));
  driver::write(weights, std::vector<float>{9, 9, 9});
  TypeParam::fill(this->stream.get(), weights, std::byte{0}, 3 * sizeof(float));
  sink.assign(this->stream.get(), weights);
  EXPECT_EQ(this->values(sink)[0], 0.0F);
  driver::deallocate(weights);
}

TYPED_TEST(padded_head_vector, stays_while_a_graph_owns_it) {
  using driver = support::driver<TypeParam>;
  auto* const seen = static_cast<float*>(driver::allocate(8 * sizeof(float)));
  auto graph = [&] {
    auto sink = this->make_vector();
    driver::begin_capture(this->stream.get());
    TypeParam::copy(this->stream.get(), seen, sink.acquire(this->stream.get()).data(), 8 * sizeof(float));
    return driver::end_capture(this->stream.get());
  }();
  ASSERT_TRUE(graph);
  EXPECT_EQ(this->resource.live_count(), 1U);
  auto exec = driver::instantiate(graph);
  driver::launch(exec, this->stream.get());
  driver::synchronize(this->stream.get());
  EXPECT_EQ(driver::read(seen, 8), std::vector<float>(8, neutral));
  exec.reset();
  graph.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return this->resource.live_count() == 0;
  }));
  driver::deallocate(seen);
}

TYPED_TEST(padded_head_vector, refuses_to_be_assigned_in_a_capture) {
  using driver = support::driver<TypeParam>;
  auto sink = this->make_vector();
  const float weights[3]{};
  driver::begin_capture(this->stream.get());
  EXPECT_THROW(sink.assign(this->stream.get(), weights), holdfast::logic_error);
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
}

TYPED_TEST(padded_head_vector, refuses_shapes_that_make_no_sense) {
  const auto refused = [&](std::int64_t heads, std::int64_t padded_heads) {
    EXPECT_THROW((holdfast::padded_head_vector<float, TypeParam>{
                     this->resource, {.heads = heads, .padded_heads = padded_heads, .fill = 0}}),
                 holdfast::logic_error);
  };
  refused(0, 8);
  refused(9, 8);
  refused(1, std::int64_t{1} << 62);
  EXPECT_EQ(this->resource.allocations(), 0U);
}

TEST(padded_head_vector_host, is_freed_after_the_work_of_a_per_thread_stream) {
  using holdfast::host_device;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const holdfast::host::seeded_schedule schedule{seed};
    const auto mine = holdfast::host::per_thread_stream();
    float sum = 0;
    {
      holdfast::padded_head_vector<float, host_device> sink{holdfast::malloc_resource<host_device>{host_device{}},
                                                            {.heads = 3, .padded_heads = 8, .fill = 1.0F}};
      const auto values = sink.acquire(mine);
      mine.run([&sum, data = values.data()] { sum += data[7]; });
    }
    holdfast::host::device_synchronize();
    ASSERT_EQ(sum, 1.0F);
  }
}

TEST(padded_head_vector_host, does_not_pile_up_the_uses_of_a_per_thread_stream) {
  using holdfast::host_device;
  const auto mine = holdfast::host::per_thread_stream();
  holdfast::padded_head_vector<float, host_device> sink{holdfast::malloc_resource<host_device>{host_device{}},
                                                        {.heads = 3, .padded_heads = 8, .fill = 1.0F}};
  const auto bytes_after = [&](int uses) {  // of host memory
    for (int i = 0; i < uses; ++i) {
      static_cast<void>(sink.acquire(mine));
    }
    holdfast::host::device_synchronize();
    return mallinfo2().uordblks;
  };
  const auto few = bytes_after(10);
  EXPECT_LT(bytes_after(2000), few + 2000 * 16);  // an event takes more
}

TYPED_TEST(padded_head_vector, moves) {
  auto sink = this->make_vector();
  auto other = this->make_vector();
  other = std::move(sink);
  EXPECT_EQ(this->values(other), std::vector<float>(8, neutral));
}

}  // namespace
