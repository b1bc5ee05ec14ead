// The host device's state: what lies behind the handles of device/host.hpp, and how it is reached.
//
// Locks. `registry::mutex` guards every field below that isn't said to be otherwise; `registry::executor` is held, outside
// it, while queued work runs. No code of the user's (kernels, `destroy`, destructors of captured values) runs under
// `mutex`: whatever is let go of under it goes into a `garbage` list that was declared before the lock.
#include <holdfast/device/host.hpp>

#ifndef HOLDFAST_DETAIL_HOST_STATE_HPP
#define HOLDFAST_DETAIL_HOST_STATE_HPP

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI::host::detail {

using garbage = std::vector<std::shared_ptr<const void>>;
using function = std::function<void()>;

// --- errors ------------------------------------------------------------------------------------------------------------

[[noreturn, gnu::noinline, gnu::cold]] inline void fail(status code, const std::string& what) {
  throw device_error(static_cast<int>(code),
                     "host device: " + what + " (" + std::to_string(static_cast<int>(code)) + ")");
}

[[noreturn, gnu::noinline, gnu::cold]] inline void refuse(const std::string& what) {
  throw logic_error("host device: " + what);
}

// --- graphs ------------------------------------------------------------------------------------------------------------

/// An object that graphs own together.
struct retained {
  void* object;
  void (*destroy)(void*);
  retained(void* o, void (*d)(void*)) : object(o), destroy(d) {}
  retained(const retained&) = delete;
  retained& operator=(const retained&) = delete;
  ~retained();
};

struct graph_node {
  node_kind kind;
  std::vector<std::size_t> after;
  std::shared_ptr<const function> work;                      // kernel, memset, memcpy
  std::shared_ptr<graph_state> inner;                        // child, conditional
  std::shared_ptr<const std::function<bool()>> condition{};  // conditional
};

/// A graph; as part of an executable or a launch it has no id, and never changes.
struct graph_state {
  std::uint64_t id = 0;
  std::vector<graph_node> nodes;
  std::vector<std::shared_ptr<retained>> objects;
};

/// How far a launch in flight has come. Guarded by the executor's lock as well as by the mutex.
struct graph_run {
  struct frame {
    const graph_state* graph;
    frame* parent;
    std::size_t parent_node;
    std::vector<std::size_t> path;                     // of the nodes that lead here
    std::vector<std::size_t> waiting;                  // by node: dependencies that haven't run
    std::vector<std::vector<std::size_t>> dependents;  // by node
    std::vector<std::unique_ptr<frame>> inner;         // by node
    std::size_t left;
  };
  struct ready_node {
    frame* in;
    std::size_t node;
  };

  std::unique_ptr<frame> root;
  std::map<std::vector<std::size_t>, ready_node> ready;  // by path: the first is the first that was recorded

  explicit graph_run(const graph_state& graph);
  void finish(frame& in, std::size_t node);
  void enter(frame& in, std::size_t node);

 private:
  std::unique_ptr<frame> open(const graph_state& graph, frame* parent, std::size_t parent_node);
  void start(frame& f);
  void make_ready(frame& f, std::size_t node);
};

// --- queued work -------------------------------------------------------------------------------------------------------

struct completion {
  bool done = false;
};

/// What the code that a thread is running may do.
enum class phase : unsigned char {
  user,      ///< everything
  kernel,    ///< no device calls
  free,      ///< virtual memory calls
  callback,  ///< no device calls
};

struct operation {
  phase as = phase::kernel;
  std::shared_ptr<const function> work{};        // neither work nor program: a marker
  std::shared_ptr<const graph_state> program{};  // a launch
  std::unique_ptr<graph_run> run{};              // once begun
  std::vector<std::shared_ptr<completion>> after{};
  std::shared_ptr<completion> done{};
  std::uint64_t sequence = 0;
};

// --- streams and captures ------------------------------------------------------------------------------------------------

struct capture {
  std::uint64_t id;
  capture_mode mode;
  std::uint64_t thread;  // the token of the one that began it
  std::shared_ptr<graph_state> graph;
  bool into_existing;
  bool invalid = false;
  bool ended = false;
  std::vector<std::shared_ptr<stream_state>> streams{};  // the first one is where it began
};

struct device_state;

/// A stream. Outlives its handle while work is queued or a capture knows it.
struct stream_state {
  device_state* device;
  bool blocking;
  bool legacy = false;
  bool library = false;
  std::deque<std::shared_ptr<operation>> queue{};
  std::shared_ptr<completion> tail{};  // of the newest operation
  std::shared_ptr<capture> in{};       // what it captures
  std::vector<std::size_t> leaves{};   // what the next node waits for
};

/// What a handle points at. Slots are never freed, and live ones only change hands.
struct stream_slot {
  registry* owner;
  int ordinal;
  bool per_thread = false;
  std::shared_ptr<stream_state> state{};  // null: free
};

struct event_state {
  registry* owner;
  int ordinal;
  std::shared_ptr<completion> last{};
  std::shared_ptr<capture> in{};  // recorded in this capture
  std::vector<std::size_t> leaves{};
};

struct exec_state {
  registry* owner;
  std::shared_ptr<const graph_state> program;
  std::shared_ptr<completion> last{};
};

// --- memory ------------------------------------------------------------------------------------------------------------

struct physical_memory {
  int ordinal;
  std::int64_t offset;  // in the registry's memory file
  std::size_t bytes;
  std::size_t mappings = 0;
  bool destroyed = false;
};

struct mapping {
  std::size_t bytes;
  std::uint64_t physical;
};

// --- the whole -----------------------------------------------------------------------------------------------------------

inline constexpr int device_count = 8;

struct device_state {
  int ordinal;
  stream_slot legacy;
  stream_slot per_thread;
  stream_slot library;
  std::vector<std::unique_ptr<stream_slot>> slots{};
  std::size_t memory_size;
  std::size_t memory_used = 0;
};

struct registry {
  std::mutex executor;
  std::mutex mutex;
  std::array<std::unique_ptr<device_state>, device_count> devices;
  std::vector<std::shared_ptr<stream_state>> active;  // those with queued work
  std::vector<std::shared_ptr<capture>> captures;     // those that have not ended
  std::unordered_map<std::uint64_t, std::weak_ptr<graph_state>> graphs;
  std::size_t prune_graphs_at = 64;
  std::optional<std::uint64_t> schedule;  // the state of the seeded generator
  std::uint64_t sequence = 0;
  /// Ids are unique in the process, and there may be one of these in each shared object.
  std::uint64_t last_capture = std::uint64_t{reinterpret_cast<std::uintptr_t>(this)} << 16;
  std::uint64_t last_graph = 0;
  std::uint64_t last_physical = 0;
  activity_counts counts;
  int memory_file = -1;
  std::int64_t memory_end = 0;
  std::map<std::uintptr_t, std::size_t> reservations;
  std::map<std::uintptr_t, mapping> mappings;
  std::unordered_map<std::uint64_t, physical_memory> physical;
};

/// Never destroyed, so that objects of static storage duration may use it to the last.
[[gnu::visibility("default")]] inline registry& shared_registry() {
  static registry* const instance = new registry;
  return *instance;
}

// --- threads -------------------------------------------------------------------------------------------------------------

/// Trivially destructible: device calls in late destructors find it alive.
struct thread_state {
  std::uint64_t token;  // unlike std::thread::id, never used again
  capture_mode mode;
  phase now;
  int device;
  std::map<const stream_slot*, std::shared_ptr<stream_state>>* streams;
};

inline std::uint64_t next_thread_token() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

inline thread_state& this_thread() {
  static thread_local thread_state state{0, capture_mode::global, phase::user, 0, nullptr};
  if (state.token == 0) state.token = next_thread_token();
  return state;
}

class phase_scope {
 public:
  explicit phase_scope(phase now) : former_(std::exchange(this_thread().now, now)) {}
  phase_scope(const phase_scope&) = delete;
  phase_scope& operator=(const phase_scope&) = delete;
  ~phase_scope() { this_thread().now = former_; }

 private:
  phase former_;
};

/// Kernels and `destroy` may not call the device: on a real one they have no way to.
inline void check_phase(const char* call, bool virtual_memory = false) {
  const phase now = this_thread().now;
  if (now == phase::user || (virtual_memory && now == phase::free)) return;
  refuse(std::string(call) + " called from " +
         (now == phase::callback ? "a retained object's destroy"
          : now == phase::free   ? "a free operation"
                                 : "a kernel"));
}

inline retained::~retained() {
  if (destroy == nullptr) return;
  const phase_scope scope(phase::callback);
  destroy(object);
}

// --- handles -------------------------------------------------------------------------------------------------------------

/// The one way into the handles' private parts.
struct internals {
  static stream_slot* slot(stream_ref s) noexcept { return s.slot_; }
  static void set_slot(stream_ref& s, stream_slot* slot) noexcept { s.slot_ = slot; }
  static stream_ref make_stream_ref(stream_slot& slot) {
    stream_ref s;
    s.slot_ = &slot;
    return s;
  }
  static registry* owner(graph_ref g) noexcept { return g.owner_; }
  static std::uint64_t id(graph_ref g) noexcept { return g.id_; }
  static graph_ref make_graph_ref(registry& owner, const graph_state& state) {
    graph_ref g;
    g.owner_ = &owner;
    g.id_ = state.id;
    return g;
  }
  static graph make_graph(registry& owner, std::shared_ptr<graph_state> state) {
    graph g;
    static_cast<graph_ref&>(g) = make_graph_ref(owner, *state);
    g.state_ = std::move(state);
    return g;
  }
  static graph_exec make_exec(std::shared_ptr<exec_state> state) {
    graph_exec e;
    e.state_ = std::move(state);
    return e;
  }
  static registry* owner(physical_ref m) noexcept { return m.owner_; }
  static std::uint64_t id(physical_ref m) noexcept { return m.id_; }
  static physical_ref make_physical_ref(registry& owner, std::uint64_t id) {
    physical_ref m;
    m.owner_ = &owner;
    m.id_ = id;
    return m;
  }
  static event_state& state(const event& e) {
    if (!e.state_) refuse("an event that was moved from was used");
    return *e.state_;
  }
  static const std::shared_ptr<exec_state>& state(const graph_exec& e) {
    if (!e.state_) refuse("an empty executable graph was used");
    return e.state_;
  }
};

inline std::size_t default_memory_size();

/// Call with the mutex held.
inline device_state& device_at(registry& reg, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count) {
    refuse("there is no device " + std::to_string(ordinal) + "; ordinals are 0 to " + std::to_string(device_count - 1));
  }
  std::unique_ptr<device_state>& device = reg.devices[static_cast<std::size_t>(ordinal)];
  if (!device) {
    auto made = std::make_unique<device_state>(
        device_state{ordinal, {&reg, ordinal}, {&reg, ordinal, true}, {&reg, ordinal}, {}, default_memory_size(), 0});
    made->legacy.state = std::make_shared<stream_state>(stream_state{made.get(), true, true});
    made->library.state = std::make_shared<stream_state>(stream_state{made.get(), false, false, true});
    device = std::move(made);
  }
  return *device;
}

