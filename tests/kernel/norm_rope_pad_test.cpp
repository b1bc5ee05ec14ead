#include <holdfast/kernel/norm_rope_pad.hpp>

#include "norm_rope_pad_cases.hpp"

namespace norm_rope_pad {
INSTANTIATE_TYPED_TEST_SUITE_P(host, norm_rope_pad, holdfast::host_device);
}
