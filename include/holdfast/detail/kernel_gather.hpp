// What is under gather_rows: its checks, which pool row each pair names, and how rows are moved.
//
// `plan_gather` checks and decides on the host. `gathered_pairs` turns a pair into a flat pool row, or a negative number,
// and is the only place that judges indices; `pool_rows` turns a flat row into an address, and is asked for valid rows
// only. What a thread moves at once is a packet: 16 values of the output row here, 8 in kernel_gather_format.hpp; what is
// narrower, where a pool's addresses ask for it, is the loads behind it.
//
// A gather is no row operation (kernel/row_op.hpp): there, every lane would find its row by itself, and finding one
// (index, length, block table, two pools' pages) takes more instructions than moving a packet. Here, a lane finds a whole
// row for its warp. The rest is the same on both devices, too.
//
// Aligned rows are staged: copied whole into the warp's own memory (shared memory, on CUDA) before they are loaded.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/detail/kernel_divisor.hpp>
#include <holdfast/detail/kernel_exact.hpp>
#include <holdfast/detail/kernel_fp8.hpp>
#include <holdfast/detail/kernel_nvfp4.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/detail/kernel_words.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/version.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

namespace holdfast::inline HOLDFAST_ABI::detail {

// --- on both devices -------------------------------------------------------------------------------------------------

/// The rows of a pool, by flat index.
struct pool_rows {
  const std::byte* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t page_stride = 0;  // unused when not paged
  divisor64 by_page;
  bool paged = false;

  [[nodiscard]] HOLDFAST_HOST_DEVICE const std::byte* at(std::int64_t row) const {
    if (!paged) return data + row * row_stride;
    const auto page = static_cast<std::int64_t>(by_page.quotient(static_cast<std::uint64_t>(row)));
    return data + page * page_stride + (row - page * by_page.divisor) * row_stride;
  }
};

/// Which pool row each pair names. Strides are in elements.
template <class Index>
struct gathered_pairs {
  const Index* indices = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  std::int64_t pairs = 0;
  std::int64_t pool_rows = 0;
  const std::int32_t* row_lengths = nullptr;
  const std::int32_t* row_requests = nullptr;
  const std::int32_t* table = nullptr;
  std::int64_t table_requests = 0;
  std::int64_t table_pages = 0;
  std::int64_t table_stride = 0;
  divisor64 by_topk;
  divisor64 by_page;
  bool one_row = true;  // pairs are the columns of row 0
  Index* remap = nullptr;
  std::int64_t remap_stride = 0;

  struct place {
    std::int64_t row;
    std::int64_t column;
  };

  [[nodiscard]] HOLDFAST_HOST_DEVICE place place_of(std::int64_t pair) const {
    if (one_row) return {0, pair};
    const auto row = static_cast<std::int64_t>(by_topk.quotient(static_cast<std::uint64_t>(pair)));
    return {row, pair - row * by_topk.divisor};
  }

  /// Negative when the pair names no row of the pool, or is a row of the tail.
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t find(std::int64_t pair) const {
    if (pair >= pairs) return -1;
    const place at = place_of(pair);
    if (row_lengths != nullptr && at.column >= row_lengths[at.row]) return -1;
    const auto index = static_cast<std::int64_t>(indices[at.row * row_stride + at.column * column_stride]);
    const std::int64_t row = table == nullptr ? index : translate(at.row, index);
    return row < pool_rows ? row : -1;
  }

  HOLDFAST_HOST_DEVICE void report(std::int64_t pair, bool valid) const {
    if (remap == nullptr || pair >= pairs) return;
    const place at = place_of(pair);
    remap[at.row * remap_stride + at.column] = static_cast<Index>(valid ? pair : -1);
  }

