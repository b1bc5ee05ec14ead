// Byte layouts of the KV rows that kernels here read and write. Facts of the formats, as constants; no code.
//
//   holdfast::fp8_row          512 e4m3 values, no scales: the scratch row of TensorRT-LLM's DeepSeek-V4 sparse attention
//   holdfast::nvfp4_row<>      512 e2m1 values and one e4m3 scale per 16: its NVFP4 KV cache of head_dim 512
//   holdfast::nvfp4_row<64>    the same, and a second e2m1 term for each of the last 64 values
//
// Scales lie in another pool than data, plainly, one byte after the other. Scales swizzled for GEMMs (tiles of 128 rows x
// 4 scales) are another layout, which nothing here reads.
//
// Not here: whole pages (a pool says where its rows are), encoders.
#pragma once

#include <holdfast/version.hpp>

#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

/// 512 e4m3 values (S.EEEE.MMM, bias 7, no infinities, S.1111.111 is NaN).
struct fp8_row {
  static constexpr std::int32_t elements = 512;
  static constexpr std::int32_t bytes = 512;
};

/// 512 e2m1 values, two a byte, the even one in the low nibble; bit 3 of a nibble is the sign, the others choose one of
/// `magnitudes`. Each group of 16 has a scale in e4m3; the pool has one more, in fp32. A value is
/// `nibble * group scale * global scale`.
///
/// The last `Residual` values (0 or 64) are sums of two such terms, main and residual, with a scale each. A residual group
/// takes 16 bytes of data (8 of main nibbles, then 8 of residual ones) and two bytes of scales (main, residual).
template <std::int32_t Residual = 0>
struct nvfp4_row {
  static_assert(Residual == 0 || Residual == 64, "holdfast: an NVFP4 row has a residual of 0 or 64 elements");

  static constexpr std::int32_t elements = 512;
  static constexpr std::int32_t residual_elements = Residual;
  static constexpr std::int32_t group_elements = 16;  ///< that share a scale
  static constexpr std::int32_t groups = elements / group_elements;
  static constexpr std::int32_t residual_groups = Residual / group_elements;
  static constexpr std::int32_t plain_groups = groups - residual_groups;  ///< the first ones: one term

  static constexpr std::int32_t group_bytes = group_elements / 2;                       ///< of one term's nibbles
  static constexpr std::int32_t data_bytes = (groups + residual_groups) * group_bytes;  ///< 256 or 288
  static constexpr std::int32_t scale_bytes = groups + residual_groups;                 ///< 32 or 36

  /// Where a group's main nibbles begin in the data row; a residual group's other nibbles are `group_bytes` further on.
  [[nodiscard]] static constexpr std::int32_t data_offset(std::int32_t group) {
    return group_bytes * scale_offset(group);
  }
  /// Where a group's main scale is in the scale row; a residual group's other scale is the next byte.
  [[nodiscard]] static constexpr std::int32_t scale_offset(std::int32_t group) {
    return group < plain_groups ? group : 2 * group - plain_groups;
  }
};

/// What the lower three bits of an e2m1 nibble stand for.
inline constexpr float e2m1_magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

static_assert(nvfp4_row<>::data_bytes == 256 && nvfp4_row<>::scale_bytes == 32);
static_assert(nvfp4_row<64>::data_bytes == 288 && nvfp4_row<64>::scale_bytes == 36);
static_assert(nvfp4_row<64>::data_offset(27) == 216 && nvfp4_row<64>::data_offset(28) == 224 &&
              nvfp4_row<64>::data_offset(31) == 272 && nvfp4_row<64>::scale_offset(31) == 34);

}  // namespace holdfast::HOLDFAST_ABI
