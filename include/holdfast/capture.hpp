// Captures: what a stream records, what the graphs keep, and lanes, through which buffers are shared.
//
//   holdfast::lane decode{holdfast::default_resource(holdfast::cuda_device{0})};
//   auto& q_pad = decode.padded_queries<__nv_bfloat16>({.heads = 16, .padded_heads = 64, .head_dim = 512});
//   ...
//   holdfast::collect(holdfast::cuda_device{0});    // gives back what destroyed graphs have released
//
// Nothing has to be locked or released by hand: what is acquired while a stream captures is owned by that graph.
// Not here: graphs and captures themselves; use CUDA's.
#pragma once

#include <holdfast/block.hpp>
#include <holdfast/detail/capture_arena.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <typeindex>
#include <typeinfo>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

/// Gives blocks whose last owner (buffer, handle or graph) is gone back to their resources, in stream order. Buffers do
/// this too whenever they allocate, retire or are destroyed. Thread safe; may be called during a capture. Call it until
/// counts(device).pending_bytes() is 0 before you destroy a stream that captured while a buffer was destroyed.
/// \return bytes of `device` given back by this call.
template <device Device>
std::size_t collect(Device device) noexcept {
  return detail::release_queue<Device>::instance().drain_all(device);
}

/// What this library keeps on `device`, in bytes: pinned_bytes(), retired_bytes(), pending_bytes(), and failures().
template <device Device>
[[nodiscard]] const byte_counts& counts(Device device) {
  return detail::release_queue<Device>::instance().total(device);
}

namespace detail {

/// What `stream` captures; an implicit or invalidated capture is an error of `who()`'s.
template <device Device, class Who>
[[nodiscard]] capture_status<typename Device::graph_type> usable_capture(typename Device::stream_type stream,
                                                                         Who&& who) {
  const auto capture = Device::capturing(stream);
  if (capture.state > capture_state::active) [[unlikely]] {
    resource_rules::refuse_capture(who(), capture.state);
  }
  return capture;
}

/// What `stream` captures owns `owned` from now on. False: it captures nothing, or there is nothing to own.
template <device Device, class Who>
bool pin(const std::shared_ptr<block<Device>>& owned, typename Device::stream_type stream, Who&& who) {
  const auto capture = usable_capture<Device>(stream, who);
  if (owned == nullptr || capture.state != capture_state::active) {
    return false;
  }
  owned->pin(capture);
  return true;
}

/// Drops a share of a block; if it was the last, gives back what can be given back.
template <device Device>
void drop(std::shared_ptr<block<Device>>& share) noexcept {
  const bool last = share.use_count() == 1;
  share.reset();
  if (last) {
    release_queue<Device>::instance().drain();
  }
}

/// A handle's share of a block, and the use that it stands for. Move-only; releases in its destructor.
template <device Device>
class block_use {
 public:
  using stream_type = typename Device::stream_type;

  block_use() noexcept = default;
  block_use(std::shared_ptr<block<Device>> owned, stream_type stream, std::uint64_t capture) noexcept
      : owned_(std::move(owned)), stream_(stream), capture_(capture) {}
  block_use(block_use&& other) noexcept
      : owned_(std::move(other.owned_)), stream_(other.stream_), capture_(other.capture_) {}
  block_use& operator=(block_use&& other) noexcept {
    block_use taken{std::move(other)};
    std::swap(owned_, taken.owned_);
    std::swap(stream_, taken.stream_);
    std::swap(capture_, taken.capture_);
    return *this;
  }
  ~block_use() { release(); }

  [[nodiscard]] explicit operator bool() const noexcept { return owned_ != nullptr; }

  template <class Who>
  bool pin(stream_type stream, Who&& who) const {
    return detail::pin<Device>(owned_, stream, who);
  }
  void pin(typename Device::graph_type graph) const {
    if (owned_ != nullptr) {
      owned_->pin(graph);
    }
  }

  void release() noexcept {
    if (owned_ != nullptr) {
      owned_->end_use(stream_, capture_);
      if (capture_ != 0) {
        end_use_after_capture();
      }
      drop(owned_);
    }
  }

  template <class Who>
  void release(stream_type stream, Who&& who) {
    if (owned_ != nullptr) {
      const auto capture = usable_capture<Device>(stream, who);
      if (capture.state == capture_state::active) {
        owned_->pin(capture);
      }
      owned_->end_use(stream, capture.id);
      release();
    }
  }

