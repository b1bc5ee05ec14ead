// SPDX-License-Identifier: Apache-2.0
// CUDA graphs over a padded query buffer, one for each row bucket, as an engine captures them for decoding.
//
// Part 1 is the usual code: one cached buffer, replaced whenever the row count changes. Its graphs keep the addresses of
// memory that has been freed. It runs in a process of its own, which does not survive.
// Part 2 is the same loop over holdfast::padded_query_buffer, on every resource that the device has.
//
//   example_01_captured_buckets [host|cuda]     the GPU, where there is one; else the host device
//
// Exit status 0: part 1 failed as it does in production, and in part 2 everything was as promised.
#include "engine_cache.hpp"
#include "stage.cuh"

#include <holdfast/holdfast.hpp>
#include <holdfast/kernel/pad_queries.cuh>
#include <holdfast/resource/async.hpp>
#include <holdfast/resource/cub_caching.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/malloc.hpp>

#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace demo {

using longs = long long;  // what printf calls an int64

std::int64_t bytes_of(std::int64_t rows) { return rows * row_bytes; }

std::string mib(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", static_cast<double>(bytes) / (1 << 20));
  return text;
}

// --- what differs between the devices: how much they are asked to do, and where memory comes from ----------------------

/// Row buckets, largest first: a decode batch is rounded up to the next one, and each has its graph.
std::vector<std::int64_t> buckets(holdfast::cuda_device) {
  return {2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 96, 64};
}
std::vector<std::int64_t> buckets(holdfast::host_device) {  // a sixteenth, so that a CPU needs only seconds
  return {128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4};
}

template <class Device>
struct pool {
  holdfast::any_resource<Device> memory;
  std::function<void()> flush;  ///< gives back to the device what nobody uses
};

std::vector<pool<holdfast::cuda_device>> pools(holdfast::cuda_device gpu) {
  holdfast::cub_caching_resource cub{gpu};
  engine_cache own{gpu};
  std::vector<pool<holdfast::cuda_device>> all{{cub, [cub]() mutable { cub.trim(); }},
                                               {own, [own]() mutable { own.flush(); }},
                                               {holdfast::malloc_resource{gpu}, [] {}}};
  int has_pools = 0;
  check(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, gpu.ordinal), "cudaDeviceGetAttribute");
  if (has_pools != 0) {
    holdfast::async_resource async{gpu};
    all.push_back({async, [async]() mutable { async.trim(); }});
  }
  all.push_back({holdfast::default_resource(gpu), [] {}});  // HOLDFAST_RESOURCE's, or vmm
  return all;
}

std::vector<pool<holdfast::host_device>> pools(holdfast::host_device host) {
  engine_cache own{host};
  return {{own, [own]() mutable { own.flush(); }},
          {holdfast::malloc_resource{host}, [] {}},
          {holdfast::default_resource(host), [] {}}};
}

// --- part 1: the usual code -------------------------------------------------------------------------------------------

/// One cached buffer, replaced whenever the row count changes.
template <class Device>
class cached_buffer {
 public:
  cached_buffer(holdfast::any_resource<Device> memory, const stream_of<Device>& stream)
      : memory_(std::move(memory)), stream_(&stream) {}

  bf16* get(std::int64_t rows) {
    if (rows != rows_) {
      memory_.deallocate(*stream_, data_, size(rows_), 256);
      data_ = static_cast<bf16*>(memory_.allocate(*stream_, size(rows), 256));
      Device::fill(*stream_, data_, std::byte{0}, size(rows));  // the padding
      rows_ = rows;
    }
    return data_;
  }

 private:
  static std::size_t size(std::int64_t rows) { return static_cast<std::size_t>(bytes_of(rows)); }

  holdfast::any_resource<Device> memory_;
  const stream_of<Device>* stream_;
  bf16* data_ = nullptr;
  std::int64_t rows_ = 0;
};

enum outcome : int { nothing_happened = 0, illegal_address = 40, tenant_overwritten = 41 };