inline registry& owner_of(stream_ref s, const char* call) {
  const stream_slot* const slot = internals::slot(s);
  if (slot == nullptr) refuse(std::string(call) + " was given a null stream");
  return *slot->owner;
}

inline registry& owner_of(graph_ref g, const char* call) {
  registry* const owner = internals::owner(g);
  if (owner == nullptr) refuse(std::string(call) + " was given a null graph");
  return *owner;
}

// Bodies in host_streams.hpp and host_graphs.hpp.
inline std::shared_ptr<stream_state> resolve(stream_ref s, const char* call);
inline capture* admit(registry& reg, stream_state& s, const char* call);
inline void prohibit(registry& reg, const char* call);
inline bool invalidate_prohibited(registry& reg) noexcept;
inline void add_node(capture& c, stream_state& s, graph_node node);
inline std::shared_ptr<completion> enqueue(registry& reg, const std::shared_ptr<stream_state>& s, operation op);
inline void execute(registry& reg, const std::vector<std::shared_ptr<completion>>& goals);
inline std::shared_ptr<graph_state> find_graph(registry& reg, graph_ref g, const char* call);
inline std::shared_ptr<graph_state> new_graph(registry& reg);
inline std::shared_ptr<graph_state> copy_graph(registry& reg, const graph_state& from, bool registered);

}  // namespace holdfast::HOLDFAST_ABI::host::detail

#endif
