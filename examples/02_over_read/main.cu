// SPDX-License-Identifier: Apache-2.0
// A consumer that reads 128 rows further than it was told, as TensorRT-LLM's DeepSeek-V4 sparse attention does through its
// TMA descriptor, over the per-call FP8 scratch of an NVFP4 cache.
//
// Part 1 is the usual code: scratch as large as its rows. At the end of its mapping every such call faults; anywhere else
// it reads what somebody else has stored, and nothing tells. Calls that may fault run in processes of their own.
// Part 2 is the same consumer over holdfast::tail_padded_allocator, eager and captured, on every resource of the device.
//
//   example_02_over_read [host|cuda]     the GPU, where there is one; else the host device
//
// Exit status 0: in part 1 exactly the calls failed that should, every time, and in part 2 everything was as promised.
#include "stage.cuh"
#include "used_memory.hpp"

#include <holdfast/holdfast.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/guard.hpp>
#include <holdfast/tail_padded_allocator.hpp>

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
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace demo {

using longs = long long;  // what printf calls an int64

std::int64_t bytes_of(std::int64_t rows) { return rows * row_bytes; }

/// "16 KiB"
std::string size(std::int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB"};
  auto number = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; number >= 1024 && unit < 3; ++unit) {
    number /= 1024;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.4g %s", number, units[unit]);
  return text;
}

std::string of(std::int64_t some, std::int64_t all) { return std::to_string(some) + " of " + std::to_string(all); }

// --- what differs between the devices: how a fault shows, how much they are asked to do, and where memory comes from ---

std::string fault(holdfast::cuda_device) { return "cudaErrorIllegalAddress"; }
std::string fault(holdfast::host_device) { return "SIGSEGV"; }

std::int64_t topk(holdfast::cuda_device) { return 512; }
std::int64_t topk(holdfast::host_device) { return 32; }  // a sixteenth, so that a CPU needs only seconds

template <class Device>
struct source {
  holdfast::any_resource<Device> memory;
  const char* behind;  ///< what lies behind an allocation
};

std::vector<source<holdfast::cuda_device>> sources(holdfast::cuda_device gpu) {
  std::vector<source<holdfast::cuda_device>> all{{holdfast::guard_resource{gpu}, "nothing"},
                                                 {holdfast::cub_caching_resource{gpu}, "anything"},
                                                 {holdfast::malloc_resource{gpu}, "anything"}};
  int has_pools = 0;
  check(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, gpu.ordinal), "cudaDeviceGetAttribute");
  if (has_pools != 0) {
    all.push_back({holdfast::async_resource{gpu}, "anything"});
  }
  all.push_back({holdfast::default_resource(gpu), "anything"});  // HOLDFAST_RESOURCE's
  return all;
}

std::vector<source<holdfast::host_device>> sources(holdfast::host_device host) {
  return {{holdfast::guard_resource{host}, "nothing"},
          {holdfast::malloc_resource{host}, "nothing"},
          {holdfast::default_resource(host), "nothing"}};
}

// --- part 1: the usual code -------------------------------------------------------------------------------------------

constexpr std::int64_t scratch_rows = 32;                   // as small as it gets in production
constexpr std::int64_t segment_bytes = 2 << 20;             // what caching allocators cut small allocations from
constexpr std::int64_t tail_bytes = tile_rows * row_bytes;  // 64 KiB
constexpr int illegal_address = 40;                         // a child's exit status

/// The end of a segment behind which nothing is mapped. It stays with the process.
template <class Device>
std::byte* segment_end(Device device, const stream_of<Device>& stream) {
  holdfast::guard_resource<Device> memory{device};
  return static_cast<std::byte*>(memory.allocate(stream, std::size_t{segment_bytes}, 256)) + segment_bytes;
}

