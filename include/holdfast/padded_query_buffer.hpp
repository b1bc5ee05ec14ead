// padded_query_buffer: grow-only [rows, padded_heads, head_dim] query memory whose padding heads are zero, once.
//
//   holdfast::padded_query_buffer<__nv_bfloat16> q_pad{resource, {.heads = 16, .padded_heads = 64, .head_dim = 512}};
//   q_pad.reserve(2048);                                      // before the KV pool takes the rest
//   auto q = q_pad.acquire(stream, rows);                     // capturing or not
//   my_fused_rope<<<...>>>(..., q.heads_view());              // writes the real heads
//   flash_mla(q.data(), rows, 64, ...);                       // reads all of them
//
// What it promises: the memory a graph recorded stays mapped at its address until the graph is gone, whatever happens to
// the buffer; padding is zero from the start and never written again; within capacity `acquire` allocates nothing,
// launches nothing and takes no lock. Slices start at row 0.
//
// What it is not: a queue of slices. All handles alias the same rows; each layer reuses them in stream order. Two graphs
// (or a graph and eager work) that use one buffer at the same time are the caller's to order: use one lane each. Streams
// outlive the buffers and handles used on them eagerly (declare them first); graphs need not.
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
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

/// Heads are padded to the smallest of `supported` that holds them (ascending; FlashMLA takes exactly 64 or 128 query
/// heads). Throws logic_error when there is none, or when `heads` < 1.
[[nodiscard]] constexpr std::int64_t padded_head_count(std::int64_t heads,
                                                       std::initializer_list<std::int64_t> supported = {64, 128}) {
  if (heads >= 1) {
    for (const std::int64_t count : supported) {
      if (heads <= count) {
        return count;
      }
    }
  }
  std::string counts;
  for (const std::int64_t count : supported) {
    counts += (counts.empty() ? "" : ", ") + std::to_string(count);
  }
  throw logic_error{"padded_head_count: " + std::to_string(heads) + " heads cannot be padded to one of {" + counts +
                    "}"};
}

/// What a query buffer holds in each row. `heads` real ones come first, then padding up to `padded_heads`; `head_dim`
/// elements each, a multiple of 8. Fixed for the life of a buffer: the padding's zeros depend on it.
struct query_shape {
  std::int64_t heads = 0;
  std::int64_t padded_heads = 0;
  std::int64_t head_dim = 0;

  friend bool operator==(const query_shape&, const query_shape&) = default;
};

/// What happens when more rows are asked for than there are, and memory cannot grow where it is.
enum class growth : unsigned char {
  retire,  ///< a new block; graphs and handles keep the old one
  refuse   ///< the same, but captured_growth is thrown while a live graph holds the block
};

struct buffer_options {
  std::string name = "padded_query_buffer";  ///< for errors
  holdfast::growth growth = holdfast::growth::retire;
  bool strict = false;          ///< only reserve() allocates; acquire() beyond it is a logic_error
  std::size_t alignment = 256;  ///< of row 0, bytes, a power of two

  friend bool operator==(const buffer_options&, const buffer_options&) = default;
};

/// Rows of a padded query buffer, shared with it: a move-only handle. The memory stays as long as the handle lives (and
/// longer: as long as any graph that recorded it). Its destructor ends the use of the stream it was acquired on.
template <class T, device Device = cuda_device>
class query_rows {
 public:
  using stream_type = typename Device::stream_type;
  using graph_type = typename Device::graph_type;

  query_rows() noexcept = default;
  query_rows(query_rows&& other) noexcept
      : use_(std::move(other.use_)),
        data_(std::exchange(other.data_, nullptr)),
        shape_(other.shape_),
        rows_(std::exchange(other.rows_, 0)) {}
  query_rows& operator=(query_rows&& other) noexcept {
    query_rows taken{std::move(other)};
    use_ = std::move(taken.use_);
    data_ = taken.data_;
    shape_ = taken.shape_;
    rows_ = taken.rows_;
    return *this;
  }
  ~query_rows() = default;

