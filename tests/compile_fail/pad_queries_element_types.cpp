// expect: both views must have the same element type
// A per-head fp32 vector was once read as bf16: element types are part of every view's type.
#include <holdfast/kernel/pad_queries.hpp>

void f(holdfast::host::stream_ref stream, holdfast::view<const float, 3> in, holdfast::strided_view<short, 3> out) {
  holdfast::pad_queries(stream, in, out);
}
