// What the tests of caching_resource share: a pool over an upstream that counts, and work that takes a while.
#pragma once

#include "support/resources.hpp"

#include <holdfast/resource/caching.hpp>

#include <cstddef>
#include <utility>

namespace support {

inline constexpr std::size_t mebibyte = std::size_t{1} << 20;

template <class Device>
class caching_test : public device_test<Device> {
 protected:
  using drive = driver<Device>;
  using stream_type = typename Device::stream_type;
  using pool_type = holdfast::caching_resource<Device>;

  void SetUp() override {
    device_test<Device>::SetUp();
    if (!this->IsSkipped()) ballast_ = drive::allocate(ballast_bytes);
  }
  void TearDown() override {
    if constexpr (is_host<Device>) holdfast::host::run_pending();  // cudaFree waits by itself
    if (ballast_ != nullptr) drive::deallocate(ballast_);
  }

  [[nodiscard]] pool_type make_pool(holdfast::caching_options options = {}) const {
    return pool_type{upstream, std::move(options)};
  }

  /// Queues work, and returns an event behind it. On the host it stays pending until somebody waits.
  [[nodiscard]] typename Device::event occupy(stream_type s) const {
    for (int i = 0; i < (is_host<Device> ? 1 : 64); ++i) Device::fill(s, ballast_, std::byte{0}, ballast_bytes);
    typename Device::event behind{Device{}};
    behind.record(s);
    return behind;
  }

  counting_resource<Device> upstream;

 private:
  static constexpr std::size_t ballast_bytes = is_host<Device> ? 64 : 256 * mebibyte;
  void* ballast_ = nullptr;
};

}  // namespace support
