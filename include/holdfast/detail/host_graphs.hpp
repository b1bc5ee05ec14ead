// The host device's graphs, their executables, and the objects they own.
#include <holdfast/device/host.hpp>

#ifndef HOLDFAST_DETAIL_HOST_GRAPHS_HPP
#define HOLDFAST_DETAIL_HOST_GRAPHS_HPP

#include <holdfast/detail/host_state.hpp>

#include <algorithm>

namespace holdfast::inline HOLDFAST_ABI {
namespace host {
namespace detail {

// --- called with the mutex held --------------------------------------------------------------------------------------------

inline std::shared_ptr<graph_state> new_graph(registry& reg) {
  if (reg.graphs.size() >= reg.prune_graphs_at) {
    std::erase_if(reg.graphs, [](const auto& entry) { return entry.second.expired(); });
    reg.prune_graphs_at = std::max<std::size_t>(64, 2 * reg.graphs.size());
  }
  auto made = std::make_shared<graph_state>();
  made->id = ++reg.last_graph;
  reg.graphs.emplace(made->id, made);
  return made;
}

/// `registered`: handles may name the copy and its children. Executables are not.
inline std::shared_ptr<graph_state> copy_graph(registry& reg, const graph_state& from, bool registered) {
  const std::shared_ptr<graph_state> made = registered ? new_graph(reg) : std::make_shared<graph_state>();
  made->nodes = from.nodes;
  made->objects = from.objects;
  for (graph_node& node : made->nodes) {
    if (node.inner) node.inner = copy_graph(reg, *node.inner, registered);
  }
  return made;
}

inline std::shared_ptr<graph_state> find_graph(registry& reg, graph_ref g, const char* call) {
  if (&owner_of(g, call) != &reg) refuse(std::string(call) + " was given things of different shared objects");
  const auto found = reg.graphs.find(internals::id(g));
  std::shared_ptr<graph_state> state = found == reg.graphs.end() ? nullptr : found->second.lock();
  if (!state) fail(status::invalid_handle, std::string(call) + " was given a graph that is gone");
  return state;
}

inline bool same_topology(const graph_state& a, const graph_state& b) {
  return std::ranges::equal(a.nodes, b.nodes, [](const graph_node& x, const graph_node& y) {
    return x.kind == y.kind && x.after == y.after && (!x.inner || same_topology(*x.inner, *y.inner));
  });
}

/// The nodes that nothing waits for yet.
inline std::vector<std::size_t> ends(const graph_state& graph) {
  std::vector<bool> awaited(graph.nodes.size());
  for (const graph_node& node : graph.nodes) {
    for (const std::size_t before : node.after) awaited[before] = true;
  }
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < awaited.size(); ++i) {
    if (!awaited[i]) found.push_back(i);
  }
  return found;
}

/// Locks a graph for one call: members are released in the order that keeps user code out of the lock.
struct locked_graph {
  registry& reg;
  std::shared_ptr<graph_state> state;
  std::unique_lock<std::mutex> lock;

