// Buffers on virtual memory: one address for good, and memory that comes and goes behind it.
#include "support/buffers.hpp"
#include "support/faulty_device.hpp"

#include <holdfast/resource/malloc.hpp>
#include <holdfast/resource/vmm.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace {

using support::eventually;
using support::padding_is_zero;
using support::small_shape;

/// 128 MiB for 4096 rows; an eighth on the host, for the sanitizers' sake.
template <class Device>
constexpr holdfast::query_shape large_shape{
    .heads = 16, .padded_heads = 64, .head_dim = support::is_host<Device> ? 16 : 128};
template <class Device>
constexpr std::size_t large_row_bytes = 64 * large_shape<Device>.head_dim * sizeof(float);
/// As engines bucket: powers of two and half as much again.
constexpr std::int64_t buckets[] = {64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096};

template <class Device>
class vmm_buffer : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using buffer_type = holdfast::padded_query_buffer<float, Device>;

  void SetUp() override {
    support::buffer_test<Device>::SetUp();
    if (!this->IsSkipped()) {
      memory.emplace();
    }
  }

  buffer_type on_vmm(const holdfast::query_shape& shape = large_shape<Device>, holdfast::buffer_options options = {}) {
    return {*memory, shape, std::move(options)};
  }

  [[nodiscard]] std::size_t whole_granules(std::size_t bytes) const {
    const std::size_t granule = Device{}.granularity();
    return (bytes + granule - 1) / granule * granule;
  }

  /// A graph over `rows` rows whose node writes `value` to the real heads.
  typename drive::graph capture(buffer_type& buffer, std::int64_t rows, std::byte value,
                                support::capture_mode mode = support::capture_mode::thread_local_) {
    drive::begin_capture(this->stream.get(), mode);
    support::write_heads(this->stream.get(), buffer.acquire(this->stream.get(), rows), value);
    return drive::end_capture(this->stream.get());
  }

  void replay(typename drive::exec& exec) {
    drive::launch(exec, this->stream.get());
    drive::synchronize(this->stream.get());
  }

  /// Whether row `row` is as a step with `value` leaves it: real heads full of it, padding zero.
  [[nodiscard]] static bool row_is(const buffer_type& buffer, std::int64_t row, std::byte value) {
    const auto& shape = buffer.shape();
    const auto row_elements = static_cast<std::size_t>(shape.padded_heads * shape.head_dim);
    const auto real = static_cast<std::size_t>(shape.heads * shape.head_dim);
    std::vector<float> expected(row_elements);
    std::memset(expected.data(), std::to_integer<int>(value), real * sizeof(float));
    const auto found =
        drive::template read<float>(buffer.data() + static_cast<std::size_t>(row) * row_elements, row_elements);
    return std::memcmp(found.data(), expected.data(), row_elements * sizeof(float)) == 0;
  }

  std::optional<holdfast::vmm_resource<Device>> memory;
};
TYPED_TEST_SUITE(vmm_buffer, support::both_devices, support::device_names);

// --- growth in place -------------------------------------------------------------------------------------------------

TYPED_TEST(vmm_buffer, buckets_captured_smallest_first_share_one_address_and_replay_right) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->on_vmm();
  std::vector<typename driver::graph> graphs;
  std::vector<typename driver::exec> execs;
  buffer.reserve(1);
  const float* const address = buffer.data();
  for (const std::int64_t rows : buckets) {
    graphs.push_back(this->capture(buffer, rows, static_cast<std::byte>(graphs.size() + 1)));
    ASSERT_TRUE(graphs.back());
    EXPECT_EQ(buffer.data(), address);
    EXPECT_EQ(buffer.capacity(), rows);
    execs.push_back(driver::instantiate(graphs.back()));
  }
  EXPECT_EQ(buffer.generation(), 1U);
  EXPECT_EQ(buffer.retired_bytes(), 0U);
  EXPECT_EQ(this->memory->held_bytes(), this->whole_granules(4096 * large_row_bytes<TypeParam>))
      << "the largest bucket, not the sum";
  for (std::size_t i = 0; i < execs.size(); ++i) {
    this->replay(execs[i]);
    EXPECT_TRUE(this->row_is(buffer, buckets[i] - 1, static_cast<std::byte>(i + 1))) << buckets[i];
  }
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), buffer.capacity(), large_shape<TypeParam>));
}

