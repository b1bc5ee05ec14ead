// Memory that finds who reads past its end, before its start, or after it was freed: the access faults, at once.
//
//   holdfast::set_default_resource(holdfast::guard_resource{holdfast::cuda_device{0}});       // in a test, for everything
//   holdfast::guard_resource under{gpu, {.placement = holdfast::guard_placement::start}};     // under-reads: run it twice
//   holdfast::guard_resource bare{gpu, {.omit_tails = true}};                                 // who relies on a tail?
//
// Every allocation is a mapping of its own and ends where that ends, with nothing mapped behind: [nothing | memory, the
// allocation at its end | nothing]. A tail that was declared is part of the allocation; what is read beyond it is error 700
// (cudaErrorIllegalAddress) on CUDA and SIGSEGV on the host. Freed memory is unmapped, and nobody gets its addresses for
// a while; growth always moves, so that stale addresses fault, too. Captures work over it as over any resource.
//
// What it cannot see: up to `slack(bytes, alignment)` bytes behind the end, because a start must be aligned (see
// most_alignment); an access that lands in another mapping; pieces inside of one allocation, which are not guarded from each
// other: rows of a buffer, a capture arena's scratch.
// Not here: speed. An allocation costs tens of microseconds and a granule (2 MiB on CUDA, a page on the host), its
// release a wait.
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
#include <bit>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

/// Which end of an allocation is exact.
enum class guard_placement : unsigned char {
  end,   ///< it ends where its mapping ends: finds over-reads
  start  ///< it begins where its mapping begins: finds under-reads
};

struct guard_options {
  guard_placement placement = guard_placement::end;
  /// tail_padded_allocator and tail_padded_resource add no tail, so that all who read one fault.
  bool omit_tails = false;
  /// Greater alignments are lowered to this one, so that less stays undetected: pointers are less aligned than was asked.
  /// What your kernels can do with: 16, say. A power of two; 0: as asked.
  std::size_t most_alignment = 0;
  /// Addresses before and behind each mapping, in bytes, where nothing is: how far a stray access is caught for sure.
  /// Rounded up to granules, one at least.
  std::size_t unmapped_bytes = std::size_t{2} << 20;
  /// So many freed allocations keep their addresses, unmapped, so that their use faults; then the oldest gives them back,
  /// earlier where addresses are short.
  std::size_t quarantine = 1024;
  /// Ordinals of other devices whose work may use the memory.
  std::vector<int> peers{};
};

namespace detail {

/// What rounding up to the alignment adds.
[[nodiscard]] constexpr std::size_t guard_slack(std::size_t bytes, std::size_t alignment) noexcept {
  return (alignment - bytes % alignment) % alignment;
}

template <device Device>
class guard_impl {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "guard_resource";
  static constexpr std::size_t max_alignment = ~std::size_t{};  // any: reservations have what is asked

  guard_impl(Device d, guard_options options) : device(d), options_(std::move(options)) {
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{device};
    if (!device.has_virtual_memory()) {
      throw logic_error{"guard_resource: " + std::string{Device::name} + " device " + std::to_string(device.ordinal) +
                        " has no virtual memory management; use malloc_resource under compute-sanitizer"};
    }
    granule_ = device.granularity();
    if (options_.most_alignment != 0 && !std::has_single_bit(options_.most_alignment)) {
      resource_rules::refuse_alignment(name, options_.most_alignment);
    }
    if (!round_up(std::max(options_.unmapped_bytes, granule_), granule_, unmapped_)) {
      throw logic_error{"guard_resource: " + std::to_string(options_.unmapped_bytes) + " unmapped bytes cannot be"};
    }
  }
  guard_impl(const guard_impl&) = delete;
  guard_impl& operator=(const guard_impl&) = delete;

  // What was never given back stays with the process.
  ~guard_impl() {
    for (auto& [p, made] : live_) {
      static_cast<void>(made.range.release());
    }
  }

  void* allocate(stream_type, std::size_t bytes, std::size_t alignment) {
    if (options_.most_alignment != 0) {
      alignment = std::min(alignment, options_.most_alignment);
    }
    const std::size_t unit = std::max(granule_, alignment);
    std::size_t mapped = 0;
    std::size_t before = 0;
    std::size_t all = 0;
    if (!round_up(bytes, granule_, mapped) || !round_up(unmapped_, unit, before) ||
        __builtin_add_overflow(before, mapped, &all) || __builtin_add_overflow(all, unmapped_, &all)) {
      throw out_of_memory{name, bytes, held(), device.memory().free};
    }
    std::unique_ptr<virtual_range<Device>> range;
    try {
      range = reserve(all, unit, mapped);
      range->commit(before, mapped);
    } catch (const out_of_memory&) {
      throw out_of_memory{name, bytes, held(), device.memory().free};
    }
    std::byte* p = range->data() + before;  // as aligned as asked
    std::size_t slack = 0;
    if (options_.placement == guard_placement::end) {
      slack = guard_slack(bytes, std::min(alignment, granule_));
      p += mapped - slack - bytes;
    }
    const std::lock_guard lock{mutex_};
    live_.emplace(p, allocation{std::move(range), slack});
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
      taken.mapped().range->decommit();
    } catch (...) {  // it may still be in use
      const std::lock_guard lock{mutex_};
      live_.insert(std::move(taken));
      throw;
    }
    std::unique_ptr<virtual_range<Device>> oldest;  // goes when the mutex is free
    const std::lock_guard lock{mutex_};
    freed_.push_back(std::move(taken.mapped().range));
    if (freed_.size() > options_.quarantine) {
      oldest = std::move(freed_.front());
      freed_.pop_front();
    }
  }

