// anchored_scratch: grow-only scratch anchored at its end, behind which consumers may read, and find zero, for nothing.
//
//   holdfast::anchored_scratch<__nv_fp8_e4m3> kv{decode, {.row_elements = 512,
//                                                         .over_read = holdfast::over_read::rows_beyond(128)}};
//   kv.reserve(batch * topk);                                 // before the KV pool takes the rest
//   auto rows = kv.acquire(stream, batch * topk);             // [rows, 512]; 128 zero rows behind them
//   my_dequantise<<<...>>>(..., rows.data());                 // writes the rows
//   sparse_fmha(rows.data(), ...);                            // may read 128 rows too far
//
// Addresses are reserved once, and scratch of n rows is what lies just before their fixed end, whatever n is. Behind the
// end, one page of zeros of the device's (2 MiB) is mapped read-only, as often as the tail is long: so the tail takes no
// memory of its own and no memset, is never dirty, and a write past the end faults. Memory is added at the other side as
// scratch grows: the address of n rows never changes, graphs captured before go on, and growth works inside captures.
//
// Within capacity `acquire` allocates nothing, launches nothing, sets nothing and takes no lock. One handle lives at a time
// (a second is refused: in_use), and work of the next one comes after work of the last one, as in a padded_query_buffer.
// Graphs own the memory that they recorded, whatever becomes of the anchored_scratch.
//
// Use a tail_padded_allocator instead where calls overlap, where the largest call is rare (this keeps its size for good),
// or where a row's bytes are no multiple of the alignment. Where a device has no virtual memory management (some virtual
// GPUs), it is used by itself: anchored() says which.
//
// Not here: order between graphs. Two of them (or a graph and eager work) that use one anchored_scratch at the same time
// are the caller's to order: use one a lane. Streams outlive it (declare them first).
#pragma once

#include <holdfast/block.hpp>
#include <holdfast/capture.hpp>
#include <holdfast/detail/anchored_scratch_resource.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/tail_padded_allocator.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

