// Our pool and others', called alike: allocate(stream, bytes), deallocate(stream, p, bytes), thread safe, copyable.
#pragma once

#include "../foreign/foreign.hpp"

#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/malloc.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

namespace bench {

template <class Device>
struct caching_pool {
  using stream_type = typename Device::stream_type;
  explicit caching_pool(Device device) : memory(holdfast::malloc_resource<Device>{device}) {}
  void* allocate(stream_type stream, std::size_t bytes) { return memory.allocate(stream, bytes, 256); }
  void deallocate(stream_type stream, void* p, std::size_t bytes) { memory.deallocate(stream, p, bytes, 256); }

  holdfast::caching_resource<Device> memory;
};

struct foreign_handle {
  void* allocate(cudaStream_t stream, std::size_t bytes) { return pool->allocate(stream, bytes); }
  void deallocate(cudaStream_t stream, void* p, std::size_t bytes) { pool->deallocate(stream, p, bytes); }

  std::shared_ptr<foreign_pool> pool;
};

}  // namespace bench
