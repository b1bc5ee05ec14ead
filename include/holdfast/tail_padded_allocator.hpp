// tail_padded_allocator: scratch for a call, with a tail behind it that consumers may read, and find zero.
//
//   holdfast::tail_padded_allocator<__nv_fp8_e4m3> kv{decode, {.row_elements = 512,
//                                                              .over_read = holdfast::over_read::rows_beyond(128)}};
//   auto rows = kv.acquire(stream, batch * topk);             // [rows, 512]; 128 zero rows behind them
//   my_dequantise<<<...>>>(..., rows.data());                 // writes the rows
//   sparse_fmha(rows.data(), ...);                            // may read 128 rows too far
//
// Some kernels read past their input: a TMA descriptor with as many rows as an int holds, a prefetch of whole tiles. What
// lies there is whatever the allocator put there, or nothing (error 700). How far is a property of the consumer, so it is
// said to the allocator, and not derived from a tensor's shape.
//
// Eager scratch comes from the resource, in the order of its stream, and goes back when its handle is released: one
// resource call, and a memset of the tail. Scratch acquired in a capture comes from the lane's arena: the graphs of a lane
// share it, never run at the same time, and each writes its own tail (one memset node). gather_rows writes the tail in its
// own launch, for nothing.
//
// Not here: scratch that stays resident and costs no memset (anchored_scratch), memory that must survive between calls.
#pragma once

#include <holdfast/block.hpp>
#include <holdfast/capture.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>
#include <holdfast/view.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

namespace holdfast::inline HOLDFAST_ABI {

/// How far a consumer reads past the last row it was given.
class over_read {
 public:
  constexpr over_read() noexcept = default;

  /// `rows` rows further, always (TensorRT-LLM's DeepSeek-V4 sparse attention: a KV tile, 128).
  [[nodiscard]] static constexpr over_read rows_beyond(std::int64_t rows) noexcept { return {kind::beyond, rows}; }
  /// To the end of the last tile of `rows` rows.
  [[nodiscard]] static constexpr over_read to_tile_end(std::int64_t rows) noexcept { return {kind::tile, rows}; }
  /// As if there were at least `rows` rows (TensorRT-LLM's DSA: topk).
  [[nodiscard]] static constexpr over_read at_least_rows(std::int64_t rows) noexcept { return {kind::least, rows}; }

  /// Rows that may be read behind `rows` rows, which is not negative. They count for no rows, too: a consumer may read
  /// its tail without having any.
  [[nodiscard]] constexpr std::int64_t tail_rows(std::int64_t rows) const noexcept {
    switch (kind_) {
      case kind::beyond: return rows_;
      case kind::tile: return (rows_ - rows % rows_) % rows_;
      default: return rows < rows_ ? rows_ - rows : 0;
    }
  }

  /// Whether it makes sense: tiles have at least one row, nothing is negative.
  [[nodiscard]] constexpr bool valid() const noexcept { return rows_ >= (kind_ == kind::tile ? 1 : 0); }

  friend constexpr bool operator==(const over_read&, const over_read&) = default;

