// Out of memory when a test wants it, with no memory used up.
//
//   holdfast::failing_resource memory{holdfast::malloc_resource{gpu}, {.nth = 3}};          // the third call fails
//   memory.fail({.every = 2, .allocate = false});                                           // now every second extension
//   memory.fail({.probability = 0.01, .seed = 7});                                          // or one call in a hundred
//   memory.fail({});                                                                        // or none
//
// Calls are numbered 1, 2, ... and a call's number alone decides, so that a failure seen once is had again.
// Not here: device errors (see tests/support/faulty_device.hpp), lack of real memory (limiting_resource).
#pragma once

#include <holdfast/detail/resource_policy.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

namespace holdfast::inline HOLDFAST_ABI {

/// Which calls fail: all that any of the first three says.
struct failing_options {
  std::uint64_t nth = 0;    ///< this one; 0: none
  std::uint64_t every = 0;  ///< each whose number is a multiple; 0: none
  double probability = 0;   ///< each with this probability, 0 to 1, drawn from `seed` and the call's number
  std::uint64_t seed = 0;
  // Whose calls are numbered and fail.
  bool allocate = true;
  bool extend = true;
  bool recommit = false;
};

namespace detail {

template <device Device>
class failing_policy : public policy_calls<Device> {
 public:
  using typename policy_calls<Device>::upstream_type;
  using typename policy_calls<Device>::stream_type;

  failing_policy(const char* who, const failing_options& options) : who_(who), options_(options) {}

  void* allocate(upstream_type& upstream, stream_type stream, std::size_t bytes, std::size_t alignment) {
    if (fails(&failing_options::allocate)) {
      throw out_of_memory{who_, bytes, 0, 0};
    }
    return upstream.allocate(stream, bytes, alignment);
  }

  bool extend(upstream_type& upstream, stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    return !fails(&failing_options::extend) && upstream.extend(stream, p, old_bytes, new_bytes);
  }

  void recommit(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes) {
    if (upstream.suspendable() && fails(&failing_options::recommit)) {
      throw out_of_memory{who_, bytes, 0, 0};
    }
    upstream.recommit(stream, p, bytes);
  }

  void fail(const failing_options& options) {
    const std::lock_guard lock{mutex_};
    options_ = options;
    calls_ = 0;
  }

  [[nodiscard]] std::uint64_t calls() const {
    const std::lock_guard lock{mutex_};
    return calls_;
  }
  [[nodiscard]] std::uint64_t failures() const {
    const std::lock_guard lock{mutex_};
    return failures_;
  }

 private:
  [[nodiscard]] bool fails(bool failing_options::*counts) {
    const std::lock_guard lock{mutex_};
    if (!(options_.*counts)) {
      return false;
    }
    ++calls_;
    const bool failed = calls_ == options_.nth || (options_.every != 0 && calls_ % options_.every == 0) ||
                        draw(options_.seed, calls_) < options_.probability;
    failures_ += failed ? 1 : 0;
    return failed;
  }

  /// The number `call` of the sequence `seed`, from 0 to just below 1: a splitmix64.
  [[nodiscard]] static double draw(std::uint64_t seed, std::uint64_t call) noexcept {
    std::uint64_t x = seed * 0xD1B54A32D192ED03U + call * 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    x ^= x >> 31;
    return static_cast<double>(x >> 11) * 0x1p-53;
  }

  const char* const who_;
  mutable std::mutex mutex_;
  failing_options options_;
  std::uint64_t calls_ = 0;
  std::uint64_t failures_ = 0;
};

}  // namespace detail

/// Any other resource, with failures. Copies share them; two made apart are not equal. Thread safe: which thread's call gets
/// which number is up to the threads.
///
/// A call that fails throws out_of_memory (`extend` is false) and never reaches the upstream. Calls that the rules refuse
/// (zero bytes, a capturing stream, ...) and extensions of what cannot grow have no number.
template <device Device>
class failing_resource
    : public detail::resource_policy<failing_resource<Device>, Device, detail::failing_policy<Device>> {
  using base = detail::resource_policy<failing_resource<Device>, Device, detail::failing_policy<Device>>;

 public:
  static constexpr const char* name = "failing_resource";

  /// No call fails until `fail` says so.
  explicit failing_resource(any_resource<Device> upstream, const failing_options& options = {})
      : base(std::move(upstream), name, options) {}

  /// From now on. The next call is number 1.
  void fail(const failing_options& options) { this->policy().fail(options); }

  /// Calls that were numbered since the last `fail`.
  [[nodiscard]] std::uint64_t calls() const { return this->policy().calls(); }
  /// Those that failed, since it was made.
  [[nodiscard]] std::uint64_t failures() const { return this->policy().failures(); }
};

template <class Resource>
failing_resource(Resource, failing_options = {}) -> failing_resource<typename Resource::device_type>;

static_assert(memory_resource<failing_resource<cuda_device>> && extensible_resource<failing_resource<cuda_device>>);
static_assert(memory_resource<failing_resource<host_device>> && suspendable_resource<failing_resource<host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
