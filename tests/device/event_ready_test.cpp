// Events that are asked, on both devices: whether what they recorded is done.
#include "support/devices.hpp"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>

namespace {

template <class Device>
class event_ready : public support::device_test<Device> {
 protected:
  using typename support::device_test<Device>::drive;

  void SetUp() override {
    support::device_test<Device>::SetUp();
    if (!this->IsSkipped()) ballast_ = drive::allocate(bytes);
  }
  void TearDown() override {
    if (ballast_ != nullptr) drive::deallocate(ballast_);
  }

  void occupy(typename Device::stream_type s) const {
    for (int i = 0; i < (support::is_host<Device> ? 1 : 64); ++i) Device::fill(s, ballast_, std::byte{1}, bytes);
  }

 private:
  static constexpr std::size_t bytes = support::is_host<Device> ? 64 : std::size_t{256} << 20;
  void* ballast_ = nullptr;
};
TYPED_TEST_SUITE(event_ready, support::both_devices, support::device_names);

TYPED_TEST(event_ready, is_true_when_nothing_was_recorded) {
  const typename TypeParam::event e{TypeParam{}};
  EXPECT_TRUE(e.ready());
}

TYPED_TEST(event_ready, is_false_until_the_work_before_it_is_done) {
  const auto s = TestFixture::drive::make_stream();
  typename TypeParam::event e{TypeParam{}};
  this->occupy(s);
  e.record(s);
  EXPECT_FALSE(e.ready());  // on CUDA, milliseconds of work
  TestFixture::drive::synchronize(s);
  EXPECT_TRUE(e.ready());
}

TYPED_TEST(event_ready, can_be_asked_by_a_relaxed_thread_that_captures) {
  const auto s = TestFixture::drive::make_stream();
  const auto capturing = TestFixture::drive::make_stream();
  typename TypeParam::event e{TypeParam{}};
  this->occupy(s);
  e.record(s);
  TestFixture::drive::begin_capture(capturing, support::capture_mode::global);
  {
    const typename TypeParam::relaxed_scope relaxed;
    static_cast<void>(e.ready());
  }
  this->occupy(capturing);
  EXPECT_TRUE(TestFixture::drive::end_capture(capturing));
  TestFixture::drive::synchronize(s);
}

using cuda_event_ready = event_ready<holdfast::cuda_device>;

TEST_F(cuda_event_ready, leaves_the_last_error_alone) {
  const auto s = drive::make_stream();
  holdfast::cuda_device::event e{holdfast::cuda_device{}};
  occupy(s);
  e.record(s);
  static_cast<void>(e.ready());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "not yet is no error";
  ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  static_cast<void>(e.ready());
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  drive::synchronize(s);
}

}  // namespace