 private:
  /// The flat row of a position in the request of a row; negative where the table has no page for it.
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t translate(std::int64_t row, std::int64_t position) const {
    if (position < 0) return -1;
    const auto page = static_cast<std::int64_t>(by_page.quotient(static_cast<std::uint64_t>(position)));
    if (page >= table_pages) return -1;
    const std::int64_t request = row_requests == nullptr ? row : row_requests[row];
    if (request < 0 || request >= table_requests) return -1;
    const std::int64_t block = table[request * table_stride + page];
    return block * by_page.divisor + (position - page * by_page.divisor);  // of a negative block: negative
  }
};

/// The rows that are written: those of the pairs, then the tail's.
template <class Index>
struct gather_to {
  gathered_pairs<Index> pairs;
  std::byte* out = nullptr;
  std::int64_t out_stride = 0;
  std::int64_t rows = 0;

  [[nodiscard]] HOLDFAST_HOST_DEVICE std::byte* at(std::int64_t row) const { return out + row * out_stride; }

  HOLDFAST_HOST_DEVICE void store(std::int64_t row, std::int32_t packet, const packet16& values) const {
    store_packet(at(row) + std::int64_t{packet} * 16, values);
  }
};

/// A packet among those of the rows that a warp takes.
struct gather_place {
  std::int32_t row;
  std::int32_t packet;
};

// A gather: `source_of(row)` judges the row's index once, and tells the remap; its data is null where a row of zeros is
// written. `shared()` is read once by each thread; `load(source, at)` and `store(row, at, loaded, shared)` move a packet, of
// which a row has `packets_of_a_row`. Of a null source nothing is loaded: what is stored instead is `packet{}`.
//
// Its shape: a warp takes `rows_of_a_warp`, loads `rows_of_a_batch` of them before it stores any, and has
// `warps_of_a_block` - 1 others beside it. In a small gather it takes one row. `place_of` says which packet each lane takes
// in each turn; a row behind the warp's is none.
//
// A gather that is `staged` also has `stage(source, staged_row, copy)`, which calls `copy(to, from, bytes)` for each piece
// of a row (addresses and bytes are multiples of 16, and `staged_bytes` in all), and `source_in(staged_row)`, from which `load`
// loads as ever. With `lanes_stage`, the lane that calls `stage` writes some of the row itself. With `passed_on`, a staged
// row is what is stored.
//
// The batches of one that is `unrolled` are code of their own each: half the instructions a packet, where places are constants.

inline constexpr std::int32_t fp8_row_packets = fp8_row::bytes / 16;
static_assert(fp8_row_packets == 32, "a packet of the row for each lane of a warp");

/// FP8 rows, as they are. `Width` bytes are loaded at once; with 16, rows are staged, and go on from there.
template <class Index_, std::size_t Width>
struct gather_fp8 {
  using Index = Index_;
  static constexpr std::int32_t rows_of_a_warp = 2, rows_of_a_batch = 2, warps_of_a_block = 4;
  static constexpr std::int32_t packets_of_a_row = fp8_row_packets;
  static constexpr bool staged = Width == 16, passed_on = staged, lanes_stage = false, unrolled = false;

  struct source {
    const std::byte* data;
  };
  struct alignas(128) staged_row {
    std::byte data[fp8_row::bytes];
  };
  static constexpr std::uint32_t staged_bytes = fp8_row::bytes;
  struct shared_values {};
  using packet = packet16;

  gather_to<Index> to;
  pool_rows pool;

  [[nodiscard]] HOLDFAST_HOST_DEVICE source source_of(std::int64_t row) const {
    const std::int64_t found = to.pairs.find(row);
    to.pairs.report(row, found >= 0);
    return {found >= 0 ? pool.at(found) : nullptr};
  }

