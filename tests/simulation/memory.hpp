// The simulated memory: who owns which bytes, now and by the time that queued work runs.
//
//   ledger              every allocation, twice: as the calls made it (host time), and as the queues execute it
//   pool                a correct, stream-ordered pool that reuses the lowest addresses at once: the hardest upstream
//   pages               malloc_resource, whose pages go when queued work is done
//   recording_resource  what the library is given: passes calls to any upstream, writes the ledger, fails when told
//
// Work that touches memory asks the ledger first, so misuse is found where it happens and rarely as a crash. To the race
// detector, an owner's first and last work is to write all that it owns: whoever comes next has to come after it.
#pragma once

#include "mutants.hpp"
#include "observed_device.hpp"

#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/malloc.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simulation {

using any_resource = holdfast::any_resource<device>;
using allocation_id = std::uint64_t;  // never used again; 0: none

/// Sees to it that nothing which is read was zero, or anybody's, by accident.
inline void make_garbage(void* p, std::size_t bytes) { std::memset(p, 0xA5, bytes); }

class ledger {
 public:
  struct allocation {
    allocation_id id;
    std::size_t bytes, alignment;
    host::stream_ref stream;
  };

  // --- host time
  allocation_id allocated(const void* p, std::size_t bytes, std::size_t alignment, host::stream_ref stream) {
    const std::lock_guard lock(mutex_);
    const std::uintptr_t begin = address(p);
    if (begin % alignment != 0) misuse("an allocation is not aligned");
    const auto next = calls_.lower_bound(begin);
    if ((next != calls_.end() && next->first < begin + bytes) ||
        (next != calls_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > begin)) {
      misuse("the resource gave out bytes that are allocated already");
    }
    calls_.insert_or_assign(begin, allocation{++last_, bytes, alignment, stream});
    return last_;
  }

  /// The allocation that is given back; none, and a misuse, when there is no such one or somebody still needs it.
  allocation_id freed(const void* p, std::size_t bytes, std::size_t alignment, host::stream_ref stream) {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(address(p));
    if (found == calls_.end()) {
      misuse("memory was given back that isn't allocated");
      return 0;
    }
    const allocation made = found->second;
    if (made.bytes != bytes || made.alignment != alignment || made.stream != stream) {
      misuse("memory was given back with other figures than it was allocated with");
    }
    if (needed_.contains(made.id)) {
      misuse("allocation " + std::to_string(made.id) + " was given back while a handle or a graph needs it");
    }
    calls_.erase(found);
    return made.id;
  }

  allocation_id extended(const void* p, std::size_t old_bytes, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(address(p));
    if (found == calls_.end() || found->second.bytes != old_bytes) {
      misuse("memory was extended that isn't allocated, or is of another size");
      return 0;
    }
    found->second.bytes = bytes;
    return found->second.id;
  }

  /// The allocation that all of the range lies in.
  [[nodiscard]] allocation_id owner(const void* p, std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    const auto past = calls_.upper_bound(address(p));
    if (past == calls_.begin()) return 0;
    const auto& [begin, of] = *std::prev(past);
    return address(p) + bytes <= begin + of.bytes ? of.id : 0;
  }

  void need(allocation_id id) {
    const std::lock_guard lock(mutex_);
    ++needed_[id];
  }
  void need_no_more(allocation_id id) {
    const std::lock_guard lock(mutex_);
    if (const auto found = needed_.find(id); --found->second == 0) needed_.erase(found);
  }

  [[nodiscard]] std::size_t count() const { return calls_.size(); }

