// Memory that grows downwards from a fixed end, behind which zeros can be read: what an anchored_scratch's block is made
// of. It fits the resource interface, so that pinning, deferred release, exit and fork are a block's as everywhere; but
// ITS POINTERS ARE ENDS: `allocate(stream, bytes)` returns the address behind the last byte.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/detail/virtual_range.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Physical memory of zeros, for mappings that may only read it. One a device in the process, made on first use and kept
/// for good; correctness doesn't depend on its being the only one.
template <device Device>
class zero_page {
 public:
  /// Thread safe; call it relaxed, on the device. Throws out_of_memory, device_error; nothing changed then.
  [[gnu::visibility("default")]] static const zero_page& of(Device device) {
    static auto& pages = *new std::array<std::optional<zero_page>, 64>;  // leaked; as many as release_queue counts for
    static std::mutex& making = *new std::mutex;
    const std::lock_guard lock{making};
    std::optional<zero_page>& page = pages.at(static_cast<std::size_t>(device.ordinal));
    if (!page) {
      page = zero_page{device};
    }
    return *page;
  }

  [[nodiscard]] typename Device::physical_type memory() const noexcept { return memory_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  /// A granule on CUDA. The host's granules are so small that a long tail would run out of mappings.
  static constexpr std::size_t least_bytes = std::size_t{2} << 20;

  explicit zero_page(Device of) {
    static_cast<void>(round_up(least_bytes, of.granularity(physical_options{}), bytes_));
    memory_ = of.create(bytes_, physical_options{});
    try {
      virtual_range<Device> window{of, bytes_, 0, {}};
      window.show(0, bytes_, memory_, access::read_write);
      const auto stream = of.library_stream();
      try {
        Device::fill(stream, window.data(), std::byte{0}, bytes_);
        Device::synchronize(stream);
      } catch (...) {
        Device::synchronize(stream);  // before the window goes
        throw;
      }
    } catch (...) {
      of.destroy(memory_);
      throw;
    }
  }

  typename Device::physical_type memory_{};
  std::size_t bytes_ = 0;
};

template <device Device>
class anchored_scratch_impl {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "anchored_scratch";
  static constexpr std::size_t max_alignment = ~std::size_t{};  // of ends: a granule's

  anchored_scratch_impl(Device d, std::size_t reserve_bytes, std::size_t tail_bytes) : device(d) {
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{device};
    granule_ = device.granularity(physical_options{});
    if (!round_up(reserve_bytes == 0 ? device.memory().total : reserve_bytes, granule_, room_) ||
        !round_up(tail_bytes, granule_, tail_) || __builtin_add_overflow(room_, tail_, &all_) ||
        __builtin_add_overflow(all_, granule_, &all_)) {
      throw logic_error{"anchored_scratch: " + std::to_string(reserve_bytes) + " bytes of addresses and a tail of " +
                        std::to_string(tail_bytes) + " bytes cannot be"};
    }
  }
  anchored_scratch_impl(const anchored_scratch_impl&) = delete;
  anchored_scratch_impl& operator=(const anchored_scratch_impl&) = delete;

  // What was never given back stays with the process.
  ~anchored_scratch_impl() { static_cast<void>(range_.release()); }

  // The range: [addresses to grow into | memory | zero page, again and again | a granule where nothing ever is].

  void* allocate(stream_type, std::size_t bytes, std::size_t) {
    if (range_ != nullptr) {
      throw logic_error{"anchored_scratch: a second allocation"};
    }
    if (bytes > room_) {
      throw out_of_memory{name, bytes, 0, device.memory().free};
    }
    auto range = std::make_unique<virtual_range<Device>>(device, all_, granule_, range_options{});
    range->commit(room_ - bytes, bytes);
    for (std::size_t shown = 0; shown < tail_;) {
      const zero_page<Device>& zeros = zero_page<Device>::of(device);
      const std::size_t part = std::min(zeros.bytes(), tail_ - shown);
      range->show(room_ + shown, part, zeros.memory(), access::read);
      shown += part;
    }
    range_ = std::move(range);
    return end();
  }

  void deallocate(stream_type stream, void* p, std::size_t, std::size_t) {
    if (range_ != nullptr && p == end()) {
      wait_for_work(device, stream);
      range_.reset();
    }
  }

  bool extend(std::size_t old_bytes, std::size_t new_bytes) {
    if (new_bytes > room_) {
      return false;
    }
    try {
      range_->commit(room_ - new_bytes, new_bytes - old_bytes);
    } catch (const out_of_memory&) {
      return false;
    }
    return true;
  }

  void decommit(stream_type stream) {
    wait_for_work(device, stream);
    range_->decommit();
  }

  void recommit() { range_->recommit(); }

  [[nodiscard]] std::size_t granule() const noexcept { return granule_; }

  const Device device;

 private:
  [[nodiscard]] void* end() const noexcept { return range_->data() + room_; }

  std::size_t granule_ = 0;
  std::size_t room_ = 0;  // bytes of addresses before the end
  std::size_t tail_ = 0;
  std::size_t all_ = 0;
  std::unique_ptr<virtual_range<Device>> range_;
};

/// One allocation at a time, of whole granules, with `tail_bytes` of zeros behind its end that can be read, not written.
/// Used by one block through any_resource, and no more thread safe than a block is.
template <device Device>
class anchored_scratch_resource : public resource_handle<anchored_scratch_impl<Device>> {
 public:
  using stream_type = typename Device::stream_type;

  /// Up to `reserve_bytes` can be had; 0: as much as the device has memory. Throws logic_error, device_error.
  anchored_scratch_resource(Device of, std::size_t reserve_bytes, std::size_t tail_bytes)
      : resource_handle<anchored_scratch_impl<Device>>(std::in_place, of, reserve_bytes, tail_bytes) {}

  /// Downwards. False: addresses or memory don't suffice, and nothing changed.
  bool extend(stream_type, void*, std::size_t old_bytes, std::size_t new_bytes) {
    return this->impl().extend(old_bytes, new_bytes);
  }
  /// The zeros stay.
  void decommit(stream_type stream, void*, std::size_t) { this->impl().decommit(stream); }
  void recommit(stream_type, void*, std::size_t) { this->impl().recommit(); }

  [[nodiscard]] std::size_t granule() const noexcept { return this->impl().granule(); }
};

}  // namespace holdfast::HOLDFAST_ABI::detail
