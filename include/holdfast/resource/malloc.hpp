// Memory straight from the device, one device allocation for each of ours.
//
//   holdfast::malloc_resource bytes{holdfast::cuda_device{0}};           // or host_device{}
//   void* p = bytes.allocate(stream, 4096, 256);
//   bytes.deallocate(stream, p, 4096, 256);                              // once the work queued on `stream` is done
//
// On CUDA: cudaMalloc and cudaFree. On the host device: whole pages of their own, placed so that the allocation ends
// where its pages end, and nothing is mapped behind it: reading past the end is a SIGSEGV at once, and so is using
// the memory after it was freed.
//
// Nothing is cached, so this is the resource to find faults with (compute-sanitizer sees every allocation by itself),
// and one for memory that is allocated once. Not here: speed. An allocation and its release cost tens of microseconds
// on CUDA, and the release waits.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

template <device Device>
class malloc_impl;

template <>
class malloc_impl<cuda_device> {
 public:
  using device_type = cuda_device;
  static constexpr const char* name = "malloc_resource";
  static constexpr std::size_t max_alignment = 256;  // CUDA C++ Programming Guide, "Device Memory Accesses"

  explicit malloc_impl(cuda_device d) : device(d) {}

  void* allocate(cudaStream_t, std::size_t bytes, std::size_t) {
    void* p = nullptr;
    const cudaError_t code = cudaMalloc(&p, bytes);
    if (code == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      throw out_of_memory{name, bytes, held(), device.memory().free};
    }
    cuda_check(code, "cudaMalloc");
    try {
      const std::lock_guard lock{mutex_};
      live_.emplace(p, bytes);
      held_ += bytes;
    } catch (...) {
      static_cast<void>(cudaFree(p));
      throw;
    }
    return p;
  }

  // cudaFree waits for the device today, which nobody promises: so we wait for the stream first.
  void deallocate(cudaStream_t stream, void* p, std::size_t, std::size_t) {
    {
      const std::lock_guard lock{mutex_};
      const auto block = live_.find(p);
      if (block == live_.end()) {
        return;
      }
      held_ -= block->second;
      live_.erase(block);
    }
    wait_for_work(device, stream);
    cuda_check(cudaFree(p), "cudaFree");
  }

  [[nodiscard]] std::size_t held() const {
    const std::lock_guard lock{mutex_};
    return held_;
  }

  const cuda_device device;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::size_t> live_;  // bytes
  std::size_t held_ = 0;
};

template <>
class malloc_impl<host_device> {
 public:
  using device_type = host_device;
  static constexpr const char* name = "malloc_resource";
  static constexpr std::size_t max_alignment = ~std::size_t{};  // any: reservations have what is asked

  explicit malloc_impl(host_device d) : device(d), books_(std::make_shared<books>()) {}

  void* allocate(host::stream_ref, std::size_t bytes, std::size_t alignment) {
    host::unsafe_call("malloc_resource::allocate");
    pages block{device, bytes, alignment};
    const host::physical_ref memory = create(block.mapped, bytes);
    try {
      block.map(memory);
    } catch (...) {
      device.destroy(memory);
      throw;
    }
    device.destroy(memory);  // the mapping keeps it
    try {
      const std::lock_guard lock{books_->mutex};
      books_->live.emplace(block.data, block);
      books_->held += block.mapped;
    } catch (...) {
      block.unmap();
      throw;
    }
    return block.data;
  }

  void deallocate(host::stream_ref stream, void* p, std::size_t, std::size_t) {
    auto taken = books_->take(p);
    if (taken.empty()) {
      return;
    }
    try {
      // The books and not this: by the time this runs, the last handle of the resource may be gone.
      host::enqueue_free(stream, [books = books_, block = taken.mapped()] {
        block.unmap();
        const std::lock_guard lock{books->mutex};
        books->held -= block.mapped;
      });
    } catch (...) {
      books_->put_back(std::move(taken));
      throw;
    }
  }

  [[nodiscard]] std::size_t held() const {
    const std::lock_guard lock{books_->mutex};
    return books_->held;
  }

