// expect: the view written to must not be const
// What consumers are given cannot be written to.
#include <holdfast/kernel/pad_queries.hpp>

void f(holdfast::host::stream_ref stream, holdfast::view<const float, 3> in,
       const holdfast::query_rows<float, holdfast::host_device>& rows) {
  holdfast::pad_queries(stream, in, rows.view());
}