TYPED_TEST(vmm_buffer, growth_inside_a_capture_leaves_it_valid_in_every_mode) {
  for (const auto mode : support::capture_modes) {
    auto buffer = this->on_vmm();
    buffer.reserve(64);
    auto graph = this->capture(buffer, 1024, std::byte{3}, mode);
    ASSERT_TRUE(graph);
    EXPECT_EQ(support::driver<TypeParam>::count(graph).total(), 1) << "the test's own node";
    auto exec = support::driver<TypeParam>::instantiate(graph);
    this->replay(exec);
    EXPECT_TRUE(this->row_is(buffer, 1023, std::byte{3}));
  }
}

TYPED_TEST(vmm_buffer, growth_zeroes_the_padding_of_new_rows_alone) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->on_vmm();
  buffer.reserve(64);
  float* const padding = const_cast<float*>(buffer.data()) + 16 * large_shape<TypeParam>.head_dim;
  driver::template write<float>(padding, {42.0F});  // what a test may do to see that nobody writes there
  buffer.reserve(256);
  EXPECT_EQ(driver::template read<float>(padding, 1).front(), 42.0F);
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data() + 64 * 64 * large_shape<TypeParam>.head_dim, 256 - 64,
                                         large_shape<TypeParam>));
}

TYPED_TEST(vmm_buffer, what_was_written_stays_when_it_grows) {
  auto buffer = this->on_vmm();
  support::write_heads(this->stream.get(), buffer.acquire(this->stream.get(), 64), std::byte{0x11});
  buffer.reserve(512);
  support::driver<TypeParam>::synchronize(this->stream.get());
  EXPECT_TRUE(this->row_is(buffer, 63, std::byte{0x11}));
}

TYPED_TEST(vmm_buffer, growth_in_place_is_not_refused_for_graphs_sake) {
  auto buffer = this->on_vmm(large_shape<TypeParam>, {.growth = holdfast::growth::refuse});
  const auto graph = this->capture(buffer, 64, std::byte{1});
  const float* const address = buffer.data();
  EXPECT_NO_THROW(buffer.reserve(2048));
  EXPECT_EQ(buffer.data(), address);
}

TYPED_TEST(vmm_buffer, beyond_its_addresses_a_buffer_moves_and_graphs_keep_the_old_block) {
  const std::size_t addresses = this->whole_granules(64 * large_row_bytes<TypeParam>);
  this->memory.emplace(TypeParam{}, holdfast::vmm_options{.reserve_bytes = addresses});
  auto buffer = this->on_vmm();
  auto graph = this->capture(buffer, 64, std::byte{1});
  const float* const old = buffer.data();
  buffer.reserve(static_cast<std::int64_t>(addresses / large_row_bytes<TypeParam>) + 1);
  EXPECT_NE(buffer.data(), old);
  EXPECT_EQ(buffer.generation(), 2U);
  auto exec = support::driver<TypeParam>::instantiate(graph);
  this->replay(exec);
  EXPECT_TRUE(padding_is_zero<TypeParam>(old, 64, large_shape<TypeParam>));
}

TYPED_TEST(vmm_buffer, out_of_memory_changes_nothing) {
  auto buffer = this->on_vmm();
  buffer.reserve(64);
  const float* const address = buffer.data();
  const std::size_t held = this->memory->held_bytes();
  EXPECT_THROW(buffer.reserve(std::int64_t{1} << 40), holdfast::out_of_memory);
  EXPECT_EQ(buffer.data(), address);
  EXPECT_EQ(buffer.capacity(), 64);
  EXPECT_EQ(this->memory->held_bytes(), held);
}

TYPED_TEST(vmm_buffer, graphs_replay_after_the_buffer_is_gone_and_memory_goes_back_after_the_graphs) {
  using driver = support::driver<TypeParam>;
  std::vector<typename driver::graph> graphs;
  typename driver::exec first;
  const float* address = nullptr;
  {
    auto buffer = this->on_vmm();
    graphs.push_back(this->capture(buffer, 64, std::byte{1}));
    graphs.push_back(this->capture(buffer, 512, std::byte{2}));
    address = buffer.data();
    first = driver::instantiate(graphs.front());
  }
  this->replay(first);
  EXPECT_TRUE(padding_is_zero<TypeParam>(address, 64, large_shape<TypeParam>));
  first.reset();
  graphs.clear();
  EXPECT_TRUE(eventually([&] {
    holdfast::collect(TypeParam{});
    return this->memory->held_bytes() == 0;
  }));
}

