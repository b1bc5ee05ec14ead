// Other people's memory resources as ours, and ours as theirs: cuda::mr of CCCL 3.0 (the toolkit's) and newer, and RMM,
// whose resources are cuda::mr resources.
//
//   holdfast::mr_resource theirs{rmm::mr::pool_memory_resource{rmm::mr::cuda_memory_resource{}, 1 << 30}};
//   holdfast::lane decode{theirs};                                 // a holdfast resource like any other
//
//   holdfast::as_mr ours{holdfast::async_resource{holdfast::cuda_device{0}}};
//   rmm::device_uvector<float> logits(n, stream, ours);            // a cuda::mr resource like any other
//
// A graph may outlive whoever made the pool, so mr_resource owns what it is given: by value, which for most resources is
// a shared handle, or by std::shared_ptr, for those that cannot be moved. A cuda::mr::resource_ref owns nothing, and is
// taken only from who promises that what it refers to `outlives_graphs`.
//
// Not in holdfast.hpp: with CCCL 3.0 and 3.1, <cuda/memory_resource> is empty, or has no references, unless
// LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE is defined before its first inclusion, which this header does for itself.
// Not here: properties beyond where the memory can be used, and `extend`: cuda::mr knows neither growth nor suspension.
#pragma once

#include <holdfast/detail/process.hpp>
#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cuda/std/version>

#if CCCL_VERSION < 3002000 && !defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
#ifdef _CUDA_MEMORY_RESOURCE
#error "include <holdfast/resource/mr.hpp> first, or define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE everywhere"
#endif
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE
#endif
#include <cuda/memory_resource>
#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

/// A promise about a resource that is not owned: it outlives all memory taken from it, which graphs may hold.
struct outlives_graphs_t {
  explicit outlives_graphs_t() = default;
};
inline constexpr outlives_graphs_t outlives_graphs{};

namespace detail {

// The forms that calls have, by their arguments: versions of CCCL differ in names, and some resources have them all.
template <class R>
concept mr_ordered = requires(R& r, ::cuda::stream_ref stream, void* p, std::size_t n) {  // since 3.1
  { r.allocate(stream, n, n) } -> std::same_as<void*>;
  r.deallocate(stream, p, n, n);
};
template <class R>
concept mr_async = requires(R& r, ::cuda::stream_ref stream, void* p, std::size_t n) {  // 3.0
  { r.allocate_async(n, n, stream) } -> std::same_as<void*>;
  r.deallocate_async(p, n, n, stream);
};
template <class R>
concept mr_sync = requires(R& r, void* p, std::size_t n) {  // since 3.1
  { r.allocate_sync(n, n) } -> std::same_as<void*>;
  r.deallocate_sync(p, n, n);
};
template <class R>
concept mr_plain = requires(R& r, void* p, std::size_t n) {  // 3.0
  { r.allocate(n, n) } -> std::same_as<void*>;
  r.deallocate(p, n, n);
};

/// Streams are CUDA's.
template <class Device>
inline constexpr bool mr_has_streams = std::same_as<Device, cuda_device>;

template <class Device>
using mr_accessible =
    std::conditional_t<mr_has_streams<Device>, ::cuda::mr::device_accessible, ::cuda::mr::host_accessible>;

template <class R, class Device>
concept mr_of = ::cuda::has_property<R, mr_accessible<Device>> &&
    (mr_sync<R> || mr_plain<R> || (mr_has_streams<Device> && (mr_ordered<R> || mr_async<R>)));

template <class R>
inline constexpr bool mr_accessible_to_host = ::cuda::has_property<R, ::cuda::mr::host_accessible>;

/// Whether it is a reference.
template <class R>
inline constexpr bool mr_borrows = false;
template <class... Properties>
inline constexpr bool mr_borrows<::cuda::mr::resource_ref<Properties...>> = true;
#if CCCL_VERSION < 3001000
template <class... Properties>
inline constexpr bool mr_borrows<::cuda::mr::async_resource_ref<Properties...>> = true;
#else
template <class... Properties>
inline constexpr bool mr_borrows<::cuda::mr::synchronous_resource_ref<Properties...>> = true;
#endif

template <class R>
concept mr_owns = std::move_constructible<R> && !mr_borrows<R>;

/// What failed. CCCL 3.0 only has it in the text.
template <class Error>
int mr_status(const Error& error) {
  if constexpr (requires { error.status(); }) {
    return static_cast<int>(error.status());
  } else {
    int status = 0;
    return std::sscanf(error.what(), "cudaError %d", &status) == 1 ? status : static_cast<int>(cudaErrorUnknown);
  }
}

template <class R, device Device>
class mr_impl {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;
  static constexpr const char* name = "mr_resource";
  // Greater ones are made by asking for more, as resources refuse them, or ignore them: 256 is cudaMalloc's, and the other
  // one is all that pinned memory promises.
  static constexpr std::size_t max_alignment = mr_accessible_to_host<R> ? alignof(std::max_align_t) : 256;

