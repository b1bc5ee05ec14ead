// What caching_resource keeps for one stream: segments of upstream memory, cut into blocks that are handed out, taken back
// and merged in the order of that stream.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// One allocation of the upstream's. With a heap or, whole and free, with nobody.
template <device Device>
struct caching_segment {
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  bool small = false;           // for small blocks
  std::uint64_t last_free = 0;  // the heap's count of frees at the last one in here
  const void* last_heap = nullptr;
  /// While it is nobody's: behind its last use, or the upstream's. Null: that is done.
  std::shared_ptr<const typename Device::event> mark;
};

template <device Device>
using caching_segments = std::list<caching_segment<Device>>;

/// What is asked of a heap. Blocks are multiples of `granule` bytes and start at multiples of it.
struct caching_request {
  static constexpr std::size_t granule = 256;
  static constexpr std::size_t small_limit = std::size_t{1} << 20;
  static constexpr std::size_t coarsest = std::size_t{128} << 10;

  /// Rounded up to the next of eight steps within a power of two (so that requests of about one size share blocks), or to
  /// `coarsest`: an eighth is wasted at most, and ever less beyond 1 MiB.
  static constexpr std::size_t block_bytes(std::size_t asked) noexcept {
    const std::size_t step = std::clamp(std::bit_floor(asked) / 8, granule, coarsest);
    return (asked + step - 1) & ~(step - 1);
  }

  caching_request(std::size_t bytes, std::size_t alignment_) noexcept
      : asked(bytes), block(block_bytes(bytes)), alignment(std::max(alignment_, granule)) {}

  [[nodiscard]] bool small() const noexcept { return block <= small_limit; }
  /// Bytes that hold the block wherever they start.
  [[nodiscard]] std::size_t room() const noexcept { return block + (alignment - granule); }

  std::size_t asked;
  std::size_t block;
  std::size_t alignment;
};

/// The memory of one stream. A block that is freed is kept as it is, for the next request of the same size: that is the
/// fast path, a few instructions under this heap's mutex. Where none fits, all that was freed since is merged with its
/// free neighbours, and the best fit is cut.
template <device Device>
class alignas(128) caching_heap {  // lines of its own: each is another thread's, as a rule
 public:
  using stream_type = typename Device::stream_type;
  using event = typename Device::event;
  using segment = caching_segment<Device>;
  using segments = caching_segments<Device>;

  /// A handle that means another stream in every thread has a heap for each thread.
  struct key {
    stream_type stream;
    std::thread::id thread;
    friend bool operator==(const key&, const key&) = default;

    explicit key(stream_type s) : stream(s), thread(Device::thread_bound(s) ? std::this_thread::get_id() : none()) {}
    [[nodiscard]] bool thread_bound() const noexcept { return thread != none(); }
    [[nodiscard]] std::size_t hash() const noexcept {
      const std::size_t threads = thread_bound() ? std::hash<std::thread::id>{}(thread) : 0;
      return (std::hash<stream_type>{}(stream) ^ threads) * 0x9E3779B97F4A7C15U >> 20;
    }

   private:
    static std::thread::id none() noexcept { return {}; }
  };

  struct figures {
    std::size_t used_bytes = 0;
    std::size_t peak_used_bytes = 0;
    std::uint64_t allocations = 0;
  };

  caching_heap(Device of, const key& whose, bool streams_stay)
      : device_(of), key_(whose), streams_stay_(streams_stay) {}
  caching_heap(const caching_heap&) = delete;
  caching_heap& operator=(const caching_heap&) = delete;

  [[nodiscard]] const key& whose() const noexcept { return key_; }

  /// A block of exactly this size that was freed lately, or null.
  [[nodiscard]] void* take_recent(const caching_request& want) {
    const std::lock_guard lock{mutex_};
    block** link = &recent_[bin(want.block)];
    for (int looked = 0; *link != nullptr && looked < deepest_look; ++looked, link = &(*link)->next) {
      block& found = **link;
      if (found.bytes == want.block && aligned(found.start, want.alignment) == found.start) [[likely]] {
        *link = found.next;
        return hand_out(found, want);
      }
    }
    return nullptr;
  }

  /// The best fit, or null.
  [[nodiscard]] void* take(const caching_request& want) {
    const std::lock_guard lock{mutex_};
    merge();
    auto& candidates = free_[want.small() ? 1 : 0];
    const auto fit = candidates.lower_bound(want.room());
    return fit == candidates.end() ? nullptr : hand_out(cut(**fit, want), want);
  }

