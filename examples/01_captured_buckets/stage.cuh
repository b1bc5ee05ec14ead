// SPDX-License-Identifier: Apache-2.0
// What both parts of the demo stand on, written once for both devices: streams and graphs, memory outside the library,
// the other tenant of the memory, and the model whose decode step is captured.
#pragma once

#include <holdfast/device/cuda.hpp>
#include <holdfast/device/host.hpp>
#include <holdfast/error.hpp>
#include <holdfast/kernel/pad_queries.cuh>
#include <holdfast/memory_resource.hpp>
#include <holdfast/resource/malloc.hpp>
#include <holdfast/view.hpp>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace demo {

using bf16 = __nv_bfloat16;

// DeepSeek-V4: attention takes 64 query heads of 512 dims; a tensor-parallel rank owns 8 to 32 of them.
inline constexpr std::int64_t padded_heads = 64;
inline constexpr std::int64_t head_dim = 512;
inline constexpr std::int64_t row_elements = padded_heads * head_dim;
inline constexpr std::int64_t row_bytes = row_elements * static_cast<std::int64_t>(sizeof(bf16));  // 64 KiB

/// The real heads of padded rows.
inline holdfast::strided_view<bf16, 3> real_heads(bf16* padded, std::int64_t rows, std::int64_t heads) {
  return holdfast::make_strided_view<bf16, 3>(padded, {rows, heads, head_dim}, {row_elements, head_dim, 1});
}

// --- the stand-in for attention ---------------------------------------------------------------------------------------

/// Reads a dim of all 64 heads, none with weight zero: dirty padding and somebody else's memory show in the sum.
__host__ __device__ inline float attend(const bf16* row, std::int64_t dim) {
  float sum = 0;
  for (std::int64_t head = 0; head < padded_heads; ++head) {
    sum += static_cast<float>(head + 1) * __bfloat162float(row[head * head_dim + dim]);
  }
  return sum;
}

