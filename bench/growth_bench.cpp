// SPDX-License-Identifier: Apache-2.0
// What it costs a buffer to grow, and what it holds afterwards.
//
//   grow by N     microseconds on the host for a buffer of N bytes to become one of 2 N, memory usable at the end:
//                 in_place_us          vmm_resource::extend: one more mapping behind the old one
//                 allocate_copy_free_us  cudaMalloc, cudaMemcpyAsync, wait, cudaFree
//                 torch_like_us        a caching allocator's: cudaMalloc, nothing copied, the old memory kept in the cache
//   resident      MiB that a [rows, 64, 512] buffer of 16-bit elements holds after its buckets, 64 to 4096 rows, were
//                 captured in ascending order, every graph alive:
//                 in_place_MiB         padded_query_buffer on vmm_resource
//                 retiring_MiB         the same on malloc_resource: geometric, old blocks stay with their graphs
//                 torch_like_MiB       one grow-only tensor that is replaced: every predecessor stays with its graphs
//
// The strategies alternate in one process. Runs on the GPU where there is one, else on the host device, whose figures say
// nothing about CUDA's.
#include <holdfast/holdfast.hpp>
#include <holdfast/resource/malloc.hpp>
#include <holdfast/resource/vmm.hpp>

#include "support/host.hpp"

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

using bench::median;

template <class Work>
double microseconds(const Work& work) {
  return bench::nanoseconds(work, 1) * 1e-3;
}

template <class Device>
void grow(benchmark::State& state, Device device) {
  const auto bytes = static_cast<std::size_t>(state.range(0)) * MiB;
  const auto stream = device.library_stream();
  holdfast::vmm_resource<Device> vmm{device};
  holdfast::malloc_resource<Device> plain{device};
  const auto use = [&](void* p, std::size_t from) {  // memory is ready when it can be used
    Device::fill(stream, static_cast<std::byte*>(p) + from, std::byte{1}, 256);
    Device::synchronize(stream);
  };
  std::vector<double> in_place, copying, torch_like;
  for (auto _ : state) {
    void* p = vmm.allocate(stream, bytes, 256);
    in_place.push_back(microseconds([&] {
      if (!vmm.extend(stream, p, bytes, 2 * bytes)) state.SkipWithError("no room");
      use(p, bytes);
    }));
    vmm.deallocate(stream, p, 2 * bytes, 256);

    p = plain.allocate(stream, bytes, 256);
    void* grown = nullptr;
    copying.push_back(microseconds([&] {
      grown = plain.allocate(stream, 2 * bytes, 256);
      Device::copy(stream, grown, p, bytes);
      use(grown, bytes);
      plain.deallocate(stream, p, bytes, 256);
    }));
    plain.deallocate(stream, grown, 2 * bytes, 256);

    torch_like.push_back(microseconds([&] {
      grown = plain.allocate(stream, 2 * bytes, 256);
      use(grown, bytes);
    }));
    plain.deallocate(stream, grown, 2 * bytes, 256);
    state.SetIterationTime(in_place.back() * 1e-6);
  }
  state.counters["in_place_us"] = median(in_place);
  state.counters["allocate_copy_free_us"] = median(copying);
  state.counters["torch_like_us"] = median(torch_like);
}

constexpr std::int64_t buckets[] = {64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096};
constexpr holdfast::query_shape shape{.heads = 16, .padded_heads = 64, .head_dim = 512};
constexpr std::size_t row_bytes = 64 * 512 * 2;

/// Bytes that `resource` holds after all buckets were captured.
template <class Resource>
double resident(const Resource& resource) {
  using device = typename Resource::device_type;
  const bench::stream_of<device> stream;
  std::vector<decltype(stream.end_capture())> graphs;
  holdfast::padded_query_buffer<std::uint16_t, device> buffer{resource, shape};
  for (const std::int64_t rows : buckets) {
    stream.begin_capture();
    static_cast<void>(buffer.acquire(stream, rows));
    graphs.push_back(stream.end_capture());
  }
  return static_cast<double>(resource.held_bytes());
}

template <class Device>
void resident_bytes(benchmark::State& state, Device device) {
  double in_place = 0, retiring = 0, replaced = 0;
  for (auto _ : state) {
    in_place = resident(holdfast::vmm_resource<Device>{device});
    retiring = resident(holdfast::malloc_resource<Device>{device});
    replaced = 0;
    for (const std::int64_t rows : buckets) replaced += static_cast<double>(static_cast<std::size_t>(rows) * row_bytes);
    holdfast::collect(device);
    state.SetIterationTime(1e-6);
  }
  constexpr auto in_MiB = static_cast<double>(MiB);
  state.counters["largest_bucket_MiB"] = static_cast<double>(std::size_t{4096} * row_bytes) / in_MiB;
  state.counters["in_place_MiB"] = in_place / in_MiB;
  state.counters["retiring_MiB"] = retiring / in_MiB;
  state.counters["torch_like_MiB"] = replaced / in_MiB;
}

template <class Device>
void add(Device device) {
  benchmark::RegisterBenchmark("grow by MiB", grow<Device>, device)
      ->Arg(2)
      ->Arg(8)
      ->Arg(128)
      ->Arg(2048)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(21);
  benchmark::RegisterBenchmark("resident after 13 buckets", resident_bytes<Device>, device)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(1);
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_on_either(argc, argv, [](auto device) { add(device); });
}
