// A block: one allocation, owned together by its buffer, the handles given out, and every graph that recorded it. It
// goes back to its resource when the last of them is gone, and after all work that used it.
//
//   auto block = holdfast::block<Device>::make(resource, bytes, alignment, counts, zero_it);
//   block->pin(Device::capturing(stream));    // the graph being captured now owns it too
//
// Buffers are built from blocks; engines use buffers. Not here: growth, views, or any knowledge of what is stored.
//
// Threads: pinning and dropping are thread safe; begin_use and end_use are externally synchronised, like the buffer.
#pragma once

#include <holdfast/detail/process.hpp>
#include <holdfast/detail/release_queue.hpp>
#include <holdfast/device/device.hpp>
#include <holdfast/error.hpp>
#include <holdfast/memory_resource.hpp>
#include <holdfast/version.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace holdfast::inline HOLDFAST_ABI {

/// A promise of the caller's: no graph that recorded the buffer runs, and none is launched, until it is resumed; no capture
/// that uses it is under way; work that raw pointers or views were given to is done.
struct quiescent_t {
  explicit quiescent_t() = default;
};
inline constexpr quiescent_t quiescent{};

template <device Device>
class block : public std::enable_shared_from_this<block<Device>> {
 public:
  using stream_type = typename Device::stream_type;
  using graph_type = typename Device::graph_type;
  using capture_type = capture_status<graph_type>;

  /// Allocates `bytes` (more than 0), runs `initialise(stream, data)` on the library's own stream, and waits for it: the
  /// block is ready for any stream when this returns, capturing or not, and no node is added to anybody's graph.
  /// Out of memory is tried once more after giving back what is released. Throws out_of_memory, logic_error in a forked
  /// child, device_error; nothing changed then.
  template <class Initialise>
  [[nodiscard]] static std::shared_ptr<block> make(any_resource<Device> resource, std::size_t bytes,
                                                   std::size_t alignment, std::shared_ptr<byte_counts> counts,
                                                   Initialise&& initialise) {
    const stream_type library = library_stream(resource.device());
    auto made = allocated(std::move(resource), library, bytes, alignment, std::move(counts));
    try {
      made->run(std::forward<Initialise>(initialise));
    } catch (...) {
      made->resource_.deallocate(library, made->data_, bytes, alignment);
      throw;
    }
    return shared(std::move(made));
  }

  /// Allocates `bytes` in the order of `stream`, which doesn't capture; nothing is initialised or waited for. They go back
  /// in the order of `stream`, too, which outlives all owners.
  [[nodiscard]] static std::shared_ptr<block> make_scratch(any_resource<Device> resource, stream_type stream,
                                                           std::size_t bytes, std::size_t alignment,
                                                           std::shared_ptr<byte_counts> counts) {
    return shared(allocated(std::move(resource), stream, bytes, alignment, std::move(counts)));
  }

  /// Grows where it is, when the resource can; then runs `initialise(stream, data)`. False: nothing changed. When
  /// initialise throws, the block has grown, and the next call initialises again.
  template <class Initialise>
  [[nodiscard]] bool extend(std::size_t bytes, Initialise&& initialise) {
    if (bytes > bytes_) {
      detail::refuse_unusable_device(Device::name);
      if (!resource_.extend(home_, data_, bytes_, bytes)) {
        return false;
      }
      const std::lock_guard lock{pins_mutex_};
      if (pins_ != 0) {
        counts_->pinned(bytes - bytes_);
      }
      bytes_ = bytes;
    }
    run(std::forward<Initialise>(initialise));
    return true;
  }

  /// Fences the eager work that was noted down. Throws logic_error when a stream of it is capturing.
  void prepare_to_suspend() {
    detail::refuse_unusable_device(Device::name);
    for (use& last : uses_) {
      if (!fence(last)) {
        throw logic_error{
            "a block cannot be suspended while a stream that used it is capturing, or did so when the use ended and is "
            "another thread's (the per-thread default stream)"};
      }
    }
  }

  /// Gives the physical memory back to the device once that work is done; the addresses stay. Graphs are the caller's to
  /// keep quiet. Throws logic_error where the resource cannot, device_error.
  void suspend() {
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{device()};
    wait_for_uses();
    resource_.decommit(home_, data_, bytes_);
    for (use& last : uses_) {  // handles may live on, and be used again
      if (!let_go_ && !Device::thread_bound(last.stream)) {
        last.mark.reset();
      }
    }
  }