  // --- memory that comes from no resource: mapped by whom it belongs to
  allocation_id named() { return ++last_; }
  /// These bytes are of `id`, and stay mapped while it is needed, but while it is suspended.
  void belongs(allocation_id id, const void* p, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    mapping& all = mappings_.try_emplace(id, mapping{address(p), address(p) + bytes, false}).first->second;
    all.begin = std::min(all.begin, address(p));
  }
  void suspends(allocation_id id, bool now) {
    const std::lock_guard lock(mutex_);
    if (const auto found = mappings_.find(id); found != mappings_.end()) found->second.suspended = now;
  }
  void unmapped(const void* p, std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, of] : mappings_) {
      if (address(p) < of.end && of.begin < address(p) + bytes && !of.suspended && needed_.contains(id)) {
        misuse("memory was unmapped while a handle or a graph needs it");
      }
    }
  }

  // --- when queued work runs
  void begins(void* p, std::size_t bytes, allocation_id id) {
    const std::uintptr_t begin = address(p);
    const auto next = live_.lower_bound(begin);
    if ((next != live_.end() && next->first < begin + bytes) ||
        (next != live_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > begin)) {
      misuse("allocation " + std::to_string(id) + " begins while an earlier owner's work may still use its bytes");
      return;
    }
    live_.insert_or_assign(begin, region{bytes, id, true});
    make_garbage(p, bytes);
  }
  void grows(void* p, std::size_t bytes) {
    region& grown = live_[address(p)];
    make_garbage(static_cast<std::byte*>(p) + grown.bytes, bytes - grown.bytes);
    grown.bytes = bytes;
  }
  void ends(void* p, allocation_id id) {
    const auto found = live_.find(address(p));
    if (found == live_.end() || found->second.id != id) {
      misuse("allocation " + std::to_string(id) + " ends, but it never began");
      return;
    }
    if (found->second.committed) make_garbage(p, found->second.bytes);
    live_.erase(found);
  }
  void commits(void* p, bool committed) {
    region& of = live_[address(p)];
    make_garbage(p, of.bytes);
    of.committed = committed;
  }
  /// Whether the range belongs to that allocation now.
  [[nodiscard]] bool usable(const void* p, std::size_t bytes, allocation_id id) const {
    if (mappings_.contains(id)) return true;  // or it crashes
    const auto past = live_.upper_bound(address(p));
    if (past == live_.begin()) return false;
    const auto& [begin, of] = *std::prev(past);
    return of.id == id && of.committed && address(p) + bytes <= begin + of.bytes;
  }
  [[nodiscard]] std::size_t live() const { return live_.size(); }

 private:
  struct mapping {
    std::uintptr_t begin, end;
    bool suspended;
  };
  struct region {
    std::size_t bytes = 0;
    allocation_id id = 0;
    bool committed = false;
  };

  static std::uintptr_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

  mutable std::mutex mutex_;  // of what host time changes
  allocation_id last_ = 0;
  std::map<std::uintptr_t, allocation> calls_;
  std::map<std::uintptr_t, region> live_;
  std::unordered_map<allocation_id, int> needed_;
  std::map<allocation_id, mapping> mappings_;
};

/// Stream-ordered memory from one fixed range. What is given back can be had at once, by any stream, which then waits for
/// the point where it was given back.
class pool {
 public:
  using stream_type = host::stream_ref;
  static constexpr const char* name = "pool";
  static constexpr std::size_t size = std::size_t{128} << 10;

  /// The memory is the process's `number`th (0 to 3). Every allocation takes `room` bytes at least, to grow in.
  explicit pool(int number, std::size_t room = 0)
      : state_(std::make_shared<state>(state{memory(number), room, {}, {}})) {}

  void* allocate(host::stream_ref stream, std::size_t bytes, std::size_t alignment) {
    const std::size_t taken = std::max(bytes, state_->room);
    std::size_t begin = 0;
    for (const auto& [used, end] : state_->used) {
      if (begin + taken <= used) break;
      begin = (end + alignment - 1) / alignment * alignment;
    }
    if (begin + taken > size) throw holdfast::out_of_memory{name, bytes, 0, 0};
    const std::size_t end = begin + taken;
    for (ghost& before : state_->ghosts) {
      if (before.begin >= end || before.end <= begin || HOLDFAST_MUTANT(pool_publishes_early) ||
          (HOLDFAST_MUTANT(pool_trusts_handles) && before.stream == stream) ||
          (HOLDFAST_MUTANT(pool_takes_errors_for_ready) && seems_ready(before))) {
        continue;
      }
      device::wait(stream, before.freed);
    }
    std::erase_if(state_->ghosts, [&](const ghost& g) { return begin <= g.begin && g.end <= end; });
    state_->used.emplace(begin, end);
    return state_->base + begin;
  }

  void deallocate(host::stream_ref stream, void* p, std::size_t, std::size_t) noexcept {
    const auto found = state_->used.find(static_cast<std::size_t>(static_cast<std::byte*>(p) - state_->base));
    device::event freed{device{0}};
    if (!HOLDFAST_MUTANT(pool_takes_errors_for_ready)) freed.record(stream);
    state_->ghosts.push_back({found->first, found->second, stream, std::move(freed)});
    state_->used.erase(found);
  }

  bool extend(host::stream_ref, void*, std::size_t, std::size_t bytes) { return bytes <= state_->room; }
  void decommit(host::stream_ref, void*, std::size_t) {}
  void recommit(host::stream_ref, void*, std::size_t) {}

  friend bool operator==(const pool&, const pool&) = default;

 private:
  struct ghost {
    std::size_t begin, end;
    host::stream_ref stream;
    device::event freed;
  };
  struct state {
    std::byte* base;
    std::size_t room;
    std::map<std::size_t, std::size_t> used;  // begin and end
    std::vector<ghost> ghosts;                // given back; some may be used again in part
  };

