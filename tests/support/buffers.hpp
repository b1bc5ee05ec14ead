// The fixture of buffer tests: a stream, a counting resource whose fresh memory is poisoned, and ways to look at rows.
#pragma once

#include "support/cuda_driver.hpp"
#include "support/devices.hpp"
#include "support/host_driver.hpp"
#include "support/resources.hpp"

#include <holdfast/padded_query_buffer.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

namespace support {

inline constexpr holdfast::query_shape small_shape{.heads = 3, .padded_heads = 8, .head_dim = 16};

/// Whether the padding heads of `rows` rows at `data` are all zero bytes. Waits for no stream.
template <class Device, class T>
bool padding_is_zero(const T* data, std::int64_t rows, const holdfast::query_shape& shape) {
  const auto row = static_cast<std::size_t>(shape.padded_heads * shape.head_dim);
  const auto real = static_cast<std::size_t>(shape.heads * shape.head_dim);
  const std::vector<T> all = driver<Device>::template read<T>(data, static_cast<std::size_t>(rows) * row);
  const std::vector<T> zeros(row - real);
  for (std::size_t i = 0; i < all.size(); i += row) {
    if (std::memcmp(all.data() + i + real, zeros.data(), zeros.size() * sizeof(T)) != 0) {
      return false;
    }
  }
  return true;
}

/// A step of an engine: real heads of `rows` become `value`, in the order of `stream`.
template <class Device, class T>
void write_heads(typename Device::stream_type stream, const holdfast::query_rows<T, Device>& rows, std::byte value) {
  const auto heads = rows.heads_view();
  const auto pitch = static_cast<std::size_t>(heads.stride(0)) * sizeof(T);
  Device::fill_rows(stream, heads.data_handle(), pitch, value,
                    static_cast<std::size_t>(heads.extent(1) * heads.extent(2)) * sizeof(T),
                    static_cast<std::size_t>(heads.extent(0)));
}

template <class Device>
class buffer_test : public device_test<Device> {
 protected:
  using drive = driver<Device>;

  void SetUp() override {
    device_test<Device>::SetUp();
    if (!this->IsSkipped()) {
      stream_.emplace(drive::make_stream());
      resource.poison(std::byte{0x7F});  // a NaN of FP8 E4M3, and of nothing zero
    }
  }

  template <class T = float>
  holdfast::padded_query_buffer<T, Device> make(const holdfast::query_shape& shape = small_shape,
                                                holdfast::buffer_options options = {}) {
    return {resource, shape, std::move(options)};
  }

  /// Waits until every block that nobody owns is back in its resource.
  void TearDown() override {
    if (stream_) {
      drive::synchronize(stream_->get());
      EXPECT_TRUE(eventually([] {
        holdfast::collect(Device{});
        return holdfast::counts(Device{}).pending_bytes() == 0;
      }));
    }
  }

  counting_resource<Device> resource{};
  struct {
    std::optional<typename drive::stream>* owner;
    [[nodiscard]] typename Device::stream_type get() const { return (*owner)->get(); }
  } stream{&stream_};

 private:
  std::optional<typename drive::stream> stream_;
};

}  // namespace support