/// The consumer over scratch that ends `gap` bytes before its segment does. Runs to its end in a child process.
template <class Device>
int read_beyond(Device device, std::int64_t gap, std::int64_t beyond) {
  const stream_of<Device> stream;
  const array<std::uint32_t, Device> out{device, stream, scratch_rows + beyond};
  const auto* const end = segment_end(device, stream);
  const auto* const scratch = reinterpret_cast<const fp8*>(end - gap - bytes_of(scratch_rows));

  attend(stream, scratch, scratch_rows, beyond, out.data());
  if constexpr (std::is_same_v<Device, holdfast::host_device>) {
    std::signal(SIGSEGV, SIG_DFL);  // from here on it is what the demonstration is about
  }
  try {
    Device::synchronize(stream);
  } catch (const holdfast::device_error& e) {
    if (e.code() != cudaErrorIllegalAddress) {
      throw;
    }
    std::_Exit(illegal_address);  // no destructor could do anything with this context
  }
  return 0;
}

/// Runs this program once more, for that. Returns what became of it.
std::string outcome(std::string device, std::int64_t gap, std::int64_t beyond) {
  std::string program{"/proc/self/exe"}, gap_text = std::to_string(gap), beyond_text = std::to_string(beyond);
  char* const arguments[] = {program.data(), device.data(), gap_text.data(), beyond_text.data(), nullptr};
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) != 0 ||
      waitpid(child, &status, 0) != child) {
    return "not started";
  }
  if (WIFSIGNALED(status)) {
    return WTERMSIG(status) == SIGSEGV ? "SIGSEGV" : "signal " + std::to_string(WTERMSIG(status));
  }
  return WEXITSTATUS(status) == 0                 ? "passes"
         : WEXITSTATUS(status) == illegal_address ? "cudaErrorIllegalAddress"
                                                  : "exit status " + std::to_string(WEXITSTATUS(status));
}

/// What the consumer sees in all rows that it reads, when the memory behind its scratch holds each of `neighbours`.
template <class Device>
std::vector<std::uint64_t> sums(Device device, const std::vector<std::byte>& neighbours) {
  const stream_of<Device> stream;
  const array<std::uint32_t, Device> out{device, stream, scratch_rows + tile_rows};
  std::byte* const neighbour = segment_end(device, stream) - tail_bytes;
  std::byte* const scratch = neighbour - bytes_of(scratch_rows);
  Device::fill(stream, scratch, std::byte{0x01}, static_cast<std::size_t>(bytes_of(scratch_rows)));

  std::vector<std::uint64_t> seen;
  for (const std::byte stored : neighbours) {
    Device::fill(stream, neighbour, stored, static_cast<std::size_t>(tail_bytes));
    attend(stream, reinterpret_cast<const fp8*>(scratch), scratch_rows, tile_rows, out.data());
    const auto rows = out.download(scratch_rows + tile_rows);
    seen.push_back(std::accumulate(rows.begin(), rows.end(), std::uint64_t{0}));
  }
  return seen;
}

/// True: exactly the calls failed that should.
template <class Device>
bool show_usual_code(Device device) {
  constexpr int repetitions = 4;
  std::printf(
      "1. The usual code: scratch of %lld rows (%s), cut from a segment of %s\n\n"
      "   %-27s %-19s %s\n",
      longs{scratch_rows}, size(bytes_of(scratch_rows)).c_str(), size(segment_bytes).c_str(), "where in the segment",
      "rows read too far", ("in " + std::to_string(repetitions) + " processes").c_str());

  const struct {
    std::int64_t gap, beyond;
    std::string expected;
  } cases[] = {
      {0, 0, "passes"}, {0, 1, fault(device)}, {0, tile_rows, fault(device)}, {tail_bytes, tile_rows, "passes"}};
  bool as_expected = true;
  for (const auto& [gap, beyond, expected] : cases) {
    std::map<std::string, int> seen;
    for (int i = 0; i < repetitions; ++i) {
      ++seen[outcome(Device::name, gap, beyond)];
    }
    std::printf("   %-27s %-19lld", gap == 0 ? "at its end" : (size(gap) + " before its end").c_str(), longs{beyond});
    for (const auto& [what, times] : seen) {
      std::printf(" %s: %d", what.c_str(), times);
    }
    const bool every_time = seen.size() == 1 && seen.begin()->first == expected;
    std::printf("%s\n", every_time ? "" : ("   NOT AS EXPECTED: " + expected + ", every time").c_str());
    std::fflush(stdout);
    as_expected = as_expected && every_time;
  }

  const auto seen = sums(device, {std::byte{0x11}, std::byte{0x22}});
  std::printf(
      "\n   Where it passes, it reads a neighbour. The sum over the rows read is %llu while 0x11 lies there, and\n"
      "   %llu with 0x22: %s. Where a scratch lies is up to the history of its\n"
      "   allocator, so production saw the fault in about 15 %% of its runs.\n\n",
      static_cast<unsigned long long>(seen[0]), static_cast<unsigned long long>(seen[1]),
      seen[0] != seen[1] ? "somebody else's bytes, and no error" : "NOT AS EXPECTED, these should differ");
  std::fflush(stdout);
  return as_expected && seen[0] != seen[1];
}