  /// Of a mutant, which records the event only now, maybe in a capture, and asks for nothing but "not ready".
  static bool seems_ready(ghost& before) {
    try {
      before.freed.record(before.stream);
      return before.freed.ready();
    } catch (const holdfast::device_error&) {
      return true;
    }
  }

  static std::byte* memory(int number) {
    static std::array<std::byte*, 4> all{};
    std::byte*& mine = all.at(static_cast<std::size_t>(number));
    if (mine == nullptr) mine = static_cast<std::byte*>(::operator new (size, std::align_val_t{4096}));
    return mine;
  }

  std::shared_ptr<state> state_;
};

class pages {
 public:
  using stream_type = host::stream_ref;
  static constexpr const char* name = "pages";

  void* allocate(host::stream_ref stream, std::size_t bytes, std::size_t alignment) {
    void* const p = from_.allocate(stream, bytes, alignment);
    observing->mapped(p, bytes);
    return p;
  }
  void deallocate(host::stream_ref stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    observing->work(stream, {writes("the unmapping of pages", 0, p, bytes)});
    from_.deallocate(stream, p, bytes, alignment);
  }

  friend bool operator==(const pages&, const pages&) = default;

 private:
  holdfast::malloc_resource<holdfast::host_device> from_{holdfast::host_device{0}};
};

/// Any upstream, with the ledger written and failures on demand.
template <bool Growing>
class recording_resource {
 public:
  using device_type = simulation::device;
  using stream_type = host::stream_ref;
  static constexpr const char* name = "recording_resource";

  recording_resource(any_resource upstream, std::shared_ptr<ledger> written)
      : state_(std::make_shared<state>(state{std::move(upstream), std::move(written)})) {}

  void* allocate(host::stream_ref stream, std::size_t bytes, std::size_t alignment) {
    if (fails()) throw holdfast::out_of_memory{name, bytes, 0, 0};
    void* p = nullptr;
    try {
      p = state_->upstream.allocate(stream, bytes, alignment);
    } catch (const holdfast::out_of_memory&) {
      ++state_->shortages;
      throw;
    }
    const allocation_id id = state_->book->allocated(p, bytes, alignment, stream);
    run(stream, writes("the begin of allocation ", id, p, bytes),
        [book = state_->book.get(), p, bytes, id] { book->begins(p, bytes, id); });
    return p;
  }

  void deallocate(host::stream_ref stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    const allocation_id id = state_->book->freed(p, bytes, alignment, stream);
    if (id == 0) return;
    run(stream, writes("the end of allocation ", id, p, bytes),
        [book = state_->book.get(), p, id] { book->ends(p, id); });
    state_->upstream.deallocate(stream, p, bytes, alignment);
  }

  bool extend(host::stream_ref stream, void* p, std::size_t old_bytes, std::size_t bytes) requires Growing {
    if (fails() || !state_->upstream.extend(stream, p, old_bytes, bytes)) return false;
    const allocation_id id = state_->book->extended(p, old_bytes, bytes);
    run(stream, writes("the growth of allocation ", id, static_cast<std::byte*>(p) + old_bytes, bytes - old_bytes),
        [book = state_->book.get(), p, bytes] { book->grows(p, bytes); });
    return true;
  }

  void decommit(host::stream_ref stream, void* p, std::size_t bytes) requires Growing {
    run(stream, writes("a suspension", 0, p, bytes), [book = state_->book.get(), p] { book->commits(p, false); });
    state_->upstream.decommit(stream, p, bytes);
  }
  void recommit(host::stream_ref stream, void* p, std::size_t bytes) requires Growing {
    if (fails()) throw holdfast::out_of_memory{name, bytes, 0, 0};
    state_->upstream.recommit(stream, p, bytes);
    run(stream, writes("a resumption", 0, p, bytes), [book = state_->book.get(), p] { book->commits(p, true); });
  }

  [[nodiscard]] simulation::device device() const { return state_->upstream.device(); }
  [[nodiscard]] bool omits_tails() const { return state_->upstream.omits_tails(); }
  friend bool operator==(const recording_resource&, const recording_resource&) = default;

  /// The next `count` calls that need memory fail.
  void fail(int count) { state_->failing = count; }
  /// Calls that failed so far, for whatever reason.
  [[nodiscard]] int shortages() const { return state_->shortages; }

 private:
  struct state {
    any_resource upstream;
    std::shared_ptr<ledger> book;
    int failing = 0;
    int shortages = 0;
  };

  static void run(host::stream_ref stream, const access& does, std::function<void()> kernel) {
    simulation::device::run(stream, {does}, std::move(kernel));
  }

  bool fails() {
    if (state_->failing == 0) return false;
    --state_->failing;
    ++state_->shortages;
    return true;
  }

  std::shared_ptr<state> state_;
};

}  // namespace simulation
