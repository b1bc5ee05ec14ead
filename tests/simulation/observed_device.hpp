// The host device, observed: a device of its own to the library, whose every call is the host device's, and tells the race
// detector what it orders and what it touches. So a wait that the library forgets is missing there, too, and its own fills
// and unmappings are work like any other.
//
// Memory is mapped and unmapped by the host, at once: all that may still use it has to be done by then.
#pragma once

#include "races.hpp"

#include <holdfast/device/host.hpp>
#include <holdfast/resource/caching.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulation {

namespace host = holdfast::host;

/// The first misuse found; what comes later may be its consequence, a crash included: so it is told at once.
inline std::string found_misuse;
inline void (*tell_misuse)(const std::string&) = nullptr;
inline void misuse(std::string what) {
  if (!found_misuse.empty()) return;
  found_misuse = std::move(what);
  if (tell_misuse != nullptr) tell_misuse(found_misuse);
}

/// What the host device's streams, captures and graphs mean to the race detector. Thread safe.
class observer {
 public:
  /// Work that was queued on `s`, or recorded there as the newest node.
  void work(host::stream_ref s, accesses does) {
    const std::lock_guard lock(mutex_);
    const auto state = state_of(s);
    if (state->in == nullptr) {
      races_.work(line_of(state), does);
    } else {
      std::vector<accesses>& nodes = captured_[state->in->id];
      nodes.resize(state->in->graph->nodes.size());
      nodes[state->leaves.front()] = std::move(does);
    }
  }

  void record(host::stream_ref s, vector_clock& event) {
    const std::lock_guard lock(mutex_);
    const auto state = state_of(s);
    event = state->in == nullptr ? races_.point(line_of(state)) : vector_clock{};
  }
  void wait(host::stream_ref s, const vector_clock& event) {
    const std::lock_guard lock(mutex_);
    if (const auto state = state_of(s); state->in == nullptr) races::wait(line_of(state), event);
  }
  void host_waits_for(const vector_clock& event) {
    const std::lock_guard lock(mutex_);
    races_.host_waits_for(event);
  }
  void host_waits_for(host::stream_ref s) {
    const std::lock_guard lock(mutex_);
    races_.host_waits_for(races_.point(line_of(state_of(s))));
  }
  void host_waits_for_all() {
    const std::lock_guard lock(mutex_);
    for (stream& one : streams_) races_.host_waits_for(one.queued.done);
  }

  /// `graph`, which is being captured, owns something. Joined to the clock: all launches that own it.
  [[nodiscard]] std::shared_ptr<vector_clock> retained(host::graph_ref graph) {
    const std::lock_guard lock(mutex_);
    return owned_.emplace_back(graph, std::make_shared<vector_clock>()).second;
  }

  [[nodiscard]] std::shared_ptr<const recorded_work> end_capture(std::uint64_t id, host::graph_ref graph) {
    const std::lock_guard lock(mutex_);
    auto made = std::make_shared<recorded_work>();
    std::vector<accesses> does = std::move(captured_[id]);
    captured_.erase(id);
    does.resize(graph.nodes().size());
    for (std::size_t i = 0; const host::node_info& node : graph.nodes()) made->nodes.push_back({node.after, does[i++]});
    std::erase_if(owned_, [&](auto& one) {
      if (!(one.first == graph)) return false;
      made->owns.push_back(std::move(one.second));
      return true;
    });
    return made;
  }
  void launch(host::stream_ref s, const recorded_work& graph, vector_clock& last) {
    const std::lock_guard lock(mutex_);
    races_.launch(line_of(state_of(s)), graph, last);
  }

  void mapped(const void* p, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    races_.forget(writes("", 0, p, bytes));
  }
  void unmapped(const void* p, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    races_.host_work(writes("unmapping", 0, p, bytes));
    if (on_unmap) on_unmap(p, bytes);
  }

  std::function<void(const void*, std::size_t)> on_unmap{};

 private:
  /// Kept, since neither a handle nor an address is a stream's for good.
  using stream_state = std::shared_ptr<host::detail::stream_state>;

  struct stream {
    stream_state state;
    races::line queued;
  };

