// The pluggable interface: where bytes come from.
//
//   struct my_pool {                                     // any copyable, comparable handle with two functions
//     using stream_type = cudaStream_t;
//     void* allocate(cudaStream_t, std::size_t bytes, std::size_t alignment);
//     void deallocate(cudaStream_t, void*, std::size_t bytes, std::size_t alignment) noexcept;
//     bool operator==(const my_pool&) const = default;
//   };
//   holdfast::any_resource<holdfast::cuda_device> bytes{my_pool{}, holdfast::cuda_device{0}};
//
// A resource is an owning handle: a copy keeps the pool alive, so graphs may outlive whoever made it. It is thread
// safe. It never sees a capture: the library never calls one on a capturing stream, and any_resource refuses to. That
// is why cub, PyTorch, cudaMallocAsync and RMM plug in as they are.
//
// Not here: a virtual base class to derive from, or a non-owning reference.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

namespace detail {

/// A resource's two functions. Constructors are constrained by this and not by memory_resource: whether a tuple of
/// any_resource, or a resource that is made from one, is copyable would depend on itself.
template <class R>
concept resource_calls = requires(R r, typename R::stream_type stream, void* p, std::size_t bytes,
                                  std::size_t alignment) {
  { r.allocate(stream, bytes, alignment) } -> std::same_as<void*>;
  { r.deallocate(stream, p, bytes, alignment) }
  noexcept;
};

}  // namespace detail

/// `allocate(stream, bytes, alignment)` returns memory usable in the order of `stream`, or throws out_of_memory.
/// `deallocate(stream, p, bytes, alignment)` takes it back, with the same figures, once the work queued on `stream`
/// is done; the stream is the one it was allocated on.
template <class R>
concept memory_resource = detail::resource_calls<R> && std::copyable<R> && std::equality_comparable<R>;

/// `extend(stream, p, old_bytes, new_bytes)` grows an allocation without moving it. False: unsupported or out of memory,
/// and nothing changed. The new bytes are unspecified. It may be called inside a capture, in every mode, on the
/// library's own stream.
template <class R>
concept extensible_resource = memory_resource<R> &&
    requires(R r, typename R::stream_type stream, void* p, std::size_t bytes) {
  { r.extend(stream, p, bytes, bytes) } -> std::same_as<bool>;
};

/// Any resource of a device: an owning, copyable handle. Copies are equal, share one resource, and cost a reference
/// count.
///
/// It applies the rules that are the same for all resources before it asks one: zero bytes give null and ask nobody;
/// the alignment is a power of two; more than PTRDIFF_MAX bytes is out_of_memory; a capturing, implicitly capturing or
/// invalidated stream is a logic_error; the call runs on the resource's device, leaves the current device as it was,
/// and cannot invalidate anybody's capture.
template <device Device>
class any_resource {
 public:
  using device_type = Device;
  using stream_type = typename Device::stream_type;

  /// A resource that says which device it is of (`resource.device()`).
  template <class R>
    requires(!std::same_as<std::remove_cvref_t<R>, any_resource>)
  &&detail::resource_calls<std::remove_cvref_t<R>>&& requires(const std::remove_cvref_t<R>& r) {
    { r.device() } -> std::convertible_to<Device>;
  }
  any_resource(R&& resource)  // NOLINT(google-explicit-constructor): erasure is the point
      : any_resource(std::forward<R>(resource), Device{resource.device()}) {}

  /// A resource of `device`.
  template <class R>
    requires(!std::same_as<std::remove_cvref_t<R>, any_resource>)
  &&detail::resource_calls<std::remove_cvref_t<R>>&&
      std::same_as<typename std::remove_cvref_t<R>::stream_type, stream_type>
      any_resource(R&& resource, Device device)
      : self_(std::make_shared<model<std::remove_cvref_t<R>>>(std::forward<R>(resource), device)) {}

  /// Throws out_of_memory, logic_error, and what the resource throws.
  [[nodiscard]] void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    return self_->allocate(stream, bytes, alignment);
  }

  /// Null is ignored. On a capturing stream, a broken precondition that cannot be thrown: the memory stays allocated.
  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    self_->deallocate(stream, p, bytes, alignment);
  }

  /// Whether `extend` can ever succeed.
  [[nodiscard]] bool extensible() const noexcept { return self_->extensible(); }

  /// Grows `p` from `old_bytes` to `new_bytes` where it is. False: nothing changed.
  [[nodiscard]] bool extend(stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    return self_->extend(stream, p, old_bytes, new_bytes);
  }

  [[nodiscard]] Device device() const noexcept { return self_->device; }

  /// What the resource calls itself in errors ("async_resource"), or "resource".
  [[nodiscard]] const char* name() const noexcept { return self_->name(); }

  /// Equal: memory of one may be given back to the other. (A template, so that comparing anything else never asks
  /// whether it could become a resource.)
  template <std::same_as<any_resource> R>
  friend bool operator==(const any_resource& a, const R& b) {
    return a.self_.get() == b.self_.get() || a.self_->equal(*b.self_);
  }

 private:
  struct base {
    explicit base(Device d) : device(d) {}
    base(const base&) = delete;
    base& operator=(const base&) = delete;
    virtual ~base() = default;
    virtual void* allocate(stream_type, std::size_t, std::size_t) = 0;
    virtual void deallocate(stream_type, void*, std::size_t, std::size_t) noexcept = 0;
    virtual bool extend(stream_type, void*, std::size_t, std::size_t) = 0;
    [[nodiscard]] virtual bool extensible() const noexcept = 0;
    [[nodiscard]] virtual const char* name() const noexcept = 0;
    [[nodiscard]] virtual bool equal(const base&) const = 0;

    const Device device;
  };

  template <class R>
  struct model final : base {
    static_assert(memory_resource<R>, "a memory_resource is copyable and equality comparable");

    template <class A>
    model(A&& r, Device d) : base(d), resource(std::forward<A>(r)) {}

    void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) override {
      if constexpr (detail::applies_resource_rules<R>) {
        return resource.allocate(stream, bytes, alignment);
      } else {
        return detail::resource_rules::allocate(this->device, name(), stream, bytes, alignment,
                                                [&] { return resource.allocate(stream, bytes, alignment); });
      }
    }

    void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept override {
      if constexpr (detail::applies_resource_rules<R>) {
        resource.deallocate(stream, p, bytes, alignment);
      } else {
        detail::resource_rules::deallocate(this->device, stream, p,
                                           [&] { resource.deallocate(stream, p, bytes, alignment); });
      }
    }

    bool extend(stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) override {
      if constexpr (extensible_resource<R>) {
        const typename Device::relaxed_scope relaxed;
        const typename Device::current_scope current{this->device};
        return resource.extend(stream, p, old_bytes, new_bytes);
      } else {
        static_cast<void>(stream), static_cast<void>(p), static_cast<void>(old_bytes), static_cast<void>(new_bytes);
        return false;
      }
    }

    [[nodiscard]] bool extensible() const noexcept override { return extensible_resource<R>; }

    [[nodiscard]] const char* name() const noexcept override {
      if constexpr (requires {
                      { R::name } -> std::convertible_to<const char*>;
                    }) {
        return R::name;
      } else {
        return "resource";
      }
    }

    [[nodiscard]] bool equal(const base& other) const override {
      const auto* same = typeid(other) == typeid(model) ? static_cast<const model*>(&other) : nullptr;
      return same != nullptr && resource == same->resource;
    }

    R resource;
  };

  std::shared_ptr<base> self_;
};

}  // namespace holdfast::HOLDFAST_ABI
