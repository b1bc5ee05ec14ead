// concat_pad at DeepSeek-V3.2's shapes: absorbed queries (512, heads outermost, as the batched product leaves them) and their
// RoPE part (64, the end of heads of 192) into rows of 64 padded heads of 576, bf16. Against a device-to-device copy of as
// many bytes, and beside two launches of pad_queries. See support/floor.cuh.
#include <holdfast/kernel/concat_pad.cuh>
#include <holdfast/kernel/pad_queries.cuh>
#include <holdfast/view.hpp>

#include "support/ceiling.cuh"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using element = std::uint16_t;
constexpr std::int64_t padded_heads = 64, absorbed_dim = 512, rope_dim = 64, head_dim = 576, projected_dim = 192;

struct sides {
  holdfast::strided_view<element, 3> absorbed, rope, out;
};

/// The state's arguments: rows and heads. `concat(stream, sides)` is what is measured.
template <class Concat>
void measure(benchmark::State& state, const Concat& concat) {
  const std::int64_t rows = state.range(0), heads = state.range(1);
  const auto bytes_of = [](std::int64_t elements) { return static_cast<std::size_t>(elements) * sizeof(element); };
  const std::size_t payload = bytes_of(rows * heads * head_dim),
                    padded_bytes = bytes_of(rows * padded_heads * head_dim);
  const std::size_t absorbed_bytes = bytes_of(rows * heads * absorbed_dim),
                    projected_bytes = bytes_of(rows * heads * projected_dim);
  const std::size_t turns = bench::rotation(2 * payload);
  const bench::stream stream;
  const double rate = bench::copy_rate(stream);
  const bench::buffers absorbed(turns, absorbed_bytes), projected(turns, projected_bytes), padded(turns, padded_bytes);
  const bench::buffers from(turns, payload), to(turns, payload);
  for (std::size_t turn = 0; turn < turns; ++turn) {
    bench::fill_random(stream, absorbed[turn], absorbed_bytes, 3 * turn);
    bench::fill_random(stream, projected[turn], projected_bytes, 5 * turn);
    bench::fill_random(stream, from[turn], payload, 7 * turn);
    bench::check(cudaMemsetAsync(padded[turn], 0xff, padded_bytes, stream));
  }
  const auto sides_of = [&](std::size_t turn) -> sides {
    return {holdfast::make_strided_view(reinterpret_cast<element*>(absorbed[turn]), {rows, heads, absorbed_dim},
                                        {absorbed_dim, rows * absorbed_dim, 1}),
            holdfast::make_strided_view(reinterpret_cast<element*>(projected[turn]) + (projected_dim - rope_dim),
                                        {rows, heads, rope_dim}, {heads * projected_dim, projected_dim, 1}),
            holdfast::make_strided_view(reinterpret_cast<element*>(padded[turn]), {rows, heads, head_dim},
                                        {padded_heads * head_dim, head_dim, 1})};
  };
  bench::compete(
      state, stream, 2 * payload, turns, rate, [&](std::size_t turn) { concat(cudaStream_t{stream}, sides_of(turn)); },
      [&](std::size_t turn) {
        bench::check(cudaMemcpyAsync(to[turn], from[turn], payload, cudaMemcpyDeviceToDevice, stream));
      });

  // Rows that were written hold both parts, and the padding still its poison.
  bench::check(cudaStreamSynchronize(stream));
  std::vector<element> row(static_cast<std::size_t>(padded_heads * head_dim)), part(absorbed_dim);
  bool right = true;
  for (const std::int64_t i : {std::int64_t{0}, rows / 2, rows - 1}) {
    const sides all = sides_of(0);
    bench::check(cudaMemcpy(row.data(), &all.out(i, 0, 0), row.size() * sizeof(element), cudaMemcpyDeviceToHost));
    for (std::int64_t head = 0; head < heads; ++head) {
      const element* const written = row.data() + head * head_dim;
      bench::check(cudaMemcpy(part.data(), &all.absorbed(i, head, 0), bytes_of(absorbed_dim), cudaMemcpyDeviceToHost));
      right = right && std::memcmp(written, part.data(), bytes_of(absorbed_dim)) == 0;
      bench::check(cudaMemcpy(part.data(), &all.rope(i, head, 0), bytes_of(rope_dim), cudaMemcpyDeviceToHost));
      right = right && std::memcmp(written + absorbed_dim, part.data(), bytes_of(rope_dim)) == 0;
    }
    for (std::size_t at = static_cast<std::size_t>(heads * head_dim); at < row.size(); ++at)
      right = right && row[at] == 0xffff;
  }
  if (!right) {
    std::fprintf(stderr, "the benchmark's output is wrong\n");
    std::exit(EXIT_FAILURE);
  }
}

template <bool Programmatic>
void concat(benchmark::State& state) {
  measure(state, [](cudaStream_t stream, const sides& all) {
    holdfast::concat_pad(stream, all.absorbed, all.rope, all.out, {.programmatic = Programmatic});
  });
}

void two_pads(benchmark::State& state) {
  measure(state, [](cudaStream_t stream, const sides& all) {
    const auto part = [&](std::int64_t first, std::int64_t width) {
      return holdfast::make_strided_view(all.out.data_handle() + first, {all.out.extent(0), all.out.extent(1), width},
                                         {all.out.stride(0), all.out.stride(1), 1});
    };
    holdfast::pad_queries(stream, all.absorbed, part(0, absorbed_dim));
    holdfast::pad_queries(stream, all.rope, part(absorbed_dim, rope_dim));
  });
}

/// With another shape of the executor than its own.
template <holdfast::row_op_shape Shape>
void concat_with(benchmark::State& state) {
  measure(state, [](cudaStream_t stream, const sides& all) {
    const auto plan = holdfast::detail::plan_concat(all.absorbed, all.rope, all.out, {});
    holdfast::run_row_op<Shape>(stream, holdfast::detail::concat_heads<holdfast::detail::packet16>(plan));
  });
}

BENCHMARK(concat<false>)->Name("concat_pad")->Apply(bench::engine_shapes);
BENCHMARK(concat<true>)->Name("concat_pad/programmatic")->Apply(bench::engine_shapes);
BENCHMARK(two_pads)->Name("concat_by_two_pads")->Apply(bench::few_engine_shapes);

using holdfast::row_op_shape;
BENCHMARK(concat_with<row_op_shape{.threads = 128, .packets = 1}>)
    ->Name("concat/threads:128/packets:1")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(concat_with<row_op_shape{.threads = 256, .packets = 2}>)
    ->Name("concat/threads:256/packets:2")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(concat_with<row_op_shape{.threads = 512, .packets = 1}>)
    ->Name("concat/threads:512/packets:1")
    ->Apply(bench::few_engine_shapes);
BENCHMARK(concat_with<row_op_shape{.threads = 288, .packets = 1}>)
    ->Name("concat/threads:288/packets:1")
    ->Apply(bench::few_engine_shapes);

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv); }
