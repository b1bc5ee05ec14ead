// SPDX-License-Identifier: Apache-2.0
// holdfast for PyTorch: buffers and scratch whose rows are tensors, and the kernels as operators with out-arguments.
//
// A tensor from acquire() owns a holdfast handle: its storage's deleter releases it. So the memory stays for as long as
// the tensor (or any view of it) lives, and for as long as any graph that it was acquired under.
//
// All of a lane is under one mutex, since tensors die on any thread. Nobody waits for it with the GIL in hand: torch's
// history of allocations takes the GIL on whichever thread allocates or frees, the resource's own included. So the GIL
// is released wherever a resource may be asked: when a buffer grows, and in scratch that is allocated for a call.
#include "kernels.hpp"

#include <holdfast/anchored_scratch.hpp>
#include <holdfast/capture.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/default.hpp>
#include <holdfast/resource/torch.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace holdfast_torch {
namespace {

using holdfast::cuda_device;

/// Locks `mutex`, without the GIL while it has to wait.
std::unique_lock<std::mutex> locked(std::mutex& mutex) {
  std::unique_lock lock{mutex, std::try_to_lock};
  if (!lock) {
    std::optional<pybind11::gil_scoped_release> waiting;
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      waiting.emplace();
    }
    lock.lock();
  }
  return lock;
}

/// The result of `call`, without the GIL if `slow`.
template <class Call>
auto unlocked_if(bool slow, Call&& call) {
  std::optional<pybind11::gil_scoped_release> asking;
  if (slow && PyGILState_Check() != 0) {
    asking.emplace();
  }
  return call();
}

// --- lanes -----------------------------------------------------------------------------------------------------------

/// Torch's memory, through a cache for what is allocated at every call.
class torch_memory {
 public:
  using stream_type = cudaStream_t;

  explicit torch_memory(const holdfast::torch_resource& torch) : torch_(torch), cached_(torch) {}

  void* allocate(cudaStream_t stream, std::size_t bytes, std::size_t alignment) {
    return cached_.allocate(stream, bytes, alignment);
  }
  void deallocate(cudaStream_t stream, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    cached_.deallocate(stream, p, bytes, alignment);
  }
  [[nodiscard]] holdfast::any_resource<cuda_device> persistent() const { return torch_; }
  [[nodiscard]] cuda_device device() const { return torch_.device(); }

  bool operator==(const torch_memory&) const = default;

 private:
  holdfast::torch_resource torch_;
  holdfast::caching_resource<cuda_device> cached_;
};

holdfast::any_resource<cuda_device> memory_of(cuda_device device, const std::string& memory) {
  if (memory == "torch") {
    return torch_memory{holdfast::torch_resource{device}};
  }
  TORCH_CHECK_VALUE(memory == "default", "holdfast: memory is 'torch' or 'default', not '", memory, "'");
  return holdfast::default_resource(device);
}

struct lane {
  lane(int ordinal, const std::string& memory)
      : device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(ordinal)),
        shared(memory_of(cuda_device{ordinal}, memory)) {}

  /// What is current on the lane's device.
  [[nodiscard]] cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

  const c10::Device device;
  holdfast::lane<cuda_device> shared;
  std::mutex mutex;
};

// --- tensors that own handles ----------------------------------------------------------------------------------------

/// What the storage of a tensor owns.
class tenure {
 public:
  explicit tenure(std::shared_ptr<lane> of) : lane_(std::move(of)) {}
  tenure(const tenure&) = delete;
  tenure& operator=(const tenure&) = delete;
  virtual ~tenure() = default;

  virtual bool pin(cudaStream_t stream) const = 0;
  /// Rows behind the tensor's that its owner may write.
  [[nodiscard]] virtual std::int64_t writable_tail_rows() const noexcept { return 0; }

