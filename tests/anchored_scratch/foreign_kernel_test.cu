// Anchored scratch under plain CUDA kernels.
#include <holdfast/device/cuda.hpp>

#include <cuda_runtime.h>

#include <cstddef>

namespace foreign_kernels {

__global__ void write_kernel(unsigned char* p, std::size_t n, unsigned char value) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    p[i] = value;
  }
}

__global__ void count_kernel(const unsigned char* p, std::size_t n, unsigned char value, unsigned* count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    if (p[i] != value) atomicAdd(count, 1U);
  }
}

inline void write_bytes(cudaStream_t stream, unsigned char* p, std::size_t n, unsigned char value) {
  write_kernel<<<64, 256, 0, stream>>>(p, n, value);
  holdfast::detail::cuda_check(cudaGetLastError(), "write_kernel");
}

inline void count_other(cudaStream_t stream, const unsigned char* p, std::size_t n, unsigned char value,
                        unsigned* count) {
  count_kernel<<<64, 256, 0, stream>>>(p, n, value, count);
  holdfast::detail::cuda_check(cudaGetLastError(), "count_kernel");
}

}  // namespace foreign_kernels

#include "anchored_scratch/foreign_kernel_cases.hpp"

namespace foreign_kernels {
INSTANTIATE_TYPED_TEST_SUITE_P(cuda, foreign_kernels, holdfast::cuda_device);
}
