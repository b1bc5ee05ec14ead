#include "plugin.hpp"

#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/malloc.hpp>

#include <optional>

namespace {

template <class Device>
std::optional<holdfast::padded_query_buffer<float, Device>> buffer;

template <class Device>
void make(Device device) {
  buffer<Device>.emplace(holdfast::malloc_resource<Device>{device},
                         holdfast::query_shape{.heads = 2, .padded_heads = 4, .head_dim = 8});
}

template <class Device>
const void* acquire(typename Device::stream_type stream, long rows) {
  return buffer<Device>->acquire(stream, rows).data();
}

void destroy() {
  buffer<holdfast::host_device>.reset();
  buffer<holdfast::cuda_device>.reset();
}

unsigned long long pending() {
  return holdfast::counts(holdfast::host_device{0}).pending_bytes() +
         holdfast::counts(holdfast::cuda_device{0}).pending_bytes();
}

void collect() {
  holdfast::collect(holdfast::host_device{0});
  holdfast::collect(holdfast::cuda_device{0});
}

}  // namespace

extern "C" [[gnu::visibility("default")]] const plugin_api* holdfast_test_plugin() {
  static constexpr plugin_api api{&make<holdfast::host_device>,
                                  &make<holdfast::cuda_device>,
                                  &acquire<holdfast::host_device>,
                                  &acquire<holdfast::cuda_device>,
                                  &destroy,
                                  &pending,
                                  &collect};
  return &api;
}