 private:
  /// A handle acquired in a capture may be used eagerly once that has ended.
  void end_use_after_capture() noexcept {
    try {
      if (Device::capturing(stream_).id == capture_) {
        return;
      }
    } catch (...) {  // an unknown state: the eager use is noted down all the same
    }
    owned_->end_use_after_capture(stream_);
  }

  std::shared_ptr<block<Device>> owned_;
  stream_type stream_{};
  std::uint64_t capture_ = 0;
};

/// Drops a buffer's share of its block, if there is one.
template <device Device>
void let_go(std::shared_ptr<block<Device>>& share) noexcept {
  if (share != nullptr) {
    share->let_go();
    drop(share);
  }
}

/// Polls `done`, giving blocks back meanwhile: graphs report their end asynchronously.
template <device Device, class Done>
bool wait_until(Device device, std::chrono::nanoseconds timeout, Done&& done) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    collect(device);
    if (done()) {
      return true;
    }
    if (std::chrono::steady_clock::now() - start >= timeout) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds{50});
  }
}

}  // namespace detail

template <class T, device Device = cuda_device>
class padded_query_buffer;
struct query_shape;
struct buffer_options;
template <class T, device Device = cuda_device>
class tail_padded_allocator;

/// What work that never overlaps in time shares: a resource, one buffer for each shape, however many layers use it, and
/// the arena that scratch acquired in captures comes from.
///
/// Graphs captured over one lane, and eager work in it, must not run at the same time; overlapped micro-batches, draft
/// models and streams that run at once get a lane each. A copy is another handle of the same lane. Look-up is thread
/// safe; the buffers found are externally synchronised.
template <device Device>
class lane {
 public:
  using device_type = Device;

  explicit lane(any_resource<Device> resource) : state_(std::make_shared<state>(std::move(resource))) {}

  /// The lane's buffer of that element type and shape, made on first use with `options`, or with the default ones. The
  /// reference is good for as long as a handle of the lane lives. Needs padded_query_buffer.hpp. Throws what the buffer's
  /// constructor does, and logic_error when it was made with other options.
  template <class T>
  [[nodiscard]] padded_query_buffer<T, Device>& padded_queries(const query_shape& shape);
  template <class T>
  [[nodiscard]] padded_query_buffer<T, Device>& padded_queries(const query_shape& shape, const buffer_options& options);

  /// Makes room for scratch of `bytes` in captures: what all calls that live at once in the largest capture take.
  void reserve_scratch(std::size_t bytes) { state_->arena->reserve(bytes); }
  /// Bytes held for scratch in captures.
  [[nodiscard]] std::size_t scratch_bytes() const noexcept { return state_->arena->bytes(); }

  [[nodiscard]] const any_resource<Device>& resource() const noexcept { return state_->resource; }
  [[nodiscard]] Device device() const noexcept { return state_->resource.device(); }

  friend bool operator==(const lane&, const lane&) noexcept = default;

 private:
  template <class, holdfast::device>
  friend class tail_padded_allocator;

  struct key {
    std::type_index type;
    std::int64_t heads, padded_heads, head_dim;
    friend auto operator<=>(const key&, const key&) = default;
  };

  /// The place of a buffer; with the mutex held.
  [[nodiscard]] std::shared_ptr<void>& buffer_of(const std::type_info& type, std::int64_t heads,
                                                 std::int64_t padded_heads, std::int64_t head_dim) {
    return state_->buffers[key{std::type_index{type}, heads, padded_heads, head_dim}];
  }

  struct state {
    explicit state(any_resource<Device> r)
        : resource(std::move(r)),
          arena(std::make_shared<detail::capture_arena<Device>>(
              resource.persistent(),
              std::make_shared<byte_counts>(detail::release_queue<Device>::instance().total(resource.device())))) {}
    any_resource<Device> resource;
    std::shared_ptr<detail::capture_arena<Device>> arena;  // handles keep it, too
    std::mutex mutex;
    std::map<key, std::shared_ptr<void>> buffers;
  };

  std::shared_ptr<state> state_;
};

// clang-format off
template <class R>
  requires requires { typename R::device_type; }
lane(R) -> lane<typename R::device_type>;
// clang-format on

}  // namespace holdfast::HOLDFAST_ABI
