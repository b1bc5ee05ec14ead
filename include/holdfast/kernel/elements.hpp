// Which element types kernels that compute take for what: a framework's own may be added by specialising these.
//
//   template <> inline constexpr bool holdfast::holds_bf16<c10::BFloat16> = true;
//
// Not here: kernels that only move bytes (pad_queries, concat_pad), which take any type.
#pragma once

#include <holdfast/version.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <concepts>
#include <cstddef>

namespace holdfast::inline HOLDFAST_ABI {

/// e4m3, or plain bytes.
template <class T>
inline constexpr bool holds_e4m3 =
    std::same_as<T, __nv_fp8_e4m3> || std::same_as<T, std::byte> || std::same_as<T, unsigned char>;
template <class T>
inline constexpr bool holds_bf16 = std::same_as<T, __nv_bfloat16>;
template <class T>
inline constexpr bool holds_fp16 = std::same_as<T, __half>;

}  // namespace holdfast::HOLDFAST_ABI
