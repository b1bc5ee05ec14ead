// cuda::mr both ways: mr_resource over any of theirs, as_mr over any of ours.
#include "support/mr_pool.hpp"
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/mr.hpp>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using holdfast::as_mr;
using holdfast::cuda_device;
using holdfast::host_device;
using holdfast::mr_resource;
using support::mr_names;
using support::mr_pool;

// --- theirs as ours --------------------------------------------------------------------------------------------------

template <class Pool, class Device>
struct form {
  using device = Device;
  using pool = Pool;
};

using forms = ::testing::Types<form<mr_pool<host_device, mr_names::of_3_0>, host_device>,
                               form<mr_pool<host_device, mr_names::since_3_1>, host_device>
#ifndef HOLDFAST_TEST_HOST_ONLY
                               ,
                               form<mr_pool<cuda_device, mr_names::of_3_0>, cuda_device>,
                               form<mr_pool<cuda_device, mr_names::since_3_1>, cuda_device>,
                               form<mr_pool<cuda_device, mr_names::of_3_0, false>, cuda_device>,
                               form<mr_pool<cuda_device, mr_names::since_3_1, false>, cuda_device>
#endif
                               >;

struct form_names {
  template <class Form>
  static std::string GetName(int i) {
    return std::string{Form::device::name} + "_" + std::to_string(i);
  }
};

template <class Form>
class theirs : public support::device_test<typename Form::device> {
 protected:
  using device = typename Form::device;
  using drive = support::driver<device>;
  using resource = mr_resource<typename Form::pool, device>;

  /// What `allocate` throws when the pool throws `error`.
  template <class Expected, class Error>
  Expected thrown(const Error& error) {
    const typename Form::pool pool;
    resource memory{pool};
    pool.state->before = [&] { throw error; };
    const auto s = drive::make_stream();
    try {
      static_cast<void>(memory.allocate(s, 4096, 16));
    } catch (const Expected& expected) {
      return expected;
    }
    throw std::logic_error{"it threw nothing"};
  }
};
TYPED_TEST_SUITE(theirs, forms, form_names);

TYPED_TEST(theirs, is_called_with_the_stream_on_its_device_and_relaxed) {
  using Device = typename TestFixture::device;
  const int last = support::device_count<Device>() - 1;
  const typename TypeParam::pool pool;
  typename TestFixture::resource memory{pool, Device{last}};
  const auto s = TestFixture::drive::make_stream(support::stream_kind::non_blocking, Device{last});
  const auto before = support::mr_circumstances<Device>::now();

  void* const p = memory.allocate(s, 1000, 16);
  EXPECT_EQ(pool.state->live.at(p), 1000U);
  EXPECT_EQ(memory.held_bytes(), 1000U);
  Device::fill(s, p, std::byte{7}, 1000);
  memory.deallocate(s, p, 1000, 16);
  EXPECT_TRUE(pool.state->live.empty());
  EXPECT_EQ(memory.held_bytes(), 0U);

  ASSERT_EQ(pool.state->calls.size(), 2U);
  for (const auto& call : pool.state->calls) {
    EXPECT_EQ(call.current, Device{last});
    EXPECT_TRUE(call.relaxed);
    if constexpr (
        requires { pool.allocate_async(1, 1, cuda::stream_ref{}); } ||
        requires { pool.allocate(cuda::stream_ref{}, 1, 1); }) {
      EXPECT_EQ(call.stream, s.get());
    }
  }
  const auto after = support::mr_circumstances<Device>::now();
  EXPECT_EQ(after.current, before.current);
  EXPECT_EQ(after.relaxed, before.relaxed);
}

TYPED_TEST(theirs, is_not_asked_for_what_is_refused) {
  const typename TypeParam::pool pool;
  typename TestFixture::resource memory{pool};
  const auto s = TestFixture::drive::make_stream();
  EXPECT_EQ(memory.allocate(s, 0, 16), nullptr);
  memory.deallocate(s, nullptr, 0, 16);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 8, 48)), holdfast::logic_error);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, SIZE_MAX - 5, 1)), holdfast::out_of_memory);
  EXPECT_TRUE(pool.state->calls.empty());
}

TYPED_TEST(theirs, never_sees_a_capture) {
  const typename TypeParam::pool pool;
  typename TestFixture::resource memory{pool};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 1000, 16);
  TestFixture::drive::begin_capture(s);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 1000, 16)), holdfast::logic_error);
  memory.deallocate(s, p, 1000, 16);
  EXPECT_TRUE(TestFixture::drive::end_capture(s));
  EXPECT_EQ(pool.state->calls.size(), 1U);
  EXPECT_EQ(memory.held_bytes(), 1000U) << "it stays allocated";
  memory.deallocate(s, p, 1000, 16);
  EXPECT_TRUE(pool.state->live.empty());
}