  template <class Copy>
  HOLDFAST_HOST_DEVICE static void stage(const source& from, staged_row& to, const Copy& copy) {
    copy(to.data, from.data, staged_bytes);
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE static source source_in(const staged_row& row) { return {row.data}; }

  [[nodiscard]] HOLDFAST_HOST_DEVICE shared_values shared() const { return {}; }

  template <std::int32_t Rows>
  [[nodiscard]] HOLDFAST_HOST_DEVICE static gather_place place_of(std::int32_t packet_of_warp) {
    return {packet_of_warp / fp8_row_packets, packet_of_warp % fp8_row_packets};
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const source& from, std::int32_t at) const {
    const auto loaded = load_words<16, Width>(from.data + at * 16);
    return {{loaded.word[0], loaded.word[1], loaded.word[2], loaded.word[3]}};
  }

  HOLDFAST_HOST_DEVICE void store(std::int64_t row, std::int32_t at, const packet& loaded, shared_values) const {
    to.store(row, at, loaded);
  }
};

/// NVFP4 rows, dequantised: a packet is a group. `Width` bytes of data are loaded at once, and scales one by one. With a
/// `Width` of 16, which data and scales must both allow, rows are staged.
template <std::int32_t Residual, class Index_, std::size_t Width>
struct gather_nvfp4 {
  using Index = Index_;
  using format = nvfp4_row<Residual>;
  static_assert(format::groups == fp8_row_packets);
  static constexpr bool staged = Width == 16;
  static constexpr bool passed_on = false, lanes_stage = false, unrolled = false;
  static_assert(!staged || Residual == 0, "rows with a residual have 36 scales: no multiple of 16");
  // What costs is reading 32 random bytes of scales a row: a warp that stages asks for many before it waits for any, and
  // holds them in no registers. Residual groups are bound by their instructions.
  static constexpr std::int32_t rows_of_a_warp = staged ? 16 : Residual == 0 ? 2 : 8;
  static constexpr std::int32_t rows_of_a_batch = staged ? 8 : rows_of_a_warp;
  static constexpr std::int32_t warps_of_a_block = staged ? 2 : Residual == 0 ? 4 : 1;
  static constexpr std::int32_t packets_of_a_row = fp8_row_packets;

  struct source {
    const std::byte* data;
    const std::byte* scales;
  };
  struct alignas(128) staged_row {  // of 64 Ki rows, 2 % quicker than side by side
    std::byte data[format::data_bytes];
    std::byte scales[format::scale_bytes];
  };
  static constexpr std::uint32_t staged_bytes = format::data_bytes + format::scale_bytes;
  struct shared_values {
    float global_scale;
  };
  struct nothing {};
  struct packet {
    e2m1_group main;
    std::conditional_t<Residual == 0, nothing, e2m1_group> residual;
    std::uint32_t scales;  // main's, and residual's in the second byte
    bool valid;
  };

  gather_to<Index> to;
  pool_rows data;
  pool_rows scales;
  float global_scale = 1;
  const float* global_scale_at = nullptr;

  [[nodiscard]] HOLDFAST_HOST_DEVICE source source_of(std::int64_t row) const {
    const std::int64_t found = to.pairs.find(row);
    to.pairs.report(row, found >= 0);
    if (found < 0) return {nullptr, nullptr};
    return {data.at(found), scales.at(found)};
  }

