#include <holdfast/kernel/concat_pad.hpp>

#include "concat_pad_cases.hpp"

namespace concat_pad {
INSTANTIATE_TYPED_TEST_SUITE_P(host, concat_pad, holdfast::host_device);
}
