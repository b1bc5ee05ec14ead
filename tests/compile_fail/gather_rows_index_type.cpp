// expect: indices must be 32-bit or 64-bit signed integers
// Unsigned indices have no -1.
#include <holdfast/kernel/gather_rows.hpp>

void f(holdfast::host::stream_ref stream, const holdfast::fp8_rows& pool, holdfast::view<const unsigned, 1> indices,
       holdfast::view<std::byte, 2> out) {
  holdfast::gather_rows(stream, pool, indices, out);
}
