// kernel_gather.hpp's gathers on CUDA: the kernel and its launch.
//
// A warp takes a few rows. Its first lanes find one each, side by side (so that the latencies of indices, lengths and block
// tables are waited for once), and leave the addresses in shared memory for all lanes; or, of rows that are staged, have
// the rows copied there. Then each lane moves its packets, several loads in flight; or rows that are stored as they came are
// copied on from there. No warp waits for another.
#pragma once

#include <holdfast/detail/kernel_bulk.cuh>
#include <holdfast/detail/kernel_gather.hpp>
#include <holdfast/detail/kernel_launch.cuh>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI::detail {

template <std::int32_t Rows, class Gather>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(gather_warps<Rows, Gather> * 32)
    gather_kernel(const __grid_constant__ Gather gather) {
  using source = typename Gather::source;
  using packet = typename Gather::packet;
  constexpr std::int32_t warps = gather_warps<Rows, Gather>;
  constexpr std::int32_t turns = gather_turns<Rows, Gather>, batch = gather_batch<Rows, Gather>;
  constexpr bool whole_turns = Rows * Gather::packets_of_a_row == turns * 32 && turns % batch == 0;
  constexpr bool staged = Gather::staged && has_bulk_copies;
  __shared__ alignas(16) std::conditional_t<staged, typename Gather::staged_row, source> rows[warps][Rows];
  [[maybe_unused]] __shared__ bulk_barrier barriers[warps];
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32), lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp) * Rows;
  const std::int64_t left = gather.to.rows - first;

  if constexpr (staged) {
    if (lane == 0) barriers[warp].init();
    __syncwarp();
  }
  wait_for_predecessors();
  source found{};
  if (lane < Rows && lane < left) found = gather.source_of(first + lane);
  const auto shared = gather.shared();

  [[maybe_unused]] std::uint32_t valid = 0;
  if constexpr (staged) {
    valid = __ballot_sync(~0u, found.data != nullptr);
    if (lane == 0) barriers[warp].expect(static_cast<std::uint32_t>(__popc(valid)) * Gather::staged_bytes);
    __syncwarp();
    if (found.data != nullptr)
      Gather::stage(found, rows[warp][lane], [&](std::byte* to, const std::byte* from, std::uint32_t bytes) {
        barriers[warp].copy(to, from, bytes);
      });
    barriers[warp].wait();
    if constexpr (Gather::lanes_stage) __syncwarp();  // what they stored beside the copies
  } else {
    if (lane < Rows) rows[warp][lane] = found;
    __syncwarp();
  }
  if constexpr (staged && Gather::passed_on) {
    let_successors_start();
    if (valid == (1u << Rows) - 1 && gather.to.out_stride == std::int64_t{Gather::staged_bytes}) {  // side by side
      if (lane == 0) bulk_copy_out(gather.to.at(first), rows[warp][0].data, Rows * Gather::staged_bytes);
    } else {
      if (found.data != nullptr) bulk_copy_out(gather.to.at(first + lane), rows[warp][lane].data, Gather::staged_bytes);
      for (std::int32_t row = 0; row < Rows && row < left; ++row)
        if ((valid >> row & 1) == 0) gather.store(first + row, lane, packet{}, shared);
    }
    bulk_copies_out_have_read();
    return;
  }
  const auto load = [&](const gather_place& at) -> packet {
    if (!whole_turns && at.row >= Rows) return {};
    if constexpr (staged) {
      return valid >> at.row & 1 ? gather.load(Gather::source_in(rows[warp][at.row]), at.packet) : packet{};
    } else {
      const source from = rows[warp][at.row];
      return from.data != nullptr ? gather.load(from, at.packet) : packet{};
    }
  };

#pragma unroll(Gather::unrolled ? turns / batch : 1)
  for (std::int32_t begin = 0; begin < turns; begin += batch) {
    packet packets[batch];
#pragma unroll
    for (std::int32_t i = 0; i < batch; ++i) {
      packets[i] = load(Gather::template place_of<Rows>((begin + i) * 32 + lane));
    }
    if (begin + batch >= turns) let_successors_start();
#pragma unroll
    for (std::int32_t i = 0; i < batch; ++i) {
      const gather_place at = Gather::template place_of<Rows>((begin + i) * 32 + lane);
      if ((whole_turns || at.row < Rows) && at.row < left) gather.store(first + at.row, at.packet, packets[i], shared);
    }
  }
}

template <std::int32_t Rows, class Gather>
HOLDFAST_HIDDEN void launch_gather(cudaStream_t stream, const Gather& gather, bool programmatic) {
  constexpr std::int32_t warps = gather_warps<Rows, Gather>, rows_of_a_block = warps * Rows;
  static_assert(most_rows_of_gathers / rows_of_a_block <= 0x7fffffff);
  launch(stream, "gather_rows", (gather.to.rows + rows_of_a_block - 1) / rows_of_a_block, warps * 32, programmatic,
         gather_kernel<Rows, Gather>, gather);
}

}  // namespace holdfast::HOLDFAST_ABI::detail
