#include <holdfast/kernel/norm_rope_pad.cuh>

#include "norm_rope_pad_cases.hpp"

namespace norm_rope_pad {
INSTANTIATE_TYPED_TEST_SUITE_P(cuda, norm_rope_pad, holdfast::cuda_device);
}
