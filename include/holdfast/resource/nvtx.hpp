// Tells Nsight Systems and compute-sanitizer (`--nvtx yes`) what memory is whose, by NVTX's memory regions.
//
//   holdfast::nvtx_resource memory{pool, "decode"};
//   {
//     const holdfast::owner_scope owner{"kv scratch"};        // names what this thread allocates while it lives
//     scratch.emplace(memory, shape);                         // a region "kv scratch"; others are called "decode"
//   }
//
// Inside a pool, tools see one allocation where a program sees many: what is read beyond one of them, or after it was
// given back, lies in memory that is allowed. A pool between the two resources here has its memory from heaps, of which
// only the regions may be touched:
//
//   holdfast::nvtx_resource memory{holdfast::caching_resource{holdfast::nvtx_heap_resource{holdfast::malloc_resource{gpu}}}};
//
// A tail that may be read belongs to the region: put tail_padded_resource over it. A region ends when its memory is given
// back, not when the stream gets there.
//
// Without a tool, a call costs one branch more, and nothing at all where these types aren't used: there is no macro. A tool
// attaches when a process makes its first NVTX call, or never. Not in holdfast.hpp, which needs no NVTX.
// Not here: ranges, marks, permissions, or what was initialised.
#pragma once

#include <holdfast/detail/resource_policy.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/tracking.hpp>
#include <holdfast/version.hpp>

#include <nvtx3/nvToolsExtMem.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

/// What a tool is told. One a process, because regions and their heaps are told by different resources.
class nvtx_tool {
 public:
  /// Null where there is no tool. It stays, as tools are told of memory until the end.
  [[gnu::visibility("default")]] static nvtx_tool* attached() {
    static nvtx_tool* const tool = [] {
      nvtxDomainHandle_t const domain = nvtxDomainCreateA("holdfast");
      return domain == nullptr ? nullptr : new nvtx_tool{domain};
    }();
    return tool;
  }

  void add_heap(const void* p, std::size_t bytes, const std::string& name) {
    const std::lock_guard lock{mutex_};
    heap& added = heaps_[p];
    const nvtxMemVirtualRangeDesc_t range{bytes, p};
    nvtxMemHeapDesc_t whole = described<nvtxMemHeapDesc_t>();
    whole.usage = NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR;
    whole.type = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    whole.typeSpecificDescSize = sizeof range;
    whole.typeSpecificDesc = &range;
    whole.messageType = NVTX_MESSAGE_TYPE_ASCII;
    whole.message.ascii = name.c_str();
    added = {bytes, nvtxMemHeapRegister(domain_, &whole)};
  }

  void remove_heap(const void* p) {
    const std::lock_guard lock{mutex_};
    if (const auto removed = heaps_.extract(p)) {
      nvtxMemHeapUnregister(domain_, removed.mapped().handle);
    }
  }

  void add_region(const void* p, std::size_t bytes, const std::string& name) {
    const nvtxMemVirtualRangeDesc_t range{bytes, p};
    nvtxMemRegionsRegisterBatch_t regions = described<nvtxMemRegionsRegisterBatch_t>();
    regions.regionType = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    regions.heap = heap_of(p);
    regions.regionCount = 1;
    regions.regionDescElementSize = sizeof range;
    regions.regionDescElements = &range;
    nvtxMemRegionsRegister(domain_, &regions);

    nvtxMemRegionNameDesc_t named{};
    named.regionRefType = NVTX_MEM_REGION_REF_TYPE_POINTER;
    named.nameType = NVTX_MESSAGE_TYPE_ASCII;
    named.region.pointer = p;
    named.name.ascii = name.c_str();
    nvtxMemRegionsNameBatch_t names = described<nvtxMemRegionsNameBatch_t>();
    names.regionCount = 1;
    names.regionElementSize = sizeof named;
    names.regionElements = &named;
    nvtxMemRegionsName(domain_, &names);
  }

  void resize_region(const void* p, std::size_t bytes) const {
    const nvtxMemVirtualRangeDesc_t range{bytes, p};
    nvtxMemRegionsResizeBatch_t regions = described<nvtxMemRegionsResizeBatch_t>();
    regions.regionType = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    regions.regionDescCount = 1;
    regions.regionDescElementSize = sizeof range;
    regions.regionDescElements = &range;
    nvtxMemRegionsResize(domain_, &regions);
  }

  void remove_region(const void* p) const {
    nvtxMemRegionRef_t region{};
    region.pointer = p;
    nvtxMemRegionsUnregisterBatch_t regions = described<nvtxMemRegionsUnregisterBatch_t>();
    regions.refType = NVTX_MEM_REGION_REF_TYPE_POINTER;
    regions.refCount = 1;
    regions.refElementSize = sizeof region;
    regions.refElements = &region;
    nvtxMemRegionsUnregister(domain_, &regions);
  }

 private:
  struct heap {
    std::size_t bytes = 0;
    nvtxMemHeapHandle_t handle = nullptr;
  };

  explicit nvtx_tool(nvtxDomainHandle_t domain) : domain_(domain) {}

  template <class Description>
  static Description described() {
    Description empty{};
    empty.extCompatID = NVTX_EXT_COMPATID_MEM;
    empty.structSize = sizeof empty;
    return empty;
  }

