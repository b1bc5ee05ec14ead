// verify_padding on CUDA. See verify_padding.hpp.
//
// One kernel, without a memset before it: what blocks find is added up in the padding_check's `found`, which is zero
// between checks. The block that arrives last writes the report, and zeroes it again.
#pragma once

#include <holdfast/detail/kernel_launch.cuh>
#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/kernel/verify_padding.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

template <std::uint32_t Threads, std::uint32_t Packets, class Packet>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(Threads)
    verify_kernel(const __grid_constant__ checked_padding<Packet> op, const __grid_constant__ row_op_tiling tiling,
                  padding_check* check) {
  constexpr std::int64_t tile_packets = std::int64_t{Threads} * Packets;
  wait_for_predecessors();
  const std::int64_t in_all = op.limit.of(op.rows) * op.row_packets;
  padding_found found;
  for (std::int64_t tile = blockIdx.x; tile * tile_packets < in_all; tile += gridDim.x) {
    const auto start = tiling.start_of(tile, tile_packets);
    const std::int64_t left = in_all - start.packet;
    Packet packets[Packets];
#pragma unroll
    for (std::uint32_t i = 0; i < Packets; ++i) {
      const std::uint32_t in_tile = i * Threads + threadIdx.x;
      packets[i] = in_tile < left ? op.load(tiling.place_of(start, in_tile)) : Packet{};
    }
#pragma unroll
    for (std::uint32_t i = 0; i < Packets; ++i)
      if (!op.is_zero(packets[i])) op.add(tiling.place_of(start, i * Threads + threadIdx.x), packets[i], found);
  }
  let_successors_start();

  if (found.bad_bytes != 0) {
    atomicAdd(&check->found.bad_bytes, found.bad_bytes);
    atomicMax(&check->found.inverted_first, found.inverted_first);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicInc(&check->arrived, gridDim.x - 1) != gridDim.x - 1) return;  // the last one wraps it to zero
  __threadfence();
  check->report.bad_bytes = static_cast<std::int64_t>(atomicExch(&check->found.bad_bytes, 0ull));
  check->report.first_bad_offset = static_cast<std::int64_t>(~atomicExch(&check->found.inverted_first, 0ull));
}

template <row_op_shape Shape, class Packet>
HOLDFAST_HIDDEN void launch_check(cudaStream_t stream, const checked_padding<Packet>& op, padding_check* check,
                                  bool programmatic) {
  const auto tiling = make_row_op_tiling(op.rows, op.row_packets, Shape);
  const std::int64_t blocks = std::clamp<std::int64_t>(tiling.tiles, 1, Shape.max_blocks);
  launch(stream, "verify_padding", blocks, Shape.threads, programmatic,
         verify_kernel<Shape.threads, Shape.packets, Packet>, op, tiling, check);
}

HOLDFAST_HIDDEN inline void run_check(cudaStream_t stream, const padding_bytes& padding, padding_check* check,
                                      const verify_padding_options& options) {
  refuse_null(check);
  with_checked_padding(padding, options.rows,
                       [&](const auto& op) { launch_check<verify_shape>(stream, op, check, options.programmatic); });
}

}  // namespace detail

/// As the host's, on the stream's device; the current device is left as it was. Anything that converts to cudaStream_t is
/// accepted. Throw device_error, too, when the launch fails.
template <detail::mdspan_like View>
HOLDFAST_HIDDEN void verify_padding_async(cudaStream_t stream, const View& view, std::int64_t heads,
                                          padding_check* check, const verify_padding_options& options = {}) {
  detail::run_check(stream, detail::padding_of(view, heads), check, options);
}

template <class Handle>
requires detail::is_padded_handle<Handle, cuda_device> HOLDFAST_HIDDEN void verify_padding_async(
    cudaStream_t stream, const Handle& rows, padding_check* check, const verify_padding_options& options = {}) {
  const auto padding = detail::padding_of(rows);
  detail::refuse_null(check);
  rows.pin(stream);
  detail::run_check(stream, padding, check, options);
}

template <class T>
HOLDFAST_HIDDEN void verify_padding_async(cudaStream_t stream, padded_query_buffer<T, cuda_device>& buffer,
                                          padding_check* check, const verify_padding_options& options = {}) {
  verify_padding_async(stream, buffer.acquire(stream, buffer.capacity()), check, options);
}

template <detail::mdspan_like View>
[[nodiscard]] HOLDFAST_HIDDEN padding_report verify_padding(cudaStream_t stream, const View& view, std::int64_t heads,
                                                            const verify_padding_options& options = {}) {
  return detail::check_and_wait<cuda_device>(
      stream, [&](padding_check* check) { verify_padding_async(stream, view, heads, check, options); });
}

template <class Padded>
  requires(!detail::mdspan_like<Padded>)
[[nodiscard]] HOLDFAST_HIDDEN padding_report verify_padding(cudaStream_t stream, Padded&& padded,
                                                            const verify_padding_options& options = {}) {
  return detail::check_and_wait<cuda_device>(
      stream, [&](padding_check* check) { verify_padding_async(stream, padded, check, options); });
}

}  // namespace holdfast::HOLDFAST_ABI
