// What producers of query rows share: filling rows of a buffer, acquired for the purpose.
#pragma once

#include <holdfast/detail/kernel_copy.hpp>
#include <holdfast/error.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/version.hpp>

#include <array>
#include <cstdint>
#include <string>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Acquires rows for queries of these extents, [rows, heads, head_dim], and has `fill` write them.
template <class T, class Device, class Fill>
[[nodiscard]] query_rows<T, Device> fill_rows_of(padded_query_buffer<T, Device>& buffer, const char* kernel,
                                                 typename Device::stream_type stream,
                                                 const std::array<std::int64_t, 3>& extents, Fill&& fill) {
  const query_shape& shape = buffer.shape();
  if (extents[1] != shape.heads || extents[2] != shape.head_dim) {
    throw logic_error{std::string{kernel} + ": queries of " + to_text(extents) + ", but the buffer holds " +
                      std::to_string(shape.heads) + " heads of " + std::to_string(shape.head_dim)};
  }
  query_rows<T, Device> rows = buffer.acquire(stream, extents[0]);
  fill(rows);
  return rows;
}

}  // namespace holdfast::HOLDFAST_ABI::detail