  const host_device device;

 private:
  [[nodiscard]] host::physical_ref create(std::size_t mapped, std::size_t asked) {
    try {
      return device.create(mapped);
    } catch (const out_of_memory&) {
      host::run_pending(device);  // what was freed may still be queued
    }
    try {
      return device.create(mapped);
    } catch (const out_of_memory& shortage) {
      throw out_of_memory{name, asked, held(), shortage.free()};
    }
  }

  // One allocation and the addresses around it: [nothing | pages, the allocation at their end | nothing].
  struct pages {
    pages(host_device d, std::size_t bytes, std::size_t alignment)
        : device(d),
          page(d.granularity()),
          unit(std::max(page, alignment)),
          size(round_up(bytes, alignment)),
          mapped(round_up(size, page)),
          reserved(unit + round_up(size, unit) + page) {}

    void map(host::physical_ref memory) {
      base = static_cast<std::byte*>(device.reserve(reserved, unit));
      data = end() - size;
      try {
        device.map(end() - mapped, mapped, memory);
        try {
          device.allow(end() - mapped, mapped, access::read_write);
        } catch (...) {
          device.unmap(end() - mapped, mapped);
          throw;
        }
      } catch (...) {
        device.unreserve(base, reserved);
        throw;
      }
    }

    void unmap() const {
      device.unmap(end() - mapped, mapped);
      device.unreserve(base, reserved);
    }

    [[nodiscard]] std::byte* end() const { return base + (reserved - page); }

    static std::size_t round_up(std::size_t n, std::size_t power_of_two) {
      return (n + power_of_two - 1) & ~(power_of_two - 1);
    }

    host_device device;
    std::size_t page;      // bytes, all of these
    std::size_t unit;      // of the addresses of base and end()
    std::size_t size;      // from data to end()
    std::size_t mapped;    // up to end()
    std::size_t reserved;  // from base on
    std::byte* base = nullptr;
    std::byte* data = nullptr;
  };

  struct books {
    using map = std::unordered_map<void*, pages>;

    [[nodiscard]] typename map::node_type take(void* p) {
      const std::lock_guard lock{mutex};
      return live.extract(p);
    }
    void put_back(typename map::node_type block) {
      const std::lock_guard lock{mutex};
      live.insert(std::move(block));
    }

    std::mutex mutex;
    map live;
    std::size_t held = 0;  // bytes mapped, freed ones that are still queued included
  };

  std::shared_ptr<books> books_;
};

}  // namespace detail

/// Device memory, allocation by allocation. Copies share the resource; two made apart are not equal. Thread safe.
///
/// On CUDA, `allocate` is cudaMalloc: usable on every stream at once. `deallocate` waits on the host for the work queued
/// on its stream, then calls cudaFree. Aligned to 256 bytes; larger alignments cost the difference in bytes.
///
/// On the host device, the allocation ends where its last page ends, but for what its alignment demands: `bytes` are
/// rounded up to the alignment, so ask for alignment 1 to have the very next byte fault. Takes whole pages. They are
/// zeros, which CUDA doesn't promise. `deallocate` enqueues: the pages go away after the work queued on the stream
/// before. When the device's memory is used up (`host::set_memory_size`), what is pending on the device is run, and the
/// allocation tried once more; what a pending kernel throws can then come out of `allocate`.
///
/// A pointer that is not this resource's, or was given back before, is ignored. Memory never given back stays with the
/// process.
template <device Device>
class malloc_resource : public detail::resource_handle<detail::malloc_impl<Device>> {
  using base = detail::resource_handle<detail::malloc_impl<Device>>;

 public:
  explicit malloc_resource(Device device = {}) : base(std::in_place, device) {}

  /// Bytes taken from the device and not given back to it yet: as asked for on CUDA, whole pages on the host.
  [[nodiscard]] std::size_t held_bytes() const { return this->impl().held(); }
};

static_assert(memory_resource<malloc_resource<cuda_device>>);
static_assert(memory_resource<malloc_resource<host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
