// PyTorch's caching allocator, called as its tensors call it.
#include "foreign.hpp"

#include <c10/cuda/CUDACachingAllocator.h>

namespace {

class torch_pool final : public bench::foreign_pool {
 public:
  torch_pool() { c10::cuda::CUDACachingAllocator::init(1); }
  ~torch_pool() override { c10::cuda::CUDACachingAllocator::emptyCache(); }
  void* allocate(cudaStream_t stream, std::size_t bytes) override {
    return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, stream);
  }
  void deallocate(cudaStream_t, void* p, std::size_t) override { c10::cuda::CUDACachingAllocator::raw_delete(p); }
};

const bench::foreign_registration torch{"PyTorch", [] { return std::make_shared<torch_pool>(); }};

}  // namespace
