// SPDX-License-Identifier: Apache-2.0
// An engine's own allocator under the library's buffers: what is between the marks is shown in README.md.
//
// The engine's allocator knows nothing of graphs. Its memory stays all the same until the graph that recorded it is gone.
#include <holdfast/holdfast.hpp>
#include <holdfast/resource/default.hpp>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

using device = holdfast::host_device;

namespace {

// What an engine has: stream-ordered, and it counts.
std::atomic<std::size_t> bytes_in_use = 0;  // resources are called from any thread

void* engine_malloc(std::size_t bytes, std::size_t alignment, device::stream_type /*stream*/) {
  void* const p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  bytes_in_use += p == nullptr ? 0 : bytes;
  return p;
}

void engine_free(void* p, std::size_t bytes, device::stream_type stream) {
  holdfast::host::enqueue_free(stream, [p] { std::free(p); });  // after the work queued before
  bytes_in_use -= bytes;
}

// [resource]
struct engine_memory {
  using stream_type = device::stream_type;  // cudaStream_t, on a GPU

  void* allocate(stream_type stream, std::size_t bytes, std::size_t alignment) {
    void* p = engine_malloc(bytes, alignment, stream);
    return p != nullptr ? p : throw holdfast::out_of_memory{"engine_memory", bytes, bytes_in_use, 0};
  }
  void deallocate(stream_type stream, void* p, std::size_t bytes, std::size_t) noexcept {
    engine_free(p, bytes, stream);
  }
  bool operator==(const engine_memory&) const = default;
};

holdfast::lane decode{holdfast::any_resource{engine_memory{}, device{0}}};
// [/resource]

}  // namespace

int main() {
  const holdfast::host::stream stream;
  stream.begin_capture();
  static_cast<void>(
      decode.padded_queries<float>({.heads = 16, .padded_heads = 64, .head_dim = 512}).acquire(stream, 8));
  auto graph = stream.end_capture();

  decode = holdfast::lane{holdfast::default_resource(device{0})};  // the engine's lane and its buffer are gone
  const std::size_t with_graph = bytes_in_use.load();
  graph.reset();
  holdfast::collect(device{0});
  std::printf("engine's bytes in use: %zu while the graph lives, %zu after it\n", with_graph, bytes_in_use.load());
  return with_graph == 8 * 64 * 512 * sizeof(float) && bytes_in_use == 0 ? 0 : 1;
}