  locked_graph(graph_ref g, const char* call) : reg(owner_of(g, call)) {
    check_phase(call);
    lock = std::unique_lock(reg.mutex);
    state = find_graph(reg, g, call);
  }
};

}  // namespace detail

inline graph make_graph() {
  detail::check_phase("make_graph");
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  return detail::internals::make_graph(reg, detail::new_graph(reg));
}

inline graph graph_ref::clone() const {
  const detail::locked_graph g(*this, "clone");
  return detail::internals::make_graph(g.reg, detail::copy_graph(g.reg, *g.state, true));
}

inline void graph_ref::add_kernel(std::function<void()> kernel) const {
  if (!kernel) detail::refuse("add_kernel was given an empty kernel");
  auto work = std::make_shared<const detail::function>(std::move(kernel));
  const detail::locked_graph g(*this, "add_kernel");
  g.state->nodes.push_back({node_kind::kernel, detail::ends(*g.state), std::move(work), nullptr});
}

inline void graph_ref::add_child(graph_ref child) const {
  std::shared_ptr<detail::graph_state> from;
  const detail::locked_graph g(*this, "add_child");
  from = detail::find_graph(g.reg, child, "add_child");
  g.state->nodes.push_back({node_kind::child, detail::ends(*g.state), nullptr, detail::copy_graph(g.reg, *from, true)});
}

inline graph_ref graph_ref::add_conditional(std::function<bool()> condition) const {
  if (!condition) detail::refuse("add_conditional was given an empty condition");
  auto shared = std::make_shared<const std::function<bool()>>(std::move(condition));
  const detail::locked_graph g(*this, "add_conditional");
  std::shared_ptr<detail::graph_state> body = detail::new_graph(g.reg);
  const graph_ref named = detail::internals::make_graph_ref(g.reg, *body);
  g.state->nodes.push_back(
      {node_kind::conditional, detail::ends(*g.state), nullptr, std::move(body), std::move(shared)});
  return named;
}

inline graph_exec graph_ref::instantiate() const {
  const detail::locked_graph g(*this, "instantiate");
  return detail::internals::make_exec(
      std::make_shared<detail::exec_state>(detail::exec_state{&g.reg, detail::copy_graph(g.reg, *g.state, false)}));
}

inline std::vector<node_info> graph_ref::nodes() const {
  const detail::locked_graph g(*this, "nodes");
  std::vector<node_info> infos;
  for (const detail::graph_node& node : g.state->nodes) {
    infos.push_back(
        {node.kind, node.after, node.inner ? detail::internals::make_graph_ref(g.reg, *node.inner) : graph_ref{}});
  }
  return infos;
}

inline graph::graph(graph&& other) noexcept
    : graph_ref(std::exchange(static_cast<graph_ref&>(other), {})), state_(std::move(other.state_)) {}

inline graph& graph::operator=(graph&& other) noexcept {
  if (this != &other) {
    reset();
    static_cast<graph_ref&>(*this) = std::exchange(static_cast<graph_ref&>(other), {});
    state_ = std::move(other.state_);
  }
  return *this;
}

inline graph::~graph() = default;

inline void graph::reset() noexcept {
  static_cast<graph_ref&>(*this) = {};
  state_.reset();
}

inline graph_exec& graph_exec::operator=(graph_exec&& other) noexcept {
  if (this != &other) {
    reset();
    state_ = std::move(other.state_);
  }
  return *this;
}

inline graph_exec::~graph_exec() { reset(); }

inline void graph_exec::reset() noexcept {
  if (!state_) return;
  {
    const std::lock_guard lock(state_->owner->mutex);
    (void)detail::invalidate_prohibited(*state_->owner);
  }
  state_.reset();
}

inline bool graph_exec::update(graph_ref from) {
  const std::shared_ptr<detail::exec_state>& exec = detail::internals::state(*this);
  std::shared_ptr<const detail::graph_state> former;
  const detail::locked_graph g(from, "update");
  if (&g.reg != exec->owner) detail::refuse("update: the graphs belong to different shared objects");
  if (!detail::same_topology(*exec->program, *g.state)) return false;
  former = std::exchange(exec->program, detail::copy_graph(g.reg, *g.state, false));
  return true;
}

inline void graph_exec::launch(stream_ref s) const {
  detail::check_phase("launch");
  const std::shared_ptr<detail::exec_state> exec = detail::internals::state(*this);
  detail::registry& reg = detail::owner_of(s, "launch");
  if (&reg != exec->owner) detail::refuse("launch: the stream and the graph belong to different shared objects");
  std::shared_ptr<detail::stream_state> target;
  const std::lock_guard lock(reg.mutex);
  target = detail::resolve(s, "launch");
  if (detail::capture* const c = detail::admit(reg, *target, "launch")) {
    detail::add_node(*c, *target, {node_kind::child, {}, nullptr, detail::copy_graph(reg, *exec->program, true)});
    ++reg.counts.nodes;
    return;
  }
  detail::operation op{.program = exec->program};
  if (exec->last) op.after.push_back(exec->last);
  exec->last = detail::enqueue(reg, target, std::move(op));
  ++reg.counts.operations;
}

}  // namespace host

inline void host_device::retain(graph_type graph, void* object, void (*destroy)(void*)) {
  std::shared_ptr<host::detail::retained> owned;  // calls destroy, whatever goes wrong from here on
  try {
    owned = std::make_shared<host::detail::retained>(object, destroy);
  } catch (...) {
    destroy(object);
    throw;
  }
  const host::detail::locked_graph g(graph, "retain");
  g.state->objects.push_back(owned);
}

}  // namespace holdfast::HOLDFAST_ABI

#endif
