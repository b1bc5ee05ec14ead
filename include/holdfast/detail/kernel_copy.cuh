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

/// A chunk a block, of one warp, whose first lane has it copied into shared memory and out again.
template <class Copy>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(32) copy_chunks_kernel(const __grid_constant__ Copy copy) {
  const typename Copy::chunk chunk = copy.at(blockIdx.x);
  if constexpr (has_bulk_copies) {
    __shared__ alignas(128) std::byte memory[Copy::chunk_bytes];
    __shared__ bulk_barrier barrier;
    if (threadIdx.x != 0) return;
    barrier.init();
    wait_for_predecessors();
    barrier.expect(chunk.bytes);
    barrier.copy(memory, chunk.from, chunk.bytes);
    barrier.wait();
    let_successors_start();
    bulk_copy_out(chunk.to, memory, chunk.bytes);
    bulk_copies_out_have_read();
  } else {
    for (std::uint32_t at = threadIdx.x * 16; at < chunk.bytes; at += 32 * 16)
      store_packet(chunk.to + at, load_packet<packet16>(chunk.from + at));
  }
}

HOLDFAST_HIDDEN inline void run_chunks(cudaStream_t stream, const chunked_copy& copy) {
  launch(stream, "copy", copy.chunks, 32, false, copy_chunks_kernel<chunked_copy>, copy);
}

HOLDFAST_HIDDEN inline void run_copy(cudaStream_t stream, const copy_plan& plan) {
  if (const chunked_copy chunked(plan); chunked.chunks != 0) return run_chunks(stream, chunked);
  with_copy_op(plan, [&](const auto& op) { run_row_op(stream, op); });
}

}  // namespace holdfast::HOLDFAST_ABI::detail
