// SPDX-License-Identifier: Apache-2.0
// A caller's own KV row: int8 values with an fp32 scale for every 64, gathered as bf16.
//
// The struct between the marks is all there is to write. The host device runs it here; in a .cu file, with
// <holdfast/kernel/gather_rows.cuh> and a cudaStream_t, the same struct becomes a kernel that writes the same bits.
#include <holdfast/holdfast.hpp>
#include <holdfast/kernel/row_decoder.hpp>

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

// [format]
struct int8_row {
  static constexpr std::int32_t elements = 256;
  static constexpr std::int32_t data_bytes = 256 + 4 * 4;  // the values, then their scales
  static constexpr std::int32_t scale_bytes = 0;           // none in another pool

  struct packet {  // 8 values, as they lie in memory
    holdfast::raw_bytes<8> codes;
    holdfast::raw_bytes<4> scale;
  };

  template <class Row>
  HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {  // values 8 at to 8 at + 7
    return {row.template data<8>(8 * at), row.template data<4>(256 + at / 8 * 4)};
  }

  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = static_cast<std::int8_t>(from.codes.word[i / 4] >> 8 * (i % 4));
    to.put_scaled(values, holdfast::float_of_bits(from.scale.word[0]));  // one product each, then rounded
  }
};
// [/format]

namespace {

constexpr std::int64_t rows = 100;

/// What the pool's value (row, i) is meant to be.
float value_of(std::int64_t row, std::int64_t i) { return 0.25f * static_cast<float>((row + 3 * i) % 255 - 127); }

std::vector<std::byte> make_pool() {
  std::vector<std::byte> pool(rows * int8_row::data_bytes);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::byte* const to = pool.data() + row * int8_row::data_bytes;
    for (std::int64_t i = 0; i < 256; ++i) to[i] = static_cast<std::byte>(static_cast<int>(value_of(row, i) / 0.25f));
    const float scales[4] = {0.25f, 0.25f, 0.25f, 0.25f};
    std::memcpy(to + 256, scales, sizeof scales);
  }
  return pool;
}

}  // namespace

int main() {
  const std::vector<std::byte> pool = make_pool();
  const std::vector<std::int32_t> indices{7, 99, -1, 0, 100};  // the third and the last are none of the pool's
  std::vector<__nv_bfloat16> out((indices.size() + 1) * 256);

  const holdfast::host::stream stream;
  holdfast::gather_rows(stream, holdfast::formatted_rows<int8_row>{.data = {.data = pool.data(), .rows = rows}},
                        holdfast::view<const std::int32_t, 1>{indices.data(), 5},
                        holdfast::view<__nv_bfloat16, 2>{out.data(), 5, 256}, {.tail_rows = 1});
  holdfast::host_device::synchronize(stream);

  std::size_t wrong = 0;
  for (std::size_t p = 0; p < 6; ++p)
    for (std::int64_t i = 0; i < 256; ++i) {
      const bool valid = p < 5 && indices[p] >= 0 && indices[p] < rows;
      const float should = valid ? value_of(indices[p], i) : 0.0f;
      wrong += __bfloat162float(out[p * 256 + static_cast<std::size_t>(i)]) != should;
    }
  std::printf("5 rows of a format of my own, gathered as bf16, and a tail: %zu of %zu values are wrong\n", wrong,
              out.size());
  return wrong == 0 ? 0 : 1;
}
