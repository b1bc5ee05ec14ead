// gather_rows: random rows of an 8 GiB pool into FP8 or bf16 scratch, against the rate at which the same GPU copies in the
// same moment.
//
//   fraction_of_ceiling   time of a device-to-device copy of as many bytes (read and written) / time of the call
//   us_per_node           below 10 MB: one node of a graph of such calls, less an empty kernel's node
//
// What bounds NVFP4 (residual 0, on an H200) is reading random scale rows, 32 bytes each: alone they take 82 of the 235 us
// of a million rows. Without any arithmetic nothing changes. What was tried beside bulk copies into shared memory, as
// fractions of the ceiling (then 0.82 to 0.86):
//
//   16 rows a warp, loaded into registers                     0.80
//   a persistent grid that finds the next rows meanwhile      0.72 to 0.80
//   streaming or no-allocate stores                           gain nothing once a rotation's scales pass the L2
//   4 staged rows a warp, 4 warps a block                     0.81 at 64 Ki rows, where 16 rows, 2 warps reach 0.84; but 0.88
//                                                             at 1 Mi, where those reach 0.87: so it depends on the rows
//   a barrier for each batch, so that stores begin earlier    0.80 at 64 Ki rows: reads and writes are better kept apart
//   a block that waits for all its copies, likewise           0.845 at 64 Ki rows; nothing at 1 Mi
//   staged rows side by side (not each at a multiple of 128)  0.82 at 64 Ki rows
//   cudaLimitMaxL2FetchGranularity of 32 instead of 64 bytes  1 to 2 % quicker; the application's to choose
#include <holdfast/kernel/gather_rows.cuh>
#include <holdfast/row_format.hpp>
#include <holdfast/view.hpp>

#include "support/ceiling.cuh"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

namespace {

constexpr std::int64_t pool_bytes = std::int64_t{8} << 30;
constexpr std::int64_t page_rows = 32;           // 128 tokens at a compression of 4
constexpr float usual_scale = 100.0f / 2688.0f;  // amax 100 over 448 * 6: TensorRT-LLM's default, and not one

/// What is gathered, how its pool lies, and what it becomes.
template <class Source, class Row, class Element = __nv_fp8_e4m3>
struct format {
  using source = Source;
  using element = Element;
  static constexpr std::int64_t elements = Row::elements, data_bytes = Row::data_bytes, scale_bytes = Row::scale_bytes;
  static constexpr std::int64_t out_bytes = elements * static_cast<std::int64_t>(sizeof(Element));
};
using fp8 = format<holdfast::fp8_rows, holdfast::fp8_row>;
using nvfp4 = format<holdfast::nvfp4_rows<0>, holdfast::nvfp4_row<0>>;
using nvfp4_residual = format<holdfast::nvfp4_rows<64>, holdfast::nvfp4_row<64>>;
using v41 = format<holdfast::flashmla_v41_rows, holdfast::flashmla_v41_row>;
using fp8_to_bf16 = format<holdfast::fp8_rows, holdfast::fp8_row, __nv_bfloat16>;
using nvfp4_to_bf16 = format<holdfast::nvfp4_rows<0>, holdfast::nvfp4_row<0>, __nv_bfloat16>;
using v32_to_bf16 = format<holdfast::flashmla_v32_rows, holdfast::flashmla_v32_row, __nv_bfloat16>;
using v4_to_bf16 = format<holdfast::flashmla_v4_rows, holdfast::flashmla_v4_row, __nv_bfloat16>;
using v41_to_bf16 = format<holdfast::flashmla_v41_rows, holdfast::flashmla_v41_row, __nv_bfloat16>;
using vllm_nvfp4_to_bf16 = format<holdfast::vllm_nvfp4_rows, holdfast::vllm_nvfp4_row, __nv_bfloat16>;

/// Indices of pool rows, or of positions in a block table; or of pool rows in runs of whole pages of 64.
enum class addresses { flat, table, pages };

/// Random indices, each below `rows`: runs of `run` rows that follow each other, at random multiples of `run`.
__global__ void fill_indices(std::int32_t* indices, std::int64_t count, std::int64_t rows, std::uint64_t seed,
                             std::int64_t run = 1) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  std::uint64_t x = (static_cast<std::uint64_t>(i / run) + seed) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  x ^= x >> 31;
  indices[i] =
      static_cast<std::int32_t>(static_cast<std::int64_t>(x % static_cast<std::uint64_t>(rows / run)) * run + i % run);
}