static __global__ void attend_kernel(const bf16* q, float* out) {
  const std::int64_t row = blockIdx.x;
  for (std::int64_t dim = threadIdx.x; dim < head_dim; dim += blockDim.x) {
    out[row * head_dim + dim] = attend(q + row * row_elements, dim);
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

/// `out` [rows, 512] becomes the "attention" of `q` [rows, 64, 512].
inline void attend(const holdfast::host::stream& stream, const bf16* q, std::int64_t rows, float* out) {
  stream.run([=] {
    for (std::int64_t i = 0; i < rows * head_dim; ++i) {
      out[i] = attend(q + i / head_dim * row_elements, i % head_dim);
    }
  });
}
inline void attend(const cuda_stream& stream, const bf16* q, std::int64_t rows, float* out) {
  attend_kernel<<<static_cast<unsigned>(rows), 256, 0, stream>>>(q, out);
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

 private:
  holdfast::malloc_resource<Device> memory_;
  const stream_of<Device>* stream_;
  std::size_t bytes_;
  T* data_;
};

/// Waits for the stream.
template <class Device, class T>
std::vector<T> download(const stream_of<Device>& stream, const T* from, std::int64_t size) {
  std::vector<T> values(static_cast<std::size_t>(size));
  Device::copy(stream, values.data(), from, values.size() * sizeof(T));
  Device::synchronize(stream);
  return values;
}

/// Somebody else who allocates where the engine does, and expects to find again what was stored.
template <class Device>
class tenant {
 public:
  tenant(holdfast::any_resource<Device> memory, const stream_of<Device>& stream, std::int64_t bytes)
      : memory_(std::move(memory)),
        stream_(&stream),
        bytes_(static_cast<std::size_t>(bytes)),
        data_(static_cast<std::byte*>(memory_.allocate(stream, bytes_, 256))) {
    Device::fill(stream, data_, std::byte{0x5a}, bytes_);
  }
  tenant(const tenant&) = delete;
  tenant& operator=(const tenant&) = delete;
  ~tenant() { memory_.deallocate(*stream_, data_, bytes_, 256); }

  [[nodiscard]] std::int64_t overwritten_bytes() const {
    const auto words = download<Device>(*stream_, reinterpret_cast<const std::uint64_t*>(data_),
                                        static_cast<std::int64_t>(bytes_ / sizeof(std::uint64_t)));
    return 8 * std::count_if(words.begin(), words.end(), [](std::uint64_t word) { return word != 0x5a5a5a5a5a5a5a5a; });
  }

 private:
  holdfast::any_resource<Device> memory_;
  const stream_of<Device>* stream_;
  std::size_t bytes_;
  std::byte* data_;
};

// --- the model --------------------------------------------------------------------------------------------------------

/// Queries of random tokens, "attention" over them, and what it must give: an eager reference, computed from plain copies
/// into plain zeroed memory.
template <class Device>
class model {
 public:
  static constexpr std::int64_t requests = 3;

  /// Requests have at most `rows` rows of `heads` real heads. Request i has the tokens from i on.
  model(Device device, std::int64_t heads, std::int64_t rows)
      : heads_(heads),
        tokens_(device, stream_, (rows + requests) * heads * head_dim),
        queries_(device, stream_, rows * heads * head_dim),
        out_(device, stream_, (rows + requests) * head_dim) {
    std::vector<std::uint16_t> random(tokens_.bytes() / sizeof(bf16));
    std::uint32_t state = 1;
    for (std::uint16_t& value : random) {  // bf16 between 1 and 2, of either sign
      state = state * 1664525 + 1013904223;
      value = static_cast<std::uint16_t>(0x3f80 | ((state >> 16) & 0x807f));
    }
    Device::copy(stream_, tokens_.data(), random.data(), tokens_.bytes());

    const array<bf16, Device> padded{device, stream_, (rows + requests) * row_elements};
    Device::fill(stream_, padded.data(), std::byte{0}, padded.bytes());
    for (std::int64_t row = 0; row < rows + requests; ++row) {
      Device::copy(stream_, padded.data() + row * row_elements, token(row),
                   static_cast<std::size_t>(heads * head_dim) * sizeof(bf16));
    }
    attend_all_heads(padded.data(), rows + requests);
    reference_ = download<Device>(stream_, out_.data(), (rows + requests) * head_dim);

    arrive(0);  // and once through the kernel, as engines warm theirs up before they capture
    holdfast::pad_queries(stream_, queries(1), real_heads(padded.data(), 1, heads));
    Device::synchronize(stream_);
  }

  [[nodiscard]] const stream_of<Device>& stream() const { return stream_; }
  [[nodiscard]] std::int64_t heads() const { return heads_; }

  /// A request's queries take the place of the last one's, at the address that graphs have recorded.
  void arrive(std::int64_t request) {
    request_ = request;
    Device::copy(stream_, queries_.data(), token(request), queries_.bytes());
  }

  /// The first queries of the request, packed: [rows, heads, 512].
  [[nodiscard]] holdfast::view<const bf16, 3> queries(std::int64_t rows) const {
    return holdfast::view<const bf16, 3>{queries_.data(), rows, heads_, head_dim};
  }

  void attend_all_heads(const bf16* q, std::int64_t rows) const { attend(stream_, q, rows, out_.data()); }

  /// Runs `step()`, a step of `rows` rows, eager or replayed. Returns how many rows of its output equal the reference's,
  /// bit for bit.
  template <class Step>
  [[nodiscard]] std::int64_t right_rows(std::int64_t rows, Step&& step) const {
    Device::fill(stream_, out_.data(), std::byte{0xff}, out_.bytes());
    step();
    const std::vector<float> out = download<Device>(stream_, out_.data(), rows * head_dim);
    std::int64_t right = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* const wanted = reference_.data() + (request_ + row) * head_dim;
      right += std::memcmp(out.data() + row * head_dim, wanted, head_dim * sizeof(float)) == 0 ? 1 : 0;
    }
    return right;
  }

  /// Elements in the padding of `rows` rows that are not zero.
  [[nodiscard]] std::int64_t dirty_padding(const bf16* q, std::int64_t rows) const {
    const auto all = download<Device>(stream_, reinterpret_cast<const std::uint16_t*>(q), rows * row_elements);
    std::int64_t dirty = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::uint16_t* const start = all.data() + row * row_elements;
      dirty +=
          std::count_if(start + heads_ * head_dim, start + row_elements, [](std::uint16_t bits) { return bits != 0; });
    }
    return dirty;
  }

 private:
  [[nodiscard]] const bf16* token(std::int64_t index) const { return tokens_.data() + index * heads_ * head_dim; }

  stream_of<Device> stream_;
  std::int64_t heads_;
  std::int64_t request_ = 0;
  array<bf16, Device> tokens_;
  array<bf16, Device> queries_;
  array<float, Device> out_;
  std::vector<float> reference_;
};

}  // namespace demo
