// pad_queries and unpad_output at DeepSeek-V4's shapes (64 padded heads, 512 dims, bf16), against the rate at which the
// same GPU copies in the same moment, and beside cudaMemcpy2DAsync.
//
//   fraction_of_ceiling   time of a device-to-device copy of as many bytes / time of the call
//   us_per_node           below 10 MB: one node of a graph of such calls, less an empty kernel's node
//
// What was tried, as fractions of the ceiling at 32768 rows of 16 heads, pad and unpad:
//
//   packets of 16 bytes, one a thread (what this is)                              0.94, 0.96
//   the same with streaming stores, or two to four packets a thread               0.95, 0.97
//   in a kernel of 30 lines, bulk copies through shared memory, one of 2 KiB (or two of 1 KiB) a block     0.96, 0.99
//   of 4 KiB, of 8 KiB; two or four warps a block of 2 KiB each                   0.96, 0.93; 0.95
//   blocks that stay, with a ring of 4 or 8 KiB copies                            0.90 to 0.93
//   evict-first hints for what is read, or written                                0.89 to 0.93
//   the library's own, one of 2 KiB a block: as slow as packets in blocks of 128 threads, also 2 KiB each      0.80, 0.80
//
// So blocks of 2 KiB seem to be bound by how fast blocks start (about 160 ns on each multiprocessor); two copies of 2 KiB a
// block are to be tried next.
//
// Real heads go into rows 64 KiB apart, which costs a pad 2 to 4 % against an unpad of the same bytes.
#include <holdfast/kernel/pad_queries.cuh>
#include <holdfast/kernel/unpad_output.cuh>
#include <holdfast/view.hpp>

#include "support/ceiling.cuh"

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr std::int64_t padded_heads = 64;
constexpr std::int64_t head_dim = 512;
using element = __nv_bfloat16;
constexpr std::int64_t head_bytes = head_dim * std::int64_t{sizeof(element)};

enum class direction { pad, unpad };

/// One turn's packed and padded buffer, as views.
struct turn_views {
  holdfast::view<element, 3> packed;
  holdfast::strided_view<element, 3> real_heads;
  holdfast::view<element, 3> padded;
};

turn_views views_of(std::byte* packed, std::byte* padded, std::int64_t rows, std::int64_t heads) {
  auto* packed_elements = reinterpret_cast<element*>(packed);
  auto* padded_elements = reinterpret_cast<element*>(padded);
  return {holdfast::view<element, 3>(packed_elements, rows, heads, head_dim),
          holdfast::make_strided_view<element, 3>(padded_elements, {rows, heads, head_dim},
                                                  {padded_heads * head_dim, head_dim, 1}),
          holdfast::view<element, 3>(padded_elements, rows, padded_heads, head_dim)};
}

/// Rows that were copied hold the input's bits, and the padding still its poison.
void verify(std::byte* packed, std::byte* padded, std::int64_t rows, std::int64_t heads) {
  const auto row = static_cast<std::size_t>(heads * head_bytes),
             pitch = static_cast<std::size_t>(padded_heads * head_bytes);
  std::vector<std::byte> real(row), whole(pitch);
  for (const std::int64_t i : {std::int64_t{0}, rows / 2, rows - 1}) {
    const auto at = static_cast<std::size_t>(i);
    bench::check(cudaMemcpy(real.data(), packed + at * row, row, cudaMemcpyDeviceToHost));
    bench::check(cudaMemcpy(whole.data(), padded + at * pitch, pitch, cudaMemcpyDeviceToHost));
    bool right = std::memcmp(real.data(), whole.data(), row) == 0;
    for (std::size_t byte = row; byte < pitch; ++byte) right = right && whole[byte] == std::byte{0xff};
    if (!right) {
      std::fprintf(stderr, "row %lld of the benchmark's output is wrong\n", static_cast<long long>(i));
      std::exit(EXIT_FAILURE);
    }
  }
}

