#include <holdfast/kernel/gather_rows.hpp>

#include "gather_rows_scratch_cases.hpp"

namespace gather_rows_scratch {
INSTANTIATE_TYPED_TEST_SUITE_P(host, gather_rows_scratch, holdfast::host_device);
}
