// Where kernel cases run: on the host device. kernel_cuda_world.cuh has the same members for CUDA.
#pragma once

#include <holdfast/device/host.hpp>

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace kernel_test {

class host_world {
 public:
  using stream_type = holdfast::host::stream_ref;

  /// A stream type of somebody else's, as a framework's would be.
  struct convertible_stream {
    stream_type stream;
    operator stream_type() const { return stream; }
  };

  /// Why nothing can run here; null when it can.
  static const char* unavailable() { return nullptr; }

  [[nodiscard]] stream_type stream() const { return stream_.get(); }
  void synchronize() { holdfast::host_device::synchronize(stream()); }

  /// Exactly this many bytes, 256-byte aligned: one more is the sanitizer's.
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) {
    constexpr std::align_val_t alignment{256};
    return {static_cast<std::byte*>(::operator new(bytes, alignment)),
            [](std::byte* p) { ::operator delete (p, std::align_val_t{256}); }};
  }

  /// Addresses by the gigabyte, memory only where they are touched; null when they cannot be had.
  [[nodiscard]] std::shared_ptr<std::byte> allocate_vast(std::size_t bytes) {
    void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    return {static_cast<std::byte*>(p), [bytes](std::byte* q) { ::munmap(q, bytes); }};
  }

  void upload(std::byte* to, const void* from, std::size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  void download(void* to, const std::byte* from, std::size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }

  class recording {
   public:
    recording(holdfast::host::graph graph, stream_type stream)
        : graph_(std::move(graph)), exec_(graph_.instantiate()), stream_(stream) {}
    [[nodiscard]] std::size_t nodes() const { return graph_.nodes().size(); }
    void replay() {
      exec_.launch(stream_);
      holdfast::host_device::synchronize(stream_);
    }

   private:
    holdfast::host::graph graph_;
    holdfast::host::graph_exec exec_;
    stream_type stream_;
  };

  template <class Work>
  [[nodiscard]] recording record(const Work& work) {
    stream().begin_capture();
    work();
    return {stream().end_capture(), stream()};
  }

  /// Calls `work` while the stream's capture is invalidated.
  template <class Work>
  void in_broken_capture(const Work& work) {
    stream().begin_capture();
    try {
      holdfast::host::unsafe_call("a test");
    } catch (const holdfast::device_error&) {
    }
    work();
    try {
      static_cast<void>(stream().end_capture());
    } catch (const holdfast::device_error&) {
    }
  }

  /// Streams of every device there is, and the device that is current.
  [[nodiscard]] static int devices() { return 2; }
  [[nodiscard]] static int current_device() { return holdfast::host::current_device().ordinal; }
  [[nodiscard]] static host_world on_device(int ordinal) { return host_world{holdfast::host_device{ordinal}}; }

  explicit host_world(holdfast::host_device device = {}) : stream_(device) {}

 private:
  holdfast::host::stream stream_;
};

}  // namespace kernel_test