TYPED_TEST(theirs, is_not_asked_for_alignments_that_it_may_not_know) {
  const typename TypeParam::pool pool;
  typename TestFixture::resource memory{pool};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 1000, 4096);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % 4096, 0U);
  ASSERT_EQ(pool.state->live.size(), 1U);
  EXPECT_EQ(pool.state->live.begin()->second, 1000 + 4096 - pool.state->max_alignment);
  memory.deallocate(s, p, 1000, 4096);
  EXPECT_TRUE(pool.state->live.empty());
  EXPECT_EQ(pool.state->mistakes, 0U);
}

TYPED_TEST(theirs, is_found_out_when_it_ignores_an_alignment) {
  const typename TypeParam::pool pool;
  pool.state->skew = 1;
  typename TestFixture::resource memory{pool};
  const auto s = TestFixture::drive::make_stream();
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 1000, 16)), holdfast::logic_error);
  EXPECT_TRUE(pool.state->live.empty()) << "it was not given back";
  EXPECT_EQ(memory.held_bytes(), 0U);
}

TYPED_TEST(theirs, runs_out_of_memory_in_our_words) {
  const typename TypeParam::pool pool;
  typename TestFixture::resource memory{pool};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 1000, 16);
  pool.state->before = [] { throw std::bad_alloc{}; };
  try {
    static_cast<void>(memory.allocate(s, 4096, 16));
    ADD_FAILURE() << "it threw nothing";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(shortage.requested(), 4096U);
    EXPECT_EQ(shortage.held(), 1000U);
    EXPECT_GT(shortage.free(), 0U);
    EXPECT_EQ(std::string{shortage.what()}.find("mr_resource: out of memory: 4096 bytes asked, 1000 bytes held"), 0U)
        << shortage.what();
    EXPECT_THROW(std::rethrow_if_nested(shortage), std::bad_alloc) << "what was thrown is inside";
  }
  pool.state->before = nullptr;
  memory.deallocate(s, p, 1000, 16);
}

struct their_shortage : std::bad_alloc {};  // as rmm::out_of_memory

TYPED_TEST(theirs, throws_in_our_words_what_it_throws_in_its_own) {
  EXPECT_EQ(this->template thrown<holdfast::out_of_memory>(their_shortage{}).requested(), 4096U);
  EXPECT_EQ(this->template thrown<holdfast::out_of_memory>(cuda::cuda_error{cudaErrorMemoryAllocation, "pool"}).held(),
            0U);
  const auto failed = this->template thrown<holdfast::device_error>(cuda::cuda_error{cudaErrorLaunchFailure, "pool"});
  EXPECT_EQ(failed.code(), static_cast<int>(cudaErrorLaunchFailure));
  EXPECT_EQ(std::string{failed.what()}.find("mr_resource: "), 0U) << failed.what();
  EXPECT_STREQ(this->template thrown<holdfast::out_of_memory>(holdfast::out_of_memory{"below", 1, 2, 3}).what(),
               holdfast::out_of_memory("below", 1, 2, 3).what());
  EXPECT_STREQ(this->template thrown<std::runtime_error>(std::runtime_error{"other"}).what(), "other");
}

TYPED_TEST(theirs, is_destroyed_on_its_device_and_relaxed) {
  using Device = typename TestFixture::device;
  const int last = support::device_count<Device>() - 1;
  std::optional<support::mr_circumstances<Device>> end;
  {
    std::optional<typename TypeParam::pool> pool{std::in_place};
    pool->state->destroyed = [&](const auto& circumstances) { end = circumstances; };
    const typename TestFixture::resource memory{*pool, Device{last}};
    pool.reset();  // graphs may outlive whoever made it
    const auto copy = memory;
    EXPECT_EQ(memory, copy);
    EXPECT_FALSE(end);
  }
  ASSERT_TRUE(end);
  EXPECT_EQ(end->current, Device{last});
  EXPECT_TRUE(end->relaxed);
}

TYPED_TEST(theirs, outlives_its_maker_in_a_graph) {
  using Device = typename TestFixture::device;
  bool destroyed = false;
  const auto s = TestFixture::drive::make_stream();
  auto exec = [&] {
    const typename TypeParam::pool pool;
    pool.state->destroyed = [&](const auto&) { destroyed = true; };
    holdfast::padded_query_buffer<float, Device> buffer{typename TestFixture::resource{pool},
                                                        {.heads = 2, .padded_heads = 4, .head_dim = 8}};
    TestFixture::drive::begin_capture(s);
    {
      const auto rows = buffer.acquire(s, 3);
      Device::fill_rows(s, rows.heads_view().data_handle(), 128, std::byte{1}, 64, 3);
    }
    return TestFixture::drive::instantiate(TestFixture::drive::end_capture(s));
  }();
  EXPECT_FALSE(destroyed) << "the graph has its memory";
  TestFixture::drive::launch(exec, s);
  TestFixture::drive::synchronize(s);
  exec.reset();
  EXPECT_TRUE(support::eventually([&] { return holdfast::collect(Device{}), destroyed; }));
}