  /// Takes back what was handed out. False: `p` is no live block of this heap's, or not of this size.
  [[nodiscard]] bool give(const void* p, std::size_t asked) {
    const std::lock_guard lock{mutex_};
    const auto found = blocks_.find(p);
    if (found == blocks_.end() || found->second.asked != asked || asked == 0) [[unlikely]] {
      return false;
    }
    block& freed = found->second;
    freed.asked = 0;
    freed.in->last_free = ++frees_;
    used_bytes_ -= freed.bytes;
    block*& head = recent_[bin(freed.bytes)];
    freed.next = head;
    head = &freed;
    return true;
  }

  /// Whether `p` is a live block of this heap's, of this size.
  [[nodiscard]] bool holds(const void* p, std::size_t asked) const {
    const std::lock_guard lock{mutex_};
    const auto found = blocks_.find(p);
    return found != blocks_.end() && asked != 0 && found->second.asked == asked;
  }

  /// The one segment of `fresh`, whose memory is usable in the order of the stream.
  void add(segments& fresh) {
    const std::lock_guard lock{mutex_};
    const auto added = fresh.begin();
    block& all = make_block(added->base, added->bytes, added);
    segments_.splice(segments_.end(), fresh);
    added->mark.reset();
    added->last_free = ++frees_;
    added->last_heap = this;
    insert(all);
  }

  // --- what others may take: segments that are wholly free, behind an event -------------------------------------------

  enum class when {
    named,  ///< a call that names this stream asks: so it exists
    idle,   ///< only if nothing was done here since the last time that somebody asked
    always
  };

  /// Moves to `out` every wholly free segment that is `wanted` and has an event behind it. A stream that may be gone is
  /// not touched, nor one that captures: what was freed on it since its last event stays here then.
  template <class Wanted>
  void give_up(segments& out, when asked, Wanted wanted) {
    const std::lock_guard lock{mutex_};
    if (const std::uint64_t activity = allocations_ + frees_;
        std::exchange(activity_seen_, activity) != activity && asked == when::idle) {
      return;
    }
    const bool named = asked == when::named;
    if (fenced_ == 0 && !exists(named)) {
      return;  // no event is behind anything here, nor can be
    }
    merge();
    if (any_whole()) {
      static_cast<void>(fence(named));
    }
    take_whole(out, [&](const segment& one) { return one.last_free <= fenced_ && wanted(one); });
  }

  /// Moves every wholly free segment to `out`, behind an event. The others stay, and the stream may end: so the next one
  /// of its handle has to follow.
  void hand_over(segments& out) {
    const std::lock_guard lock{mutex_};
    if (segments_.empty()) {
      return;
    }
    ++frees_;  // so that the event is a new one, behind the work of what is in use, too
    activity_seen_ = allocations_ + frees_;
    merge();
    if (fence(true)) {
      take_whole(out, [](const segment&) { return true; });
      handed_over_.store(!segments_.empty() && !streams_stay_, std::memory_order_release);
    }
  }

  /// Whether a stream has to `follow` before it takes what is here; it may give without. No lock: whoever uses a new
  /// stream knows that the old one's release is over.
  [[nodiscard]] bool handed_over() const noexcept { return handed_over_.load(std::memory_order_acquire); }

  /// An event behind all that was freed so far.
  void fence_now() {
    const std::lock_guard lock{mutex_};
    static_cast<void>(fence(true));
  }

  /// `stream` waits for the last event, where that may be another one's of this handle.
  void follow(stream_type stream) {
    const std::lock_guard lock{mutex_};
    if (mark_ != nullptr && may_be_anothers()) {
      Device::wait(stream, *mark_);
    }
    handed_over_.store(false, std::memory_order_release);
  }

  /// Whether something wholly free has no event behind it.
  [[nodiscard]] bool holds_back() {
    const std::lock_guard lock{mutex_};
    merge();
    bool any = false;
    for (const auto& one : free_) {
      any = any || std::ranges::any_of(one, [&](const block* b) { return whole(*b) && b->in->last_free > fenced_; });
    }
    return any;
  }

  [[nodiscard]] std::uint64_t frees() const {
    const std::lock_guard lock{mutex_};
    return frees_;
  }

  /// The work of the first `frees` frees is known to be done.
  void done(std::uint64_t frees) {
    const std::lock_guard lock{mutex_};
    if (frees >= fenced_) {
      fenced_ = frees;
      mark_.reset();
    }
  }

  [[nodiscard]] figures count() const {
    const std::lock_guard lock{mutex_};
    return {used_bytes_, peak_used_bytes_, allocations_};
  }

 private:
  struct block;

