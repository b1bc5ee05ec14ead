// The resource that is used where none is named: one a device, made on first use.
//
//   holdfast::any_resource bytes = holdfast::default_resource(holdfast::cuda_device{0});
//   holdfast::set_default_resource(holdfast::malloc_resource{holdfast::cuda_device{0}});
//
// CUDA devices start with an async_resource, host devices with a malloc_resource. The environment variable
// HOLDFAST_RESOURCE=async|malloc|cub chooses another at first use. It holds for devices of both kinds, so a program that
// uses both can only name what both have.
//
// Not here: a fallback. Where a device has no memory pools, async is an error that says so; choose malloc or cub.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/async.hpp>
#include <holdfast/resource/cub_caching.hpp>
#include <holdfast/resource/malloc.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

template <device Device>
struct resource_choice {
  std::string_view name;
  any_resource<Device> (*make)(Device);
};

/// What a kind of device has; the first is its default.
template <device Device>
inline constexpr std::array<resource_choice<Device>, 0> resource_choices{};

template <>
inline constexpr std::array resource_choices<cuda_device>{
    resource_choice<cuda_device>{"async", [](cuda_device d) -> any_resource<cuda_device> { return async_resource{d}; }},
    resource_choice<cuda_device>{
        "malloc", [](cuda_device d) -> any_resource<cuda_device> { return malloc_resource<cuda_device>{d}; }},
    resource_choice<cuda_device>{"cub",
                                 [](cuda_device d) -> any_resource<cuda_device> { return cub_caching_resource{d}; }},
};

template <>
inline constexpr std::array resource_choices<host_device>{
    resource_choice<host_device>{
        "malloc", [](host_device d) -> any_resource<host_device> { return malloc_resource<host_device>{d}; }},
};

/// The resource that `name` (null or empty: the default) stands for. Throws logic_error for a name the device lacks.
template <device Device>
any_resource<Device> make_resource(Device device, const char* name) {
  const std::string_view wanted = name == nullptr ? std::string_view{} : std::string_view{name};
  std::string has;
  for (const resource_choice<Device>& choice : resource_choices<Device>) {
    if (wanted.empty() || wanted == choice.name) {
      return choice.make(device);
    }
    has.append(has.empty() ? "" : ", ").append(choice.name);
  }
  throw logic_error{"HOLDFAST_RESOURCE=" + std::string{wanted} + ": " + Device::name + " devices have " + has};
}

template <device Device>
struct default_resources {
  std::mutex mutex;
  std::map<int, any_resource<Device>> of;

  [[gnu::visibility("default")]] static default_resources& instance() {
    static default_resources& leaked = *new default_resources;  // at exit the runtime may be gone first
    return leaked;
  }

  any_resource<Device> get(Device device) {
    const std::lock_guard lock{mutex};
    if (const auto found = of.find(device.ordinal); found != of.end()) {
      return found->second;
    }
    return of.emplace(device.ordinal, make_resource(device, std::getenv("HOLDFAST_RESOURCE"))).first->second;
  }

  std::optional<any_resource<Device>> set(any_resource<Device> resource) {
    const std::lock_guard lock{mutex};
    const auto [place, added] = of.try_emplace(resource.device().ordinal, resource);
    if (added) {
      return std::nullopt;
    }
    return std::exchange(place->second, std::move(resource));
  }
};

}  // namespace detail

/// The device's default resource; always the same one, until it is replaced. Thread safe. The first call makes it, and
/// throws `logic_error` for a HOLDFAST_RESOURCE that the device lacks, `device_error` when it cannot be made (no such
/// device, or no memory pools): nothing is remembered then, and the next call tries again.
template <device Device>
[[nodiscard]] any_resource<Device> default_resource(Device device) {
  return detail::default_resources<Device>::instance().get(device);
}

/// `resource` is its device's default from now on; the environment no longer counts there. Returns the former one (none
/// when it was never used). Those who took the former keep it. Thread safe.
inline std::optional<any_resource<cuda_device>> set_default_resource(any_resource<cuda_device> resource) {
  return detail::default_resources<cuda_device>::instance().set(std::move(resource));
}
inline std::optional<any_resource<host_device>> set_default_resource(any_resource<host_device> resource) {
  return detail::default_resources<host_device>::instance().set(std::move(resource));
}

}  // namespace holdfast::HOLDFAST_ABI