  static stream_state state_of(host::stream_ref s) {
    host::detail::registry& reg = host::detail::owner_of(s, "a look at a stream");
    const std::lock_guard lock(reg.mutex);
    return host::detail::resolve(s, "a look at a stream");
  }

  /// The stream's line, after what it is implicitly ordered with.
  races::line& line_of(const stream_state& state) {
    auto found = std::find_if(streams_.begin(), streams_.end(), [&](const stream& one) { return one.state == state; });
    if (found == streams_.end()) {
      streams_.push_back({state, races_.new_line()});
      found = std::prev(streams_.end());
    }
    for (const stream& other : streams_) {
      if (other.state->legacy ? state->blocking && !state->legacy : state->legacy && other.state->blocking) {
        races::wait(found->queued, other.queued.done);
      }
    }
    return found->queued;
  }

  std::mutex mutex_;
  races races_{&misuse};
  std::vector<stream> streams_;
  std::map<std::uint64_t, std::vector<accesses>> captured_;                       // by capture and node
  std::vector<std::pair<host::graph_ref, std::shared_ptr<vector_clock>>> owned_;  // by graphs that are being captured
};

/// Of the world that is running; there is one at a time.
inline observer* observing = nullptr;

struct observed_device {
  using stream_type = host::stream_ref;
  using graph_type = host::graph_ref;
  using node_type = std::size_t;
  using physical_type = host::physical_ref;
  using relaxed_scope = holdfast::host_device::relaxed_scope;

  static constexpr const char* name = "observed host";

  int ordinal = 0;

  friend bool operator==(const observed_device&, const observed_device&) = default;
  [[nodiscard]] holdfast::host_device under() const { return {ordinal}; }

  class [[nodiscard]] current_scope {
   public:
    explicit current_scope(observed_device of) : under_(of.under()) {}

   private:
    holdfast::host_device::current_scope under_;
  };

  class event {
   public:
    explicit event(observed_device of) : under_(of.under()) {}
    void record(stream_type s) {
      under_.record(s);
      if (observing != nullptr) observing->record(s, done_);
    }
    [[nodiscard]] bool ready() const {
      const bool is = under_.ready();
      if (is && observing != nullptr) observing->host_waits_for(done_);
      return is;
    }
    void synchronize() const {
      under_.synchronize();
      if (observing != nullptr) observing->host_waits_for(done_);
    }

   private:
    friend observed_device;
    host::event under_;
    vector_clock done_;
  };

  // --- streams
  [[nodiscard]] static observed_device of(stream_type s) { return {holdfast::host_device::of(s).ordinal}; }
  [[nodiscard]] static auto capturing(stream_type s) { return holdfast::host_device::capturing(s); }
  [[nodiscard]] static bool thread_bound(stream_type s) noexcept { return holdfast::host_device::thread_bound(s); }
  static void fill(stream_type s, void* p, std::byte value, std::size_t bytes) {
    holdfast::host_device::fill(s, p, value, bytes);
    if (bytes != 0) observe(s, {writes("a fill", 0, p, bytes)});
  }
  static void fill_rows(stream_type s, void* p, std::size_t pitch, std::byte value, std::size_t width,
                        std::size_t rows) {
    holdfast::host_device::fill_rows(s, p, pitch, value, width, rows);
    if (width == 0 || rows == 0) return;
    access filled = writes("a fill of rows", 0, p, width);
    filled.pitch = pitch;
    filled.rows = rows;
    observe(s, {filled});
  }
  static void copy(stream_type s, void* to, const void* from, std::size_t bytes) {
    holdfast::host_device::copy(s, to, from, bytes);
    if (bytes != 0) observe(s, {reads("a copy", 0, from, bytes), writes("a copy", 0, to, bytes)});
  }
  static void synchronize(stream_type s) {
    holdfast::host_device::synchronize(s);
    if (observing != nullptr) observing->host_waits_for(s);
  }
  static void wait(stream_type s, const event& e) {
    holdfast::host_device::wait(s, e.under_);
    if (observing != nullptr) observing->wait(s, e.done_);
  }
  /// A kernel, which does just what is said.
  static void run(stream_type s, accesses does, std::function<void()> kernel) {
    s.run(std::move(kernel));
    observe(s, std::move(does));
  }