  /// By size, then by address.
  struct by_fit {
    using is_transparent = void;
    bool operator()(const block* a, const block* b) const noexcept {
      return a->bytes != b->bytes ? a->bytes < b->bytes : std::less<>{}(a->start, b->start);
    }
    bool operator()(const block* a, std::size_t bytes) const noexcept { return a->bytes < bytes; }
  };
  using free_set = std::set<block*, by_fit>;

  struct block {
    std::byte* start = nullptr;
    std::size_t bytes = 0;
    std::size_t asked = 0;  // what its user asked for; 0: it is free
    typename segments::iterator in;
    block* before = nullptr;  // neighbours in the segment
    block* after = nullptr;
    block* next = nullptr;              // of those freed lately
    typename free_set::node_type node;  // while it isn't in a free_set: so merging needs no memory
    bool absorbed = false;              // by a neighbour, and yet to be erased
  };

  static constexpr std::size_t bins = 256;
  static constexpr int deepest_look = 8;

  static std::size_t bin(std::size_t bytes) noexcept {
    return bytes / caching_request::granule * 0x9E3779B97F4A7C15U >> 56;
  }
  static std::byte* aligned(std::byte* p, std::size_t alignment) noexcept {
    return p + (-reinterpret_cast<std::uintptr_t>(p) & (alignment - 1));
  }
  static bool whole(const block& b) noexcept { return b.before == nullptr && b.after == nullptr; }

  free_set& set_of(const block& b) noexcept { return free_[b.in->small ? 1 : 0]; }

  void* hand_out(block& b, const caching_request& want) noexcept {
    b.asked = want.asked;
    used_bytes_ += b.bytes;
    peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes_);
    ++allocations_;
    return b.start;
  }

  block& make_block(std::byte* start, std::size_t bytes, typename segments::iterator in) {
    const auto made = blocks_.try_emplace(start).first;
    block& b = made->second;
    try {
      free_set one;
      one.insert(&b);
      b.node = one.extract(one.begin());
    } catch (...) {
      blocks_.erase(made);
      throw;
    }
    b.start = start;
    b.bytes = bytes;
    b.in = in;
    return b;
  }

  void insert(block& b) noexcept { set_of(b).insert(std::move(b.node)); }
  void extract(block& b) noexcept { b.node = set_of(b).extract(&b); }

  /// `b` keeps its first `bytes`; returns the rest.
  block& split(block& b, std::size_t bytes) {
    block& rest = make_block(b.start + bytes, b.bytes - bytes, b.in);
    b.bytes = bytes;
    rest.before = &b;
    rest.after = std::exchange(b.after, &rest);
    if (rest.after != nullptr) {
      rest.after->before = &rest;
    }
    return rest;
  }

  /// Cuts the wanted block out of a free one; what is over stays free.
  block& cut(block& from, const caching_request& want) {
    block* b = &from;
    extract(*b);
    try {
      if (std::byte* const start = aligned(b->start, want.alignment); start != b->start) {
        block& rest = split(*b, static_cast<std::size_t>(start - b->start));
        insert(*std::exchange(b, &rest));
      }
      if (b->bytes > want.block) {
        insert(split(*b, want.block));
      }
    } catch (...) {
      insert(*b);
      throw;
    }
    return *b;
  }

  /// Merges what was freed lately with its free neighbours.
  void merge() noexcept {
    block* loose = nullptr;
    for (block*& head : recent_) {
      while (block* const b = head) {
        head = b->next;
        b->next = loose;
        loose = b;
      }
    }
    while (block* const b = loose) {
      loose = b->next;
      if (b->absorbed) {
        blocks_.erase(b->start);
        continue;
      }
      while (b->after != nullptr && b->after->asked == 0) {
        absorb(*b, *b->after);
      }
      if (block* const before = b->before; before != nullptr && before->asked == 0 && before->node.empty()) {
        extract(*before);
        absorb(*before, *b);  // b is off the list by now
        blocks_.erase(b->start);
        insert(*before);
      } else {
        insert(*b);
      }
    }
  }

  /// Free memory behind `b` becomes its own. What is still on the list of those freed lately is erased from there.
  void absorb(block& b, block& behind) noexcept {
    b.bytes += behind.bytes;
    b.after = behind.after;
    if (b.after != nullptr) {
      b.after->before = &b;
    }
    if (behind.node.empty()) {
      set_of(behind).erase(&behind);
      blocks_.erase(behind.start);
    } else {
      behind.absorbed = true;
    }
  }

  [[nodiscard]] bool any_whole() const noexcept {
    return std::ranges::any_of(
        free_, [](const free_set& one) { return std::ranges::any_of(one, [](const block* b) { return whole(*b); }); });
  }

  template <class Wanted>
  void take_whole(segments& out, Wanted wanted) {
    for (free_set& one : free_) {
      for (auto next = one.begin(); next != one.end();) {
        block& b = **next++;
        if (whole(b) && wanted(*b.in)) {
          b.in->mark = mark_;
          out.splice(out.end(), segments_, b.in);
          one.erase(&b);
          blocks_.erase(b.start);
        }
      }
    }
  }

  /// Whether the stream can be touched.
  [[nodiscard]] bool exists(bool named) const noexcept { return named || (streams_stay_ && !key_.thread_bound()); }

  /// Whether `mark_` may have been recorded on another stream of this handle: one that is gone, or another thread's.
  [[nodiscard]] bool may_be_anothers() const noexcept { return key_.thread_bound() || handed_over(); }

  /// Records an event behind all that was freed so far. False: it can't be, now.
  bool fence(bool named) {
    if (fenced_ == frees_) {
      return true;
    }
    if (!exists(named) || Device::capturing(key_.stream).state != capture_state::none) {
      return false;
    }
    event mark{device_};
    if (mark_ != nullptr && may_be_anothers()) {
      Device::wait(key_.stream, *mark_);  // the new event takes its place
    }
    mark.record(key_.stream);
    if (Device::capturing(key_.stream).state != capture_state::none) {
      return false;  // a capture began meanwhile: the event may be its, and must not be asked
    }
    mark_ = std::make_shared<const event>(std::move(mark));
    fenced_ = frees_;
    return true;
  }

  const Device device_;
  const key key_;
  const bool streams_stay_;

  mutable std::mutex mutex_;
  std::array<block*, bins> recent_{};  // freed lately, as they were handed out
  std::array<free_set, 2> free_;       // the others that are free: of large segments, of small ones
  std::unordered_map<const void*, block> blocks_;
  segments segments_;

  std::uint64_t frees_ = 0;
  std::uint64_t fenced_ = 0;  // of them, those that mark_ is behind
  std::shared_ptr<const event> mark_;
  std::atomic<bool> handed_over_{false};  // since then, no stream has followed mark_; written under the mutex
  std::uint64_t activity_seen_ = 0;
  std::size_t used_bytes_ = 0;
  std::size_t peak_used_bytes_ = 0;
  std::uint64_t allocations_ = 0;
};

