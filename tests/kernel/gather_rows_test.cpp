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

}  // namespace gather_test
