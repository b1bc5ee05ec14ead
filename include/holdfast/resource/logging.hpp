// A trace of every call, for looking at, and for benchmarks to play again.
//
//   holdfast::logging_resource memory{pool, "run.csv"};       // or any std::ostream that outlives the last handle
//   ...
//   std::ifstream file{"run.csv"};
//   for (const holdfast::trace_event& event : holdfast::read_trace(file)) { ... }
//
//     # holdfast trace 1
//     time_ns,op,pointer,bytes,alignment,stream,thread,ok
//     51230,allocate,1,4096,256,0,0,1
//     80411,deallocate,1,4096,256,0,0,1
//
// Pointers, streams and threads are numbers, in the order in which they came, and no pointer number is used twice: a trace
// can be played anywhere. Its order is one in which the calls can have happened, on many threads, too.
//
// Flushing: nothing is flushed until `flush()`, or a file's end with the last handle, so a crash costs the last lines;
// `flush_each_line` keeps them. What cannot be written is counted, and no call fails for it.
// Not here: kernels, contents, or who allocated (tracking_resource).
#pragma once

#include <holdfast/detail/resource_policy.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <istream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

enum class trace_op : unsigned char { allocate, deallocate, extend, decommit, recommit };

/// A line of a trace.
struct trace_event {
  std::uint64_t time_ns = 0;  ///< since the resource was made
  trace_op op = trace_op::allocate;
  std::uint64_t pointer = 0;    ///< 1 for the first, then 2, ...; 0: none (a failed allocation) or not of this resource
  std::uint64_t bytes = 0;      ///< as asked for; of an extension, all that there shall be
  std::uint64_t alignment = 0;  ///< of allocations and deallocations
  std::uint32_t stream = 0;     ///< 0 for the first that was seen; a per-thread stream is one for each thread
  std::uint32_t thread = 0;     ///< 0 for the first
  bool ok = true;               ///< whether the upstream did it

  friend bool operator==(const trace_event&, const trace_event&) = default;
};

struct logging_options {
  bool flush_each_line = false;
};

namespace detail {

inline constexpr std::string_view trace_version = "# holdfast trace 1";
inline constexpr std::string_view trace_columns = "time_ns,op,pointer,bytes,alignment,stream,thread,ok";
inline constexpr std::string_view trace_ops[] = {"allocate", "deallocate", "extend", "decommit", "recommit"};

/// With the line's end.
[[nodiscard]] inline std::string trace_line(const trace_event& event) {
  std::string line = std::to_string(event.time_ns) + ",";
  line += trace_ops[static_cast<std::size_t>(event.op)];
  for (const std::uint64_t figure : {event.pointer, event.bytes, event.alignment, std::uint64_t{event.stream},
                                     std::uint64_t{event.thread}, std::uint64_t{event.ok ? 1U : 0U}}) {
    line += "," + std::to_string(figure);
  }
  return line + "\n";
}

/// Nothing when `line`, which has no end, is no line of a trace.
[[nodiscard]] inline std::optional<trace_event> parse_trace_line(std::string_view line) {
  auto field = [&line, first = true]() mutable -> std::optional<std::string_view> {
    if (!first) {
      if (line.empty() || line.front() != ',') {
        return std::nullopt;
      }
      line.remove_prefix(1);
    }
    first = false;
    const std::string_view text = line.substr(0, line.find(','));
    line.remove_prefix(text.size());
    return text;
  };
  const auto number = [&field](auto& value) {
    const std::optional<std::string_view> text = field();
    if (!text) {
      return false;
    }
    const char* const end = text->data() + text->size();
    const auto [stop, error] = std::from_chars(text->data(), end, value);
    return error == std::errc{} && stop == end;
  };
  trace_event event;
  if (!number(event.time_ns)) {
    return std::nullopt;
  }
  const auto op = std::find(std::begin(trace_ops), std::end(trace_ops), field().value_or(""));
  if (op == std::end(trace_ops)) {
    return std::nullopt;
  }
  event.op = static_cast<trace_op>(op - std::begin(trace_ops));
  unsigned ok = 0;
  if (!number(event.pointer) || !number(event.bytes) || !number(event.alignment) || !number(event.stream) ||
      !number(event.thread) || !number(ok) || ok > 1 || !line.empty()) {
    return std::nullopt;
  }
  event.ok = ok == 1;
  return event;
}

template <device Device>
class logging_policy : public policy_calls<Device> {
 public:
  using typename policy_calls<Device>::upstream_type;
  using typename policy_calls<Device>::stream_type;