// --- what it is made from ---------------------------------------------------------------------------------------------

/// What a pool that guards its members with a mutex is: neither copied nor moved.
struct fixed_pool : mr_pool<host_device> {
  fixed_pool() = default;
  fixed_pool(const fixed_pool&) = delete;
  fixed_pool& operator=(const fixed_pool&) = delete;
};

using host_ref = support::mr_sync_ref<cuda::mr::host_accessible>;
using cuda_ref = support::mr_ordered_ref<cuda::mr::device_accessible>;

template <class Resource, class Device>
concept adaptable = requires {
  typename mr_resource<Resource, Device>;
};

static_assert(adaptable<mr_pool<host_device>, host_device> && !adaptable<mr_pool<host_device>, cuda_device>);
static_assert(adaptable<mr_pool<cuda_device>, cuda_device> && !adaptable<mr_pool<cuda_device>, host_device>);
static_assert(!adaptable<holdfast::async_resource, cuda_device>, "it is ours already");
static_assert(!std::is_constructible_v<mr_resource<cuda_ref>, cuda_ref, cuda_device>, "a reference owns nothing");
static_assert(!std::is_constructible_v<mr_resource<host_ref, host_device>, host_ref, host_device>);
static_assert(std::is_constructible_v<mr_resource<cuda_ref>, cuda_ref, cuda_device, holdfast::outlives_graphs_t>);
static_assert(!std::is_constructible_v<mr_resource<fixed_pool, host_device>, fixed_pool&, host_device>);

TEST(mr_resource, takes_what_cannot_be_moved_by_a_shared_pointer) {
  const auto pool = std::make_shared<fixed_pool>();
  mr_resource memory{pool, host_device{}};
  static_assert(std::is_same_v<decltype(memory), mr_resource<fixed_pool, host_device>>);
  EXPECT_EQ(&memory.resource(), pool.get());
  EXPECT_EQ(pool.use_count(), 2);
  const holdfast::host::stream s;
  memory.deallocate(s, memory.allocate(s, 100, 16), 100, 16);
  EXPECT_EQ(pool->state->calls.size(), 2U);
  EXPECT_THROW((mr_resource{std::shared_ptr<fixed_pool>{}, host_device{}}), holdfast::logic_error);
}

TEST(mr_resource, takes_a_reference_from_who_promises) {
  mr_pool<host_device> pool;
  mr_resource memory{host_ref{pool}, host_device{}, holdfast::outlives_graphs};
  const holdfast::host::stream s;
  memory.deallocate(s, memory.allocate(s, 100, 16), 100, 16);
  EXPECT_EQ(pool.state->calls.size(), 2U);
}

TEST(mr_resource, equals_its_copies_only) {
  const mr_pool<host_device> pool;
  const mr_resource one{pool, host_device{}};
  const mr_resource other{pool, host_device{}};  // it keeps books of its own
  EXPECT_NE(one, other);
  EXPECT_STREQ(holdfast::any_resource<host_device>{one}.name(), "mr_resource");
}

// --- ours as theirs ---------------------------------------------------------------------------------------------------

template <class Device>
class ours : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
};
TYPED_TEST_SUITE(ours, support::both_devices, support::device_names);

TYPED_TEST(ours, gives_memory_that_is_ready_on_every_stream) {
  support::counting_resource<TypeParam> witness;
  as_mr pool{witness};
  static_assert(std::is_same_v<decltype(pool), as_mr<TypeParam>>);
  witness.poison();
  void* const p = pool.allocate_sync(1000, 256);
  EXPECT_EQ(TestFixture::drive::read(static_cast<const std::byte*>(p), 1000),
            std::vector<std::byte>(1000, std::byte{0xFF}))
      << "the fill was not waited for";
  const auto s = TestFixture::drive::make_stream();
  TypeParam::fill(s, p, std::byte{1}, 1000);
  TestFixture::drive::synchronize(s);
  pool.deallocate_sync(p, 1000, 256);
  pool.deallocate(pool.allocate(64, 16), 64, 16);  // the names of CCCL 3.0
  EXPECT_EQ(pool.allocate_sync(0, 16), nullptr);
  EXPECT_EQ(witness.mistakes(), 0U);
  EXPECT_EQ(witness.live_bytes(), 0U);
}

TYPED_TEST(ours, waits_while_others_capture) {
  as_mr pool{holdfast::malloc_resource<TypeParam>{}};
  for (const auto mode : support::capture_modes) {
    const auto s = TestFixture::drive::make_stream();
    TestFixture::drive::begin_capture(s, mode);
    pool.deallocate_sync(pool.allocate_sync(1000, 256), 1000, 256);
    EXPECT_TRUE(TestFixture::drive::end_capture(s));
  }
}

