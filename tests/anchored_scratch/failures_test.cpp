// When the device fails at any step, nothing has changed, and the next call can succeed.
#include "support/buffers.hpp"
#include "support/faulty_device.hpp"

#include <holdfast/anchored_scratch.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using holdfast::over_read;
using support::step;
using bytes = std::vector<unsigned char>;

constexpr std::int64_t tail_rows = 3 * 4096;  // of 512 bytes: three zero pages

template <class Device>
class anchored_failures : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using device = support::faulty<Device>;
  using anchored = holdfast::anchored_scratch<unsigned char, device>;

  static anchored make_anchored() {
    return {holdfast::lane<device>{holdfast::any_resource<device>{support::foreign_pool<Device>{}, device{}}},
            {.row_elements = 512, .over_read = over_read::rows_beyond(tail_rows)}};
  }

  void TearDown() override { device::heal(); }

  /// `call` fails at every call of every step that it makes, in both ways; `nothing_changed` judges. Then it succeeds.
  template <class Call, class Check>
  static void expect_transactional(const Call& call, const Check& nothing_changed) {
    for (const support::failure how : {support::failure::error, support::failure::memory}) {
      for (const step at : support::steps_that_give) {
        const std::size_t calls = [&] {
          const std::size_t before = device::calls(at);
          call();
          return device::calls(at) - before;
        }();
        for (std::size_t skip = 0; skip < calls; ++skip) {
          device::fail(at, skip, how);
          EXPECT_ANY_THROW(call());
          device::heal();
          nothing_changed();
        }
      }
    }
    EXPECT_NO_THROW(call());
  }
};
TYPED_TEST_SUITE(anchored_failures, support::both_devices, support::device_names);

TYPED_TEST(anchored_failures, of_a_first_use_change_nothing) {
  auto warm = this->make_anchored();
  warm.reserve(1);  // makes the zero page
  const auto before = TestFixture::device::given_out();
  this->expect_transactional(
      [&] {
        auto scratch = this->make_anchored();
        try {
          scratch.reserve(1);
        } catch (...) {
          EXPECT_EQ(scratch.capacity(), 0);
          EXPECT_EQ(scratch.data_end(), nullptr);
          throw;
        }
      },
      [&] { EXPECT_EQ(TestFixture::device::given_out(), before); });
  EXPECT_EQ(TestFixture::device::given_out(), before);
}

TYPED_TEST(anchored_failures, of_growth_change_nothing) {
  using driver = support::driver<TypeParam>;
  auto stream = driver::make_stream();
  auto scratch = this->make_anchored();
  scratch.reserve(1);
  unsigned char* const end = scratch.data_end();
  auto before = TestFixture::device::given_out();
  std::int64_t capacity = scratch.capacity();
  this->expect_transactional(
      [&] {
        static_cast<void>(scratch.acquire(stream.get(), scratch.capacity() + 1));
        before = TestFixture::device::given_out();
        capacity = scratch.capacity();
      },
      [&] {
        EXPECT_EQ(TestFixture::device::given_out(), before);
        EXPECT_EQ(scratch.capacity(), capacity);
        EXPECT_EQ(scratch.data_end(), end);
      });
  const auto rows = scratch.acquire(stream.get(), 4);
  EXPECT_EQ(driver::read(rows.data() + 4 * 512, tail_rows * 512), bytes(tail_rows * 512, 0));
}

TEST(anchored_failures_host, of_making_the_zero_page_change_nothing) {
  using faulty = support::faulty<holdfast::host_device>;
  using page = holdfast::detail::zero_page<faulty>;
  const faulty device{3};  // that nobody else uses
  const auto before = faulty::given_out();
  for (const step at : support::steps_that_give) {
    faulty::fail(at);
    EXPECT_THROW(static_cast<void>(page::of(device)), holdfast::device_error);
    faulty::heal();
    EXPECT_EQ(faulty::given_out(), before);
  }
  const page& made = page::of(device);
  const auto after = faulty::given_out();
  EXPECT_EQ(&page::of(device), &made);
  EXPECT_EQ(faulty::given_out(), after);
  EXPECT_EQ(after.memories, before.memories + 1);
  EXPECT_EQ(after.reservations, before.reservations) << "its window is closed";
  EXPECT_EQ(after.mappings, before.mappings);
}

}  // namespace
