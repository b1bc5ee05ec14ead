// The host device's streams, events and captures, and the executor that runs what was queued.
#include <holdfast/device/host.hpp>

#ifndef HOLDFAST_DETAIL_HOST_STREAMS_HPP
#define HOLDFAST_DETAIL_HOST_STREAMS_HPP

#include <holdfast/detail/host_state.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>

namespace holdfast::inline HOLDFAST_ABI {
namespace host {
namespace detail {

// --- captures: everything here is called with the mutex held --------------------------------------------------------------

inline bool captures_on(const capture& c, int ordinal) {
  return std::ranges::any_of(c.streams, [&](const auto& s) { return s->device->ordinal == ordinal; });
}

/// Invalidates the captures that forbid unsafe calls to this thread; whether there were any.
inline bool invalidate_prohibited(registry& reg) noexcept {
  const thread_state& me = this_thread();
  if (me.mode == capture_mode::relaxed) return false;
  bool any = false;
  for (const auto& c : reg.captures) {
    if (c->invalid) continue;
    const bool forbids = c->thread == me.token ? c->mode != capture_mode::relaxed
                                               : c->mode == capture_mode::global && me.mode == capture_mode::global;
    if (forbids) c->invalid = any = true;
  }
  return any;
}

inline void prohibit(registry& reg, const char* call) {
  if (invalidate_prohibited(reg)) {
    fail(status::capture_unsupported,
         std::string(call) + " is not allowed to a thread that isn't relaxed while a stream captures");
  }
}

/// Using the legacy stream while a blocking stream captures would make the capture depend on it.
inline void check_implicit(registry& reg, const stream_state& s, const char* call) {
  if (!s.legacy) return;
  bool any = false;
  for (const auto& c : reg.captures) {
    for (const auto& other : c->streams) {
      if (other->blocking && other->device == s.device) c->invalid = any = true;
    }
  }
  if (any) {
    fail(status::capture_implicit,
         std::string(call) + " on the legacy stream while a blocking stream of its device captures");
  }
}

inline void check_valid(const stream_state& s, const char* call) {
  if (s.in && s.in->invalid) {
    fail(status::capture_invalidated, std::string(call) + " on a stream whose capture was invalidated");
  }
}

/// The capture that `s` records work into; null when the work may be enqueued.
inline capture* admit(registry& reg, stream_state& s, const char* call) {
  check_valid(s, call);
  if (s.in) return s.in.get();
  check_implicit(reg, s, call);
  prohibit(reg, call);
  return nullptr;
}

inline void add_node(capture& c, stream_state& s, graph_node node) {
  std::vector<std::size_t> leaf{c.graph->nodes.size()};
  node.after = s.leaves;
  c.graph->nodes.push_back(std::move(node));
  s.leaves = std::move(leaf);
}

inline void begin_capture(registry& reg, const std::shared_ptr<stream_state>& s, std::shared_ptr<graph_state> into,
                          bool into_existing, capture_mode mode) {
  if (s->library) refuse("the library's stream can't capture");
  if (s->legacy) fail(status::capture_unsupported, "the legacy stream can't capture");
  if (s->in) fail(status::illegal_state, "begin_capture on a stream that captures already");
  auto c =
      std::make_shared<capture>(capture{++reg.last_capture, mode, this_thread().token, std::move(into), into_existing});
  c->streams.push_back(s);
  reg.captures.push_back(c);
  s->leaves.clear();
  s->in = std::move(c);
}

inline void end_capture(registry& reg, const std::shared_ptr<capture>& c, garbage& dead) {
  c->ended = true;
  for (auto& s : c->streams) {
    s->in.reset();
    s->leaves.clear();
    dead.push_back(std::move(s));
  }
  c->streams.clear();
  dead.push_back(std::move(c->graph));
  std::erase(reg.captures, c);
}

/// Whether everything the forked streams recorded is ordered before the end of the stream where the capture began.
inline bool joined(const capture& c) {
  std::vector<bool> reached(c.graph->nodes.size());
  std::vector<std::size_t> next = c.streams.front()->leaves;
  while (!next.empty()) {
    const std::size_t node = next.back();
    next.pop_back();
    if (reached[node]) continue;
    reached[node] = true;
    const auto& after = c.graph->nodes[node].after;
    next.insert(next.end(), after.begin(), after.end());
  }
  return std::ranges::all_of(c.streams, [&](const auto& s) {
    return std::ranges::all_of(s->leaves, [&](std::size_t leaf) { return reached[leaf]; });
  });
}

/// What becomes of a stream whose handle goes: queued work stays queued, a capture that began here can't be ended.
inline void abandon(registry& reg, const std::shared_ptr<stream_state>& s, garbage& dead) {
  if (!s->in || s->in->streams.front() != s) return;
  const std::shared_ptr<capture> c = s->in;
  c->invalid = true;
  end_capture(reg, c, dead);
}

// --- handles ---------------------------------------------------------------------------------------------------------------

struct per_thread_streams {
  std::map<const stream_slot*, std::shared_ptr<stream_state>> streams;
  ~per_thread_streams() {
    this_thread().streams = nullptr;
    for (auto& [slot, state] : streams) {
      garbage dead;
      const std::lock_guard lock(slot->owner->mutex);
      abandon(*slot->owner, state, dead);
    }
  }
};

inline std::shared_ptr<stream_state>& this_threads_stream(stream_slot& slot) {
  static thread_local per_thread_streams mine;
  thread_state& me = this_thread();
  if (me.streams == nullptr) me.streams = &mine.streams;
  std::shared_ptr<stream_state>& state = (*me.streams)[&slot];
  if (!state) state = std::make_shared<stream_state>(stream_state{&device_at(*slot.owner, slot.ordinal), true});
  return state;
}

inline std::shared_ptr<stream_state> resolve(stream_ref s, const char* call) {
  stream_slot& slot = *internals::slot(s);
  const std::shared_ptr<stream_state>& state = slot.per_thread ? this_threads_stream(slot) : slot.state;
  if (!state) fail(status::invalid_handle, std::string(call) + " was given a stream that has been destroyed");
  return state;
}

// --- queues ----------------------------------------------------------------------------------------------------------------

inline std::shared_ptr<completion> enqueue(registry& reg, const std::shared_ptr<stream_state>& s, operation op) {
  if (s->legacy) {
    for (const auto& other : reg.active) {
      if (other->blocking && other->device == s->device) op.after.push_back(other->tail);
    }
  } else if (s->blocking && s->device->legacy.state->tail) {
    op.after.push_back(s->device->legacy.state->tail);
  }
  op.sequence = ++reg.sequence;
  op.done = std::make_shared<completion>();
  std::shared_ptr<completion> done = op.done;
  reg.active.reserve(reg.active.size() + 1);
  const bool idle = s->queue.empty();
  s->queue.push_back(std::make_shared<operation>(std::move(op)));
  if (idle) reg.active.push_back(s);
  s->tail = done;
  return done;
}

/// Enqueues work, or records it as a node.
inline void submit(stream_ref s, const char* call, node_kind kind, function work) {
  check_phase(call);
  auto shared = std::make_shared<const function>(std::move(work));
  registry& reg = owner_of(s, call);
  std::shared_ptr<stream_state> target;
  const std::lock_guard lock(reg.mutex);
  target = resolve(s, call);
  if (capture* const c = admit(reg, *target, call)) {
    add_node(*c, *target, {kind, {}, std::move(shared), nullptr});
    ++reg.counts.nodes;
  } else {
    enqueue(reg, target, {.work = std::move(shared)});
    ++reg.counts.operations;
  }
}

// --- the executor ------------------------------------------------------------------------------------------------------------

inline graph_run::graph_run(const graph_state& graph) : root(open(graph, nullptr, 0)) { start(*root); }

inline std::unique_ptr<graph_run::frame> graph_run::open(const graph_state& graph, frame* parent,
                                                         std::size_t parent_node) {
  const std::size_t n = graph.nodes.size();
  auto f = std::make_unique<frame>();
  f->graph = &graph;
  f->parent = parent;
  f->parent_node = parent_node;
  if (parent != nullptr) {
    f->path = parent->path;
    f->path.push_back(parent_node);
  }
  f->waiting.resize(n);
  f->dependents.resize(n);
  f->inner.resize(n);
  f->left = n;
  for (std::size_t i = 0; i < n; ++i) {
    f->waiting[i] = graph.nodes[i].after.size();
    for (const std::size_t before : graph.nodes[i].after) f->dependents[before].push_back(i);
  }
  return f;
}

inline void graph_run::start(frame& f) {
  // Collected first: a child without nodes finishes at once, and makes its dependents ready by itself.
  std::vector<std::size_t> roots;
  for (std::size_t i = 0; i < f.waiting.size(); ++i) {
    if (f.waiting[i] == 0) roots.push_back(i);
  }
  for (const std::size_t i : roots) make_ready(f, i);
}

inline void graph_run::make_ready(frame& f, std::size_t node) {
  if (f.graph->nodes[node].kind == node_kind::child) {
    enter(f, node);
    return;
  }
  std::vector<std::size_t> path = f.path;
  path.push_back(node);
  ready.emplace(std::move(path), ready_node{&f, node});
}

/// Goes into a child, or into the body of a conditional whose condition holds.
inline void graph_run::enter(frame& in, std::size_t node) {
  std::unique_ptr<frame>& inner = in.inner[node];
  inner = open(*in.graph->nodes[node].inner, &in, node);
  if (inner->left == 0) {
    finish(in, node);
  } else {
    start(*inner);
  }
}

inline void graph_run::finish(frame& in, std::size_t node) {
  const bool last = --in.left == 0;  // before dependents, which may be empty, and finish at once
  for (const std::size_t i : in.dependents[node]) {
    if (--in.waiting[i] == 0) make_ready(in, i);
  }
  if (last && in.parent != nullptr) finish(*in.parent, in.parent_node);
}

inline std::uint64_t next_random(std::uint64_t& state) {  // splitmix64, the same everywhere
  std::uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/// One piece of work that the executor runs next. Only the executor takes operations away, so the pointers hold.
struct step {
  std::shared_ptr<stream_state> stream;
  operation* op = nullptr;
  std::optional<graph_run::ready_node> at;  // in a launch
};

inline bool runnable(const operation& op) {
  return std::ranges::all_of(op.after, [](const auto& c) { return c->done; });
}

/// How many steps the operation offers now; begins a launch that was not.
inline std::size_t offers(operation& op) {
  if (!op.program) return 1;
  if (!op.run) op.run = std::make_unique<graph_run>(*op.program);
  return op.run->ready.empty() ? 1 : op.run->ready.size();  // 1: a graph without nodes
}

inline step take(const std::shared_ptr<stream_state>& s, std::size_t which) {
  operation& op = *s->queue.front();
  step next{s, &op, std::nullopt};
  if (op.run && !op.run->ready.empty()) {
    const auto chosen = std::next(op.run->ready.begin(), static_cast<std::ptrdiff_t>(which));
    next.at = chosen->second;
    op.run->ready.erase(chosen);
  }
  return next;
}

inline step choose(registry& reg) {
  if (reg.schedule) {
    std::size_t total = 0;
    for (const auto& s : reg.active) {
      if (runnable(*s->queue.front())) total += offers(*s->queue.front());
    }
    std::size_t which = static_cast<std::size_t>(next_random(*reg.schedule) % total);
    for (const auto& s : reg.active) {
      if (!runnable(*s->queue.front())) continue;
      const std::size_t n = offers(*s->queue.front());
      if (which < n) return take(s, which);
      which -= n;
    }
  }
  // Dependencies were enqueued before what depends on them: the oldest operation can always run.
  const auto oldest =
      std::ranges::min_element(reg.active, {}, [](const auto& s) { return s->queue.front()->sequence; });
  (void)offers(*(*oldest)->queue.front());
  return take(*oldest, 0);
}

inline bool perform(const step& s) {  // whether a condition, if there was one, holds
  const phase_scope scope(s.op->as);
  if (s.at) {
    const graph_node& node = s.at->in->graph->nodes[s.at->node];
    if (node.condition) return (*node.condition)();
    (*node.work)();
  } else if (s.op->work) {
    (*s.op->work)();
  }
  return true;
}

inline void finish(registry& reg, step& s, bool condition, garbage& dead) {
  operation& op = *s.op;
  if (s.at) {
    if (condition && s.at->in->graph->nodes[s.at->node].kind == node_kind::conditional) {
      op.run->enter(*s.at->in, s.at->node);
    } else {
      op.run->finish(*s.at->in, s.at->node);
    }
  }
  if (op.run && op.run->root->left != 0) return;
  op.done->done = true;
  dead.push_back(std::move(s.stream->queue.front()));
  s.stream->queue.pop_front();
  if (s.stream->queue.empty()) std::erase(reg.active, s.stream);
}

/// Runs queued work until all goals are met. One thread at a time does; what is let go of goes without any lock.
inline void execute(registry& reg, const std::vector<std::shared_ptr<completion>>& goals) {
  const auto met = [&] { return std::ranges::all_of(goals, [](const auto& c) { return c->done; }); };
  {
    const std::lock_guard lock(reg.mutex);
    if (met()) return;
  }
  for (;;) {
    garbage dead;
    dead.reserve(1);  // so that what has run can leave its queue
    std::exception_ptr error;
    step next;
    {
      const std::lock_guard executor(reg.executor);
      {
        const std::lock_guard lock(reg.mutex);
        if (met()) return;
        next = choose(reg);
      }
      bool condition = false;
      try {
        condition = perform(next);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(reg.mutex);
      finish(reg, next, condition, dead);
    }
    dead.clear();
    if (error) std::rethrow_exception(error);
  }
}

inline std::vector<std::shared_ptr<completion>> queued_on(registry& reg, const device_state& device) {
  std::vector<std::shared_ptr<completion>> tails;
  for (const auto& s : reg.active) {
    if (s->device == &device) tails.push_back(s->tail);
  }
  return tails;
}

}  // namespace detail

// --- streams -----------------------------------------------------------------------------------------------------------------

inline stream::stream(host_device device, stream_kind kind) {
  detail::check_phase("stream creation");
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  detail::device_state& d = detail::device_at(reg, device.ordinal);
  auto state = std::make_shared<detail::stream_state>(detail::stream_state{&d, kind == stream_kind::blocking});
  // The lowest free slot: as on CUDA, the handle of a destroyed stream comes back.
  auto slot = std::ranges::find_if(d.slots, [](const auto& candidate) { return candidate->state == nullptr; });
  if (slot == d.slots.end()) {
    d.slots.push_back(std::make_unique<detail::stream_slot>(detail::stream_slot{&reg, device.ordinal}));
    slot = std::prev(d.slots.end());
  }
  (*slot)->state = std::move(state);
  detail::internals::set_slot(*this, slot->get());
}

inline stream::stream(stream&& other) noexcept : stream_ref(std::exchange(static_cast<stream_ref&>(other), {})) {}

inline stream& stream::operator=(stream&& other) noexcept {
  if (this != &other) {
    reset();
    static_cast<stream_ref&>(*this) = std::exchange(static_cast<stream_ref&>(other), {});
  }
  return *this;
}

inline stream::~stream() { reset(); }

inline void stream::reset() noexcept {
  detail::stream_slot* const slot = detail::internals::slot(*this);
  if (slot == nullptr) return;
  detail::internals::set_slot(*this, nullptr);
  detail::garbage dead;
  std::shared_ptr<detail::stream_state> state;
  const std::lock_guard lock(slot->owner->mutex);
  state = std::move(slot->state);
  slot->state.reset();
  detail::abandon(*slot->owner, state, dead);
}

inline stream_ref legacy_stream(host_device device) {
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  return detail::internals::make_stream_ref(detail::device_at(reg, device.ordinal).legacy);
}

inline stream_ref per_thread_stream(host_device device) {
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  return detail::internals::make_stream_ref(detail::device_at(reg, device.ordinal).per_thread);
}

inline void stream_ref::run(std::function<void()> kernel) const {
  if (!kernel) detail::refuse("run was given an empty kernel");
  detail::submit(*this, "run", node_kind::kernel, std::move(kernel));
}

inline void stream_ref::begin_capture(capture_mode mode) const {
  detail::check_phase("begin_capture");
  detail::registry& reg = detail::owner_of(*this, "begin_capture");
  std::shared_ptr<detail::stream_state> target;
  const std::lock_guard lock(reg.mutex);
  target = detail::resolve(*this, "begin_capture");
  detail::begin_capture(reg, target, std::make_shared<detail::graph_state>(), false, mode);
  std::shared_ptr<detail::graph_state>& made = target->in->graph;
  made = detail::new_graph(reg);
}

inline void stream_ref::begin_capture_to(graph_ref into, capture_mode mode) const {
  detail::check_phase("begin_capture_to");
  detail::registry& reg = detail::owner_of(*this, "begin_capture_to");
  std::shared_ptr<detail::stream_state> target;
  std::shared_ptr<detail::graph_state> graph;
  const std::lock_guard lock(reg.mutex);
  target = detail::resolve(*this, "begin_capture_to");
  graph = detail::find_graph(reg, into, "begin_capture_to");
  detail::begin_capture(reg, target, graph, true, mode);
}

inline graph stream_ref::end_capture() const {
  detail::check_phase("end_capture");
  detail::registry& reg = detail::owner_of(*this, "end_capture");
  detail::garbage dead;
  std::shared_ptr<detail::stream_state> target;
  std::shared_ptr<detail::capture> c;
  const std::lock_guard lock(reg.mutex);
  target = detail::resolve(*this, "end_capture");
  c = target->in;
  if (!c) detail::fail(status::illegal_state, "end_capture on a stream that captures nothing");
  if (c->streams.front() != target) {
    c->invalid = true;
    detail::fail(status::capture_unmatched,
                 "end_capture on another stream than the capture's own, which invalidates it");
  }
  if (c->mode != capture_mode::relaxed && c->thread != detail::this_thread().token) {
    detail::fail(status::capture_wrong_thread,
                 "end_capture by another thread than the one that began a capture that isn't relaxed");
  }
  const bool unjoined = !c->invalid && !detail::joined(*c);
  const std::shared_ptr<detail::graph_state> recorded = c->graph;
  dead.push_back(recorded);
  detail::end_capture(reg, c, dead);
  if (c->invalid) detail::fail(status::capture_invalidated, "end_capture: the capture was invalidated");
  if (unjoined) detail::fail(status::capture_unjoined, "end_capture: a forked stream was not joined");
  return c->into_existing ? graph{} : detail::internals::make_graph(reg, recorded);
}

// --- events ------------------------------------------------------------------------------------------------------------------

inline event::event(host_device device) {
  detail::check_phase("event creation");
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  state_ =
      std::make_shared<detail::event_state>(detail::event_state{&reg, detail::device_at(reg, device.ordinal).ordinal});
}

inline void event::record(stream_ref s) {
  detail::check_phase("event record");
  detail::event_state* e = &detail::internals::state(*this);
  detail::registry& reg = detail::owner_of(s, "event record");
  if (host_device::of(s).ordinal != e->ordinal) {
    detail::fail(status::invalid_handle, "event record on a stream of another device");
  }
  if (e->owner != &reg) {  // a stream made by another shared object that has a state of its own
    state_ = std::make_shared<detail::event_state>(detail::event_state{&reg, e->ordinal});
    e = state_.get();
  }
  detail::garbage dead;
  std::shared_ptr<detail::stream_state> target;
  const std::lock_guard lock(reg.mutex);
  target = detail::resolve(s, "event record");
  detail::check_valid(*target, "event record");
  dead.push_back(std::move(e->in));
  if (target->in) {
    e->last.reset();
    e->in = target->in;
    e->leaves = target->leaves;
  } else {
    detail::check_implicit(reg, *target, "event record");
    e->last = detail::enqueue(reg, target, {});
    e->leaves.clear();
  }
}

namespace detail {

/// With the mutex held: what a host-side look at the event may not do.
inline void check_host_use(event_state& e, const char* call) {
  if (e.in) {
    e.in->invalid = true;
    fail(status::captured_event,
         std::string(call) + " of an event that was recorded in a capture, which invalidates it");
  }
  prohibit(*e.owner, call);
}

}  // namespace detail

inline bool event::ready() const {
  detail::check_phase("event query");
  detail::event_state& e = detail::internals::state(*this);
  const std::lock_guard lock(e.owner->mutex);
  detail::check_host_use(e, "event query");
  return !e.last || e.last->done;
}

inline void event::synchronize() const {
  detail::check_phase("event synchronize");
  detail::event_state& e = detail::internals::state(*this);
  std::vector<std::shared_ptr<detail::completion>> goals;
  {
    const std::lock_guard lock(e.owner->mutex);
    detail::check_host_use(e, "event synchronize");
    ++e.owner->counts.waits;
    if (e.last) goals.push_back(e.last);
  }
  detail::execute(*e.owner, goals);
}

// --- this thread, and the device as a whole ------------------------------------------------------------------------------------

inline host_device current_device() noexcept { return {detail::this_thread().device}; }

inline void set_current_device(host_device device) {
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  detail::this_thread().device = detail::device_at(reg, device.ordinal).ordinal;
}

inline capture_mode exchange_capture_mode(capture_mode mode) noexcept {
  return std::exchange(detail::this_thread().mode, mode);
}

inline void device_synchronize(host_device device) {
  detail::check_phase("device_synchronize");
  detail::registry& reg = detail::shared_registry();
  std::vector<std::shared_ptr<detail::completion>> goals;
  {
    const std::lock_guard lock(reg.mutex);
    detail::device_state& d = detail::device_at(reg, device.ordinal);
    bool any = false;
    for (const auto& c : reg.captures) {
      if (detail::captures_on(*c, d.ordinal)) c->invalid = any = true;
    }
    if (any) detail::fail(status::capture_unsupported, "device_synchronize while a stream of the device captures");
    detail::prohibit(reg, "device_synchronize");
    ++reg.counts.waits;
    goals = detail::queued_on(reg, d);
  }
  detail::execute(reg, goals);
}

inline void run_pending(host_device device) {
  detail::check_phase("run_pending");
  detail::registry& reg = detail::shared_registry();
  std::vector<std::shared_ptr<detail::completion>> goals;
  {
    const std::lock_guard lock(reg.mutex);
    detail::device_state& d = detail::device_at(reg, device.ordinal);
    detail::prohibit(reg, "run_pending");
    ++reg.counts.waits;
    goals = detail::queued_on(reg, d);
  }
  detail::execute(reg, goals);
}

inline void unsafe_call(const char* call) {
  detail::check_phase(call);
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  detail::prohibit(reg, call);
}

inline void enqueue_free(stream_ref s, std::function<void()> free) {
  detail::check_phase("enqueue_free");
  if (!free) detail::refuse("enqueue_free was given an empty function");
  auto work = std::make_shared<const detail::function>(std::move(free));
  detail::registry& reg = detail::owner_of(s, "enqueue_free");
  std::shared_ptr<detail::stream_state> target;
  const std::lock_guard lock(reg.mutex);
  target = detail::resolve(s, "enqueue_free");
  if (target->in) detail::refuse("enqueue_free on a stream that captures");
  (void)detail::admit(reg, *target, "enqueue_free");
  detail::enqueue(reg, target, {.as = detail::phase::free, .work = std::move(work)});
  ++reg.counts.operations;
}

inline seeded_schedule::seeded_schedule(std::uint64_t seed) {
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  had_former_ = reg.schedule.has_value();
  former_ = reg.schedule.value_or(0);
  reg.schedule = seed;
}

inline seeded_schedule::~seeded_schedule() {
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  reg.schedule = had_former_ ? std::optional(former_) : std::nullopt;
}

inline activity_counts activity() {
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  return reg.counts;
}

}  // namespace host

// --- host_device's streams -----------------------------------------------------------------------------------------------------

inline host_device::relaxed_scope::relaxed_scope() noexcept
    : former_(host::exchange_capture_mode(host::capture_mode::relaxed)) {}

inline host_device::relaxed_scope::~relaxed_scope() { host::exchange_capture_mode(former_); }

inline host_device::current_scope::current_scope(host_device device) : former_(host::current_device().ordinal) {
  host::set_current_device(device);
}

inline host_device::current_scope::~current_scope() { host::detail::this_thread().device = former_; }

inline host_device host_device::of(stream_type s) {
  (void)host::detail::owner_of(s, "of");
  return {host::detail::internals::slot(s)->ordinal};
}

inline capture_status<host_device::graph_type> host_device::capturing(stream_type s) {
  host::detail::check_phase("capturing");
  host::detail::registry& reg = host::detail::owner_of(s, "capturing");
  std::shared_ptr<host::detail::stream_state> target;
  const std::lock_guard lock(reg.mutex);
  target = host::detail::resolve(s, "capturing");
  if (const host::detail::capture* const c = target->in.get()) {
    return {c->invalid ? capture_state::invalidated : capture_state::active, c->id,
            host::detail::internals::make_graph_ref(reg, *c->graph)};
  }
  if (target->legacy) {
    for (const auto& c : reg.captures) {
      for (const auto& other : c->streams) {
        if (other->blocking && other->device == target->device) return {capture_state::implicit, 0, {}};
      }
    }
  }
  return {};
}

inline std::vector<host_device::node_type> host_device::frontier(stream_type s) {
  host::detail::registry& reg = host::detail::owner_of(s, "frontier");
  const std::lock_guard lock(reg.mutex);
  const auto target = host::detail::resolve(s, "frontier");
  return target->in == nullptr ? std::vector<node_type>{} : target->leaves;
}

inline bool host_device::comes_after(stream_type s, const std::vector<node_type>& nodes) {
  host::detail::registry& reg = host::detail::owner_of(s, "comes_after");
  const std::lock_guard lock(reg.mutex);
  const auto target = host::detail::resolve(s, "comes_after");
  if (target->in == nullptr) return nodes.empty();
  std::set<node_type> missing(nodes.begin(), nodes.end());
  std::set<node_type> seen(target->leaves.begin(), target->leaves.end());
  std::vector<node_type> ahead = target->leaves;
  while (!ahead.empty() && !missing.empty()) {
    const node_type node = ahead.back();
    ahead.pop_back();
    missing.erase(node);
    for (const node_type before : target->in->graph->nodes[node].after)
      if (seen.insert(before).second) ahead.push_back(before);
  }
  return missing.empty();
}

inline bool host_device::thread_bound(stream_type s) noexcept {
  const host::detail::stream_slot* const slot = host::detail::internals::slot(s);
  return slot != nullptr && slot->per_thread;
}

inline void host_device::fill(stream_type s, void* p, std::byte value, std::size_t bytes) {
  if (bytes == 0) return;
  host::detail::submit(s, "fill", host::node_kind::memset, [=] { std::memset(p, std::to_integer<int>(value), bytes); });
}

inline void host_device::fill_rows(stream_type s, void* p, std::size_t pitch, std::byte value, std::size_t width,
                                   std::size_t rows) {
  if (width == 0 || rows == 0) return;
  if (width > pitch && rows > 1) {
    host::detail::fail(host::status::invalid_value, "fill_rows: runs of " + std::to_string(width) +
                                                        " bytes overlap at a pitch of " + std::to_string(pitch));
  }
  host::detail::submit(s, "fill_rows", host::node_kind::memset, [=] {
    for (std::size_t row = 0; row < rows; ++row) {
      std::memset(static_cast<std::byte*>(p) + row * pitch, std::to_integer<int>(value), width);
    }
  });
}

inline void host_device::copy(stream_type s, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  host::detail::submit(s, "copy", host::node_kind::memcpy, [=] { std::memmove(to, from, bytes); });
}

inline void host_device::synchronize(stream_type s) {
  using namespace host::detail;
  check_phase("synchronize");
  registry& reg = owner_of(s, "synchronize");
  std::vector<std::shared_ptr<completion>> goals;
  {
    std::shared_ptr<stream_state> target;
    const std::lock_guard lock(reg.mutex);
    target = resolve(s, "synchronize");
    check_valid(*target, "synchronize");
    if (target->in) {
      target->in->invalid = true;
      fail(host::status::capture_unsupported, "synchronize on a stream that captures, which invalidates the capture");
    }
    check_implicit(reg, *target, "synchronize");
    prohibit(reg, "synchronize");
    ++reg.counts.waits;
    if (target->tail) goals.push_back(target->tail);
    if (target->legacy) {
      for (const auto& other : reg.active) {
        if (other->blocking && other->device == target->device) goals.push_back(other->tail);
      }
    }
  }
  execute(reg, goals);
}

inline void host_device::wait(stream_type s, const event& e) {
  using namespace host::detail;
  using host::status;
  check_phase("wait");
  event_state& recorded = internals::state(e);
  registry& reg = owner_of(s, "wait");
  if (recorded.owner != &reg) {  // one of two states in this process: their queues can't wait for each other
    if (capturing(s).state != capture_state::none || recorded.in) {
      fail(status::capture_isolation, "wait: the capture and the event belong to different shared objects");
    }
    execute(*recorded.owner, recorded.last ? std::vector{recorded.last} : std::vector<std::shared_ptr<completion>>{});
    return;
  }
  std::shared_ptr<stream_state> target;
  const std::lock_guard lock(reg.mutex);
  target = resolve(s, "wait");
  check_valid(*target, "wait");
  capture* const mine = target->in.get();
  if (!recorded.in) {
    if (!recorded.last) return;
    if (mine != nullptr) {
      mine->invalid = true;
      fail(status::capture_isolation, "wait in a capture for an event from outside, which invalidates the capture");
    }
    check_implicit(reg, *target, "wait");
    if (!recorded.last->done) enqueue(reg, target, {.after = {recorded.last}});
    return;
  }
  capture& theirs = *recorded.in;
  if (theirs.ended) {
    if (mine != nullptr) mine->invalid = true;
    fail(status::captured_event, "wait for an event that was recorded in a capture that has ended");
  }
  if (mine != nullptr && mine != &theirs) {
    mine->invalid = theirs.invalid = true;
    fail(status::capture_merge, "wait in one capture for an event of another, which invalidates both");
  }
  if (theirs.invalid) fail(status::capture_invalidated, "wait for an event of a capture that was invalidated");
  if (mine == nullptr) {
    if (target->library) refuse("the library's stream can't join a capture");
    if (target->legacy) {
      theirs.invalid = true;
      fail(status::capture_implicit, "the legacy stream can't join a capture, which is invalidated");
    }
    theirs.streams.push_back(target);
    target->in = recorded.in;
    target->leaves = recorded.leaves;
    return;
  }
  for (const std::size_t leaf : recorded.leaves) {
    if (std::ranges::find(target->leaves, leaf) == target->leaves.end()) target->leaves.push_back(leaf);
  }
}

inline host_device::stream_type host_device::library_stream() const {
  host::detail::check_phase("library_stream");
  host::detail::registry& reg = host::detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  return host::detail::internals::make_stream_ref(host::detail::device_at(reg, ordinal).library);
}

}  // namespace holdfast::HOLDFAST_ABI

#endif
