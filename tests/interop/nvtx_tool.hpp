// A tool that listens to NVTX, as Nsight and compute-sanitizer do, and remembers what it was told of memory. It is attached
// to the program that it is linked into.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace support {

struct nvtx_heap {
  const void* start = nullptr;
  std::size_t bytes = 0;
  std::string name{};
};

struct nvtx_region {
  std::size_t bytes = 0;
  std::string name{};
  const nvtx_heap* heap = nullptr;  // null: the whole process
};

struct nvtx_books {
  std::map<const nvtx_heap*, nvtx_heap> heaps;  // by their handle
  std::map<const void*, nvtx_region> regions;
  int mistakes = 0;  // regions and heaps that there aren't, wrong structures
};

/// What is known now. To be looked at while nobody allocates.
nvtx_books& nvtx_told();

}  // namespace support
