// kernel_copy.hpp's copy on CUDA. Its kernels (chunks, and one a packet width) know no element type.
#pragma once

#include <holdfast/detail/kernel_bulk.cuh>
#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_launch.cuh>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// A chunk a block, of one warp, which has its pieces copied into shared memory, and the whole out again.
template <class Copy>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(32) copy_chunks_kernel(const __grid_constant__ Copy copy) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  [[maybe_unused]] __shared__ alignas(128) std::byte memory[Copy::chunk_bytes];
  [[maybe_unused]] __shared__ bulk_barrier barrier;
  if constexpr (has_bulk_copies) {
    if (lane == 0) barrier.init();
    __syncwarp();
  }
  wait_for_predecessors();
  const copy_chunk chunk = copy.chunk(blockIdx.x);
  if (chunk.pieces == 0) {
    for (std::uint32_t at = threadIdx.x * 16; at < chunk.bytes; at += 32 * 16) store_packet(chunk.to + at, packet16{});
    return;
  }
  if constexpr (has_bulk_copies) {
    if (lane == 0) barrier.expect(chunk.bytes);
    __syncwarp();
    if (lane < chunk.pieces) {
      const copy_piece piece = copy.piece(blockIdx.x, lane);
      barrier.copy(memory + piece.at, piece.from, piece.bytes);
    }
    if (lane != 0) return;
    barrier.wait();
    let_successors_start();
    bulk_copy_out(chunk.to, memory, chunk.bytes);
    bulk_copies_out_have_read();
  } else {
    for (std::int32_t p = 0; p < chunk.pieces; ++p) {
      const copy_piece piece = copy.piece(blockIdx.x, p);
      for (std::uint32_t at = threadIdx.x * 16; at < piece.bytes; at += 32 * 16)
        store_packet(chunk.to + piece.at + at, load_packet<packet16>(piece.from + at));
    }
  }
}

template <class Copy>
HOLDFAST_HIDDEN void run_chunks(cudaStream_t stream, const Copy& copy, bool programmatic = false) {
  launch(stream, copy.kernel, copy.chunks, 32, programmatic, copy_chunks_kernel<Copy>, copy);
}

HOLDFAST_HIDDEN inline void run_copy(cudaStream_t stream, const copy_plan& plan) {
  if (const chunked_copy chunked(plan); chunked.chunks != 0) return run_chunks(stream, chunked);
  with_copy_op(plan, [&](const auto& op) { run_row_op(stream, op); });
}

}  // namespace holdfast::HOLDFAST_ABI::detail
