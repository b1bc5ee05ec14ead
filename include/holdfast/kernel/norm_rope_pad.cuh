// norm_rope_pad on CUDA. See norm_rope_pad.hpp. A warp takes a head.
#pragma once

#include <holdfast/detail/kernel_launch.cuh>
#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/norm_rope_pad.hpp>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/version.hpp>

#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

template <class Pairs, int Slots, bool HalfSplit, int Warps>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(Warps* lanes) norm_rope_kernel(const __grid_constant__ norm_rope op) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % lanes);
  const std::int64_t number = std::int64_t{blockIdx.x} * Warps + threadIdx.x / lanes;
  wait_for_predecessors();
  if (number >= op.heads_in_all) return;

  const auto at = op.place_of(number);
  const std::byte* const from = op.from(at) + 16 * lane;
  packet16 in[Slots]{};
  packet_angles<HalfSplit> angles{};
  const float* row_angles = nullptr;
  // The packet that may turn is in the last slot.
  const std::int32_t turned = (Slots - 1) * lanes + lane - (op.packets - rope_packets);
  const bool turns = turned >= 0 && turned < rope_packets;
  if (at.row < op.limit.of(op.rows)) {
    const auto position = op.position_of(at.row);
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot)
      if (slot < Slots - 1 || turned < rope_packets) in[slot] = load_packet<packet16>(from + 16 * lanes * slot);
    __syncwarp();  // else the compiler may have those loads wait for the position
    row_angles = op.angles_at(position);
    if (turns && row_angles != nullptr) angles = load_angles<HalfSplit>(row_angles, turned);
  }
  let_successors_start();

  float sum = sum_of_squares<Pairs>(in[0]);
#pragma unroll
  for (int slot = 1; slot < Slots; ++slot) sum = exact_sum(sum, sum_of_squares<Pairs>(in[slot]));
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) sum = exact_sum(sum, __shfl_xor_sync(~0u, sum, distance));
  const float scale = op.scale_of(sum);

  std::byte* const to = op.to(at) + 16 * lane;
#pragma unroll
  for (int slot = 0; slot < Slots; ++slot) {
    const bool last = slot == Slots - 1;
    const bool exists = !last || turned < rope_packets;
    packet16 out{};
    if (row_angles != nullptr) {  // the same in all lanes
      eight_floats values{};
      if (exists) values = normalised<Pairs>(op, in[slot], slot * lanes + lane, scale);
      if constexpr (HalfSplit) {
        eight_floats others;
#pragma unroll
        for (int i = 0; last && i < 8; ++i) others.at[i] = __shfl_xor_sync(~0u, values.at[i], 4);
        if (last && turns) rotate_half_split(values, others, turned, angles);
      } else {
        if (last && turns) rotate_adjacent(values, angles);
      }
      out = narrow<Pairs>(values);
    }
    if (exists) store_packet(to + 16 * lanes * slot, out);
  }
}

template <class Pairs, int Slots, bool HalfSplit, int Warps>
HOLDFAST_HIDDEN void launch_norm(cudaStream_t stream, const norm_rope& op, bool programmatic) {
  launch(stream, "norm_rope_pad", (op.heads_in_all + Warps - 1) / Warps, Warps * lanes, programmatic,
         norm_rope_kernel<Pairs, Slots, HalfSplit, Warps>, op);
}

template <class T>
HOLDFAST_HIDDEN void run_norm(cudaStream_t stream, const norm_rope& op, bool programmatic) {
  with_norm_kind(op, [&]<int Slots, bool HalfSplit>() {
    launch_norm<pairs_of<T>, Slots, HalfSplit, norm_warps>(stream, op, programmatic);
  });
}

}  // namespace detail

/// As the host's, on the stream's device; the current device is left as it was. Anything that converts to cudaStream_t is
/// accepted. Throws device_error, too, when the launch fails.
template <detail::mdspan_like In, detail::mdspan_like Positions, detail::mdspan_like Table, detail::mdspan_like Out>
HOLDFAST_HIDDEN void norm_rope_pad(cudaStream_t stream, const In& in, const Positions& positions, const Table& cos_sin,
                                   const Out& out, const norm_rope_options& options = {}) {
  detail::run_norm<typename Out::element_type>(stream, detail::plan_norm(in, positions, cos_sin, out, options),
                                               options.programmatic);
}

template <detail::mdspan_like In, detail::mdspan_like Positions, detail::mdspan_like Table, class T>
HOLDFAST_HIDDEN void norm_rope_pad(cudaStream_t stream, const In& in, const Positions& positions, const Table& cos_sin,
                                   const query_rows<T, cuda_device>& rows, const norm_rope_options& options = {}) {
  const auto op = detail::plan_norm(in, positions, cos_sin, rows.heads_view(), options);
  rows.pin(stream);
  detail::run_norm<T>(stream, op, options.programmatic);
}

template <detail::mdspan_like In, detail::mdspan_like Positions, detail::mdspan_like Table, class T>
[[nodiscard]] HOLDFAST_HIDDEN query_rows<T, cuda_device> norm_rope_pad(cudaStream_t stream, const In& in,
                                                                       const Positions& positions, const Table& cos_sin,
                                                                       padded_query_buffer<T, cuda_device>& buffer,
                                                                       const norm_rope_options& options = {}) {
  return detail::fill_rows_of(
      buffer, "norm_rope_pad", stream, detail::side_of("in", in).extents,
      [&](const auto& rows) { norm_rope_pad(stream, in, positions, cos_sin, rows.heads_view(), options); });
}

}  // namespace holdfast::HOLDFAST_ABI
