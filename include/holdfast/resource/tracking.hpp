// Who holds what: every live allocation of a resource with its owner's name, and all that was given back wrongly.
//
//   holdfast::tracking_resource memory{holdfast::default_resource(gpu)};
//   {
//     const holdfast::owner_scope owner{"kv scratch"};        // names what this thread allocates while it lives
//     scratch.emplace(memory, shape);
//   }
//   std::puts(memory.report().c_str());
//
//     tracking_resource: 1 live allocation, 4096 bytes (peak 4096 bytes), 0 mistakes
//       4096 bytes by "kv scratch": #1, 0x7f2a40000000, alignment 256, stream 0x55d0c8a0
//
// A deallocation that is wrong (a foreign pointer, a double free, another size, alignment, stream or resource) is counted,
// remembered, and not passed on: what it meant is still live. Put it over the others, and over a pool, which knows
// nothing of owners.
// Not here: backtraces, accesses out of bounds (guard_resource), a history (logging_resource).
#pragma once

#include <holdfast/detail/resource_policy.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

/// What the calling thread allocates while this lives is `name`'s. The innermost counts. Destroyed by the thread that made
/// it, in reverse order.
class [[nodiscard]] owner_scope {
 public:
  explicit owner_scope(std::string name) : name_(std::move(name)), outer_(std::exchange(innermost(), this)) {}
  owner_scope(const owner_scope&) = delete;
  owner_scope& operator=(const owner_scope&) = delete;
  ~owner_scope() { innermost() = outer_; }

  /// The calling thread's owner; empty outside of all scopes.
  [[nodiscard]] static std::string current() { return innermost() == nullptr ? std::string{} : innermost()->name_; }

 private:
  [[gnu::visibility("default")]] static const owner_scope*& innermost() noexcept {
    static thread_local const owner_scope* scope = nullptr;
    return scope;
  }

  const std::string name_;
  const owner_scope* const outer_;
};

/// A live allocation, as it was asked for.
template <device Device>
struct tracked_allocation {
  void* data = nullptr;
  std::size_t bytes = 0;  ///< now: growth in place included
  std::size_t alignment = 0;
  typename Device::stream_type stream{};
  std::uint64_t sequence = 0;  ///< 1 for the resource's first, then 2, ...
  std::string owner{};
};

/// Figures of one moment.
struct tracking_counts {
  std::size_t live = 0;  ///< allocations
  std::size_t live_bytes = 0;
  std::size_t peak_bytes = 0;
  std::size_t peak_live = 0;
  std::uint64_t allocations = 0;    ///< so far; failed ones don't count
  std::uint64_t deallocations = 0;  ///< so far; wrong ones don't count
  std::uint64_t mistakes = 0;
};

struct tracking_options {
  /// Called with the report when the last handle goes while allocations are live, by the thread that drops it, which may
  /// be a destructor's: it should not use devices. What it throws is lost.
  std::function<void(const std::string& report)> on_leak{};
};

namespace detail {

template <device Device>
class tracking_policy : public policy_calls<Device> {
 public:
  using typename policy_calls<Device>::upstream_type;
  using typename policy_calls<Device>::stream_type;
  using allocation = tracked_allocation<Device>;

  tracking_policy(const char* who, tracking_options options) : who_(who), options_(std::move(options)) {
    freed_.reserve(remembered_frees);
    freed_order_.resize(remembered_frees);
  }
  tracking_policy(const tracking_policy&) = delete;
  tracking_policy& operator=(const tracking_policy&) = delete;
  ~tracking_policy() {
    if (options_.on_leak && !live_.empty()) {
      try {
        options_.on_leak(report());
      } catch (...) {
      }
    }
  }

  void* allocate(upstream_type& upstream, stream_type stream, std::size_t bytes, std::size_t alignment) {
    entry made{{nullptr, bytes, alignment, stream, 0, owner_scope::current()}, upstream};
    void* const p = upstream.allocate(stream, bytes, alignment);
    made.data = p;
    try {
      const std::lock_guard lock{mutex_};
      made.sequence = allocations_ + 1;
      const auto [place, fresh] = live_.try_emplace(p, std::move(made));
      if (!fresh) {  // given back behind our back
        mistake("handed out again while live", p, 0, &place->second);
        live_bytes_ -= place->second.bytes;
        place->second = std::move(made);
      }
      freed_.erase(p);
      ++allocations_;
      live_bytes_ += bytes;
      peak_bytes_ = std::max(peak_bytes_, live_bytes_);
      peak_count_ = std::max(peak_count_, live_.size());
    } catch (...) {
      upstream.deallocate(stream, p, bytes, alignment);
      throw;
    }
    return p;
  }