 private:
  enum class kind : unsigned char { beyond, tile, least };
  constexpr over_read(kind k, std::int64_t rows) noexcept : kind_(k), rows_(rows) {}
  kind kind_ = kind::beyond;
  std::int64_t rows_ = 0;
};

enum class tail_fill : unsigned char {
  zero,        ///< the tail reads as zeros
  mapped_only  ///< the tail can be read, and holds anything
};

struct scratch_options {
  std::int64_t row_elements = 0;
  holdfast::over_read over_read{};
  tail_fill fill = tail_fill::zero;
  std::size_t alignment = 256;    ///< of row 0, bytes, a power of two up to 1024
  std::size_t row_alignment = 1;  ///< that every row must keep, bytes: TMA wants row pitches of 16
  std::string name = "scratch";   ///< for errors
};

namespace detail {

/// Bytes of a row. Throws logic_error for options that make no sense.
template <class T>
[[nodiscard]] std::int64_t scratch_row_bytes(const scratch_options& options) {
  std::int64_t row_bytes = 0;
  if (options.row_elements < 1 || !options.over_read.valid() ||
      __builtin_mul_overflow(options.row_elements, static_cast<std::int64_t>(sizeof(T)), &row_bytes)) {
    throw logic_error{options.name + ": row_elements >= 1, and over_read counts rows from 0 (tiles from 1), not " +
                      std::to_string(options.row_elements) + " elements"};
  }
  if (!std::has_single_bit(options.alignment) || options.alignment > 1024 || options.row_alignment < 1 ||
      static_cast<std::size_t>(row_bytes) % options.row_alignment != 0 ||
      options.alignment % options.row_alignment != 0) {
    throw logic_error{options.name + ": rows of " + std::to_string(row_bytes) + " bytes at an alignment of " +
                      std::to_string(options.alignment) +
                      " (a power of two up to 1024) do not keep a row_alignment of " +
                      std::to_string(options.row_alignment)};
  }
  return row_bytes;
}

/// A handle's piece of a lane's arena, acquired in a capture; as block_use for a block of its own.
template <device Device>
class arena_use {
 public:
  using stream_type = typename Device::stream_type;
  using arena = capture_arena<Device>;

  arena_use(std::shared_ptr<arena> from, const typename arena::piece& held, stream_type stream,
            std::uint64_t capture) noexcept
      : arena_(std::move(from)), held_(held), stream_(stream), capture_(capture) {}
  arena_use(arena_use&&) noexcept = default;
  arena_use& operator=(arena_use&& other) noexcept {
    arena_use taken{std::move(other)};
    std::swap(arena_, taken.arena_);
    std::swap(held_, taken.held_);
    std::swap(stream_, taken.stream_);
    std::swap(capture_, taken.capture_);
    return *this;
  }
  ~arena_use() { release(); }

  template <class Who>
  bool pin(stream_type stream, Who&& who) const {
    return detail::pin<Device>(arena_ == nullptr ? nullptr : held_.in->shared_from_this(), stream, who);
  }
  void pin(typename Device::graph_type graph) const {
    if (arena_ != nullptr) {
      held_.in->pin(graph);
    }
  }

  void release() noexcept { release_on(stream_); }

  template <class Who>
  void release(stream_type stream, Who&& who) {
    if (arena_ != nullptr) {
      const auto capture = usable_capture<Device>(stream, who);
      if (capture.state == capture_state::active) {
        held_.in->pin(capture);
      }
      release_on(stream);
    }
  }

 private:
  void release_on(stream_type stream) noexcept {
    if (arena_ != nullptr) {
      arena_->release(held_, stream, stream_, capture_);
      arena_.reset();
    }
  }

  std::shared_ptr<arena> arena_;
  typename arena::piece held_;
  stream_type stream_;
  std::uint64_t capture_;
};

}  // namespace detail

/// Rows of scratch with their tail: a move-only handle. Its destructor ends the use of the stream it was acquired on.
template <class T, device Device = cuda_device>
class scratch {
 public:
  using stream_type = typename Device::stream_type;
  using graph_type = typename Device::graph_type;

  scratch() noexcept = default;
  scratch(scratch&& other) noexcept { swap(other); }
  scratch& operator=(scratch&& other) noexcept {
    scratch taken{std::move(other)};
    swap(taken);
    return *this;
  }
  ~scratch() { release(); }

