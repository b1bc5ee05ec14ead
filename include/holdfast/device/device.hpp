// What a device is: the contract that device/cuda.hpp and device/host.hpp both meet, and all that the layers above
// know of one. A third kind (HIP, say) would be a third header beside them.
//
// A device is a regular value (its ordinal). Static functions act on streams, members on the device. Nothing here ever
// invalidates a stream capture, whoever runs it, as long as it is called under a `relaxed_scope` (calls that are safe
// without one are marked).
//
//   D::stream_type    regular, cheap handle of a stream; does not own it
//   D::graph_type     handle of a graph; does not own it
//   D::node_type      handle of a graph's node
//   D::event          move-only owner of an event; constructed from a device
//   D::relaxed_scope  RAII: this thread's device calls may not invalidate any capture
//   D::current_scope  RAII: makes a device current for this thread and restores the former one
//   D::physical_type  handle of physical memory that can be mapped
//
// Errors: `device_error` with the runtime's code; a pending error of the user's is left alone.
#pragma once

#include <holdfast/version.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

struct cuda_device;
struct host_device;

/// What a stream is doing, as far as captures go.
enum class capture_state : unsigned char {
  none,         ///< work runs eagerly
  active,       ///< work is recorded into a graph
  invalidated,  ///< a capture was broken and not yet ended
  implicit      ///< the legacy stream while a blocking stream captures: using it would break that capture
};

/// `id` is unique in the process for each capture (stream handles are not: they are recycled); `graph` is the graph
/// being built. Both are meaningful only while `state` is active.
template <class Graph>
struct capture_status {
  capture_state state = capture_state::none;
  std::uint64_t id = 0;
  Graph graph{};
};

/// Bytes of device memory.
struct memory_info {
  std::size_t free = 0;
  std::size_t total = 0;
};

/// What a virtual mapping allows.
enum class access : unsigned char { read, read_write };

/// Who else may import physical memory, and as what kind of handle.
enum class sharing : unsigned char { none, file_descriptor, fabric };

/// How physical memory is made. A device that cannot share memory so refuses; compression is only a wish.
struct physical_options {
  holdfast::sharing sharing = holdfast::sharing::none;
  bool compressible = false;

  friend bool operator==(const physical_options&, const physical_options&) = default;
};

// clang-format off
template <class D>
concept device =
    std::regular<D> && std::regular<typename D::stream_type> && std::regular<typename D::graph_type> &&
    std::movable<typename D::event> && std::constructible_from<typename D::event, D> &&
    std::constructible_from<typename D::relaxed_scope> && std::constructible_from<typename D::current_scope, D> &&
    requires(const D d, typename D::stream_type s, typename D::graph_type g, typename D::event e, void* p,
             const void* cp, std::size_t n, typename D::physical_type m,
             const std::vector<typename D::node_type> nodes, const physical_options o) {
      { D::name } -> std::convertible_to<const char*>;
      { d.ordinal } -> std::convertible_to<int>;

      // --- streams ---------------------------------------------------------------------------------------------
      // The device a stream belongs to. Safe anywhere.
      { D::of(s) } -> std::same_as<D>;
      // What the stream is capturing. Safe anywhere, at any time; the one call on the hot path.
      { D::capturing(s) } -> std::same_as<capture_status<typename D::graph_type>>;
      // True when the handle names a different stream in every thread (the per-thread default stream).
      { D::thread_bound(s) } noexcept -> std::same_as<bool>;
      // n bytes at p become `value`. A memset node when the stream captures.
      D::fill(s, p, std::byte{}, n);
      // `rows` runs of `width` bytes, `pitch` bytes from start to start, become `value`. (s, p, pitch, value, width, rows)
      D::fill_rows(s, p, n, std::byte{}, n, n);
      // n bytes from cp to p; either may be host memory.
      D::copy(s, p, cp, n);
      // The host waits for all the stream's work. Never call it on a capturing stream.
      D::synchronize(s);

      // --- events ----------------------------------------------------------------------------------------------
      e.record(s);    // all work queued on s so far (a captured event, when s captures)
      D::wait(s, e);  // work queued on s from now on waits for it (and s joins its capture, when it was captured)
      // Whether what e recorded is done (true when nothing was). Never ask an event that was recorded in a capture.
      { e.ready() } -> std::same_as<bool>;
      e.synchronize();  // the host waits for what was recorded, which was not captured

      // --- graphs ----------------------------------------------------------------------------------------------
      // The graph owns `object` from now on: `destroy(object)` is called exactly once, after the graph, its clones,
      // its executables and their launches in flight are all gone, on a thread that may not call the device.
      // When this throws, the graph owns nothing and destroy(object) has been or will be called. Safe while capturing.
      D::retain(g, p, static_cast<void (*)(void*)>(nullptr));
      // The nodes that work captured next on s would come after; s captures.
      { D::frontier(s) } -> std::same_as<std::vector<typename D::node_type>>;
      // Whether work captured next on s starts only after all of `nodes` are done: there is a path of full dependencies
      // from each. Programmatic ones don't count: they let a node start before its predecessor is done.
      { D::comes_after(s, nodes) } -> std::same_as<bool>;

      // --- the device ------------------------------------------------------------------------------------------
      // The library's own non-blocking stream of this device, made once, never destroyed, never capturing.
      { d.library_stream() } -> std::same_as<typename D::stream_type>;
      { d.memory() } -> std::same_as<memory_info>;

      // --- virtual memory: sizes and offsets are multiples of granularity(). Safe anywhere ------------------------
      { d.has_virtual_memory() } -> std::same_as<bool>;  // if not, nothing below can be used
      { d.granularity(o) } -> std::same_as<std::size_t>;
      // (bytes, alignment: a power of two, or 0): addresses, nothing mapped; throws out_of_memory
      { d.reserve(n, n) } -> std::same_as<void*>;
      d.unreserve(p, n);
      { d.create(n, o) } -> std::same_as<typename D::physical_type>;  // physical memory; throws out_of_memory
      d.destroy(m);                                                   // freed once its last mapping is gone
      d.map(p, n, m);  // the first n bytes of m are at p, for nobody yet; m can be mapped many times
      d.allow(p, n, access::read_write);  // work of device d (the memory's own or a peer) may use what is mapped there
      d.unmap(p, n);
    };
// clang-format on

}  // namespace holdfast::HOLDFAST_ABI
