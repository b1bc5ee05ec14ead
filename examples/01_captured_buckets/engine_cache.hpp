// SPDX-License-Identifier: Apache-2.0
// An engine's own caching allocator, plugged in as a resource: freed memory is kept, and handed to the next who asks for
// as much on the same stream. It knows nothing of captures; that is the library's business.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/malloc.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace demo {

template <holdfast::device Device>
class engine_cache {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "engine_cache";

  explicit engine_cache(Device device) : state_(std::make_shared<state>(device)) {}

  void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock{state_->mutex};
    auto& cached = state_->cached;
    const auto found = std::find_if(cached.begin(), cached.end(), [&](const piece& p) {
      return p.stream == stream && p.bytes == bytes && p.alignment == alignment;
    });
    if (found == cached.end()) {
      return state_->memory.allocate(stream, bytes, alignment);
    }
    void* const data = found->data;
    cached.erase(found);
    return data;
  }

  void deallocate(stream_type stream, void* data, std::size_t bytes, std::size_t alignment) noexcept {
    const std::lock_guard lock{state_->mutex};
    state_->cached.push_back({stream, data, bytes, alignment});
  }

  /// What frameworks call empty_cache(): all that nobody uses goes back to the device.
  void flush() {
    const std::lock_guard lock{state_->mutex};
    for (const piece& p : std::exchange(state_->cached, {})) {
      state_->memory.deallocate(p.stream, p.data, p.bytes, p.alignment);
    }
  }

  [[nodiscard]] Device device() const { return state_->memory.device(); }
  bool operator==(const engine_cache&) const = default;

 private:
  struct piece {
    stream_type stream;
    void* data;
    std::size_t bytes, alignment;
  };
  struct state {
    explicit state(Device device) : memory(device) {}
    holdfast::malloc_resource<Device> memory;
    std::mutex mutex;
    std::vector<piece> cached;
  };
  std::shared_ptr<state> state_;
};

static_assert(holdfast::memory_resource<engine_cache<holdfast::host_device>>);

}  // namespace demo
