// RMM's resources, for the conformance suite. The arena is not among them: it synchronises the whole device when memory is
// short, which breaks captures.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/mr.hpp>

#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>

namespace support {

struct rmm_entry {
  using device = holdfast::cuda_device;

  /// Made on `d`: RMM's resources are of the device that is current when they are made.
  template <class Make>
  static holdfast::any_resource<device> on(device d, Make make) {
    const device::relaxed_scope relaxed;
    const device::current_scope current{d};
    return holdfast::mr_resource{make(), d};
  }
};

// clang-format off
struct rmm_cuda : rmm_entry { static constexpr auto name = "rmm_cuda"; static auto make(device d = {}) { return on(d, [] { return rmm::mr::cuda_memory_resource{}; }); } };
struct rmm_async : rmm_entry { static constexpr auto name = "rmm_async"; static auto make(device d = {}) { return on(d, [] { return rmm::mr::cuda_async_memory_resource{}; }); } };
struct rmm_pool : rmm_entry { static constexpr bool breaks_captures_when_made = true; static constexpr auto name = "rmm_pool"; static auto make(device d = {}) { return on(d, [] { return rmm::mr::pool_memory_resource{rmm::mr::cuda_memory_resource{}, std::size_t{64} << 20}; }); } };
// clang-format on

using resources_under_test = ::testing::Types<rmm_cuda, rmm_async, rmm_pool>;

}  // namespace support