// --- suspending ------------------------------------------------------------------------------------------------------

TYPED_TEST(vmm_buffer, suspending_gives_memory_back_under_graphs_that_replay_right_after_resume_as_the_device_counts) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->on_vmm();
  std::vector<typename driver::graph> graphs;
  std::vector<typename driver::exec> execs;
  for (int i = 0; i < 10; ++i) {
    graphs.push_back(this->capture(buffer, 4096, static_cast<std::byte>(i + 1)));
    execs.push_back(driver::instantiate(graphs.back()));
  }
  this->replay(execs.front());
  const float* const address = buffer.data();
  const std::size_t before = TypeParam{}.memory().free;
  buffer.suspend(holdfast::quiescent);
  EXPECT_TRUE(buffer.suspended());
  EXPECT_GE(TypeParam{}.memory().free, before + 4096 * large_row_bytes<TypeParam>);
  EXPECT_EQ(this->memory->held_bytes(), 0U);
  buffer.resume();
  EXPECT_FALSE(buffer.suspended());
  EXPECT_EQ(buffer.data(), address);
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 4096, large_shape<TypeParam>));
  for (std::size_t i = 0; i < execs.size(); ++i) {
    this->replay(execs[i]);
    EXPECT_TRUE(this->row_is(buffer, 4095, static_cast<std::byte>(i + 1)));
  }
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 4096, large_shape<TypeParam>));
}

TYPED_TEST(vmm_buffer, acquire_and_reserve_are_refused_while_suspended) {
  auto buffer = this->on_vmm(small_shape, {.name = "sleeper"});
  buffer.reserve(4);
  buffer.suspend(holdfast::quiescent);
  for (const std::int64_t rows : {0, 1, 4, 400}) {
    EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), rows)), holdfast::suspended) << rows;
    EXPECT_THROW(buffer.reserve(rows), holdfast::suspended) << rows;
  }
  EXPECT_FALSE(buffer.try_acquire(this->stream.get(), 4));
  EXPECT_THROW(buffer.restore_padding(this->stream.get()), holdfast::suspended);
  try {
    static_cast<void>(buffer.acquire(this->stream.get(), 4));
    FAIL();
  } catch (const holdfast::suspended& refused) {
    EXPECT_NE(std::string{refused.what()}.find("sleeper"), std::string::npos) << refused.what();
  }
  buffer.resume();
  EXPECT_EQ(buffer.acquire(this->stream.get(), 4).rows(), 4);
}

TYPED_TEST(vmm_buffer, acquire_in_a_capture_is_refused_while_suspended_and_the_capture_stays_valid) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->on_vmm(small_shape);
  buffer.reserve(4);
  buffer.suspend(holdfast::quiescent);
  driver::begin_capture(this->stream.get());
  EXPECT_THROW(static_cast<void>(buffer.acquire(this->stream.get(), 4)), holdfast::suspended);
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
  buffer.resume();
}

TYPED_TEST(vmm_buffer, suspending_twice_is_once_and_resuming_unasked_is_nothing) {
  auto buffer = this->on_vmm(small_shape);
  buffer.resume();
  buffer.reserve(4);
  buffer.resume();
  buffer.suspend(holdfast::quiescent);
  buffer.suspend(holdfast::quiescent);
  EXPECT_EQ(this->memory->held_bytes(), 0U);
  buffer.resume();
  EXPECT_EQ(this->memory->held_bytes(), this->whole_granules(1));
}

TYPED_TEST(vmm_buffer, an_empty_buffer_can_be_suspended) {
  auto buffer = this->on_vmm(small_shape);
  buffer.suspend(holdfast::quiescent);
  EXPECT_THROW(buffer.reserve(4), holdfast::suspended);
  buffer.resume();
  EXPECT_EQ(buffer.acquire(this->stream.get(), 4).rows(), 4);
}