/// So many turns that one rotation's scales alone (64 bytes a row: a load fetches a row's neighbour, too) pass the L2. But
/// no more than 64 for their sake, which is memory: of 2048 rows, scales may still be in the L2.
template <class Format>
std::size_t turns_of(std::int64_t pairs, std::size_t bytes) {
  const std::size_t turns = bench::rotation(bytes);
  if (Format::scale_bytes == 0) return turns;
  return std::max(turns, std::min<std::size_t>(64, bench::rotation(static_cast<std::size_t>(pairs) * 64)));
}

/// The pool, made once: random bytes are rows of any format. They hold NaN, as scales and as values: they cost the same.
const bench::buffer& pool_of(const bench::stream& stream) {
  static std::unique_ptr<bench::buffer> made;
  if (!made) {
    constexpr auto bytes = static_cast<std::size_t>(pool_bytes / 8 * 9);  // with the scales of any format
    made = std::make_unique<bench::buffer>(bytes);
    bench::fill_random(stream, made->data(), bytes);
  }
  return *made;
}

template <class Format>
typename Format::source source_of(const std::byte* pool, const holdfast::block_table& table) {
  constexpr std::int64_t rows = pool_bytes / Format::data_bytes;
  const std::int64_t pages = table.data == nullptr ? 0 : page_rows;
  if constexpr (std::is_same_v<typename Format::source, holdfast::flashmla_v4_rows> ||
                std::is_same_v<typename Format::source, holdfast::flashmla_v41_rows>) {
    return {.data = {.data = pool, .rows = rows / page_rows * page_rows, .page_rows = 64}, .table = table};
  } else if constexpr (Format::scale_bytes == 0) {
    return {.data = {.data = pool, .rows = rows / page_rows * page_rows, .page_rows = pages}, .table = table};
  } else {
    return {
        .data = {.data = pool, .rows = rows / page_rows * page_rows, .page_rows = pages},
        .scales = {.data = pool + rows * Format::data_bytes, .rows = rows / page_rows * page_rows, .page_rows = pages},
        .global_scale = usual_scale,
        .table = table};
  }
}

