// SPDX-License-Identifier: Apache-2.0
// The shared library, loaded as PyTorch loads it, and a kernel that reads past what it gave: over the guard that faults, over
// the cure it finds zeros. Without a GPU the library must load all the same, and refuse with a null pointer and a reason.
// Tensors are over_read.py's business.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>

namespace {

constexpr std::size_t granule = std::size_t{2} << 20;
constexpr std::size_t tail = 65536;

struct library {
  void* (*malloc)(ssize_t, int, cudaStream_t);
  void (*free)(void*, ssize_t, int, cudaStream_t);
  void (*record_stream)(void*, cudaStream_t);
};

/// Null functions where something is missing.
library load() {
  void* const handle = dlopen(HOLDFAST_TAIL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::printf("%s\n", dlerror());
    return {};
  }
  library found{};
  found.malloc = reinterpret_cast<decltype(found.malloc)>(dlsym(handle, "holdfast_tail_malloc"));
  found.free = reinterpret_cast<decltype(found.free)>(dlsym(handle, "holdfast_tail_free"));
  found.record_stream = reinterpret_cast<decltype(found.record_stream)>(dlsym(handle, "holdfast_tail_record_stream"));
  return found;
}

bool complain(const char* what) {
  std::printf("   WRONG: %s\n", what);
  return false;
}

__global__ void count_not_zero(const unsigned char* from, std::size_t bytes, unsigned* count) {
  for (std::size_t i = threadIdx.x; i < bytes; i += blockDim.x) {
    if (from[i] != 0) {
      atomicAdd(count, 1u);
    }
  }
}

__global__ void write(unsigned char* to) { *to = 1; }

/// Allocates, uses and frees on two streams.
bool serves(const library& lib, cudaStream_t stream, cudaStream_t other) {
  for (const std::size_t bytes : {std::size_t{16384}, std::size_t{1000}, granule + 16}) {
    void* const p = lib.malloc(static_cast<ssize_t>(bytes), 0, stream);
    if (p == nullptr || (reinterpret_cast<std::uintptr_t>(p) + (bytes + 15) / 16 * 16) % granule != 0) {
      return complain("memory that doesn't end where its mapping ends");
    }
    if (cudaMemsetAsync(p, 1, bytes, stream) != cudaSuccess || cudaMemsetAsync(p, 1, bytes, other) != cudaSuccess) {
      return complain("memory that cannot be written");
    }
    lib.record_stream(p, other);
    lib.free(p, static_cast<ssize_t>(bytes), 0, stream);
  }
  int not_the_librarys = 0;
  lib.free(&not_the_librarys, 1, 0, stream);
  return cudaStreamSynchronize(other) == cudaSuccess || complain("an error was left behind");
}

/// Whether the library does as it says in HOLDFAST_TAIL_MODE. The context is lost afterwards.
bool as_it_says(bool cure) {
  const library lib = load();
  if (lib.malloc == nullptr || lib.free == nullptr || lib.record_stream == nullptr) {
    return complain("a function is missing");
  }
  if (lib.malloc(0, 0, nullptr) != nullptr) {
    return complain("memory for nothing");
  }
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    std::printf("   no GPU\n");
    return lib.malloc(1000, 0, nullptr) == nullptr || complain("memory without a GPU");
  }
  cudaStream_t stream = nullptr, other = nullptr;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
      cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) != cudaSuccess) {
    return complain("no streams");
  }
  if (!serves(lib, stream, other)) {
    return false;
  }
  constexpr std::size_t bytes = 16384;
  auto* const p = static_cast<unsigned char*>(lib.malloc(bytes, 0, stream));
  auto* const count = static_cast<unsigned*>(lib.malloc(sizeof(unsigned), 0, stream));
  unsigned seen = 1;
  if (p == nullptr || count == nullptr || cudaMemsetAsync(count, 0, sizeof *count, stream) != cudaSuccess) {
    return complain("no memory");
  }
  count_not_zero<<<1, 256, 0, stream>>>(p + bytes, tail, count);
  static_cast<void>(cudaMemcpyAsync(&seen, count, sizeof seen, cudaMemcpyDeviceToHost, stream));
  const cudaError_t read = cudaStreamSynchronize(stream);
  if (!cure) {
    return read == cudaErrorIllegalAddress || complain("reading too far should fault");
  }
  if (read != cudaSuccess || seen != 0) {
    return complain("what is read too far should be zero");
  }
  write<<<1, 1, 0, stream>>>(p + bytes);
  return cudaStreamSynchronize(stream) == cudaErrorIllegalAddress || complain("writing too far should fault");
}

bool refuses_nonsense() {
  const library lib = load();
  return lib.malloc != nullptr && (lib.malloc(16, 0, nullptr) == nullptr || complain("HOLDFAST_TAIL was believed"));
}

/// In a child process: the environment is read once.
bool in_child(const char* what, const char* mode, const char* bytes, const std::function<bool()>& check) {
  std::printf("%s\n", what);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    setenv("HOLDFAST_TAIL_MODE", mode, 1);
    setenv("HOLDFAST_TAIL", bytes, 1);
    const bool good = check();
    std::fflush(stdout);
    std::_Exit(good ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int main() {
  bool good = in_child("guard: reading too far faults", "guard", "65536", [] { return as_it_says(false); });
  good = in_child("cure: reading too far finds zeros", "cure", "65536", [] { return as_it_says(true); }) && good;
  good = in_child("nonsense is refused", "cure", "64k", refuses_nonsense) && good;
  std::printf("%s\n", good ? "as promised" : "NOT AS PROMISED");
  return good ? 0 : 1;
}
