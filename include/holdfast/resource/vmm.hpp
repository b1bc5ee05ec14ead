// Memory that grows where it is: addresses are reserved far ahead, physical memory is put behind them as it is needed.
//
//   holdfast::vmm_resource memory{holdfast::cuda_device{0}};
//   void* p = memory.allocate(stream, 1 << 20, 256);          // reserves addresses for all of the device's memory
//   memory.extend(stream, p, 1 << 20, 1 << 30);               // the same p
//   memory.decommit(stream, p, 1 << 30);                      // the memory goes, the addresses stay
//
// For what stays and grows: the buffers and arenas of an engine, one allocation each. They grow in place, inside captures
// too, so that one address serves all graphs, and suspend and resume under them. An allocation takes whole granules
// (2 MiB on CUDA) and tens of microseconds.
//
// Not here: per-call scratch (use async_resource). Where a device has no virtual memory (some virtual GPUs), the
// constructor says so; default_buffer_resource falls back by itself.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/detail/virtual_range.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

struct vmm_options {
  /// Addresses reserved for each allocation, in bytes: how far it can grow where it is. 0: as much as the device has
  /// memory. Less is taken where addresses are short, but never less than an allocation needs.
  std::size_t reserve_bytes = 0;
  /// Ordinals of other devices whose work may use the memory, granules that are added later included.
  std::vector<int> peers{};
  /// How memory is made. Import handles are had by cuMemRetainAllocationHandle: one for each step of growth.
  physical_options physical{};
  /// Whether addresses that were given back may be given out again. If not, work that still uses them faults, and
  /// addresses are used up.
  bool reuse_addresses = true;
};

namespace detail {

template <device Device>
class vmm_impl {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "vmm_resource";
  static constexpr std::size_t max_alignment = ~std::size_t{};  // any: reservations have what is asked

  vmm_impl(Device d, vmm_options options) : device(d), options_(std::move(options)) {
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{device};
    if (!device.has_virtual_memory()) {
      throw logic_error{"vmm_resource: " + std::string{Device::name} + " device " + std::to_string(device.ordinal) +
                        " has no virtual memory management; use async_resource or malloc_resource"};
    }
    granule_ = device.granularity(options_.physical);
    if (!round_up(options_.reserve_bytes == 0 ? device.memory().total : options_.reserve_bytes, granule_, ahead_)) {
      throw logic_error{"vmm_resource: " + std::to_string(options_.reserve_bytes) + " bytes of addresses cannot be"};
    }
  }
  vmm_impl(const vmm_impl&) = delete;
  vmm_impl& operator=(const vmm_impl&) = delete;

  // What was never given back stays with the process.
  ~vmm_impl() {
    for (auto& [p, range] : live_) {
      static_cast<void>(range.release());
    }
  }

  void* allocate(stream_type, std::size_t bytes, std::size_t alignment) {
    std::size_t committed = 0;
    if (!round_up(bytes, granule_, committed)) {
      throw out_of_memory{name, bytes, held(), device.memory().free};
    }
    std::unique_ptr<virtual_range<Device>> range;
    try {
      range = reserve(std::max(committed, ahead_), committed, std::max(alignment, granule_));
      range->commit(0, committed);
    } catch (const out_of_memory&) {
      throw out_of_memory{name, bytes, held(), device.memory().free};
    }
    const std::lock_guard lock{mutex_};
    void* const p = range->data();
    live_.emplace(p, std::move(range));
    return p;
  }

  void deallocate(stream_type stream, void* p, std::size_t, std::size_t) {
    auto taken = [&] {
      const std::lock_guard lock{mutex_};
      return live_.extract(p);
    }();
    if (taken.empty()) {
      return;
    }
    try {
      wait_for_work(device, stream);
      taken.mapped()->decommit();
    } catch (...) {  // it may still be in use
      const std::lock_guard lock{mutex_};
      live_.insert(std::move(taken));
      throw;
    }
    if (!options_.reuse_addresses) {
      taken.mapped()->abandon_addresses();
    }
  }

