// Both devices, for typed tests:
//
//   template <class Device> class my_test : public support::device_test<Device> {};
//   TYPED_TEST_SUITE(my_test, support::both_devices, support::device_names);
#pragma once

#include "cuda_driver.hpp"
#include "driver.hpp"
#include "host_driver.hpp"

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace support {

#ifdef HOLDFAST_TEST_HOST_ONLY  // sanitizers look at host code: there is nothing to compile twice for
using both_devices = ::testing::Types<holdfast::host_device>;
#else
using both_devices = ::testing::Types<holdfast::host_device, holdfast::cuda_device>;
#endif

/// Prints "host" or "cuda".
struct device_names {
  template <class Device>
  static std::string GetName(int) {
    return Device::name;
  }
};

template <class Device>
inline constexpr bool is_host = std::is_same_v<Device, holdfast::host_device>;

/// How many devices of the kind there are to use.
template <class Device>
int device_count() {
  if constexpr (is_host<Device>) {
    return 8;
  } else {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : (static_cast<void>(cudaGetLastError()), 0);
  }
}

/// This thread's current device.
template <class Device>
Device current_device() {
  Device current{};
  if constexpr (is_host<Device>) {
    current = holdfast::host::current_device();
  } else {
    holdfast::detail::cuda_check(cudaGetDevice(&current.ordinal), "cudaGetDevice");
  }
  return current;
}

/// While it lives, work on different streams runs in an order drawn from `seed`. On CUDA the hardware chooses.
template <class Device>
class any_order {
 public:
  explicit any_order(std::uint64_t) {}
};

template <>
class any_order<holdfast::host_device> {
 public:
  explicit any_order(std::uint64_t seed) : schedule_(seed) {}

 private:
  holdfast::host::seeded_schedule schedule_;
};

/// The exit code of a child whose stream reported an illegal address.
inline constexpr int illegal_address = 77;

/// A predicate for EXPECT_EXIT: what the child's device did was an access to memory that isn't there.
template <class Device>
bool faulted(int status) {
  if constexpr (is_host<Device>) {
    return died_of_access(status);
  } else {
    return WIFEXITED(status) && WEXITSTATUS(status) == illegal_address;
  }
}

}  // namespace support