  void deallocate(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    {
      const std::lock_guard lock{mutex_};
      const auto found = find(p, "given back");
      if (found == live_.end()) {
        return;
      }
      const entry& made = found->second;
      const char* const wrong = made.bytes != bytes            ? "given back with another size"
                                : made.alignment != alignment  ? "given back with another alignment"
                                : made.stream != stream        ? "given back on another stream"
                                : !(made.upstream == upstream) ? "given back to another resource"
                                                               : nullptr;
      if (wrong != nullptr) {
        mistake(wrong, p, bytes, &made);
        return;
      }
      ++deallocations_;
      live_bytes_ -= bytes;
      remember(live_.extract(found));  // before the upstream can give it to others
    }
    upstream.deallocate(stream, p, bytes, alignment);
  }

  bool extend(upstream_type& upstream, stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    {
      const std::lock_guard lock{mutex_};
      const auto found = find(p, "extended");
      if (found == live_.end()) {
        return false;
      }
      const entry& made = found->second;
      const char* const wrong = made.bytes != old_bytes        ? "extended from another size"
                                : !(made.upstream == upstream) ? "extended by another resource"
                                                               : nullptr;
      if (wrong != nullptr) {
        mistake(wrong, p, old_bytes, &made);
        return false;
      }
    }
    if (!upstream.extend(stream, p, old_bytes, new_bytes)) {
      return false;
    }
    const std::lock_guard lock{mutex_};
    if (const auto found = live_.find(p); found != live_.end() && new_bytes > found->second.bytes) {
      live_bytes_ += new_bytes - found->second.bytes;
      found->second.bytes = new_bytes;
      peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    }
    return true;
  }

  [[nodiscard]] std::vector<allocation> live() const {
    const std::lock_guard lock{mutex_};
    return sorted();
  }

  [[nodiscard]] std::string report() const {
    const std::lock_guard lock{mutex_};
    std::string text = std::string{who_} + ": " + counted(live_.size(), "live allocation") + ", " +
                       std::to_string(live_bytes_) + " bytes (peak " + std::to_string(peak_bytes_) + " bytes), " +
                       counted(mistakes_, "mistake") + "\n";
    for (const allocation& one : sorted()) {
      text += "  " + described(one) + ", " + address(one.data) + ", alignment " + std::to_string(one.alignment) +
              ", stream " + hexadecimal(std::hash<stream_type>{}(one.stream)) + "\n";
    }
    for (const std::string& line : mistake_lines_) {
      text += "  mistake: " + line + "\n";
    }
    if (mistakes_ > mistake_lines_.size()) {
      text += "  and " + counted(mistakes_ - mistake_lines_.size(), "mistake") + " more\n";
    }
    return text;
  }

  /// Counts, together.
  [[nodiscard]] tracking_counts counts() const {
    const std::lock_guard lock{mutex_};
    return {live_.size(), live_bytes_, peak_bytes_, peak_count_, allocations_, deallocations_, mistakes_};
  }

 private:
  static constexpr std::size_t remembered_frees = 1024;
  static constexpr std::size_t remembered_mistakes = 64;

  struct entry : allocation {
    upstream_type upstream;
  };
  using books = std::unordered_map<void*, entry>;

  // --- with the mutex held
  [[nodiscard]] std::vector<allocation> sorted() const {
    std::vector<allocation> all;
    all.reserve(live_.size());
    for (const auto& [p, made] : live_) {
      all.push_back(made);
    }
    std::sort(all.begin(), all.end(), [](const allocation& a, const allocation& b) {
      return a.bytes != b.bytes ? a.bytes > b.bytes : a.sequence < b.sequence;
    });
    return all;
  }

  /// The end, and a mistake, when `p` is not live.
  [[nodiscard]] typename books::iterator find(void* p, const char* done) {
    const auto found = live_.find(p);
    if (found == live_.end()) {
      const auto freed = freed_.find(p);
      mistake(freed == freed_.end() ? "not of this resource, " : "freed before, ", p, 0,
              freed == freed_.end() ? nullptr : &freed->second, done);
    }
    return found;
  }

