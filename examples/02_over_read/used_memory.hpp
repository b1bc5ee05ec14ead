// SPDX-License-Identifier: Apache-2.0
// Memory as it is in production: not fresh.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/memory_resource.hpp>

#include <cstddef>
#include <utility>

namespace demo {

/// Any resource, as if it had long been in use: what it hands out is full of 0xff, which is NaN in FP8.
template <holdfast::device Device>
class used_memory {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "used_memory";

  explicit used_memory(holdfast::any_resource<Device> memory) : memory_(std::move(memory)) {}

  void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    void* const data = memory_.allocate(stream, bytes, alignment);
    Device::fill(stream, data, std::byte{0xff}, bytes);
    return data;
  }
  void deallocate(stream_type stream, void* data, std::size_t bytes, std::size_t alignment) noexcept {
    memory_.deallocate(stream, data, bytes, alignment);
  }

  [[nodiscard]] Device device() const { return memory_.device(); }
  bool operator==(const used_memory&) const = default;

 private:
  holdfast::any_resource<Device> memory_;
};

static_assert(holdfast::memory_resource<used_memory<holdfast::host_device>>);

}  // namespace demo
