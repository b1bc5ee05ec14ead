#include <holdfast/kernel/concat_pad.cuh>

#include "concat_pad_cases.hpp"

namespace concat_pad {
INSTANTIATE_TYPED_TEST_SUITE_P(cuda, concat_pad, holdfast::cuda_device);
}
