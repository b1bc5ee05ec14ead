// The host device: the reference device. It needs no GPU, is deterministic, and keeps the promises of `device.hpp` to
// the letter, so that buffer logic which passes here, under the sanitizers, may be trusted on a real device.
//
//   holdfast::host::stream s;                                       // of device 0, non-blocking
//   s.run([&] { y = 2 * x; });                                      // a "kernel": queued, not yet run
//   s.begin_capture(holdfast::host::capture_mode::thread_local_);
//   holdfast::host_device::fill(s, p, std::byte{0}, bytes);         // a memset node
//   holdfast::host::graph g = s.end_capture();
//   holdfast::host::graph_exec exec = g.instantiate();
//   exec.launch(s);
//   holdfast::host_device::synchronize(s);                          // everything queued so far runs here
//
// What is true here as it is on CUDA, because code depends on it:
//   - Handles of streams are recycled: after a stream is destroyed, the next one made has its handle. Capture ids are not.
//   - A stream that is capturing records. Calls that are unsafe while somebody captures fail with CUDA's codes and
//     invalidate that capture, unless the thread is relaxed (see `unsafe_call`).
//   - Graphs own the objects given to `host_device::retain`, together with their clones, executables, child copies,
//     conditional bodies and launches in flight. `destroy` may not call the device.
//   - Memory is mapped or it isn't: reading past a mapping, or replaying a graph over unmapped memory, is a SIGSEGV.
//
// What differs, on purpose:
//   - Work never runs by itself. It is queued, and runs on the thread that synchronises (a stream, an event, the device):
//     in the order it was enqueued over all streams, or in an order drawn by a `seeded_schedule`. `ready()` runs nothing.
//   - Nothing is staged: a copy reads its source, host memory included, when it runs.
//   - A kernel's exception leaves the synchronising call; the kernel counts as done.
//   - Calling the device from a kernel or from `destroy` is a `logic_error` (destructors are let through).
//
// It is not a simulator of time, bandwidth or memory models, and not a mock of CUDA's API.
#pragma once

#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

namespace host {

class stream_ref;
class graph_ref;
class event;
class physical_ref;

namespace detail {
struct registry;
struct stream_slot;
struct stream_state;
struct graph_state;
struct exec_state;
struct event_state;
struct internals;
}  // namespace detail

/// Whose unsafe calls a capture forbids, and which calls a thread promises to be safe; as CUDA's modes of the same names.
enum class capture_mode : unsigned char {
  global,         ///< forbids unsafe calls to every thread
  thread_local_,  ///< forbids them to the thread that began it
  relaxed         ///< forbids none; may be ended by another thread
};

/// Why a call failed: the `code()` of its `device_error`. The numbers are CUDA's.
enum class status : int {
  invalid_value = 1,
  memory_allocation = 2,
  invalid_handle = 400,
  illegal_state = 401,
  capture_unsupported = 900,   ///< not allowed while somebody captures; that capture is invalidated
  capture_invalidated = 901,   ///< the capture was broken earlier
  capture_merge = 902,         ///< would have joined two captures
  capture_unmatched = 903,     ///< the capture began on another stream
  capture_unjoined = 904,      ///< a forked stream never came back
  capture_isolation = 905,     ///< a capture may not depend on work outside it
  capture_implicit = 906,      ///< the legacy stream would depend on a blocking stream that captures
  captured_event = 907,        ///< the event was recorded in a capture
  capture_wrong_thread = 908,  ///< only a relaxed capture may be ended by another thread
  unknown = 999
};

}  // namespace host

/// The host device number `ordinal` (0 to 7; another one is a `logic_error` when first used). A regular value.
///
/// Static functions act on streams; they throw `logic_error` for a null stream and
/// `device_error{status::invalid_handle}` for a destroyed one, and are thread safe.
struct host_device {
  using stream_type = host::stream_ref;
  using graph_type = host::graph_ref;
  using node_type = std::size_t;
  using event = host::event;
  using physical_type = host::physical_ref;

  static constexpr const char* name = "host";

  int ordinal = 0;

  friend bool operator==(const host_device&, const host_device&) = default;

  /// This thread's calls may not invalidate any capture, for as long as the scope lives.
  class [[nodiscard]] relaxed_scope {
   public:
    relaxed_scope() noexcept;
    relaxed_scope(const relaxed_scope&) = delete;
    relaxed_scope& operator=(const relaxed_scope&) = delete;
    ~relaxed_scope();

   private:
    host::capture_mode former_;
  };

  /// `device` is this thread's current device for as long as the scope lives. Throws `logic_error` for a bad ordinal.
  class [[nodiscard]] current_scope {
   public:
    explicit current_scope(host_device device);
    current_scope(const current_scope&) = delete;
    current_scope& operator=(const current_scope&) = delete;
    ~current_scope();

