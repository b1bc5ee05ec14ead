// Bulk copies into shared memory, and out of it: a thread asks for hundreds of bytes at once, and no register waits for
// them. sm_90 and newer; compiled for older ones, nothing here may be called.
#pragma once

#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI::detail {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool has_bulk_copies = false;
#else
inline constexpr bool has_bulk_copies = true;
#endif

__device__ inline std::uint32_t in_shared(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

/// The end of some bulk copies, in shared memory; good for one time. One thread calls `init` and then `expect`; once the
/// others know of it they copy, and whoever reads what was copied waits. All copies must have ended before the block does.
struct bulk_barrier {
  std::uint64_t state;

  __device__ void init() {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
        "fence.mbarrier_init.release.cluster;" ::"r"(in_shared(&state))
        : "memory");
  }

  /// How many bytes will be copied in all; may be 0.
  __device__ void expect(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(&state)), "r"(bytes)
                 : "memory");
  }

  /// From global memory; addresses and `bytes` are multiples of 16.
  __device__ void copy(std::byte* to, const std::byte* from, std::uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(in_shared(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(in_shared(&state))
        : "memory");
  }

  __device__ void wait() {
    std::uint32_t done = 0;
    while (done == 0)
      asm volatile(
          "{\n\t"
          ".reg .pred done;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n\t"
          "selp.u32 %0, 1, 0, done;\n\t"
          "}"
          : "=r"(done)
          : "r"(in_shared(&state))
          : "memory");
  }
};

/// Out of shared memory, what a bulk copy brought there; what threads wrote themselves needs a proxy fence between.
/// Addresses and `bytes` are multiples of 16.
__device__ inline void bulk_copy_out(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(in_shared(from)), "r"(bytes)
               : "memory");
}

/// Shared memory that this thread has copied out may be written again, or go with the block.
__device__ inline void bulk_copies_out_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace holdfast::HOLDFAST_ABI::detail
