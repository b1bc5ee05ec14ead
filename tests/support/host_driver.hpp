// The driver of the host device.
#pragma once

#include "driver.hpp"

#include <holdfast/device/host.hpp>

#include <cstddef>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace support {

template <>
struct driver<holdfast::host_device> {
  using device = holdfast::host_device;
  using stream_type = device::stream_type;
  using graph_type = device::graph_type;
  using stream = holdfast::host::stream;
  using exec = holdfast::host::graph_exec;

  class graph {
   public:
    graph() = default;
    explicit graph(holdfast::host::graph owned) : owned_(std::move(owned)), named_(owned_.get()) {}
    explicit graph(graph_type named) : named_(named) {}
    graph(graph&& other) noexcept : owned_(std::move(other.owned_)), named_(std::exchange(other.named_, {})) {}
    graph& operator=(graph&& other) noexcept {
      owned_ = std::move(other.owned_);
      named_ = std::exchange(other.named_, {});
      return *this;
    }
    ~graph() = default;

    [[nodiscard]] graph_type get() const { return named_; }
    [[nodiscard]] explicit operator bool() const { return static_cast<bool>(named_); }
    void reset() {
      named_ = {};
      owned_.reset();
    }

   private:
    holdfast::host::graph owned_;
    graph_type named_;
  };

  static std::string missing() { return {}; }

  static stream make_stream(stream_kind kind = stream_kind::non_blocking, device d = {}) {
    return stream(d, kind == stream_kind::blocking ? holdfast::host::stream_kind::blocking
                                                   : holdfast::host::stream_kind::non_blocking);
  }

  static void begin_capture(stream_type s, capture_mode mode = capture_mode::thread_local_) {
    s.begin_capture(native(mode));
  }

  static void begin_capture_to(stream_type s, graph_type into, capture_mode mode = capture_mode::thread_local_) {
    s.begin_capture_to(into, native(mode));
  }

  static graph end_capture(stream_type s) {
    const graph_type named = device::capturing(s).graph;
    try {
      holdfast::host::graph ended = s.end_capture();
      return ended ? graph(std::move(ended)) : graph(named);
    } catch (const holdfast::device_error& e) {
      const auto code = static_cast<holdfast::host::status>(e.code());
      if (code == holdfast::host::status::capture_invalidated || code == holdfast::host::status::capture_unjoined) {
        return {};
      }
      throw;
    }
  }

  static graph make_graph() { return graph(holdfast::host::make_graph()); }
  static graph clone(const graph& g) { return graph(g.get().clone()); }
  static void add_child(graph& parent, const graph& child) { parent.get().add_child(child.get()); }
  static graph_type add_conditional_body(graph& parent) {
    return parent.get().add_conditional([] { return true; });
  }
  static exec instantiate(const graph& g) { return g.get().instantiate(); }
  static bool update(exec& e, const graph& g) { return e.update(g.get()); }
  static void launch(exec& e, stream_type s) { e.launch(s); }

  static node_counts count(const graph& g) { return count(g.get()); }

  static void synchronize(stream_type s) { device::synchronize(s); }

  static void fork(stream_type from, stream_type to) {
    device::event e(device::of(from));
    e.record(from);
    device::wait(to, e);
  }

  static void* allocate(std::size_t bytes) { return ::operator new (bytes, std::align_val_t{256}); }
  static void deallocate(void* p) { ::operator delete (p, std::align_val_t{256}); }

  template <class T>
  static std::vector<T> read(const T* p, std::size_t n) {
    std::vector<T> values(n);
    if (n != 0) std::memcpy(static_cast<void*>(values.data()), p, n * sizeof(T));
    return values;
  }

  template <class T>
  static void write(T* p, const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(static_cast<void*>(p), values.data(), values.size() * sizeof(T));
  }

  static bool unsafe_call() {
    try {
      holdfast::host::unsafe_call("a test's unsafe call");
      return false;
    } catch (const holdfast::device_error&) {
      return true;
    }
  }

  static capture_mode exchange_thread_mode(capture_mode mode) {
    switch (holdfast::host::exchange_capture_mode(native(mode))) {
      case holdfast::host::capture_mode::global: return capture_mode::global;
      case holdfast::host::capture_mode::thread_local_: return capture_mode::thread_local_;
      default: return capture_mode::relaxed;
    }
  }

  static stream_type legacy_stream() { return holdfast::host::legacy_stream(); }
  static stream_type per_thread_stream() { return holdfast::host::per_thread_stream(); }

 private:
  static holdfast::host::capture_mode native(capture_mode mode) {
    switch (mode) {
      case capture_mode::global: return holdfast::host::capture_mode::global;
      case capture_mode::thread_local_: return holdfast::host::capture_mode::thread_local_;
      default: return holdfast::host::capture_mode::relaxed;
    }
  }

  static node_counts count(graph_type g) {
    node_counts sum;
    for (const holdfast::host::node_info& node : g.nodes()) {
      switch (node.kind) {
        case holdfast::host::node_kind::kernel: ++sum.kernels; break;
        case holdfast::host::node_kind::memset: ++sum.memsets; break;
        case holdfast::host::node_kind::memcpy: ++sum.memcpys; break;
        case holdfast::host::node_kind::child: ++sum.children; break;
        case holdfast::host::node_kind::conditional: ++sum.conditionals; break;
      }
      if (!node.inner) continue;
      const node_counts inner = count(node.inner);
      sum.kernels += inner.kernels;
      sum.memsets += inner.memsets;
      sum.memcpys += inner.memcpys;
      sum.memory += inner.memory;
      sum.children += inner.children;
      sum.conditionals += inner.conditionals;
      sum.others += inner.others;
    }
    return sum;
  }
};

}  // namespace support
