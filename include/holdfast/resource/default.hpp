// The resource that is used where none is named: one a device, made on first use.
//
//   holdfast::any_resource bytes = holdfast::default_resource(holdfast::cuda_device{0});
//   holdfast::set_default_resource(holdfast::malloc_resource{holdfast::cuda_device{0}});
//
// What stays, buffers and arenas, comes from a vmm_resource and grows where it is; where a device has no virtual memory
// (default_resource(device).persistent().name() says), and for all else, CUDA devices have an async_resource and host
// devices a malloc_resource. The environment variable HOLDFAST_RESOURCE=guard|malloc|async|caching|cub|vmm chooses one resource for
// everything, at first use, but for anchored_scratch, which is virtual memory of its own. It holds for devices of both
// kinds, so a program that uses both can only name what both have.
//
// Not here: a fallback for memory pools. Where a device has none, async is an error that says so; choose malloc or cub.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/async.hpp>
#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/cub_caching.hpp>
#include <holdfast/resource/guard.hpp>
#include <holdfast/resource/malloc.hpp>
#include <holdfast/resource/vmm.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

/// One resource for calls, and one for what stays.
template <device Device>
class split_resource {
 public:
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "default_resource";

  split_resource(any_resource<Device> calls, any_resource<Device> stays)
      : calls_(std::move(calls)), stays_(std::move(stays)) {}

  void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    return calls_.allocate(stream, bytes, alignment);
  }
  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    calls_.deallocate(stream, p, bytes, alignment);
  }
  [[nodiscard]] any_resource<Device> persistent() const { return stays_; }
  [[nodiscard]] Device device() const noexcept { return calls_.device(); }

  friend bool operator==(const split_resource&, const split_resource&) = default;

 private:
  any_resource<Device> calls_, stays_;
};

template <device Device>
struct resource_choice {
  std::string_view name;
  any_resource<Device> (*make)(Device);
};

template <class Resource, class Device>
any_resource<Device> make_any(Device device) {
  return Resource{device};
}

template <class Device>
any_resource<Device> make_caching(Device device) {
  return caching_resource<Device>{malloc_resource<Device>{device}};
}

/// What a kind of device has; the first is used for calls where none is named.
template <device Device>
inline constexpr std::array<resource_choice<Device>, 0> resource_choices{};

template <>
inline constexpr std::array<resource_choice<cuda_device>, 6> resource_choices<cuda_device>{{
    {"async", make_any<async_resource, cuda_device>},
    {"malloc", make_any<malloc_resource<cuda_device>, cuda_device>},
    {"caching", make_caching<cuda_device>},
    {"cub", make_any<cub_caching_resource, cuda_device>},
    {"vmm", make_any<vmm_resource<cuda_device>, cuda_device>},
    {"guard", make_any<guard_resource<cuda_device>, cuda_device>},
}};

template <>
inline constexpr std::array<resource_choice<host_device>, 4> resource_choices<host_device>{{
    {"malloc", make_any<malloc_resource<host_device>, host_device>},
    {"caching", make_caching<host_device>},
    {"vmm", make_any<vmm_resource<host_device>, host_device>},
    {"guard", make_any<guard_resource<host_device>, host_device>},
}};

/// What is used where nothing is named.
template <device Device>
any_resource<Device> make_default(Device device, bool virtual_memory) {
  any_resource<Device> calls = resource_choices<Device>.front().make(device);
  if (!virtual_memory) {
    return calls;
  }
  return split_resource<Device>{std::move(calls), vmm_resource<Device>{device}};
}

/// The resource that `name` (null or empty: the default) stands for. Throws logic_error for a name the device lacks.
template <device Device>
any_resource<Device> make_resource(Device device, const char* name) {
  const std::string_view wanted = name == nullptr ? std::string_view{} : std::string_view{name};
  if (wanted.empty()) {
    return make_default(device, device.has_virtual_memory());
  }
  std::string has;
  for (const resource_choice<Device>& choice : resource_choices<Device>) {
    if (wanted == choice.name) {
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