/// The heaps of a pool, one for each stream. They are found without a lock and go with the pool.
template <device Device>
class caching_heaps {
 public:
  using heap = caching_heap<Device>;
  using key = typename heap::key;

  caching_heaps(Device of, bool streams_stay) : device_(of), streams_stay_(streams_stay) {
    publish(std::make_unique<table>(16));
  }

  [[nodiscard]] heap* find(const key& whose) const noexcept {
    return slot(*now_.load(std::memory_order_acquire), whose).load(std::memory_order_acquire);
  }

  [[nodiscard]] heap& of(const key& whose) {
    if (heap* const known = find(whose)) {
      return *known;
    }
    const std::lock_guard lock{mutex_};
    if (heap* const known = find(whose)) {
      return *known;
    }
    table* current = tables_.back().get();
    if (2 * (heaps_.size() + 1) > current->size()) {
      auto larger = std::make_unique<table>(2 * current->size());
      for (heap& one : heaps_) {
        slot(*larger, one.whose()).store(&one, std::memory_order_relaxed);
      }
      current = larger.get();
      publish(std::move(larger));
    }
    heap& made = heaps_.emplace_back(device_, whose, streams_stay_);
    slot(*current, whose).store(&made, std::memory_order_release);
    return made;
  }

  template <class Visit>
  void each(Visit visit) const {
    for (const auto& one : *now_.load(std::memory_order_acquire)) {
      if (heap* const found = one.load(std::memory_order_acquire)) {
        visit(*found);
      }
    }
  }

 private:
  using table = std::vector<std::atomic<heap*>>;  // half empty at least; its size is a power of two

  /// Where the heap is, or would be.
  static std::atomic<heap*>& slot(table& in, const key& whose) noexcept {
    for (std::size_t i = whose.hash();; ++i) {
      std::atomic<heap*>& here = in[i & (in.size() - 1)];
      const heap* const found = here.load(std::memory_order_acquire);
      if (found == nullptr || found->whose() == whose) {
        return here;
      }
    }
  }

  void publish(std::unique_ptr<table> next) {
    tables_.push_back(std::move(next));
    now_.store(tables_.back().get(), std::memory_order_release);
  }

  const Device device_;
  const bool streams_stay_;
  std::mutex mutex_;
  std::list<heap> heaps_;
  std::vector<std::unique_ptr<table>> tables_;  // former ones, too: somebody may be reading them
  std::atomic<table*> now_{nullptr};
};

}  // namespace holdfast::HOLDFAST_ABI::detail
