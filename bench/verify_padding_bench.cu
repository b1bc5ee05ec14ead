// verify_padding of [rows, 64, 512] bf16, most of whose heads are padding, against a kernel that reads as many bytes, side
// by side, and does nothing else. See support/floor.cuh.
#include <holdfast/kernel/verify_padding.cuh>
#include <holdfast/view.hpp>

#include "support/ceiling.cuh"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr std::int64_t padded_heads = 64;
constexpr std::int64_t head_dim = 512;
constexpr std::int64_t head_bytes = head_dim * 2;

/// The state's arguments: rows and real heads. `check(stream, view, heads, check)` is what is measured.
template <class Check>
void measure(benchmark::State& state, const Check& check) {
  const std::int64_t rows = state.range(0), heads = state.range(1);
  const auto bytes = static_cast<std::size_t>(rows * (padded_heads - heads) * head_bytes);
  const auto buffer_bytes = static_cast<std::size_t>(rows * padded_heads * head_bytes);
  const std::size_t turns = bench::rotation(bytes);
  const bench::stream stream;
  const double rate = bench::read_rate(stream);
  const bench::buffers padded(turns, buffer_bytes), flat(turns, bytes);
  const bench::buffer report(sizeof(holdfast::padding_check));
  auto* const result = reinterpret_cast<holdfast::padding_check*>(report.data());
  bench::check(cudaMemsetAsync(result, 0, sizeof *result, stream));
  const auto view = [&](std::size_t turn) {
    return holdfast::view<const std::uint16_t, 3>(reinterpret_cast<const std::uint16_t*>(padded[turn]), rows,
                                                  padded_heads, head_dim);
  };
  for (std::size_t turn = 0; turn < turns; ++turn) {
    bench::check(cudaMemsetAsync(padded[turn], 0, buffer_bytes, stream));
    bench::check(cudaMemset2DAsync(padded[turn], static_cast<std::size_t>(padded_heads * head_bytes), 0x7f,
                                   static_cast<std::size_t>(heads * head_bytes), static_cast<std::size_t>(rows),
                                   stream));
    bench::check(cudaMemsetAsync(flat[turn], 0, bytes, stream));
  }
  bench::compete(
      state, stream, bytes, turns, rate,
      [&](std::size_t turn) { check(cudaStream_t{stream}, view(turn), heads, result); },
      [&](std::size_t turn) { bench::read_zeros(stream, flat[turn], bytes); });

  // Its verdict is right, with and without a bad byte.
  for (const std::int64_t bad : {0, 1}) {
    bench::check(cudaMemsetAsync(padded[0] + buffer_bytes - 1, static_cast<int>(bad), 1, stream));
    check(cudaStream_t{stream}, view(0), heads, result);
    holdfast::padding_report found;
    bench::check(cudaMemcpyAsync(&found, &result->report, sizeof found, cudaMemcpyDeviceToHost, stream));
    bench::check(cudaStreamSynchronize(stream));
    if (found.bad_bytes != bad ||
        found.first_bad_offset != (bad == 0 ? -1 : static_cast<std::int64_t>(buffer_bytes) - 1)) {
      std::fprintf(stderr, "the benchmark's padding was judged wrong\n");
      std::exit(EXIT_FAILURE);
    }
  }
}

template <bool Programmatic>
void verify(benchmark::State& state) {
  measure(state, [](cudaStream_t stream, const auto& view, std::int64_t heads, holdfast::padding_check* check) {
    holdfast::verify_padding_async(stream, view, heads, check, {.programmatic = Programmatic});
  });
}

/// With another shape than its own: what detail::verify_shape was chosen from.
template <holdfast::row_op_shape Shape>
void verify_with(benchmark::State& state) {
  measure(state, [](cudaStream_t stream, const auto& view, std::int64_t heads, holdfast::padding_check* check) {
    holdfast::detail::with_checked_padding(holdfast::detail::padding_of(view, heads), {}, [&](const auto& op) {
      holdfast::detail::launch_check<Shape>(stream, op, check, false);
    });
  });
}

BENCHMARK(verify<false>)->Name("verify_padding")->Apply(bench::engine_shapes);
BENCHMARK(verify<true>)->Name("verify_padding/programmatic")->Apply(bench::few_engine_shapes);

using holdfast::row_op_shape;
constexpr std::int64_t all_blocks = row_op_shape{}.max_blocks;
BENCHMARK(verify_with<row_op_shape{256, 4, all_blocks}>)
    ->Name("verify/packets:4/blocks:all")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(verify_with<row_op_shape{256, 4, 1056}>)
    ->Name("verify/packets:4/blocks:1056")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(verify_with<row_op_shape{256, 8, all_blocks}>)
    ->Name("verify/packets:8/blocks:all")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(verify_with<row_op_shape{256, 8, 1056}>)
    ->Name("verify/packets:8/blocks:1056")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(verify_with<row_op_shape{512, 4, 1056}>)
    ->Name("verify/threads:512/packets:4/blocks:1056")
    ->Apply(bench::few_engine_shapes);

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv); }
