// Vectors of bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace gather_test {

using byte_vector = std::vector<std::byte>;

inline byte_vector random_bytes(std::size_t count, std::uint64_t seed) {
  byte_vector made(count);
  std::mt19937_64 generator(seed);
  for (std::size_t i = 0; i < count; i += 8) {
    const std::uint64_t word = generator();
    std::memcpy(made.data() + i, &word, std::min<std::size_t>(8, count - i));
  }
  return made;
}

}  // namespace gather_test