  mr_impl(std::shared_ptr<R> resource, Device d) : device(d), resource_(std::move(resource)) {
    if (resource_ == nullptr) {
      throw logic_error{"mr_resource: there is no resource"};
    }
    watch_process();
  }
  mr_impl(const mr_impl&) = delete;
  mr_impl& operator=(const mr_impl&) = delete;

  // The pool goes as it was used: on its device, and without breaking a capture. While the process exits, it stays.
  ~mr_impl() {
    if (!device_usable().load(std::memory_order_relaxed)) {
      static_cast<void>(new std::shared_ptr<R>{std::move(resource_)});
      return;
    }
    try {
      const typename Device::relaxed_scope relaxed;
      const typename Device::current_scope current{device};
      resource_.reset();
    } catch (...) {  // the runtime is gone
    }
  }

  void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    void* const p = ask(stream, bytes, alignment);
    if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0) [[unlikely]] {
      give_back(stream, p, bytes, alignment);
      throw logic_error{"mr_resource: memory aligned to " + std::to_string(alignment) + " bytes was asked, and is not"};
    }
    held_.fetch_add(bytes, std::memory_order_relaxed);
    return p;
  }

  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    held_.fetch_sub(bytes, std::memory_order_relaxed);
    give_back(stream, p, bytes, alignment);
  }

  [[nodiscard]] R& resource() const noexcept { return *resource_; }
  [[nodiscard]] std::size_t held() const noexcept { return held_.load(std::memory_order_relaxed); }

  const Device device;

 private:
  static constexpr bool ordered = mr_has_streams<Device> && (mr_ordered<R> || mr_async<R>);

  // A null handle depends on who compiled it, so whoever means the per-thread default stream says so.
  [[nodiscard]] static ::cuda::stream_ref explicit_handle(cudaStream_t stream) {
    return stream == nullptr && cuda_device::thread_bound(stream) ? cudaStreamPerThread : stream;
  }

  void* call(stream_type stream, std::size_t bytes, std::size_t alignment) {
    if constexpr (ordered && mr_ordered<R>) {
      return resource_->allocate(explicit_handle(stream), bytes, alignment);
    } else if constexpr (ordered) {
      return resource_->allocate_async(bytes, alignment, explicit_handle(stream));
    } else if constexpr (mr_sync<R>) {
      return resource_->allocate_sync(bytes, alignment);
    } else {
      return resource_->allocate(bytes, alignment);
    }
  }

  void* ask(stream_type stream, std::size_t bytes, std::size_t alignment) {
    try {
      if (void* const p = call(stream, bytes, alignment)) [[likely]] {
        return p;
      }
    } catch (const out_of_memory&) {
      throw;  // one of ours is below
    } catch (const std::bad_alloc&) {
      std::throw_with_nested(shortage(bytes));
    } catch (const ::cuda::cuda_error& error) {
      const int code = mr_status(error);
      if (code == static_cast<int>(cudaErrorMemoryAllocation)) {
        std::throw_with_nested(shortage(bytes));
      }
      clear_error();
      std::throw_with_nested(device_error{code, std::string{"mr_resource: "} + error.what()});
    }
    throw shortage(bytes);
  }

  void give_back(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    if constexpr (ordered && mr_ordered<R>) {
      resource_->deallocate(explicit_handle(stream), p, bytes, alignment);
    } else if constexpr (ordered) {
      resource_->deallocate_async(p, bytes, alignment, explicit_handle(stream));
    } else {
      wait_for_work(device, stream);
      if constexpr (mr_sync<R>) {
        resource_->deallocate_sync(p, bytes, alignment);
      } else {
        resource_->deallocate(p, bytes, alignment);
      }
    }
  }

  [[nodiscard]] out_of_memory shortage(std::size_t bytes) const {
    clear_error();
    return {name, bytes, held(), device.memory().free};
  }

  // What a call that failed has left.
  static void clear_error() {
    if constexpr (std::same_as<Device, cuda_device>) {
      static_cast<void>(cudaGetLastError());
    }
  }

  std::shared_ptr<R> resource_;
  std::atomic<std::size_t> held_{0};
};

}  // namespace detail

/// A cuda::mr resource as a holdfast resource. Copies share it; two made apart are not equal. As thread safe as it is.
///
/// On a cuda_device: a stream-ordered resource (`cuda::mr::async_resource` of CCCL 3.0, `cuda::mr::resource` since 3.1)
/// is called with the stream, and neither call waits. One that isn't (`cuda::mr::resource` of 3.0,
/// `synchronous_resource` since) is called when the work that used the memory is done, for which `deallocate` waits on
/// the host. On a host_device, which has streams of its own, all are used so. The memory must be device_accessible, or
/// host_accessible.
///
/// It is called on its device, on no capturing stream, in relaxed mode, where no call can invalidate anybody's capture but
/// a synchronisation of the whole device or, if a blocking stream captures, of the legacy stream: a resource that does that
/// (RMM's arena, when its memory is short; RMM's pool, when it is made or destroyed) is not for programs that capture
/// meanwhile. Zero bytes, sizes and alignments are as for all our resources: alignments beyond 256
/// bytes (or max_align_t's, of host_accessible memory) cost the difference in bytes. std::bad_alloc and cuda::cuda_error
/// come out as out_of_memory and device_error, with what was thrown nested inside; others as they are. The last handle
/// destroys the resource, on its device, too.
template <class Resource, device Device = cuda_device>
  requires detail::mr_of<Resource, Device>