  template <class Copy>
  HOLDFAST_HOST_DEVICE static void stage(const source& from, staged_row& to, const Copy& copy) {
    copy(to.scales, from.scales, std::uint32_t{sizeof to.scales});
    copy(to.data, from.data, std::uint32_t{sizeof to.data});
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE static source source_in(const staged_row& row) { return {row.data, row.scales}; }

  [[nodiscard]] HOLDFAST_HOST_DEVICE shared_values shared() const {
    return {global_scale_at == nullptr ? global_scale : *global_scale_at};
  }

  /// A residual group takes several times the instructions of a plain one, so they come last: of eight rows, seven times
  /// 32 plain groups and once 32 residual ones, and no warp does both for a few lanes' sake.
  template <std::int32_t Rows>
  [[nodiscard]] HOLDFAST_HOST_DEVICE static gather_place place_of(std::int32_t packet_of_warp) {
    if constexpr (Residual == 0) {
      return {packet_of_warp / fp8_row_packets, packet_of_warp % fp8_row_packets};
    } else {
      constexpr auto plain = static_cast<std::uint32_t>(format::plain_groups);
      constexpr auto residual = static_cast<std::uint32_t>(format::residual_groups);
      constexpr std::uint32_t all_plain = static_cast<std::uint32_t>(Rows) * plain;
      const auto at = static_cast<std::uint32_t>(packet_of_warp);
      return at < all_plain ? gather_place{static_cast<std::int32_t>(at / plain), static_cast<std::int32_t>(at % plain)}
                            : gather_place{static_cast<std::int32_t>((at - all_plain) / residual),
                                           static_cast<std::int32_t>(plain + (at - all_plain) % residual)};
    }
  }

  [[nodiscard]] HOLDFAST_HOST_DEVICE packet load(const source& from, std::int32_t group) const {
    packet loaded{};
    loaded.valid = true;
    // nvfp4_row's offsets, which are host functions: a residual group takes two places
    const std::int32_t place = group < format::plain_groups ? group : 2 * group - format::plain_groups;
    loaded.main = load_group(from.data + place * format::group_bytes);
    loaded.scales = load_scale(from.scales + place);
    if constexpr (Residual != 0) {
      if (group >= format::plain_groups) {
        loaded.residual = load_group(from.data + (place + 1) * format::group_bytes);
        loaded.scales |= load_scale(from.scales + place + 1) << 8;
      }
    }
    return loaded;
  }

  HOLDFAST_HOST_DEVICE void store(std::int64_t row, std::int32_t group, const packet& loaded,
                                  shared_values shared) const {
    // a row of zeros stays one, whatever the global scale is
    const auto scale_of = [&](std::uint32_t scale) {
      return loaded.valid ? exact_product(float_of_e4m3(scale), shared.global_scale) : 0.0f;
    };
    const float scale = scale_of(loaded.scales);
    if constexpr (Residual != 0) {
      if (group >= format::plain_groups)
        return to.store(row, group,
                        e4m3_of_residual_group(loaded.main, scale, loaded.residual, scale_of(loaded.scales >> 8)));
    }
    to.store(row, group, e4m3_of_group(loaded.main, scale));
  }

 private:
  // A row that may have been staged is in whichever memory the compiler sees that it is.
  [[nodiscard]] HOLDFAST_HOST_DEVICE static e2m1_group load_group(const std::byte* from) {
    if constexpr (staged) {
      return load_packet<e2m1_group>(from);
    } else {
      const auto nibbles = load_words<8, Width>(from);
      return {nibbles.word[0], nibbles.word[1]};
    }
  }
  [[nodiscard]] HOLDFAST_HOST_DEVICE static std::uint32_t load_scale(const std::byte* from) {
    if constexpr (staged) {
      return load_packet<std::uint8_t>(from);
    } else {
      return load_narrow<std::uint8_t>(from);
    }
  }
};

/// Of a gather whose warps take `Rows` rows: the turns in which all lanes take a packet each, how many are loaded before any
/// is stored, and the warps of a block.
template <std::int32_t Rows, class Gather>
inline constexpr std::int32_t gather_turns = (Rows * Gather::packets_of_a_row + 31) / 32;
template <std::int32_t Rows, class Gather>
inline constexpr std::int32_t gather_batch =
    gather_turns<(Rows < Gather::rows_of_a_batch ? Rows : Gather::rows_of_a_batch), Gather>;
template <std::int32_t Rows, class Gather>
inline constexpr std::int32_t gather_warps = Rows <= 4 ? 4 : Gather::warps_of_a_block;

/// A bulk copy of the host device. What a GPU would fault at is refused here, too.
inline void copy_aligned(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
    throw logic_error("gather_rows: a row that is not aligned was staged");
  std::memcpy(to, from, bytes);
}

/// As the kernel does it (kernel_gather.cuh): the sources of a few rows, then their packets in batches.
template <std::int32_t Rows, class Gather>
void run_gather_on_host(const Gather& gather) {
  constexpr std::int32_t turns = gather_turns<Rows, Gather>, batch = gather_batch<Rows, Gather>;
  const auto shared = gather.shared();
  for (std::int64_t first = 0; first < gather.to.rows; first += Rows) {
    typename Gather::source sources[Rows] = {};
    for (std::int32_t i = 0; i < Rows && i < gather.to.rows - first; ++i) sources[i] = gather.source_of(first + i);
    [[maybe_unused]] typename Gather::staged_row staged[Rows];
    if constexpr (Gather::staged) {
      for (std::int32_t i = 0; i < Rows; ++i) {
        if (sources[i].data == nullptr) continue;
        Gather::stage(sources[i], staged[i], copy_aligned);
        sources[i] = Gather::source_in(staged[i]);
      }
    }
    for (std::int32_t begin = 0; begin < turns; begin += batch)
      for (std::int32_t lane = 0; lane < 32; ++lane) {
        typename Gather::packet packets[batch] = {};
        for (std::int32_t i = 0; i < batch; ++i) {
          const gather_place at = Gather::template place_of<Rows>((begin + i) * 32 + lane);
          if (at.row < Rows && sources[at.row].data != nullptr) packets[i] = gather.load(sources[at.row], at.packet);
        }
        for (std::int32_t i = 0; i < batch; ++i) {
          const gather_place at = Gather::template place_of<Rows>((begin + i) * 32 + lane);
          if (at.row < Rows && at.row < gather.to.rows - first)
            gather.store(first + at.row, at.packet, packets[i], shared);
        }
      }
  }
}

// --- the plan --------------------------------------------------------------------------------------------------------

/// A row a warp is quicker while all warps fit on a GPU at once: about 64 on each of 132 multiprocessors.
inline constexpr std::int64_t most_rows_of_small_gathers = 8192;
/// Of staged rows. While nearly all warps run at once, each does best to ask for many rows before any is written; beyond
/// that reads and writes mix anyway, and small warps that come and go are 1 % quicker.
inline constexpr std::int64_t most_rows_of_one_wave = std::int64_t{1} << 19;
/// More would pass a grid's 2^31 - 1 blocks.
inline constexpr std::int64_t most_rows_of_gathers = std::int64_t{1} << 32;

/// A rank-1 view of pairs or a rank-2 view [rows, topk], as numbers; rank 1 is one row.
struct index_side {
  const void* data = nullptr;
  std::int64_t rows = 1;
  std::int64_t topk = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
  std::int64_t element_bytes = 4;
  bool rank_two = false;
};

struct output_side {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t elements = 0;
  std::int64_t row_stride = 0;
  std::int64_t element_stride = 1;
  std::int64_t element_bytes = 1;
};

[[nodiscard]] inline std::string to_text(const index_side& side) {
  const std::string type = " of int" + std::to_string(side.element_bytes * 8);
  return side.rank_two
             ? "indices are [" + std::to_string(side.rows) + ", " + std::to_string(side.topk) + "]" + type +
                   " with strides [" + std::to_string(side.row_stride) + ", " + std::to_string(side.column_stride) + "]"
             : "indices are [" + std::to_string(side.topk) + "]" + type;
}

[[nodiscard]] inline std::string to_text(const output_side& side) {
  return "out is [" + std::to_string(side.rows) + ", " + std::to_string(side.elements) + "] with strides [" +
         std::to_string(side.row_stride) + ", " + std::to_string(side.element_stride) + "]";
}

[[noreturn]] inline void refuse_gather(const std::string& why) { throw logic_error("gather_rows: " + why); }

template <class Indices>
[[nodiscard]] index_side index_side_of(const Indices& indices) {
  index_side side;
  side.data = static_cast<const void*>(indices.data_handle());
  side.element_bytes = std::int64_t{sizeof(typename Indices::element_type)};
  side.rank_two = Indices::rank() == 2;
  constexpr std::size_t last = Indices::rank() - 1;
  if constexpr (Indices::rank() == 2) {
    side.rows = static_cast<std::int64_t>(indices.extent(0));
    side.row_stride = static_cast<std::int64_t>(indices.stride(0));
  }
  side.topk = static_cast<std::int64_t>(indices.extent(last));
  side.column_stride = static_cast<std::int64_t>(indices.stride(last));
  return side;
}

template <class Out>
[[nodiscard]] output_side output_side_of(const Out& out) {
  return {reinterpret_cast<std::byte*>(out.data_handle()), static_cast<std::int64_t>(out.extent(0)),
          static_cast<std::int64_t>(out.extent(1)),        static_cast<std::int64_t>(out.stride(0)),
          static_cast<std::int64_t>(out.stride(1)),        std::int64_t{sizeof(typename Out::element_type)}};
}

/// Checks a pool and makes its strides explicit. `row_bytes` are read of each row.
template <class Pool>
[[nodiscard]] pool_rows plan_pool(const char* name, const Pool& pool, std::int64_t row_bytes) {
  const auto refuse = [&](const std::string& why) {
    refuse_gather("the pool of " + std::string(name) + " " + why + "; it has " + std::to_string(pool.rows) +
                  " rows with a stride of " + std::to_string(pool.row_stride_bytes) + " bytes, pages of " +
                  std::to_string(pool.page_rows) + " rows with a stride of " + std::to_string(pool.page_stride_bytes) +
                  " bytes, and a row takes " + std::to_string(row_bytes) + " bytes (a stride of 0: packed)");
  };
  if (pool.rows < 0 || pool.page_rows < 0 || pool.row_stride_bytes < 0 || pool.page_stride_bytes < 0)
    refuse("has a negative count or stride");
  if (pool.page_rows > std::numeric_limits<std::int32_t>::max()) refuse("has pages of more than 2^31 - 1 rows");
  if (pool.page_rows == 0 && pool.page_stride_bytes != 0) refuse("has a page stride, but no pages");
  pool_rows made;
  made.data = static_cast<const std::byte*>(pool.data);
  made.row_stride = pool.row_stride_bytes == 0 ? row_bytes : pool.row_stride_bytes;
  if (made.row_stride < row_bytes) refuse("has rows that overlap");
  const std::int64_t page_rows = pool.page_rows == 0 ? pool.rows : pool.page_rows;
  std::int64_t packed_page = 0, last_page = 0, last_row = 0, end = 0;
  bool fits = !__builtin_mul_overflow(page_rows, made.row_stride, &packed_page);
  made.page_stride = pool.page_stride_bytes == 0 ? packed_page : pool.page_stride_bytes;
  if (pool.page_rows != 0 && made.page_stride < row_bytes) refuse("has pages that overlap");
  if (pool.rows > 0) {
    const std::int64_t rows_of_a_page = page_rows < pool.rows ? page_rows : pool.rows;
    fits = fits && !__builtin_mul_overflow((pool.rows - 1) / page_rows, made.page_stride, &last_page) &&
           !__builtin_mul_overflow(rows_of_a_page - 1, made.row_stride, &last_row) &&
           !__builtin_add_overflow(last_page, last_row, &end) && !__builtin_add_overflow(end, row_bytes, &end);
  }
  if (!fits) refuse("passes 2^63 - 1 bytes");
  made.paged = pool.page_rows != 0 && made.page_stride != packed_page;
  if (made.paged) made.by_page = divisor64(static_cast<std::int32_t>(pool.page_rows));
  return made;
}

/// The widest of 16, 8, 4 and 1 bytes that divides all of a pool's addresses, and `most`.
[[nodiscard]] inline std::size_t load_width(const pool_rows& pool, std::size_t most) {
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(pool.data) | static_cast<std::uint64_t>(pool.row_stride) |
                             static_cast<std::uint64_t>(pool.paged ? pool.page_stride : 0) | most;
  const int zeros = std::countr_zero(bits);
  return zeros >= 4 ? 16 : zeros == 3 ? 8 : zeros == 2 ? 4 : 1;
}

/// The checks, and what of the plan no format changes. `elements` are in a row. Throws logic_error, as the launchers say.
template <class Index, class Options, class Pool, class Table>
[[nodiscard]] gather_to<Index> plan_gather(const index_side& indices, const output_side& out, std::int64_t elements,
                                           const Options& options, const Pool& pool, const Table& table) {
  constexpr std::int64_t most_topk = std::numeric_limits<std::int32_t>::max();
  const auto refuse = [&](const std::string& why) {
    refuse_gather(why + "; " + to_text(indices) + ", " + to_text(out) + ", tail_rows is " +
                  std::to_string(options.tail_rows));
  };
  gather_to<Index> to;
  gathered_pairs<Index>& pairs = to.pairs;

  if (indices.rows < 0 || indices.topk < 0) refuse("indices has a negative extent");
  if (options.tail_rows < 0) refuse("tail_rows is negative");
  if (__builtin_mul_overflow(indices.rows, indices.topk, &pairs.pairs) ||
      __builtin_add_overflow(pairs.pairs, options.tail_rows, &to.rows))
    refuse("more than 2^63 - 1 rows to write");
  if (to.rows > most_rows_of_gathers)
    refuse(std::to_string(to.rows) + " rows to write, more than " + std::to_string(most_rows_of_gathers));
  if (out.rows != pairs.pairs)
    refuse("out has " + std::to_string(out.rows) + " rows for " + std::to_string(pairs.pairs) +
           " indices (the tail is behind its rows)");
  if (out.elements != elements)
    refuse("out has rows of " + std::to_string(out.elements) + " elements, not " + std::to_string(elements));

  // the pool and its table
  const bool translated = table.data != nullptr;
  if (translated) {
    if (pool.page_rows <= 0) refuse_gather("a block table needs a pool with pages (page_rows is 0)");
    if (table.requests < 0 || table.pages < 0 || (table.row_stride != 0 && table.row_stride < table.pages))
      refuse_gather("the block table is [" + std::to_string(table.requests) + ", " + std::to_string(table.pages) +
                    "] with a row stride of " + std::to_string(table.row_stride));
    pairs.table = table.data;
    pairs.table_requests = table.requests;
    pairs.table_pages = table.pages;
    pairs.table_stride = table.row_stride == 0 ? table.pages : table.row_stride;
    std::int64_t entries = 0;
    if (__builtin_mul_overflow(pairs.table_requests, pairs.table_stride, &entries) ||
        __builtin_mul_overflow(entries, 4, &entries))
      refuse_gather("the block table passes 2^63 - 1 bytes");
    pairs.by_page = divisor64(static_cast<std::int32_t>(pool.page_rows));
  } else if (table.requests != 0 || table.pages != 0) {
    refuse_gather("the block table is null, but [" + std::to_string(table.requests) + ", " +
                  std::to_string(table.pages) + "]");
  }
  if (options.row_requests != nullptr && !translated) refuse_gather("row_requests needs a block table");
  if (to.rows == 0) return to;

  // what is written
  if (out.data == nullptr) refuse("the data of out is null");
  if (out.element_stride != 1) refuse("the elements of out's rows must lie side by side");
  to.out = out.data;
  std::int64_t last = 0, out_stride = 0;
  if (to.rows > 1 && out.row_stride < elements) refuse("rows of out overlap");
  if (__builtin_mul_overflow(out.row_stride, out.element_bytes, &out_stride) ||
      __builtin_mul_overflow(to.rows, out_stride, &last))
    refuse("out and its tail pass 2^63 - 1 bytes");
  to.out_stride = to.rows == 1 ? 0 : out_stride;
  if ((reinterpret_cast<std::uintptr_t>(to.out) | static_cast<std::uint64_t>(to.out_stride)) % 16 != 0)
    refuse("out begins at " + std::to_string(reinterpret_cast<std::uintptr_t>(to.out) % 16) +
           " bytes after a multiple of 16: its address and row stride must be multiples of 16 bytes");
  if (pairs.pairs == 0) return to;

  // what is read
  if (indices.data == nullptr) refuse("the data of indices is null");
  std::int64_t row_bytes = 0, column_bytes = 0;
  if (__builtin_mul_overflow(indices.row_stride, indices.element_bytes, &row_bytes) ||
      __builtin_mul_overflow(row_bytes, indices.rows - 1, &row_bytes) ||
      __builtin_mul_overflow(indices.column_stride, indices.element_bytes, &column_bytes) ||
      __builtin_mul_overflow(column_bytes, indices.topk - 1, &column_bytes) ||
      __builtin_add_overflow(row_bytes, column_bytes, &last))
    refuse("the offsets of indices pass 2^63 - 1 bytes");
  pairs.indices = static_cast<const Index*>(indices.data);
  pairs.row_stride = indices.row_stride;
  pairs.column_stride = indices.column_stride;
  pairs.pool_rows = pool.rows;
  pairs.row_lengths = options.row_lengths;
  pairs.row_requests = options.row_requests;
  pairs.remap = options.remap;
  pairs.remap_stride = options.remap_row_stride == 0 ? indices.topk : options.remap_row_stride;
  if (pairs.remap != nullptr) {
    if (pairs.remap_stride < indices.topk && indices.rows > 1) refuse("rows of remap overlap");
    if (__builtin_mul_overflow(pairs.remap_stride, indices.rows, &last) ||
        __builtin_mul_overflow(last, indices.element_bytes, &last))
      refuse("remap passes 2^63 - 1 bytes");
    if (static_cast<const void*>(pairs.remap) == indices.data)
      refuse("remap is indices itself: it must be memory of its own");
    if (pairs.pairs - 1 > static_cast<std::int64_t>(std::numeric_limits<Index>::max()))
      refuse("remap's type cannot number that many rows");
  }

  // Where rows follow each other in the same strides and nothing is asked of a row, there need be no rows.
  pairs.one_row = indices.rows == 1;
  if (!pairs.one_row && indices.row_stride == indices.topk * indices.column_stride && !translated &&
      pairs.row_lengths == nullptr && (pairs.remap == nullptr || pairs.remap_stride == indices.topk))
    pairs.one_row = true;
  if (!pairs.one_row) {
    if (indices.topk > most_topk) refuse("rows of more than 2^31 - 1 indices");
    pairs.by_topk = divisor64(static_cast<std::int32_t>(indices.topk));
  }
  return to;
}

/// Calls `run.template operator()<rows of a warp>(gather)`.
template <class Gather, class Run>
void with_gather_shape(const Gather& gather, const Run& run) {
  if (gather.to.rows <= most_rows_of_small_gathers) {
    run.template operator()<1>(gather);
  } else {
    run.template operator()<Gather::rows_of_a_warp>(gather);
  }
}

/// Calls `run` with the gather and the rows of a warp; not at all when there is nothing to write.
template <class Index, class Run>
void with_fp8_gather(const gather_to<Index>& to, const pool_rows& pool, const Run& run) {
  if (to.rows == 0) return;
  switch (load_width(pool, 16)) {
    case 16: return run.template operator()<gather_fp8<Index, 16>::rows_of_a_warp>(gather_fp8<Index, 16>{to, pool});
    case 8: return with_gather_shape(gather_fp8<Index, 8>{to, pool}, run);
    case 4: return with_gather_shape(gather_fp8<Index, 4>{to, pool}, run);
    default: return with_gather_shape(gather_fp8<Index, 1>{to, pool}, run);
  }
}

template <std::int32_t Residual, class Index, class Run>
void with_nvfp4_gather(const gather_to<Index>& to, const pool_rows& data, const pool_rows& scales, float global_scale,
                       const float* global_scale_at, const Run& run) {
  if (to.rows == 0) return;
  const auto gather = [&]<std::size_t Width>() {
    return gather_nvfp4<Residual, Index, Width>{to, data, scales, global_scale, global_scale_at};
  };
  if constexpr (Residual == 0) {
    if (to.rows > most_rows_of_small_gathers && load_width(data, 16) == 16 && load_width(scales, 16) == 16) {
      if (to.rows > most_rows_of_one_wave) return run.template operator()<4>(gather.template operator()<16>());
      return run.template operator()<gather_nvfp4<0, Index, 16>::rows_of_a_warp>(gather.template operator()<16>());
    }
  }
  switch (load_width(data, 8)) {
    case 8: return with_gather_shape(gather.template operator()<8>(), run);
    case 4: return with_gather_shape(gather.template operator()<4>(), run);
    default: return with_gather_shape(gather.template operator()<1>(), run);
  }
}

}  // namespace holdfast::HOLDFAST_ABI::detail