/// Runs to its end in a child process, and prints what it sees on the way.
template <class Device>
outcome usual_code(Device device) {
  constexpr std::int64_t heads = 16;
  const std::vector<std::int64_t> rows = buckets(device);
  const pool<Device> cache = pools(device).front();
  model<Device> m{device, heads, rows.front()};
  cached_buffer<Device> q_pad{cache.memory, m.stream()};

  const auto step = [&](std::int64_t n) {
    bf16* const q = q_pad.get(n);
    holdfast::pad_queries(m.stream(), m.queries(n), real_heads(q, n, heads));
    m.attend_all_heads(q, n);
  };
  std::vector<graph_of<Device>> graphs;
  for (const std::int64_t n : rows) {
    step(n);  // warm-up: replaces the buffer, which the capture then finds in the cache
    graphs.push_back(capture<Device>(m.stream(), [&] { step(n); }));
  }
  const auto replay = [&](std::size_t i) { return m.right_rows(rows[i], [&] { launch(graphs[i], m.stream()); }); };

  const auto say = [](const std::string& what) {
    std::printf("   %-42s ", (what + ":").c_str());
    std::fflush(stdout);
  };
  std::int64_t right = 0, replayed = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    right += replay(i);
    replayed += rows[i];
  }
  say("the graphs replayed");
  std::printf("%lld of %lld rows right\n", longs{right}, longs{replayed});

  std::int64_t overwritten = 0;
  {
    const tenant<Device> other{cache.memory, m.stream(), bytes_of(rows.front())};
    right = replay(0);
    overwritten = other.overwritten_bytes();
  }
  say("somebody else allocates " + mib(bytes_of(rows.front())) + " MiB, replay");
  std::printf("%lld of %lld rows right, %s MiB of theirs overwritten\n", longs{right}, longs{rows.front()},
              mib(overwritten).c_str());

  cache.flush();
  say("they leave, the cache is flushed, replay");
  std::signal(SIGSEGV, SIG_DFL);  // from here on it is what the demonstration is about
  try {
    static_cast<void>(replay(0));
  } catch (const holdfast::device_error& e) {
    if (e.code() != cudaErrorIllegalAddress) {
      throw;
    }
    std::_Exit(illegal_address);  // no destructor could do anything with this context
  }
  return overwritten != 0 ? tenant_overwritten : nothing_happened;
}

/// Runs this program once more, for the usual code. True: it failed as it does in production.
bool show_usual_code(std::string device) {
  std::printf("1. The usual code: one cached buffer, replaced whenever the row count changes\n");
  std::fflush(stdout);
  std::string program{"/proc/self/exe"}, part{"usual-code"};
  char* const arguments[] = {program.data(), device.data(), part.data(), nullptr};
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) != 0 ||
      waitpid(child, &status, 0) != child) {
    std::printf("   could not be started\n\n");
    return false;
  }
  const int ended = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
  const bool as_expected = killed || ended == illegal_address || ended == tenant_overwritten;
  std::printf("%s\n\n", killed                        ? "SIGSEGV, the process is dead"
                        : ended == illegal_address    ? "cudaErrorIllegalAddress, the context is lost"
                        : ended == tenant_overwritten ? "no fault; the corruption stays silent"
                                                      : "\n   NOT AS EXPECTED: it should have failed");
  return as_expected;
}

// --- part 2: Holdfast -------------------------------------------------------------------------------------------------

/// What the engines over one resource have shown.
struct findings {
  std::int64_t held = 0, retired = 0;              ///< bytes after the captures: the buffer's, and kept for graphs
  std::int64_t grown_held = 0, grown_retired = 0;  ///< the same after growth
  std::int64_t steps = 0, right = 0;               ///< replays and eager steps; those whose every row was right
  std::int64_t overwritten = 0;                    ///< bytes of other tenants
  std::int64_t dirty = 0;                          ///< elements of padding that are not zero
  std::int64_t kept = 0;                           ///< bytes that did not come back after the last graph was destroyed
};