TYPED_TEST(vmm_buffer, suspending_waits_for_eager_work) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const support::any_order<TypeParam> order{seed};
    auto buffer = this->on_vmm();
    for (int i = 0; i < 20; ++i) {  // queued, not run: it would touch memory that is gone
      support::write_heads(this->stream.get(), buffer.acquire(this->stream.get(), 1024), std::byte{1});
    }
    buffer.suspend(holdfast::quiescent);
    support::driver<TypeParam>::synchronize(this->stream.get());
    buffer.resume();
    EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 1024, large_shape<TypeParam>));
  }
}

/// Whose memory comes back dirty, as a device's may.
template <class Device>
struct dirty_vmm {
  using stream_type = typename Device::stream_type;
  void* allocate(stream_type s, std::size_t n, std::size_t a) { return vmm.allocate(s, n, a); }
  void deallocate(stream_type s, void* p, std::size_t n, std::size_t a) noexcept { vmm.deallocate(s, p, n, a); }
  void decommit(stream_type s, void* p, std::size_t n) { vmm.decommit(s, p, n); }
  void recommit(stream_type s, void* p, std::size_t n) {
    vmm.recommit(s, p, n);
    Device::fill(s, p, std::byte{0xFF}, n);
  }
  [[nodiscard]] Device device() const { return vmm.device(); }
  bool operator==(const dirty_vmm&) const = default;
  holdfast::vmm_resource<Device> vmm;
};

TYPED_TEST(vmm_buffer, resuming_zeroes_the_padding_of_memory_that_comes_back_dirty) {
  holdfast::padded_query_buffer<float, TypeParam> buffer{dirty_vmm<TypeParam>{*this->memory}, small_shape};
  buffer.reserve(64);
  buffer.suspend(holdfast::quiescent);
  buffer.resume();
  EXPECT_TRUE(padding_is_zero<TypeParam>(buffer.data(), 64, small_shape));
}

TYPED_TEST(vmm_buffer, is_not_suspended_while_a_stream_that_used_it_is_capturing) {
  using driver = support::driver<TypeParam>;
  auto buffer = this->on_vmm(small_shape);
  static_cast<void>(buffer.acquire(this->stream.get(), 4));
  driver::begin_capture(this->stream.get());
  EXPECT_THROW(buffer.suspend(holdfast::quiescent), holdfast::logic_error);
  EXPECT_FALSE(buffer.suspended());
  EXPECT_EQ(this->memory->held_bytes(), this->whole_granules(1));
  EXPECT_TRUE(driver::end_capture(this->stream.get()));
}

TYPED_TEST(vmm_buffer, a_suspended_buffer_that_is_destroyed_leaves_its_graphs_unusable_and_gives_all_back) {
  {
    auto buffer = this->on_vmm();
    const auto graph = this->capture(buffer, 64, std::byte{1});
    buffer.suspend(holdfast::quiescent);
  }
  EXPECT_TRUE(eventually([&] {
    holdfast::collect(TypeParam{});
    return this->memory->address_bytes() == 0;
  }));
}

TYPED_TEST(vmm_buffer, blocks_that_only_graphs_hold_are_suspended_and_resumed_too) {
  const std::size_t addresses = this->whole_granules(64 * large_row_bytes<TypeParam>);
  this->memory.emplace(TypeParam{}, holdfast::vmm_options{.reserve_bytes = addresses});
  auto buffer = this->on_vmm();
  auto graph = this->capture(buffer, 64, std::byte{1});
  const float* const old = buffer.data();
  buffer.reserve(static_cast<std::int64_t>(addresses / large_row_bytes<TypeParam>) + 1);
  buffer.suspend(holdfast::quiescent);
  EXPECT_EQ(this->memory->held_bytes(), 0U);
  buffer.resume();
  EXPECT_TRUE(padding_is_zero<TypeParam>(old, 64, large_shape<TypeParam>));
  auto exec = support::driver<TypeParam>::instantiate(graph);
  this->replay(exec);
}

TYPED_TEST(vmm_buffer, only_memory_that_can_be_given_back_under_its_addresses_is_suspended) {
  holdfast::padded_query_buffer<float, TypeParam> buffer{holdfast::malloc_resource<TypeParam>{}, small_shape};
  buffer.reserve(4);
  try {
    buffer.suspend(holdfast::quiescent);
    FAIL();
  } catch (const holdfast::logic_error& refused) {
    EXPECT_NE(std::string{refused.what()}.find("malloc_resource"), std::string::npos) << refused.what();
  }
  EXPECT_EQ(buffer.acquire(this->stream.get(), 4).rows(), 4);
}