  /// The deleter of its tensor's storage, by which it is recognised, too. Any thread, with the GIL or without.
  static void end(void* self) {
    std::unique_ptr<tenure> ended{static_cast<tenure*>(self)};
    const std::shared_ptr<lane> of = ended->lane_;
    const auto lock = locked(of->mutex);
    ended.reset();
  }

  /// That of `tensor`, or null where its memory is somebody else's.
  static const tenure* of(const at::Tensor& tensor) {
    return static_cast<const tenure*>(tensor.storage().data_ptr().cast_context<tenure>(&tenure::end));
  }

 private:
  std::shared_ptr<lane> lane_;
};

template <class Handle>
class tenure_of final : public tenure {
 public:
  tenure_of(std::shared_ptr<lane> of, Handle handle) : tenure(std::move(of)), handle_(std::move(handle)) {}
  bool pin(cudaStream_t stream) const override { return handle_.pin(stream); }
  [[nodiscard]] std::int64_t writable_tail_rows() const noexcept override {
    if constexpr (requires { handle_.tail_read_only(); }) {
      return handle_.tail_read_only() ? 0 : handle_.tail_rows();
    } else {
      return 0;
    }
  }
  [[nodiscard]] void* data() const noexcept { return const_cast<void*>(static_cast<const void*>(handle_.data())); }

 private:
  Handle handle_;
};

/// A packed tensor over `handle`'s memory. `lock` is the lane's, by reference so that it outlives the handle: without a
/// tensor, that is released under it.
template <class Handle>
at::Tensor tensor_of(const std::shared_ptr<lane>& of, Handle handle, at::IntArrayRef sizes,
                     const at::TensorOptions& options, std::unique_lock<std::mutex>& lock) {
  if (sizes[0] == 0) {
    handle.release();
    lock.unlock();
    return at::empty(sizes, options);
  }
  auto owner = std::make_unique<tenure_of<Handle>>(of, std::move(handle));
  lock.unlock();
  void* const data = owner->data();
  return at::for_blob(data, sizes)
      .context(static_cast<tenure*>(owner.release()), &tenure::end)
      .options(options)
      .target_device(of->device)
      .make_tensor();
}

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kBFloat16 || dtype == at::kFloat8_e4m3fn, "holdfast: bfloat16 or float8_e4m3fn, not ",
                   dtype);
}

// --- PaddedQuery -----------------------------------------------------------------------------------------------------

class padded_query {
 public:
  padded_query(std::shared_ptr<lane> of, std::int64_t heads, std::int64_t padded_heads, std::int64_t head_dim,
               at::ScalarType dtype)
      : lane_(std::move(of)),
        shape_{heads, padded_heads, head_dim},
        options_(at::TensorOptions().dtype(dtype).device(lane_->device)),
        buffer_(buffer_for(lane_->shared, shape_, dtype)) {}

  at::Tensor acquire(std::int64_t rows) {
    const cudaStream_t stream = lane_->stream();
    auto lock = locked(lane_->mutex);
    return std::visit(
        [&](auto* buffer) {
          auto handle = unlocked_if(rows > buffer->capacity(), [&] { return buffer->acquire(stream, rows); });
          const std::int64_t sizes[] = {rows, shape_.padded_heads, shape_.head_dim};
          return tensor_of(lane_, std::move(handle), sizes, options_, lock);
        },
        buffer_);
  }

  void reserve(std::int64_t rows) {
    const auto lock = locked(lane_->mutex);
    std::visit([&](auto* buffer) { buffer->reserve(rows); }, buffer_);
  }

  void restore_padding() {
    const auto lock = locked(lane_->mutex);
    std::visit([&](auto* buffer) { buffer->restore_padding(lane_->stream()); }, buffer_);
  }

  /// What `question` finds out about the buffer.
  template <class Question>
  [[nodiscard]] auto ask(Question question) const {
    const auto lock = locked(lane_->mutex);
    return std::visit([&](const auto* buffer) { return question(*buffer); }, buffer_);
  }