class mr_resource : public detail::resource_handle<detail::mr_impl<Resource, Device>> {
  using base = detail::resource_handle<detail::mr_impl<Resource, Device>>;

 public:
  /// Owns `resource`, whose memory is of `device`.
  explicit mr_resource(Resource resource, Device device = {}) requires detail::mr_owns<Resource>
      : mr_resource(std::make_shared<Resource>(std::move(resource)), device) {}

  /// Owns it together with others. Throws logic_error when it is null.
  explicit mr_resource(std::shared_ptr<Resource> resource, Device device = {})
      : base(std::in_place, std::move(resource), device) {}

  /// Owns a reference, on the caller's promise.
  mr_resource(Resource reference, Device device, outlives_graphs_t) requires std::move_constructible<Resource>
      : mr_resource(std::make_shared<Resource>(std::move(reference)), device) {}

  /// The resource itself, for what else it can do.
  [[nodiscard]] Resource& resource() const noexcept { return this->impl().resource(); }

  /// Bytes that were asked of it and not given back.
  [[nodiscard]] std::size_t held_bytes() const noexcept { return this->impl().held(); }
};

/// A holdfast resource as a cuda::mr resource of the same memory: for CCCL 3.0 and all newer ones, whose names differ.
/// Copies are equal and own the resource together; a reference to one (`cuda::mr::resource_ref`) does not.
///
/// The stream-ordered calls are those of the resource: on a capturing stream they throw logic_error, and leave memory
/// allocated. The others wait on the host, on the library's own stream: what they give is ready on every stream, and what
/// they take back nobody may use any more. Throws what the resource throws: out_of_memory is a std::bad_alloc. On a
/// host_device there are no CUDA streams, and only the others.
template <device Device = cuda_device>
class as_mr {
 public:
  explicit as_mr(any_resource<Device> resource) : resource_(std::move(resource)) {}

  // Since CCCL 3.1: cuda::mr::resource.
  [[nodiscard]] void* allocate(::cuda::stream_ref stream, std::size_t bytes,
                               std::size_t alignment) requires detail::mr_has_streams<Device> {
    return resource_.allocate(stream.get(), bytes, alignment);
  }
  void deallocate(::cuda::stream_ref stream, void* p, std::size_t bytes,
                  std::size_t alignment) noexcept requires detail::mr_has_streams<Device> {
    resource_.deallocate(stream.get(), p, bytes, alignment);
  }

  // Since CCCL 3.1: cuda::mr::synchronous_resource.
  [[nodiscard]] void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    const typename Device::relaxed_scope relaxed;
    const auto stream = resource_.device().library_stream();
    void* const p = resource_.allocate(stream, bytes, alignment);
    Device::synchronize(stream);
    return p;
  }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    const typename Device::relaxed_scope relaxed;
    resource_.deallocate(resource_.device().library_stream(), p, bytes, alignment);
  }

  // CCCL 3.0: cuda::mr::async_resource.
  [[nodiscard]] void* allocate_async(std::size_t bytes, std::size_t alignment,
                                     ::cuda::stream_ref stream) requires detail::mr_has_streams<Device> {
    return allocate(stream, bytes, alignment);
  }
  void deallocate_async(void* p, std::size_t bytes, std::size_t alignment,
                        ::cuda::stream_ref stream) noexcept requires detail::mr_has_streams<Device> {
    deallocate(stream, p, bytes, alignment);
  }

  // CCCL 3.0: cuda::mr::resource.
  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }
  void deallocate(void* p, std::size_t bytes, std::size_t alignment) noexcept { deallocate_sync(p, bytes, alignment); }

  friend constexpr void get_property(const as_mr&, detail::mr_accessible<Device>) noexcept {}
  friend bool operator==(const as_mr&, const as_mr&) = default;

 private:
  any_resource<Device> resource_;
};

template <class Resource>
as_mr(Resource) -> as_mr<typename Resource::device_type>;

#if CCCL_VERSION < 3001000
static_assert(::cuda::mr::async_resource_with<as_mr<cuda_device>, ::cuda::mr::device_accessible>);
static_assert(::cuda::mr::resource_with<as_mr<host_device>, ::cuda::mr::host_accessible>);
#else
static_assert(::cuda::mr::resource_with<as_mr<cuda_device>, ::cuda::mr::device_accessible>);
static_assert(::cuda::mr::synchronous_resource_with<as_mr<host_device>, ::cuda::mr::host_accessible>);
#endif
static_assert(memory_resource<mr_resource<as_mr<cuda_device>>>);
static_assert(memory_resource<mr_resource<as_mr<host_device>, host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