TEST(vmm_buffer_host, stays_suspended_when_memory_is_short_at_resume) {
  using holdfast::host_device;
  const host_device device{3};
  holdfast::host::set_memory_size(device, std::size_t{8} << 20);
  holdfast::padded_query_buffer<float, host_device> buffer{holdfast::vmm_resource<host_device>{device},
                                                           large_shape<host_device>};
  buffer.reserve(1024);  // 4 MiB
  buffer.suspend(holdfast::quiescent);
  holdfast::host::set_memory_size(device, std::size_t{2} << 20);
  const std::size_t free = device.memory().free;
  EXPECT_THROW(buffer.resume(), holdfast::out_of_memory);
  EXPECT_TRUE(buffer.suspended());
  EXPECT_EQ(device.memory().free, free) << "nothing was kept of the attempt";
  holdfast::host::set_memory_size(device, std::size_t{8} << 20);
  buffer.resume();
  EXPECT_TRUE(support::padding_is_zero<host_device>(buffer.data(), 1024, large_shape<host_device>));
}

TEST(vmm_buffer_host, can_be_suspended_again_after_the_device_refused) {
  using device = support::faulty<holdfast::host_device>;
  holdfast::vmm_resource<device> memory;
  holdfast::padded_query_buffer<float, device> buffer{memory, small_shape};
  buffer.reserve(4);
  device::fail(support::step::unmap);
  EXPECT_THROW(buffer.suspend(holdfast::quiescent), holdfast::device_error);
  EXPECT_NE(memory.held_bytes(), 0U);
  device::heal();
  buffer.suspend(holdfast::quiescent);
  EXPECT_EQ(memory.held_bytes(), 0U);
  buffer.resume();
  EXPECT_TRUE(support::padding_is_zero<holdfast::host_device>(buffer.data(), 4, small_shape));
}

// --- arenas ----------------------------------------------------------------------------------------------------------

TYPED_TEST(vmm_buffer, captures_of_ascending_scratch_hold_the_largest_call) {
  using driver = support::driver<TypeParam>;
  const holdfast::lane<TypeParam> lane{*this->memory};
  holdfast::tail_padded_allocator<std::byte, TypeParam> scratch{
      lane, {.row_elements = 512, .over_read = holdfast::over_read::rows_beyond(128)}};
  std::vector<typename driver::graph> graphs;
  for (const std::int64_t rows : buckets) {
    driver::begin_capture(this->stream.get());
    static_cast<void>(scratch.acquire(this->stream.get(), 16 * rows));
    graphs.push_back(driver::end_capture(this->stream.get()));
    ASSERT_TRUE(graphs.back());
  }
  EXPECT_EQ(lane.scratch_bytes(), std::size_t{(16 * 4096 + 128) * 512});
  EXPECT_EQ(this->memory->held_bytes(), this->whole_granules(lane.scratch_bytes()));
}

// --- the default -----------------------------------------------------------------------------------------------------

TYPED_TEST(vmm_buffer, is_what_a_resource_with_a_persistent_one_gives_buffers) {
  struct split {
    using stream_type = typename TypeParam::stream_type;
    void* allocate(stream_type s, std::size_t n, std::size_t a) { return calls.allocate(s, n, a); }
    void deallocate(stream_type s, void* p, std::size_t n, std::size_t a) noexcept { calls.deallocate(s, p, n, a); }
    [[nodiscard]] holdfast::any_resource<TypeParam> persistent() const { return stays; }
    [[nodiscard]] TypeParam device() const { return calls.device(); }
    bool operator==(const split&) const = default;
    holdfast::any_resource<TypeParam> calls, stays;
  };
  const holdfast::any_resource<TypeParam> both{split{this->resource, *this->memory}};
  holdfast::padded_query_buffer<float, TypeParam> buffer{both, small_shape};
  buffer.reserve(4);
  EXPECT_STREQ(buffer.resource().name(), "vmm_resource");
  EXPECT_EQ(this->resource.allocations(), 0U);
  holdfast::tail_padded_allocator<float, TypeParam> scratch{both, {.row_elements = 16}};
  static_cast<void>(scratch.acquire(this->stream.get(), 4));
  EXPECT_EQ(this->resource.allocations(), 1U) << "calls are served by the other";
}

}  // namespace
