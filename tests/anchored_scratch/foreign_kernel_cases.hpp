// Anchored scratch under kernels that know nothing of it; included by a host and by a CUDA test, after two launchers:
//
//   void write_bytes(stream, unsigned char* p, std::size_t n, unsigned char value);
//   void count_other(stream, const unsigned char* p, std::size_t n, unsigned char value, unsigned* count);   // += bytes
//                                                                                                       // that differ
#pragma once

#include "support/devices.hpp"

#include <holdfast/anchored_scratch.hpp>
#include <holdfast/resource/malloc.hpp>

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace foreign_kernels {

using support::faulted;
using support::illegal_address;

template <class Device>
class foreign_kernels : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using anchored = holdfast::anchored_scratch<unsigned char, Device>;

  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";  // a fresh process
    support::device_test<Device>::SetUp();
    if (!this->IsSkipped()) {
      made_.emplace(drive::make_stream());
      count_ = static_cast<unsigned*>(drive::allocate(sizeof(unsigned)));
      drive::write(count_, std::vector<unsigned>{0});
    }
  }
  void TearDown() override {
    if (count_ != nullptr) {
      drive::synchronize(stream());
      drive::deallocate(count_);
    }
  }

  [[nodiscard]] typename Device::stream_type stream() const { return made_->get(); }

  static anchored make(holdfast::over_read beyond) {
    return {holdfast::lane<Device>{holdfast::any_resource<Device>{holdfast::malloc_resource<Device>{}}},
            holdfast::scratch_options{.row_elements = 512, .over_read = beyond}};
  }

  /// One call of an engine: somebody's kernel writes all rows, somebody else's reads them and all of the tail.
  void step(anchored& scratch, std::int64_t rows, unsigned char value) const {
    const auto kv = scratch.acquire(stream(), rows);
    const auto real = static_cast<std::size_t>(rows) * 512;
    write_bytes(stream(), kv.data(), real, value);
    count_other(stream(), kv.data(), real, value, count_);
    count_other(stream(), kv.data() + real, static_cast<std::size_t>(kv.tail_rows()) * 512, 0, count_);
  }

  /// Bytes that were not as they should be, so far.
  [[nodiscard]] unsigned wrong() const {
    drive::synchronize(stream());
    return drive::read(count_, 1).front();
  }

  unsigned* count_ = nullptr;

 private:
  std::optional<typename drive::stream> made_;
};
TYPED_TEST_SUITE_P(foreign_kernels);

TYPED_TEST_P(foreign_kernels, read_128_rows_too_far_and_find_zeros) {
  auto scratch = TestFixture::make(holdfast::over_read::rows_beyond(128));
  for (const std::int64_t rows : {32, 1, 2048, 5000, 31}) this->step(scratch, rows, 0x5A);
  EXPECT_EQ(this->wrong(), 0U);
}

TYPED_TEST_P(foreign_kernels, read_topk_rows_however_few_there_are) {
  auto scratch = TestFixture::make(holdfast::over_read::at_least_rows(2048));
  for (const std::int64_t rows : {0, 1, 2047, 2048, 3000}) this->step(scratch, rows, 0x5A);
  EXPECT_EQ(this->wrong(), 0U);
}

TYPED_TEST_P(foreign_kernels, read_16_MiB_too_far_and_find_zeros) {
  auto scratch = TestFixture::make(holdfast::over_read::rows_beyond(32768));
  for (const std::int64_t rows : {32, 4096}) this->step(scratch, rows, 0x5A);
  EXPECT_EQ(this->wrong(), 0U);
}

TYPED_TEST_P(foreign_kernels, that_were_captured_before_it_grew_replay_right) {
  using driver = support::driver<TypeParam>;
  auto scratch = TestFixture::make(holdfast::over_read::rows_beyond(128));
  std::vector<typename driver::exec> execs;
  for (const std::int64_t rows : {64, 1024, 16384}) {
    driver::begin_capture(this->stream());
    this->step(scratch, rows, static_cast<unsigned char>(rows % 251));
    const auto graph = driver::end_capture(this->stream());
    ASSERT_TRUE(graph);
    EXPECT_EQ(driver::count(graph).memsets, 0);
    execs.push_back(driver::instantiate(graph));
  }
  for (int round = 0; round < 3; ++round) {
    for (auto& exec : execs) driver::launch(exec, this->stream());
    this->step(scratch, 500, 0x77);
  }
  EXPECT_EQ(this->wrong(), 0U);
}

TYPED_TEST_P(foreign_kernels, that_write_one_byte_past_the_end_fault) {
  auto scratch = TestFixture::make(holdfast::over_read::rows_beyond(128));
  const auto kv = scratch.acquire(this->stream(), 32);
  const auto write_too_far = [&] {
    write_bytes(this->stream(), kv.data() + 32 * 512, 1, 1);
    try {
      TypeParam::synchronize(this->stream());
    } catch (const holdfast::device_error& error) {
      _exit(error.code() == static_cast<int>(cudaErrorIllegalAddress) ? illegal_address : 1);
    }
  };
  EXPECT_EXIT(write_too_far(), faulted<TypeParam>, "");
}

REGISTER_TYPED_TEST_SUITE_P(foreign_kernels, read_128_rows_too_far_and_find_zeros, read_topk_rows_however_few_there_are,
                            read_16_MiB_too_far_and_find_zeros, that_were_captured_before_it_grew_replay_right,
                            that_write_one_byte_past_the_end_fault);

}  // namespace foreign_kernels
