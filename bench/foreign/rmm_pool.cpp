// RMM's pool over cudaMalloc; it begins empty, as the others do.
#include "foreign.hpp"

#include <rmm/cuda_stream_view.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

namespace {

class rmm_pool final : public bench::foreign_pool {
 public:
  void* allocate(cudaStream_t stream, std::size_t bytes) override {
    return pool_.allocate(rmm::cuda_stream_view{stream}, bytes, 256);
  }
  void deallocate(cudaStream_t stream, void* p, std::size_t bytes) override {
    pool_.deallocate(rmm::cuda_stream_view{stream}, p, bytes, 256);
  }

 private:
  rmm::mr::pool_memory_resource pool_{rmm::mr::cuda_memory_resource{}, 0};
};

const bench::foreign_registration rmm{"RMM pool", [] { return std::make_shared<rmm_pool>(); }};

}  // namespace
