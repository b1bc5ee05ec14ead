// SPDX-License-Identifier: Apache-2.0
#if __has_include(<holdfast/holdfast.hpp>)
#include <holdfast/holdfast.hpp>
#endif
#include <holdfast/version.hpp>

#include <cuda/std/mdspan>
#include <cuda_runtime_api.h>

#include <cstdio>

int main() {
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);  // the runtime is linked; no GPU needed
  std::printf("Holdfast %d.%d.%d at your service (CUDA runtime %d)\n", HOLDFAST_VERSION_MAJOR, HOLDFAST_VERSION_MINOR,
              HOLDFAST_VERSION_PATCH, runtime);
}
