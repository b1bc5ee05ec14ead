// The resources that the conformance suite runs over, and doubles for everybody's tests, on both devices:
//
//   foreign_pool<Device>              a stranger's resource: the concept and nothing more
//   counting_resource<Device>         counts and remembers calls, fails when told, poisons, can refuse
//   growing_resource<Device>          the same, and extends within room that it took in advance, as VMM does
//
// All are copyable handles; copies share their state, so a test keeps one and gives one away.
#pragma once

#include "devices.hpp"
#include "mr_pool.hpp"

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/async.hpp>
#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/cub_caching.hpp>
#include <holdfast/resource/failing.hpp>
#include <holdfast/resource/guard.hpp>
#include <holdfast/resource/limiting.hpp>
#include <holdfast/resource/logging.hpp>
#include <holdfast/resource/malloc.hpp>
#include <holdfast/resource/mr.hpp>
#include <holdfast/resource/nvtx.hpp>
#include <holdfast/resource/tracking.hpp>
#include <holdfast/resource/vmm.hpp>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef HOLDFAST_TEST_RESOURCES
#include HOLDFAST_TEST_RESOURCES  // has resources_under_test
#endif

namespace support {

// --- a stranger ------------------------------------------------------------------------------------------------------

/// The least that fits memory_resource. The host's is operator new, the CUDA one the device's default pool.
template <class Device>
class foreign_pool {
 public:
  using stream_type = typename Device::stream_type;

  foreign_pool() : state_(std::make_shared<state>()) {}

  void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock{state_->mutex};
    if constexpr (is_host<Device>) {
      static_cast<void>(stream);
      void* const p = bytes > most ? nullptr : ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
      if (p == nullptr) throw holdfast::out_of_memory{"foreign_pool", bytes, 0, 0};
      return p;
    } else {
      void* start = nullptr;
      if (cudaMallocAsync(&start, bytes + alignment, stream) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        throw holdfast::out_of_memory{"foreign_pool", bytes, 0, 0};
      }
      void* p = start;
      std::size_t space = bytes + alignment;
      std::align(alignment, bytes, p, space);
      state_->starts.emplace(p, start);
      return p;
    }
  }

  void deallocate(stream_type stream, void* p, std::size_t, std::size_t alignment) noexcept {
    const std::lock_guard lock{state_->mutex};
    if constexpr (is_host<Device>) {
      holdfast::host::enqueue_free(stream, [=] { ::operator delete (p, std::align_val_t{alignment}); });
    } else {
      if (auto taken = state_->starts.extract(p)) static_cast<void>(cudaFreeAsync(taken.mapped(), stream));
    }
  }

  friend bool operator==(const foreign_pool&, const foreign_pool&) = default;

 private:
  static constexpr std::size_t most = std::size_t{1} << 40;  // the sanitizers' operator new aborts far above

  struct state {
    std::mutex mutex;
    std::unordered_map<void*, void*> starts;
  };
  std::shared_ptr<state> state_;
};

static_assert(holdfast::memory_resource<foreign_pool<holdfast::host_device>>);
static_assert(!holdfast::detail::applies_resource_rules<foreign_pool<holdfast::host_device>>);

// --- a witness -------------------------------------------------------------------------------------------------------

/// Passes calls on and remembers them.
template <class Device, bool Extensible = false>
class counting_resource {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "counting_resource";

  struct request {
    stream_type stream;
    std::size_t bytes;
    std::size_t alignment;
    void* p;
  };

  /// Over malloc_resource, which unmaps what is freed.
  explicit counting_resource(Device device = {})
      : counting_resource(holdfast::any_resource<Device>{holdfast::malloc_resource<Device>{device}}) {}

  /// Over `upstream`. Each allocation takes at least `room` bytes there; a growing one extends within them.
  explicit counting_resource(holdfast::any_resource<Device> upstream, std::size_t room = 0)
      : state_(std::make_shared<state>(std::move(upstream), room)) {}