  bool wait_unpinned(double seconds) const {  // not under the mutex: it may take a while
    const auto most = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>{seconds});
    return std::visit([&](const auto* buffer) { return buffer->wait_unpinned(most); }, buffer_);
  }

  /// False: the current stream captures nothing, or there is no memory yet.
  bool pin() const {
    return ask([&](const auto& buffer) { return buffer.pin(lane_->stream()); });
  }

  [[nodiscard]] const holdfast::query_shape& shape() const noexcept { return shape_; }

 private:
  using any_buffer =
      std::variant<holdfast::padded_query_buffer<__nv_bfloat16>*, holdfast::padded_query_buffer<__nv_fp8_e4m3>*>;

  static any_buffer buffer_for(holdfast::lane<cuda_device>& shared, const holdfast::query_shape& shape,
                               at::ScalarType dtype) {
    check_dtype(dtype);
    if (dtype == at::kBFloat16) {
      return &shared.padded_queries<__nv_bfloat16>(shape);
    }
    return &shared.padded_queries<__nv_fp8_e4m3>(shape);
  }

  const std::shared_ptr<lane> lane_;
  const holdfast::query_shape shape_;
  const at::TensorOptions options_;
  const any_buffer buffer_;  // the lane's
};

// --- KvScratch -------------------------------------------------------------------------------------------------------

class kv_scratch {
 public:
  kv_scratch(std::shared_ptr<lane> of, std::int64_t row_elements, const holdfast::over_read& over_read,
             at::ScalarType dtype, bool resident)
      : lane_(std::move(of)),
        row_elements_(row_elements),
        options_(at::TensorOptions().dtype(dtype).device(lane_->device)),
        rows_(make(lane_->shared, row_elements, over_read, dtype, resident)) {}
  kv_scratch(const kv_scratch&) = delete;
  kv_scratch& operator=(const kv_scratch&) = delete;
  ~kv_scratch() {  // what it lets go of may be in use by a tensor, which another thread ends
    const auto lock = locked(lane_->mutex);
    rows_.reset();
  }

  at::Tensor acquire(std::int64_t rows, bool fill_tail) {
    const cudaStream_t stream = lane_->stream();
    auto lock = locked(lane_->mutex);
    return std::visit(
        [&](auto& scratch) {
          auto handle = unlocked_if(may_allocate(scratch, rows), [&] {
            return fill_tail ? scratch.acquire(stream, rows) : scratch.acquire_unfilled(stream, rows);
          });
          const std::int64_t sizes[] = {rows, row_elements_};
          return tensor_of(lane_, std::move(handle), sizes, options_, lock);
        },
        *rows_);
  }

  void reserve(std::int64_t rows) {
    const auto lock = locked(lane_->mutex);
    std::visit([&](auto& scratch) { scratch.reserve(rows); }, *rows_);
  }

 private:
  using per_call = holdfast::tail_padded_allocator<std::byte>;
  using anchored = holdfast::anchored_scratch<std::byte>;

  static std::variant<per_call, anchored> make(const holdfast::lane<cuda_device>& shared, std::int64_t row_elements,
                                               const holdfast::over_read& over_read, at::ScalarType dtype,
                                               bool resident) {
    check_dtype(dtype);
    const std::int64_t row_bytes = row_elements * static_cast<std::int64_t>(c10::elementSize(dtype));
    holdfast::scratch_options options{.row_elements = row_bytes, .over_read = over_read};
    if (!resident) {
      return per_call{shared, options};
    }
    // Rows are counted from the end: row 0 is aligned as a row is long.
    options.alignment = static_cast<std::size_t>(std::clamp<std::int64_t>(row_bytes & -row_bytes, 1, 256));
    return anchored{shared, options};
  }

  static bool may_allocate(const anchored& scratch, std::int64_t rows) {
    return rows > scratch.capacity();  // 0 where it is not anchored
  }
  static bool may_allocate(const per_call&, std::int64_t) { return true; }

  const std::shared_ptr<lane> lane_;
  const std::int64_t row_elements_;
  const at::TensorOptions options_;
  std::optional<std::variant<per_call, anchored>> rows_;  // empty in the destructor
};

