// SPDX-License-Identifier: Apache-2.0
// What module.cpp launches. The kernels need nvcc and the bindings need torch; neither compiler has to see both.
#pragma once

#include <holdfast/kernel/gather_rows.hpp>
#include <holdfast/view.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace holdfast_torch {

/// Elements as plain bits, by their size: bf16 and fp8.
template <class Bits>
using rows3 = holdfast::strided_view<Bits, 3>;

void pad_queries(cudaStream_t stream, const rows3<const std::uint16_t>& in, const rows3<std::uint16_t>& out);
void pad_queries(cudaStream_t stream, const rows3<const std::uint8_t>& in, const rows3<std::uint8_t>& out);

void unpad_output(cudaStream_t stream, const rows3<const std::uint16_t>& padded, const rows3<std::uint16_t>& out);
void unpad_output(cudaStream_t stream, const rows3<const std::uint8_t>& padded, const rows3<std::uint8_t>& out);

void gather_nvfp4(cudaStream_t stream, const holdfast::nvfp4_rows<>& pool,
                  const holdfast::strided_view<const std::int32_t, 2>& indices,
                  const holdfast::strided_view<std::byte, 2>& out, std::int64_t tail_rows);

}  // namespace holdfast_torch
