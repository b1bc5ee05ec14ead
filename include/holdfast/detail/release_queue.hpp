// Where blocks go when their last owner is gone. That may be a graph, whose end is reported on a thread that may not call
// the device, so dropping a block only queues it; library calls on ordinary threads give queued blocks back.
#pragma once

#include <holdfast/detail/process.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

namespace holdfast::inline HOLDFAST_ABI {

template <device Device>
class block;

/// Bytes of blocks, by what keeps them. One for a buffer's blocks, one for a device's; thread safe.
class byte_counts {
 public:
  byte_counts() noexcept = default;
  explicit byte_counts(byte_counts& total) noexcept : total_(&total) {}
  byte_counts(const byte_counts&) = delete;
  byte_counts& operator=(const byte_counts&) = delete;

  /// Owned by at least one live graph.
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept { return pinned_.load(std::memory_order_acquire); }
  /// Replaced by growth, and kept by handles or graphs.
  [[nodiscard]] std::uint64_t retired_bytes() const noexcept { return retired_.load(std::memory_order_acquire); }
  /// Without an owner, and not yet back in their resource.
  [[nodiscard]] std::uint64_t pending_bytes() const noexcept { return pending_.load(std::memory_order_acquire); }
  /// Attempts to give a block back that failed before its resource was asked (the runtime gone or broken); its bytes stay
  /// pending.
  [[nodiscard]] std::uint64_t failures() const noexcept { return failures_.load(std::memory_order_acquire); }

  void pinned(std::uint64_t bytes) noexcept { change(&byte_counts::pinned_, bytes); }
  void unpinned(std::uint64_t bytes) noexcept { change(&byte_counts::pinned_, 0 - bytes); }
  void retired(std::uint64_t bytes) noexcept { change(&byte_counts::retired_, bytes); }
  void queued(std::uint64_t bytes, bool was_retired) noexcept {
    change(&byte_counts::pending_, bytes);
    change(&byte_counts::retired_, was_retired ? 0 - bytes : 0);
  }
  void returned(std::uint64_t bytes) noexcept { change(&byte_counts::pending_, 0 - bytes); }
  void failed() noexcept { change(&byte_counts::failures_, 1); }

 private:
  using counter = std::atomic<std::uint64_t>;

  void change(counter byte_counts::*which, std::uint64_t by) noexcept {  // modulo 2^64, so that it can go down
    (this->*which).fetch_add(by, std::memory_order_acq_rel);
    if (total_ != nullptr) {
      total_->change(which, by);
    }
  }

  byte_counts* const total_ = nullptr;
  counter pinned_{0}, retired_{0}, pending_{0}, failures_{0};
};

namespace detail {

inline void refuse_unusable_device(const char* device) {
  if (!device_usable().load(std::memory_order_relaxed)) [[unlikely]] {
    throw logic_error{std::string{device} + ": devices cannot be used in a forked child, nor while the process exits"};
  }
}

template <device Device>
class release_queue {
 public:
  /// One of each shared object, leaked at exit. Nothing depends on its being shared: a block knows its own.
  [[gnu::visibility("default")]] static release_queue& instance() {
    static release_queue& queue = *new release_queue;
    return queue;
  }

  /// The counts of a whole device.
  [[nodiscard]] byte_counts& total(Device device) {
    if (device.ordinal < 0 || static_cast<std::size_t>(device.ordinal) >= totals_.size()) {
      throw logic_error{std::string{Device::name} + " device " + std::to_string(device.ordinal) +
                        ": ordinals go from 0 to " + std::to_string(totals_.size() - 1)};
    }
    return totals_[static_cast<std::size_t>(device.ordinal)];
  }

  /// The last owner of `dead` is gone. Any thread, lock-free, calls no device.
  void push(block<Device>* dead) noexcept {
    dead->counts_->queued(dead->bytes_, dead->retired_);
    link(dead);
  }

  /// Tries to give queued blocks back, a bounded number of them; none while another thread does. Returns how many bytes
  /// went back.
  std::size_t drain() noexcept {
    const std::unique_lock lock{draining_, std::try_to_lock};
    return lock ? drain(64, [](const block<Device>&) { return true; }) : 0;
  }
  /// All of them; those of `device` alone. Another thread that does so is waited for: it may have memory in its hands.
  std::size_t drain_all() noexcept {
    const std::lock_guard lock{draining_};
    return drain(std::numeric_limits<std::size_t>::max(), [](const block<Device>&) { return true; });
  }
  std::size_t drain_all(Device device) noexcept {
    const std::lock_guard lock{draining_};
    return drain(std::numeric_limits<std::size_t>::max(),
                 [device](const block<Device>& dead) { return dead.device() == device; });
  }

  /// Bytes that went back so far, by any thread. Whoever finds memory short drains, and if this grew since, tries again.
  [[nodiscard]] std::uint64_t given_back() const noexcept { return given_back_.load(std::memory_order_acquire); }

 private:
  template <class Wanted>
  std::size_t drain(std::size_t limit, Wanted wanted) noexcept {
    if (head_.load(std::memory_order_relaxed) == nullptr || !device_usable().load(std::memory_order_relaxed)) {
      return 0;
    }
    const typename Device::relaxed_scope relaxed;  // the last handle of a resource may go with a block
    std::size_t bytes = 0;
    block<Device>* queued = head_.exchange(nullptr, std::memory_order_acquire);
    while (queued != nullptr) {
      block<Device>* const dead = queued;
      queued = dead->next_;
      if (wanted(*dead) && limit != 0 && (--limit, dead->give_back())) {
        bytes += dead->bytes_;
        given_back_.fetch_add(dead->bytes_, std::memory_order_acq_rel);
        dead->counts_->returned(dead->bytes_);
        delete dead;
      } else {
        link(dead);  // to be tried again by the next call
      }
    }
    return bytes;
  }

  void link(block<Device>* dead) noexcept {
    dead->next_ = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(dead->next_, dead, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  std::atomic<block<Device>*> head_{nullptr};
  std::recursive_mutex draining_;  // a resource that goes with its last block may come back here
  std::atomic<std::uint64_t> given_back_{0};
  std::array<byte_counts, 64> totals_{};
};

}  // namespace detail

}  // namespace holdfast::HOLDFAST_ABI