  /// Fresh memory at the same addresses, then `initialise(stream, data)`, waited for. Throws out_of_memory, device_error;
  /// it can be tried again then.
  template <class Initialise>
  void resume(Initialise&& initialise) {
    detail::refuse_unusable_device(Device::name);
    resource_.recommit(home_, data_, bytes_);
    run(std::forward<Initialise>(initialise));
  }

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] Device device() const noexcept { return resource_.device(); }

  /// Whether a graph that recorded it is alive (or its end not yet reported by the device).
  [[nodiscard]] bool pinned() const noexcept {
    const std::lock_guard lock{pins_mutex_};
    return pins_ != 0;
  }

  /// The graph being captured owns the block from now on. At least once per block and capture: repeats cost one load.
  void pin(const capture_type& capture) {
    if (last_capture_.load(std::memory_order_relaxed) != capture.id) {
      pin(capture.graph);
      last_capture_.store(capture.id, std::memory_order_relaxed);
    }
  }

  /// `graph` owns the block from now on, and so do its clones, executables and their launches.
  void pin(graph_type graph) {
    detail::stay_resident();
    auto owner = std::make_unique<std::shared_ptr<block>>(this->shared_from_this());
    {
      const std::lock_guard lock{pins_mutex_};
      if (pins_++ == 0) {
        counts_->pinned(bytes_);
      }
    }
    const typename Device::relaxed_scope relaxed;
    Device::retain(graph, owner.release(), &unpin);  // when it throws, it has unpinned
  }

  /// Its buffer has moved on to another block, and lets go.
  void retire() noexcept {
    retired_ = true;
    counts_->retired(bytes_);
    let_go();
  }

  /// Its buffer lets go. What is left are handles, which the caller keeps in check, and graphs, whose end comes at a time
  /// that nobody can tell: so the streams are fenced now, and not asked for anything later; but for those that are
  /// capturing just now, where no event can be recorded.
  void let_go() noexcept {
    let_go_ = true;
    for (use& last : uses_) {
      static_cast<void>(fence(last));
    }
  }

  /// Work that uses the block is about to be queued on `stream` (`capture`: the id of what it captures, or 0). Work queued
  /// by earlier users on other streams is waited for when both are eager or both in one capture; across a capture's edge
  /// nothing is. Nothing but a short scan when the stream is the one that used it last.
  void begin_use(stream_type stream, std::uint64_t capture) {
    bool known = false;
    bool others = false;
    for (const use& earlier : uses_) {
      if (earlier.capture == capture) {
        const bool same = earlier.continues_on(stream);
        known = known || same;
        others = others || !same;
      }
    }
    if (!known || others) [[unlikely]] {
      join(stream, capture);
    }
  }

  /// Work that uses the block has been queued on `stream`: later users and the final free wait for it.
  void end_use(stream_type stream, std::uint64_t capture) noexcept {
    for (const use& earlier : uses_) {
      if (earlier.stream == stream && earlier.capture == capture && !earlier.mark && !earlier.bound()) [[likely]] {
        return;
      }
    }
    note(stream, capture, let_go_);
  }

  /// The same for a handle of a capture that has ended, which may have been used eagerly since. The stream is not
  /// remembered: streams that only capture need not outlive the buffer.
  void end_use_after_capture(stream_type stream) noexcept { note(stream, 0, true); }

 private:
  friend class detail::release_queue<Device>;

  /// A stream that used the block since anybody waited for it. Streams are remembered, not fenced: an event is recorded
  /// when another stream acquires or when the buffer lets go; so streams outlive the buffers and handles used on them. A
  /// handle that means another stream in each thread is fenced at once, or by that thread as soon as it can be. `mark` is
  /// the event, once recorded.
  struct use {
    stream_type stream;
    std::uint64_t capture;
    std::optional<typename Device::event> mark;
    std::uint64_t thread = 0;  // the only one that can record it; 0: any

    [[nodiscard]] bool bound() const noexcept { return thread != 0; }
    /// Whether this thread means the same stream by the handle.
    [[nodiscard]] bool within_reach() const noexcept { return !bound() || thread == detail::this_thread(); }
    /// Whether what is queued on `next` comes after it without being told.
    [[nodiscard]] bool continues_on(stream_type next) const noexcept {
      return stream == next && !mark && within_reach();
    }
  };

  /// Uses in other captures that are remembered, so that a thousand captures don't make a list of a thousand.
  static constexpr std::ptrdiff_t remembered_uses_of_other_captures = 64;

  block(any_resource<Device> resource, stream_type home, std::size_t bytes, std::size_t alignment,
        std::shared_ptr<byte_counts> counts, detail::release_queue<Device>& queue)
      : resource_(std::move(resource)),
        home_(home),
        bytes_(bytes),
        alignment_(alignment),
        counts_(std::move(counts)),
        queue_(&queue) {}

  [[nodiscard]] static std::unique_ptr<block> allocated(any_resource<Device> resource, stream_type home,
                                                        std::size_t bytes, std::size_t alignment,
                                                        std::shared_ptr<byte_counts> counts) {
    detail::refuse_unusable_device(Device::name);
    auto& queue = detail::release_queue<Device>::instance();
    std::unique_ptr<block> made{new block{std::move(resource), home, bytes, alignment, std::move(counts), queue}};
    const std::uint64_t given_back = queue.given_back();
    try {
      made->data_ = made->resource_.allocate(home, bytes, alignment);
    } catch (const out_of_memory&) {
      queue.drain_all();
      if (queue.given_back() == given_back) {
        throw;
      }
      made->data_ = made->resource_.allocate(home, bytes, alignment);
    }
    detail::watch_process();
    return made;
  }

  [[nodiscard]] static std::shared_ptr<block> shared(std::unique_ptr<block> made) {
    detail::release_queue<Device>& queue = *made->queue_;
    std::shared_ptr<block> owned{made.release(), [](block* last) noexcept { last->queue_->push(last); }};
    queue.drain();
    return owned;
  }

  [[nodiscard]] static stream_type library_stream(Device of) {
    const typename Device::relaxed_scope relaxed;
    return of.library_stream();
  }

  template <class Initialise>
  void run(Initialise&& initialise) {
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{device()};
    try {
      std::forward<Initialise>(initialise)(home_, data_);
      Device::synchronize(home_);
    } catch (...) {
      Device::synchronize(home_);  // what was queued may use what unwinding destroys
      throw;
    }
  }

  /// Called by the device on any thread; may not call the device.
  static void unpin(void* object) noexcept {
    const std::unique_ptr<std::shared_ptr<block>> owner{static_cast<std::shared_ptr<block>*>(object)};
    block& self = **owner;
    const std::lock_guard lock{self.pins_mutex_};
    if (--self.pins_ == 0) {
      self.counts_->unpinned(self.bytes_);
    }
  }

  void join(stream_type stream, std::uint64_t capture) {
    if (const Device of = Device::of(stream); of != device()) {
      throw logic_error{std::string{"a stream of "} + Device::name + " device " + std::to_string(of.ordinal) +
                        " cannot use a block of device " + std::to_string(device().ordinal)};
    }
    const typename Device::relaxed_scope relaxed;
    const typename Device::current_scope current{device()};
    forget_old_captures(capture);
    std::vector<bool> waited_for(uses_.size());
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      const use& earlier = uses_[i];
      if (earlier.capture != capture) {
        continue;
      }
      if (earlier.mark) {
        Device::wait(stream, *earlier.mark);
      } else if (!earlier.continues_on(stream)) {
        if (!earlier.within_reach() ||
            (capture == 0 && Device::capturing(earlier.stream).state != capture_state::none)) {
          continue;  // no event can be recorded there now
        }
        Device::wait(stream, fresh_mark(earlier.stream));
      }
      waited_for[i] = true;
    }
    remember(stream, capture, let_go_);  // behind those that it stands for from now on
    waited_for.resize(uses_.size());
    std::size_t next = 0;
    std::erase_if(uses_, [&](const use&) { return waited_for[next++]; });
  }

  void note(stream_type stream, std::uint64_t capture, bool fence_now) noexcept {
    try {
      forget_old_captures(capture);
      std::erase_if(uses_, [&](const use& earlier) {  // the new one stands for it
        return earlier.bound() && earlier.capture == capture && earlier.continues_on(stream);
      });
      remember(stream, capture, fence_now);
    } catch (...) {
      wait_instead(stream, capture);
    }
  }

  void remember(stream_type stream, std::uint64_t capture, bool fence_now) {
    use now{stream, capture, std::nullopt};
    if (Device::thread_bound(stream)) {
      const typename Device::relaxed_scope relaxed;
      const typename Device::current_scope current{device()};
      now.thread = detail::this_thread();
      if (capture != 0 || Device::capturing(stream).state == capture_state::none) {
        now.mark.emplace(fresh_mark(stream));
      }
    } else if (fence_now) {
      static_cast<void>(fence(now));
    }
    uses_.push_back(std::move(now));
  }

  void forget_old_captures(std::uint64_t capture) noexcept {
    const auto other = [capture](const use& u) { return u.capture != 0 && u.capture != capture; };
    if (std::count_if(uses_.begin(), uses_.end(), other) >= remembered_uses_of_other_captures) {
      uses_.erase(std::find_if(uses_.begin(), uses_.end(), other));
    }
  }

  /// A use that could not be noted down, for want of host memory, say, is waited for; if that fails, too, the memory is
  /// never given back rather than too early.
  void wait_instead(stream_type stream, std::uint64_t capture) noexcept {
    if (capture != 0) {
      return;  // its graph owns the block
    }
    try {
      const typename Device::relaxed_scope relaxed;
      if (Device::capturing(stream).state == capture_state::none) {
        Device::synchronize(stream);
        return;
      }
    } catch (...) {
    }
    unfenced_ = true;
  }

  [[nodiscard]] static typename Device::event fresh_mark(stream_type stream) {
    typename Device::event mark{Device::of(stream)};
    mark.record(stream);
    return mark;
  }

  /// Whether nothing but an event (or a graph's end) stands for the use. False: its stream is capturing, and must outlive
  /// the block, or is another thread's to name; or the runtime is broken.
  [[nodiscard]] bool fence(use& last) noexcept {
    if (last.capture != 0 || last.mark || (last.stream == home_ && last.within_reach())) {
      return true;  // of a capture: the graph owned the block, so it is gone by the time it matters, or never ran
    }
    if (!last.within_reach() || !detail::device_usable().load(std::memory_order_relaxed)) {
      return false;
    }
    try {
      const typename Device::relaxed_scope relaxed;
      const typename Device::current_scope current{device()};
      if (Device::capturing(last.stream).state != capture_state::none) {
        return false;
      }
      last.mark.emplace(fresh_mark(last.stream));
      return true;
    } catch (...) {
      counts_->failed();
      return false;
    }
  }

  /// Work queued on home_ from now on comes after all uses, which are fenced.
  void wait_for_uses() {
    for (const use& last : uses_) {
      if (last.capture == 0 && last.mark) {
        Device::wait(home_, *last.mark);
      }
    }
  }

  /// Gives the memory back in stream order. False: not yet (a stream that used it is capturing), or not possible.
  [[nodiscard]] bool give_back() noexcept {
    if (unfenced_) {
      counts_->failed();
      return false;
    }
    try {
      const typename Device::relaxed_scope relaxed;
      const typename Device::current_scope current{device()};
      if (Device::capturing(home_).state != capture_state::none) {
        return false;
      }
      for (use& last : uses_) {
        if (!fence(last)) {
          return false;
        }
      }
      wait_for_uses();
      resource_.deallocate(home_, data_, bytes_, alignment_);
      return true;
    } catch (...) {
      counts_->failed();
      return false;
    }
  }

  any_resource<Device> resource_;
  const stream_type home_;  // where it was allocated, and is freed
  void* data_ = nullptr;
  std::size_t bytes_;
  const std::size_t alignment_;
  const std::shared_ptr<byte_counts> counts_;
  detail::release_queue<Device>* const queue_;  // of the shared object that made the block

  std::atomic<std::uint64_t> last_capture_{0};
  mutable std::mutex pins_mutex_;  // pins_, and bytes_ as counted with it
  std::uint64_t pins_ = 0;
  std::vector<use> uses_;
  bool retired_ = false;
  bool let_go_ = false;
  bool unfenced_ = false;
  block* next_ = nullptr;  // in the release queue
};

}  // namespace holdfast::HOLDFAST_ABI