  // --- memory_resource
  void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    std::optional<std::byte> poison;
    {
      const std::lock_guard lock{state_->mutex};
      ++state_->allocations;
      if (state_->failing.matches(state_->allocations)) {
        throw holdfast::out_of_memory{name, bytes, state_->live_bytes, 0};
      }
      poison = state_->poison;
    }
    void* const p = state_->upstream.allocate(stream, std::max(bytes, state_->room), alignment);
    if (poison) Device::fill(stream, p, *poison, bytes);
    const std::lock_guard lock{state_->mutex};
    state_->requests.push_back({stream, bytes, alignment, p});
    state_->live.insert_or_assign(p, state_->requests.back());
    state_->live_bytes += bytes;
    state_->peak_bytes = std::max(state_->peak_bytes, state_->live_bytes);
    return p;
  }

  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    {
      const std::lock_guard lock{state_->mutex};
      ++state_->deallocations;
      const auto found = state_->live.find(p);
      if (found == state_->live.end()) {
        ++state_->mistakes;
        return;
      }
      const request& made = found->second;
      if (made.bytes != bytes || made.alignment != alignment || made.stream != stream) ++state_->mistakes;
      state_->live_bytes -= made.bytes;
      state_->live.erase(found);
    }
    state_->upstream.deallocate(stream, p, std::max(bytes, state_->room), alignment);
  }

  bool extend(stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) requires Extensible {
    std::optional<std::byte> poison;
    {
      const std::lock_guard lock{state_->mutex};
      ++state_->extends;
      const auto found = state_->live.find(p);
      if (found == state_->live.end() || found->second.bytes != old_bytes) {
        ++state_->mistakes;
        return false;
      }
      if (new_bytes > state_->room || state_->failing_extends.matches(state_->extends)) return false;
      found->second.bytes = new_bytes;
      state_->live_bytes += new_bytes - old_bytes;
      state_->peak_bytes = std::max(state_->peak_bytes, state_->live_bytes);
      poison = state_->poison;
    }
    if (poison) Device::fill(stream, static_cast<std::byte*>(p) + old_bytes, *poison, new_bytes - old_bytes);
    return true;
  }

  [[nodiscard]] Device device() const { return state_->upstream.device(); }
  friend bool operator==(const counting_resource&, const counting_resource&) = default;

  // --- what to do
  /// `count` allocations fail with out_of_memory, after the next `skip`.
  void fail(std::size_t skip = 0, std::size_t count = 1) {
    const std::lock_guard lock{state_->mutex};
    state_->failing = {state_->allocations + skip, count};
  }
  void fail_extends(std::size_t skip = 0, std::size_t count = 1) {
    const std::lock_guard lock{state_->mutex};
    state_->failing_extends = {state_->extends + skip, count};
  }
  /// Fresh memory is filled with `value`, on the stream that it is allocated on. 0xFF is NaN in every format.
  void poison(std::optional<std::byte> value = std::byte{0xFF}) {
    const std::lock_guard lock{state_->mutex};
    state_->poison = value;
  }

  // --- what was done
  [[nodiscard]] std::size_t allocations() const { return get(&state::allocations); }  ///< failed ones, too
  [[nodiscard]] std::size_t deallocations() const { return get(&state::deallocations); }
  [[nodiscard]] std::size_t extends() const { return get(&state::extends); }
  [[nodiscard]] std::size_t live_bytes() const { return get(&state::live_bytes); }  ///< as asked for
  [[nodiscard]] std::size_t peak_bytes() const { return get(&state::peak_bytes); }
  /// Deallocations and extensions whose pointer, figures or stream are not an allocation's.
  [[nodiscard]] std::size_t mistakes() const { return get(&state::mistakes); }
  [[nodiscard]] std::size_t live_count() const {
    const std::lock_guard lock{state_->mutex};
    return state_->live.size();
  }
  /// Whether the byte at `p` belongs to live memory.
  [[nodiscard]] bool is_live(const void* p) const {
    const std::lock_guard lock{state_->mutex};
    return std::any_of(state_->live.begin(), state_->live.end(), [&](const auto& block) {
      const auto* const start = static_cast<const std::byte*>(block.first);
      return p >= start && p < start + block.second.bytes;
    });
  }
  /// Every allocation that succeeded, in order.
  [[nodiscard]] std::vector<request> requests() const { return get(&state::requests); }

 private:
  struct turns {
    std::size_t skip = 0;
    std::size_t count = 0;
    [[nodiscard]] bool matches(std::size_t nth) const { return nth > skip && nth - skip <= count; }
  };

  struct state {
    state(holdfast::any_resource<Device> up, std::size_t bytes) : upstream(std::move(up)), room(bytes) {}

    holdfast::any_resource<Device> upstream;
    const std::size_t room;
    std::mutex mutex;
    std::size_t allocations = 0, deallocations = 0, extends = 0, live_bytes = 0, peak_bytes = 0, mistakes = 0;
    turns failing, failing_extends;
    std::optional<std::byte> poison;
    std::unordered_map<void*, request> live;
    std::vector<request> requests;
  };

  template <class T>
  T get(T state::*member) const {
    const std::lock_guard lock{state_->mutex};
    return (*state_).*member;
  }

  std::shared_ptr<state> state_;
};

