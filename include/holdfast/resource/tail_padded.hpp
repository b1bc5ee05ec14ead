// Gives every allocation of an existing pool a tail that may be read, and is zero.
//
//   holdfast::tail_padded_resource padded{pool, 65536};              // 64 KiB behind each allocation
//   holdfast::any_resource<holdfast::cuda_device> bytes = padded;    // for whatever allocates from it
//
// For consumers that over-read memory which comes from all over an engine. The tail is filled in the order of the
// allocating stream; it costs its bytes and a memset each time. Where rows are known, use a tail_padded_allocator.
// Buffers and arenas over it have tails, too; so they don't grow where they are.
// Not here: a tail for memory that was allocated elsewhere.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <string>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

template <device Device>
class tail_padded_resource {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "tail_padded_resource";

  /// `tail_bytes` behind each allocation of `upstream`; none when that omits tails.
  tail_padded_resource(any_resource<Device> upstream, std::size_t tail_bytes)
      : upstream_(std::move(upstream)), tail_bytes_(upstream_.omits_tails() ? 0 : tail_bytes) {}

  /// As upstream's; the tail begins at the byte behind the last. Throws what upstream does, out_of_memory when bytes and
  /// tail together overflow.
  [[nodiscard]] void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    std::size_t padded = 0;
    if (__builtin_add_overflow(bytes, tail_bytes_, &padded)) {
      throw out_of_memory{name, bytes, 0, 0};
    }
    void* const p = upstream_.allocate(stream, bytes == 0 ? 0 : padded, alignment);
    if (p != nullptr) {
      try {
        const typename Device::relaxed_scope relaxed;
        const typename Device::current_scope current{upstream_.device()};
        Device::fill(stream, static_cast<std::byte*>(p) + bytes, std::byte{0}, tail_bytes_);
      } catch (...) {
        upstream_.deallocate(stream, p, padded, alignment);
        throw;
      }
    }
    return p;
  }

  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    upstream_.deallocate(stream, p, bytes + tail_bytes_, alignment);
  }

  [[nodiscard]] Device device() const noexcept { return upstream_.device(); }
  /// Bytes behind each allocation that may be read.
  [[nodiscard]] std::size_t tail_bytes() const noexcept { return tail_bytes_; }
  [[nodiscard]] bool omits_tails() const noexcept { return upstream_.omits_tails(); }

  friend bool operator==(const tail_padded_resource&, const tail_padded_resource&) = default;

 private:
  any_resource<Device> upstream_;
  std::size_t tail_bytes_;
};

}  // namespace holdfast::HOLDFAST_ABI
