// A share of a device's memory: at most so many bytes live at once, whoever allocates them.
//
//   holdfast::limiting_resource share{holdfast::default_resource(gpu), std::size_t{8} << 30};      // 8 GiB
//   holdfast::any_resource<holdfast::cuda_device> bytes = share;           // all that is made over it shares the limit
//
// What counts is what is asked for, growth in place and the resource for what stays included; what an upstream rounds up
// or caches does not. Over a pool, the limit is on what is used; under one, on what the pool holds.
// Not here: waiting for memory, fairness, checks of what is given back (put a tracking_resource over it).
#pragma once

#include <holdfast/detail/resource_policy.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

template <device Device>
class limiting_policy : public policy_calls<Device> {
 public:
  using typename policy_calls<Device>::upstream_type;
  using typename policy_calls<Device>::stream_type;

  explicit limiting_policy(std::size_t limit) : limit_(limit) {}

  void* allocate(upstream_type& upstream, stream_type stream, std::size_t bytes, std::size_t alignment) {
    std::size_t held = 0;
    if (!take(bytes, held)) {
      refusals_.fetch_add(1, std::memory_order_relaxed);
      throw out_of_memory{"limiting_resource of " + std::to_string(limit_) + " bytes", bytes, held,
                          upstream.device().memory().free};
    }
    try {
      return upstream.allocate(stream, bytes, alignment);
    } catch (...) {
      give_back(bytes);
      throw;
    }
  }

  // After the upstream's call, so that never more than the limit is live.
  void deallocate(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    upstream.deallocate(stream, p, bytes, alignment);
    give_back(bytes);
  }

  bool extend(upstream_type& upstream, stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    const std::size_t more = std::max(old_bytes, new_bytes) - old_bytes;
    std::size_t held = 0;
    if (!take(more, held)) {
      refusals_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    bool extended = false;
    try {
      extended = upstream.extend(stream, p, old_bytes, new_bytes);
    } catch (...) {
      give_back(more);
      throw;
    }
    if (!extended) {
      give_back(more);
    }
    return extended;
  }

  [[nodiscard]] std::size_t limit() const noexcept { return limit_; }
  [[nodiscard]] std::size_t held() const noexcept { return held_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t refusals() const noexcept { return refusals_.load(std::memory_order_relaxed); }

 private:
  /// False, and `held` is what stands in the way.
  [[nodiscard]] bool take(std::size_t bytes, std::size_t& held) noexcept {
    held = held_.load(std::memory_order_relaxed);
    do {
      if (bytes > limit_ - held) {
        return false;
      }
    } while (!held_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
    return true;
  }

  void give_back(std::size_t bytes) noexcept {
    std::size_t held = held_.load(std::memory_order_relaxed);
    while (!held_.compare_exchange_weak(held, held - std::min(held, bytes), std::memory_order_relaxed)) {
    }
  }

  const std::size_t limit_;
  std::atomic<std::size_t> held_ = 0;  // never above limit_
  std::atomic<std::uint64_t> refusals_ = 0;
};

}  // namespace detail

/// At most `limit_bytes()` live bytes of any other resource. Copies share the limit; two made apart are not equal. Thread
/// safe: never a byte beyond, however many threads ask.
///
/// Beyond it, `allocate` throws out_of_memory with what was asked and what is held, and `extend` is false; the upstream is
/// not asked. A call that fails there costs nothing. Memory that is decommitted still counts, so that no one else takes
/// what it needs to come back. Figures are taken as they are given back: who gives back twice, or more than was had, lets
/// others have more.
template <device Device>
class limiting_resource
    : public detail::resource_policy<limiting_resource<Device>, Device, detail::limiting_policy<Device>> {
  using base = detail::resource_policy<limiting_resource<Device>, Device, detail::limiting_policy<Device>>;

 public:
  static constexpr const char* name = "limiting_resource";

  limiting_resource(any_resource<Device> upstream, std::size_t limit_bytes) : base(std::move(upstream), limit_bytes) {}

  [[nodiscard]] std::size_t limit_bytes() const noexcept { return this->policy().limit(); }
  /// Bytes live now, as asked for.
  [[nodiscard]] std::size_t held_bytes() const noexcept { return this->policy().held(); }
  /// Allocations and extensions that the limit refused.
  [[nodiscard]] std::uint64_t refusals() const noexcept { return this->policy().refusals(); }
};

template <class Resource>
limiting_resource(Resource, std::size_t) -> limiting_resource<typename Resource::device_type>;

static_assert(memory_resource<limiting_resource<cuda_device>> && extensible_resource<limiting_resource<cuda_device>>);
static_assert(memory_resource<limiting_resource<host_device>> && suspendable_resource<limiting_resource<host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
