// The rules that every resource call obeys, once: any_resource applies them to foreign resources, resource_handle (what
// the library's own resources derive from) applies them itself.
#pragma once

#include <holdfast/detail/process.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/version.hpp>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Resources that apply the rules themselves, so that nobody pays for them twice.
template <class R>
concept applies_resource_rules = requires {
  typename R::applies_resource_rules_tag;
};

namespace resource_rules {

[[noreturn]] inline void refuse_alignment(const char* who, std::size_t alignment) {
  throw logic_error{std::string{who} + ": an alignment is a power of two, not " + std::to_string(alignment)};
}

[[noreturn]] inline void refuse_capture(const std::string& who, capture_state state) {
  throw logic_error{who + (state == capture_state::active
                               ? ": a resource cannot be called on a capturing stream; acquire from a buffer instead"
                           : state == capture_state::invalidated
                               ? ": the stream's capture was invalidated; end it first"
                               : ": the legacy stream cannot be used while a blocking "
                                 "stream captures")};
}

template <device Device, class Raw>
void* allocate(Device device, const char* who, typename Device::stream_type stream, std::size_t bytes,
               std::size_t alignment, Raw&& raw) {
  if (!std::has_single_bit(alignment)) [[unlikely]] {
    refuse_alignment(who, alignment);
  }
  if (const capture_state state = Device::capturing(stream).state; state != capture_state::none) [[unlikely]] {
    refuse_capture(who, state);
  }
  if (bytes == 0) {
    return nullptr;
  }
  const typename Device::relaxed_scope relaxed;
  const typename Device::current_scope current{device};
  constexpr std::size_t most = PTRDIFF_MAX;
  if (alignment > most || bytes > most - alignment) [[unlikely]] {
    throw out_of_memory{who, bytes, 0, device.memory().free};
  }
  return std::forward<Raw>(raw)();
}

template <device Device, class Raw>
void deallocate(Device device, typename Device::stream_type stream, void* p, Raw&& raw) noexcept {
  if (p == nullptr || !device_usable().load(std::memory_order_relaxed)) {
    return;
  }
  try {
    if (Device::capturing(stream).state == capture_state::none) {
      const typename Device::relaxed_scope relaxed;
      const typename Device::current_scope current{device};
      std::forward<Raw>(raw)();
    }
  } catch (...) {  // the runtime is gone or broken, and the memory with it
  }
}

}  // namespace resource_rules

/// The host waits for the work queued on `stream`: by an event, since synchronising the legacy stream would break the
/// captures of blocking streams. What a kernel of the host device throws meanwhile is lost: there is nobody to throw it to.
template <device Device>
void wait_for_work(Device device, typename Device::stream_type stream) {
  typename Device::event queued{device};
  queued.record(stream);
  for (bool done = false; !done;) {
    try {
      queued.synchronize();
      done = true;
    } catch (const device_error&) {
      throw;
    } catch (...) {
    }
  }
}

/// What the library's own resources derive from: a shared handle of one `Impl`, with the rules applied and alignments
/// beyond what Impl can do made by allocating more.
///
///   struct Impl {
///     using device_type = ...;
///     static constexpr const char* name = ...;
///     static constexpr std::size_t max_alignment = ...;      // what allocate can honour by itself
///     device_type device;
///     void* allocate(stream, bytes, alignment);              // bytes > 0, alignment <= max_alignment, current device set,
///     void deallocate(stream, p, bytes, alignment);          // relaxed; throwing out of deallocate is swallowed
///   };
template <class Impl>
class resource_handle {
 public:
  using applies_resource_rules_tag = void;
  using device_type = typename Impl::device_type;
  using stream_type = typename device_type::stream_type;
  static constexpr const char* name = Impl::name;

  [[nodiscard]] void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    return resource_rules::allocate(device(), name, stream, bytes, alignment, [&]() -> void* {
      if (alignment <= Impl::max_alignment) {
        return state_->impl.allocate(stream, bytes, alignment);
      }
      const std::size_t slack = alignment - Impl::max_alignment;
      void* start = nullptr;
      try {
        start = state_->impl.allocate(stream, bytes + slack, Impl::max_alignment);
      } catch (const out_of_memory& shortage) {  // of more than the caller asked for
        std::throw_with_nested(out_of_memory{name, bytes, shortage.held(), shortage.free()});
      }
      void* aligned = start;
      std::size_t space = bytes + slack;
      std::align(alignment, bytes, aligned, space);
      try {
        const std::lock_guard lock{state_->mutex};
        state_->over_aligned.emplace(aligned, start);
      } catch (...) {
        state_->impl.deallocate(stream, start, bytes + slack, Impl::max_alignment);
        throw;
      }
      return aligned;
    });
  }

  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    resource_rules::deallocate(device(), stream, p, [&] {
      if (alignment <= Impl::max_alignment) {
        state_->impl.deallocate(stream, p, bytes, alignment);
        return;
      }
      void* start = nullptr;
      {
        const std::lock_guard lock{state_->mutex};
        if (const auto found = state_->over_aligned.find(p); found != state_->over_aligned.end()) {
          start = found->second;
          state_->over_aligned.erase(found);
        }
      }
      if (start != nullptr) {
        state_->impl.deallocate(stream, start, bytes + (alignment - Impl::max_alignment), Impl::max_alignment);
      }
    });
  }

  [[nodiscard]] device_type device() const noexcept { return state_->impl.device; }

  friend bool operator==(const resource_handle& a, const resource_handle& b) noexcept = default;

 protected:
  template <class... Args>
  explicit resource_handle(std::in_place_t, Args&&... args)
      : state_(std::make_shared<state>(std::forward<Args>(args)...)) {}

  [[nodiscard]] Impl& impl() const noexcept { return state_->impl; }

 private:
  struct state {
    template <class... Args>
    explicit state(Args&&... args) : impl{std::forward<Args>(args)...} {}
    Impl impl;
    std::mutex mutex;
    std::unordered_map<void*, void*> over_aligned;  // what was handed out -> what Impl gave
  };

  std::shared_ptr<state> state_;
};

}  // namespace holdfast::HOLDFAST_ABI::detail
