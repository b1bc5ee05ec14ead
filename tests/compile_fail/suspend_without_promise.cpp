// expect: would use explicit constructor
// Whoever suspends a buffer says that nothing uses it.
#include <holdfast/device/host.hpp>
#include <holdfast/padded_query_buffer.hpp>

void f(holdfast::padded_query_buffer<float, holdfast::host_device>& buffer) { buffer.suspend({}); }
