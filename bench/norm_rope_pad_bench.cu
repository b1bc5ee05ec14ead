// norm_rope_pad at DeepSeek-V4's shapes: packed queries of 512 bf16 into rows of 64 padded heads, RoPE on adjacent pairs.
// Against a device-to-device copy of as many bytes. See support/floor.cuh.
#include <holdfast/kernel/norm_rope_pad.cuh>
#include <holdfast/view.hpp>

#include "support/ceiling.cuh"

#include <cuda_bf16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

using element = __nv_bfloat16;
constexpr std::int64_t padded_heads = 64, head_dim = 512, table_rows = 65536;

/// Random bits become numbers from 1 to 2, of both signs.
__global__ void make_activations(std::uint64_t* words, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    words[i] = (words[i] & 0x807f807f807f807f) | 0x3f803f803f803f80;
}

struct arguments {
  holdfast::view<const element, 3> in;
  holdfast::view<const std::int64_t, 1> positions;
  holdfast::view<const float, 2> table;
  holdfast::strided_view<element, 3> out;
};

/// The state's arguments: rows and heads. `norm(stream, arguments, weight)` is what is measured.
template <class Norm>
void measure(benchmark::State& state, const Norm& norm) {
  const std::int64_t rows = state.range(0), heads = state.range(1);
  const auto payload = static_cast<std::size_t>(rows * heads * head_dim) * sizeof(element);
  const auto padded_bytes = static_cast<std::size_t>(rows * padded_heads * head_dim) * sizeof(element);
  const std::size_t turns = bench::rotation(2 * payload);
  const bench::stream stream;
  const double rate = bench::copy_rate(stream);
  const bench::buffers in(turns, payload), padded(turns, padded_bytes), from(turns, payload), to(turns, payload);
  for (std::size_t turn = 0; turn < turns; ++turn) {
    bench::fill_random(stream, in[turn], payload, 3 * turn);
    make_activations<<<1024, 256, 0, stream>>>(reinterpret_cast<std::uint64_t*>(in[turn]), payload / 8);
    bench::fill_random(stream, from[turn], payload, 5 * turn);
    bench::check(cudaMemsetAsync(padded[turn], 0xff, padded_bytes, stream));
  }
  std::vector<std::int64_t> host_positions(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row)  // requests are anywhere in their text
    host_positions[static_cast<std::size_t>(row)] = row * 40'503 % table_rows;
  std::vector<float> host_table(static_cast<std::size_t>(table_rows * 64)), host_weight(head_dim, 1.0f);
  for (std::size_t i = 0; i < host_table.size(); ++i) {
    const double angle = static_cast<double>(i / 64) * std::pow(1e4, -static_cast<double>(i % 32) / 32);
    host_table[i] = static_cast<float>(i % 64 < 32 ? std::cos(angle) : std::sin(angle));
  }
  const auto on_device = [](const auto& values) {
    bench::buffer made(values.size() * sizeof values[0]);
    bench::check(cudaMemcpy(made.data(), values.data(), values.size() * sizeof values[0], cudaMemcpyHostToDevice));
    return made;
  };
  const bench::buffer positions = on_device(host_positions), table = on_device(host_table),
                      weight = on_device(host_weight);
  const auto of = [&](std::size_t turn) -> arguments {
    return {holdfast::view<const element, 3>(reinterpret_cast<const element*>(in[turn]), rows, heads, head_dim),
            holdfast::view<const std::int64_t, 1>(reinterpret_cast<const std::int64_t*>(positions.data()), rows),
            holdfast::view<const float, 2>(reinterpret_cast<const float*>(table.data()), table_rows, 64),
            holdfast::make_strided_view(reinterpret_cast<element*>(padded[turn]), {rows, heads, head_dim},
                                        {padded_heads * head_dim, head_dim, 1})};
  };
  bench::compete(
      state, stream, 2 * payload, turns, rate,
      [&](std::size_t turn) { norm(cudaStream_t{stream}, of(turn), reinterpret_cast<const float*>(weight.data())); },
      [&](std::size_t turn) {
        bench::check(cudaMemcpyAsync(to[turn], from[turn], payload, cudaMemcpyDeviceToDevice, stream));
      });

  // A head that was written has a mean square of one, and the padding still its poison.
  std::vector<std::uint16_t> row(static_cast<std::size_t>(padded_heads * head_dim));
  bench::check(cudaStreamSynchronize(stream));
  bench::check(cudaMemcpy(
      row.data(), padded[0] + padded_bytes / static_cast<std::size_t>(rows) * static_cast<std::size_t>(rows - 1),
      row.size() * 2, cudaMemcpyDeviceToHost));
  double squares = 0;
  bool right = true;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const double value = static_cast<double>(__bfloat162float(__nv_bfloat16_raw{row[i]}));
    if (i < static_cast<std::size_t>(heads * head_dim))
      squares += value * value;
    else
      right = right && row[i] == 0xffff;
  }
  if (!right || std::abs(squares / static_cast<double>(heads * head_dim) - 1) > 0.01) {
    std::fprintf(stderr, "the benchmark's output is wrong: a mean square of %g\n",
                 squares / static_cast<double>(heads * head_dim));
    std::exit(EXIT_FAILURE);
  }
}

enum class weighting { none, fp32 };

template <bool Programmatic, weighting Weighting = weighting::none,
          holdfast::rope_pairing Pairing = holdfast::rope_pairing::adjacent>
void norm_rope(benchmark::State& state) {
  measure(state, [](cudaStream_t stream, const arguments& with, const float* weight) {
    holdfast::norm_rope_pad(
        stream, with.in, with.positions, with.table, with.out,
        {.weight = Weighting == weighting::fp32 ? weight : nullptr, .pairing = Pairing, .programmatic = Programmatic});
  });
}

/// With other numbers of warps in a block than its own: what detail::norm_warps was chosen from.
template <int Warps>
void norm_rope_with(benchmark::State& state) {
  measure(state, [](cudaStream_t stream, const arguments& with, const float*) {
    const auto op = holdfast::detail::plan_norm(with.in, with.positions, with.table, with.out, {});
    holdfast::detail::launch_norm<holdfast::detail::bf16_pairs, 2, false, Warps>(stream, op, false);
  });
}

BENCHMARK(norm_rope<false>)->Name("norm_rope_pad")->Apply(bench::engine_shapes);
BENCHMARK(norm_rope<true>)->Name("norm_rope_pad/programmatic")->Apply(bench::engine_shapes);
BENCHMARK(norm_rope<false, weighting::fp32>)->Name("norm_rope_pad/weight")->Apply(bench::few_engine_shapes);
BENCHMARK(norm_rope<false, weighting::none, holdfast::rope_pairing::half_split>)
    ->Name("norm_rope_pad/half_split")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(norm_rope_with<1>)->Name("norm_rope/warps:1")->Apply(bench::few_engine_shapes);
BENCHMARK(norm_rope_with<2>)->Name("norm_rope/warps:2")->Apply(bench::few_engine_shapes);
BENCHMARK(norm_rope_with<8>)->Name("norm_rope/warps:8")->Apply(bench::few_engine_shapes);

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv); }
