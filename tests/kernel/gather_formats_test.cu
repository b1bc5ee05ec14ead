// gather_rows of every format on a GPU: what gather_formats_test.cpp runs on the host device, and the casts.
#include "support/gather_format_cases.hpp"
#include "support/kernel_cuda_world.cuh"

namespace gather_test {

using kernel_test::cuda_world;
using kernel_test::must;

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, GatherFormat, every_format<cuda_world>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, GatherFormats, ::testing::Types<cuda_world>);

class CudaGatherFormats : public WorldTest<cuda_world> {};

/// Device casts of fp32 bits that follow each other: bf16 in the lower half of a word, fp16 in the upper one.
__global__ void halves_kernel(std::uint32_t first, std::uint32_t* to) {
  const std::uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  const float value = __uint_as_float(first + at);
  to[at] = (holdfast::detail::bf16_of_floats(value, 0) & 0xffff) | holdfast::detail::fp16_of_floats(0, value);
}

TEST_F(CudaGatherFormats, CastsAgreeWithTheHostTwins) {
  // 2^16 neighbours from each of 2048 places: all exponents, NaN of both signs, every boundary of rounding and of range
  constexpr std::uint32_t count = 1 << 16;
  const auto memory = world().allocate(count * 4);
  std::vector<std::uint32_t> now(count);
  std::mt19937 random(3);
  for (std::uint32_t i = 0; i < 2048; ++i) {
    const std::uint32_t first =
        (i << 21) + (i % 2 == 0 ? 0 : static_cast<std::uint32_t>(random() & 0x1f0000)) - count / 2;
    halves_kernel<<<count / 256, 256, 0, world().stream()>>>(first, reinterpret_cast<std::uint32_t*>(memory.get()));
    must(cudaGetLastError());
    world().download(now.data(), memory.get(), count * 4);
    for (std::uint32_t k = 0; k < count; ++k) {
      ASSERT_EQ(now[k] & 0xffff, holdfast::detail::bf16_of_bits(first + k)) << std::hex << first + k;
      ASSERT_EQ(now[k] >> 16, holdfast::detail::fp16_of_bits(first + k)) << std::hex << first + k;
    }
  }
}

/// A row of 1 or 2 KiB is not staged: 1040 bytes, 520 bf16 values.
struct long_row {
  static constexpr std::int32_t elements = 520, data_bytes = 1040, scale_bytes = 0;
  using packet = holdfast::raw_bytes<16>;
  template <class Row>
  HOLDFAST_HOST_DEVICE packet load(const Row& row, std::int32_t at) const {
    return row.template data<16>(16 * at);
  }
  template <class Values>
  HOLDFAST_HOST_DEVICE void decode(const packet& from, Values& to) const {
    to.put_bf16(from);
  }
};

TEST_F(CudaGatherFormats, RowsTooLongForSharedMemoryAreGathered) {
  const auto bytes = random_bytes(61 * 1040, 1);
  const placed_pool<cuda_world> pool(world(), bytes, 1040, {});
  const auto values = random_indices<std::int32_t>(many_pairs, 61, 7);
  const device_array<cuda_world, std::int32_t> indices(world(), values);
  output<cuda_world> out(world(), many_pairs, 1, poisons[0], 1040, 1040);
  holdfast::gather_rows(world().stream(), holdfast::formatted_rows<long_row>{.data = pool.given()},
                        flat(indices.data(), many_pairs), out.view<__nv_bfloat16>(), {.tail_rows = 1});
  world().synchronize();
  struct as_they_are {
    const byte_vector& bytes;
    [[nodiscard]] byte_vector decoded(std::int64_t row) const {
      return {bytes.begin() + row * 1040, bytes.begin() + (row + 1) * 1040};
    }
  };
  EXPECT_TRUE(out.holds(as_they_are{bytes}, named_by(values, 61)));
}

}  // namespace gather_test