// --- part 2: Holdfast -------------------------------------------------------------------------------------------------

struct call {
  std::string what;
  std::int64_t rows;
};

/// Generation: [batch, topk, 512], a graph for each batch size.
std::vector<call> generation_calls(std::int64_t topk) {
  std::vector<call> calls;
  for (const std::int64_t batch : {64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1}) {
    calls.push_back({"generation [" + std::to_string(batch) + ", " + std::to_string(topk) + ", 512]", batch * topk});
  }
  return calls;
}

/// Context: [rows, 1, 512], of a layer that keeps a row for each 128 tokens. The bound is known on the host.
call context_call(std::int64_t tokens, std::int64_t topk) {
  constexpr std::int64_t ratio = 128;
  const std::int64_t pairs = tokens * topk;
  return {"context of " + std::to_string(tokens) + " tokens / 128",
          std::max<std::int64_t>(1, std::min(tokens / ratio, pairs))};
}

/// What an engine over one resource has shown.
struct findings {
  struct {
    std::int64_t calls = 0;
    std::int64_t right = 0;  ///< those whose every row was right
    std::int64_t zero = 0;   ///< those that found zeros further on
  } eager, replayed;
  std::int64_t held = 0;  ///< bytes that the lane holds for all captured calls
  std::int64_t kept = 0;  ///< bytes that did not come back after the last graph was destroyed
};

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

/// An engine captures every call, in that order and in all its layers, and serves: graphs and eager calls take turns.
template <class Device>
findings run_engine(const model<Device>& m, const holdfast::any_resource<Device>& memory,
                    const std::vector<call>& calls) {
  findings found;
  std::optional<holdfast::lane<Device>> decode{memory};
  std::optional<holdfast::tail_padded_allocator<fp8, Device>> allocator;
  allocator.emplace(*decode, holdfast::scratch_options{.row_elements = row_elements,
                                                       .over_read = holdfast::over_read::rows_beyond(tile_rows),
                                                       .row_alignment = 16});

  const auto step = [&](std::int64_t rows, std::int64_t layer) {
    // [step]
    const auto kv = holdfast::gather_rows(m.stream(), m.cache(), m.indices(rows, layer), *allocator);
    m.attend_too_far(kv.data(), rows, layer);  // reads 128 rows too far
    // [/step]
  };

  std::vector<graph_of<Device>> graphs;
  for (const call& c : calls) {
    graphs.push_back(capture<Device>(m.stream(), [&] {
      for (std::int64_t layer = 0; layer < layers; ++layer) {
        step(c.rows, layer);
      }
    }));
  }
  found.held = static_cast<std::int64_t>(decode->scratch_bytes());

  const auto judge = [&](auto& sum, std::int64_t rows, std::int64_t in_layers, const auto& work) {
    const auto seen = m.look(rows, in_layers, work);
    sum.calls += in_layers;
    sum.right += seen.right;
    sum.zero += seen.zero;
  };
  for (const bool engine_lives : {true, false}) {
    if (!engine_lives) {
      allocator.reset();
      decode.reset();  // the graphs are still there
    }
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      const std::size_t at = (i * 5) % graphs.size();  // large and small ones by turns
      judge(found.replayed, calls[at].rows, layers, [&] { launch(graphs[at], m.stream()); });
      if (engine_lives) {
        judge(found.eager, calls[i].rows, 1, [&] { step(calls[i].rows, 0); });
      }
    }
  }
  graphs.clear();
  found.kept = kept_bytes(memory.device());
  return found;
}