/// A request larger than any bucket: it runs eagerly, and the buffer has to grow for it.
std::int64_t prefill_rows(std::int64_t largest_bucket) { return largest_bucket + largest_bucket / 4; }

/// Waits until the library has given everything back; returns the bytes that it keeps all the same.
template <class Device>
std::int64_t kept_bytes(Device device) {
  const holdfast::byte_counts& counts = holdfast::counts(device);
  const auto kept = [&] { return counts.pinned_bytes() + counts.retired_bytes() + counts.pending_bytes(); };
  for (int i = 0; i < 5000 && kept() != 0; ++i) {
    holdfast::collect(device);
    std::this_thread::sleep_for(std::chrono::milliseconds{1});  // a device reports the end of a graph a little later
  }
  return static_cast<std::int64_t>(kept());
}

/// An engine captures `rows`, in that order, and serves a few requests.
template <class Device>
void run_engine(model<Device>& m, const pool<Device>& cache, const std::vector<std::int64_t>& rows, findings& found) {
  const std::int64_t largest = *std::max_element(rows.begin(), rows.end());
  std::optional<holdfast::lane<Device>> decode{cache.memory};
  auto& q_pad =
      decode->template padded_queries<bf16>({.heads = m.heads(), .padded_heads = padded_heads, .head_dim = head_dim});

  std::map<const bf16*, std::int64_t> recorded;  // addresses in graphs, and the rows used there
  const auto step = [&](std::int64_t n) {
    // [step]
    const auto q = q_pad.acquire(m.stream(), n);                      // capturing or not
    holdfast::pad_queries(m.stream(), m.queries(n), q.heads_view());  // or any fused producer of yours
    m.attend_all_heads(q.data(), n);                                  // reads all 64 heads
    // [/step]
    return q.data();
  };

  std::vector<graph_of<Device>> graphs;
  for (const std::int64_t n : rows) {
    graphs.push_back(capture<Device>(m.stream(), [&] {
      std::int64_t& used = recorded[step(n)];
      used = std::max(used, n);
    }));
  }
  found.held = bytes_of(q_pad.capacity());
  found.retired = static_cast<std::int64_t>(q_pad.retired_bytes());

  const auto judge = [&](std::int64_t n, const auto& work) {
    ++found.steps;
    found.right += m.right_rows(n, work) == n ? 1 : 0;
  };
  for (std::int64_t request = 0; request < model<Device>::requests; ++request) {
    cache.flush();
    const tenant<Device> other{cache.memory, m.stream(), bytes_of(largest)};
    m.arrive(request);
    if (request == 1) {
      judge(prefill_rows(largest), [&] { step(prefill_rows(largest)); });
      found.grown_held = bytes_of(q_pad.capacity());
      found.grown_retired = static_cast<std::int64_t>(q_pad.retired_bytes());
    }
    if (request == 2) {
      decode.reset();  // the buffer is gone; the graphs are not
    }
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      const std::size_t at = (i + static_cast<std::size_t>(request) * 5) % graphs.size();
      judge(rows[at], [&] { launch(graphs[at], m.stream()); });
    }
    found.overwritten += other.overwritten_bytes();
  }
  for (const auto& [q, n] : recorded) {
    found.dirty += m.dirty_padding(q, n);
  }
  graphs.clear();
  found.kept += kept_bytes(cache.memory.device());
}

