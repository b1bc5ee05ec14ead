// What every launch refuses, shown by one of each way that they are launched.
#include <holdfast/holdfast.hpp>

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace {

namespace host = holdfast::host;

TEST(HostLaunch, OnTheLegacyStreamWhileABlockingOneCapturesIsRefusedAndBreaksNothing) {
  alignas(16) static std::array<std::byte, 4096> from{}, to{};
  static std::array<std::int32_t, 4> indices{};
  const host::stream_ref legacy = host::legacy_stream();
  const host::stream blocking{{}, host::stream_kind::blocking};
  blocking.begin_capture();
  const auto packets = [&] {
    holdfast::pad_queries(legacy, holdfast::view<std::byte, 3>(from.data(), 1, 1, 8),
                          holdfast::view<std::byte, 3>(to.data(), 1, 1, 8));
  };
  const auto gather = [&] {
    holdfast::gather_rows(legacy, holdfast::fp8_rows{.data = {.data = from.data(), .rows = 8}},
                          holdfast::view<const std::int32_t, 1>(indices.data(), 4),
                          holdfast::view<std::byte, 2>(to.data(), 4, 512));
  };
  EXPECT_THROW(packets(), holdfast::logic_error);
  EXPECT_THROW(gather(), holdfast::logic_error);
  EXPECT_NO_THROW(static_cast<void>(blocking.end_capture()));
}

}  // namespace
