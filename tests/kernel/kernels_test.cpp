// The kernels' behaviours on the host device. kernels_test.cu runs the same on a GPU.
#include "support/kernel_cases.hpp"
#include "support/kernel_host_world.hpp"

namespace kernel_test {

INSTANTIATE_TYPED_TEST_SUITE_P(Host, CopyOf, every_element<host_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, Kernels, ::testing::Types<host_world>);

}  // namespace kernel_test
