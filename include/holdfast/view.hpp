// Views: what consumers and producers see of a block. Plain aliases of cuda::std::mdspan; they own nothing and pin
// nothing.
//
//   holdfast::view<const T, 3>      packed [rows, heads, head_dim]
//   holdfast::strided_view<T, 3>    any strides, in elements
//
// Extents and strides are 64-bit, so that no offset is ever formed in 32 bits.
#pragma once

#include <holdfast/version.hpp>

#include <cuda/std/mdspan>

#include <cstddef>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

template <std::size_t Rank>
using extents = cuda::std::dextents<std::int64_t, Rank>;

/// A packed (row-major) view of `Rank` dimensions.
template <class T, std::size_t Rank>
using view = cuda::std::mdspan<T, extents<Rank>, cuda::std::layout_right>;

/// A view with a stride, in elements, for each of its `Rank` dimensions.
template <class T, std::size_t Rank>
using strided_view = cuda::std::mdspan<T, extents<Rank>, cuda::std::layout_stride>;

/// A strided view from a pointer, extents and strides (elements).
template <class T, std::size_t Rank>
[[nodiscard]] constexpr strided_view<T, Rank> make_strided_view(T* data, const std::int64_t (&shape)[Rank],
                                                                const std::int64_t (&strides)[Rank]) {
  cuda::std::array<std::int64_t, Rank> shape_array{}, stride_array{};
  for (std::size_t i = 0; i < Rank; ++i) {
    shape_array[i] = shape[i];
    stride_array[i] = strides[i];
  }
  return {data, {extents<Rank>{shape_array}, stride_array}};
}

}  // namespace holdfast::HOLDFAST_ABI
