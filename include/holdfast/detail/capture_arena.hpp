// Memory for scratch that is acquired inside captures, shared by the graphs of one lane: they never run at the same time,
// so each may use all of it, and what they hold together is the largest, not the sum.
//
// Within one capture, memory is used again once its handle was released and the reuse comes after it: on the same stream,
// or along a path of the graph. What a handle holds is nobody else's, the end of its capture notwithstanding.
#pragma once

#include <holdfast/block.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI::detail {

template <device Device>
class capture_arena {
 public:
  using stream_type = typename Device::stream_type;
  using capture_type = capture_status<typename Device::graph_type>;

  /// A piece of a block of the arena's.
  struct piece {
    block<Device>* in = nullptr;
    std::size_t begin = 0;
    std::size_t end = 0;

    friend bool operator==(const piece&, const piece&) = default;
    [[nodiscard]] bool meets(const piece& other) const noexcept {
      return in == other.in && begin < other.end && other.begin < end;
    }
  };

  capture_arena(any_resource<Device> resource, std::shared_ptr<byte_counts> counts)
      : resource_(std::move(resource)), counts_(std::move(counts)) {}
  capture_arena(const capture_arena&) = delete;
  capture_arena& operator=(const capture_arena&) = delete;
  ~capture_arena() {
    for (const std::shared_ptr<block<Device>>& owned : blocks_) {
      owned->let_go();
    }
  }

  /// `bytes` (more than 0) at an alignment of at most 1024 bytes, which the graph that `stream` captures owns from now on.
  [[nodiscard]] piece acquire(stream_type stream, const capture_type& capture, std::size_t bytes,
                              std::size_t alignment) {
    const std::lock_guard lock{mutex_};
    session& own = session_of(capture.id);
    piece found;
    if (!own.forgotten) {
      const std::vector<piece> taken = taken_from(stream, own);
      found = first_fit(taken, bytes, alignment,
                        [](const block<Device>& in, std::size_t end) { return end <= in.bytes(); });
      if (found.in == nullptr && resource_.extensible()) {
        found = first_fit(taken, bytes, alignment, grows_to);
      }
    }
    if (found.in == nullptr) {
      found = {add_for(bytes), 0, bytes};
    }
    held_.reserve(held_.size() + 1);
    found.in->pin(capture);
    std::erase_if(own.released, [&](const use& earlier) {  // what comes after this piece comes after what it replaces
      return earlier.of.in == found.in && found.begin <= earlier.of.begin && earlier.of.end <= found.end;
    });
    held_.push_back(found);
    return found;
  }

  /// The use of `held`, which was acquired on `acquired_on` in the capture `acquired_in`, ends on `stream`.
  void release(const piece& held, stream_type stream, stream_type acquired_on, std::uint64_t acquired_in) noexcept {
    const std::lock_guard lock{mutex_};
    try {
      const auto capture = Device::capturing(stream);
      if (capture.state == capture_state::active) {
        session_of(capture.id).released.push_back({held, stream, Device::frontier(stream)});
      }
      if (capture.id != acquired_in) {  // it may have been used eagerly since its capture ended
        held.in->end_use_after_capture(stream);
      }
      if (!(stream == acquired_on) && Device::capturing(acquired_on).id != acquired_in) {
        held.in->end_use_after_capture(acquired_on);
      }
    } catch (...) {
      return;  // what could not be noted down stays held
    }
    held_.erase(std::find(held_.begin(), held_.end(), held));
  }

  /// At least one block of `bytes`.
  void reserve(std::size_t bytes) {
    const std::lock_guard lock{mutex_};
    if (bytes == 0) {
      return;
    }
    if (std::none_of(blocks_.begin(), blocks_.end(), [&](const auto& owned) { return owned->bytes() >= bytes; }) &&
        (blocks_.empty() || !grows_to(*blocks_.back(), bytes))) {
      add(bytes);
    }
  }

