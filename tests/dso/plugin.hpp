// What a plugin exports: an engine's extension module that has a buffer of its own.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>

struct plugin_api {
  void (*make)(holdfast::host_device);
  void (*make_cuda)(holdfast::cuda_device);
  const void* (*acquire)(holdfast::host::stream_ref, long rows);
  const void* (*acquire_cuda)(cudaStream_t, long rows);
  void (*destroy)();
  unsigned long long (*pending)();  // bytes its own queues hold
  void (*collect)();
};

extern "C" const plugin_api* holdfast_test_plugin();
