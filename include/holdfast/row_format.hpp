// Byte layouts of the KV rows that kernels here read and write. Facts of the formats, as constants; no code.
//
//   holdfast::fp8_row          512 e4m3 values, no scales: the scratch row of TensorRT-LLM's DeepSeek-V4 sparse attention
//   holdfast::nvfp4_row<>      512 e2m1 values and one e4m3 scale per 16: its NVFP4 KV cache of head_dim 512
//   holdfast::nvfp4_row<64>    the same, and a second e2m1 term for each of the last 64 values
//   holdfast::flashmla_v32_row 656 B: 512 e4m3 values, 4 fp32 scales, 64 bf16 values. DeepSeek-V3.2
//   holdfast::flashmla_v4_row  584 B: 448 e4m3 values, 64 bf16 values; 8 B of scales at the page's end. DeepSeek-V4
//   holdfast::flashmla_v41_row 528 B: 512 e4m3 values; 16 B of scales at the page's end. DeepSeek-V4.1
//   holdfast::vllm_nvfp4_row   352 B: 512 e2m1 values, 64 e4m3 values, 32 e4m3 scales. DeepSeek-V3.2 in vLLM
//
// `data_bytes` are of the row itself, `scale_bytes` of its scales where those lie elsewhere: in a pool of their own (NVFP4),
// or in a page's footer (V4, V4.1: a page of P rows is P rows of data, then P rows of scales, then padding). Group scales
// lie plainly, one after the other, but where a format says otherwise. Scales swizzled for GEMMs (tiles of 128 rows x
// 4 scales) are another layout, which nothing here reads.
//
// A "UE8M0" scale is a byte e that stands for 2^(e - 127): 0 is 2^-127 (an fp32 denormal), 255 is NaN.
//
// Not here: where a pool's rows are (the pool says so), encoders (row_encode.hpp), decoders (kernel/row_decoder.hpp).
#pragma once

#include <holdfast/version.hpp>

#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

/// 512 e4m3 values (S.EEEE.MMM, bias 7, no infinities, S.1111.111 is NaN).
struct fp8_row {
  static constexpr std::int32_t elements = 512;
  static constexpr std::int32_t bytes = 512;
  static constexpr std::int32_t data_bytes = bytes, scale_bytes = 0;
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

/// 512 e4m3 values, one fp32 scale for each 128 of them, then 64 bf16 values (RoPE) as they are. A value is e4m3 * scale;
/// writers choose powers of two or not, and readers need not know. 656 is a multiple of 16, not of 32.
/// Source: FlashMLA's README ("FP8 KV cache"); vLLM and SGLang write the same.
struct flashmla_v32_row {
  static constexpr std::int32_t elements = 576;
  static constexpr std::int32_t scaled_elements = 512, group_elements = 128;
  static constexpr std::int32_t scales_at = 512, rope_at = 528;  ///< bytes
  static constexpr std::int32_t data_bytes = 656, scale_bytes = 0;
};

/// 448 e4m3 values and 64 bf16 values (RoPE) as they are, 576 bytes. In the page's footer, for each row: 7 UE8M0 scales,
/// one for each 64 e4m3 values, and a byte that means nothing. Pages are rounded up to multiples of 576 bytes.
/// Source: FlashMLA's MODEL1 (deepseek-ai/FlashMLA), as vLLM and SGLang write it (vllm-project/vllm#56893 compares both).
struct flashmla_v4_row {
  static constexpr std::int32_t elements = 512;
  static constexpr std::int32_t scaled_elements = 448, group_elements = 64;
  static constexpr std::int32_t rope_at = 448;
  static constexpr std::int32_t data_bytes = 576, scale_bytes = 8;
  static constexpr std::int32_t page_multiple = 576;
};

/// 512 e4m3 values, RoPE included, 512 bytes. In the page's footer, for each row: 16 UE8M0 scales, one for each 32 values.
/// Pages are rounded up to multiples of 512 bytes.
/// Source: FlashMLA's V4.1 records (vllm-project/vllm#56893, sgl-project/sglang#39123).
struct flashmla_v41_row {
  static constexpr std::int32_t elements = 512;
  static constexpr std::int32_t group_elements = 32;
  static constexpr std::int32_t data_bytes = 512, scale_bytes = 16;
  static constexpr std::int32_t page_multiple = 512;
};

/// 512 e2m1 values (nibbles as in nvfp4_row), 64 e4m3 values (RoPE) without a scale, and 32 e4m3 scales, one for each 16
/// e2m1 values, in another order. Of the e2m1 values, a value is `nibble * group scale * global scale`; vLLM's global
/// scale is 1. Source: "nvfp4.fp8rope" (vllm-project/FlashMLA#18, vllm-project/vllm#51724).
struct vllm_nvfp4_row {
  static constexpr std::int32_t elements = 576;
  static constexpr std::int32_t scaled_elements = 512, group_elements = 16;
  static constexpr std::int32_t rope_at = 256, scales_at = 320;
  static constexpr std::int32_t data_bytes = 352, scale_bytes = 0;

  /// Where the scale of a group (0 to 31) is among the 32: the scales of groups 0, 4, 8, ... 28 come first.
  [[nodiscard]] static constexpr std::int32_t scale_offset(std::int32_t group) {
    return 8 * (group & 3) + (group >> 2);
  }
};

/// Of formats with footers: the bytes of a page of `page_rows` rows, padding included.
template <class Row>
[[nodiscard]] constexpr std::int64_t page_bytes(std::int64_t page_rows) {
  const std::int64_t bytes = page_rows * (Row::data_bytes + Row::scale_bytes);
  return (bytes + Row::page_multiple - 1) / Row::page_multiple * Row::page_multiple;
}

/// What the lower three bits of an e2m1 nibble stand for.
inline constexpr float e2m1_magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

static_assert(nvfp4_row<>::data_bytes == 256 && nvfp4_row<>::scale_bytes == 32);
static_assert(nvfp4_row<64>::data_bytes == 288 && nvfp4_row<64>::scale_bytes == 36);
static_assert(nvfp4_row<64>::data_offset(27) == 216 && nvfp4_row<64>::data_offset(28) == 224 &&
              nvfp4_row<64>::data_offset(31) == 272 && nvfp4_row<64>::scale_offset(31) == 34);
static_assert(page_bytes<flashmla_v4_row>(64) == 37440 && page_bytes<flashmla_v4_row>(256) == 149760);
static_assert(page_bytes<flashmla_v41_row>(64) == 64 * 528);

}  // namespace holdfast::HOLDFAST_ABI