  /// [rows, padded_heads, head_dim], packed, for consumers. Null when there are no rows.
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] holdfast::view<const T, 3> view() const noexcept {
    return holdfast::view<const T, 3>{data_, extents<3>{rows_, shape_.padded_heads, shape_.head_dim}};
  }

  /// [rows, heads, head_dim], strided, for producers: the real heads alone. Throws logic_error for borrowed rows, which
  /// are somebody else's and already there.
  [[nodiscard]] strided_view<T, 3> heads_view() const {
    if (borrowed()) [[unlikely]] {
      throw logic_error{"query_rows: borrowed rows are read only"};
    }
    return make_strided_view<T, 3>(const_cast<T*>(data_), {rows_, shape_.heads, shape_.head_dim},
                                   {shape_.padded_heads * shape_.head_dim, shape_.head_dim, 1});
  }

  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] const query_shape& shape() const noexcept { return shape_; }

  /// Rows that pad_queries found packed already: a view of its input, which must outlive the use; pins nothing.
  [[nodiscard]] bool borrowed() const noexcept { return data_ != nullptr && !use_; }

  /// What `stream` captures owns the memory from now on; for handles acquired before the capture began, or on another
  /// stream. False: `stream` is not capturing, and nothing was done. Thread safe. Later acquires in the same capture know
  /// of work captured with it only through release(stream).
  bool pin(stream_type stream) const { return use_.pin(stream, who); }

  /// `graph` owns the memory from now on. Thread safe.
  void pin(graph_type graph) const { use_.pin(graph); }

  /// Ends the use, as the destructor does. The handle is empty then. On a per-thread default stream, it is the thread that
  /// used it which releases: before anybody acquires elsewhere, who would not wait for its work else. If its stream captures
  /// by then, those are yours to order; and the memory goes back by a later call of that thread's (collect, say), or never,
  /// if it ends first.
  void release() noexcept {
    use_.release();
    data_ = nullptr;
    rows_ = 0;
  }

  /// Ends the use on `stream`, where the last work that uses it was queued, if that is not where it was acquired.
  void release(stream_type stream) {
    use_.release(stream, who);
    release();
  }

 private:
  template <class, device>
  friend class padded_query_buffer;

  static std::string who() { return "query_rows"; }

  query_rows(detail::block_use<Device> use, const T* data, const query_shape& shape, std::int64_t rows) noexcept
      : use_(std::move(use)), data_(data), shape_(shape), rows_(rows) {}

  detail::block_use<Device> use_;
  const T* data_ = nullptr;
  query_shape shape_;
  std::int64_t rows_ = 0;
};

