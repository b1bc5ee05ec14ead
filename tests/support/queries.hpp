// The fixture of producers of query rows: strided queries in device memory, and a host's image of all bytes around them.
#pragma once

#include "support/buffers.hpp"

#include <holdfast/view.hpp>

#include <gtest/gtest.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace support {

using triple = std::array<std::int64_t, 3>;

inline triple packed(const triple& extents) { return {extents[1] * extents[2], extents[2], 1}; }

/// [rows, heads, width] elements, here as the integers `Bits`, with any strides. Canaries lie on both sides; `image` is
/// what all of the memory should hold.
template <class Device, class Bits>
class queries {
 public:
  queries(const triple& extents, const triple& strides, std::int64_t shift = 0)
      : extents_(extents), strides_(strides), first_(canary + shift) {
    std::int64_t last = 0;
    for (std::size_t i = 0; i < 3; ++i) last += std::max<std::int64_t>(extents[i] - 1, 0) * strides[i];
    image.assign(static_cast<std::size_t>(first_ + last + 1 + canary), static_cast<Bits>(0x7f7f7f7f7f7f7f7f));
    data_.reset(driver<Device>::allocate(image.size() * sizeof(Bits)), driver<Device>::deallocate);
  }

  [[nodiscard]] Bits& at(std::int64_t row, std::int64_t head, std::int64_t i) {
    return image[static_cast<std::size_t>(first_ + row * strides_[0] + head * strides_[1] + i * strides_[2])];
  }
  [[nodiscard]] const Bits& at(std::int64_t row, std::int64_t head, std::int64_t i) const {
    return const_cast<queries*>(this)->at(row, head, i);
  }
  [[nodiscard]] const triple& extents() const { return extents_; }

  template <class T = Bits>
  [[nodiscard]] holdfast::strided_view<T, 3> view() const {
    using element = std::remove_const_t<T>;
    return holdfast::make_strided_view<T, 3>(reinterpret_cast<element*>(static_cast<Bits*>(data_.get()) + first_),
                                             {extents_[0], extents_[1], extents_[2]},
                                             {strides_[0], strides_[1], strides_[2]});
  }

  /// Each element becomes what `make(row, head, i)` gives, and the device's memory the image.
  template <class Make>
  void fill(const Make& make) {
    each([&](std::int64_t row, std::int64_t head, std::int64_t i) { at(row, head, i) = make(row, head, i); });
    write();
  }
  void fill_random(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    fill([&](auto...) { return static_cast<Bits>(random()); });
  }
  template <class Visit>
  void each(const Visit& visit) const {
    for (std::int64_t row = 0; row < extents_[0]; ++row)
      for (std::int64_t head = 0; head < extents_[1]; ++head)
        for (std::int64_t i = 0; i < extents_[2]; ++i) visit(row, head, i);
  }

  void write() { driver<Device>::write(static_cast<Bits*>(data_.get()), image); }

  /// Every byte is the image's. Waits for no stream.
  [[nodiscard]] ::testing::AssertionResult as_imagined() const {
    const auto now = driver<Device>::read(static_cast<const Bits*>(data_.get()), image.size());
    if (now == image) return ::testing::AssertionSuccess();
    const auto at = std::mismatch(now.begin(), now.end(), image.begin()).first - now.begin();
    return ::testing::AssertionFailure() << "element " << at - first_ << " is " << +now[static_cast<std::size_t>(at)]
                                         << ", should be " << +image[static_cast<std::size_t>(at)];
  }

  std::vector<Bits> image;

 private:
  static constexpr std::int64_t canary = 32;
  triple extents_, strides_;
  std::int64_t first_;
  std::shared_ptr<void> data_;
};

template <class Device>
class producer_test : public buffer_test<Device> {
 protected:
  using drive = driver<Device>;

  void TearDown() override {
    if (!memory_.empty()) drive::synchronize(this->stream.get());
    for (void* p : memory_) drive::deallocate(p);
    buffer_test<Device>::TearDown();
  }

  /// In device memory.
  template <class T>
  T* array(const std::vector<T>& values) {
    memory_.push_back(drive::allocate(std::max<std::size_t>(values.size() * sizeof(T), 1)));
    auto* const data = static_cast<T*>(memory_.back());
    drive::write(data, values);
    return data;
  }

  /// Gigabytes, of which a few bytes are touched; null where they cannot be had.
  static std::shared_ptr<std::byte> vast(std::size_t bytes) {
    if (Device{}.memory().free / 2 < bytes) return nullptr;
    if constexpr (is_host<Device>) {
      void* const p =
          ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) return nullptr;
      return {static_cast<std::byte*>(p), [bytes](std::byte* q) { ::munmap(q, bytes); }};
    } else {
      return {static_cast<std::byte*>(drive::allocate(bytes)), [](std::byte* q) { drive::deallocate(q); }};
    }
  }

  /// Nothing of `work` reaches a capturing stream, and it throws a logic_error that holds all of `words`.
  template <class Work>
  void expect_refused(const Work& work, const std::vector<std::string>& words) {
    drive::begin_capture(this->stream.get());
    try {
      work();
      ADD_FAILURE() << "not refused; should say: " << words.back();
    } catch (const holdfast::logic_error& error) {
      for (const std::string& word : words)
        EXPECT_NE(std::string{error.what()}.find(word), std::string::npos) << error.what() << "\nlacks: " << word;
    }
    auto graph = drive::end_capture(this->stream.get());
    ASSERT_TRUE(graph);
    EXPECT_EQ(drive::count(graph).total(), 0);
  }

  /// What one node of a graph, which `work` queues, does on each replay after `prepare(day)`.
  template <class Work, class Day>
  void expect_replays(const Work& work, const Day& day) {
    drive::begin_capture(this->stream.get());
    work();
    auto graph = drive::end_capture(this->stream.get());
    ASSERT_TRUE(graph);
    EXPECT_EQ(drive::count(graph).kernels, 1);
    EXPECT_EQ(drive::count(graph).total(), 1);
    auto exec = drive::instantiate(graph);
    for (std::uint64_t today = 1; today < 4; ++today) {
      day(today, [&] {
        drive::launch(exec, this->stream.get());
        drive::synchronize(this->stream.get());
      });
    }
  }

 private:
  std::vector<void*> memory_;
};

}  // namespace support
