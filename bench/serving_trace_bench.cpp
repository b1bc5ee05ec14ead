// SPDX-License-Identifier: Apache-2.0
// What a pool holds of the device while it serves an engine, against what the engine itself holds at its peak.
//
//   peak_over_live   the most that is gone from the device's free memory / the most bytes that are allocated at once
//   ns_per_call      host time of an allocation or a release, in a second play that looks at nothing else
//
// The trace is made here, from a seed: steps of an engine with two streams. Decode steps of growing batches alternate with
// prefills of 128 to 8192 tokens; both allocate and free the activations of eight layers in the order of a transformer;
// each request holds a block that grows with its length, by allocating the larger one before the smaller is freed, until it
// ends. `HOLDFAST_TRACE=FILE` plays a trace that a logging_resource wrote instead. All pools play the same one, each from
// nothing; pools that use device memory in another way than they say cannot hide it.
#include "foreign/foreign.hpp"
#include "support/host.hpp"
#include "support/pools.hpp"

#include <holdfast/resource/logging.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace {

using holdfast::trace_event;
using holdfast::trace_op;

// --- the trace --------------------------------------------------------------------------------------------------------

/// An engine that serves: its allocations and releases, as a logging_resource would have seen them.
class engine {
 public:
  [[nodiscard]] static std::vector<trace_event> serve(std::size_t steps) {
    engine made;
    for (std::size_t step = 0; step < steps; ++step) made.step();
    for (request& one : made.running_) made.free(one.grown);
    return std::move(made.events_);
  }

 private:
  struct block {
    std::uint64_t number = 0;
    std::uint64_t bytes = 0;
    std::uint32_t stream = 0;
  };
  struct request {
    std::uint64_t length, ends;
    block grown;
  };
  static constexpr std::uint32_t decode = 0, prefill = 1;
  static constexpr std::uint64_t hidden = 7168, heads = 16, head_dim = 512, element = 2;

  void step() {
    if (running_.size() < 96 && random_() % 4 == 0) {
      const std::uint64_t tokens = 128 + random_() % 8065;
      layers(tokens, prefill);
      running_.push_back({tokens, tokens + 64 + random_() % 1024, allocate(tokens * per_token, decode)});
      return;
    }
    if (running_.empty()) return;
    layers(running_.size(), decode);
    for (request& one : running_) {
      one.length += 4;  // a few tokens at a time
      const std::uint64_t needed = one.length * per_token;
      if (needed > one.grown.bytes) {  // by a quarter, as vectors grow
        const block larger = allocate(needed + needed / 4, decode);
        free(one.grown);
        one.grown = larger;
      }
    }
    std::erase_if(running_, [this](request& one) {
      if (one.length < one.ends) return false;
      free(one.grown);
      return true;
    });
  }

  /// The activations of a pass over `tokens`.
  void layers(std::uint64_t tokens, std::uint32_t stream) {
    block x = allocate(tokens * hidden * element, stream);
    for (int layer = 0; layer < 8; ++layer) {
      const block latent = allocate(tokens * (1536 + 576) * element, stream);
      const block q = allocate(tokens * heads * head_dim * element, stream);
      const block scratch = allocate((std::min<std::uint64_t>(tokens, 256) * 512 + 128) * 512, stream);
      const block attended = allocate(tokens * heads * head_dim * element, stream);
      free(latent);
      free(scratch);
      free(q);
      const block projected = allocate(tokens * hidden * element, stream);
      free(attended);
      const block wide = allocate(tokens * 2 * 2048 * element, stream);
      const block down = allocate(tokens * hidden * element, stream);
      free(wide);
      free(projected);
      free(x);
      x = down;
    }
    const block logits = allocate(std::min<std::uint64_t>(tokens, 96) * 129280 * 4, stream);
    free(x);
    free(logits);
  }

  block allocate(std::uint64_t bytes, std::uint32_t stream) {
    events_.push_back(
        {.op = trace_op::allocate, .pointer = ++numbers_, .bytes = bytes, .alignment = 256, .stream = stream});
    return {numbers_, bytes, stream};
  }
  void free(const block& b) {
    events_.push_back(
        {.op = trace_op::deallocate, .pointer = b.number, .bytes = b.bytes, .alignment = 256, .stream = b.stream});
  }

  static constexpr std::uint64_t per_token = 1152;  // bytes of a request's own block
  std::mt19937_64 random_{7};
  std::uint64_t numbers_ = 0;
  std::vector<request> running_;
  std::vector<trace_event> events_;
};

const std::vector<trace_event>& trace() {
  static const std::vector<trace_event> events = [] {
    const char* path = std::getenv("HOLDFAST_TRACE");
    if (path == nullptr) return engine::serve(1500);
    std::ifstream file{path};
    return holdfast::read_trace(file);
  }();
  return events;
}

std::uint64_t peak_live() {
  std::uint64_t live = 0, peak = 0;
  for (const trace_event& event : trace()) {
    live += event.op == trace_op::allocate ? event.bytes : 0;
    live -= event.op == trace_op::deallocate ? event.bytes : 0;
    peak = std::max(peak, live);
  }
  return peak;
}

// --- the play ---------------------------------------------------------------------------------------------------------

/// Every allocation and release of the trace, on as many streams as it has; calls `look()` after each allocation.
template <class Device, class Pool, class Look>
void play(Pool& pool, const Look& look) {
  std::uint32_t streams = 0;
  for (const trace_event& event : trace()) streams = std::max(streams, event.stream + 1);
  const std::vector<bench::stream_of<Device>> owners(streams);
  std::unordered_map<std::uint64_t, void*> live;
  for (const trace_event& event : trace()) {
    const typename Device::stream_type on = owners[event.stream];
    if (event.op == trace_op::allocate && event.ok) {
      live.emplace(event.pointer, pool.allocate(on, event.bytes));
      look();
    } else if (event.op == trace_op::deallocate) {
      const auto found = live.find(event.pointer);
      pool.deallocate(on, found->second, event.bytes);
      live.erase(found);
    }
  }
  for (const auto& owner : owners) Device::synchronize(owner);
}

template <class Device, class Make>
void serve(benchmark::State& state, Device device, Make make) {
  for (auto _ : state) {
    const std::uint64_t before = device.memory().free;
    std::uint64_t least = before;
    {
      auto pool = make();
      play<Device>(pool, [&] { least = std::min<std::uint64_t>(least, device.memory().free); });
    }
    auto pool = make();
    play<Device>(pool, [] {});  // now it is warm
    const double ns = bench::nanoseconds([&] { play<Device>(pool, [] {}); }, 1);
    const auto live = static_cast<double>(peak_live());
    state.counters["peak_live_MiB"] = live / (1 << 20);
    state.counters["peak_held_MiB"] = static_cast<double>(before - least) / (1 << 20);
    state.counters["peak_over_live"] = static_cast<double>(before - least) / live;
    state.counters["ns_per_call"] = ns / static_cast<double>(trace().size());
    state.SetIterationTime(ns * 1e-9);
  }
}

template <class Device, class Make>
void add(const std::string& name, Device device, Make make) {
  benchmark::RegisterBenchmark(("serving/" + name).c_str(), serve<Device, Make>, device, make)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(1);
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_on_either(argc, argv, []<class Device>(Device device) {
    add("caching", device, [device] { return bench::caching_pool<Device>{device}; });
    if constexpr (std::is_same_v<Device, holdfast::cuda_device>) {
      for (const bench::foreign_kind& kind : bench::foreign_kinds()) {
        add(kind.name, device, [make = kind.make] { return bench::foreign_handle{make()}; });
      }
    }
  });
}
