// Several devices: everything runs on the buffer's own, whichever is current, and captures on one do not hold up another.
#include "support/buffers.hpp"

#include <gtest/gtest.h>

namespace {

using holdfast::host_device;
using support::small_shape;
using driver = support::driver<host_device>;

TEST(padded_query_buffer_device, is_used_whichever_device_is_current_and_leaves_that_alone) {
  holdfast::host::stream stream{host_device{1}};
  support::counting_resource<host_device> resource{host_device{1}};
  const std::size_t free_elsewhere = host_device{0}.memory().free;
  holdfast::host::set_current_device(host_device{0});
  {
    holdfast::padded_query_buffer<float, host_device> buffer{resource, small_shape};
    auto rows = buffer.acquire(stream, 4);
    EXPECT_EQ(holdfast::host::current_device(), host_device{0});
    rows = buffer.acquire(stream, 8);
    buffer.restore_padding(stream);
    EXPECT_EQ(holdfast::host::current_device(), host_device{0});
  }
  holdfast::collect(host_device{1});
  EXPECT_EQ(holdfast::host::current_device(), host_device{0});
  EXPECT_EQ(host_device{0}.memory().free, free_elsewhere);
  EXPECT_EQ(resource.live_bytes(), 0U);
  EXPECT_EQ(resource.mistakes(), 0U);
}

TEST(padded_query_buffer_device, grows_while_another_device_captures) {
  holdfast::host::stream capturing{host_device{0}};
  holdfast::host::stream stream{host_device{1}};
  support::counting_resource<host_device> resource{host_device{1}};
  holdfast::padded_query_buffer<float, host_device> buffer{resource, small_shape};
  driver::begin_capture(capturing, support::capture_mode::global);
  static_cast<void>(buffer.acquire(stream, 4));
  static_cast<void>(buffer.acquire(stream, 9));
  EXPECT_TRUE(driver::end_capture(capturing));
  EXPECT_EQ(buffer.capacity(), 9);
}

TEST(padded_query_buffer_device, has_its_bytes_counted_where_it_is) {
  holdfast::host::stream stream{host_device{1}};
  support::counting_resource<host_device> resource{host_device{1}};
  holdfast::padded_query_buffer<float, host_device> buffer{resource, small_shape};
  const auto before = holdfast::counts(host_device{1}).pinned_bytes();
  driver::begin_capture(stream);
  static_cast<void>(buffer.acquire(stream, 4));
  auto graph = driver::end_capture(stream);
  EXPECT_EQ(holdfast::counts(host_device{1}).pinned_bytes() - before, 4U * 8 * 16 * sizeof(float));
  EXPECT_EQ(buffer.pinned_bytes(), 4U * 8 * 16 * sizeof(float));
}

}  // namespace
