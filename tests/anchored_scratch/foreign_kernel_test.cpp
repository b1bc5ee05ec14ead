// Anchored scratch under kernels of the host device's.
#include <holdfast/device/host.hpp>

#include <cstddef>

namespace foreign_kernels {

inline void write_bytes(holdfast::host::stream_ref stream, unsigned char* p, std::size_t n, unsigned char value) {
  stream.run([=] {
    for (std::size_t i = 0; i < n; ++i) p[i] = value;
  });
}

inline void count_other(holdfast::host::stream_ref stream, const unsigned char* p, std::size_t n, unsigned char value,
                        unsigned* count) {
  stream.run([=] {
    for (std::size_t i = 0; i < n; ++i) *count += p[i] != value ? 1U : 0U;
  });
}

}  // namespace foreign_kernels

#include "anchored_scratch/foreign_kernel_cases.hpp"

namespace foreign_kernels {
INSTANTIATE_TYPED_TEST_SUITE_P(host, foreign_kernels, holdfast::host_device);
}
