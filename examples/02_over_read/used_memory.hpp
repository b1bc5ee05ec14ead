// SPDX-License-Identifier: Apache-2.0
// Memory at the edge of a mapping: the address behind its last byte is nobody's. Virtual memory makes the fault
// deterministic that allocators have now and then.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/memory_resource.hpp>

#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace demo {

/// Whole pages, and nothing behind them: one more page of addresses is reserved, and stays empty.
template <holdfast::device Device>
class mapping {
 public:
  /// `bytes` are rounded up to pages (on CUDA, 2 MiB).
  mapping(Device device, std::size_t bytes)
      : device_(device),
        page_(device.granularity()),
        bytes_((bytes + page_ - 1) / page_ * page_),
        begin_(static_cast<std::byte*>(device.reserve(bytes_ + page_, page_))) {
    const auto memory = device.create(bytes_);
    device.map(begin_, bytes_, memory, holdfast::access::read_write);
    device.destroy(memory);  // the mapping keeps it
  }
  mapping(const mapping&) = delete;
  mapping& operator=(const mapping&) = delete;
  ~mapping() {
    try {
      device_.unmap(begin_, bytes_);
      device_.unreserve(begin_, bytes_ + page_);
    } catch (const std::exception&) {  // the context is lost, and the memory with it
    }
  }

  [[nodiscard]] std::byte* end() const { return begin_ + bytes_; }

 private:
  Device device_;
  std::size_t page_;
  std::size_t bytes_;
  std::byte* begin_;
};

/// A resource whose every allocation ends where its own mapping ends.
template <holdfast::device Device>
class edge_memory {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "edge_memory";

  explicit edge_memory(Device device) : state_(std::make_shared<state>(device)) {}

  void* allocate(stream_type /*stream*/, std::size_t bytes, std::size_t alignment) {
    const std::size_t size = (bytes + alignment - 1) / alignment * alignment;
    auto pages = std::make_unique<mapping<Device>>(state_->device, size);
    void* const data = pages->end() - size;
    const std::lock_guard lock{state_->mutex};
    state_->live.emplace(data, std::move(pages));
    return data;
  }

  void deallocate(stream_type stream, void* data, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    try {
      Device::synchronize(stream);
    } catch (const std::exception&) {
      return;  // leaked, rather than unmapped under somebody's feet
    }
    const std::lock_guard lock{state_->mutex};
    state_->live.erase(data);
  }

  [[nodiscard]] Device device() const { return state_->device; }
  bool operator==(const edge_memory&) const = default;

 private:
  struct state {
    explicit state(Device d) : device(d) {}
    const Device device;
    std::mutex mutex;
    std::map<void*, std::unique_ptr<mapping<Device>>> live;
  };
  std::shared_ptr<state> state_;
};

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

static_assert(holdfast::memory_resource<edge_memory<holdfast::host_device>>);
static_assert(holdfast::memory_resource<used_memory<holdfast::host_device>>);

}  // namespace demo
