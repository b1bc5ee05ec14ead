// expect: FP8 rows have 512 elements; gather rows of this format as bf16 or fp16
// 576 values, the last 64 of them bf16, are no FP8 row.
#include <holdfast/kernel/gather_rows.hpp>

void f(holdfast::host::stream_ref stream, const holdfast::flashmla_v32_rows& pool, holdfast::view<const int, 1> indices,
       holdfast::view<std::byte, 2> out) {
  holdfast::gather_rows(stream, pool, indices, out);
}
