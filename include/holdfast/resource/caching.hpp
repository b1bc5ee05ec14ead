// A caching allocator over any other resource: allocation and release cost a fraction of a microsecond, on as many threads
// as have a stream of their own.
//
//   holdfast::caching_resource pool{holdfast::malloc_resource{holdfast::cuda_device{0}}};      // or any other
//   void* p = pool.allocate(stream, bytes, 256);      // steady state: no device call but "does this stream capture?"
//   pool.deallocate(stream, p, bytes, 256);           // at once reusable by what is allocated on `stream`
//   pool.release(stream);                             // and by everybody, once its work is done
//   pool.trim();                                      // gives back to the upstream what nobody uses
//
// How. Every stream has a heap of its own, with its own mutex: segments of upstream memory (2 MiB for blocks up to 1 MiB,
// `segment_bytes` or more for larger ones) that are cut into blocks. A freed block is kept as it is for the next request of
// its size; when there is none, all that was freed is merged with its neighbours and the best fit is cut. A request that
// needs a new segment first gives back the smaller segments that it replaces, so one that keeps growing holds little more
// than its largest.
//
// Streams. Memory goes from one stream to another by whole segments, behind an event. Recording one at each release would
// cost more than all the rest (0.3 us), and recording one later would crash in the driver if the stream was destroyed by
// then. So the pool touches a stream in calls that name it, and in no others, and destroying one needs no ceremony:
//
//   A stream may be destroyed as soon as its work is done, or `release(stream)` was the last call that named it.
//
// (Earlier, a new stream of the same handle could be given memory that the old one's work still uses.) What is free on a
// stream is therefore its own until it calls `release`, or memory is short: then, or to trim, the host waits until the
// device has done all work that is queued, which tells the same of every stream without touching any. With the option
// `streams_stay`, idle streams share without being asked, and nothing waits on the host for the lack of an event.
//
// Not here: defragmentation (see vmm), memory that is used on several streams at once (order its release yourself, as
// always), a background thread.
#pragma once

#include <holdfast/detail/process.hpp>
#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

struct caching_options {
  /// Bytes asked from the upstream at a time, at least, for blocks of more than 1 MiB (smaller ones come from segments of
  /// 2 MiB). Less is asked when that is not to be had.
  std::size_t segment_bytes = std::size_t{32} << 20;

  /// Bytes held of the upstream, at most. Beyond, it is as if the device had no more.
  std::size_t max_reserved_bytes = std::numeric_limits<std::size_t>::max();

  /// A promise that no stream is destroyed before the pool that it is used with. Then what is free on an idle stream can
  /// be had by the others without its `release`.
  bool streams_stay = false;

  /// Called with the bytes that could not be had, before out_of_memory is thrown. True: it may have freed something, try
  /// again. It may use the pool, may be called by several threads at once, and what it throws comes out of `allocate`.
  std::function<bool(std::size_t)> on_out_of_memory{};

  /// Called once with the bytes of the blocks that were never given back, when the last handle is gone. May not throw.
  std::function<void(std::size_t)> on_leak{};
};

/// Bytes as the pool rounds them; counts since it was made.
struct caching_statistics {
  std::size_t reserved_bytes = 0;  ///< held of the upstream
  std::size_t used_bytes = 0;      ///< handed out
  std::size_t cached_bytes = 0;    ///< the others
  std::size_t peak_reserved_bytes = 0;
  std::size_t peak_used_bytes = 0;  ///< the sum of each stream's: the peak for one stream, a bound for several
  std::uint64_t allocations = 0;
  std::uint64_t upstream_allocations = 0;
  std::uint64_t upstream_deallocations = 0;
  std::uint64_t cross_stream_reuses = 0;  ///< segments that went from one stream to another
  std::uint64_t errors = 0;               ///< deallocations that were ignored
};

namespace detail {
template <device Device>
class caching_impl;
}

