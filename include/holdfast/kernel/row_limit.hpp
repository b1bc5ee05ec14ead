// row_limit: how many rows of a launch count, known to the device alone.
//
//   holdfast::concat_pad(stream, nope, rope, q.heads_view(), {.rows = live_rows});   // an int32 or int64 on the device
//
// A graph is captured for a bucket of rows; how many of them are live differs from replay to replay. The number is read
// when the kernel runs: below 0 is none, beyond the rows of the views all. Kernels that write make rows at and behind the
// limit zeros, and read nothing for them, so that consumers of the whole bucket find no stale NaN.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/version.hpp>

#include <cstddef>
#include <cstdint>

namespace holdfast::inline HOLDFAST_ABI {

/// An int32 or int64 in device memory, or none: then all rows count.
class row_limit {
 public:
  constexpr row_limit() noexcept = default;
  constexpr row_limit(std::nullptr_t) noexcept {}
  constexpr row_limit(const std::int32_t* at) noexcept : narrow_(at) {}
  constexpr row_limit(const std::int64_t* at) noexcept : wide_(at) {}

  /// How many of `rows` rows count. To be called where the number can be read.
  [[nodiscard]] HOLDFAST_HOST_DEVICE std::int64_t of(std::int64_t rows) const {
    if (narrow_ == nullptr && wide_ == nullptr) return rows;
    const std::int64_t limit = narrow_ != nullptr ? *narrow_ : *wide_;
    return limit < 0 ? 0 : limit < rows ? limit : rows;
  }

 private:
  const std::int32_t* narrow_ = nullptr;
  const std::int64_t* wide_ = nullptr;
};

}  // namespace holdfast::HOLDFAST_ABI