  [[nodiscard]] std::size_t bytes() const noexcept {
    const std::lock_guard lock{mutex_};
    return total();
  }

 private:
  static constexpr std::size_t block_alignment = 1024;

  struct use {
    piece of;
    stream_type stream;
    std::vector<typename Device::node_type> last;  // nodes that the release came after
  };

  struct session {
    std::uint64_t capture;
    std::vector<use> released;
    bool forgotten = false;  // what it released before is not known any more: it gets new memory only
  };

  /// Captures that may be under way at a time in one lane and still use again what they released.
  static constexpr std::size_t most_sessions = 64;

  session& session_of(std::uint64_t capture) {
    const auto found =
        std::find_if(sessions_.begin(), sessions_.end(), [&](const session& s) { return s.capture == capture; });
    if (found != sessions_.end()) {
      return *found;
    }
    const bool forgotten = std::find(forgotten_.begin(), forgotten_.end(), capture) != forgotten_.end();
    if (sessions_.size() == most_sessions) {
      forgotten_.push_back(sessions_.front().capture);
      sessions_.erase(sessions_.begin());
    }
    return sessions_.emplace_back(session{capture, {}, forgotten});
  }

  /// Where it can, a block grows where it is, by no more than is needed.
  static bool grows_to(block<Device>& in, std::size_t bytes) {
    return in.extend(bytes, [](stream_type, void*) {});
  }

  /// What work captured next on `stream` may not touch, by its beginning.
  [[nodiscard]] std::vector<piece> taken_from(stream_type stream, const session& own) const {
    std::vector<piece> taken = held_;
    for (const use& earlier : own.released) {
      const bool same = earlier.stream == stream && !Device::thread_bound(stream);
      if (!same && !Device::comes_after(stream, earlier.last)) {
        taken.push_back(earlier.of);
      }
    }
    std::sort(taken.begin(), taken.end(), [](const piece& a, const piece& b) { return a.begin < b.begin; });
    return taken;
  }

  /// The lowest place in the first block that has room, as `has_room(block, end of the piece)` says.
  template <class HasRoom>
  [[nodiscard]] piece first_fit(const std::vector<piece>& taken, std::size_t bytes, std::size_t alignment,
                                const HasRoom& has_room) const {
    for (const std::shared_ptr<block<Device>>& owned : blocks_) {
      std::size_t begin = 0;
      for (const piece& other : taken) {
        if (piece{owned.get(), begin, begin + bytes}.meets(other)) {
          begin = (other.end + alignment - 1) / alignment * alignment;
        }
      }
      std::size_t end = 0;
      if (!__builtin_add_overflow(begin, bytes, &end) && has_room(*owned, end)) {
        return {owned.get(), begin, end};
      }
    }
    return {};
  }

  /// A new block: as much again as there is, so that ascending requests make few; exactly `bytes` when memory is short.
  block<Device>* add_for(std::size_t bytes) {
    if (total() > bytes) {
      try {
        return add(total());
      } catch (const out_of_memory&) {
      }
    }
    return add(bytes);
  }

  block<Device>* add(std::size_t bytes) {
    blocks_.reserve(blocks_.size() + 1);
    blocks_.push_back(block<Device>::make(resource_, bytes, block_alignment, counts_, [](stream_type, void*) {}));
    return blocks_.back().get();
  }

  [[nodiscard]] std::size_t total() const noexcept {
    std::size_t sum = 0;
    for (const std::shared_ptr<block<Device>>& owned : blocks_) {
      sum += owned->bytes();
    }
    return sum;
  }

  any_resource<Device> resource_;
  std::shared_ptr<byte_counts> counts_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<block<Device>>> blocks_;
  std::vector<piece> held_;
  std::vector<session> sessions_;
  std::vector<std::uint64_t> forgotten_;  // captures whose sessions had to go
};

}  // namespace holdfast::HOLDFAST_ABI::detail
