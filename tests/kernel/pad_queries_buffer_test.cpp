#include <holdfast/kernel/pad_queries.hpp>

#include "pad_queries_buffer_cases.hpp"

namespace pad_queries_buffer {
INSTANTIATE_TYPED_TEST_SUITE_P(host, pad_queries_buffer, holdfast::host_device);
}