   private:
    int former_;
  };

  // --- streams -------------------------------------------------------------------------------------------------------

  /// The device `s` belongs to. Safe.
  [[nodiscard]] static host_device of(stream_type s);
  /// What `s` is capturing; `implicit` for the legacy stream while a blocking stream of its device captures. Safe.
  [[nodiscard]] static capture_status<graph_type> capturing(stream_type s);
  /// True for `host::per_thread_stream`.
  [[nodiscard]] static bool thread_bound(stream_type s) noexcept;

  // Nothing to fill or copy is nothing to do: no operation, no node.

  /// Enqueues: `bytes` bytes at `p` become `value`. A memset node when `s` captures.
  static void fill(stream_type s, void* p, std::byte value, std::size_t bytes);
  /// Enqueues: `rows` runs of `width` bytes, whose starts are `pitch` bytes apart, become `value`. One memset node when
  /// `s` captures. Throws `device_error{invalid_value}` when runs would overlap.
  static void fill_rows(stream_type s, void* p, std::size_t pitch, std::byte value, std::size_t width,
                        std::size_t rows);
  /// Enqueues: `bytes` bytes go from `from` to `to`. A memcpy node when `s` captures.
  static void copy(stream_type s, void* to, const void* from, std::size_t bytes);
  /// Runs queued work until all that was queued on `s` has run (for the legacy stream: on blocking streams, too).
  static void synchronize(stream_type s);
  /// Work enqueued on `s` from now on runs after what `e` recorded. A captured event makes `s` join its capture; in a
  /// capture, an event from outside is an error that invalidates it. Safe.
  static void wait(stream_type s, const event& e);

  // --- graphs --------------------------------------------------------------------------------------------------------

  /// The graph owns `object`: `destroy(object)` is called once, by the thread that lets go of the last graph, clone,
  /// executable or launch in flight that has it. It may take locks, and may not call the device. If this throws,
  /// nothing is owned, and `destroy` was called. Safe.
  static void retain(graph_type graph, void* object, void (*destroy)(void*));
  /// The nodes that work captured next on `s` would come after, by their index; none when it doesn't capture. Safe.
  [[nodiscard]] static std::vector<node_type> frontier(stream_type s);
  /// Whether work captured next on `s` starts only after all of `nodes`, of the same capture, are done. Safe.
  [[nodiscard]] static bool comes_after(stream_type s, const std::vector<node_type>& nodes);

  // --- the device ----------------------------------------------------------------------------------------------------

  /// The library's own non-blocking stream: made once, never destroyed, refuses captures.
  [[nodiscard]] stream_type library_stream() const;
  /// Free and total bytes; see `host::set_memory_size`. Safe.
  [[nodiscard]] memory_info memory() const;

  // --- virtual memory (safe; bytes and addresses are multiples of the granularity, else device_error{invalid_value}) --

  /// Always.
  [[nodiscard]] bool has_virtual_memory() const noexcept { return true; }
  /// The page size, in bytes.
  [[nodiscard]] std::size_t granularity(const physical_options& options = {}) const;
  /// Reserves `bytes` of addresses, aligned to `alignment` (a power of two, or 0); touching them is a SIGSEGV until
  /// something is mapped there. Throws `out_of_memory` when the address space has no such range.
  [[nodiscard]] void* reserve(std::size_t bytes, std::size_t alignment) const;
  /// Gives back exactly what one `reserve` returned. Nothing may be mapped there.
  void unreserve(void* p, std::size_t bytes) const;
  /// `bytes` of physical memory, zeroed. Throws `out_of_memory` when the device's memory is used up, `logic_error` when it
  /// should be shared with other processes.
  [[nodiscard]] physical_type create(std::size_t bytes, const physical_options& options = {}) const;
  /// Lets go of `memory`, which is freed once nothing maps it any more.
  void destroy(physical_type memory) const;
  /// The first `bytes` of `memory` are at `p`, inside a reservation. Can be done many times over. Touching them is a
  /// SIGSEGV until somebody is allowed to.
  void map(void* p, std::size_t bytes, physical_type memory) const;
  /// Work of this device may use the range, all of which is mapped. Another device than the memory's own is taken at its
  /// word: one host's devices cannot be told apart.
  void allow(void* p, std::size_t bytes, access allowed) const;
  /// Takes away every mapping in the range, which may cut none. Touching it is a SIGSEGV again.
  void unmap(void* p, std::size_t bytes) const;
};

namespace host {

class graph;
class graph_exec;

/// Names a stream; owns nothing. Null when default constructed. Compares by handle, and handles are recycled.
class stream_ref {
 public:
  stream_ref() = default;

  [[nodiscard]] explicit operator bool() const noexcept { return slot_ != nullptr; }
  friend bool operator==(stream_ref, stream_ref) = default;

