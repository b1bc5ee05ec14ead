// expect: use of deleted function|call to implicitly-deleted copy constructor
// A handle is one use of one stream: it moves.
#include <holdfast/device/host.hpp>
#include <holdfast/padded_query_buffer.hpp>

holdfast::query_rows<float, holdfast::host_device> f(const holdfast::query_rows<float, holdfast::host_device>& rows) {
  return rows;
}
