// RMM both ways. Its resources also run the conformance suite, in this program.
#include "rmm_resources.hpp"
#include "support/mr_pool.hpp"
#include "support/resources.hpp"

#include <holdfast/capture.hpp>
#include <holdfast/error.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/async.hpp>
#include <holdfast/resource/mr.hpp>

#include <rmm/device_buffer.hpp>
#include <rmm/error.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/per_device_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/resource_ref.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace {

using holdfast::as_mr;
using holdfast::cuda_device;
using holdfast::mr_resource;

static_assert(std::is_constructible_v<rmm::device_async_resource_ref, as_mr<cuda_device>&>);
static_assert(std::is_constructible_v<mr_resource<rmm::mr::pool_memory_resource>, rmm::mr::pool_memory_resource>);
static_assert(!std::is_constructible_v<mr_resource<rmm::device_async_resource_ref>, rmm::device_async_resource_ref>,
              "a reference owns nothing");

TEST(rmm_without_gpu, its_shortage_is_ours) {
  const support::mr_pool<holdfast::host_device> pool;
  mr_resource memory{pool, holdfast::host_device{}};
  pool.state->before = [] { throw rmm::out_of_memory{"theirs"}; };
  const holdfast::host::stream s;
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 64, 16)), holdfast::out_of_memory);
}

TEST(rmm_without_gpu, refers_to_ours) {
  support::counting_resource<cuda_device> witness;
  as_mr pool{witness};
  as_mr copy{pool};
  as_mr other{support::counting_resource<cuda_device>{}};
  EXPECT_EQ(rmm::device_async_resource_ref{pool}, rmm::device_async_resource_ref{copy});
  EXPECT_FALSE(rmm::device_async_resource_ref{pool} == rmm::device_async_resource_ref{other});
}

class rmm_interop : public support::device_test<cuda_device> {};

TEST_F(rmm_interop, a_graph_keeps_its_pool) {
  const auto s = drive::make_stream();
  const float* data = nullptr;
  auto exec = [&] {
    rmm::mr::pool_memory_resource pool{rmm::mr::cuda_memory_resource{}, std::size_t{1} << 20};
    holdfast::padded_query_buffer<float> buffer{mr_resource{pool}, {.heads = 2, .padded_heads = 4, .head_dim = 8}};
    drive::begin_capture(s);
    {
      const auto rows = buffer.acquire(s, 3);
      data = rows.data();
      cuda_device::fill_rows(s, rows.heads_view().data_handle(), 128, std::byte{0x3F}, 64, 3);
    }
    return drive::instantiate(drive::end_capture(s));
  }();  // the buffer is gone, and so are the names of the pool
  drive::launch(exec, s);
  drive::synchronize(s);
  const auto floats = drive::read(data, 3 * 32);
  EXPECT_GT(floats[0], 0.0F);
  EXPECT_EQ(floats[16], 0.0F) << "padding";
}

TEST_F(rmm_interop, the_arena_is_used_where_nobody_captures) {
  mr_resource memory{rmm::mr::arena_memory_resource{rmm::mr::cuda_memory_resource{}, std::size_t{256} << 20}};
  const auto s = drive::make_stream();
  for (const std::size_t alignment : {std::size_t{1}, std::size_t{256}, std::size_t{4096}}) {
    void* const p = memory.allocate(s, 1000, alignment);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % alignment, 0U);
    cuda_device::fill(s, p, std::byte{1}, 1000);
    memory.deallocate(s, p, 1000, alignment);
  }
  EXPECT_THROW(static_cast<void>(memory.allocate(s, std::size_t{1} << 50, 256)), holdfast::out_of_memory);
  EXPECT_EQ(memory.held_bytes(), 0U);
  drive::synchronize(s);
}

TEST_F(rmm_interop, works_both_ways) {
  const auto own = drive::make_stream();
  const cudaStream_t stream = own;
  constexpr std::size_t MiB = std::size_t{1} << 20;
  // [both_ways]
  const rmm::mr::pool_memory_resource pool{rmm::mr::cuda_memory_resource{}, 256 * MiB};
  holdfast::lane decode{holdfast::mr_resource{pool}};  // buffers and scratch from RMM's pool, which graphs keep

  const holdfast::async_resource ours;
  rmm::device_buffer logits{64 * MiB, stream, holdfast::as_mr{ours}};  // RMM's buffer from our pool
  // [/both_ways]
  EXPECT_GE(ours.used_bytes(), 64 * MiB);
  auto& rows = decode.padded_queries<float>({.heads = 2, .padded_heads = 4, .head_dim = 8});
  EXPECT_NE(rows.acquire(stream, 3).data(), nullptr);
  drive::synchronize(stream);
}

TEST_F(rmm_interop, buffers_take_memory_of_ours) {
  support::counting_resource<cuda_device> witness;
  const auto s = drive::make_stream();
  {
    rmm::device_buffer buffer{1000, s.get(), as_mr{witness}};
    EXPECT_TRUE(witness.is_live(buffer.data()));
    buffer.resize(100000, s.get());
    EXPECT_TRUE(witness.is_live(buffer.data()));
  }
  drive::synchronize(s);
  EXPECT_EQ(witness.live_count(), 0U);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TEST_F(rmm_interop, ours_is_what_rmm_uses) {
  support::counting_resource<cuda_device> witness;
  auto former = rmm::mr::set_current_device_resource(as_mr{witness});
  const auto s = drive::make_stream();
  { const rmm::device_buffer buffer{1000, s.get()}; }
  drive::synchronize(s);
  static_cast<void>(rmm::mr::set_current_device_resource(std::move(former)));
  EXPECT_EQ(witness.deallocations(), 1U);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TEST_F(rmm_interop, a_pool_over_ours_is_ours_again) {
  support::counting_resource<cuda_device> witness;
  {
    mr_resource memory{rmm::mr::pool_memory_resource{as_mr{witness}, std::size_t{1} << 20}};
    const auto s = drive::make_stream();
    void* const p = memory.allocate(s, 1000, 4096);
    cuda_device::fill(s, p, std::byte{1}, 1000);
    memory.deallocate(s, p, 1000, 4096);
    EXPECT_EQ(witness.live_count(), 1U) << "the pool's memory";
    EXPECT_THROW(static_cast<void>(memory.allocate(s, std::size_t{1} << 50, 256)), holdfast::out_of_memory);
    EXPECT_EQ(memory.resource().pool_size(), std::size_t{1} << 20);
    drive::synchronize(s);
  }
  EXPECT_EQ(witness.live_count(), 0U);  // which alignment it names then is RMM's affair
}

}  // namespace