TYPED_TEST(ours, runs_out_of_memory_as_they_do) {
  support::counting_resource<TypeParam> witness;
  as_mr pool{witness};
  witness.fail();
  EXPECT_THROW(static_cast<void>(pool.allocate_sync(64, 16)), std::bad_alloc);
}

TYPED_TEST(ours, is_a_value) {
  support::counting_resource<TypeParam> witness;
  as_mr pool{witness};
  auto copy = pool;
  EXPECT_EQ(copy, pool);
  EXPECT_EQ(as_mr{witness}, pool) << "the same resource";
  EXPECT_NE(as_mr{support::counting_resource<TypeParam>{}}, pool);
  copy.deallocate_sync(pool.allocate_sync(64, 16), 64, 16);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TYPED_TEST(ours, can_be_referred_to) {
  using accessible = holdfast::detail::mr_accessible<TypeParam>;
  support::counting_resource<TypeParam> witness;
  as_mr pool{witness};
  support::mr_sync_ref<accessible> ref{pool};
#if CCCL_VERSION < 3001000
  ref.deallocate(ref.allocate(64, 16), 64, 16);
#else
  ref.deallocate_sync(ref.allocate_sync(64, 16), 64, 16);
#endif
  EXPECT_EQ(witness.deallocations(), 1U);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TYPED_TEST(ours, comes_back_as_ours) {
  support::counting_resource<TypeParam> witness;
  mr_resource memory{as_mr{witness}, TypeParam{}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 1000, 1024);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % 1024, 0U);
  memory.deallocate(s, p, 1000, 1024);
  EXPECT_EQ(witness.deallocations(), 1U);
  EXPECT_EQ(witness.mistakes(), 0U);
  witness.fail();
  try {
    static_cast<void>(memory.allocate(s, 1000, 16));
    ADD_FAILURE() << "it threw nothing";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(std::string{shortage.what()}.find("counting_resource"), 0U) << "not the innermost: " << shortage.what();
  }
}

class ours_on_streams : public support::device_test<cuda_device> {};

TEST_F(ours_on_streams, is_called_with_the_stream) {
  support::counting_resource<cuda_device> witness;
  as_mr pool{witness};
  const auto s = drive::make_stream();
  void* const p = pool.allocate(s.get(), 1000, 256);
  pool.deallocate(s.get(), p, 1000, 256);
  pool.deallocate_async(pool.allocate_async(100, 16, s.get()), 100, 16, s.get());

  cuda_ref ref{pool};
#if CCCL_VERSION < 3001000
  ref.deallocate_async(ref.allocate_async(64, 16, s.get()), 64, 16, s.get());
#else
  ref.deallocate(s.get(), ref.allocate(s.get(), 64, 16), 64, 16);
#endif
  ASSERT_EQ(witness.requests().size(), 3U);
  for (const auto& request : witness.requests()) EXPECT_EQ(request.stream, s.get());
  EXPECT_EQ(witness.mistakes(), 0U);
  EXPECT_EQ(witness.live_bytes(), 0U);
}

TEST_F(ours_on_streams, refuses_a_capturing_stream_which_survives) {
  as_mr pool{holdfast::malloc_resource<cuda_device>{}};
  const auto s = drive::make_stream();
  drive::begin_capture(s);
  EXPECT_THROW(static_cast<void>(pool.allocate(s.get(), 1000, 256)), holdfast::logic_error);
  EXPECT_TRUE(drive::end_capture(s));
}

#if CCCL_VERSION >= 3002000
TEST_F(ours_on_streams, is_owned_by_their_handles) {
  support::counting_resource<cuda_device> witness;
  const auto s = drive::make_stream();
  {
    cuda::mr::any_resource<cuda::mr::device_accessible> any{as_mr{witness}};
    auto copy = any;
    EXPECT_EQ(copy, any);
    mr_resource memory{copy};
    memory.deallocate(s, memory.allocate(s, 64, 16), 64, 16);
  }
  EXPECT_EQ(witness.deallocations(), 1U);
  EXPECT_EQ(witness.mistakes(), 0U);
}

TEST_F(ours_on_streams, is_made_from_their_pools) {
  cuda::device_memory_pool pool{cuda::device_ref{0}};
  mr_resource memory{cuda::device_memory_pool_ref{pool}, cuda_device{}, holdfast::outlives_graphs};
  const auto s = drive::make_stream();
  void* const p = memory.allocate(s, 1000, 4096);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % 4096, 0U);
  memory.deallocate(s, p, 1000, 4096);
  EXPECT_THROW(static_cast<void>(memory.allocate(s, std::size_t{1} << 50, 256)), holdfast::out_of_memory);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}
#endif

}  // namespace