  nvtxMemHeapHandle_t heap_of(const void* p) {
    const std::lock_guard lock{mutex_};
    if (auto next = heaps_.upper_bound(p); next != heaps_.begin()) {
      const auto& [start, found] = *std::prev(next);
      if (std::less<>{}(p, static_cast<const void*>(static_cast<const std::byte*>(start) + found.bytes))) {
        return found.handle;
      }
    }
    return NVTX_MEM_HEAP_HANDLE_PROCESS_WIDE;
  }

  nvtxDomainHandle_t const domain_;
  std::mutex mutex_;
  std::map<const void*, heap, std::less<>> heaps_;  // by their start
};

template <device Device>
class nvtx_policy : public policy_calls<Device> {
 public:
  using typename policy_calls<Device>::upstream_type;
  using typename policy_calls<Device>::stream_type;

  explicit nvtx_policy(std::string name) : name_(std::move(name)) {}

  void* allocate(upstream_type& upstream, stream_type stream, std::size_t bytes, std::size_t alignment) {
    void* const p = upstream.allocate(stream, bytes, alignment);
    if (tool_ != nullptr) [[unlikely]] {
      try {
        const std::string owner = owner_scope::current();
        tool_->add_region(p, bytes, owner.empty() ? name_ : owner);
      } catch (...) {
        upstream.deallocate(stream, p, bytes, alignment);
        throw;
      }
    }
    return p;
  }

  // Told before: afterwards the address may be somebody else's.
  void deallocate(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    if (tool_ != nullptr) [[unlikely]] {
      tool_->remove_region(p);
    }
    upstream.deallocate(stream, p, bytes, alignment);
  }

  bool extend(upstream_type& upstream, stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    const bool extended = upstream.extend(stream, p, old_bytes, new_bytes);
    if (extended && tool_ != nullptr) [[unlikely]] {
      tool_->resize_region(p, new_bytes);
    }
    return extended;
  }

 private:
  const std::string name_;
  nvtx_tool* const tool_ = nvtx_tool::attached();
};

template <device Device>
class nvtx_heap_policy : public policy_calls<Device> {
 public:
  using typename policy_calls<Device>::upstream_type;
  using typename policy_calls<Device>::stream_type;

  explicit nvtx_heap_policy(std::string name) : name_(std::move(name)) {}

  void* allocate(upstream_type& upstream, stream_type stream, std::size_t bytes, std::size_t alignment) {
    void* const p = upstream.allocate(stream, bytes, alignment);
    if (tool_ != nullptr) [[unlikely]] {
      try {
        tool_->add_heap(p, bytes, name_);
      } catch (...) {
        upstream.deallocate(stream, p, bytes, alignment);
        throw;
      }
    }
    return p;
  }

  void deallocate(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    if (tool_ != nullptr) [[unlikely]] {
      tool_->remove_heap(p);
    }
    upstream.deallocate(stream, p, bytes, alignment);
  }

  // NVTX's heaps don't grow; and what a program does must not depend on who looks on.
  static bool extend(upstream_type&, stream_type, void*, std::size_t, std::size_t) { return false; }

 private:
  const std::string name_;
  nvtx_tool* const tool_ = nvtx_tool::attached();
};

}  // namespace detail

/// Any other resource, whose allocations tools know as regions: by the name of the innermost owner_scope of the thread
/// that allocates, or of the resource. They lie in the heap of an nvtx_heap_resource below, or else in no heap of ours.
/// Copies share; two made apart are not equal. Thread safe.
template <device Device>
class nvtx_resource : public detail::resource_policy<nvtx_resource<Device>, Device, detail::nvtx_policy<Device>> {
  using base = detail::resource_policy<nvtx_resource<Device>, Device, detail::nvtx_policy<Device>>;

 public:
  static constexpr const char* name = "nvtx_resource";

  explicit nvtx_resource(any_resource<Device> upstream, std::string region_name = "holdfast")
      : base(std::move(upstream), std::move(region_name)) {}
};

/// Any other resource, whose allocations tools know as heaps: memory that a pool above cuts up, and of which a checker lets
/// nobody touch what isn't in a region of an nvtx_resource over that pool. It never extends. Copies share; two made apart
/// are not equal. Thread safe.
template <device Device>
class nvtx_heap_resource
    : public detail::resource_policy<nvtx_heap_resource<Device>, Device, detail::nvtx_heap_policy<Device>> {
  using base = detail::resource_policy<nvtx_heap_resource<Device>, Device, detail::nvtx_heap_policy<Device>>;

 public:
  static constexpr const char* name = "nvtx_heap_resource";

  explicit nvtx_heap_resource(any_resource<Device> upstream, std::string heap_name = "holdfast")
      : base(std::move(upstream), std::move(heap_name)) {}

  [[nodiscard]] bool extensible() const noexcept { return false; }
};

template <class Resource>
nvtx_resource(Resource, std::string = {}) -> nvtx_resource<typename Resource::device_type>;
template <class Resource>
nvtx_heap_resource(Resource, std::string = {}) -> nvtx_heap_resource<typename Resource::device_type>;

static_assert(memory_resource<nvtx_resource<cuda_device>> && extensible_resource<nvtx_resource<cuda_device>>);
static_assert(memory_resource<nvtx_heap_resource<host_device>> && suspendable_resource<nvtx_resource<host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
