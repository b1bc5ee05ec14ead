// What comes with the toolkit: cub's caching allocator, as engines configure it, and the runtime's stream-ordered one.
#include "../support/host.hpp"
#include "foreign.hpp"

#include <cub/util_allocator.cuh>

#include <cstdint>

namespace {

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // newer CCCLs discourage it; engines have it

class cub_pool final : public bench::foreign_pool {
 public:
  void* allocate(cudaStream_t stream, std::size_t bytes) override {
    void* p = nullptr;
    bench::check(cub_.DeviceAllocate(&p, bytes, stream), "cub's DeviceAllocate");
    return p;
  }
  void deallocate(cudaStream_t, void* p, std::size_t) override { bench::check(cub_.DeviceFree(p), "cub's DeviceFree"); }

 private:
  cub::CachingDeviceAllocator cub_{2, 9, 28};  // bins of powers of two, 512 B to 256 MiB
};

#pragma GCC diagnostic pop

class async_pool final : public bench::foreign_pool {
 public:
  async_pool() {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    bench::check(cudaMemPoolCreate(&pool_, &properties));
    std::uint64_t keep_all = UINT64_MAX;
    bench::check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all));
  }
  ~async_pool() override { static_cast<void>(cudaMemPoolDestroy(pool_)); }
  void* allocate(cudaStream_t stream, std::size_t bytes) override {
    void* p = nullptr;
    bench::check(cudaMallocFromPoolAsync(&p, bytes, pool_, stream), "cudaMallocFromPoolAsync");
    return p;
  }
  void deallocate(cudaStream_t stream, void* p, std::size_t) override { bench::check(cudaFreeAsync(p, stream)); }

 private:
  cudaMemPool_t pool_ = nullptr;
};

const bench::foreign_registration cub{"cub", [] { return std::make_shared<cub_pool>(); }};
const bench::foreign_registration async{"cudaMallocAsync", [] { return std::make_shared<async_pool>(); }};

}  // namespace