/// True: everything was as promised.
template <class Device>
bool show_holdfast(Device device) {
  std::vector<std::int64_t> rows = buckets(device);
  const std::int64_t largest = rows.front();
  std::int64_t each = 0;
  for (const std::int64_t n : rows) {
    each += bytes_of(n);
  }
  std::printf(
      "2. Holdfast: the same loop over padded_query_buffer (8, 16 and 32 real heads)\n"
      "   Between requests the cache is flushed and somebody else allocates; an eager request of %lld rows\n"
      "   makes the buffer grow; then the engine destroys it, and replays on.\n\n",
      longs{prefill_rows(largest)});
  std::printf("   %-21s %-15s %-12s %-13s %-14s %-8s %s\n", "resource", "captured", "MiB held", "after growth",
              "outputs right", "padding", "other tenants");

  model<Device> models[] = {
      {device, 8, prefill_rows(largest)}, {device, 16, prefill_rows(largest)}, {device, 32, prefill_rows(largest)}};
  bool all_as_promised = true;
  for (const pool<Device>& cache : pools(device)) {
    for (const char* order : {"largest first", "smallest first"}) {
      findings found;
      for (model<Device>& m : models) {
        run_engine(m, cache, rows, found);
      }
      const auto sum = [](std::int64_t held, std::int64_t retired) {
        return mib(held) + (retired == 0 ? "" : " + " + mib(retired));
      };
      const std::string outputs = std::to_string(found.right) + " of " + std::to_string(found.steps);
      std::printf("   %-21s %-15s %-12s %-13s %-14s %-8s %s\n", cache.memory.persistent().name(), order,
                  sum(found.held, found.retired).c_str(), sum(found.grown_held, found.grown_retired).c_str(),
                  outputs.c_str(), found.dirty == 0 ? "zero" : "DIRTY",
                  found.overwritten == 0 ? "intact" : "OVERWRITTEN");
      std::fflush(stdout);

      const bool once = rows.front() == largest ? found.held == bytes_of(largest) && found.retired == 0
                                                : found.held >= bytes_of(largest) && found.retired < found.held;
      const bool as_promised =
          once && found.right == found.steps && found.overwritten == 0 && found.dirty == 0 && found.kept == 0;
      if (found.kept != 0) {
        std::printf("   %lld bytes did not come back after the graphs were destroyed\n", longs{found.kept});
      }
      all_as_promised = all_as_promised && as_promised;
      std::reverse(rows.begin(), rows.end());
    }
  }
  std::printf(
      "\n   MiB: in the buffer + what it grew out of, kept for the graphs that recorded it and given back with them.\n"
      "   A buffer for each bucket would hold %s MiB.\n\n",
      mib(each).c_str());
  return all_as_promised;
}

template <class Device>
int run(Device device, const std::string& description, bool usual_code_only) {
  if (usual_code_only) {
    const rlimit no_core_dump{0, 0};
    setrlimit(RLIMIT_CORE, &no_core_dump);
    std::signal(SIGSEGV, [](int) { std::_Exit(1); });
    return usual_code(device);
  }
  const std::vector<std::int64_t> rows = buckets(device);
  std::printf(
      "Graphs over one padded query buffer, on %s\n"
      "   [rows, 64, 512] bf16, a graph for each of %zu row buckets from %lld down to %lld\n\n",
      description.c_str(), rows.size(), longs{rows.front()}, longs{rows.back()});
  const bool failed = show_usual_code(Device::name);
  const bool held = show_holdfast(device);
  std::printf("%s\n", failed && held ? "All as promised." : "NOT AS PROMISED: see above.");
  return failed && held ? 0 : 1;
}

int run(std::string_view device, bool usual_code_only) {
  int gpus = 0;
  if (device != "host" && (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)) {
    static_cast<void>(cudaGetLastError());
    if (device == "cuda") {
      std::printf("There is no GPU here.\n");
      return 1;
    }
    device = "host";
  }
  if (device == "host") {
    return run(holdfast::host_device{}, "the host device (row buckets divided by 16)", usual_code_only);
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return run(holdfast::cuda_device{}, properties.name, usual_code_only);
}

}  // namespace demo

int main(int argc, char** argv) {
  try {
    return demo::run(argc > 1 ? argv[1] : "", argc > 2 && std::string_view{argv[2]} == "usual-code");
  } catch (const std::exception& e) {
    std::fflush(stdout);
    std::fprintf(stderr, "\n%s\n", e.what());
    return 1;
  }
}
