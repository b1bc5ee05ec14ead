// One launch on the host device; kernel_launch.cuh has the one on CUDA.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/version.hpp>

#include <utility>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Queues `body`. Throws logic_error for the legacy stream while a blocking one captures, which a launch would break.
template <class Body>
void launch(host::stream_ref stream, const char* kernel, Body&& body) {
  if (const capture_state state = host_device::capturing(stream).state; state == capture_state::implicit) {
    resource_rules::refuse_capture(kernel, state);
  }
  const host_device::relaxed_scope relaxed;  // a launch beside somebody's capture would break it
  stream.run(std::forward<Body>(body));
}

}  // namespace holdfast::HOLDFAST_ABI::detail
