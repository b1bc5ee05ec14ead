// gather_rows of every format on the host device. gather_formats_test.cu runs the same on a GPU.
#include "support/gather_format_cases.hpp"
#include "support/kernel_host_world.hpp"

#include <holdfast/kernel/gather_selected.hpp>

namespace gather_test {

using kernel_test::host_world;

INSTANTIATE_TYPED_TEST_SUITE_P(Host, GatherFormat, every_format<host_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, GatherFormats, ::testing::Types<host_world>);

TEST(HostGatherFormats, RowsAreStagedWhereAllAddressesAreMultiplesOf16) {
  using holdfast::row_pool;
  alignas(256) static std::byte memory[256];
  const auto staged = [](const auto& source, std::int64_t elements, std::int64_t pairs = many_pairs) {
    const std::vector<std::int32_t> indices(static_cast<std::size_t>(pairs));
    const holdfast::view<__nv_bfloat16, 2> out(reinterpret_cast<__nv_bfloat16*>(memory), pairs, elements);
    bool is = false;  // nothing runs
    holdfast::detail::with_gather(source, flat(indices.data(), pairs), out, {},
                                  [&]<std::int32_t Rows>(const auto& gather) { is = gather.staged; });
    return is;
  };
  const auto v32 = [&](const row_pool& pool) { return staged(holdfast::flashmla_v32_rows{.data = pool}, 576); };
  const auto v4 = [&](const row_pool& pool) { return staged(holdfast::flashmla_v4_rows{.data = pool}, 512); };
  const auto v41 = [&](const row_pool& pool) { return staged(holdfast::flashmla_v41_rows{.data = pool}, 512); };
  const row_pool packed{.data = memory, .rows = 100};
  EXPECT_TRUE(v32(packed));
  EXPECT_TRUE(v32({.data = memory + 16, .rows = 100, .page_rows = 3}));
  EXPECT_FALSE(v32({.data = memory + 8, .rows = 100}));
  EXPECT_FALSE(v32({.data = memory, .rows = 100, .row_stride_bytes = 664}));
  EXPECT_FALSE(staged(holdfast::flashmla_v32_rows{.data = packed}, 576, holdfast::detail::most_rows_of_small_gathers));
  for (const std::int64_t page_rows : {1, 3, 64}) {
    EXPECT_TRUE(v4({.data = memory, .rows = 100, .page_rows = page_rows}));
    EXPECT_TRUE(v41({.data = memory, .rows = 100, .page_rows = page_rows}));
  }
  EXPECT_FALSE(v4({.data = memory, .rows = 100, .page_rows = 64, .page_stride_bytes = 37440 + 8}));
  EXPECT_FALSE(v41({.data = memory + 4, .rows = 100, .page_rows = 64}));
  EXPECT_TRUE(staged(holdfast::nvfp4_rows<64>{.data = packed, .scales = {.data = memory + 4, .rows = 100}}, 512));
  EXPECT_FALSE(staged(holdfast::nvfp4_rows<64>{.data = packed, .scales = {.data = memory + 2, .rows = 100}}, 512));
  EXPECT_FALSE(staged(holdfast::nvfp4_rows<0>{.data = packed, .scales = {.data = memory + 4, .rows = 100}}, 512));
}

TEST(HostGatherFormats, SelectedRowsOfAnyFormat) {
  host_world world;
  const format_pool<host_world, v32_rows, __nv_bfloat16> pool(world, 37);
  const std::vector<std::int32_t> indices{30, 4, -1, 30, 37, 9};
  std::vector<std::int32_t> remap(6, 77);
  output<host_world> out(world, 5, 2, poisons[0], 1152, 1152);
  const auto bytes = holdfast::gather_selected_workspace_bytes(holdfast::host_device{}, 37, 5);
  const auto workspace = world.allocate(bytes);
  holdfast::gather_selected(world.stream(), pool.given(), flat(indices.data(), 6), out.view<__nv_bfloat16>(),
                            holdfast::view<std::int32_t, 1>(remap.data(), 6), {workspace.get(), bytes},
                            {.tail_rows = 2});
  world.synchronize();
  EXPECT_TRUE(out.holds(pool, {4, 9, 30, -1, -1}));
  EXPECT_EQ(remap, (std::vector<std::int32_t>{2, 0, -1, 2, -1, 1}));
}

}  // namespace gather_test
