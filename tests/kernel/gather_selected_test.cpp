// gather_selected's behaviours on the host device. gather_selected_test.cu runs the same on a GPU.
#include "support/kernel_host_world.hpp"
#include "support/selected_cases.hpp"

namespace selected_test {

using kernel_test::host_world;

INSTANTIATE_TYPED_TEST_SUITE_P(Host, SelectedOf, every_subject<host_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, Selected, ::testing::Types<host_world>);

}  // namespace selected_test
