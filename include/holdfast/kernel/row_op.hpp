// Row operations: data movement written once and run by both devices.
//
// An operation is a small value. It has `units()` units (rows, say) of `parts()` packets each, and knows how to load one
// packet and how to store it:
//
//   struct negate_rows {                                     // out[row] = -in[row], 4 floats a packet
//     const float* in; float* out; std::int64_t rows; std::int32_t row_packets;
//     HOLDFAST_HOST_DEVICE std::int64_t units() const { return rows; }
//     HOLDFAST_HOST_DEVICE std::int32_t parts() const { return row_packets; }
//     HOLDFAST_HOST_DEVICE float4 load(std::int64_t unit, std::int32_t part) const;          // reads
//     HOLDFAST_HOST_DEVICE void store(std::int64_t unit, std::int32_t part, float4) const;   // writes
//   };
//   holdfast::run_row_op(stream, negate_rows{...});          // host::stream_ref here; cudaStream_t in row_op.cuh
//
// Every (unit, part) is loaded and stored exactly once, in no particular order, and a thread loads several packets
// before it stores any: so no load may read what a store of the same run writes. A unit that has nothing to read
// (a tail row, an invalid index) is a load that returns zeros.
//
// How packets meet threads. The packets of all units form one sequence, cut into tiles; a block of threads takes a tile,
// and its thread t the packets t, t + threads, t + 2 threads, ... of it. Neighbouring threads so touch neighbouring
// packets whatever a unit's length, and short or odd units (one head of 8 elements, 17 heads) leave no lane idle. To find
// a packet's unit, a tile divides its 64-bit start once and each packet divides a 32-bit distance; both by
// multiplication. The host device walks the same tiles with the same arithmetic.
//
// Not here: reductions, shared memory, anything that couples packets.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_divisor.hpp>
#include <holdfast/detail/kernel_launch.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI {

template <class Op>
concept row_operation = std::is_trivially_copyable_v<Op> &&
    requires(const Op op, std::int64_t unit, std::int32_t part) {
  { op.units() } -> std::same_as<std::int64_t>;
  { op.parts() } -> std::same_as<std::int32_t>;
  op.store(unit, part, op.load(unit, part));
};

/// How an operation is spread over a GPU. An operation that has measured better says so in a static member `shape`.
struct row_op_shape {
  std::uint32_t threads = 256;           ///< of a block; a multiple of 32, at most 1024
  std::uint32_t packets = 4;             ///< that a thread loads before it stores any
  std::int64_t max_blocks = 0x7fffffff;  ///< the limit of a grid's x dimension; blocks loop when there are more tiles
  /// Launch so that the grid starts while its predecessor in the stream still runs, and waits for it. Saves part of a
  /// launch, and gives up a part of stream order: the grid waits for its direct predecessor only, which covers the work
  /// before that only if the predecessor waited for it, too. So not the default.
  bool programmatic = false;

  [[nodiscard]] constexpr std::int64_t tile() const { return std::int64_t{threads} * packets; }
};

namespace detail {

template <class Op>
consteval row_op_shape row_op_shape_of() {
  if constexpr (requires { Op::shape; }) {
    return Op::shape;
  } else {
    return {};
  }
}

/// Where the packets of a run are: made on the host, used on both devices.
struct row_op_tiling {
  /// Keeps a tile's start within a unit plus a place in the tile below 2^31.
  static constexpr std::int32_t max_parts = std::int32_t{1} << 30;

  std::int64_t packets = 0;  // of all units
  std::int64_t tiles = 0;
  divisor64 start_by_parts;
  divisor32 by_parts;

  struct place {
    std::int64_t unit;
    std::int32_t part;
  };

  /// The tile's first packet, found once for all packets of the tile.
  struct tile_start {
    std::int64_t packet;
    std::int64_t unit;
    std::uint32_t part;
  };