  logging_policy(std::shared_ptr<std::ostream> out, const logging_options& options)
      : out_(std::move(out)), options_(options) {
    put(std::string{trace_version} + "\n" + std::string{trace_columns} + "\n");
  }

  void* allocate(upstream_type& upstream, stream_type stream, std::size_t bytes, std::size_t alignment) {
    void* p = nullptr;
    try {
      p = upstream.allocate(stream, bytes, alignment);
    } catch (...) {
      note(trace_op::allocate, stream, nullptr, bytes, alignment, false);
      throw;
    }
    note(trace_op::allocate, stream, p, bytes, alignment, true);
    return p;
  }

  // Before the upstream can give it to others.
  void deallocate(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes, std::size_t alignment) {
    note(trace_op::deallocate, stream, p, bytes, alignment, true);
    upstream.deallocate(stream, p, bytes, alignment);
  }

  bool extend(upstream_type& upstream, stream_type stream, void* p, std::size_t old_bytes, std::size_t new_bytes) {
    bool extended = false;
    noting(trace_op::extend, stream, p, new_bytes, extended,
           [&] { extended = upstream.extend(stream, p, old_bytes, new_bytes); });
    return extended;
  }

  void decommit(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes) {
    bool done = false;
    noting(trace_op::decommit, stream, p, bytes, done, [&] { done = (upstream.decommit(stream, p, bytes), true); });
  }

  void recommit(upstream_type& upstream, stream_type stream, void* p, std::size_t bytes) {
    bool done = false;
    noting(trace_op::recommit, stream, p, bytes, done, [&] { done = (upstream.recommit(stream, p, bytes), true); });
  }

  void flush() {
    const std::lock_guard lock{mutex_};
    flush_out();
  }

  [[nodiscard]] std::uint64_t errors() const {
    const std::lock_guard lock{mutex_};
    return errors_;
  }

 private:
  struct place {
    stream_type stream;
    std::thread::id thread;  // where the handle alone doesn't say which stream it is
    friend bool operator==(const place&, const place&) = default;
  };
  struct place_hash {
    std::size_t operator()(const place& at) const {
      return std::hash<stream_type>{}(at.stream) ^ (std::hash<std::thread::id>{}(at.thread) * 31);
    }
  };

  template <class Call>
  void noting(trace_op op, stream_type stream, void* p, std::size_t bytes, const bool& ok, const Call& call) {
    try {
      call();
    } catch (...) {
      note(op, stream, p, bytes, 0, false);
      throw;
    }
    note(op, stream, p, bytes, 0, ok);
  }

  void note(trace_op op, stream_type stream, void* p, std::size_t bytes, std::size_t alignment, bool ok) noexcept {
    const std::lock_guard lock{mutex_};
    try {
      trace_event event{.op = op, .bytes = bytes, .alignment = alignment, .ok = ok};
      event.pointer = number_of(op, p);
      const std::thread::id self = std::this_thread::get_id();
      event.stream = number_in(streams_, {stream, Device::thread_bound(stream) ? self : std::thread::id{}});
      event.thread = number_in(threads_, self);
      const auto now = std::chrono::steady_clock::now() - start_;
      event.time_ns = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
      put(trace_line(event));
    } catch (...) {  // of host memory
      ++errors_;
    }
  }

  // --- with the mutex held
  [[nodiscard]] std::uint64_t number_of(trace_op op, void* p) {
    if (p == nullptr) {
      return 0;
    }
    if (op == trace_op::allocate) {
      return pointers_.insert_or_assign(p, next_pointer_++).first->second;
    }
    const auto found = pointers_.find(p);
    if (found == pointers_.end()) {
      return 0;
    }
    const std::uint64_t number = found->second;
    if (op == trace_op::deallocate) {
      pointers_.erase(found);
    }
    return number;
  }

