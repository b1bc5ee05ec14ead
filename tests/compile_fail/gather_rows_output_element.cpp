// expect: a gather writes e4m3 values
// Raw 16-bit memory cannot be passed where a gather writes FP8.
#include <holdfast/kernel/gather_rows.hpp>

void f(holdfast::host::stream_ref stream, const holdfast::fp8_rows& pool, holdfast::view<const int, 1> indices,
       holdfast::view<unsigned short, 2> out) {
  holdfast::gather_rows(stream, pool, indices, out);
}
