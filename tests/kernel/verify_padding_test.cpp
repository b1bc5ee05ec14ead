#include <holdfast/kernel/verify_padding.hpp>

#include "verify_padding_cases.hpp"

namespace verify_padding {
INSTANTIATE_TYPED_TEST_SUITE_P(host, verify_padding, holdfast::host_device);
}
