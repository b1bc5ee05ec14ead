// What the policies derive from: a resource that wraps any other one, adds something to some calls, and passes on the rest,
// the optional features included, as the upstream has them.
#pragma once

#include <holdfast/detail/resource_rules.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <memory>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// What a policy does: nothing, here. It derives from this and hides what it changes. One policy serves all handles and,
/// `upstream` tells which, the resource for what stays as well. Thread safe.
template <device Device>
struct policy_calls {
  using upstream_type = any_resource<Device>;
  using stream_type = typename Device::stream_type;

  // bytes > 0, a power of two, no capture, current device set, relaxed; throwing out of deallocate is swallowed
  void* allocate(upstream_type& upstream, stream_type stream, std::size_t bytes, std::size_t alignment) {
    return upstream.allocate(stream, bytes, alignment);
  }
  void deallocate(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    upstream.deallocate(stream, p, bytes, alignment);
  }
  // the upstream can; perhaps inside a capture
  bool extend(upstream_type& upstream, stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    return upstream.extend(stream, p, old_bytes, new_bytes);
  }
  void decommit(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes) {
    upstream.decommit(stream, p, bytes);
  }
  void recommit(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes) {
    upstream.recommit(stream, p, bytes);
  }
};

/// The handle. `Resource` derives from it, has a static `name`, and no members.
template <class Resource, device Device, class Policy>
class resource_policy {
 public:
  using applies_resource_rules_tag = void;
  using device_type = Device;
  using stream_type = typename Device::stream_type;

  [[nodiscard]] void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    return resource_rules::allocate(device(), Resource::name, stream, bytes, alignment,
                                    [&] { return policy_->allocate(upstream_, stream, bytes, alignment); });
  }

  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    resource_rules::deallocate(device(), stream, p,
                               [&] { policy_->deallocate(upstream_, stream, p, bytes, alignment); });
  }

  /// Whether the upstream's memory can grow where it is.
  [[nodiscard]] bool extensible() const noexcept { return upstream_.extensible(); }
  [[nodiscard]] bool extend(stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    return extensible() && policy_->extend(upstream_, stream, p, old_bytes, new_bytes);
  }

  /// Whether the upstream's memory can go while its addresses stay: decommit and recommit are a logic_error otherwise.
  [[nodiscard]] bool suspendable() const noexcept { return upstream_.suspendable(); }
  void decommit(stream_type stream, void* p, std::size_t bytes) { policy_->decommit(upstream_, stream, p, bytes); }
  void recommit(stream_type stream, void* p, std::size_t bytes) { policy_->recommit(upstream_, stream, p, bytes); }

  /// The same policy, with the same state, over the upstream's resource for what stays.
  [[nodiscard]] any_resource<Device> persistent() const {
    Resource stays = static_cast<const Resource&>(*this);
    static_cast<resource_policy&>(stays).upstream_ = upstream_.persistent();
    return any_resource<Device>{std::move(stays)};
  }

  [[nodiscard]] bool omits_tails() const noexcept { return upstream_.omits_tails(); }
  [[nodiscard]] Device device() const noexcept { return upstream_.device(); }

  friend bool operator==(const resource_policy&, const resource_policy&) = default;

 protected:
  template <class... Args>
  explicit resource_policy(any_resource<Device> upstream, Args&&... args)
      : upstream_(std::move(upstream)), policy_(std::make_shared<Policy>(std::forward<Args>(args)...)) {}

  [[nodiscard]] Policy& policy() const noexcept { return *policy_; }

 private:
  any_resource<Device> upstream_;
  std::shared_ptr<Policy> policy_;
};

}  // namespace holdfast::HOLDFAST_ABI::detail