  /// [rows, row_elements], packed; the tail lies behind. Never null for an acquired handle that has rows or a tail.
  [[nodiscard]] T* data() const noexcept { return data_; }
  [[nodiscard]] holdfast::view<T, 2> view() const noexcept {
    return holdfast::view<T, 2>{data_, extents<2>{rows_, row_elements_}};
  }
  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::int64_t row_elements() const noexcept { return row_elements_; }
  /// Rows behind the last one that may be read; none where the resource omits tails.
  [[nodiscard]] std::int64_t tail_rows() const noexcept { return tail_rows_; }
  /// Whether those rows can only be read, and are zero: anchored_scratch's.
  [[nodiscard]] bool tail_read_only() const noexcept { return tail_read_only_; }

  /// What `stream` captures owns the memory from now on, for scratch acquired eagerly. False: `stream` is not capturing.
  /// A tail_padded_allocator's goes back on the stream it was acquired on, which must outlive the graph, and the memory's
  /// return (pinned_bytes() and pending_bytes() of the allocator are 0 then).
  bool pin(stream_type stream) const {
    return std::visit([&](const auto& use) { return use.pin(stream, who); }, use_);
  }
  /// `graph` owns the memory from now on.
  void pin(graph_type graph) const {
    std::visit([&](const auto& use) { use.pin(graph); }, use_);
  }

  /// Ends the use, as the destructor does. The handle is empty then. On a per-thread default stream as query_rows::release.
  void release() noexcept {
    std::visit([](auto& use) { use.release(); }, use_);
    forget();
  }

  /// Ends the use on `stream`, where the last work that uses it was queued, if that is not where it was acquired. If
  /// `stream` captures, its graph owns the memory.
  void release(stream_type stream) {
    std::visit([&](auto& use) { use.release(stream, who); }, use_);
    forget();
  }

 private:
  template <class, device>
  friend class tail_padded_allocator;
  template <class, device>
  friend class anchored_scratch;
  using memory_use = std::variant<detail::block_use<Device>, detail::arena_use<Device>>;

  scratch(memory_use use, void* data, std::int64_t rows, std::int64_t row_elements, std::int64_t tail_rows) noexcept
      : use_(std::move(use)),
        data_(static_cast<T*>(data)),
        rows_(rows),
        row_elements_(row_elements),
        tail_rows_(tail_rows) {}

  static std::string who() { return "scratch"; }

  void swap(scratch& other) noexcept {
    std::swap(use_, other.use_);
    std::swap(only_, other.only_);
    std::swap(data_, other.data_);
    std::swap(rows_, other.rows_);
    std::swap(row_elements_, other.row_elements_);
    std::swap(tail_rows_, other.tail_rows_);
    std::swap(tail_read_only_, other.tail_read_only_);
  }

  void forget() noexcept {
    only_.reset();
    data_ = nullptr;
    rows_ = 0;
    tail_rows_ = 0;
  }

  memory_use use_;
  std::shared_ptr<const void> only_;  // shared with an anchored_scratch, which lends to one handle at a time
  T* data_ = nullptr;
  std::int64_t rows_ = 0;
  std::int64_t row_elements_ = 0;
  std::int64_t tail_rows_ = 0;
  bool tail_read_only_ = false;
};

template <class T, device Device>
class tail_padded_allocator {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                "a tail_padded_allocator's element is a trivially copyable, mutable type whose zero is all zero bytes");

 public:
  using element_type = T;
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  using handle = scratch<T, Device>;

  /// Allocates nothing yet. Throws logic_error: row_elements < 1, an over_read that makes no sense, an alignment that is no
  /// power of two or above 1024, rows that don't keep row_alignment, a row of more than 2^63 - 1 bytes.
  tail_padded_allocator(lane<Device> from, scratch_options options)
      : lane_(std::move(from)),
        options_(std::move(options)),
        counts_(std::make_shared<byte_counts>(detail::release_queue<Device>::instance().total(lane_.device()))),
        row_bytes_(detail::scratch_row_bytes<T>(options_)),
        omits_tails_(lane_.resource().omits_tails()) {}

  /// With a lane of its own.
  tail_padded_allocator(any_resource<Device> resource, scratch_options options)
      : tail_padded_allocator(lane<Device>{std::move(resource)}, std::move(options)) {}

