// A range of addresses that stays reserved, and what is mapped in it: physical memory of its own, committed piece by
// piece, and memory of others. What vmm_resource, guard_resource and anchored_scratch are made of.
//
// Each change happens wholly or not at all. The caller sees to it that nothing uses what is taken away, and to threads.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Rounds up; false when that overflows.
[[nodiscard]] constexpr bool round_up(std::size_t bytes, std::size_t unit, std::size_t& rounded) noexcept {
  const std::size_t rest = bytes % unit;
  return !__builtin_add_overflow(bytes, rest == 0 ? 0 : unit - rest, &rounded);
}

/// How the memory of a range is made, and which other devices may use it.
struct range_options {
  physical_options physical{};
  std::vector<int> peers{};  // ordinals
};

template <device Device>
class virtual_range {
 public:
  using physical_type = typename Device::physical_type;

  /// Reserves `bytes`, a multiple of the granularity (as all figures here). Throws out_of_memory, device_error.
  virtual_range(Device of, std::size_t bytes, std::size_t alignment, range_options options)
      : device_(of),
        options_(std::move(options)),
        bytes_(bytes),
        data_(static_cast<std::byte*>(of.reserve(bytes, alignment))) {}
  virtual_range(const virtual_range&) = delete;
  virtual_range& operator=(const virtual_range&) = delete;

  /// Unmaps everything and gives the addresses back, unless they were abandoned. What the device refuses is leaked.
  ~virtual_range() {
    for (const piece& p : pieces_) {
      if (p.mapped) {
        or_leak([&] { device_.unmap(data_ + p.begin, p.bytes); });
      }
    }
    if (!abandoned_) {
      or_leak([&] { device_.unreserve(data_, bytes_); });
    }
  }

  /// Physical memory at [begin, begin + bytes), for the device and its peers to read and write. Throws out_of_memory,
  /// device_error.
  void commit(std::size_t begin, std::size_t bytes) {
    pieces_.reserve(pieces_.size() + 1);
    put_memory_at(begin, bytes);
    pieces_.push_back({begin, bytes, true, true});
  }

  /// The first `bytes` of somebody's memory at [begin, begin + bytes).
  void show(std::size_t begin, std::size_t bytes, physical_type memory, access allowed) {
    pieces_.reserve(pieces_.size() + 1);
    put(begin, bytes, memory, allowed);
    pieces_.push_back({begin, bytes, false, true});
  }

  /// Gives back all memory that was committed; the addresses stay. Throws device_error, and can be tried again.
  void decommit() {
    for (piece& p : pieces_) {
      if (p.own && p.mapped) {
        device_.unmap(data_ + p.begin, p.bytes);
        p.mapped = false;
      }
    }
  }

  /// Fresh memory wherever some was given back. Throws out_of_memory, device_error.
  void recommit() {
    std::vector<piece*> done;
    done.reserve(pieces_.size());
    try {
      for (piece& p : pieces_) {
        if (!p.mapped) {
          put_memory_at(p.begin, p.bytes);
          p.mapped = true;
          done.push_back(&p);
        }
      }
    } catch (...) {
      for (piece* p : done) {
        or_leak([&] { device_.unmap(data_ + p->begin, p->bytes); });
        p->mapped = false;
      }
      throw;
    }
  }

  /// Nobody is given these addresses again: whoever still uses them faults.
  void abandon_addresses() noexcept { abandoned_ = true; }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// Bytes of memory that are the range's own now, and whether some were given back.
  [[nodiscard]] std::size_t committed() const noexcept {
    std::size_t sum = 0;
    for (const piece& p : pieces_) {
      sum += p.own && p.mapped ? p.bytes : 0;
    }
    return sum;
  }
  [[nodiscard]] bool decommitted() const noexcept {
    return std::any_of(pieces_.begin(), pieces_.end(), [](const piece& p) { return !p.mapped; });
  }

 private:
  struct piece {
    std::size_t begin;
    std::size_t bytes;
    bool own;
    bool mapped;
  };

  void put_memory_at(std::size_t begin, std::size_t bytes) {
    const physical_type memory = device_.create(bytes, options_.physical);
    const auto let_go = [&] { or_leak([&] { device_.destroy(memory); }); };
    try {
      put(begin, bytes, memory, access::read_write);
    } catch (...) {
      let_go();
      throw;
    }
    let_go();  // the mapping keeps it
  }

  void put(std::size_t begin, std::size_t bytes, physical_type memory, access allowed) {
    device_.map(data_ + begin, bytes, memory);
    try {
      device_.allow(data_ + begin, bytes, allowed);
      for (const int peer : options_.peers) {
        Device{peer}.allow(data_ + begin, bytes, allowed);
      }
    } catch (...) {
      or_leak([&] { device_.unmap(data_ + begin, bytes); });
      throw;
    }
  }

  /// Where there is nothing better to do about a refusal.
  template <class Call>
  static void or_leak(const Call& call) noexcept {
    try {
      call();
    } catch (...) {
    }
  }

  const Device device_;
  const range_options options_;
  const std::size_t bytes_;
  std::byte* const data_;
  std::vector<piece> pieces_;
  bool abandoned_ = false;
};

}  // namespace holdfast::HOLDFAST_ABI::detail