/// Runs `copy(stream, views)` in a contest with the ceiling; the state's arguments are rows and heads.
template <class Copy>
void measure(benchmark::State& state, direction way, const Copy& copy) {
  const std::int64_t rows = state.range(0), heads = state.range(1);
  const auto payload = static_cast<std::size_t>(rows * heads * head_bytes);
  const std::size_t turns = bench::rotation(2 * payload);

  const bench::stream stream;
  const bench::buffers packed(turns, payload), from(turns, payload), to(turns, payload);
  const bench::buffers padded(turns, static_cast<std::size_t>(rows * padded_heads * head_bytes));
  const auto padded_bytes = static_cast<std::size_t>(rows * padded_heads * head_bytes);
  for (std::size_t turn = 0; turn < turns; ++turn) {
    bench::fill_random(stream, from[turn], payload, 3 * turn);
    bench::check(cudaMemsetAsync(padded[turn], 0xff, padded_bytes, stream));
    if (way == direction::pad) {
      bench::fill_random(stream, packed[turn], payload, 5 * turn);
    } else {  // random real heads, behind them the poison that `verify` looks for
      bench::check(cudaMemsetAsync(packed[turn], 0xff, payload, stream));
      bench::check(cudaMemcpy2DAsync(padded[turn], static_cast<std::size_t>(padded_heads * head_bytes), from[turn],
                                     static_cast<std::size_t>(heads * head_bytes),
                                     static_cast<std::size_t>(heads * head_bytes), static_cast<std::size_t>(rows),
                                     cudaMemcpyDeviceToDevice, stream));
    }
  }

  const std::vector<bench::call> kinds{
      [&](std::size_t turn) { copy(cudaStream_t{stream}, views_of(packed[turn], padded[turn], rows, heads)); },
      [&](std::size_t turn) {
        bench::check(cudaMemcpyAsync(to[turn], from[turn], payload, cudaMemcpyDeviceToDevice, stream));
      },
      [&](std::size_t) { bench::empty_kernel<<<1, 32, 0, stream>>>(); }};

  auto contest = bench::contest::of(stream, 2 * payload, turns, kinds);
  for (auto _ : state) state.SetIterationTime(contest.round() * 1e-6);
  verify(packed[0], padded[0], rows, heads);

  bench::report(state, contest, 2 * payload, bench::copy_rate(stream));
}

void pad(benchmark::State& state) {
  measure(state, direction::pad, [](cudaStream_t stream, const turn_views& views) {
    holdfast::pad_queries(stream, views.packed, views.real_heads);
  });
}

void unpad(benchmark::State& state) {
  measure(state, direction::unpad, [](cudaStream_t stream, const turn_views& views) {
    holdfast::unpad_output(stream, views.padded, views.packed);
  });
}

void pad_by_memcpy2d(benchmark::State& state) {
  measure(state, direction::pad, [](cudaStream_t stream, const turn_views& views) {
    const auto width = static_cast<std::size_t>(views.packed.extent(1) * head_bytes);
    bench::check(cudaMemcpy2DAsync(views.padded.data_handle(), static_cast<std::size_t>(padded_heads * head_bytes),
                                   views.packed.data_handle(), width, width,
                                   static_cast<std::size_t>(views.packed.extent(0)), cudaMemcpyDeviceToDevice, stream));
  });
}

void unpad_by_memcpy2d(benchmark::State& state) {
  measure(state, direction::unpad, [](cudaStream_t stream, const turn_views& views) {
    const auto width = static_cast<std::size_t>(views.packed.extent(1) * head_bytes);
    bench::check(cudaMemcpy2DAsync(views.packed.data_handle(), width, views.padded.data_handle(),
                                   static_cast<std::size_t>(padded_heads * head_bytes), width,
                                   static_cast<std::size_t>(views.packed.extent(0)), cudaMemcpyDeviceToDevice, stream));
  });
}

/// The pad by packets, as runs are copied that are short or not aligned.
template <holdfast::row_op_shape Shape>
void pad_with(benchmark::State& state) {
  measure(state, direction::pad, [](cudaStream_t stream, const turn_views& views) {
    const auto plan = holdfast::detail::plan_copy("pad_queries", "in", views.packed, "out", views.real_heads, false);
    holdfast::run_row_op<Shape>(stream, holdfast::detail::strided_copy<holdfast::detail::packet16>(plan));
  });
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "heads"})->ArgsProduct({{64, 2048, 32768}, {8, 16, 32}});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
}

void few_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "heads"})->ArgsProduct({{64, 2048, 32768}, {16}});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
}

BENCHMARK(pad)->Apply(shapes);
BENCHMARK(unpad)->Apply(shapes);
BENCHMARK(pad_by_memcpy2d)->Apply(few_shapes);
BENCHMARK(unpad_by_memcpy2d)->Apply(few_shapes);

using holdfast::row_op_shape;
BENCHMARK(pad_with<row_op_shape{.threads = 256, .packets = 1}>)->Name("pad/packets")->Apply(few_shapes);
BENCHMARK(pad_with<row_op_shape{.threads = 256, .packets = 1, .programmatic = true}>)
    ->Name("pad/packets/programmatic")
    ->Apply(few_shapes);

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv); }