  /// Scratch of `rows` rows for work queued on `stream` from now on, and its tail, filled in the same order. Throws
  /// logic_error (rows < 0, too many bytes, an implicit or invalidated capture), out_of_memory, device_error; nothing
  /// changed then.
  [[nodiscard]] handle acquire(stream_type stream, std::int64_t rows) {
    handle acquired = acquire_unfilled(stream, rows);
    if (options_.fill == tail_fill::zero && acquired.tail_rows() != 0) {
      const typename Device::relaxed_scope relaxed;
      const typename Device::current_scope current{lane_.device()};
      Device::fill(stream, acquired.data() + rows * options_.row_elements, std::byte{0},
                   static_cast<std::size_t>(acquired.tail_rows() * row_bytes_));
    }
    return acquired;
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

  /// acquire for a producer that writes the tail rows itself, in the launch that writes the others; as gather_rows does.
  [[nodiscard]] handle acquire_unfilled(stream_type stream, std::int64_t rows) {
    const auto capture = detail::usable_capture<Device>(stream, [this] { return who(); });
    const auto [tail_rows, bytes] = extent(rows);
    if (bytes == 0) {
      return handle{{}, nullptr, 0, options_.row_elements, 0};
    }
    if (capture.state == capture_state::active) {
      auto& arena = lane_.state_->arena;
      const auto piece = arena->acquire(stream, capture, bytes, options_.alignment);
      return handle{detail::arena_use<Device>{arena, piece, stream, capture.id},
                    static_cast<std::byte*>(piece.in->data()) + piece.begin, rows, options_.row_elements, tail_rows};
    }
    auto own = block<Device>::make_scratch(lane_.resource(), stream, bytes, options_.alignment, counts_);
    own->let_go();  // no buffer keeps it for others: its handle is all there is
    void* const data = own->data();
    return handle{detail::block_use<Device>{std::move(own), stream, 0}, data, rows, options_.row_elements, tail_rows};
  }

  /// Makes room in the lane's arena for `rows` rows in captures. Call it before an engine measures what memory is left.
  void reserve(std::int64_t rows) { lane_.reserve_scratch(extent(rows).bytes); }

  [[nodiscard]] const scratch_options& options() const noexcept { return options_; }
  [[nodiscard]] Device device() const noexcept { return lane_.device(); }

  /// Bytes of eager scratch that live graphs own (pinned by hand), and that has been released and is not yet back in the
  /// resource. Captured scratch is the lane's.
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept { return counts_->pinned_bytes(); }
  [[nodiscard]] std::uint64_t pending_bytes() const noexcept { return counts_->pending_bytes(); }

 private:
  struct size {
    std::int64_t tail_rows;
    std::size_t bytes;
  };

  [[nodiscard]] std::string who() const {
    return options_.name + " [rows of " + std::to_string(options_.row_elements) + " elements]";
  }

  [[nodiscard]] size extent(std::int64_t rows) const {
    std::int64_t all = 0;
    std::int64_t bytes = 0;
    const std::int64_t tail_rows = rows < 0 || omits_tails_ ? 0 : options_.over_read.tail_rows(rows);
    if (rows < 0 || __builtin_add_overflow(rows, tail_rows, &all) || __builtin_mul_overflow(all, row_bytes_, &bytes)) {
      throw logic_error{who() + ": cannot hold " + std::to_string(rows) + " rows of " + std::to_string(row_bytes_) +
                        " bytes and a tail of " + std::to_string(tail_rows)};
    }
    return {tail_rows, static_cast<std::size_t>(bytes)};
  }

  lane<Device> lane_;
  scratch_options options_;
  std::shared_ptr<byte_counts> counts_;
  std::int64_t row_bytes_;
  bool omits_tails_;
};

}  // namespace holdfast::HOLDFAST_ABI
