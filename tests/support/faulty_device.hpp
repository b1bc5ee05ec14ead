// A device whose virtual memory calls fail when told, and that counts what it has given out:
//
//   using device = support::faulty<holdfast::host_device>;
//   holdfast::vmm_resource<device> pool;
//   device::fail(support::step::map, 1);        // the next map works; the one after it, and all others, fail
//   ...
//   device::heal();
//   EXPECT_EQ(device::given_out(), before);     // nothing leaked
//
// One plan and one count for each kind of device: tests that use it are one thread's.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>

#include <array>
#include <cstddef>
#include <ostream>
#include <string>

namespace support {

enum class step { reserve, create, map, allow, unmap };
inline constexpr step steps_that_give[] = {step::reserve, step::create, step::map, step::allow};

enum class failure { error, memory };  // device_error or out_of_memory

/// Reservations, physical memories and mappings.
struct given_out {
  std::ptrdiff_t reservations = 0, memories = 0, mappings = 0;

  friend bool operator==(const given_out&, const given_out&) = default;
  friend std::ostream& operator<<(std::ostream& out, const given_out& counts) {
    return out << counts.reservations << " reservations, " << counts.memories << " memories, " << counts.mappings
               << " mappings";
  }
};

template <class Device>
struct faulty : Device {
  using physical_type = typename Device::physical_type;

  static constexpr int code = 1234;  // of the errors

  faulty() = default;
  explicit faulty(int n) { this->ordinal = n; }
  static faulty of(typename Device::stream_type s) { return faulty{Device::of(s).ordinal}; }

  /// Calls of `at` fail from now on, after the next `skip`.
  static void fail(step at, std::size_t skip = 0, failure how = failure::error) {
    plan = {true, at, calls(at) + skip, how};
  }
  static void heal() { plan = {}; }
  static std::size_t calls(step at) { return called[static_cast<std::size_t>(at)]; }
  static support::given_out given_out() { return counts; }

  // --- the device's own
  [[nodiscard]] void* reserve(std::size_t bytes, std::size_t alignment) const {
    call(step::reserve);
    void* const p = Device::reserve(bytes, alignment);
    ++counts.reservations;
    return p;
  }
  void unreserve(void* p, std::size_t bytes) const {
    Device::unreserve(p, bytes);
    --counts.reservations;
  }
  [[nodiscard]] physical_type create(std::size_t bytes, const holdfast::physical_options& options = {}) const {
    call(step::create);
    const physical_type memory = Device::create(bytes, options);
    ++counts.memories;
    return memory;
  }
  void destroy(physical_type memory) const {
    Device::destroy(memory);
    --counts.memories;
  }
  void map(void* p, std::size_t bytes, physical_type memory) const {
    call(step::map);
    Device::map(p, bytes, memory);
    ++counts.mappings;
  }
  void allow(void* p, std::size_t bytes, holdfast::access allowed) const {
    call(step::allow);
    Device::allow(p, bytes, allowed);
  }
  void unmap(void* p, std::size_t bytes) const {  // one mapping
    call(step::unmap);
    Device::unmap(p, bytes);
    --counts.mappings;
  }

 private:
  struct plan_type {
    bool active = false;
    step at = step::reserve;
    std::size_t first = 0;
    failure how = failure::error;
  };

  static void call(step at) {
    const std::size_t nth = called[static_cast<std::size_t>(at)]++;
    if (!plan.active || plan.at != at || nth < plan.first) return;
    if (plan.how == failure::memory) throw holdfast::out_of_memory{"faulty", 0, 0, 0};
    throw holdfast::device_error{code, "step " + std::to_string(static_cast<int>(at)) + " failed, as told"};
  }

  static inline plan_type plan;
  static inline std::array<std::size_t, 5> called{};
  static inline support::given_out counts;
};

static_assert(holdfast::device<faulty<holdfast::host_device>> && holdfast::device<faulty<holdfast::cuda_device>>);

}  // namespace support