/// Memory of `upstream`, cached. Copies share one pool; two made apart are not equal. Thread safe.
///
/// `allocate` gives memory in the order of its stream: what was freed on it, else a new segment. It waits on the host only
/// where memory is short, or the upstream does. When memory is short (the upstream throws out_of_memory, or the limit is
/// reached), what is cached and ready goes back to the upstream, then what is pending is waited for, then
/// `on_out_of_memory` is asked; out_of_memory is thrown with the bytes asked, reserved, and free on the device. More than
/// the device's memory is refused without giving anything back.
///
/// `deallocate` names the stream of the allocation, or waits on the host for the work of the one it names. A pointer that
/// is not the pool's, was given back before, or has another size, is ignored and counted. What is freed on a handle that
/// means another stream in each thread (the per-thread default stream) costs an event.
///
/// Blocks are aligned to 256 bytes or what is asked, and rounded up to eight sizes for each power of two, or to 128 KiB,
/// whichever is less.
///
/// The last handle waits on the host for the work that used the memory, and gives back what is free. Segments with blocks
/// that were never given back stay as they are, for good, and so does the upstream: see `on_leak`. At the exit of the
/// process nothing is given back.
template <device Device>
class caching_resource : public detail::resource_handle<detail::caching_impl<Device>> {
  using base = detail::resource_handle<detail::caching_impl<Device>>;

 public:
  using stream_type = typename Device::stream_type;

  explicit caching_resource(any_resource<Device> upstream, caching_options options = {})
      : base(std::in_place, std::move(upstream), std::move(options)) {}

  /// Bytes usable in the order of `stream`. Throws `out_of_memory`; `logic_error` for an alignment that is no power of two,
  /// a stream that captures, a forked child, and the exit of the process; `device_error`; what the upstream throws.
  [[nodiscard]] void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    if (void* const p = this->impl().pool().reuse(stream, bytes, alignment)) [[likely]] {
      return p;
    }
    if (!detail::device_usable().load(std::memory_order_relaxed)) {
      throw logic_error{std::string{base::name} +
                        ": devices cannot be used in a forked child, nor while the process exits"};
    }
    return base::allocate(stream, bytes, alignment);
  }

  /// Takes it back, with the figures of its allocation, in the order of `stream`. Null is ignored. On a capturing stream, a
  /// broken precondition that cannot be thrown: the memory stays allocated.
  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (p == nullptr || !detail::device_usable().load(std::memory_order_relaxed)) {
      return;
    }
    try {
      if (this->impl().pool().recycle(stream, p, bytes)) [[likely]] {
        return;
      }
    } catch (...) {  // the runtime is gone or broken, and the memory with it
      return;
    }
    base::deallocate(stream, p, bytes, alignment);
  }

  /// What is free on `stream` may go to other streams, behind the work that is queued on it now, as far as it is whole
  /// segments; the rest is the next stream's of the same handle, which waits for that work. The stream may be destroyed.
  /// Memory in use there should be freed before. For the per-thread default stream: the calling thread's. Throws
  /// `logic_error` on a capturing stream, `device_error`.
  void release(stream_type stream) {
    if (const auto capture = Device::capturing(stream); capture.state != capture_state::none) {
      detail::resource_rules::refuse_capture(base::name, capture.state);
    }
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{this->device()};
    this->impl().pool().release(stream);
  }

  /// Gives wholly free segments back to the upstream until it reserves `keep_bytes` or less, or nothing more is free:
  /// those whose work is done, then the others, in the order of their work. Where that isn't enough, waits on the host
  /// until the device has done all work that is queued. Never touches memory in use. Throws `device_error`.
  void trim(std::size_t keep_bytes = 0) {
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{this->device()};
    this->impl().pool().trim(keep_bytes);
  }

  [[nodiscard]] caching_statistics statistics() const { return this->impl().pool().count(); }

  /// Bytes held of the upstream.
  [[nodiscard]] std::size_t reserved_bytes() const { return this->impl().pool().reserved_bytes(); }

  /// Bytes handed out, as the pool rounds them.
  [[nodiscard]] std::size_t used_bytes() const { return statistics().used_bytes; }

  /// Bytes reserved, and not handed out.
  [[nodiscard]] std::size_t cached_bytes() const { return statistics().cached_bytes; }

  /// Deallocations that were ignored: foreign pointers, double frees, wrong sizes.
  [[nodiscard]] std::uint64_t errors() const { return statistics().errors; }
};

template <class Resource>
caching_resource(Resource, caching_options = {}) -> caching_resource<typename Resource::device_type>;

}  // namespace holdfast::HOLDFAST_ABI

#include <holdfast/detail/caching_pool.hpp>

namespace holdfast::inline HOLDFAST_ABI {
static_assert(memory_resource<caching_resource<cuda_device>>);
static_assert(memory_resource<caching_resource<host_device>>);
}  // namespace holdfast::HOLDFAST_ABI
