// The simulated memory: who owns which bytes, now and by the time that queued work runs.
//
//   ledger              every allocation, twice: as the calls made it (host time), and as the queues execute it
//   pool                a correct, stream-ordered pool that reuses the lowest addresses at once: the hardest upstream
//   recording_resource  what the library is given: passes calls to any upstream, writes the ledger, fails when told
//
// Work that touches memory asks the ledger first, so misuse is found where it happens and rarely as a crash.
#pragma once

#include "mutants.hpp"

#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simulation {

namespace host = holdfast::host;
using device = holdfast::host_device;
using any_resource = holdfast::any_resource<device>;
using allocation_id = std::uint64_t;  // never used again; 0: none

/// The first misuse found; what comes later may be its consequence.
inline std::string found_misuse;
inline void misuse(std::string what) {
  if (found_misuse.empty()) found_misuse = std::move(what);
}

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
    const auto past = calls_.upper_bound(address(p));
    if (past == calls_.begin()) return 0;
    const auto& [begin, of] = *std::prev(past);
    return address(p) + bytes <= begin + of.bytes ? of.id : 0;
  }

  void need(allocation_id id) { ++needed_[id]; }
  void need_no_more(allocation_id id) {
    if (const auto found = needed_.find(id); --found->second == 0) needed_.erase(found);
  }

  [[nodiscard]] std::size_t count() const { return calls_.size(); }

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
    const auto past = live_.upper_bound(address(p));
    if (past == live_.begin()) return false;
    const auto& [begin, of] = *std::prev(past);
    return of.id == id && of.committed && address(p) + bytes <= begin + of.bytes;
  }
  [[nodiscard]] std::size_t live() const { return live_.size(); }

 private:
  struct region {
    std::size_t bytes = 0;
    allocation_id id = 0;
    bool committed = false;
  };

  static std::uintptr_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

  allocation_id last_ = 0;
  std::map<std::uintptr_t, allocation> calls_;
  std::map<std::uintptr_t, region> live_;
  std::unordered_map<allocation_id, int> needed_;
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
    for (const ghost& before : state_->ghosts) {
      if (before.begin >= end || before.end <= begin || HOLDFAST_MUTANT(pool_publishes_early) ||
          (HOLDFAST_MUTANT(pool_trusts_handles) && before.stream == stream)) {
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
    host::event freed{device{0}};
    freed.record(stream);
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
    host::event freed;
  };
  struct state {
    std::byte* base;
    std::size_t room;
    std::map<std::size_t, std::size_t> used;  // begin and end
    std::vector<ghost> ghosts;                // given back; some may be used again in part
  };

  static std::byte* memory(int number) {
    static std::array<std::byte*, 4> all{};
    std::byte*& mine = all.at(static_cast<std::size_t>(number));
    if (mine == nullptr) mine = static_cast<std::byte*>(::operator new (size, std::align_val_t{4096}));
    return mine;
  }

  std::shared_ptr<state> state_;
};

/// Any upstream, with the ledger written and failures on demand.
template <bool Growing>
class recording_resource {
 public:
  using device_type = holdfast::host_device;
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
    stream.run([book = state_->book.get(), p, bytes, id] { book->begins(p, bytes, id); });
    return p;
  }

  void deallocate(host::stream_ref stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    const allocation_id id = state_->book->freed(p, bytes, alignment, stream);
    if (id == 0) return;
    stream.run([book = state_->book.get(), p, id] { book->ends(p, id); });
    state_->upstream.deallocate(stream, p, bytes, alignment);
  }

  bool extend(host::stream_ref stream, void* p, std::size_t old_bytes, std::size_t bytes) requires Growing {
    if (fails() || !state_->upstream.extend(stream, p, old_bytes, bytes)) return false;
    static_cast<void>(state_->book->extended(p, old_bytes, bytes));
    stream.run([book = state_->book.get(), p, bytes] { book->grows(p, bytes); });
    return true;
  }

  void decommit(host::stream_ref stream, void* p, std::size_t bytes) requires Growing {
    stream.run([book = state_->book.get(), p] { book->commits(p, false); });
    state_->upstream.decommit(stream, p, bytes);
  }
  void recommit(host::stream_ref stream, void* p, std::size_t bytes) requires Growing {
    if (fails()) throw holdfast::out_of_memory{name, bytes, 0, 0};
    state_->upstream.recommit(stream, p, bytes);
    stream.run([book = state_->book.get(), p] { book->commits(p, true); });
  }

  [[nodiscard]] holdfast::host_device device() const { return state_->upstream.device(); }
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

  bool fails() {
    if (state_->failing == 0) return false;
    --state_->failing;
    ++state_->shortages;
    return true;
  }

  std::shared_ptr<state> state_;
};

}  // namespace simulation
