// The pool of caching_resource: the heaps of its streams, what lies between them, and the upstream.
#include <holdfast/resource/caching.hpp>

#ifndef HOLDFAST_DETAIL_CACHING_POOL_HPP
#define HOLDFAST_DETAIL_CACHING_POOL_HPP

#include <holdfast/detail/caching_barrier.hpp>
#include <holdfast/detail/caching_heap.hpp>
#include <holdfast/detail/process.hpp>
#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI::detail {

template <device Device>
class caching_pool {
 public:
  using stream_type = typename Device::stream_type;
  using heap = caching_heap<Device>;
  using key = typename heap::key;
  using request = caching_request;
  using segment = caching_segment<Device>;
  using segments = caching_segments<Device>;
  using when = typename heap::when;

  caching_pool(any_resource<Device> upstream, caching_options options)
      : upstream_(std::move(upstream)), options_(std::move(options)), heaps_(device(), options_.streams_stay) {
    options_.segment_bytes = std::clamp(options_.segment_bytes, small_segment, most) & ~(request::granule - 1);
  }

  [[nodiscard]] Device device() const noexcept { return upstream_.device(); }

  // --- the fast path: no device call but the question whether the stream captures ------------------------------------

  /// Null: not here, or not now.
  [[nodiscard]] void* reuse(stream_type stream, std::size_t bytes, std::size_t alignment) {
    if (bytes - 1 >= most || !std::has_single_bit(alignment) || !usable(stream)) [[unlikely]] {
      return nullptr;
    }
    heap* const mine = heaps_.find(key{stream});
    return mine == nullptr || mine->handed_over() ? nullptr : mine->take_recent({bytes, alignment});
  }

  /// False: not this way.
  [[nodiscard]] bool recycle(stream_type stream, void* p, std::size_t bytes) {
    if (!usable(stream)) [[unlikely]] {
      return false;
    }
    heap* const mine = heaps_.find(key{stream});
    return mine != nullptr && mine->give(p, bytes);
  }

  // --- the rest: on the current device, in a relaxed scope -------------------------------------------------------------

