// SPDX-License-Identifier: Apache-2.0
// What both parts of the demo stand on, written once for both devices: the consumer that reads too far, streams and
// graphs, memory outside the library, and the model whose layers gather their rows from an NVFP4 cache.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/gather_rows.cuh>
#include <holdfast/resource/malloc.hpp>
#include <holdfast/row_format.hpp>
#include <holdfast/view.hpp>

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace demo {

using fp8 = __nv_fp8_e4m3;

// TensorRT-LLM's DeepSeek-V4 sparse attention: rows of 512 FP8 values, read through a TMA descriptor with INT_MAX rows, up
// to a KV tile of 128 rows further than the indices say.
inline constexpr std::int64_t row_elements = 512;
inline constexpr std::int64_t row_bytes = row_elements * static_cast<std::int64_t>(sizeof(fp8));
inline constexpr std::int64_t tile_rows = 128;
inline constexpr std::int64_t layers = 61;

// --- the stand-in for attention ---------------------------------------------------------------------------------------

/// A weighted sum of a row's bytes [begin, end), none with weight zero. It is exact, and of a whole row below 2^26: zero
/// for a row of zeros, and for no other.
__host__ __device__ inline std::uint32_t weigh(const fp8* row, std::int64_t begin, std::int64_t end) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(row);
  std::uint32_t sum = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    sum += static_cast<std::uint32_t>(i + 1) * bytes[i];
  }
  return sum;
}

static constexpr int attend_warps = 8;  // of a block

/// A warp a row.
static __global__ void attend_kernel(const fp8* kv, std::int64_t rows, std::uint32_t* out) {
  const std::int64_t row = std::int64_t{blockIdx.x} * attend_warps + threadIdx.x / 32;
  if (row < rows) {
    constexpr std::int64_t part = row_elements / 32;
    const std::int64_t lane = threadIdx.x % 32;
    const std::uint32_t sum = __reduce_add_sync(~0U, weigh(kv + row * row_elements, lane * part, (lane + 1) * part));
    if (lane == 0) {
      out[row] = sum;
    }
  }
}

// --- streams and graphs of the two devices ----------------------------------------------------------------------------

inline void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) {
    throw holdfast::device_error{static_cast<int>(code), std::string{call} + ": " + cudaGetErrorString(code)};
  }
}

struct destroy {
  void operator()(cudaStream_t s) const { static_cast<void>(cudaStreamDestroy(s)); }
  void operator()(cudaGraph_t g) const { static_cast<void>(cudaGraphDestroy(g)); }
  void operator()(cudaGraphExec_t g) const { static_cast<void>(cudaGraphExecDestroy(g)); }
};
template <class Handle>
using owner = std::unique_ptr<std::remove_pointer_t<Handle>, destroy>;

struct cuda_stream : owner<cudaStream_t> {
  cuda_stream() {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    reset(made);
  }
  operator cudaStream_t() const { return get(); }  // NOLINT(google-explicit-constructor): as frameworks' streams do
};

template <class Device>
using stream_of =
    std::conditional_t<std::is_same_v<Device, holdfast::host_device>, holdfast::host::stream, cuda_stream>;
template <class Device>
using graph_of = std::conditional_t<std::is_same_v<Device, holdfast::host_device>, holdfast::host::graph_exec,
                                    owner<cudaGraphExec_t>>;

/// What `work()` enqueues on the stream, as an executable graph.
template <class Device, class Work>
graph_of<Device> capture(const stream_of<Device>& stream, Work&& work) {
  if constexpr (std::is_same_v<Device, holdfast::host_device>) {
    stream.begin_capture();
    work();
    return stream.end_capture().instantiate();
  } else {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    work();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const owner<cudaGraph_t> release{graph};
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    return graph_of<Device>{executable};
  }
}

inline void launch(const holdfast::host::graph_exec& graph, const holdfast::host::stream& stream) {
  graph.launch(stream);
}
inline void launch(const owner<cudaGraphExec_t>& graph, const cuda_stream& stream) {
  check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
}

/// The "attention" over `rows` rows of `kv` [rows, 512]. It reads `beyond` rows more than that. What it sees in each row
/// goes to `out` [rows + beyond].
inline void attend(const holdfast::host::stream& stream, const fp8* kv, std::int64_t rows, std::int64_t beyond,
                   std::uint32_t* out) {
  stream.run([=] {
    for (std::int64_t row = 0; row < rows + beyond; ++row) {
      out[row] = weigh(kv + row * row_elements, 0, row_elements);
    }
  });
}
inline void attend(const cuda_stream& stream, const fp8* kv, std::int64_t rows, std::int64_t beyond,
                   std::uint32_t* out) {
  const std::int64_t blocks = (rows + beyond + attend_warps - 1) / attend_warps;
  attend_kernel<<<static_cast<unsigned>(blocks), attend_warps * 32, 0, stream>>>(kv, rows + beyond, out);
  check(cudaGetLastError(), "attend_kernel");
}

// --- memory -----------------------------------------------------------------------------------------------------------