  [[nodiscard]] HOLDFAST_HOST_DEVICE constexpr tile_start start_of(std::int64_t tile, std::int64_t tile_packets) const {
    const std::int64_t packet = tile * tile_packets;
    const auto unit = static_cast<std::int64_t>(start_by_parts.quotient(static_cast<std::uint64_t>(packet)));
    return {packet, unit, static_cast<std::uint32_t>(packet - unit * start_by_parts.divisor)};
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE constexpr place place_of(const tile_start& start, std::uint32_t in_tile) const {
    const std::uint32_t distance = start.part + in_tile;
    const std::uint32_t units = by_parts.quotient(distance);
    return {start.unit + units, static_cast<std::int32_t>(distance - units * by_parts.divisor)};
  }
};

/// Throws logic_error when the counts cannot be run; has no tiles when there is nothing to do.
[[nodiscard]] inline row_op_tiling make_row_op_tiling(std::int64_t units, std::int32_t parts,
                                                      const row_op_shape& shape) {
  if (units < 0 || parts < 0 || parts > row_op_tiling::max_parts)
    throw logic_error("row operation: " + std::to_string(units) + " units of " + std::to_string(parts) +
                      " packets asked; units count from 0, packets of a unit from 0 to " +
                      std::to_string(row_op_tiling::max_parts));
  row_op_tiling tiling;
  if (units == 0 || parts == 0) return tiling;
  std::int64_t rounded = 0;  // the last tile's end must be a number, too
  if (__builtin_mul_overflow(units, std::int64_t{parts}, &tiling.packets) ||
      __builtin_add_overflow(tiling.packets, shape.tile() - 1, &rounded))
    throw logic_error("row operation: " + std::to_string(units) + " units of " + std::to_string(parts) +
                      " packets asked, more than 2^63 - 1 packets in all");
  tiling.tiles = rounded / shape.tile();
  tiling.start_by_parts = divisor64(parts);
  tiling.by_parts = divisor32(parts);
  return tiling;
}

template <row_op_shape Shape, row_operation Op>
void run_row_op_on_host(const Op& op, const row_op_tiling& tiling) {
  using packet = decltype(op.load(std::int64_t{}, std::int32_t{}));
  for (std::int64_t tile = 0; tile < tiling.tiles; ++tile) {
    const auto start = tiling.start_of(tile, Shape.tile());
    for (std::uint32_t thread = 0; thread < Shape.threads; ++thread) {
      std::array<row_op_tiling::place, Shape.packets> places;
      std::array<packet, Shape.packets> packets;
      std::size_t loaded = 0;
      for (; loaded < places.size(); ++loaded) {
        const auto in_tile = static_cast<std::uint32_t>(loaded) * Shape.threads + thread;
        if (in_tile >= tiling.packets - start.packet) break;
        places[loaded] = tiling.place_of(start, in_tile);
        packets[loaded] = op.load(places[loaded].unit, places[loaded].part);
      }
      for (std::size_t i = 0; i < loaded; ++i) op.store(places[i].unit, places[i].part, packets[i]);
    }
  }
}

}  // namespace detail

/// Runs `op` in stream order: as one kernel of the stream, so captured into a graph when the stream captures. What `op`
/// points to must live until then. Nothing at all is queued when there are no units or no parts. Throws logic_error when
/// a unit has more than 2^30 packets or all units together 2^63.
template <row_op_shape Shape, row_operation Op>
void run_row_op(host::stream_ref stream, const Op& op) {
  const auto tiling = detail::make_row_op_tiling(op.units(), op.parts(), Shape);
  if (tiling.tiles == 0) return;
  detail::launch(stream, "row operation", [op, tiling] { detail::run_row_op_on_host<Shape>(op, tiling); });
}

template <row_operation Op>
void run_row_op(host::stream_ref stream, const Op& op) {
  run_row_op<detail::row_op_shape_of<Op>()>(stream, op);
}

}  // namespace holdfast::HOLDFAST_ABI