  [[nodiscard]] void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    heap& mine = heaps_.of(key{stream});
    const request want{bytes, alignment};
    mine.follow(stream);
    void* p = mine.take_recent(want);
    while (p == nullptr && (p = mine.take(want)) == nullptr) {
      segments fresh = obtain(mine, want);
      if (fresh.empty()) {
        continue;  // somebody may have freed something
      }
      try {
        mine.add(fresh);
      } catch (...) {
        put(fresh);
        throw;
      }
    }
    return p;
  }

  void deallocate(stream_type stream, void* p, std::size_t bytes) {
    heap* const mine = heaps_.find(key{stream});
    if (mine != nullptr && mine->give(p, bytes)) {
      if (mine->whose().thread_bound()) {
        mine->fence_now();
      }
      return;
    }
    // It may have been allocated on another stream, whose order says nothing about this one's work: so that is waited for.
    heap* owner = nullptr;
    heaps_.each([&](heap& one) { owner = one.holds(p, bytes) ? &one : owner; });
    if (owner == nullptr) {
      ++errors_;
      return;
    }
    wait_for_work(device(), stream);
    if (!owner->give(p, bytes)) {
      ++errors_;
    }
  }

  /// What is free on `stream` becomes everybody's.
  void release(stream_type stream) {
    if (heap* const mine = heaps_.find(key{stream})) {
      segments out;
      mine->hand_over(out);
      put(out);
    }
  }

  void trim(std::size_t keep) {
    gather_all(when::always);
    give_back_beyond(keep, true);
    if (reserved_bytes() > keep && held_back() && wait_for_the_device()) {
      gather_all(when::always);
      give_back_beyond(keep, true);
    }
  }

  /// The end. Gives back what is free; false: some is still in use, and everything that it needs must stay.
  [[nodiscard]] bool close() noexcept {
    const caching_statistics last = count();
    try {
      trim(0);
    } catch (...) {  // the device is broken: what could not be waited for isn't given back
    }
    if (last.used_bytes != 0 && options_.on_leak) {
      try {
        options_.on_leak(last.used_bytes);
      } catch (...) {
      }
    }
    return reserved_bytes() == 0;
  }

  [[nodiscard]] std::size_t reserved_bytes() const {
    const std::lock_guard lock{mutex_};
    return reserved_;
  }

  [[nodiscard]] caching_statistics count() const {
    caching_statistics sum;
    heaps_.each([&](const heap& one) {
      const auto its = one.count();
      sum.used_bytes += its.used_bytes;
      sum.peak_used_bytes += its.peak_used_bytes;
      sum.allocations += its.allocations;
    });
    const std::lock_guard lock{mutex_};
    sum.reserved_bytes = reserved_;
    sum.cached_bytes = reserved_ - std::min(reserved_, sum.used_bytes);
    sum.peak_reserved_bytes = peak_reserved_;
    sum.upstream_allocations = upstream_allocations_;
    sum.upstream_deallocations = upstream_deallocations_;
    sum.cross_stream_reuses = cross_stream_reuses_;
    sum.errors = errors_;
    return sum;
  }

  caching_pool* next_leaked = nullptr;

 private:
  static constexpr std::size_t most = PTRDIFF_MAX / 2;  // bytes of a request; larger ones are the rules' to refuse
  static constexpr std::size_t small_segment = std::size_t{2} << 20;

  [[nodiscard]] static bool usable(stream_type stream) {
    return device_usable().load(std::memory_order_relaxed) && !Device::thread_bound(stream) &&
           Device::capturing(stream).state == capture_state::none;
  }

  // --- where memory comes from -------------------------------------------------------------------------------------------

  /// A segment for `mine`, usable in the order of its stream. Empty: try again. Throws out_of_memory.
  [[nodiscard]] segments obtain(heap& mine, const request& want) {
    const bool hopeful = want.small() || want.room() <= std::min(options_.max_reserved_bytes, device().memory().total);
    if (hopeful) {
      if (segments found = spare(mine, want, false, 4); !found.empty()) {
        return found;
      }
      heaps_.each([&](heap& other) {
        if (&other != &mine) {
          gather(other, when::idle);
        }
      });
      if (segments found = spare(mine, want, false, 4); !found.empty()) {
        return found;
      }
      give_back_predecessors(mine, want);
    }
    if (segments made = grow(mine, want); !made.empty()) {
      return made;
    }
    if (hopeful) {
      if (segments found = squeeze(mine, want); !found.empty()) {
        return found;
      }
      if (options_.on_out_of_memory && options_.on_out_of_memory(want.asked)) {
        return {};
      }
    }
    throw out_of_memory{"caching_resource", want.asked, reserved_bytes(), device().memory().free};
  }

  /// Memory is short: first what is ready, then what is pending, then what has to be waited for.
  [[nodiscard]] segments squeeze(heap& mine, const request& want) {
    gather(mine, when::named);
    gather_all(when::always);
    for (const bool pending : {false, true}) {
      if (segments found = regain(mine, want, pending); !found.empty()) {
        return found;
      }
    }
    if (!held_back() || !wait_for_the_device()) {
      return {};
    }
    gather_all(when::always);
    return regain(mine, want, false);
  }

  /// A spare segment that fits, or a new one in the place of all that do not.
  [[nodiscard]] segments regain(heap& mine, const request& want, bool pending) {
    segments found = spare(mine, want, pending, any_size);
    return found.empty() && give_back_beyond(0, pending) ? grow(mine, want) : std::move(found);
  }

  static constexpr std::size_t any_size = std::numeric_limits<std::size_t>::max();

  /// The smallest fitting segment that is nobody's, `times` as large as need be at most. Where `pending`, it may be one
  /// whose last work isn't done yet: the stream waits for it.
  [[nodiscard]] segments spare(heap& mine, const request& want, bool pending, std::size_t times) {
    const std::size_t room = want.room();
    const std::size_t largest = times == any_size ? any_size : std::max(options_.segment_bytes, times * room);
    segments found;
    const std::lock_guard lock{mutex_};
    auto best = spare_.end();
    for (auto one = spare_.begin(); one != spare_.end(); ++one) {
      if (one->small == want.small() && one->bytes >= room && one->bytes <= largest &&
          (best == spare_.end() || one->bytes < best->bytes) && (pending || ready(*one))) {
        best = one;
      }
    }
    if (best != spare_.end()) {
      if (best->mark != nullptr) {
        Device::wait(mine.whose().stream, *best->mark);
      }
      cross_stream_reuses_ += best->last_heap != &mine ? 1 : 0;
      found.splice(found.end(), spare_, best);
    }
    return found;
  }

  [[nodiscard]] static bool ready(segment& one) {
    try {
      if (one.mark != nullptr && one.mark->ready()) {
        one.mark.reset();
      }
    } catch (const device_error&) {  // not to be known
    }
    return one.mark == nullptr;
  }

  // Large segments are a multiple of an eighth of their power of two, within these limits.
  static constexpr std::size_t finest_segment_step = std::size_t{2} << 20;
  static constexpr std::size_t coarsest_segment_step = std::size_t{128} << 20;

  [[nodiscard]] std::size_t preferred_bytes(const request& want) const {
    const std::size_t step = std::clamp(std::bit_floor(want.room()) / 8, finest_segment_step, coarsest_segment_step);
    const std::size_t rounded = (want.room() + step - 1) & ~(step - 1);
    return std::max(rounded, want.small() ? small_segment : options_.segment_bytes);
  }

  /// A new segment, or none.
  [[nodiscard]] segments grow(heap& mine, const request& want) {
    const std::size_t preferred = preferred_bytes(want);
    segments made = grow(mine, want, preferred);
    return made.empty() && want.room() < preferred ? grow(mine, want, want.room()) : std::move(made);
  }

  // The upstream is used on the library's stream, which never ends. The segment's stream waits for that, and so does
  // whoever else gets the segment.
  [[nodiscard]] segments grow(heap& mine, const request& want, std::size_t bytes) {
    segments made(1);
    {
      const std::lock_guard lock{mutex_};
      if (bytes > options_.max_reserved_bytes - reserved_) {
        return {};
      }
      reserved_ += bytes;
    }
    const stream_type home = device().library_stream();
    void* p = nullptr;
    try {
      {
        const std::lock_guard lock{barrier_mutex_};
        barrier_.prepare(device());
      }
      p = upstream_.allocate(home, bytes, request::granule);
      typename Device::event had{device()};
      had.record(home);
      Device::wait(mine.whose().stream, had);
      made.front().mark = std::make_shared<const typename Device::event>(std::move(had));
    } catch (const out_of_memory&) {
      unreserve(bytes);
      return {};
    } catch (...) {
      if (p != nullptr) {
        upstream_.deallocate(home, p, bytes, request::granule);
      }
      unreserve(bytes);
      throw;
    }
    watch_process();
    made.front().base = static_cast<std::byte*>(p);
    made.front().bytes = bytes;
    made.front().small = want.small();
    const std::lock_guard lock{mutex_};
    ++upstream_allocations_;
    peak_reserved_ = std::max(peak_reserved_, reserved_);
    return made;
  }

  void unreserve(std::size_t bytes) {
    const std::lock_guard lock{mutex_};
    reserved_ -= bytes;
  }

  // --- where it goes -----------------------------------------------------------------------------------------------------

  void gather(heap& from, when asked) {
    segments out;
    from.give_up(out, asked, [](const segment&) { return true; });
    put(out);
  }

  void gather_all(when asked) {
    heaps_.each([&](heap& one) { gather(one, asked); });
  }

  void put(segments& out) {
    const std::lock_guard lock{mutex_};
    spare_.splice(spare_.end(), out);
  }

  /// What a larger segment replaces goes first, so that a request that keeps growing does not leave all its predecessors
  /// behind.
  void give_back_predecessors(heap& mine, const request& want) {
    if (!want.small()) {
      segments out;
      std::size_t left = preferred_bytes(want);
      mine.give_up(out, when::named, [&](const segment& one) {
        const bool fits = !one.small && one.bytes <= left;
        left -= fits ? one.bytes : 0;
        return fits;
      });
      give_back(out);
    }
  }

  /// Spare segments go back until `keep` bytes are reserved: those that are ready first, and the others if `pending`.
  /// Whether any did.
  bool give_back_beyond(std::size_t keep, bool pending) {
    bool any = false;
    for (const bool too : {false, true}) {
      segments out;
      if (pending || !too) {
        const std::lock_guard lock{mutex_};
        std::size_t after = reserved_;
        for (auto next = spare_.begin(); next != spare_.end() && after > keep;) {
          const auto one = next++;
          if (too || ready(*one)) {
            after -= one->bytes;
            out.splice(out.end(), spare_, one);
          }
        }
      }
      any = any || !out.empty();
      give_back(out);
    }
    return any;
  }

  void give_back(segments& out) {
    const stream_type home = device().library_stream();
    try {
      while (!out.empty()) {
        const segment& one = out.front();
        if (one.mark != nullptr) {
          Device::wait(home, *one.mark);
        }
        upstream_.deallocate(home, one.base, one.bytes, request::granule);
        const std::lock_guard lock{mutex_};
        reserved_ -= one.bytes;
        ++upstream_deallocations_;
        out.pop_front();
      }
    } catch (...) {
      put(out);
      throw;
    }
  }

  // --- waiting on the host -----------------------------------------------------------------------------------------------

  [[nodiscard]] bool held_back() {
    bool any = false;
    heaps_.each([&](heap& one) { any = any || one.holds_back(); });
    return any;
  }

  /// For all that the heaps have freed so far.
  [[nodiscard]] bool wait_for_the_device() {
    std::vector<std::pair<heap*, std::uint64_t>> freed;
    heaps_.each([&](heap& one) { freed.emplace_back(&one, one.frees()); });
    {
      const std::lock_guard lock{barrier_mutex_};
      if (!barrier_.wait(device())) {
        return false;
      }
    }
    for (const auto& [one, frees] : freed) {
      one->done(frees);
    }
    return true;
  }

  any_resource<Device> upstream_;
  caching_options options_;
  caching_heaps<Device> heaps_;
  std::mutex barrier_mutex_;
  caching_barrier<Device> barrier_;

  mutable std::mutex mutex_;
  segments spare_;  // whole, free, and nobody's
  std::size_t reserved_ = 0;
  std::size_t peak_reserved_ = 0;
  std::uint64_t upstream_allocations_ = 0;
  std::uint64_t upstream_deallocations_ = 0;
  std::uint64_t cross_stream_reuses_ = 0;
  std::atomic<std::uint64_t> errors_{0};
};