  void mistake(const char* what, const void* p, std::size_t bytes, const allocation* meant, const char* done = "") {
    ++mistakes_;
    if (mistake_lines_.size() == remembered_mistakes) {
      return;
    }
    try {
      mistake_lines_.push_back(address(p) + ", " + (meant == nullptr ? "" : described(*meant) + ", ") + what + done +
                               (bytes == 0 ? "" : " (" + std::to_string(bytes) + " bytes)"));
    } catch (...) {  // it is counted
    }
  }

  /// No allocation: it runs while memory is given back.
  void remember(typename books::node_type freed) {
    std::pair<void*, std::uint64_t>& oldest = freed_order_[next_freed_++ % remembered_frees];
    if (const auto found = freed_.find(oldest.first);
        found != freed_.end() && found->second.sequence == oldest.second) {
      freed_.erase(found);
    }
    oldest = {freed.key(), freed.mapped().sequence};
    freed_.insert(std::move(freed));
  }

  // --- text
  [[nodiscard]] static std::string counted(std::uint64_t n, const char* what) {
    return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
  }
  [[nodiscard]] static std::string described(const allocation& one) {
    return std::to_string(one.bytes) + " bytes by " + (one.owner.empty() ? "nobody" : "\"" + one.owner + "\"") + ": #" +
           std::to_string(one.sequence);
  }
  [[nodiscard]] static std::string hexadecimal(std::uintptr_t n) {
    char digits[2 * sizeof n];
    return "0x" + std::string{std::begin(digits), std::to_chars(std::begin(digits), std::end(digits), n, 16).ptr};
  }
  [[nodiscard]] static std::string address(const void* p) { return hexadecimal(reinterpret_cast<std::uintptr_t>(p)); }

  const char* const who_;
  const tracking_options options_;
  mutable std::mutex mutex_;
  books live_;
  books freed_;                                               // of late
  std::vector<std::pair<void*, std::uint64_t>> freed_order_;  // a ring: address, sequence
  std::uint64_t next_freed_ = 0;
  std::uint64_t allocations_ = 0, deallocations_ = 0, mistakes_ = 0;
  std::size_t live_bytes_ = 0, peak_bytes_ = 0, peak_count_ = 0;
  std::vector<std::string> mistake_lines_;
};

}  // namespace detail

/// Any other resource, with its books. Copies share them; two made apart are not equal. Thread safe, with one mutex: an
/// allocation costs a fraction of a microsecond more.
///
/// Bytes are those asked for. `deallocate` and `extend` check what they are given against the books; a wrong call is a
/// mistake and changes nothing else. A double free is told from a foreign pointer for the latest 1024 freed allocations.
template <device Device>
class tracking_resource
    : public detail::resource_policy<tracking_resource<Device>, Device, detail::tracking_policy<Device>> {
  using base = detail::resource_policy<tracking_resource<Device>, Device, detail::tracking_policy<Device>>;

 public:
  static constexpr const char* name = "tracking_resource";

  explicit tracking_resource(any_resource<Device> upstream, tracking_options options = {})
      : base(std::move(upstream), name, std::move(options)) {}

  /// What is live, the largest first, then the oldest.
  [[nodiscard]] std::vector<tracked_allocation<Device>> live() const { return this->policy().live(); }

  /// Text, for people: one line of figures, one for each live allocation, as `live()`, one for each of the first 64
  /// mistakes. Calls no device.
  [[nodiscard]] std::string report() const { return this->policy().report(); }

  [[nodiscard]] tracking_counts counts() const { return this->policy().counts(); }
  [[nodiscard]] std::size_t live_bytes() const { return counts().live_bytes; }
  [[nodiscard]] std::size_t peak_bytes() const { return counts().peak_bytes; }
  /// Calls that were wrong, and addresses that the upstream gave twice.
  [[nodiscard]] std::uint64_t mistakes() const { return counts().mistakes; }
};

template <class Resource>
tracking_resource(Resource, tracking_options = {}) -> tracking_resource<typename Resource::device_type>;

static_assert(memory_resource<tracking_resource<cuda_device>> && extensible_resource<tracking_resource<cuda_device>>);
static_assert(memory_resource<tracking_resource<host_device>> && suspendable_resource<tracking_resource<host_device>>);

}  // namespace holdfast::HOLDFAST_ABI
