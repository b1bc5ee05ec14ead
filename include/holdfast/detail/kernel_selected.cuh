// kernel_selected.hpp's steps on CUDA.
//
// cub::DeviceScan takes a pending error of the user's for a failure of its own launch, and clears it, even when asked
// for no more than a size. So where one is pending, the size is asked on a thread of its own, and one block of ours
// scans (another thread would be no way out: a per-thread default stream is another stream there).
#pragma once

#include <holdfast/detail/kernel_launch.cuh>
#include <holdfast/detail/kernel_selected.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/gather_rows.cuh>
#include <holdfast/kernel/row_op.cuh>
#include <holdfast/version.hpp>

#include <cub/block/block_scan.cuh>
#include <cub/device/device_scan.cuh>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>

namespace holdfast::inline HOLDFAST_ABI::detail {

template <std::uint32_t Threads>
HOLDFAST_HIDDEN __global__ void __launch_bounds__(Threads) scan_in_one_block(std::int32_t* marks, std::int64_t items) {
  using block_scan = cub::BlockScan<std::int32_t, static_cast<int>(Threads)>;
  __shared__ typename block_scan::TempStorage storage;
  wait_for_predecessors();
  std::int32_t before = 0;
  for (std::int64_t first = 0; first < items; first += Threads) {
    const std::int64_t i = first + threadIdx.x;
    std::int32_t position = 0, all = 0;
    block_scan(storage).ExclusiveSum(i < items ? marks[i] : 0, position, all);
    if (i < items) marks[i] = before + position;
    before += all;
    __syncthreads();  // the storage is used again
  }
}

/// Hidden, so that what cub instantiates with it is, too: its DeviceScan launches kernels, and is visible otherwise.
struct HOLDFAST_HIDDEN add_marks {
  HOLDFAST_HOST_DEVICE std::int32_t operator()(std::int32_t a, std::int32_t b) const { return a + b; }
};

/// `items` fits in an int32, and cub is instantiated for no other type.
HOLDFAST_HIDDEN inline cudaError_t scan_with_cub(std::byte* temporary, std::size_t& bytes, std::int32_t* marks,
                                                 std::int64_t items, cudaStream_t stream) {
  return cub::DeviceScan::ExclusiveScan(temporary, bytes, marks, marks, add_marks{}, std::int32_t{0},
                                        static_cast<std::int32_t>(items), stream);
}

HOLDFAST_HIDDEN inline void check_scan(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw device_error(static_cast<int>(error), std::string("gather_selected: ") + what + ": " + cudaGetErrorName(error) +
                                                  " (" + cudaGetErrorString(error) + ")");
}

/// Of temporary memory, at least 1. Asks the device, not the stream.
HOLDFAST_HIDDEN inline std::size_t scan_bytes_with_cub(const cuda_device& device, std::int64_t items) {
  std::size_t bytes = 0;
  cudaError_t error = cudaErrorUnknown;
  std::exception_ptr thrown;
  const auto ask = [&] {
    const cuda_device::relaxed_scope relaxed;
    const cuda_device::current_scope current(device);
    error = scan_with_cub(nullptr, bytes, nullptr, items, nullptr);
  };
  if (cudaPeekAtLastError() == cudaSuccess) [[likely]] {
    ask();
  } else {
    std::thread([&] {
      try {
        ask();
      } catch (...) {
        thrown = std::current_exception();
      }
    }).join();
  }
  if (thrown != nullptr) std::rethrow_exception(thrown);
  check_scan(error, "asking cub::DeviceScan for its size");
  return bytes;
}

/// Hidden, and so is what is instantiated with it.
struct HOLDFAST_HIDDEN selected_steps_on_cuda {
  cudaStream_t stream;

  void clear(void* data, std::size_t bytes) const {
    const cuda_device::relaxed_scope relaxed;
    const cuda_device::current_scope current(cuda_device::of(stream));
    cuda_device::fill(stream, data, std::byte{0}, bytes);
  }
  template <class Op>
  void run(const Op& op) const {
    run_row_op(stream, op);
  }
  [[nodiscard]] std::size_t scan_bytes(std::int64_t items) const {
    return scan_bytes_with_cub(cuda_device::of(stream), items);
  }
  void scan(std::int32_t* marks, std::int64_t items, std::byte* temporary, std::size_t bytes) const {
    if (cudaPeekAtLastError() != cudaSuccess) [[unlikely]] {
      constexpr std::uint32_t threads = 1024;
      launch(stream, "gather_selected's scan", 1, threads, false, scan_in_one_block<threads>, marks, items);
      return;
    }
    const cuda_device::relaxed_scope relaxed;
    const cuda_device::current_scope current(cuda_device::of(stream));
    const cudaError_t error = scan_with_cub(temporary, bytes, marks, items, stream);
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());  // its own: none was pending
    check_scan(error, "cub::DeviceScan");
  }
  template <class Source, class Indices, class Out>
  void gather(const Source& source, const Indices& sources, const Out& out,
              const gather_options<std::int32_t>& options) const {
    gather_rows(stream, source, sources, out, options);
  }
};

}  // namespace holdfast::HOLDFAST_ABI::detail