template <class T, device Device>
class padded_query_buffer {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                "a padded_query_buffer's element is a trivially copyable, mutable type whose zero is all zero bytes");

 public:
  using element_type = T;
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  using graph_type = typename Device::graph_type;
  using handle = query_rows<T, Device>;

  /// Allocates nothing yet. Throws logic_error: heads < 1, padded_heads < heads, head_dim < 1 or no multiple of 8, a row of
  /// more than 2^63 - 1 bytes, an alignment that is no power of two.
  padded_query_buffer(any_resource<Device> resource, const query_shape& shape, buffer_options options = {})
      : resource_(resource.persistent()),
        shape_(shape),
        options_(std::move(options)),
        counts_(std::make_shared<byte_counts>(detail::release_queue<Device>::instance().total(resource_.device()))) {
    if (shape.heads < 1 || shape.padded_heads < shape.heads || shape.head_dim < 1 || shape.head_dim % 8 != 0) {
      throw logic_error{who() + ": heads >= 1, padded_heads >= heads, head_dim a positive multiple of 8"};
    }
    if (!std::has_single_bit(options_.alignment)) {
      throw logic_error{who() + ": an alignment is a power of two, not " + std::to_string(options_.alignment)};
    }
    std::int64_t row_bytes = 0;
    if (__builtin_mul_overflow(shape.padded_heads, shape.head_dim, &row_bytes) ||
        __builtin_mul_overflow(row_bytes, static_cast<std::int64_t>(sizeof(T)), &row_bytes)) {
      throw logic_error{who() + ": a row passes 2^63 - 1 bytes"};
    }
    row_bytes_ = row_bytes;
  }

  /// A moved-from buffer can only be destroyed or assigned to.
  padded_query_buffer(padded_query_buffer&&) noexcept = default;
  padded_query_buffer& operator=(padded_query_buffer&& other) noexcept {
    if (this != &other) {
      std::destroy_at(this);
      std::construct_at(this, std::move(other));
    }
    return *this;
  }

  /// Handles and graphs keep the memory for as long as they need it.
  ~padded_query_buffer() { detail::let_go(block_); }

  /// Rows [0, rows) for work queued on `stream` from now on; they stay where they are for as long as that work, and every
  /// graph that records it, may run. Beyond the capacity it grows first (see growth), which allocates and waits for the
  /// library's own stream; within it nothing of the kind happens.
  ///
  /// Stream order: work queued by earlier handles on other streams is waited for, when both are eager or both in one
  /// capture. Throws logic_error (rows < 0, too many bytes, strict, an implicit or invalidated capture, a stream of
  /// another device, contents_lost), suspended, captured_growth, out_of_memory, device_error; nothing changed then.
  [[nodiscard]] handle acquire(stream_type stream, std::int64_t rows) {
    const auto capture = detail::usable_capture<Device>(stream, [this] { return who(); });
    if (rows < 0 || rows > capacity_ || state_ != contents::good) [[unlikely]] {
      make_ready(stream, rows);
    }
    if (rows == 0) [[unlikely]] {
      return handle{{}, nullptr, shape_, 0};
    }
    block_->begin_use(stream, capture.id);
    if (capture.state == capture_state::active) {
      block_->pin(capture);
    }
    return handle{{block_, stream, capture.id}, static_cast<const T*>(block_->data()), shape_, rows};
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
    refuse_suspended("reserve");
    if (rows < 0 || rows > capacity_) {
      grow(rows, rows);
    }
  }

  /// Zeroes all padding again on `stream`, that of blocks which only graphs still hold included: after somebody else's
  /// sleep mode dropped the contents under kept addresses. Graphs may replay once that is done. Real heads are untouched.
  /// Work of handles that still hold memory which growth replaced is yours to order before it.
  /// Throws logic_error on a capturing stream.
  void restore_padding(stream_type stream) {
    if (const auto capture = Device::capturing(stream); capture.state != capture_state::none) {
      throw logic_error{who() + ": padding cannot be restored on a capturing stream"};
    }
    refuse_suspended("restore_padding");
    for (const auto& alive : blocks()) {
      restore(stream, *alive);
    }
    state_ = contents::good;
  }

  /// Says that the contents, and so the padding's zeros, are gone: acquire throws logic_error until restore_padding.
  void contents_lost() noexcept {
    if (block_ != nullptr && state_ == contents::good) {
      state_ = contents::lost;
    }
  }

  /// Gives all the buffer's physical memory back to the device, that of blocks which only graphs still hold included;
  /// addresses stay, and so may the graphs. Eager work of released handles is waited for. Until resume(), acquire and
  /// reserve throw `suspended`. Suspending twice is suspending once. Throws logic_error, and nothing changed, where the
  /// resource cannot (vmm_resource can), or where a stream that used the buffer is capturing; device_error.
  void suspend(quiescent_t) {
    if (!resource_.suspendable()) {
      throw logic_error{who() + ": " + resource_.name() + " cannot give memory back under kept addresses"};
    }
    const auto all = blocks();
    for (const auto& alive : all) {
      alive->prepare_to_suspend();
    }
    state_ = contents::suspended;  // even when what follows fails: it can be tried again, and resume makes all whole
    for (const auto& alive : all) {
      alive->suspend();
    }
  }

  /// Fresh memory at the same addresses, padding zeroed, real heads unspecified; everything is ready for any stream, and
  /// graphs may replay, when this returns. No stream may be capturing over the buffer. Does nothing unless suspended.
  /// Throws out_of_memory, device_error: the buffer is suspended then, and resume may be tried again.
  void resume() {
    if (state_ == contents::suspended) {
      for (const auto& alive : blocks()) {
        alive->resume(zero_padding(0, rows_of(*alive)));
      }
      state_ = contents::good;
    }
  }

  [[nodiscard]] bool suspended() const noexcept { return state_ == contents::suspended; }

  /// What `stream` captures owns the buffer's memory from now on; for rows acquired before the capture began. False:
  /// `stream` is not capturing, or there is no memory yet; nothing was done.
  bool pin(stream_type stream) const {
    return detail::pin<Device>(block_, stream, [this] { return who(); });
  }
  /// `graph` owns the buffer's memory from now on.
  void pin(graph_type graph) const {
    if (block_ != nullptr) {
      block_->pin(graph);
    }
  }

  /// Rows that acquire gives without growing.
  [[nodiscard]] std::int64_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] const query_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] const buffer_options& options() const noexcept { return options_; }
  [[nodiscard]] const any_resource<Device>& resource() const noexcept { return resource_; }
  /// Row 0, or null when nothing is allocated yet.
  [[nodiscard]] const T* data() const noexcept {
    return block_ == nullptr ? nullptr : static_cast<const T*>(block_->data());
  }
  /// Changes exactly when data() may have.
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }

  /// Bytes of this buffer's memory that live graphs own; that growth replaced and handles or graphs keep; that have no
  /// owner any more and are not yet back in the resource. They outlive the buffer: counts(device) has the device's.
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept { return counts_->pinned_bytes(); }
  [[nodiscard]] std::uint64_t retired_bytes() const noexcept { return counts_->retired_bytes(); }
  [[nodiscard]] std::uint64_t pending_bytes() const noexcept { return counts_->pending_bytes(); }

  /// Waits until no live graph owns any of the buffer's memory. False: not within `timeout`.
  bool wait_unpinned(std::chrono::nanoseconds timeout) const {
    return detail::wait_until(resource_.device(), timeout, [this] { return pinned_bytes() == 0; });
  }

  /// Rows of `input` as a handle, without a copy, for producers that find nothing to pad; not pinned. Empty when `input`
  /// is null, or not aligned as the buffer's own rows are.
  [[nodiscard]] std::optional<handle> borrow(const T* input, std::int64_t rows) const {
    if (input == nullptr || reinterpret_cast<std::uintptr_t>(input) % options_.alignment != 0) {
      return std::nullopt;
    }
    return handle{{}, input, shape_, rows};
  }

 private:
  [[nodiscard]] std::string who() const {
    return options_.name + " [" + std::to_string(capacity_) + " rows, " + std::to_string(shape_.heads) + " of " +
           std::to_string(shape_.padded_heads) + " heads, " + std::to_string(shape_.head_dim) + "]";
  }

  /// The slow half of acquire.
  void make_ready(stream_type stream, std::int64_t rows) {
    if (const Device of = Device::of(stream); of != resource_.device()) {
      throw logic_error{who() + ": of device " + std::to_string(resource_.device().ordinal) +
                        ", asked for on a stream of device " + std::to_string(of.ordinal)};
    }
    refuse_suspended(std::to_string(rows) + " rows asked");
    if (state_ == contents::lost) {
      throw logic_error{who() + ": its contents were lost; call restore_padding first"};
    }
    if (options_.strict && rows > capacity_) {
      throw logic_error{who() + ": " + std::to_string(rows) + " rows asked of a strict buffer; reserve them first"};
    }
    const std::int64_t doubled = capacity_ <= std::numeric_limits<std::int64_t>::max() / 2 ? 2 * capacity_ : 0;
    grow(rows, std::max(rows, doubled));
  }

  /// To `wanted` rows, or to `rows` when memory is short.
  void grow(std::int64_t rows, std::int64_t wanted) {
    std::int64_t bytes = 0;
    if (rows < 0 || __builtin_mul_overflow(rows, row_bytes_, &bytes)) {
      throw logic_error{who() + ": cannot hold " + std::to_string(rows) + " rows of " + std::to_string(row_bytes_) +
                        " bytes"};
    }
    if (block_ != nullptr && block_->extend(static_cast<std::size_t>(bytes), zero_padding(capacity_, rows))) {
      capacity_ = rows;
      return;
    }
    if (block_ != nullptr && options_.growth == growth::refuse && block_->pinned()) {
      throw captured_growth{who() + ": " + std::to_string(rows) +
                            " rows asked, but graphs hold the memory; reserve more "
                            "before capturing, or destroy the graphs and call wait_unpinned"};
    }
    std::erase_if(retired_, [](const auto& retired) { return retired.expired(); });
    retired_.reserve(retired_.size() + 1);
    std::shared_ptr<block<Device>> grown;
    if (wanted > rows && !__builtin_mul_overflow(wanted, row_bytes_, &bytes)) {
      try {
        grown = make_block(wanted);
      } catch (const out_of_memory&) {
      }
    }
    const std::int64_t capacity = grown != nullptr ? wanted : rows;
    if (grown == nullptr) {
      grown = make_block(rows);
    }
    capacity_ = capacity;
    ++generation_;
    std::swap(block_, grown);
    if (grown != nullptr) {
      grown->retire();
      retired_.push_back(grown);
      detail::drop(grown);
    }
  }

  [[nodiscard]] std::shared_ptr<block<Device>> make_block(std::int64_t rows) const {
    return block<Device>::make(resource_, static_cast<std::size_t>(rows * row_bytes_), options_.alignment, counts_,
                               zero_padding(0, rows));
  }

  /// Zeroes the padding heads of rows [first, last) of a block; the real heads are nobody's business.
  [[nodiscard]] auto zero_padding(std::int64_t first, std::int64_t last) const {
    const auto head_bytes = static_cast<std::size_t>(shape_.head_dim) * sizeof(T);
    const auto real = static_cast<std::size_t>(shape_.heads) * head_bytes;
    const auto pitch = static_cast<std::size_t>(row_bytes_);
    return [=](stream_type stream, void* data) {
      std::byte* const padding = static_cast<std::byte*>(data) + static_cast<std::size_t>(first) * pitch + real;
      Device::fill_rows(stream, padding, pitch, std::byte{0}, pitch - real, static_cast<std::size_t>(last - first));
    };
  }

  void restore(stream_type stream, block<Device>& rows) {
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope device{resource_.device()};
    rows.begin_use(stream, 0);
    zero_padding(0, rows_of(rows))(stream, rows.data());
    rows.end_use(stream, 0);
  }

  void refuse_suspended(const std::string& what) const {
    if (state_ == contents::suspended) {
      throw holdfast::suspended{who() + ": " + what + ", but its memory was given back; call resume first"};
    }
  }

  [[nodiscard]] std::int64_t rows_of(const block<Device>& rows) const noexcept {
    return static_cast<std::int64_t>(rows.bytes()) / row_bytes_;
  }

  /// Its own, and those that it left to handles and graphs.
  [[nodiscard]] std::vector<std::shared_ptr<block<Device>>> blocks() const {
    std::vector<std::shared_ptr<block<Device>>> all;
    all.reserve(retired_.size() + 1);
    for (const std::weak_ptr<block<Device>>& retired : retired_) {
      if (auto alive = retired.lock()) {
        all.push_back(std::move(alive));
      }
    }
    if (block_ != nullptr) {
      all.push_back(block_);
    }
    return all;
  }

  enum class contents : unsigned char { good, lost, suspended };

  any_resource<Device> resource_;
  query_shape shape_;
  buffer_options options_;
  std::shared_ptr<byte_counts> counts_;
  std::int64_t row_bytes_ = 0;

  std::shared_ptr<block<Device>> block_;
  std::int64_t capacity_ = 0;
  std::uint64_t generation_ = 0;
  contents state_ = contents::good;
  std::vector<std::weak_ptr<block<Device>>> retired_;
};

template <device Device>
template <class T>
padded_query_buffer<T, Device>& lane<Device>::padded_queries(const query_shape& shape) {
  using buffer = padded_query_buffer<T, Device>;
  const std::lock_guard lock{state_->mutex};
  std::shared_ptr<void>& found = buffer_of(typeid(T), shape.heads, shape.padded_heads, shape.head_dim);
  if (found == nullptr) {
    found = std::make_shared<buffer>(state_->resource, shape);
  }
  return *static_cast<buffer*>(found.get());
}

template <device Device>
template <class T>
padded_query_buffer<T, Device>& lane<Device>::padded_queries(const query_shape& shape, const buffer_options& options) {
  using buffer = padded_query_buffer<T, Device>;
  const std::lock_guard lock{state_->mutex};
  std::shared_ptr<void>& found = buffer_of(typeid(T), shape.heads, shape.padded_heads, shape.head_dim);
  if (found == nullptr) {
    found = std::make_shared<buffer>(state_->resource, shape, options);
  }
  buffer& queries = *static_cast<buffer*>(found.get());
  if (queries.options() != options) {
    throw logic_error{"lane: the buffer '" + queries.options().name + "' was made with other options"};
  }
  return queries;
}

}  // namespace holdfast::HOLDFAST_ABI