  [[nodiscard]] std::size_t held() const {
    const std::lock_guard lock{mutex_};
    std::size_t sum = 0;
    for (const auto& [p, made] : live_) {
      sum += made.range->committed();
    }
    return sum;
  }

  [[nodiscard]] std::size_t reserved() const {
    const std::lock_guard lock{mutex_};
    std::size_t sum = 0;
    for (const auto& [p, made] : live_) {
      sum += made.range->bytes();
    }
    for (const auto& range : freed_) {
      sum += range->bytes();
    }
    return sum;
  }

  [[nodiscard]] std::size_t slack() const {
    const std::lock_guard lock{mutex_};
    std::size_t most = 0;
    for (const auto& [p, made] : live_) {
      most = std::max(most, made.slack);
    }
    return most;
  }

  [[nodiscard]] const guard_options& options() const noexcept { return options_; }

  const Device device;

 private:
  struct allocation {
    std::unique_ptr<virtual_range<Device>> range;
    std::size_t slack;
  };

  /// Takes the addresses of freed allocations when those are what is short.
  [[nodiscard]] std::unique_ptr<virtual_range<Device>> reserve(std::size_t bytes, std::size_t alignment,
                                                               std::size_t memory) {
    const auto make = [&] {
      return std::make_unique<virtual_range<Device>>(device, bytes, alignment, range_options{{}, options_.peers});
    };
    try {
      return make();
    } catch (const out_of_memory&) {
      if (memory > device.memory().free) {
        throw;
      }
    }
    {
      std::deque<std::unique_ptr<virtual_range<Device>>> freed;  // goes when the mutex is free
      const std::lock_guard lock{mutex_};
      freed.swap(freed_);
    }
    return make();
  }

  const guard_options options_;
  std::size_t granule_ = 0;
  std::size_t unmapped_ = 0;
  mutable std::mutex mutex_;
  std::unordered_map<void*, allocation> live_;
  std::deque<std::unique_ptr<virtual_range<Device>>> freed_;  // oldest first
};

}  // namespace detail

/// Memory whose misuse faults. Copies share the resource; two made apart are not equal. Thread safe.
///
/// Fresh memory is usable at once, on any stream of the device and its peers. `deallocate` waits on the host for the work
/// queued on its stream, then unmaps; no call here breaks anybody's capture. A pointer that is not this resource's, or
/// was given back before, is ignored. Memory never given back stays with the process.
template <device Device>
class guard_resource : public detail::resource_handle<detail::guard_impl<Device>> {
  using base = detail::resource_handle<detail::guard_impl<Device>>;

 public:
  /// Throws logic_error where the device has no virtual memory management or an option makes no sense, device_error.
  explicit guard_resource(Device device = {}, guard_options options = {})
      : base(std::in_place, device, std::move(options)) {}

  /// Bytes behind the end of an allocation that can be read undetected. (Less for alignments above the granule.) Give an
  /// alignment that your sizes are multiples of, and it is 0.
  [[nodiscard]] static constexpr std::size_t slack(std::size_t bytes, std::size_t alignment) noexcept {
    return detail::guard_slack(bytes, alignment);
  }

  /// The most bytes that stay undetected behind a live allocation, 0 where starts are exact.
  [[nodiscard]] std::size_t slack_bytes() const { return this->impl().slack(); }
  /// Bytes of memory taken from the device now: whole granules.
  [[nodiscard]] std::size_t held_bytes() const { return this->impl().held(); }
  /// Bytes of addresses reserved now, those of freed allocations included.
  [[nodiscard]] std::size_t address_bytes() const { return this->impl().reserved(); }

  [[nodiscard]] bool omits_tails() const noexcept { return options().omit_tails; }
  [[nodiscard]] const guard_options& options() const noexcept { return this->impl().options(); }
};

static_assert(memory_resource<guard_resource<cuda_device>> && !extensible_resource<guard_resource<cuda_device>>);
static_assert(memory_resource<guard_resource<host_device>> && !extensible_resource<guard_resource<host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