  bool extend(void* p, std::size_t new_bytes) {
    std::size_t wanted = 0;
    const std::lock_guard lock{mutex_};
    const auto found = live_.find(p);
    if (found == live_.end() || !round_up(new_bytes, granule_, wanted) || wanted > found->second->bytes()) {
      return false;
    }
    virtual_range<Device>& range = *found->second;
    const std::size_t committed = range.committed();
    if (range.decommitted()) {
      return false;
    }
    if (wanted > committed) {
      try {
        range.commit(committed, wanted - committed);
      } catch (const out_of_memory&) {
        return false;
      }
    }
    return true;
  }

  void decommit(stream_type stream, void* p) {
    wait_for_work(device, stream);
    const std::lock_guard lock{mutex_};
    range_at(p).decommit();
  }

  void recommit(void* p) {
    const std::lock_guard lock{mutex_};
    range_at(p).recommit();
  }

  [[nodiscard]] std::size_t held() const {
    const std::lock_guard lock{mutex_};
    std::size_t sum = 0;
    for (const auto& [p, range] : live_) {
      sum += range->committed();
    }
    return sum;
  }

  [[nodiscard]] std::size_t reserved() const {
    const std::lock_guard lock{mutex_};
    std::size_t sum = 0;
    for (const auto& [p, range] : live_) {
      sum += range->bytes();
    }
    return sum;
  }

  const Device device;

 private:
  [[nodiscard]] std::unique_ptr<virtual_range<Device>> reserve(std::size_t wanted, std::size_t least,
                                                               std::size_t alignment) const {
    for (;;) {
      try {
        return std::make_unique<virtual_range<Device>>(device, wanted, alignment,
                                                       range_options{options_.physical, options_.peers});
      } catch (const out_of_memory&) {
        if (wanted == least) {
          throw;
        }
      }
      wanted = std::max(least, wanted / 2 / granule_ * granule_);
    }
  }

  [[nodiscard]] virtual_range<Device>& range_at(void* p) {
    const auto found = live_.find(p);
    if (found == live_.end()) {
      throw logic_error{"vmm_resource: memory that is not its own"};
    }
    return *found->second;
  }

  const vmm_options options_;
  std::size_t granule_ = 0;
  std::size_t ahead_ = 0;  // addresses to reserve
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::unique_ptr<virtual_range<Device>>> live_;
};

}  // namespace detail

/// Virtual memory, a range of addresses for each allocation. Copies share the resource; two made apart are not equal.
/// Thread safe.
///
/// Fresh memory is usable at once, on any stream of the device and its peers. `deallocate` and `decommit` wait on the host
/// for the work queued on their stream (what a kernel of the host device throws meanwhile is lost: synchronise first); no
/// call here breaks anybody's capture. A pointer that is not this resource's, or was given
/// back before, is ignored by `deallocate` and `extend`. Memory never given back stays with the process.
template <device Device>
class vmm_resource : public detail::resource_handle<detail::vmm_impl<Device>> {
  using base = detail::resource_handle<detail::vmm_impl<Device>>;

 public:
  using stream_type = typename Device::stream_type;

  /// Throws logic_error where the device has no virtual memory management, device_error.
  explicit vmm_resource(Device device = {}, vmm_options options = {})
      : base(std::in_place, device, std::move(options)) {}

  /// Up to `new_bytes`, in whole granules. Within the granules there are, nothing happens. False when the reserved
  /// addresses or the device's memory don't suffice; nothing changed then, nor when it throws device_error.
  [[nodiscard]] bool extend(stream_type, void* p, std::size_t, std::size_t new_bytes) {
    const typename Device::relaxed_scope relaxed;
    return this->impl().extend(p, new_bytes);
  }

  /// As memory_resource.hpp says. Throws logic_error for memory that is not its own.
  void decommit(stream_type stream, void* p, std::size_t) {
    const typename Device::relaxed_scope relaxed;
    this->impl().decommit(stream, p);
  }
  void recommit(stream_type, void* p, std::size_t) {
    const typename Device::relaxed_scope relaxed;
    this->impl().recommit(p);
  }

  /// Bytes of memory taken from the device now.
  [[nodiscard]] std::size_t held_bytes() const { return this->impl().held(); }
  /// Bytes of addresses reserved now.
  [[nodiscard]] std::size_t address_bytes() const { return this->impl().reserved(); }
};

static_assert(extensible_resource<vmm_resource<cuda_device>> && suspendable_resource<vmm_resource<cuda_device>>);
static_assert(extensible_resource<vmm_resource<host_device>> && suspendable_resource<vmm_resource<host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
