// Faults on a GPU: kernels that read too far.
#include <holdfast/device/cuda.hpp>
#include <holdfast/kernel/gather_rows.cuh>

#include <cuda_runtime.h>

#include <cstddef>

namespace resource_faults {

__global__ void read_kernel(const volatile unsigned char* p, std::size_t n) {
  for (std::size_t i = threadIdx.x; i < n; i += blockDim.x) {
    static_cast<void>(static_cast<unsigned char>(p[i]));
  }
}

inline void read_bytes(cudaStream_t stream, const void* p, std::size_t n) {
  const holdfast::cuda_device::current_scope current{holdfast::cuda_device::of(stream)};
  read_kernel<<<1, 256, 0, stream>>>(static_cast<const volatile unsigned char*>(p), n);
  holdfast::detail::cuda_check(cudaGetLastError(), "read_kernel");
}

}  // namespace resource_faults

#include "resource/fault_cases.hpp"

namespace resource_faults {
INSTANTIATE_TYPED_TEST_SUITE_P(cuda, resource_faults, holdfast::cuda_device);
}
