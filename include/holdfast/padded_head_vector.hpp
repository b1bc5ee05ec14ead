// padded_head_vector: one value per query head (attn_sink, scales), padded with the heads.
//
//   holdfast::padded_head_vector<float> sink{resource, {.heads = 16, .padded_heads = 64, .fill = -INFINITY}};
//   sink.assign(stream, weights);                  // 16 values
//   const auto padded = sink.acquire(stream);
//   flash_mla(..., padded.data(), ...);            // 64 values
//
// The fill is what the consumer finds neutral; the caller knows it. The memory never moves, and stays for as long as any
// graph that recorded it. Not here: vectors that differ by row (they are padded like queries).
#pragma once

#include <holdfast/block.hpp>
#include <holdfast/capture.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>
#include <holdfast/view.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

template <class T>
struct head_vector_shape {
  std::int64_t heads = 0;
  std::int64_t padded_heads = 0;
  T fill{};  ///< of the padding heads; and of the real ones until they are assigned
};

/// The values of a padded_head_vector, shared with it: a move-only handle, whose destructor ends the use of the stream it
/// was acquired on. Any number of streams may read at once.
template <class T, device Device = cuda_device>
class head_values {
 public:
  using stream_type = typename Device::stream_type;
  using graph_type = typename Device::graph_type;

  /// [padded_heads]
  [[nodiscard]] const T* data() const noexcept { return data_; }

  /// As those of query_rows.
  bool pin(stream_type stream) const { return use_.pin(stream, who); }
  void pin(graph_type graph) const { use_.pin(graph); }
  void release() noexcept { use_.release(); }
  void release(stream_type stream) { use_.release(stream, who); }

 private:
  template <class, device>
  friend class padded_head_vector;

  static std::string who() { return "head_values"; }

  head_values(detail::block_use<Device> use, const T* data) noexcept : use_(std::move(use)), data_(data) {}

  detail::block_use<Device> use_;
  const T* data_;
};

template <class T, device Device = cuda_device>
class padded_head_vector {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                "a padded_head_vector's element is a trivially copyable, mutable type");

 public:
  using stream_type = typename Device::stream_type;
  using graph_type = typename Device::graph_type;

  /// Allocates and fills; ready for any stream. Throws logic_error (heads < 1, padded_heads < heads), out_of_memory,
  /// device_error.
  padded_head_vector(any_resource<Device> resource, const head_vector_shape<T>& shape)
      : heads_(shape.heads), padded_heads_(shape.padded_heads) {
    if (shape.heads < 1 || shape.heads > shape.padded_heads ||
        shape.padded_heads > PTRDIFF_MAX / static_cast<std::int64_t>(sizeof(T))) {
      throw logic_error{who() + ": heads >= 1, padded_heads >= heads"};
    }
    const std::vector<T> filled(static_cast<std::size_t>(padded_heads_), shape.fill);
    const std::size_t bytes = filled.size() * sizeof(T);
    auto counts = std::make_shared<byte_counts>(detail::release_queue<Device>::instance().total(resource.device()));
    block_ = block<Device>::make(std::move(resource), bytes, alignment, std::move(counts),
                                 [&](stream_type stream, void* to) { Device::copy(stream, to, filled.data(), bytes); });
  }

  /// A moved-from vector can only be destroyed or assigned to.
  padded_head_vector(padded_head_vector&&) noexcept = default;
  padded_head_vector& operator=(padded_head_vector&& other) noexcept {
    padded_head_vector taken{std::move(other)};
    std::swap(block_, taken.block_);
    std::swap(heads_, taken.heads_);
    std::swap(padded_heads_, taken.padded_heads_);
    return *this;
  }
  ~padded_head_vector() { detail::let_go(block_); }

  /// Copies `heads` values from `values` (host or device memory), after the work queued on `stream` and all eager work of
  /// released handles; waits for it, so that every stream reads the new values from then on. Throws logic_error on a
  /// capturing stream: these are weights, loaded once.
  void assign(stream_type stream, const T* values) {
    if (detail::usable_capture<Device>(stream, [this] { return who(); }).state != capture_state::none) {
      throw logic_error{who() + ": values cannot be assigned on a capturing stream"};
    }
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{block_->device()};
    const stream_type library = block_->device().library_stream();
    typename Device::event produced{Device::of(stream)};
    produced.record(stream);
    block_->begin_use(library, 0);
    Device::wait(library, produced);
    Device::copy(library, block_->data(), values, static_cast<std::size_t>(heads_) * sizeof(T));
    Device::synchronize(library);
  }

  /// The values for work queued on `stream` from now on; what `stream` captures owns them.
  [[nodiscard]] head_values<T, Device> acquire(stream_type stream) {
    const auto capture = detail::usable_capture<Device>(stream, [this] { return who(); });
    if (capture.state == capture_state::active) {
      block_->pin(capture);
    }
    if (Device::thread_bound(stream)) {  // one event stands for those before it, which would pile up
      block_->begin_use(stream, capture.id);
    }
    return {detail::block_use<Device>{block_, stream, capture.id}, static_cast<const T*>(block_->data())};
  }

  /// `graph` owns the memory from now on.
  void pin(graph_type graph) const { block_->pin(graph); }

  [[nodiscard]] std::int64_t heads() const noexcept { return heads_; }
  [[nodiscard]] std::int64_t padded_heads() const noexcept { return padded_heads_; }

 private:
  static constexpr std::size_t alignment = 256;  // as cudaMalloc's; consumers load 16 bytes at a time

  [[nodiscard]] std::string who() const {
    return "padded_head_vector [" + std::to_string(heads_) + " of " + std::to_string(padded_heads_) + " heads]";
  }

  std::shared_ptr<block<Device>> block_;
  std::int64_t heads_;
  std::int64_t padded_heads_;
};

}  // namespace holdfast::HOLDFAST_ABI
