// kernel_gather.hpp's gathers on CUDA: the kernel and its launch.
//
// A warp takes a few rows. Its first lanes find one each, side by side (so that the latencies of indices, lengths and block
// tables are waited for once), and leave the addresses in shared memory for all lanes. Then each lane moves its packets,
// several loads in flight. No warp waits for another.
#pragma once

#include <holdfast/detail/kernel_gather.hpp>
#include <holdfast/detail/kernel_launch.cuh>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/version.hpp>

#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

inline constexpr std::uint32_t gather_warps = 4;  // of a block

template <std::int32_t Rows, class Gather>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(gather_warps * 32)
    gather_kernel(const __grid_constant__ Gather gather) {
  using source = typename Gather::source;
  __shared__ alignas(16) source sources[gather_warps][Rows];
  const std::uint32_t warp = threadIdx.x / 32;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int64_t first = (std::int64_t{blockIdx.x} * gather_warps + warp) * Rows;
  const std::int64_t left = gather.to.rows - first;

  wait_for_predecessors();
  if (lane < Rows) sources[warp][lane] = lane < left ? gather.source_of(first + lane) : source{};
  const auto shared = gather.shared();
  __syncwarp();

  constexpr std::int32_t batch = Rows < gather_batch ? Rows : gather_batch;
#pragma unroll
  for (std::int32_t begin = 0; begin < Rows; begin += batch) {
    typename Gather::packet packets[batch];
#pragma unroll
    for (std::int32_t i = 0; i < batch; ++i) {
      const gather_place at = Gather::template place_of<Rows>((begin + i) * 32 + lane);
      packets[i] = gather.load(sources[warp][at.row], at.packet);
    }
    if (begin + batch == Rows) let_successors_start();
#pragma unroll
    for (std::int32_t i = 0; i < batch; ++i) {
      const gather_place at = Gather::template place_of<Rows>((begin + i) * 32 + lane);
      if (at.row < left) gather.store(first + at.row, at.packet, packets[i], shared);
    }
  }
}

template <std::int32_t Rows, class Gather>
HOLDFAST_HIDDEN void launch_gather(cudaStream_t stream, const Gather& gather) {
  constexpr std::int64_t rows_of_a_block = std::int64_t{gather_warps} * Rows;
  static_assert(most_rows_of_gathers / gather_warps < 0x7fffffff);
  launch(stream, "gather_rows", (gather.to.rows + rows_of_a_block - 1) / rows_of_a_block, gather_warps * 32, false,
         gather_kernel<Rows, Gather>, gather);
}

}  // namespace holdfast::HOLDFAST_ABI::detail