  /// Enqueues a kernel. When the stream captures it becomes a kernel node and may run any number of times, or never.
  void run(std::function<void()> kernel) const;

  /// Begins a capture; always safe. Throws `device_error{illegal_state}` when the stream captures already,
  /// `{capture_unsupported}` for the legacy stream, `logic_error` for a library stream.
  void begin_capture(capture_mode mode = capture_mode::global) const;
  /// The same, but the nodes are added to `into`: a graph, a child graph or the body of a conditional node.
  void begin_capture_to(graph_ref into, capture_mode mode = capture_mode::global) const;
  /// Ends the capture that began on this stream and returns its graph (an empty owner after `begin_capture_to`: that
  /// graph has one). Throws `device_error` and ends it nevertheless when it was invalidated or has an unjoined fork;
  /// throws without ending it when it isn't this stream's or this thread's to end.
  graph end_capture() const;

 private:
  friend struct detail::internals;
  friend struct std::hash<stream_ref>;
  detail::stream_slot* slot_ = nullptr;
};

/// Whether a stream's work is ordered with the legacy stream's.
enum class stream_kind : unsigned char { non_blocking, blocking };

/// Owns a stream. Destroying it neither runs nor loses what is still queued: that runs when somebody synchronises.
/// A capture that began on it ends, invalidated.
class stream : public stream_ref {
 public:
  explicit stream(host_device device = {}, stream_kind kind = stream_kind::non_blocking);
  stream(stream&& other) noexcept;
  stream& operator=(stream&& other) noexcept;
  ~stream();

  [[nodiscard]] stream_ref get() const noexcept { return *this; }
  void reset() noexcept;
};

/// The stream that is ordered with every blocking stream of its device, both ways.
[[nodiscard]] stream_ref legacy_stream(host_device device = {});
/// One handle that names a different (blocking) stream in every thread that uses it.
[[nodiscard]] stream_ref per_thread_stream(host_device device = {});

/// A point in a stream's work. Move-only.
class event {
 public:
  explicit event(host_device device);

  /// All work enqueued on `s` so far; replaces what was recorded before. When `s` captures, a point in that capture.
  /// Throws `device_error{invalid_handle}` when `s` is another device's. Safe.
  void record(stream_ref s);
  /// Whether what was recorded has run (true when nothing was). Runs no work. Throws `device_error{captured_event}` and
  /// invalidates the capture when it was recorded in one. Unsafe.
  [[nodiscard]] bool ready() const;
  /// Runs queued work until `ready()`. Throws as `ready()` does. Unsafe.
  void synchronize() const;

  event(event&&) noexcept = default;
  event& operator=(event&&) noexcept = default;
  event(const event&) = delete;
  event& operator=(const event&) = delete;
  ~event() = default;

 private:
  friend struct detail::internals;
  std::shared_ptr<detail::event_state> state_;
};

enum class node_kind : unsigned char { kernel, memset, memcpy, child, conditional };

struct node_info;

/// Names a graph; owns nothing. Null when default constructed. Using one whose graph is gone throws
/// `device_error{invalid_handle}`. All calls are safe.
class graph_ref {
 public:
  graph_ref() = default;

  [[nodiscard]] explicit operator bool() const noexcept { return owner_ != nullptr; }
  friend bool operator==(graph_ref, graph_ref) = default;

  /// A deep copy, which shares the retained objects.
  [[nodiscard]] graph clone() const;
  /// Adds a kernel node after all there are.
  void add_kernel(std::function<void()> kernel) const;
  /// Adds a node that holds a copy of `child` as it is now, after all there are.
  void add_child(graph_ref child) const;
  /// Adds an if-node after all there are; returns its body, empty yet, which lives as long as this graph does. Each
  /// launch asks `condition` when the node's turn comes.
  graph_ref add_conditional(std::function<bool()> condition) const;
  /// An executable of the graph as it is now.
  [[nodiscard]] graph_exec instantiate() const;
  /// Every node, in the order of their making, which is a topological order.
  [[nodiscard]] std::vector<node_info> nodes() const;

 private:
  friend struct detail::internals;
  detail::registry* owner_ = nullptr;
  std::uint64_t id_ = 0;
};

struct node_info {
  node_kind kind;
  std::vector<std::size_t> after;  ///< the nodes it waits for, by their index
  graph_ref inner;                 ///< a child's copy or a conditional's body; null for other kinds
};

/// Owns a graph. Move-only; empty when default constructed.
class graph : public graph_ref {
 public:
  graph() = default;
  graph(graph&& other) noexcept;
  graph& operator=(graph&& other) noexcept;
  ~graph();

  [[nodiscard]] graph_ref get() const noexcept { return *this; }
  void reset() noexcept;

