#include <holdfast/kernel/verify_padding.cuh>

#include "verify_padding_cases.hpp"

namespace verify_padding {
INSTANTIATE_TYPED_TEST_SUITE_P(cuda, verify_padding, holdfast::cuda_device);
}
