// expect: equality_comparable
// What is no memory_resource says which part of the concept it lacks.
#include <holdfast/device/host.hpp>
#include <holdfast/memory_resource.hpp>

struct pool {
  using stream_type = holdfast::host::stream_ref;
  void* allocate(stream_type, std::size_t, std::size_t);
  void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept;
};
holdfast::any_resource<holdfast::host_device> resource{pool{}, holdfast::host_device{}};
