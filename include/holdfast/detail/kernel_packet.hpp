// Packets: what one thread moves at once, 16 bytes down to one, and the loads and stores of them.
//
// Addresses are multiples of the packet's size. `load_packet` and `store_packet` behave alike on both devices; what the
// device adds are cache hints.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// The widest packet that every architecture moves in one instruction.
struct alignas(16) packet16 {
  std::uint32_t word[4];
};

/// Bytes that this kernel reads once, and that nobody writes while it runs.
template <class Packet>
HOLDFAST_HOST_DEVICE inline Packet load_packet(const std::byte* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Packet) == 16) {
    // Read once: keep it out of L1. Not `.nc`, which would promise that the bytes were final before this grid began;
    // with a programmatic launch they become final while it waits. Narrower packets come from strided views, whose
    // neighbours share sectors: those stay in L1.
    Packet packet;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(packet.word[0]), "=r"(packet.word[1]), "=r"(packet.word[2]), "=r"(packet.word[3])
                 : "l"(__cvta_generic_to_global(from)));
    return packet;
  } else {
    return *reinterpret_cast<const Packet*>(from);
  }
#else
  Packet packet;
  std::memcpy(&packet, from, sizeof packet);
  return packet;
#endif
}

/// Bytes that a consumer reads next: they stay in L2.
template <class Packet>
HOLDFAST_HOST_DEVICE inline void store_packet(std::byte* to, const Packet& packet) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<Packet*>(to) = packet;
#else
  std::memcpy(to, &packet, sizeof packet);
#endif
}

}  // namespace holdfast::HOLDFAST_ABI::detail