  template <class Numbers>
  [[nodiscard]] static std::uint32_t number_in(Numbers& numbers, const typename Numbers::key_type& key) {
    return numbers.try_emplace(key, static_cast<std::uint32_t>(numbers.size())).first->second;
  }

  void put(std::string_view text) noexcept {
    try {
      out_->write(text.data(), static_cast<std::streamsize>(text.size()));
      if (options_.flush_each_line) {
        out_->flush();
      }
      errors_ += out_->good() ? 0 : 1;
    } catch (...) {  // a stream may throw when it cannot write
      ++errors_;
    }
  }

  void flush_out() noexcept {
    try {
      out_->flush();
      errors_ += out_->good() ? 0 : 1;
    } catch (...) {
      ++errors_;
    }
  }

  const std::shared_ptr<std::ostream> out_;
  const logging_options options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::uint64_t> pointers_;  // live ones
  std::uint64_t next_pointer_ = 1;
  std::unordered_map<place, std::uint32_t, place_hash> streams_;
  std::unordered_map<std::thread::id, std::uint32_t> threads_;
  std::uint64_t errors_ = 0;
};

}  // namespace detail

/// Any other resource, with a trace. Copies share it; two made apart are not equal. Thread safe, with one mutex around each
/// line; while handles live, nobody else uses the stream.
///
/// A line is written when the upstream is done, but a deallocation's before it begins. Calls that the rules refuse or
/// ignore (zero bytes, a capturing stream, ...) and extensions of what cannot grow leave none.
template <device Device>
class logging_resource
    : public detail::resource_policy<logging_resource<Device>, Device, detail::logging_policy<Device>> {
  using base = detail::resource_policy<logging_resource<Device>, Device, detail::logging_policy<Device>>;

 public:
  static constexpr const char* name = "logging_resource";

  /// To `out`, which outlives the last handle: those of buffers, and of graphs that keep their memory, included.
  logging_resource(any_resource<Device> upstream, std::ostream& out, const logging_options& options = {})
      : base(std::move(upstream), std::shared_ptr<std::ostream>{std::shared_ptr<void>{}, &out}, options) {}

  /// To the file at `path`, whose former contents are lost. Throws logic_error when it cannot be written.
  logging_resource(any_resource<Device> upstream, const std::string& path, const logging_options& options = {})
      : base(std::move(upstream), opened(path), options) {}

  /// Hands what was written so far to the system.
  void flush() { this->policy().flush(); }

  /// Lines, headers and flushes that failed. The stream's state is its owner's to clear.
  [[nodiscard]] std::uint64_t errors() const { return this->policy().errors(); }

 private:
  [[nodiscard]] static std::shared_ptr<std::ostream> opened(const std::string& path) {
    auto file = std::make_shared<std::ofstream>(path);
    if (!*file) {
      throw logic_error{std::string{name} + ": " + path + " cannot be written"};
    }
    return file;
  }
};

template <class Resource, class To>
logging_resource(Resource, To&&, logging_options = {}) -> logging_resource<typename Resource::device_type>;

static_assert(memory_resource<logging_resource<cuda_device>> && extensible_resource<logging_resource<cuda_device>>);
static_assert(memory_resource<logging_resource<host_device>> && suspendable_resource<logging_resource<host_device>>);

/// The events of a trace, in its order. A last line without an end, as a crash leaves it, is left out. Throws logic_error
/// for what is no trace of this version, or has a line that is none, with its number.
[[nodiscard]] inline std::vector<trace_event> read_trace(std::istream& in) {
  std::string line;
  const auto header = [&](std::string_view expected) {
    if (!std::getline(in, line) || line != expected) {
      throw logic_error{"read_trace: '" + std::string{expected} + "' expected, not '" + line + "'"};
    }
  };
  header(detail::trace_version);
  header(detail::trace_columns);
  std::vector<trace_event> events;
  while (std::getline(in, line) && !in.eof()) {
    const std::optional<trace_event> event = detail::parse_trace_line(line);
    if (!event) {
      throw logic_error{"read_trace: line " + std::to_string(events.size() + 3) + " is no event: '" + line + "'"};
    }
    events.push_back(*event);
  }
  return events;
}

}  // namespace holdfast::HOLDFAST_ABI
