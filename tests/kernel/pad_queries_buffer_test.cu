#include <holdfast/kernel/pad_queries.cuh>

#include "pad_queries_buffer_cases.hpp"

namespace pad_queries_buffer {
INSTANTIATE_TYPED_TEST_SUITE_P(cuda, pad_queries_buffer, holdfast::cuda_device);
}