/// Device memory that the library has nothing to do with.
template <class T, class Device>
class array {
 public:
  array(Device device, const stream_of<Device>& stream, std::int64_t size)
      : memory_(device),
        stream_(&stream),
        bytes_(static_cast<std::size_t>(size) * sizeof(T)),
        data_(static_cast<T*>(memory_.allocate(stream, bytes_, 256))) {}
  array(const array&) = delete;
  array& operator=(const array&) = delete;
  ~array() { memory_.deallocate(*stream_, data_, bytes_, 256); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  /// Waits for the stream.
  void upload(const std::vector<T>& values) const {
    Device::copy(*stream_, data_, values.data(), bytes_);
    Device::synchronize(*stream_);
  }
  /// The first `size` elements. Waits for the stream.
  [[nodiscard]] std::vector<T> download(std::int64_t size) const {
    std::vector<T> values(static_cast<std::size_t>(size));
    Device::copy(*stream_, values.data(), data_, values.size() * sizeof(T));
    Device::synchronize(*stream_);
    return values;
  }

 private:
  holdfast::malloc_resource<Device> memory_;
  const stream_of<Device>* stream_;
  std::size_t bytes_;
  T* data_;
};

// --- the model --------------------------------------------------------------------------------------------------------

/// An NVFP4 cache of random rows, the rows that each layer selects, "attention" over them, and what it must see: a
/// reference that was dequantised into plain memory, and read no further than that.
template <class Device>
class model {
 public:
  /// Calls have at most `rows` rows. Row i of layer l is the cache's row selected[l + i].
  model(Device device, std::int64_t cache_rows, std::int64_t rows)
      : rows_(rows),
        cache_rows_(cache_rows),
        data_(device, stream_, cache_rows * holdfast::nvfp4_row<>::data_bytes),
        scales_(device, stream_, cache_rows * holdfast::nvfp4_row<>::scale_bytes),
        selected_(device, stream_, rows + layers),
        out_(device, stream_, layers * (rows + tile_rows)) {
    std::uint32_t state = 1;
    const auto random = [&state] {
      state = state * 1664525 + 1013904223;
      return state >> 8;
    };
    std::vector<unsigned char> bytes(data_.bytes());
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<unsigned char>(random()); });
    data_.upload(bytes);
    bytes.resize(scales_.bytes());
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<unsigned char>(0x30 + random() % 32); });
    scales_.upload(bytes);
    std::vector<std::int32_t> selected(static_cast<std::size_t>(rows + layers));
    std::generate(selected.begin(), selected.end(),
                  [&] { return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(cache_rows)); });
    selected_.upload(selected);

    const array<fp8, Device> plain{device, stream_, (rows + layers) * row_elements};
    holdfast::gather_rows(stream_, cache(), indices(rows + layers, 0),
                          holdfast::view<fp8, 2>{plain.data(), rows + layers, row_elements});
    attend(stream_, plain.data(), rows + layers, 0, out_.data());
    reference_ = out_.download(rows + layers);
  }

  [[nodiscard]] const stream_of<Device>& stream() const { return stream_; }

  [[nodiscard]] holdfast::nvfp4_rows<> cache() const {
    return {.data = {.data = data_.data(), .rows = cache_rows_},
            .scales = {.data = scales_.data(), .rows = cache_rows_},
            .global_scale = 100.0f / (448 * 6)};  // TensorRT-LLM's default: amax 100
  }
  /// What a layer's call of `rows` rows selects.
  [[nodiscard]] holdfast::view<const std::int32_t, 1> indices(std::int64_t rows, std::int64_t layer) const {
    return holdfast::view<const std::int32_t, 1>{selected_.data() + layer, rows};
  }
  /// Reads a tile further than `rows` rows.
  void attend_too_far(const fp8* kv, std::int64_t rows, std::int64_t layer) const {
    attend(stream_, kv, rows, tile_rows, out_.data() + layer * (rows_ + tile_rows));
  }

  /// What `work()`, a call of `rows` rows in each of the first `calls` layers, has seen.
  struct sight {
    std::int64_t right = 0;  ///< calls whose every row weighs what the reference's does
    std::int64_t zero = 0;   ///< calls that found nothing but zeros further on
  };
  template <class Work>
  [[nodiscard]] sight look(std::int64_t rows, std::int64_t calls, Work&& work) const {
    Device::fill(stream_, out_.data(), std::byte{0xff}, out_.bytes());
    work();
    const std::vector<std::uint32_t> out = out_.download(calls * (rows_ + tile_rows));
    sight seen;
    for (std::int64_t layer = 0; layer < calls; ++layer) {
      const auto tail = out.begin() + layer * (rows_ + tile_rows) + rows;
      seen.right += std::equal(tail - rows, tail, reference_.begin() + layer) ? 1 : 0;
      seen.zero += std::count(tail, tail + tile_rows, 0U) == tile_rows ? 1 : 0;
    }
    return seen;
  }

 private:
  stream_of<Device> stream_;
  std::int64_t rows_;
  std::int64_t cache_rows_;
  array<unsigned char, Device> data_;
  array<unsigned char, Device> scales_;
  array<std::int32_t, Device> selected_;
  array<std::uint32_t, Device> out_;
  std::vector<std::uint32_t> reference_;
};

}  // namespace demo