 private:
  friend struct detail::internals;
  std::shared_ptr<detail::graph_state> state_;
};

/// A graph without nodes.
[[nodiscard]] graph make_graph();

/// Owns an executable graph. Move-only; empty when default constructed. Destroying it while launches are in flight is
/// fine; destroying it is an unsafe call, which can't throw and just invalidates (as CUDA's was measured to do).
class graph_exec {
 public:
  graph_exec() = default;
  graph_exec(graph_exec&&) noexcept = default;
  graph_exec& operator=(graph_exec&& other) noexcept;
  ~graph_exec();

  [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
  void reset() noexcept;

  /// Takes over the nodes and retained objects of `from`, and lets go of its own, if the topology is the same (kinds
  /// and dependencies, recursively); otherwise returns false and changes nothing. Launches in flight keep what they have.
  [[nodiscard]] bool update(graph_ref from);
  /// Enqueues one run of the graph, after earlier launches of this executable. A child node when `s` captures.
  void launch(stream_ref s) const;

 private:
  friend struct detail::internals;
  std::shared_ptr<detail::exec_state> state_;
};

/// Physical memory; owns nothing.
class physical_ref {
 public:
  physical_ref() = default;
  [[nodiscard]] explicit operator bool() const noexcept { return owner_ != nullptr; }
  friend bool operator==(physical_ref, physical_ref) = default;

 private:
  friend struct detail::internals;
  detail::registry* owner_ = nullptr;
  std::uint64_t id_ = 0;
};

// --- this thread -------------------------------------------------------------------------------------------------------

/// This thread's current device (0 at first).
[[nodiscard]] host_device current_device() noexcept;
void set_current_device(host_device device);
/// Sets this thread's mode (global at first), returns the former. A thread that isn't relaxed may not make unsafe calls
/// while a non-relaxed capture that it began is active; in global mode, nor while anybody's global capture is.
capture_mode exchange_capture_mode(capture_mode mode) noexcept;

// --- the device as a whole -----------------------------------------------------------------------------------------------

/// Runs everything queued on the device. While a stream of the device captures: throws
/// `device_error{capture_unsupported}` and invalidates every such capture, even when the thread is relaxed.
void device_synchronize(host_device device = {});
/// Runs everything queued on the device, captures or not. Unsafe.
void run_pending(host_device device = {});
/// The device has `bytes` of memory from now on (at first: 64 GiB or the machine's, whichever is less). What is in use
/// stays; nothing is free while that is more.
void set_memory_size(host_device device, std::size_t bytes);

// --- for memory resources --------------------------------------------------------------------------------------------------

/// Does what every unsafe call does first: when a capture forbids it to this thread, throws
/// `device_error{capture_unsupported}` that names `call`, and invalidates every such capture.
void unsafe_call(const char* call);
/// Enqueues an operation in which the virtual memory calls are allowed: `free` unmaps after all work enqueued before it
/// on `s`. Never recorded: throws `logic_error`, and changes nothing, when `s` captures. Unsafe.
void enqueue_free(stream_ref s, std::function<void()> free);

// --- for tests ---------------------------------------------------------------------------------------------------------------

/// While it lives, every next operation (or node of a launched graph) is drawn from those that may run, in the whole
/// process, by a generator seeded with `seed`: the same calls with the same seed run in the same order.
class [[nodiscard]] seeded_schedule {
 public:
  explicit seeded_schedule(std::uint64_t seed);
  seeded_schedule(const seeded_schedule&) = delete;
  seeded_schedule& operator=(const seeded_schedule&) = delete;
  ~seeded_schedule();

 private:
  bool had_former_;
  std::uint64_t former_;
};

/// What was asked of the host devices since the process began; compare two of them.
struct activity_counts {
  std::uint64_t operations = 0;  ///< enqueued eagerly: kernels, fills, copies, launches, frees
  std::uint64_t nodes = 0;       ///< recorded in captures, likewise
  std::uint64_t waits = 0;       ///< times the host waited: for a stream, an event, a device
  std::uint64_t mappings = 0;    ///< calls of map
  friend bool operator==(const activity_counts&, const activity_counts&) = default;
};
[[nodiscard]] activity_counts activity();

}  // namespace host
}  // namespace holdfast::HOLDFAST_ABI

/// By handle, as equality.
template <>
struct std::hash<holdfast::host::stream_ref> {
  std::size_t operator()(holdfast::host::stream_ref s) const noexcept { return std::hash<const void*>{}(s.slot_); }
};

#include <holdfast/detail/host_graphs.hpp>
#include <holdfast/detail/host_memory.hpp>
#include <holdfast/detail/host_streams.hpp>

namespace holdfast::inline HOLDFAST_ABI {
static_assert(device<host_device>);
}