/// True: everything was as promised.
template <class Device>
bool show_holdfast(Device device) {
  const std::vector<call> generation = generation_calls(topk(device));
  const std::vector<call> context{context_call(131072, topk(device)), context_call(100, topk(device))};
  std::vector<call> calls = generation;
  calls.insert(calls.end(), context.begin(), context.end());
  std::stable_sort(calls.begin(), calls.end(), [](const call& a, const call& b) { return a.rows > b.rows; });

  std::printf(
      "2. Holdfast: the same consumer, 128 rows too far, over tail_padded_allocator\n\n"
      "   %-30s %8s %10s   %s\n",
      "call", "rows", "scratch", "tail");
  for (const call& c : {generation.front(), generation.back(), context.front(), context.back()}) {
    std::printf("   %-30s %8lld %10s + %s\n", c.what.c_str(), longs{c.rows}, size(bytes_of(c.rows)).c_str(),
                size(tail_bytes).c_str());
  }
  std::printf(
      "\n   Every resource hands out memory full of 0xff, NaN in FP8. All %zu calls are captured, each in\n"
      "   %lld layers; graphs and eager calls take turns; then the engine is destroyed, and its graphs replayed\n"
      "   once more.\n\n"
      "   %-21s %-12s %-14s %-15s %-7s %s\n",
      calls.size(), longs{layers}, "resource", "behind it", "eager right", "replayed right", "tails",
      "held in captures");

  std::fflush(stdout);

  const model<Device> m{device, 64 * topk(device), calls.front().rows};
  const std::int64_t largest = bytes_of(calls.front().rows) + tail_bytes;
  bool all_as_promised = true;
  for (const source<Device>& from : sources(device)) {
    const findings found = run_engine<Device>(m, used_memory<Device>{from.memory}, calls);
    const auto& [eager, replayed, held, kept] = found;
    const bool zero = eager.zero == eager.calls && replayed.zero == replayed.calls;
    std::printf("   %-21s %-12s %-14s %-15s %-7s %s\n", from.memory.name(), from.behind,
                of(eager.right, eager.calls).c_str(), of(replayed.right, replayed.calls).c_str(),
                zero ? "zero" : "DIRTY", size(held).c_str());
    if (kept != 0) {
      std::printf("   %lld bytes did not come back after the graphs were destroyed\n", longs{kept});
    }
    std::fflush(stdout);
    all_as_promised = all_as_promised && zero && eager.right == eager.calls && replayed.right == replayed.calls &&
                      held == largest && kept == 0;
  }

  std::int64_t each = 0;
  for (const call& c : calls) {
    each += layers * (bytes_of(c.rows) + tail_bytes);
  }
  std::printf(
      "\n   %lld layers x %zu batch sizes and %zu contexts in one lane hold the largest call, %s + %s.\n"
      "   Scratch of its own for each captured call would be %s.\n\n",
      longs{layers}, generation.size(), context.size(), size(largest - tail_bytes).c_str(), size(tail_bytes).c_str(),
      size(each).c_str());
  return all_as_promised;
}

template <class Device>
int run(Device device, const std::string& description) {
  std::printf("A consumer that reads %lld rows of %lld bytes too far, on %s\n\n", longs{tile_rows}, longs{row_bytes},
              description.c_str());
  std::fflush(stdout);
  const bool failed = show_usual_code(device);
  const bool held = show_holdfast(device);
  std::printf("%s\n", failed && held ? "All as promised." : "NOT AS PROMISED: see above.");
  return failed && held ? 0 : 1;
}

int run_child(std::string_view device, std::int64_t gap, std::int64_t beyond) {
  const rlimit no_core_dump{0, 0};
  setrlimit(RLIMIT_CORE, &no_core_dump);
  std::signal(SIGSEGV, [](int) { std::_Exit(1); });
  return device == "host" ? read_beyond(holdfast::host_device{}, gap, beyond)
                          : read_beyond(holdfast::cuda_device{}, gap, beyond);
}

int run(std::string_view device) {
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
    return run(holdfast::host_device{}, "the host device (top-k divided by 16)");
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return run(holdfast::cuda_device{}, properties.name);
}

}  // namespace demo

int main(int argc, char** argv) {
  try {
    return argc > 3 ? demo::run_child(argv[1], std::atoll(argv[2]), std::atoll(argv[3]))
                    : demo::run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& e) {
    std::fflush(stdout);
    std::fprintf(stderr, "\n%s\n", e.what());
    return 1;
  }
}
