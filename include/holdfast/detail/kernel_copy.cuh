// kernel_copy.hpp's copy on CUDA. Its five kernels (one a packet width) know no element type.
#pragma once

#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/version.hpp>

namespace holdfast::inline HOLDFAST_ABI::detail {

HOLDFAST_HIDDEN inline void run_copy(cudaStream_t stream, const copy_plan& plan) {
  with_copy_op(plan, [&](const auto& op) { run_row_op(stream, op); });
}

}  // namespace holdfast::HOLDFAST_ABI::detail