template <class Device>
using growing_resource = counting_resource<Device, true>;

static_assert(holdfast::memory_resource<counting_resource<holdfast::host_device>>);
static_assert(!holdfast::extensible_resource<counting_resource<holdfast::host_device>>);
static_assert(holdfast::extensible_resource<growing_resource<holdfast::host_device>>);

/// Every policy that passes on what `upstream` can do, over it. What is live when the last handle goes fails the test.
template <class Device>
holdfast::tracking_resource<Device> policies(holdfast::any_resource<Device> upstream) {
  const holdfast::nvtx_resource<Device> regions{std::move(upstream)};
  const holdfast::logging_resource<Device> logging{regions, "/dev/null"};
  const holdfast::failing_resource<Device> failing{logging};  // never
  const holdfast::limiting_resource<Device> limiting{failing, SIZE_MAX};
  return holdfast::tracking_resource<Device>{limiting,
                                             {.on_leak = [](const std::string& report) { ADD_FAILURE() << report; }}};
}

// --- the resources under test: a new one is a line here and a word below -------------------------------------------------

template <class Device>
struct on {
  using device = Device;
};

// clang-format off
struct host_malloc : on<holdfast::host_device> { static constexpr auto name = "host_malloc"; static auto make(device d = {}) { return holdfast::malloc_resource{d}; } };
struct cuda_malloc : on<holdfast::cuda_device> { static constexpr auto name = "cuda_malloc"; static auto make(device d = {}) { return holdfast::malloc_resource{d}; } };
struct cuda_async : on<holdfast::cuda_device> { static constexpr auto name = "cuda_async"; static auto make(device d = {}) { return holdfast::async_resource{d}; } };
struct cuda_cub : on<holdfast::cuda_device> { static constexpr auto name = "cuda_cub"; static auto make(device d = {}) { return holdfast::cub_caching_resource{d}; } };
struct host_vmm : on<holdfast::host_device> { static constexpr auto name = "host_vmm"; static auto make(device d = {}) { return holdfast::vmm_resource{d}; } };
struct cuda_vmm : on<holdfast::cuda_device> { static constexpr auto name = "cuda_vmm"; static auto make(device d = {}) { return holdfast::vmm_resource{d}; } };
struct host_guard : on<holdfast::host_device> { static constexpr auto name = "host_guard"; static auto make(device d = {}) { return holdfast::guard_resource{d}; } };
struct cuda_guard : on<holdfast::cuda_device> { static constexpr auto name = "cuda_guard"; static auto make(device d = {}) { return holdfast::guard_resource{d}; } };
struct host_caching : on<holdfast::host_device> { static constexpr auto name = "host_caching"; static auto make(device d = {}) { return holdfast::caching_resource{holdfast::malloc_resource{d}}; } };
struct cuda_caching : on<holdfast::cuda_device> { static constexpr auto name = "cuda_caching"; static auto make(device d = {}) { return holdfast::caching_resource{holdfast::malloc_resource{d}}; } };
struct host_foreign : on<holdfast::host_device> { static constexpr auto name = "host_foreign"; static auto make(device d = {}) { return holdfast::any_resource<device>{foreign_pool<device>{}, d}; } };
struct cuda_foreign : on<holdfast::cuda_device> { static constexpr auto name = "cuda_foreign"; static auto make(device d = {}) { return holdfast::any_resource<device>{foreign_pool<device>{}, d}; } };
struct host_mr : on<holdfast::host_device> { static constexpr auto name = "host_mr"; static auto make(device d = {}) { return holdfast::any_resource<device>{holdfast::mr_resource{mr_pool<device>{}, d}}; } };
struct cuda_mr : on<holdfast::cuda_device> { static constexpr auto name = "cuda_mr"; static auto make(device d = {}) { return holdfast::any_resource<device>{holdfast::mr_resource{mr_pool<device>{}, d}}; } };
struct host_policies : on<holdfast::host_device> { static constexpr auto name = "host_policies"; static auto make(device d = {}) { return policies<device>(holdfast::malloc_resource{d}); } };
struct cuda_policies : on<holdfast::cuda_device> { static constexpr auto name = "cuda_policies"; static auto make(device d = {}) { return policies<device>(holdfast::async_resource{d}); } };
// clang-format on

