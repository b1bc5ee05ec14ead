#include "soak.hpp"

#include <cuda_runtime_api.h>

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("soak: %s\n", cudaGetErrorString(error));
    std::exit(EXIT_FAILURE);
  }
}

__global__ void fill_kernel(std::uint64_t* words, std::size_t count, std::uint64_t pattern) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    words[i] = soak::word(pattern, i);
}

__global__ void verify_kernel(const std::uint64_t* words, std::size_t count, std::uint64_t pattern,
                              unsigned long long* wrong) {
  unsigned long long found = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    found += words[i] == soak::word(pattern, i) ? 0 : 1;
  if (found != 0) atomicAdd(wrong, found);
}

class stream {
 public:
  stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~stream() { check(cudaStreamDestroy(stream_)); }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class world {
 public:
  using device_type = holdfast::cuda_device;
  using stream = ::stream;
  static constexpr std::size_t most_bytes = std::size_t{256} << 20, limit_bytes = std::size_t{16} << 30;

  world() {
    check(cudaMalloc(&wrong_, sizeof *wrong_));
    check(cudaMemset(wrong_, 0, sizeof *wrong_));
  }
  [[nodiscard]] static device_type device() { return {}; }
  void fill(cudaStream_t on, std::uint64_t* words, std::size_t count, std::uint64_t pattern) {
    fill_kernel<<<blocks(count), 256, 0, on>>>(words, count, pattern);
    check(cudaGetLastError());
  }
  void verify(cudaStream_t on, const std::uint64_t* words, std::size_t count, std::uint64_t pattern) {
    verify_kernel<<<blocks(count), 256, 0, on>>>(words, count, pattern, wrong_);
    check(cudaGetLastError());
  }
  [[nodiscard]] std::uint64_t wrong() const {
    check(cudaDeviceSynchronize());
    unsigned long long count = 0;
    check(cudaMemcpy(&count, wrong_, sizeof count, cudaMemcpyDeviceToHost));
    return count;
  }

 private:
  static unsigned blocks(std::size_t count) {
    return static_cast<unsigned>(std::min<std::size_t>((count + 255) / 256, 1024));
  }
  unsigned long long* wrong_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("skipped: needs an NVIDIA GPU\n");
    return 77;
  }
  return soak::main<world>(argc, argv);
}