/// Owns the pool. One that has memory in use at the end is leaked, with its upstream; so is every one at the process's end,
/// when the device is gone.
template <device Device>
class caching_impl {
 public:
  using device_type = Device;
  static constexpr const char* name = "caching_resource";
  static constexpr std::size_t max_alignment = std::numeric_limits<std::size_t>::max();

  caching_impl(any_resource<Device> upstream, caching_options options)
      : device(upstream.device()),
        pool_(std::make_unique<caching_pool<Device>>(std::move(upstream), std::move(options))) {}
  caching_impl(const caching_impl&) = delete;
  caching_impl& operator=(const caching_impl&) = delete;

  ~caching_impl() {
    if (!device_usable().load(std::memory_order_relaxed) || !closed()) {
      static std::atomic<caching_pool<Device>*> leaked{nullptr};  // still reachable
      pool_->next_leaked = leaked.load(std::memory_order_relaxed);
      while (!leaked.compare_exchange_weak(pool_->next_leaked, pool_.get(), std::memory_order_release,
                                           std::memory_order_relaxed)) {
      }
      static_cast<void>(pool_.release());
    }
  }

  [[nodiscard]] caching_pool<Device>& pool() const noexcept { return *pool_; }

  void* allocate(typename Device::stream_type stream, std::size_t bytes, std::size_t alignment) {
    return pool_->allocate(stream, bytes, alignment);
  }
  void deallocate(typename Device::stream_type stream, void* p, std::size_t bytes, std::size_t) {
    pool_->deallocate(stream, p, bytes);
  }

  const Device device;

 private:
  [[nodiscard]] bool closed() noexcept {
    try {
      const typename Device::relaxed_scope relaxed;
      const typename Device::current_scope current{device};
      if (!pool_->close()) {
        return false;
      }
      pool_.reset();
      return true;
    } catch (...) {
      return false;
    }
  }

  std::unique_ptr<caching_pool<Device>> pool_;
};

}  // namespace holdfast::HOLDFAST_ABI::detail

#endif
