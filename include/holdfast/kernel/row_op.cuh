// Row operations on CUDA: the executor kernel, and `run_row_op` for a cudaStream_t. See row_op.hpp.
#pragma once

#include <holdfast/detail/kernel_launch.cuh>
#include <holdfast/kernel/row_op.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

/// What the grids before this one wrote is there once this returns (at once, unless the launch was programmatic).
__device__ inline void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// A successor that was launched programmatically may start; it waits for this grid's end before it uses its results.
__device__ inline void let_successors_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Numbers instead of a row_op_shape: nvcc 13.0 writes a stub that does not compile for a kernel with a class-type value
// among its template parameters.
template <std::uint32_t Threads, std::uint32_t Packets, class Op>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(Threads)
    row_op_kernel(const __grid_constant__ Op op, const __grid_constant__ row_op_tiling tiling) {
  using packet = decltype(op.load(std::int64_t{}, std::int32_t{}));
  wait_for_predecessors();
  for (std::int64_t tile = blockIdx.x; tile < tiling.tiles; tile += gridDim.x) {
    const auto start = tiling.start_of(tile, std::int64_t{Threads} * Packets);
    const std::int64_t left = tiling.packets - start.packet;

    row_op_tiling::place places[Packets];
    packet packets[Packets];
#pragma unroll
    for (std::uint32_t i = 0; i < Packets; ++i) {
      const std::uint32_t in_tile = i * Threads + threadIdx.x;
      if (in_tile >= left) continue;
      places[i] = tiling.place_of(start, in_tile);
      packets[i] = op.load(places[i].unit, places[i].part);
    }
    let_successors_start();
#pragma unroll
    for (std::uint32_t i = 0; i < Packets; ++i) {
      const std::uint32_t in_tile = i * Threads + threadIdx.x;
      if (in_tile < left) op.store(places[i].unit, places[i].part, packets[i]);
    }
  }
}

}  // namespace detail

/// Runs `op` as one kernel in stream order, on the stream's device; a node of the graph when the stream captures.
/// Nothing is launched when there are no units or no parts. Throws logic_error as the host's does, device_error when the
/// launch fails.
template <row_op_shape Shape, row_operation Op>
HOLDFAST_HIDDEN void run_row_op(cudaStream_t stream, const Op& op) {
  static_assert(Shape.threads > 0 && Shape.threads <= 1024 && Shape.threads % 32 == 0 && Shape.packets > 0 &&
                    Shape.max_blocks > 0 && Shape.max_blocks <= 0x7fffffff,
                "a block has 32 to 1024 threads in whole warps, and a grid at most 2^31 - 1 blocks");
  const auto tiling = detail::make_row_op_tiling(op.units(), op.parts(), Shape);
  if (tiling.tiles == 0) return;
  detail::launch(stream, "row operation", std::min(tiling.tiles, Shape.max_blocks), Shape.threads, Shape.programmatic,
                 detail::row_op_kernel<Shape.threads, Shape.packets, Op>, op, tiling);
}

template <row_operation Op>
HOLDFAST_HIDDEN void run_row_op(cudaStream_t stream, const Op& op) {
  run_row_op<detail::row_op_shape_of<Op>()>(stream, op);
}

}  // namespace holdfast::HOLDFAST_ABI