/// The state's arguments: rows to gather, rows of the tail.
template <class Format, addresses Addresses = addresses::flat, bool Programmatic = false>
void gather(benchmark::State& state) {
  const std::int64_t pairs = state.range(0), tail = state.range(1);
  const auto written = static_cast<std::size_t>((pairs + tail) * Format::out_bytes);
  const std::size_t bytes = static_cast<std::size_t>(pairs * (Format::data_bytes + Format::scale_bytes + 4)) + written;
  const std::size_t turns = turns_of<Format>(pairs, bytes);
  constexpr std::int64_t pool_rows = pool_bytes / Format::data_bytes / page_rows * page_rows;

  const bench::stream stream;
  const bench::buffer& pool = pool_of(stream);
  const bench::buffers indices(turns, static_cast<std::size_t>(pairs) * 4), out(turns, written);
  const bench::buffers from(turns, bytes / 2), to(turns, bytes / 2);
  // one request that owns all pages, shuffled as a stride that shares no divisor with their number would
  constexpr std::int64_t table_pages = pool_rows / page_rows;
  const bench::buffer table_memory(Addresses == addresses::table ? static_cast<std::size_t>(table_pages) * 4 : 4);
  holdfast::block_table table{};
  if (Addresses == addresses::table) {
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(table_pages));
    for (std::int64_t page = 0; page < table_pages; ++page)
      blocks[static_cast<std::size_t>(page)] = static_cast<std::int32_t>(page * 1'000'003 % table_pages);
    bench::check(cudaMemcpy(table_memory.data(), blocks.data(), blocks.size() * 4, cudaMemcpyHostToDevice));
    table = {.data = reinterpret_cast<const std::int32_t*>(table_memory.data()), .requests = 1, .pages = table_pages};
  }
  const auto source = source_of<Format>(pool.data(), table);

  for (std::size_t turn = 0; turn < turns; ++turn) {
    fill_indices<<<static_cast<unsigned>((pairs + 255) / 256), 256, 0, stream>>>(
        reinterpret_cast<std::int32_t*>(indices[turn]), pairs, pool_rows, 7 * turn + 1,
        Addresses == addresses::pages ? 64 : 1);
    bench::check(cudaMemsetAsync(out[turn], 0xff, written, stream));
    bench::fill_random(stream, from[turn], bytes / 2, 3 * turn);
  }

  const std::vector<bench::call> kinds{
      [&](std::size_t turn) {
        const holdfast::view<const std::int32_t, 1> which(reinterpret_cast<const std::int32_t*>(indices[turn]), pairs);
        using element = typename Format::element;
        const holdfast::view<element, 2> rows(reinterpret_cast<element*>(out[turn]), pairs, Format::elements);
        holdfast::gather_rows(cudaStream_t{stream}, source, which, rows,
                              {.tail_rows = tail, .programmatic = Programmatic});
      },
      [&](std::size_t turn) {
        bench::check(cudaMemcpyAsync(to[turn], from[turn], bytes / 2, cudaMemcpyDeviceToDevice, stream));
      },
      [&](std::size_t) { bench::empty_kernel<<<1, 32, 0, stream>>>(); }};

  auto contest = bench::contest::of(stream, bytes, turns, kinds);
  for (auto _ : state) state.SetIterationTime(contest.round() * 1e-6);

  std::vector<std::byte> last(written);
  bench::check(cudaMemcpy(last.data(), out[0], written, cudaMemcpyDeviceToHost));
  const auto behind = last.begin() + pairs * Format::out_bytes;
  const bool zeros = std::all_of(behind, last.end(), [](std::byte byte) { return byte == std::byte{0}; });
  const bool data = std::any_of(last.begin(), behind, [](std::byte byte) { return byte != std::byte{0xff}; });
  if (!zeros || !data) {
    std::fprintf(stderr, "the benchmark's output is wrong\n");
    std::exit(EXIT_FAILURE);
  }

  bench::report(state, contest, bytes, bench::copy_rate(stream));
}

