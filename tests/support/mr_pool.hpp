// A stranger's cuda::mr resource, in every form that they come in:
//
//   mr_pool<Device, mr_names::since_3_1>     allocate_sync(bytes, alignment); on CUDA also allocate(stream, bytes, alignment)
//   mr_pool<Device, mr_names::of_3_0>        allocate(bytes, alignment); on CUDA also allocate_async(bytes, alignment, stream)
//   mr_pool<Device, names, false>            the same without streams
//
// A copyable handle; copies share their state, so a test keeps one and gives one away. It honours alignments to 256 bytes
// (16 on the host) and refuses others, as they do.
#pragma once

#include "devices.hpp"

#include <holdfast/resource/mr.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace support {

enum class mr_names { of_3_0, since_3_1 };
inline constexpr mr_names mr_current_names = CCCL_VERSION < 3001000 ? mr_names::of_3_0 : mr_names::since_3_1;

/// What a call or a destructor found.
template <class Device>
struct mr_circumstances {
  Device current;
  bool relaxed = false;
  cudaStream_t stream = nullptr;

  static mr_circumstances now(cudaStream_t stream = nullptr) {
    mr_circumstances found{current_device<Device>(), false, stream};
    const capture_mode mode = driver<Device>::exchange_thread_mode(capture_mode::relaxed);
    static_cast<void>(driver<Device>::exchange_thread_mode(mode));
    found.relaxed = mode == capture_mode::relaxed;
    return found;
  }
};

template <class Device>
struct mr_state {
  static constexpr std::size_t max_alignment = is_host<Device> ? alignof(std::max_align_t) : 256;

  std::mutex mutex;
  std::unordered_map<void*, std::size_t> live;  // bytes
  std::vector<mr_circumstances<Device>> calls;
  std::size_t mistakes = 0;
  std::size_t skew = 0;                                                 // bytes by which pointers miss their alignment
  std::function<void()> before;                                         // of each allocation; may throw
  std::function<void(const mr_circumstances<Device>&)> destroyed = {};  // by the last handle

  ~mr_state() {
    if (destroyed) destroyed(mr_circumstances<Device>::now());
  }

  void* allocate(cudaStream_t stream, bool ordered, std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock{mutex};
    calls.push_back(mr_circumstances<Device>::now(stream));
    if (before) before();
    if (alignment > max_alignment) throw std::invalid_argument{"too much of an alignment"};
    void* p = nullptr;
    if constexpr (is_host<Device>) {
      static_cast<void>(ordered);
      constexpr std::size_t most = std::size_t{1} << 40;  // the sanitizers' operator new aborts far above
      if (bytes > most || (p = ::operator new(bytes + skew, std::nothrow)) == nullptr) throw std::bad_alloc{};
    } else {
      const cudaError_t code = ordered ? cudaMallocAsync(&p, bytes + skew, stream) : cudaMalloc(&p, bytes + skew);
      if (code != cudaSuccess) throw cuda::cuda_error{code, "no memory"};
    }
    p = static_cast<std::byte*>(p) + skew;
    live.emplace(p, bytes);
    return p;
  }

  void deallocate(cudaStream_t stream, bool ordered, void* p, std::size_t bytes) {
    const std::lock_guard lock{mutex};
    calls.push_back(mr_circumstances<Device>::now(stream));
    const auto found = live.find(p);
    if (found == live.end() || found->second != bytes) {
      ++mistakes;
      return;
    }
    live.erase(found);
    p = static_cast<std::byte*>(p) - skew;
    if constexpr (is_host<Device>) {
      static_cast<void>(ordered);
      ::operator delete(p);
    } else {
      static_cast<void>(ordered ? cudaFreeAsync(p, stream) : cudaFree(p));
    }
  }
};

template <class Device, mr_names Names = mr_current_names, bool Streams = !is_host<Device>>
class mr_pool {
  static constexpr bool old = Names == mr_names::of_3_0;

 public:
  // clang-format off
  void* allocate(std::size_t bytes, std::size_t alignment) requires old { return state->allocate(nullptr, false, bytes, alignment); }
  void deallocate(void* p, std::size_t bytes, std::size_t) requires old { state->deallocate(nullptr, false, p, bytes); }
  void* allocate_async(std::size_t bytes, std::size_t alignment, cuda::stream_ref s) requires (old && Streams) { return state->allocate(s.get(), true, bytes, alignment); }
  void deallocate_async(void* p, std::size_t bytes, std::size_t, cuda::stream_ref s) requires (old && Streams) { state->deallocate(s.get(), true, p, bytes); }

  void* allocate_sync(std::size_t bytes, std::size_t alignment) requires (!old) { return state->allocate(nullptr, false, bytes, alignment); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t) noexcept requires (!old) { state->deallocate(nullptr, false, p, bytes); }
  void* allocate(cuda::stream_ref s, std::size_t bytes, std::size_t alignment) requires (!old && Streams) { return state->allocate(s.get(), true, bytes, alignment); }
  void deallocate(cuda::stream_ref s, void* p, std::size_t bytes, std::size_t) noexcept requires (!old && Streams) { state->deallocate(s.get(), true, p, bytes); }

  friend void get_property(const mr_pool&, cuda::mr::host_accessible) noexcept requires (is_host<Device>) {}
  friend void get_property(const mr_pool&, cuda::mr::device_accessible) noexcept requires (!is_host<Device>) {}
  // clang-format on
  friend bool operator==(const mr_pool&, const mr_pool&) = default;

  std::shared_ptr<mr_state<Device>> state = std::make_shared<mr_state<Device>>();
};

/// The references of the CCCL that this is compiled with.
#if CCCL_VERSION < 3001000
template <class... Properties>
using mr_ordered_ref = cuda::mr::async_resource_ref<Properties...>;
template <class... Properties>
using mr_sync_ref = cuda::mr::resource_ref<Properties...>;
static_assert(cuda::mr::async_resource_with<mr_pool<holdfast::cuda_device>, cuda::mr::device_accessible>);
static_assert(cuda::mr::resource_with<mr_pool<holdfast::host_device>, cuda::mr::host_accessible>);
#else
template <class... Properties>
using mr_ordered_ref = cuda::mr::resource_ref<Properties...>;
template <class... Properties>
using mr_sync_ref = cuda::mr::synchronous_resource_ref<Properties...>;
static_assert(cuda::mr::resource_with<mr_pool<holdfast::cuda_device>, cuda::mr::device_accessible>);
static_assert(cuda::mr::synchronous_resource_with<mr_pool<holdfast::host_device>, cuda::mr::host_accessible>);
#endif

}  // namespace support
