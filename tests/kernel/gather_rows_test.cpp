// gather_rows' behaviours on the host device. gather_rows_test.cu runs the same on a GPU.
#include "support/gather_cases.hpp"
#include "support/kernel_host_world.hpp"

#include <sys/mman.h>
#include <unistd.h>

namespace gather_test {

using kernel_test::host_world;

INSTANTIATE_TYPED_TEST_SUITE_P(Host, GatherOf, every_subject<host_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, GatherRows, ::testing::Types<host_world>);

TEST(HostGatherRows, ReadsNothingBesideThePool) {
  // whole pages between unmapped ones: the row before and the row behind are a SIGSEGV
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto* start = static_cast<std::byte*>(::mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(start), MAP_FAILED);
  ASSERT_EQ(::mprotect(start + page, page, PROT_READ | PROT_WRITE), 0);
  const auto rows = static_cast<std::int64_t>(page) / 512;
  host_world world;
  const auto bytes = random_bytes(page, 3);
  std::memcpy(start + page, bytes.data(), page);
  const pool_of<host_world, fp8_format> should(world, bytes, {});
  const std::vector<std::int32_t> indices{-1, 0, static_cast<std::int32_t>(rows - 1), static_cast<std::int32_t>(rows)};
  output<host_world> out(world, 4, 0, poisons[0]);
  holdfast::gather_rows(world.stream(), holdfast::fp8_rows{.data = {.data = start + page, .rows = rows}},
                        flat(indices.data(), 4), out.view());
  world.synchronize();
  EXPECT_TRUE(out.holds(should, named_by(indices, rows)));
  ::munmap(start, 3 * page);
}

TEST(HostGatherRows, RowsAreStagedWhereAllAddressesAreMultiplesOf16) {
  using holdfast::row_pool;
  alignas(256) static std::byte memory[256];
  const auto staged = [](const auto& source, std::int64_t pairs) {
    const std::vector<std::int32_t> indices(static_cast<std::size_t>(pairs));
    const holdfast::view<std::byte, 2> out(memory, pairs, 512);  // nothing runs
    bool is = false;
    holdfast::detail::with_gather(source, flat(indices.data(), pairs), out, {},
                                  [&]<std::int32_t Rows>(const auto& gather) { is = gather.staged; });
    return is;
  };
  const auto plain = [&](const row_pool& data, const row_pool& scales, std::int64_t pairs = many_pairs) {
    return staged(holdfast::nvfp4_rows<>{.data = data, .scales = scales}, pairs);
  };
  const row_pool packed{.data = memory, .rows = 100};
  EXPECT_TRUE(plain(packed, packed));
  EXPECT_TRUE(plain(packed, {.data = memory + 16, .rows = 100, .row_stride_bytes = 48}));
  EXPECT_TRUE(plain({.data = memory, .rows = 100, .page_rows = 8, .page_stride_bytes = 8 * 256 + 16},
                    {.data = memory, .rows = 100, .page_rows = 9}));
  EXPECT_FALSE(plain(packed, packed, holdfast::detail::most_rows_of_small_gathers));
  for (const std::int64_t off : {1, 4, 8}) {
    const row_pool shifted{.data = memory + off, .rows = 100};
    const row_pool apart{.data = memory, .rows = 100, .row_stride_bytes = 256 + off};
    const row_pool padded{.data = memory, .rows = 100, .page_rows = 8, .page_stride_bytes = 8 * 256 + off};
    for (const auto& pool : {shifted, apart, padded}) {
      EXPECT_FALSE(plain(pool, packed)) << off;
      EXPECT_FALSE(plain(packed, pool)) << off;
    }
  }
  EXPECT_TRUE(staged(holdfast::fp8_rows{.data = packed}, 1));
  EXPECT_FALSE(staged(holdfast::fp8_rows{.data = {.data = memory + 8, .rows = 100}}, many_pairs));
  EXPECT_FALSE(staged(holdfast::nvfp4_rows<64>{.data = packed, .scales = packed}, many_pairs));
}

TEST(HostGatherRows, StagedOnesBeyondOneWave) {
  host_world world;
  expect_rows_beyond_one_wave(world);
}

}  // namespace gather_test
