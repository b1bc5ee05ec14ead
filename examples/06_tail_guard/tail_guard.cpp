// SPDX-License-Identifier: Apache-2.0
// libholdfast_tail.so: what torch.cuda.memory.CUDAPluggableAllocator wants, for programs that never heard of us. Every
// tensor is a mapping of its own and ends where that ends. Behind it is nothing (guard: reading on faults, at once), or
// zeros that can be read, not written (cure: reading on finds zeros, as far as HOLDFAST_TAIL says).
//
//   python3 tail_guard.py program.py ...          installs it, then runs the program, unchanged
//
//   HOLDFAST_TAIL_MODE=guard|cure       guard
//   HOLDFAST_TAIL=65536                 bytes that a consumer may read too far; rounded up to 2 MiB, behind which is nothing
//   HOLDFAST_TAIL_ALIGNMENT=16          of tensors, a power of two. A size that is no multiple of it leaves the rest
//                                       undetected; those bytes are zero at first
//
// Captures work: a graph owns the tensors that were allocated while it was captured. A tensor that was there before, and
// is freed under the graph, is gone: its replay faults, as it would in production, only sooner.
//
// Not here: speed, and thrift. A tensor takes tens of microseconds and 2 MiB at least, and freeing one waits on the host
// for the work queued on its stream. Torch's memory statistics don't exist over a pluggable allocator.
#include <holdfast/block.hpp>
#include <holdfast/capture.hpp>
#include <holdfast/detail/anchored_scratch_resource.hpp>
#include <holdfast/device/cuda.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/guard.hpp>

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace {

using holdfast::cuda_device;
using block = holdfast::block<cuda_device>;

// --- what the environment says ----------------------------------------------------------------------------------------

std::string_view text_of(const char* variable, const char* otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? otherwise : text;
}

std::size_t number_of(const char* variable, const char* otherwise) {
  const std::string_view text = text_of(variable, otherwise);
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw holdfast::logic_error{std::string{variable} + "=" + std::string{text} + ": not a number of bytes"};
  }
  return number;
}

struct settings {
  bool cure = false;
  std::size_t tail = number_of("HOLDFAST_TAIL", "65536");
  std::size_t alignment = number_of("HOLDFAST_TAIL_ALIGNMENT", "16");

  settings() {
    const std::string_view mode = text_of("HOLDFAST_TAIL_MODE", "guard");
    if (mode != "guard" && mode != "cure") {
      throw holdfast::logic_error{"HOLDFAST_TAIL_MODE=" + std::string{mode} + ": there are guard and cure"};
    }
    if (!std::has_single_bit(alignment) || alignment > (std::size_t{2} << 20)) {
      throw holdfast::logic_error{"HOLDFAST_TAIL_ALIGNMENT=" + std::to_string(alignment) +
                                  ": not a power of two up to 2 MiB"};
    }
    cure = mode == "cure";
  }
};

// --- where memory comes from ------------------------------------------------------------------------------------------

/// Allocations that end in front of the device's page of zeros: an anchored scratch each.
class zero_tailed_resource {
 public:
  using device_type = cuda_device;
  using stream_type = cudaStream_t;
  static constexpr const char* name = "zero_tailed_resource";

  zero_tailed_resource(cuda_device device, std::size_t tail) : state_(std::make_shared<state>(device, tail)) {}

  void* allocate(cudaStream_t stream, std::size_t bytes, std::size_t alignment) {
    holdfast::detail::anchored_scratch_resource<cuda_device> memory{state_->device, bytes, state_->tail};
    std::size_t granules = 0;
    static_cast<void>(holdfast::detail::round_up(bytes, memory.granule(), granules));
    void* const end = memory.allocate(stream, granules, alignment);
    std::byte* const p = static_cast<std::byte*>(end) - bytes - holdfast::detail::guard_slack(bytes, alignment);
    const std::lock_guard lock{state_->mutex};
    state_->live.emplace(p, allocation{std::move(memory), end, granules});
    return p;
  }

  void deallocate(cudaStream_t stream, void* p, std::size_t, std::size_t alignment) noexcept {
    auto taken = [&] {
      const std::lock_guard lock{state_->mutex};
      return state_->live.extract(p);
    }();
    if (!taken.empty()) {
      taken.mapped().memory.deallocate(stream, taken.mapped().end, taken.mapped().bytes, alignment);
    }
  }

  [[nodiscard]] cuda_device device() const noexcept { return state_->device; }
  bool operator==(const zero_tailed_resource&) const = default;

 private:
  struct allocation {
    holdfast::detail::anchored_scratch_resource<cuda_device> memory;
    void* end;
    std::size_t bytes;
  };
  struct state {
    state(cuda_device d, std::size_t t) : device(d), tail(t) {}
    const cuda_device device;
    const std::size_t tail;
    std::mutex mutex;
    std::unordered_map<void*, allocation> live;
  };
  std::shared_ptr<state> state_;
};

