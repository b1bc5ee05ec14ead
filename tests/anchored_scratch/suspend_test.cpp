// Anchored scratch that gives its memory back under its graphs.
#include "support/buffers.hpp"

#include <holdfast/anchored_scratch.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace {

constexpr std::size_t row_bytes = 512;
constexpr std::size_t tail_bytes = 128 * row_bytes;
constexpr std::int64_t rows = 32768;  // 16 MiB

template <class Device>
class suspended_anchored_scratch : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using anchored = holdfast::anchored_scratch<unsigned char, Device>;

  anchored make() {
    return {holdfast::lane<Device>{holdfast::any_resource<Device>{this->resource}},
            holdfast::scratch_options{
                .row_elements = 512, .over_read = holdfast::over_read::rows_beyond(128), .name = "sleeper"}};
  }
};
TYPED_TEST_SUITE(suspended_anchored_scratch, support::both_devices, support::device_names);

TYPED_TEST(suspended_anchored_scratch, gives_memory_back_and_graphs_replay_right_after_resume_as_the_device_counts) {
  using driver = support::driver<TypeParam>;
  auto scratch = this->make();
  driver::begin_capture(this->stream.get());
  {
    const auto kv = scratch.acquire(this->stream.get(), rows);
    TypeParam::fill(this->stream.get(), kv.data(), std::byte{7}, rows * row_bytes);
  }
  auto graph = driver::end_capture(this->stream.get());
  auto exec = driver::instantiate(graph);
  const unsigned char* const end = scratch.data_end();
  const std::size_t before = TypeParam{}.memory().free;
  scratch.suspend(holdfast::quiescent);
  EXPECT_GE(TypeParam{}.memory().free, before + rows * row_bytes);
  scratch.resume();
  EXPECT_EQ(scratch.data_end(), end);
  driver::launch(exec, this->stream.get());
  driver::synchronize(this->stream.get());
  std::vector<unsigned char> expected(row_bytes, 7);
  expected.resize(row_bytes + tail_bytes);
  EXPECT_EQ(driver::read(end - row_bytes, row_bytes + tail_bytes), expected);
}

TYPED_TEST(suspended_anchored_scratch, is_refused_until_it_is_resumed) {
  auto scratch = this->make();
  scratch.reserve(4);
  scratch.suspend(holdfast::quiescent);
  EXPECT_TRUE(scratch.suspended());
  EXPECT_THROW(static_cast<void>(scratch.acquire(this->stream.get(), 4)), holdfast::suspended);
  EXPECT_THROW(scratch.reserve(4000), holdfast::suspended);
  EXPECT_FALSE(scratch.try_acquire(this->stream.get(), 4));
  scratch.resume();
  EXPECT_EQ(scratch.acquire(this->stream.get(), 4).rows(), 4);
}

TYPED_TEST(suspended_anchored_scratch, is_not_suspended_while_a_handle_lives) {
  auto scratch = this->make();
  const auto kv = scratch.acquire(this->stream.get(), 4);
  EXPECT_THROW(scratch.suspend(holdfast::quiescent), holdfast::in_use);
  EXPECT_FALSE(scratch.suspended());
}

TYPED_TEST(suspended_anchored_scratch, is_suspended_once_eager_work_is_done) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const support::any_order<TypeParam> order{seed};
    auto scratch = this->make();
    for (int i = 0; i < 20; ++i) {  // queued, not run: it would touch memory that is gone
      const auto kv = scratch.acquire(this->stream.get(), 1024);
      TypeParam::fill(this->stream.get(), kv.data(), std::byte{7}, 1024 * row_bytes);
    }
    scratch.suspend(holdfast::quiescent);
    EXPECT_NO_THROW(support::driver<TypeParam>::synchronize(this->stream.get()));
    scratch.resume();
  }
}

}  // namespace