// --- operators -------------------------------------------------------------------------------------------------------

/// What `stream` captures owns `tensor`'s memory from now on. False: that is not ours, or `stream` captures nothing.
bool pin_on(cudaStream_t stream, const at::Tensor& tensor) {
  const tenure* const ours = tenure::of(tensor);
  return ours != nullptr && ours->pin(stream);
}

cudaStream_t stream_of(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

/// The current stream of the operator's device, with all of its tensors pinned on it.
template <class... Tensors>
cudaStream_t stream_for(const at::Tensor& first, const Tensors&... others) {
  const cudaStream_t stream = stream_of(first);
  pin_on(stream, first);
  (pin_on(stream, others), ...);
  return stream;
}

void check_plain(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& other) {
  TORCH_CHECK(tensor.is_cuda() && tensor.device() == other.device(), op, ": ", name,
              " must be on the CUDA device of the others, not on ", tensor.device());
  TORCH_CHECK(!(tensor.requires_grad() && c10::GradMode::is_enabled()), op, ": ", name,
              " requires a gradient, and there is none: holdfast is for inference; use torch.no_grad()");
}

void check_rows(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& other) {
  check_plain(op, name, tensor, other);
  check_dtype(tensor.scalar_type());
  TORCH_CHECK(tensor.dim() == 3 && tensor.scalar_type() == other.scalar_type(), op, ": ", name,
              " must be [rows, heads, head_dim] of the other's dtype, ", other.scalar_type(), "; it is ",
              tensor.scalar_type(), " ", tensor.sizes());
}

/// The first `heads` of each row.
template <class Bits>
rows3<Bits> rows_of(const at::Tensor& tensor, std::int64_t heads) {
  void* const data = const_cast<void*>(tensor.const_data_ptr());
  return holdfast::make_strided_view<Bits, 3>(static_cast<Bits*>(data), {tensor.size(0), heads, tensor.size(2)},
                                              {tensor.stride(0), tensor.stride(1), tensor.stride(2)});
}

/// `out` may have more heads than `q`, which are not touched.
void pad_queries_op(const at::Tensor& q, const at::Tensor& out) {
  check_rows("pad_queries", "q", q, out);
  check_rows("pad_queries", "out", out, q);
  const std::int64_t heads = q.size(1);
  TORCH_CHECK(heads <= out.size(1), "pad_queries: ", heads, " heads into ", out.size(1));
  const cudaStream_t stream = stream_for(q, out);
  if (q.element_size() == 2) {
    pad_queries(stream, rows_of<const std::uint16_t>(q, heads), rows_of<std::uint16_t>(out, heads));
  } else {
    pad_queries(stream, rows_of<const std::uint8_t>(q, heads), rows_of<std::uint8_t>(out, heads));
  }
}

void unpad_output_op(const at::Tensor& padded, const at::Tensor& out) {
  check_rows("unpad_output", "padded", padded, out);
  check_rows("unpad_output", "out", out, padded);
  const cudaStream_t stream = stream_for(padded, out);
  if (out.element_size() == 2) {
    unpad_output(stream, rows_of<const std::uint16_t>(padded, padded.size(1)),
                 rows_of<std::uint16_t>(out, out.size(1)));
  } else {
    unpad_output(stream, rows_of<const std::uint8_t>(padded, padded.size(1)), rows_of<std::uint8_t>(out, out.size(1)));
  }
}

/// [rows, bytes] or [pages, rows of each, bytes].
holdfast::row_pool pool_of(const char* name, const at::Tensor& tensor, std::int64_t row_bytes) {
  TORCH_CHECK((tensor.dim() == 2 || tensor.dim() == 3) && tensor.element_size() == 1 && tensor.size(-1) == row_bytes &&
                  tensor.stride(-1) == 1,
              "gather_nvfp4: ", name, " must be bytes, [rows, ", row_bytes, "] or [pages, page_rows, ", row_bytes,
              "], packed in the last dimension; it is ", tensor.scalar_type(), " ", tensor.sizes());
  holdfast::row_pool pool{
      .data = tensor.const_data_ptr(), .rows = tensor.size(0), .row_stride_bytes = tensor.stride(-2)};
  if (tensor.dim() == 3) {
    pool.page_rows = tensor.size(1);
    pool.page_stride_bytes = tensor.stride(0);
    pool.rows *= pool.page_rows;
  }
  return pool;
}

void gather_nvfp4_op(const at::Tensor& data, const at::Tensor& scales, double global_scale, const at::Tensor& indices,
                     const at::Tensor& out, std::int64_t tail_rows) {
  constexpr const char* op = "gather_nvfp4";
  check_plain(op, "data", data, out);
  check_plain(op, "scales", scales, out);
  check_plain(op, "indices", indices, out);
  check_plain(op, "out", out, out);
  TORCH_CHECK((indices.dim() == 1 || indices.dim() == 2) && indices.scalar_type() == at::kInt, op,
              ": indices must be int32, [pairs] or [rows, topk]");
  TORCH_CHECK(out.dim() == 2 && out.size(0) == indices.numel() && out.size(1) == holdfast::fp8_row::elements &&
                  (out.scalar_type() == at::kFloat8_e4m3fn || out.scalar_type() == at::kByte),
              op, ": out must be float8_e4m3fn or uint8, [", indices.numel(), ", 512]; it is ", out.scalar_type(), " ",
              out.sizes());
  const cudaStream_t stream = stream_for(data, scales, indices, out);
  if (tail_rows != 0) {
    const tenure* const ours = tenure::of(out);
    const bool to_the_end =
        out.is_contiguous() && out.storage_offset() + out.numel() == static_cast<std::int64_t>(out.storage().nbytes());
    TORCH_CHECK(tail_rows > 0 && ours != nullptr && to_the_end && tail_rows <= ours->writable_tail_rows(), op,
                ": a tail of ", tail_rows,
                " rows can only be written behind a whole tensor of KvScratch(resident=False)");
  }
  const bool one_row = indices.dim() == 1;
  gather_nvfp4(
      stream,
      {.data = pool_of("data", data, holdfast::nvfp4_row<>::data_bytes),
       .scales = pool_of("scales", scales, holdfast::nvfp4_row<>::scale_bytes),
       .global_scale = static_cast<float>(global_scale)},
      holdfast::make_strided_view<const std::int32_t, 2>(static_cast<const std::int32_t*>(indices.const_data_ptr()),
                                                         {one_row ? 1 : indices.size(0), indices.size(-1)},
                                                         {one_row ? 0 : indices.stride(0), indices.stride(-1)}),
      holdfast::make_strided_view<std::byte, 2>(static_cast<std::byte*>(out.mutable_data_ptr()),
                                                {out.size(0), out.size(1)}, {out.stride(0), out.stride(1)}),
      tail_rows);
}

}  // namespace
}  // namespace holdfast_torch