  // --- graphs
  static void retain(graph_type graph, void* object, void (*destroy)(void*)) {
    holdfast::host_device::retain(graph, new retained{object, destroy, observing->retained(graph)}, [](void* one) {
      const std::unique_ptr<retained> last{static_cast<retained*>(one)};
      if (observing != nullptr) observing->host_waits_for(*last->launches);
      last->destroy(last->object);
    });
  }
  [[nodiscard]] static auto frontier(stream_type s) { return holdfast::host_device::frontier(s); }
  [[nodiscard]] static bool comes_after(stream_type s, const std::vector<node_type>& nodes) {
    return holdfast::host_device::comes_after(s, nodes);
  }

  // --- the device
  [[nodiscard]] stream_type library_stream() const { return under().library_stream(); }
  [[nodiscard]] auto memory() const { return under().memory(); }
  void run_pending() const {
    host::run_pending(under());
    if (observing != nullptr) observing->host_waits_for_all();
  }

  // --- virtual memory
  [[nodiscard]] bool has_virtual_memory() const noexcept { return true; }
  [[nodiscard]] std::size_t granularity(const holdfast::physical_options& options = {}) const {
    return under().granularity(options);
  }
  [[nodiscard]] void* reserve(std::size_t bytes, std::size_t alignment) const {
    return under().reserve(bytes, alignment);
  }
  void unreserve(void* p, std::size_t bytes) const { under().unreserve(p, bytes); }
  [[nodiscard]] physical_type create(std::size_t bytes, const holdfast::physical_options& options = {}) const {
    return under().create(bytes, options);
  }
  void destroy(physical_type memory) const { under().destroy(memory); }
  void map(void* p, std::size_t bytes, physical_type memory) const {
    under().map(p, bytes, memory);
    if (observing != nullptr) observing->mapped(p, bytes);
  }
  void allow(void* p, std::size_t bytes, holdfast::access allowed) const { under().allow(p, bytes, allowed); }
  void unmap(void* p, std::size_t bytes) const {
    if (observing != nullptr) observing->unmapped(p, bytes);
    under().unmap(p, bytes);
  }

 private:
  struct retained {
    void* object;
    void (*destroy)(void*);
    std::shared_ptr<vector_clock> launches;
  };

  static void observe(stream_type s, accesses does) {
    if (observing != nullptr) observing->work(s, std::move(does));
  }
};

static_assert(holdfast::device<observed_device>);

using device = observed_device;

class graph_exec;

/// A graph, and what it does.
class graph {
 public:
  /// Ends the capture that began on `s`.
  explicit graph(host::stream_ref s) {
    const std::uint64_t capture = device::capturing(s).id;
    under_ = s.end_capture();
    does_ = observing->end_capture(capture, under_);
  }
  [[nodiscard]] graph clone() const { return {under_.clone(), does_}; }
  [[nodiscard]] graph_exec instantiate() const;

 private:
  friend graph_exec;
  graph(host::graph under, std::shared_ptr<const recorded_work> does)
      : under_(std::move(under)), does_(std::move(does)) {}
  host::graph under_;
  std::shared_ptr<const recorded_work> does_;
};

class graph_exec {
 public:
  void launch(host::stream_ref s) {
    under_.launch(s);
    observing->launch(s, *does_, last_);
  }
  [[nodiscard]] bool update(const graph& from) {
    if (!under_.update(from.under_)) return false;
    does_ = from.does_;
    return true;
  }

 private:
  friend graph;
  graph_exec(host::graph_exec under, std::shared_ptr<const recorded_work> does)
      : under_(std::move(under)), does_(std::move(does)) {}
  host::graph_exec under_;
  std::shared_ptr<const recorded_work> does_;
  vector_clock last_;
};

inline graph_exec graph::instantiate() const { return {under_.instantiate(), does_}; }

}  // namespace simulation

/// As the host device's.
template <>
class holdfast::detail::caching_barrier<simulation::observed_device> {
 public:
  void prepare(simulation::observed_device) {}
  [[nodiscard]] bool wait(simulation::observed_device device) {
    device.run_pending();
    return true;
  }
};