template <class T, device Device = cuda_device>
class anchored_scratch {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                "an anchored_scratch's element is a trivially copyable, mutable type whose zero is all zero bytes");

 public:
  using element_type = T;
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  using handle = scratch<T, Device>;

  /// Reserves and allocates nothing yet. `reserve_bytes`: addresses to grow into, 0: as much as the device has memory. Of
  /// `from`, the device counts, whether its resource omits tails, and all of it in the fallback. `options.fill` is for the
  /// fallback, too: anchored tails are always zero. Throws logic_error: options as for a tail_padded_allocator, and rows
  /// whose bytes are no multiple of the alignment (rows are counted from the end, so row 0 would lose it).
  anchored_scratch(lane<Device> from, scratch_options options, std::size_t reserve_bytes = 0)
      : options_(std::move(options)),
        device_(from.device()),
        counts_(std::make_shared<byte_counts>(detail::release_queue<Device>::instance().total(device_))),
        row_bytes_(detail::scratch_row_bytes<T>(options_)),
        omits_tails_(from.resource().omits_tails()),
        lent_(std::make_shared<std::int64_t>()) {
    if (static_cast<std::size_t>(row_bytes_) % options_.alignment != 0) {
      throw logic_error{who() + ": rows of " + std::to_string(row_bytes_) + " bytes do not keep an alignment of " +
                        std::to_string(options_.alignment) + "; pad the rows, or ask for less"};
    }
    // No row count has a longer tail than 0 rows have, or (tiles) 1 row.
    const std::int64_t tail_rows = std::max(tail_rows_of(0), tail_rows_of(1));
    std::int64_t tail_bytes = 0;
    if (__builtin_mul_overflow(tail_rows, row_bytes_, &tail_bytes)) {
      throw logic_error{who() + ": a tail of " + std::to_string(tail_rows) + " rows passes 2^63 - 1 bytes"};
    }
    if (device_.has_virtual_memory()) {
      resource_.emplace(device_, reserve_bytes, static_cast<std::size_t>(tail_bytes));
    } else {
      fallback_.emplace(std::move(from), options_);
    }
  }

  /// In a lane of its own, of the device's default resource.
  anchored_scratch(Device device, scratch_options options, std::size_t reserve_bytes = 0)
      : anchored_scratch(lane<Device>{default_resource(device)}, std::move(options), reserve_bytes) {}

  /// A moved-from one can only be destroyed or assigned to.
  anchored_scratch(anchored_scratch&&) noexcept = default;
  anchored_scratch& operator=(anchored_scratch&& other) noexcept {
    if (this != &other) {
      std::destroy_at(this);
      std::construct_at(this, std::move(other));
    }
    return *this;
  }

  /// The handle and graphs keep the memory for as long as they need it.
  ~anchored_scratch() { detail::let_go(block_); }

  /// The last `rows` rows before data_end(), for work queued on `stream` from now on, and the tail behind them. Beyond the
  /// capacity it grows first, which allocates and waits for the library's own stream; within it nothing of the kind happens.
  ///
  /// Stream order: work queued by earlier handles on other streams is waited for, when both are eager or both in one
  /// capture. Throws in_use while another handle lives, suspended, logic_error (rows < 0, too many bytes, an implicit or invalidated
  /// capture, a stream of another device), out_of_memory (addresses or memory), device_error; nothing changed then.
  [[nodiscard]] handle acquire(stream_type stream, std::int64_t rows) {
    return lend(stream, rows, [&] { return fallback_->acquire(stream, rows); });
  }

  /// acquire for a producer that writes the tail itself, unless it is read only; as gather_rows does.
  [[nodiscard]] handle acquire_unfilled(stream_type stream, std::int64_t rows) {
    return lend(stream, rows, [&] { return fallback_->acquire_unfilled(stream, rows); });
  }

  /// acquire, but empty where that refuses or has no memory. Throws device_error.
  [[nodiscard]] std::optional<handle> try_acquire(stream_type stream, std::int64_t rows) {
    try {
      return acquire(stream, rows);
    } catch (const logic_error&) {
    } catch (const std::bad_alloc&) {
    }
    return std::nullopt;
  }

  /// Makes room for at least `rows` rows. Call it before an engine measures what memory is left for its KV pool.
  void reserve(std::int64_t rows) {
    refuse_suspended(rows);
    if (fallback_) {
      fallback_->reserve(rows);
    } else if (rows < 0 || rows > capacity_) {
      grow(rows);
    }
  }

  /// Gives the physical memory back to the device; addresses and the tail's zeros stay, and so may the graphs. Eager work of
  /// released handles is waited for. Until resume(), acquire and reserve throw `suspended`. Throws in_use while a handle
  /// lives, logic_error when not anchored, or while a stream that used it is capturing; nothing changed then. device_error.
  void suspend(quiescent_t) {
    if (fallback_) {
      throw logic_error{who() + ": is not anchored, and cannot be suspended"};
    }
    if (lent_.use_count() > 1) {
      throw in_use{who() + ": suspended while a handle of " + std::to_string(*lent_) + " rows lives; release it first"};
    }
    if (block_ != nullptr) {
      block_->prepare_to_suspend();
    }
    suspended_ = true;  // even when what follows fails: it can be tried again, and resume makes all whole
    if (block_ != nullptr) {
      block_->suspend();
    }
  }

  /// Fresh memory, contents unspecified, at the same addresses: graphs may replay when this returns. Does nothing unless
  /// suspended. Throws out_of_memory, device_error: it is suspended then, and resume may be tried again.
  void resume() {
    if (suspended_) {
      if (block_ != nullptr) {
        block_->resume([](stream_type, void*) {});
      }
      suspended_ = false;
    }
  }

  [[nodiscard]] bool suspended() const noexcept { return suspended_; }

  /// False: the device has no virtual memory management, and this is a tail_padded_allocator that lends to one at a time.
  [[nodiscard]] bool anchored() const noexcept { return !fallback_; }
  /// Rows that acquire gives without growing: whole granules of memory. 0 when not anchored.
  [[nodiscard]] std::int64_t capacity() const noexcept { return capacity_; }
  /// Where all rows end and the tail begins; it never moves. Null while nothing is allocated, and when not anchored.
  [[nodiscard]] T* data_end() const noexcept { return block_ == nullptr ? nullptr : static_cast<T*>(block_->data()); }
  [[nodiscard]] const scratch_options& options() const noexcept { return options_; }
  [[nodiscard]] Device device() const noexcept { return device_; }

  /// Bytes of memory that live graphs own, and that has no owner any more and is not yet back with the device. They
  /// outlive this: counts(device) has the device's. When not anchored, as a tail_padded_allocator's.
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept {
    return fallback_ ? fallback_->pinned_bytes() : counts_->pinned_bytes();
  }
  [[nodiscard]] std::uint64_t pending_bytes() const noexcept {
    return fallback_ ? fallback_->pending_bytes() : counts_->pending_bytes();
  }

  /// Waits until no live graph owns any of the memory. False: not within `timeout`.
  bool wait_unpinned(std::chrono::nanoseconds timeout) const {
    return detail::wait_until(device_, timeout, [this] { return pinned_bytes() == 0; });
  }

 private:
  [[nodiscard]] std::string who() const {
    return options_.name + " [" + std::to_string(capacity_) + " rows of " + std::to_string(options_.row_elements) +
           " elements]";
  }

  [[nodiscard]] std::int64_t tail_rows_of(std::int64_t rows) const noexcept {
    return omits_tails_ ? 0 : options_.over_read.tail_rows(rows);
  }

  void refuse_suspended(std::int64_t rows) const {
    if (suspended_) [[unlikely]] {
      throw holdfast::suspended{who() + ": " + std::to_string(rows) +
                                " rows asked, but its memory was given back; call resume first"};
    }
  }

  template <class FromFallback>
  [[nodiscard]] handle lend(stream_type stream, std::int64_t rows, const FromFallback& from_fallback) {
    refuse_suspended(rows);
    if (lent_.use_count() > 1) [[unlikely]] {
      throw in_use{who() + ": " + std::to_string(rows) + " rows asked, but a handle of " + std::to_string(*lent_) +
                   " rows lives; release it first"};
    }
    handle acquired = fallback_ ? from_fallback() : anchored_rows(stream, rows);
    if (acquired.data() != nullptr) {
      *lent_ = rows;
      acquired.only_ = lent_;
    }
    return acquired;
  }

  [[nodiscard]] handle anchored_rows(stream_type stream, std::int64_t rows) {
    const auto capture = detail::usable_capture<Device>(stream, [this] { return who(); });
    if (rows == 0 && tail_rows_of(0) == 0) [[unlikely]] {
      return handle{{}, nullptr, 0, options_.row_elements, 0};
    }
    if (rows < 0 || rows > capacity_ || block_ == nullptr) [[unlikely]] {
      if (const Device of = Device::of(stream); of != device_) {
        throw logic_error{who() + ": of device " + std::to_string(device_.ordinal) +
                          ", asked for on a stream of device " + std::to_string(of.ordinal)};
      }
      grow(rows);
    }
    block_->begin_use(stream, capture.id);
    if (capture.state == capture_state::active) {
      block_->pin(capture);
    }
    handle acquired{detail::block_use<Device>{block_, stream, capture.id}, data_end() - rows * options_.row_elements,
                    rows, options_.row_elements, tail_rows_of(rows)};
    acquired.tail_read_only_ = true;
    return acquired;
  }

  /// To whole granules that hold `rows` rows: one at least, so that there is a tail.
  void grow(std::int64_t rows) {
    std::int64_t bytes = 0;
    if (rows < 0 || __builtin_mul_overflow(rows, row_bytes_, &bytes)) {
      throw logic_error{who() + ": cannot hold " + std::to_string(rows) + " rows of " + std::to_string(row_bytes_) +
                        " bytes"};
    }
    std::size_t granules = 0;
    static_cast<void>(
        detail::round_up(std::max<std::size_t>(static_cast<std::size_t>(bytes), 1), resource_->granule(), granules));
    const auto& queue = detail::release_queue<Device>::instance();
    const std::uint64_t given_back = queue.given_back();
    const auto others_gave_back = [&] {
      collect(device_);
      return queue.given_back() != given_back;
    };
    if (!commit(granules) && !(others_gave_back() && commit(granules))) {
      throw out_of_memory{who(), granules, block_ == nullptr ? 0 : block_->bytes(), device_.memory().free};
    }
    capacity_ = static_cast<std::int64_t>(block_->bytes()) / row_bytes_;
  }

  /// False: addresses or memory don't suffice, and nothing changed.
  [[nodiscard]] bool commit(std::size_t bytes) {
    const auto nothing = [](stream_type, void*) {};
    if (block_ != nullptr) {
      return block_->extend(bytes, nothing);
    }
    try {
      block_ = block<Device>::make(*resource_, bytes, options_.alignment, counts_, nothing);
      return true;
    } catch (const out_of_memory&) {
      return false;
    }
  }

  scratch_options options_;
  Device device_;
  std::shared_ptr<byte_counts> counts_;
  std::int64_t row_bytes_;
  bool omits_tails_;
  std::optional<detail::anchored_scratch_resource<Device>> resource_;
  std::optional<tail_padded_allocator<T, Device>> fallback_;
  std::shared_ptr<block<Device>> block_;  // its data is the end of the rows
  std::int64_t capacity_ = 0;
  bool suspended_ = false;
  std::shared_ptr<std::int64_t> lent_;  // the rows of the live handle, which shares it
};

}  // namespace holdfast::HOLDFAST_ABI