static_assert(holdfast::memory_resource<zero_tailed_resource>);

// --- the tensors ------------------------------------------------------------------------------------------------------

class heap {
 public:
  static heap& instance() {
    static heap& leaked = *new heap;  // tensors may be freed after statics are gone
    return leaked;
  }

  void* allocate(std::size_t bytes, cuda_device device, cudaStream_t stream) {
    const std::size_t rest = holdfast::detail::guard_slack(bytes, settings_.alignment);
    const auto memory = resource_of(device);
    const auto clear_rest = [&](cudaStream_t library, void* data) {
      cuda_device::fill(library, static_cast<std::byte*>(data) + bytes, std::byte{0}, rest);
    };
    const cuda_device::current_scope current{device};  // whose default stream `stream` may be
    tensor made;
    made.memory = block::make(memory, bytes + rest, settings_.alignment, counts_of(device), clear_rest);
    const auto capture = cuda_device::capturing(stream);
    made.memory->begin_use(stream, capture.id);
    made.use = {made.memory, stream, capture.id};
    if (capture.state == holdfast::capture_state::active) {
      made.memory->pin(capture);
    }
    void* const p = made.memory->data();
    const std::lock_guard lock{mutex_};
    live_.insert_or_assign(p, std::move(made));
    return p;
  }

  void deallocate(void* p) {
    auto taken = [&] {
      const std::lock_guard lock{mutex_};
      return live_.extract(p);
    }();
    if (!taken.empty()) {
      taken.mapped().memory->let_go();  // and goes back here and now, unless a graph owns it, or its stream captures
    }
  }

  /// Another stream uses the tensor, too.
  void record(void* p, cudaStream_t stream) {
    const std::lock_guard lock{mutex_};
    if (const auto found = live_.find(p); found != live_.end()) {
      found->second.memory->end_use(stream, cuda_device::capturing(stream).id);
    }
  }

 private:
  struct tensor {
    holdfast::detail::block_use<cuda_device> use;  // goes last, and gives the memory back
    std::shared_ptr<block> memory;
  };

  holdfast::any_resource<cuda_device> resource_of(cuda_device device) {
    const std::lock_guard lock{mutex_};
    const auto found = resources_.find(device.ordinal);
    return found != resources_.end() ? found->second : resources_.emplace(device.ordinal, make(device)).first->second;
  }

  [[nodiscard]] holdfast::any_resource<cuda_device> make(cuda_device device) const {
    if (settings_.cure) {
      return zero_tailed_resource{device, settings_.tail};
    }
    return holdfast::guard_resource<cuda_device>{device, {.unmapped_bytes = settings_.tail}};
  }

  static std::shared_ptr<holdfast::byte_counts> counts_of(cuda_device device) {
    return std::make_shared<holdfast::byte_counts>(
        holdfast::detail::release_queue<cuda_device>::instance().total(device));
  }

  const settings settings_;
  std::mutex mutex_;
  std::map<int, holdfast::any_resource<cuda_device>> resources_;
  std::unordered_map<void*, tensor> live_;
};

/// No exception may cross into C: it is said aloud, and `otherwise` is the result.
template <class Call>
void* guarded(const char* function, Call&& call) noexcept {
  try {
    return call();
  } catch (const std::exception& e) {
    static_cast<void>(std::fprintf(stderr, "%s: %s\n", function, e.what()));
  } catch (...) {
    static_cast<void>(std::fprintf(stderr, "%s: unknown error\n", function));
  }
  return nullptr;
}

}  // namespace

#define HOLDFAST_TAIL_API extern "C" [[gnu::visibility("default")]]

/// Memory for work on `stream`, or null, and the reason on stderr: torch goes on with a null tensor.
HOLDFAST_TAIL_API void* holdfast_tail_malloc(ssize_t size, int device, cudaStream_t stream) {
  return size <= 0 ? nullptr : guarded("holdfast_tail_malloc", [&] {
    return heap::instance().allocate(static_cast<std::size_t>(size), cuda_device{device}, stream);
  });
}

HOLDFAST_TAIL_API void holdfast_tail_free(void* ptr, ssize_t, int, cudaStream_t) {
  if (ptr != nullptr) {
    guarded("holdfast_tail_free", [&] {
      heap::instance().deallocate(ptr);
      return nullptr;
    });
  }
}

/// For set_record_stream_fn: `ptr` is used on `stream`, too.
HOLDFAST_TAIL_API void holdfast_tail_record_stream(void* ptr, cudaStream_t stream) {
  guarded("holdfast_tail_record_stream", [&] {
    heap::instance().record(ptr, stream);
    return nullptr;
  });
}