TORCH_LIBRARY(holdfast, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("pad_queries(Tensor q, Tensor(a!) out) -> ()", tags);
  m.def("unpad_output(Tensor padded, Tensor(a!) out) -> ()", tags);
  m.def(
      "gather_nvfp4(Tensor data, Tensor scales, float global_scale, Tensor indices, Tensor(a!) out, int tail_rows=0) "
      "-> ()",
      tags);
}

TORCH_LIBRARY_IMPL(holdfast, CUDA, m) {
  m.impl("pad_queries", &holdfast_torch::pad_queries_op);
  m.impl("unpad_output", &holdfast_torch::unpad_output_op);
  m.impl("gather_nvfp4", &holdfast_torch::gather_nvfp4_op);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace holdfast_torch;  // NOLINT(google-build-using-namespace)
  using no_gil = py::call_guard<py::gil_scoped_release>;

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (const holdfast::out_of_memory& e) {
      py::set_error(py::module_::import("torch").attr("OutOfMemoryError"), e.what());
    } catch (const c10::TypeError& e) {
      py::set_error(PyExc_TypeError, e.what_without_backtrace());
    } catch (const c10::ValueError& e) {
      py::set_error(PyExc_ValueError, e.what_without_backtrace());
    } catch (const c10::Error& e) {
      py::set_error(PyExc_RuntimeError, e.what_without_backtrace());
    }
  });

  py::class_<holdfast::over_read>(m, "OverRead")
      .def_static("rows_beyond", &holdfast::over_read::rows_beyond)
      .def_static("to_tile_end", &holdfast::over_read::to_tile_end)
      .def_static("at_least_rows", &holdfast::over_read::at_least_rows);

  py::class_<lane, std::shared_ptr<lane>>(m, "Lane")
      .def(py::init<int, const std::string&>(), py::arg("device"), py::arg("memory"), no_gil{})
      .def(
          "reserve_scratch",
          [](lane& of, std::size_t bytes) {
            const auto lock = locked(of.mutex);
            of.shared.reserve_scratch(bytes);
          },
          no_gil{})
      .def_property_readonly("scratch_bytes", [](const lane& of) { return of.shared.scratch_bytes(); });

  py::class_<padded_query>(m, "PaddedQuery")
      .def(py::init<std::shared_ptr<lane>, std::int64_t, std::int64_t, std::int64_t, at::ScalarType>())
      .def("acquire", &padded_query::acquire, py::arg("rows"))
      .def("reserve", &padded_query::reserve, py::arg("rows"), no_gil{})
      .def("pin", &padded_query::pin)
      .def("restore_padding", &padded_query::restore_padding, no_gil{})
      .def("wait_unpinned", &padded_query::wait_unpinned, py::arg("seconds"), no_gil{})
      .def_property_readonly("heads", [](const padded_query& q) { return q.shape().heads; })
      .def_property_readonly("padded_heads", [](const padded_query& q) { return q.shape().padded_heads; })
      .def_property_readonly("head_dim", [](const padded_query& q) { return q.shape().head_dim; })
      .def_property_readonly("capacity",
                             [](const padded_query& q) { return q.ask([](auto& b) { return b.capacity(); }); })
      .def_property_readonly("generation",
                             [](const padded_query& q) { return q.ask([](auto& b) { return b.generation(); }); })
      .def_property_readonly("pinned_bytes",
                             [](const padded_query& q) { return q.ask([](auto& b) { return b.pinned_bytes(); }); })
      .def_property_readonly("retired_bytes",
                             [](const padded_query& q) { return q.ask([](auto& b) { return b.retired_bytes(); }); })
      .def_property_readonly("pending_bytes",
                             [](const padded_query& q) { return q.ask([](auto& b) { return b.pending_bytes(); }); });

  py::class_<kv_scratch>(m, "KvScratch")
      .def(py::init<std::shared_ptr<lane>, std::int64_t, const holdfast::over_read&, at::ScalarType, bool>())
      .def("acquire", &kv_scratch::acquire, py::arg("rows"), py::arg("fill_tail") = true)
      .def("reserve", &kv_scratch::reserve, py::arg("rows"), no_gil{});

  m.def(
      "pin", [](const at::Tensor& tensor) { return tensor.is_cuda() && pin_on(stream_of(tensor), tensor); },
      py::arg("tensor"));
  m.def(
      "collect", [](int device) { return holdfast::collect(cuda_device{device}); }, py::arg("device") = 0, no_gil{});
  m.def(
      "kept_bytes",
      [](int device) {
        const holdfast::byte_counts& counts = holdfast::counts(cuda_device{device});
        return py::dict(py::arg("pinned") = counts.pinned_bytes(), py::arg("retired") = counts.retired_bytes(),
                        py::arg("pending") = counts.pending_bytes());
      },
      py::arg("device") = 0);
}
