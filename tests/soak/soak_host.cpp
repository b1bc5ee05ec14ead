#include "soak.hpp"

namespace {

struct world {
  using device_type = holdfast::host_device;
  using stream = holdfast::host::stream;
  static constexpr std::size_t most_bytes = 4 << 20, limit_bytes = 128 << 20;

  [[nodiscard]] static device_type device() { return {}; }
  void fill(holdfast::host::stream_ref on, std::uint64_t* words, std::size_t count, std::uint64_t pattern) {
    on.run([=] {
      for (std::size_t i = 0; i < count; ++i) words[i] = soak::word(pattern, i);
    });
  }
  void verify(holdfast::host::stream_ref on, const std::uint64_t* words, std::size_t count, std::uint64_t pattern) {
    on.run([=, this] {
      for (std::size_t i = 0; i < count; ++i) wrong_ += words[i] == soak::word(pattern, i) ? 0 : 1;
    });
  }
  [[nodiscard]] std::uint64_t wrong() const {
    holdfast::host::run_pending(device());  // what was queued on streams that are gone, too
    return wrong_;
  }

 private:
  holdfast::host::seeded_schedule schedule_{1};  // streams overtake each other
  std::atomic<std::uint64_t> wrong_{0};
};

}  // namespace

int main(int argc, char** argv) { return soak::main<world>(argc, argv); }
