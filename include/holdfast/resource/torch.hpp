// PyTorch's CUDA allocator as a resource: what holdfast holds is in torch.cuda.memory_allocated(), and both share one cache.
//
//   holdfast::torch_resource memory{holdfast::cuda_device{0}};               // torch has initialised CUDA by then
//   holdfast::lane decode{holdfast::any_resource<holdfast::cuda_device>{memory}};
//
// Memory of a resource outlives whatever captures or pools are under way when it is asked for, so it must never come from
// one of torch's private pools. torch.cuda.graph routes a stream there, torch.cuda.use_mem_pool and inductor a thread, and
// nobody can ask which. So this resource allocates on a thread of its own, which nothing is ever routed on: an allocation
// takes some microseconds, where torch alone takes 0.3. For scratch that is acquired at every call, put a cache on top:
//
//   holdfast::caching_resource fast{memory};
//
// Releases are torch's own, on the calling thread: they go back to where the memory came from.
//
// torch's history of allocations (torch.cuda.memory._record_memory_history) takes the GIL on the allocating thread. So
// nobody may hold it while a resource is asked: operators of torch.library don't, and bindings release it.
//
// Needs PyTorch's headers, and its libc10_cuda.so and libc10.so. Not here: tensors on such memory
// (examples/05_torch_extension), torch's own pluggable allocators.
#pragma once

#include <holdfast/detail/process.hpp>
#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

/// A thread that does one thing at a time for whoever asks, who waits for it.
class errand_thread {
 public:
  errand_thread() : thread_([at = desk_] { at->serve(); }) {}
  errand_thread(const errand_thread&) = delete;
  errand_thread& operator=(const errand_thread&) = delete;
  ~errand_thread() {
    if (!device_usable().load(std::memory_order_relaxed)) {
      thread_.detach();  // a forked child has no such thread, and an exit waits for none
      return;
    }
    desk_->close();
    thread_.join();
  }

  /// Returns when `errand` has returned; throws what it threw.
  void operator()(const std::function<void()>& errand) { desk_->ask(errand); }

 private:
  class desk {
   public:
    void ask(const std::function<void()>& errand) {
      const std::lock_guard turn{one_at_a_time_};
      std::unique_lock lock{mutex_};
      errand_ = &errand;
      changed_.notify_all();
      changed_.wait(lock, [this] { return errand_ == nullptr; });
      if (error_ != nullptr) {
        std::rethrow_exception(std::exchange(error_, nullptr));
      }
    }
    void serve() {
      std::unique_lock lock{mutex_};
      for (;;) {
        changed_.wait(lock, [this] { return errand_ != nullptr || closed_; });
        if (closed_) {
          return;
        }
        try {
          (*errand_)();
        } catch (...) {
          error_ = std::current_exception();
        }
        errand_ = nullptr;
        changed_.notify_all();
      }
    }
    void close() {
      const std::lock_guard lock{mutex_};
      closed_ = true;
      changed_.notify_all();
    }

   private:
    std::mutex one_at_a_time_, mutex_;
    std::condition_variable changed_;
    const std::function<void()>* errand_ = nullptr;
    std::exception_ptr error_;
    bool closed_ = false;
  };

  std::shared_ptr<desk> desk_ = std::make_shared<desk>();  // the thread's, too: it may outlive this
  std::thread thread_;
};

class torch_impl {
 public:
  using device_type = cuda_device;
  static constexpr const char* name = "torch_resource";
  static constexpr std::size_t max_alignment = 512;  // c10/core/AllocatorConfig.h, kMinBlockSize

  explicit torch_impl(cuda_device d) : device(d) {
    watch_process();
    if (!c10::cuda::CUDACachingAllocator::get()->initialized()) {
      throw logic_error{std::string{name} + ": PyTorch has not initialised CUDA yet; call torch.cuda.init() first"};
    }
  }

  void* allocate(cudaStream_t stream, std::size_t bytes, std::size_t alignment) {
    if (!device_usable().load(std::memory_order_relaxed)) {
      throw logic_error{std::string{name} + ": devices cannot be used in a forked child, nor while the process exits"};
    }
    void* p = nullptr;
    elsewhere_([&] {
      const cuda_device::relaxed_scope relaxed;
      const cuda_device::current_scope current{device};
      leave_the_legacy_stream();
      try {
        p = c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, stream);
      } catch (const c10::OutOfMemoryError&) {
      }
      if (p == nullptr) {  // a pluggable allocator says it so
        throw out_of_memory{name, bytes, held_if_known(), device.memory().free};
      }
    });
    if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0) {
      c10::cuda::CUDACachingAllocator::raw_delete(p);
      throw logic_error{std::string{name} + ": memory aligned to " + std::to_string(alignment) +
                        " bytes was asked of torch's allocator, and is not"};
    }
    return p;
  }

  static void deallocate(cudaStream_t, void* p, std::size_t, std::size_t) {
    c10::cuda::CUDACachingAllocator::raw_delete(p);
  }

  [[nodiscard]] std::uint64_t held() const {
    constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto statistics =
        c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device.ordinal));
    return static_cast<std::uint64_t>(statistics.reserved_bytes[all].current);
  }

  const cuda_device device;

 private:
  /// 0 where the allocator keeps no statistics.
  [[nodiscard]] std::uint64_t held_if_known() const {
    try {
      return held();
    } catch (const c10::Error&) {
      return 0;
    }
  }

  /// Torch asks whether its current stream captures, and the legacy one cannot be asked while a blocking stream does.
  void leave_the_legacy_stream() const {
    const auto index = static_cast<c10::DeviceIndex>(device.ordinal);
    if (c10::cuda::getCurrentCUDAStream(index) == c10::cuda::getDefaultCUDAStream(index)) {
      c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(device.library_stream(), index));
    }
  }

  errand_thread elsewhere_;
};

}  // namespace detail

/// Memory of PyTorch's current CUDA allocator (its caching allocator, or what torch.cuda.memory.change_current_allocator
/// chose). Copies are equal; two made apart are not, though they share torch's cache. Thread safe, one allocation at a time.
///
/// `allocate` never gives memory of a private pool. Torch empties its cache before it runs out of memory, unless something
/// captures (then nothing may be freed, so nobody asks it to); `out_of_memory` is thrown then, with the bytes asked,
/// reserved by torch, and free on the device. Torch's other errors are let through (c10::Error). Blocks are aligned to 512
/// bytes.
///
/// `deallocate` gives memory back in the order of the stream that it was allocated on, whichever is named. A pointer that
/// torch doesn't know is ignored.
class torch_resource : public detail::resource_handle<detail::torch_impl> {
 public:
  /// Throws `logic_error` when torch has not initialised CUDA.
  explicit torch_resource(cuda_device device = {}) : resource_handle(std::in_place, device) {}

  /// Bytes that torch holds of the device, for whomever.
  [[nodiscard]] std::uint64_t held_bytes() const { return impl().held(); }
};

static_assert(memory_resource<torch_resource>);

}  // namespace holdfast::HOLDFAST_ABI
