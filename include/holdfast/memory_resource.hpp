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
#include <optional>
#include <string>
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
/// library's own stream. A resource that has it but cannot always, because it wraps another one, has `extensible()`, too.
template <class R>
concept extensible_resource = memory_resource<R> &&
    requires(R r, typename R::stream_type stream, void* p, std::size_t bytes) {
  { r.extend(stream, p, bytes, bytes) } -> std::same_as<bool>;
};

/// `decommit(stream, p, bytes)` gives the physical memory of an allocation back to the device, once the work queued on
/// `stream` is done; nothing may use it until `recommit(stream, p, bytes)` has put fresh memory at the same addresses,
/// whose contents are unspecified. Both throw device_error, recommit out_of_memory, too; either can be tried again then.
/// `suspendable()` as `extensible()`.
template <class R>
concept suspendable_resource = memory_resource<R> &&
    requires(R r, typename R::stream_type stream, void* p, std::size_t bytes) {
  r.decommit(stream, p, bytes);
  r.recommit(stream, p, bytes);
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

  /// Whether `decommit` and `recommit` can be called: a logic_error otherwise.
  [[nodiscard]] bool suspendable() const noexcept { return self_->suspendable(); }
  void decommit(stream_type stream, void* p, std::size_t bytes) { self_->decommit(stream, p, bytes); }
  void recommit(stream_type stream, void* p, std::size_t bytes) { self_->recommit(stream, p, bytes); }

  /// The resource for memory that stays: buffers and arenas take theirs from it. A resource that keeps another one for
  /// that says so by a `persistent()` of its own; else this is the same resource.
  [[nodiscard]] any_resource persistent() const {
    std::optional<any_resource> other = self_->persistent();
    return other ? *std::move(other) : *this;
  }

  /// Whether readable tails are left out of what is asked of the resource (`omits_tails()`, if it has that), so that it
  /// finds those who rely on them.
  [[nodiscard]] bool omits_tails() const noexcept { return self_->omits_tails(); }

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
    virtual void decommit(stream_type, void*, std::size_t) = 0;
    virtual void recommit(stream_type, void*, std::size_t) = 0;
    [[nodiscard]] virtual bool suspendable() const noexcept = 0;
    [[nodiscard]] virtual bool omits_tails() const noexcept = 0;
    [[nodiscard]] virtual std::optional<any_resource> persistent() const = 0;
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

    [[nodiscard]] bool extensible() const noexcept override {
      if constexpr (requires {
                      { resource.extensible() } -> std::convertible_to<bool>;
                    }) {
        return resource.extensible();
      } else {
        return extensible_resource<R>;
      }
    }

    void decommit(stream_type stream, void* p, std::size_t bytes) override {
      suspending([&](auto& suspendable) { suspendable.decommit(stream, p, bytes); });
    }

    void recommit(stream_type stream, void* p, std::size_t bytes) override {
      suspending([&](auto& suspendable) { suspendable.recommit(stream, p, bytes); });
    }

    template <class Call>
    void suspending(const Call& call) {
      if constexpr (suspendable_resource<R>) {
        const typename Device::relaxed_scope relaxed;
        const typename Device::current_scope current{this->device};
        call(resource);
      } else {
        throw logic_error{std::string{name()} + ": its memory cannot be given back while its addresses stay"};
      }
    }

    [[nodiscard]] bool suspendable() const noexcept override {
      if constexpr (requires {
                      { resource.suspendable() } -> std::convertible_to<bool>;
                    }) {
        return resource.suspendable();
      } else {
        return suspendable_resource<R>;
      }
    }

    [[nodiscard]] std::optional<any_resource> persistent() const override {
      if constexpr (requires {
                      { resource.persistent() } -> std::same_as<any_resource>;
                    }) {
        return resource.persistent();
      } else {
        return std::nullopt;
      }
    }

    [[nodiscard]] bool omits_tails() const noexcept override {
      if constexpr (requires {
                      { resource.omits_tails() } -> std::convertible_to<bool>;
                    }) {
        return resource.omits_tails();
      } else {
        return false;
      }
    }

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
