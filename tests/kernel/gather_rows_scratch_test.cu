#include <holdfast/kernel/gather_rows.cuh>

#include "gather_rows_scratch_cases.hpp"

namespace gather_rows_scratch {
INSTANTIATE_TYPED_TEST_SUITE_P(cuda, gather_rows_scratch, holdfast::cuda_device);
}
