// expect: trivially copyable, mutable type whose zero is all zero bytes
#include <holdfast/device/host.hpp>
#include <holdfast/padded_query_buffer.hpp>

#include <string>

holdfast::padded_query_buffer<std::string, holdfast::host_device> buffer{
    holdfast::any_resource<holdfast::host_device>{nullptr}, {}};
