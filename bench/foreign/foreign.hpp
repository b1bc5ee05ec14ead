// Other libraries' allocators, as their users call them, for benchmarks to compare with. Each is a source of its own,
// which is built where its library is found (CMakeLists.txt) and registers itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bench {

/// A pool on device 0, thread safe.
class foreign_pool {
 public:
  virtual ~foreign_pool() = default;
  [[nodiscard]] virtual void* allocate(cudaStream_t stream, std::size_t bytes) = 0;
  virtual void deallocate(cudaStream_t stream, void* p, std::size_t bytes) = 0;
};

struct foreign_kind {
  std::string name;
  std::function<std::shared_ptr<foreign_pool>()> make;
};

inline std::vector<foreign_kind>& foreign_kinds() {
  static std::vector<foreign_kind> all;
  return all;
}

/// As a global, registers a kind.
struct foreign_registration {
  foreign_registration(std::string name, std::function<std::shared_ptr<foreign_pool>()> make) {
    foreign_kinds().push_back({std::move(name), std::move(make)});
  }
};

}  // namespace bench
