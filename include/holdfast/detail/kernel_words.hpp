// Small pieces of rows: loads whose width the address allows, of memory that the compiler does not know to be global.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/detail/kernel_packet.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// Bytes as they lie in memory, the first one lowest.
template <std::size_t Count>
struct words {
  std::uint32_t word[Count];
};

/// Of a pool, whose address the compiler does not know to be global memory. What is read twice stays in L1.
template <class T>
HOLDFAST_HOST_DEVICE inline std::uint32_t load_narrow(const std::byte* from) {
#if defined(__CUDA_ARCH__)
  std::uint32_t loaded;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(loaded) : "l"(__cvta_generic_to_global(from)));
  } else {
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(loaded) : "l"(__cvta_generic_to_global(from)));
  }
  return loaded;
#else
  return load_packet<T>(from);
#endif
}

/// `Bytes` bytes (1, 2, 4, 8 or 16) at `from`, a multiple of `Width`, in loads of `Width` bytes or fewer.
template <std::size_t Bytes, std::size_t Width>
HOLDFAST_HOST_DEVICE inline words<(Bytes + 3) / 4> load_words(const std::byte* from) {
  words<(Bytes + 3) / 4> loaded{};
#if defined(__CUDA_ARCH__)
  if constexpr (Width > Bytes) {
    loaded = load_words<Bytes, Bytes>(from);
  } else if constexpr (Width == 16) {
    const packet16 packet = load_packet<packet16>(from);
    loaded = {{packet.word[0], packet.word[1], packet.word[2], packet.word[3]}};
  } else if constexpr (Width == 8) {
#pragma unroll
    for (std::size_t i = 0; i < Bytes / 8; ++i)  // read once: kept out of L1
      asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                   : "=r"(loaded.word[2 * i]), "=r"(loaded.word[2 * i + 1])
                   : "l"(__cvta_generic_to_global(from + 8 * i)));
  } else if constexpr (Width == 4) {
#pragma unroll
    for (std::size_t i = 0; i < Bytes / 4; ++i) loaded.word[i] = load_narrow<std::uint32_t>(from + 4 * i);
  } else {
#pragma unroll
    for (std::size_t i = 0; i < Bytes; ++i) loaded.word[i / 4] |= load_narrow<std::uint8_t>(from + i) << i % 4 * 8;
  }
#else
  std::memcpy(loaded.word, from, Bytes);
#endif
  return loaded;
}

}  // namespace holdfast::HOLDFAST_ABI::detail
