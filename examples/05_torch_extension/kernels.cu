// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

#include <holdfast/kernel/gather_rows.cuh>
#include <holdfast/kernel/pad_queries.cuh>
#include <holdfast/kernel/unpad_output.cuh>

namespace holdfast_torch {

void pad_queries(cudaStream_t stream, const rows3<const std::uint16_t>& in, const rows3<std::uint16_t>& out) {
  holdfast::pad_queries(stream, in, out);
}
void pad_queries(cudaStream_t stream, const rows3<const std::uint8_t>& in, const rows3<std::uint8_t>& out) {
  holdfast::pad_queries(stream, in, out);
}

void unpad_output(cudaStream_t stream, const rows3<const std::uint16_t>& padded, const rows3<std::uint16_t>& out) {
  holdfast::unpad_output(stream, padded, out);
}
void unpad_output(cudaStream_t stream, const rows3<const std::uint8_t>& padded, const rows3<std::uint8_t>& out) {
  holdfast::unpad_output(stream, padded, out);
}

void gather_nvfp4(cudaStream_t stream, const holdfast::nvfp4_rows<>& pool,
                  const holdfast::strided_view<const std::int32_t, 2>& indices,
                  const holdfast::strided_view<std::byte, 2>& out, std::int64_t tail_rows) {
  holdfast::gather_rows(stream, pool, indices, out, {.tail_rows = tail_rows});
}

}  // namespace holdfast_torch
