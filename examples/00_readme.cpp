// SPDX-License-Identifier: Apache-2.0
// The program of README.md's first screen: what is between the marks is shown there, and a test compares the two.
// [readme]
#include <holdfast/holdfast.hpp>

#include <iostream>
#include <numeric>
#include <vector>

int main() {
  using device = holdfast::host_device;  // needs no GPU; on one: holdfast::cuda_device
  holdfast::lane decode{holdfast::default_resource(device{0})};
  auto& q_pad = decode.padded_queries<float>({.heads = 16, .padded_heads = 64, .head_dim = 512});

  const std::vector<float> queries(64 * 16 * 512, 1.0f);
  float sum = 0;
  const auto step = [&](device::stream_type stream, std::int64_t rows) {
    const auto q = q_pad.acquire(stream, rows);  // [rows, 64, 512], padding zero; capturing or not
    holdfast::pad_queries(stream, holdfast::view<const float, 3>{queries.data(), rows, 16, 512}, q.heads_view());
    stream.run([&sum, all = q.view()] {  // the "attention" reads all 64 heads
      sum = std::accumulate(all.data_handle(), all.data_handle() + all.size(), 0.0f);
    });
  };

  const holdfast::host::stream stream;
  stream.begin_capture();
  step(stream, 8);
  const auto graph = stream.end_capture().instantiate();

  step(stream, 64);  // more rows than there are: the buffer grows under the graph, where it is
  graph.launch(stream);
  device::synchronize(stream);
  std::cout << "8 rows replayed: sum " << sum << "; grown to " << q_pad.capacity() << " rows, moved "
            << q_pad.generation() - 1 << " times\n";
  return sum == 8 * 16 * 512 ? 0 : 1;
}
// [/readme]