/// The same without its tail, which a memset behind it writes: what the tail in the launch saves.
void gather_then_memset(benchmark::State& state) {
  const std::int64_t pairs = state.range(0), tail = state.range(1);
  const auto written = static_cast<std::size_t>((pairs + tail) * 512);
  const std::size_t bytes = static_cast<std::size_t>(pairs * (nvfp4::data_bytes + nvfp4::scale_bytes + 4)) + written;
  const std::size_t turns = bench::rotation(bytes);
  constexpr std::int64_t pool_rows = pool_bytes / nvfp4::data_bytes;
  const bench::stream stream;
  const auto source = source_of<nvfp4>(pool_of(stream).data(), {});
  const bench::buffers indices(turns, static_cast<std::size_t>(pairs) * 4), out(turns, written);
  for (std::size_t turn = 0; turn < turns; ++turn)
    fill_indices<<<static_cast<unsigned>((pairs + 255) / 256), 256, 0, stream>>>(
        reinterpret_cast<std::int32_t*>(indices[turn]), pairs, pool_rows, 7 * turn + 1);
  const auto call = [&](std::size_t turn, std::int64_t tail_rows) {
    const holdfast::view<const std::int32_t, 1> which(reinterpret_cast<const std::int32_t*>(indices[turn]), pairs);
    const holdfast::view<__nv_fp8_e4m3, 2> rows(reinterpret_cast<__nv_fp8_e4m3*>(out[turn]), pairs, 512);
    holdfast::gather_rows(cudaStream_t{stream}, source, which, rows, {.tail_rows = tail_rows});
  };
  const std::vector<bench::call> kinds{
      [&](std::size_t turn) {
        call(turn, 0);
        bench::check(cudaMemsetAsync(out[turn] + pairs * 512, 0, static_cast<std::size_t>(tail) * 512, stream));
      },
      [&](std::size_t turn) { call(turn, tail); }, [&](std::size_t) { bench::empty_kernel<<<1, 32, 0, stream>>>(); }};
  auto contest = bench::contest::of(stream, bytes, turns, kinds);
  for (auto _ : state) state.SetIterationTime(contest.round() * 1e-6);
  state.counters["us"] = contest.median_us(0);
  state.counters["one_launch_us"] = contest.median_us(1);
  state.counters["empty_us"] = contest.median_us(2);
}

/// The plain way: a thread for each 16 bytes of output, which finds its row by itself.
__global__ void plain_v32_to_bf16(const std::byte* pool, const std::int32_t* indices, std::int64_t pairs,
                                  std::int64_t pool_rows, __nv_bfloat16* out) {
  const std::int64_t vector = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x, pair = vector / 72;
  const auto at = static_cast<std::int32_t>(vector % 72);
  if (pair >= pairs) return;
  const std::int64_t row = indices[pair];
  uint4 made{};
  if (row >= 0 && row < pool_rows) {
    const std::byte* const from = pool + row * 656;
    if (at >= 64) {
      made = *reinterpret_cast<const uint4*>(from + 528 + (at - 64) * 16);
    } else {
      const uint2 codes = *reinterpret_cast<const uint2*>(from + at * 8);
      const float scale = *reinterpret_cast<const float*>(from + 512 + at / 16 * 4);
      auto* const halves = reinterpret_cast<__nv_bfloat162*>(&made);
      for (int i = 0; i < 4; ++i) {
        const unsigned two = (i < 2 ? codes.x : codes.y) >> 16 * (i % 2);
        __nv_fp8x2_e4m3 pair_of;
        pair_of.__x = static_cast<__nv_fp8x2_storage_t>(two);
        const auto values = static_cast<float2>(pair_of);
        halves[i] = __floats2bfloat162_rn(values.x * scale, values.y * scale);
      }
    }
  }
  reinterpret_cast<uint4*>(out)[vector] = made;
}

/// That beside gather_rows.
void plain_beside_ours(benchmark::State& state) {
  using from = v32_to_bf16;
  const std::int64_t pairs = state.range(0);
  const auto written = static_cast<std::size_t>(pairs * from::out_bytes);
  const std::size_t bytes = static_cast<std::size_t>(pairs * (from::data_bytes + 4)) + written;
  const std::size_t turns = bench::rotation(bytes);
  const bench::stream stream;
  const auto source = source_of<from>(pool_of(stream).data(), {});
  const bench::buffers indices(turns, static_cast<std::size_t>(pairs) * 4), out(turns, written);
  for (std::size_t turn = 0; turn < turns; ++turn)
    fill_indices<<<static_cast<unsigned>((pairs + 255) / 256), 256, 0, stream>>>(
        reinterpret_cast<std::int32_t*>(indices[turn]), pairs, source.data.rows, 7 * turn + 1);
  const std::vector<bench::call> kinds{
      [&](std::size_t turn) {
        plain_v32_to_bf16<<<static_cast<unsigned>((pairs * 72 + 255) / 256), 256, 0, stream>>>(
            static_cast<const std::byte*>(source.data.data), reinterpret_cast<const std::int32_t*>(indices[turn]),
            pairs, source.data.rows, reinterpret_cast<__nv_bfloat16*>(out[turn]));
      },
      [&](std::size_t turn) {
        const holdfast::view<const std::int32_t, 1> which(reinterpret_cast<const std::int32_t*>(indices[turn]), pairs);
        const holdfast::view<__nv_bfloat16, 2> rows(reinterpret_cast<__nv_bfloat16*>(out[turn]), pairs, 576);
        holdfast::gather_rows(cudaStream_t{stream}, source, which, rows);
      },
      [&](std::size_t) { bench::empty_kernel<<<1, 32, 0, stream>>>(); }};
  auto contest = bench::contest::of(stream, bytes, turns, kinds);
  for (auto _ : state) state.SetIterationTime(contest.round() * 1e-6);
  state.counters["us"] = contest.median_us(0);
  state.counters["gather_rows_us"] = contest.median_us(1);
}

void shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "tail"});
  bench->Args({2048, 0})->Args({2048, 128});
  bench->Args({64 << 10, 0})->Args({64 << 10, 128});
  bench->Args({1 << 20, 0})->Args({1 << 20, 128});
  bench->Args({4 << 20, 128});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
}

void few_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "tail"})->Args({2048, 128})->Args({64 << 10, 128})->Args({1 << 20, 128});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
}

/// From 64 MiB moved on, most of them.
void format_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "tail"})
      ->Args({2048, 128})
      ->Args({40 << 10, 128})
      ->Args({128 << 10, 128})
      ->Args({1 << 20, 128});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
}

void small_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"rows", "tail"})->Args({32, 128})->Args({2048, 128});
  bench->UseManualTime()->Iterations(21)->Unit(benchmark::kMicrosecond);
}

BENCHMARK(gather<fp8>)->Name("gather_fp8")->Apply(shapes);
BENCHMARK(gather<nvfp4>)->Name("gather_nvfp4")->Apply(shapes);
BENCHMARK(gather<nvfp4_residual>)->Name("gather_nvfp4_residual")->Apply(few_shapes);
BENCHMARK(gather<nvfp4, addresses::table>)->Name("gather_nvfp4/block_table")->Apply(few_shapes);
BENCHMARK(gather<fp8, addresses::flat, true>)->Name("gather_fp8/programmatic")->Apply(few_shapes);
BENCHMARK(gather<nvfp4, addresses::flat, true>)->Name("gather_nvfp4/programmatic")->Apply(few_shapes);
BENCHMARK(gather<v32_to_bf16>)->Name("gather_v32_to_bf16")->Apply(format_shapes);
BENCHMARK(gather<v32_to_bf16, addresses::pages>)->Name("gather_v32_to_bf16/whole_pages")->Apply(format_shapes);
BENCHMARK(gather<v4_to_bf16>)->Name("gather_v4_to_bf16")->Apply(format_shapes);
BENCHMARK(gather<v41>)->Name("gather_v41")->Apply(format_shapes);
BENCHMARK(gather<v41_to_bf16>)->Name("gather_v41_to_bf16")->Apply(format_shapes);
BENCHMARK(gather<vllm_nvfp4_to_bf16>)->Name("gather_vllm_nvfp4_to_bf16")->Apply(format_shapes);
BENCHMARK(gather<fp8_to_bf16>)->Name("gather_fp8_to_bf16")->Apply(format_shapes);
BENCHMARK(gather<nvfp4_to_bf16>)->Name("gather_nvfp4_to_bf16")->Apply(format_shapes);
BENCHMARK(plain_beside_ours)->Name("plain_v32_to_bf16")->Apply(format_shapes);
BENCHMARK(gather_then_memset)->Name("gather_nvfp4_then_memset")->Apply(small_shapes);

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv); }