#ifdef HOLDFAST_TEST_RESOURCES
// another program's
#elif defined(HOLDFAST_TEST_HOST_ONLY)
using resources_under_test =
    ::testing::Types<host_malloc, host_vmm, host_guard, host_caching, host_policies, host_foreign, host_mr>;
#else
using resources_under_test =
    ::testing::Types<host_malloc, host_vmm, host_guard, host_caching, host_policies, host_foreign, host_mr, cuda_malloc,
                     cuda_async, cuda_cub, cuda_vmm, cuda_guard, cuda_caching, cuda_policies, cuda_foreign, cuda_mr>;
#endif

struct resource_names {
  template <class Entry>
  static std::string GetName(int) {
    return Entry::name;
  }
};

/// The fixture of the conformance suite.
template <class Entry>
class resource_test : public device_test<typename Entry::device> {
 protected:
  using device = typename Entry::device;
  using drive = driver<device>;
  using stream_type = typename device::stream_type;
  using any = holdfast::any_resource<device>;

  static constexpr std::size_t petabyte = std::size_t{1} << 50;

  /// What a resource counts, if it does: to see that nothing changed.
  template <class Resource>
  static std::vector<std::uint64_t> figures(const Resource& resource) {
    std::vector<std::uint64_t> all;
    if constexpr (requires { resource.held_bytes(); }) all.push_back(resource.held_bytes());
    if constexpr (requires { resource.reserved_bytes(); }) all.push_back(resource.reserved_bytes());
    if constexpr (requires { resource.cached_bytes(); }) all.push_back(resource.cached_bytes());
    if constexpr (requires { resource.live_bytes(); }) all.push_back(resource.live_bytes());
    if constexpr (requires { resource.used_bytes(); }) all.push_back(resource.used_bytes());
    return all;
  }

  /// Fills and reads back, in the order of `stream`: whether it is memory.
  static bool works(stream_type stream, void* p, std::size_t bytes, std::byte value = std::byte{0x5A}) {
    device::fill(stream, p, value, bytes);
    device::synchronize(stream);
    return drive::read(static_cast<const std::byte*>(p), bytes) == std::vector<std::byte>(bytes, value);
  }
};

}  // namespace support
