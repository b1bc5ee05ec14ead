// vmm_resource: memory that grows where it is, goes and comes back under its addresses, and doesn't change when something
// fails. What faults: fault_cases.hpp.
#include "support/faulty_device.hpp"
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/resource/vmm.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace {

template <class Device>
class vmm : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using stream_type = typename Device::stream_type;
  using vmm_type = holdfast::vmm_resource<Device>;

  void SetUp() override {
    support::device_test<Device>::SetUp();
    if (!this->IsSkipped()) granule_ = Device{}.granularity();
  }

  [[nodiscard]] std::size_t granule() const { return granule_; }

  static void fill(stream_type s, void* p, std::byte value, std::size_t bytes) {
    const typename Device::relaxed_scope relaxed;
    Device::fill(s, p, value, bytes);
    Device::synchronize(s);
  }
  static bool holds(const void* p, std::byte value, std::size_t bytes) {
    const typename Device::relaxed_scope relaxed;
    return drive::read(static_cast<const std::byte*>(p), bytes) == std::vector<std::byte>(bytes, value);
  }

 private:
  std::size_t granule_ = 0;
};
TYPED_TEST_SUITE(vmm, support::both_devices, support::device_names);

TYPED_TEST(vmm, takes_whole_granules_and_gives_them_back_as_the_device_counts) {
  typename TestFixture::vmm_type pool;
  const auto s = TestFixture::drive::make_stream();
  pool.deallocate(s, pool.allocate(s, 1, 1), 1, 1);  // what the device takes for itself, it has now
  void* const p = pool.allocate(s, this->granule() + 1, 256);
  EXPECT_EQ(pool.held_bytes(), 2 * this->granule());
  void* const q = pool.allocate(s, 1, 1);
  EXPECT_EQ(pool.held_bytes(), 3 * this->granule());
  const std::size_t free = TypeParam{}.memory().free;
  pool.deallocate(s, p, this->granule() + 1, 256);
  pool.deallocate(s, q, 1, 1);
  EXPECT_EQ(pool.held_bytes(), 0U);
  EXPECT_EQ(pool.address_bytes(), 0U);
  EXPECT_EQ(TypeParam{}.memory().free, free + 3 * this->granule());
}

TYPED_TEST(vmm, honours_alignments_beyond_the_granule) {
  typename TestFixture::vmm_type pool;
  const auto s = TestFixture::drive::make_stream();
  for (const std::size_t times : {std::size_t{1}, std::size_t{2}, std::size_t{8}}) {
    void* const p = pool.allocate(s, 100, times * this->granule());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % (times * this->granule()), 0U);
    pool.deallocate(s, p, 100, times * this->granule());
  }
}

TYPED_TEST(vmm, is_extensible_and_suspendable_through_any_resource) {
  holdfast::any_resource<TypeParam> any{typename TestFixture::vmm_type{}};
  EXPECT_TRUE(any.extensible());
  EXPECT_TRUE(any.suspendable());
  EXPECT_FALSE(any.omits_tails());
  const auto s = TestFixture::drive::make_stream();
  void* const p = any.allocate(s, 100, 256);
  EXPECT_TRUE(any.extend(s, p, 100, 3 * this->granule()));
  any.decommit(s, p, 3 * this->granule());
  any.recommit(s, p, 3 * this->granule());
  this->fill(s, p, std::byte{1}, 3 * this->granule());
  any.deallocate(s, p, 3 * this->granule(), 256);
}

// --- growth ----------------------------------------------------------------------------------------------------------

TYPED_TEST(vmm, extends_in_place_and_keeps_the_contents) {
  typename TestFixture::vmm_type pool;
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1000, 256);
  this->fill(s, p, std::byte{1}, this->granule());
  std::size_t bytes = 1000;
  for (const std::size_t granules : {1, 2, 3, 7}) {
    EXPECT_TRUE(pool.extend(s, p, bytes, granules * this->granule()));
    bytes = granules * this->granule();
    EXPECT_EQ(pool.held_bytes(), bytes);
    EXPECT_TRUE(this->holds(p, std::byte{1}, this->granule()));
  }
  EXPECT_TRUE(pool.extend(s, p, bytes, bytes - 5)) << "there is room";
  EXPECT_EQ(pool.held_bytes(), bytes);
  this->fill(s, p, std::byte{2}, bytes);
  EXPECT_TRUE(this->holds(p, std::byte{2}, bytes));
  pool.deallocate(s, p, bytes, 256);
  EXPECT_EQ(pool.held_bytes(), 0U);
}

TYPED_TEST(vmm, extends_inside_captures_of_every_mode_whose_graphs_work) {
  using driver = typename TestFixture::drive;
  holdfast::any_resource<TypeParam> pool{typename TestFixture::vmm_type{}};
  const auto library = TypeParam{}.library_stream();
  for (const auto mode : support::capture_modes) {
    for (const auto kind : support::stream_kinds) {
      const auto s = driver::make_stream(kind);
      const std::size_t small = this->granule();
      const std::size_t large = 4 * this->granule();
      auto* const p = static_cast<std::byte*>(pool.allocate(s, small, 256));
      driver::begin_capture(s, mode);
      TypeParam::fill(s, p, std::byte{1}, small);
      EXPECT_TRUE(pool.extend(library, p, small, large));
      TypeParam::fill(s, p + small, std::byte{2}, large - small);
      auto graph = driver::end_capture(s);
      ASSERT_TRUE(graph) << "the capture was invalidated";
      auto exec = driver::instantiate(graph);
      for (int i = 0; i < 2; ++i) {
        driver::launch(exec, s);
        driver::synchronize(s);
        EXPECT_TRUE(this->holds(p, std::byte{1}, small));
        EXPECT_TRUE(this->holds(p + small, std::byte{2}, large - small));
      }
      pool.deallocate(s, p, large, 256);
    }
  }
}

TYPED_TEST(vmm, does_not_extend_beyond_the_reserved_addresses) {
  typename TestFixture::vmm_type pool{TypeParam{}, {.reserve_bytes = 3 * this->granule() - 1}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1000, 256);
  EXPECT_EQ(pool.address_bytes(), 3 * this->granule());
  this->fill(s, p, std::byte{3}, this->granule());
  for (const std::size_t bytes : {3 * this->granule() + 1, std::size_t{1} << 62, SIZE_MAX}) {
    EXPECT_FALSE(pool.extend(s, p, 1000, bytes));
    EXPECT_EQ(pool.held_bytes(), this->granule());
  }
  EXPECT_TRUE(pool.extend(s, p, 1000, 3 * this->granule()));
  EXPECT_TRUE(this->holds(p, std::byte{3}, this->granule()));
  pool.deallocate(s, p, 3 * this->granule(), 256);
}

TYPED_TEST(vmm, reserves_what_an_allocation_needs_though_it_is_more_than_asked) {
  typename TestFixture::vmm_type pool{TypeParam{}, {.reserve_bytes = 1}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 5 * this->granule(), 256);
  EXPECT_EQ(pool.address_bytes(), 5 * this->granule());
  EXPECT_FALSE(pool.extend(s, p, 5 * this->granule(), 5 * this->granule() + 1));
  pool.deallocate(s, p, 5 * this->granule(), 256);
}

TYPED_TEST(vmm, does_not_extend_beyond_the_devices_memory_as_the_device_counts) {
  const std::size_t total = TypeParam{}.memory().total;
  const std::size_t more = total / this->granule() * this->granule() * 2;
  typename TestFixture::vmm_type pool{TypeParam{}, {.reserve_bytes = 2 * more}};
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1000, 256);
  this->fill(s, p, std::byte{4}, 1000);
  const std::size_t addresses = pool.address_bytes();
  const std::size_t free = TypeParam{}.memory().free;
  EXPECT_FALSE(pool.extend(s, p, 1000, more));
  EXPECT_EQ(pool.held_bytes(), this->granule());
  EXPECT_EQ(pool.address_bytes(), addresses);
  EXPECT_EQ(TypeParam{}.memory().free, free);
  EXPECT_TRUE(pool.extend(s, p, 1000, 2 * this->granule()));
  EXPECT_TRUE(this->holds(p, std::byte{4}, 1000));
  try {
    static_cast<void>(pool.allocate(s, more, 256));
    ADD_FAILURE() << "there is not as much";
  } catch (const holdfast::out_of_memory& shortage) {
    EXPECT_EQ(shortage.requested(), more);
    EXPECT_EQ(shortage.held(), 2 * this->granule());
    EXPECT_GT(shortage.free(), 0U);
  }
  EXPECT_EQ(pool.address_bytes(), addresses);
  pool.deallocate(s, p, 2 * this->granule(), 256);
}

TYPED_TEST(vmm, extends_nothing_that_is_not_its_own) {
  typename TestFixture::vmm_type pool;
  typename TestFixture::vmm_type other;
  const auto s = TestFixture::drive::make_stream();
  void* const p = other.allocate(s, 100, 256);
  EXPECT_FALSE(pool.extend(s, p, 100, 200));
  EXPECT_FALSE(pool.extend(s, nullptr, 0, 200));
  pool.deallocate(s, p, 100, 256);
  this->fill(s, p, std::byte{5}, 100);
  other.deallocate(s, p, 100, 256);
  EXPECT_FALSE(other.extend(s, p, 100, 200)) << "given back";
}

// --- addresses -------------------------------------------------------------------------------------------------------

TYPED_TEST(vmm, takes_fewer_addresses_where_they_are_short) {
  for (const int bits : {44, 46, 47, 48, 52, 56, 60, 62}) {
    const std::size_t wanted = std::size_t{1} << bits;
    typename TestFixture::vmm_type pool{TypeParam{}, {.reserve_bytes = wanted}};
    const auto s = TestFixture::drive::make_stream();
    std::vector<void*> all;
    for (int i = 0; i < 4; ++i) {
      all.push_back(pool.allocate(s, 1000, 256));
      EXPECT_TRUE(pool.extend(s, all.back(), 1000, 2 * this->granule())) << "2^" << bits;
    }
    EXPECT_LE(pool.address_bytes() / 4, wanted);
    for (void* const p : all) pool.deallocate(s, p, 2 * this->granule(), 256);
    EXPECT_EQ(pool.address_bytes(), 0U);
  }
}

TYPED_TEST(vmm, refuses_more_addresses_than_can_be_counted) {
  EXPECT_THROW((typename TestFixture::vmm_type{TypeParam{}, {.reserve_bytes = SIZE_MAX}}), holdfast::logic_error);
}

TYPED_TEST(vmm, never_hands_out_addresses_again_by_option) {
  typename TestFixture::vmm_type pool{TypeParam{}, {.reserve_bytes = 1, .reuse_addresses = false}};
  const auto s = TestFixture::drive::make_stream();
  std::set<void*> seen;
  for (int i = 0; i < 64; ++i) {
    void* const p = pool.allocate(s, 1000, 256);
    EXPECT_TRUE(seen.insert(p).second);
    pool.deallocate(s, p, 1000, 256);
    EXPECT_EQ(pool.held_bytes(), 0U);
  }
}

// --- suspension ------------------------------------------------------------------------------------------------------

TYPED_TEST(vmm,
           decommit_gives_the_memory_back_and_recommit_takes_fresh_memory_at_the_same_addresses_as_the_device_counts) {
  typename TestFixture::vmm_type pool;
  const auto s = TestFixture::drive::make_stream();
  const std::size_t bytes = 16 * this->granule();
  void* const p = pool.allocate(s, this->granule(), 256);
  ASSERT_TRUE(pool.extend(s, p, this->granule(), bytes));  // two pieces
  this->fill(s, p, std::byte{6}, bytes);
  EXPECT_TRUE(this->holds(p, std::byte{6}, bytes));
  const std::size_t addresses = pool.address_bytes();
  const std::size_t free = TypeParam{}.memory().free;
  for (int i = 0; i < 3; ++i) {
    pool.decommit(s, p, bytes);
    pool.decommit(s, p, bytes);
    EXPECT_EQ(pool.held_bytes(), 0U);
    EXPECT_EQ(pool.address_bytes(), addresses);
    EXPECT_EQ(TypeParam{}.memory().free, free + bytes);
    pool.recommit(s, p, bytes);
    pool.recommit(s, p, bytes);
    EXPECT_EQ(pool.held_bytes(), bytes);
    EXPECT_EQ(TypeParam{}.memory().free, free);
    this->fill(s, p, std::byte{6}, bytes);
    EXPECT_TRUE(this->holds(p, std::byte{6}, bytes));
  }
  pool.deallocate(s, p, bytes, 256);
}

TYPED_TEST(vmm, decommit_waits_for_the_streams_work) {
  typename TestFixture::vmm_type pool;
  const auto s = TestFixture::drive::make_stream();
  auto* const kept = static_cast<std::byte*>(TestFixture::drive::allocate(5000));
  void* const p = pool.allocate(s, 5000, 256);
  TypeParam::fill(s, p, std::byte{7}, 5000);
  TypeParam::copy(s, kept, p, 5000);
  pool.decommit(s, p, 5000);
  TypeParam::synchronize(s);
  EXPECT_TRUE(this->holds(kept, std::byte{7}, 5000));
  pool.deallocate(s, p, 5000, 256);
  TestFixture::drive::deallocate(kept);
}

TYPED_TEST(vmm, decommitted_memory_does_not_extend_and_can_be_given_back) {
  typename TestFixture::vmm_type pool;
  const auto s = TestFixture::drive::make_stream();
  void* const p = pool.allocate(s, 1000, 256);
  pool.decommit(s, p, 1000);
  EXPECT_FALSE(pool.extend(s, p, 1000, 2 * this->granule()));
  EXPECT_FALSE(pool.extend(s, p, 1000, 1000));
  pool.recommit(s, p, 1000);
  EXPECT_TRUE(pool.extend(s, p, 1000, 2 * this->granule()));
  pool.decommit(s, p, 2 * this->granule());
  pool.deallocate(s, p, 2 * this->granule(), 256);
  EXPECT_EQ(pool.address_bytes(), 0U);
}

TYPED_TEST(vmm, graphs_run_over_memory_that_went_and_came_back) {
  using driver = typename TestFixture::drive;
  typename TestFixture::vmm_type pool;
  const auto s = driver::make_stream();
  void* const p = pool.allocate(s, 5000, 256);
  driver::begin_capture(s);
  TypeParam::fill(s, p, std::byte{8}, 5000);
  auto graph = driver::end_capture(s);
  auto exec = driver::instantiate(graph);
  for (int i = 0; i < 2; ++i) {
    driver::launch(exec, s);
    pool.decommit(s, p, 5000);
    pool.recommit(s, p, 5000);
    this->fill(s, p, std::byte{0}, 5000);
    driver::launch(exec, s);
    driver::synchronize(s);
    EXPECT_TRUE(this->holds(p, std::byte{8}, 5000));
  }
  pool.deallocate(s, p, 5000, 256);
}

TYPED_TEST(vmm, suspends_nothing_that_is_not_its_own) {
  typename TestFixture::vmm_type pool;
  const auto s = TestFixture::drive::make_stream();
  int local = 0;
  EXPECT_THROW(pool.decommit(s, &local, sizeof local), holdfast::logic_error);
  EXPECT_THROW(pool.recommit(s, &local, sizeof local), holdfast::logic_error);
}

TYPED_TEST(vmm, suspends_while_others_capture) {
  using driver = typename TestFixture::drive;
  typename TestFixture::vmm_type pool;
  const auto s = driver::make_stream();
  void* const p = pool.allocate(s, 5000, 256);
  for (const auto mode : support::capture_modes) {
    for (const auto kind : support::stream_kinds) {
      const auto captured = driver::make_stream(kind);
      driver::begin_capture(captured, mode);
      pool.decommit(s, p, 5000);
      pool.recommit(s, p, 5000);
      EXPECT_TRUE(driver::end_capture(captured));
    }
  }
  pool.deallocate(s, p, 5000, 256);
}

// --- options ---------------------------------------------------------------------------------------------------------

TYPED_TEST(vmm, lets_peers_use_the_memory_as_it_grows) {
  if (support::device_count<TypeParam>() < 2) GTEST_SKIP() << "needs two devices";
  typename TestFixture::vmm_type pool{TypeParam{0}, {.peers = {1}}};
  const auto s = TestFixture::drive::make_stream();
  const auto there = TestFixture::drive::make_stream(support::stream_kind::non_blocking, TypeParam{1});
  void* const p = pool.allocate(s, 1000, 256);
  ASSERT_TRUE(pool.extend(s, p, 1000, 2 * this->granule()));
  pool.decommit(s, p, 2 * this->granule());
  pool.recommit(s, p, 2 * this->granule());
  TypeParam::fill(there, p, std::byte{9}, 2 * this->granule());
  TypeParam::synchronize(there);
  EXPECT_TRUE(this->holds(p, std::byte{9}, 2 * this->granule()));
  pool.deallocate(s, p, 2 * this->granule(), 256);
}

TYPED_TEST(vmm, peers_that_do_not_exist_are_an_error_that_changes_nothing_as_the_device_counts) {
  typename TestFixture::vmm_type pool{TypeParam{0}, {.peers = {63}}};
  const auto s = TestFixture::drive::make_stream();
  const std::size_t free = TypeParam{}.memory().free;
  EXPECT_ANY_THROW(static_cast<void>(pool.allocate(s, 1000, 256)));
  EXPECT_EQ(pool.held_bytes(), 0U);
  EXPECT_EQ(pool.address_bytes(), 0U);
  EXPECT_EQ(TypeParam{}.memory().free, free);
}

TEST(vmm_host, cannot_share_its_memory_with_other_processes) {
  using holdfast::host_device;
  for (const auto how : {holdfast::sharing::file_descriptor, holdfast::sharing::fabric}) {
    holdfast::vmm_resource<host_device> pool{host_device{}, {.physical = {.sharing = how}}};
    const holdfast::host::stream s;
    const std::size_t free = host_device{}.memory().free;
    EXPECT_THROW(static_cast<void>(pool.allocate(s, 1000, 256)), holdfast::logic_error);
    EXPECT_EQ(pool.address_bytes(), 0U);
    EXPECT_EQ(host_device{}.memory().free, free);
  }
}

TEST(vmm_host, runs_out_where_the_devices_memory_ends) {
  using holdfast::host_device;
  const host_device device{6};
  const std::size_t total = device.memory().total;
  const std::size_t page = device.granularity();
  holdfast::vmm_resource<host_device> pool{device};
  const holdfast::host::stream s{device};
  holdfast::host::set_memory_size(device, total - device.memory().free + 4 * page);
  void* const p = pool.allocate(s, page, 256);
  EXPECT_TRUE(pool.extend(s, p, page, 3 * page));
  EXPECT_FALSE(pool.extend(s, p, 3 * page, 5 * page));
  EXPECT_EQ(pool.held_bytes(), 3 * page);
  pool.decommit(s, p, 3 * page);
  void* const q = pool.allocate(s, 2 * page, 256);
  EXPECT_THROW(pool.recommit(s, p, 3 * page), holdfast::out_of_memory);
  EXPECT_EQ(pool.held_bytes(), 2 * page) << "of two pieces the first would have found memory";
  EXPECT_FALSE(pool.extend(s, p, 3 * page, 3 * page)) << "it is still decommitted";
  pool.deallocate(s, q, 2 * page, 256);
  pool.recommit(s, p, 3 * page);
  EXPECT_TRUE(pool.extend(s, p, 3 * page, 4 * page));
  pool.deallocate(s, p, 4 * page, 256);
  holdfast::host::set_memory_size(device, total);
}

// --- failures: at each step of each operation, of each piece ---------------------------------------------------------------

template <class Device>
class vmm_failures : public vmm<Device> {
 protected:
  using device = support::faulty<Device>;
  using pool_type = holdfast::vmm_resource<device>;

  void TearDown() override { device::heal(); }

  /// An allocation of three pieces, and an operation on it: what it returns, or true.
  struct scene_type {
    explicit scene_type(std::size_t granule) : bytes(3 * granule) {
      p = pool.allocate(s, granule, 256);
      EXPECT_TRUE(pool.extend(s, p, granule, 2 * granule) && pool.extend(s, p, 2 * granule, bytes));
    }
    scene_type(const scene_type&) = delete;
    scene_type& operator=(const scene_type&) = delete;
    ~scene_type() { pool.deallocate(s, p, bytes, 256); }

    typename support::driver<Device>::stream s = support::driver<Device>::make_stream();
    pool_type pool;
    std::size_t bytes;
    void* p = nullptr;
    std::vector<void*> more;
  };
  struct operation {
    const char* name;
    std::function<void(scene_type&)> prepare;
    std::function<bool(scene_type&)> run;
  };

  std::vector<operation> operations() {
    const std::size_t unit = this->granule();
    return {
        {"allocate", [](scene_type&) {},
         [](scene_type& on) {
           on.more.push_back(on.pool.allocate(on.s, 1000, 256));
           return true;
         }},
        {"extend", [](scene_type&) {},
         [unit](scene_type& on) { return on.pool.extend(on.s, on.p, on.bytes, on.bytes + 2 * unit); }},
        {"recommit", [](scene_type& on) { on.pool.decommit(on.s, on.p, on.bytes); },
         [](scene_type& on) {
           on.pool.recommit(on.s, on.p, on.bytes);
           return true;
         }},
    };
  }
};
TYPED_TEST_SUITE(vmm_failures, support::both_devices, support::device_names);

TYPED_TEST(vmm_failures, change_nothing_and_the_next_try_works) {
  using faulty = typename TestFixture::device;
  const auto nothing = faulty::given_out();
  int failures = 0;
  for (const auto& call : TestFixture::operations()) {
    for (const support::step at : support::steps_that_give) {
      for (const auto how : {support::failure::error, support::failure::memory}) {
        for (std::size_t nth = 0;; ++nth) {
          SCOPED_TRACE(std::string{call.name} + ", step " + std::to_string(static_cast<int>(at)) + ", call " +
                       std::to_string(nth) + (how == support::failure::error ? ", error" : ", out of memory"));
          typename TestFixture::scene_type scene{this->granule()};
          call.prepare(scene);
          const auto before = faulty::given_out();
          const std::size_t held = scene.pool.held_bytes();
          const std::size_t addresses = scene.pool.address_bytes();
          faulty::fail(at, nth, how);
          bool done = false;
          try {
            done = call.run(scene);
          } catch (const holdfast::device_error& error) {
            EXPECT_EQ(how, support::failure::error);
            EXPECT_EQ(error.code(), faulty::code);
          } catch (const holdfast::out_of_memory&) {
            EXPECT_EQ(how, support::failure::memory);
            EXPECT_STRNE(call.name, "extend") << "that returns false";
          }
          faulty::heal();
          if (!done) {
            ++failures;
            EXPECT_EQ(faulty::given_out(), before);
            EXPECT_EQ(scene.pool.held_bytes(), held);
            EXPECT_EQ(scene.pool.address_bytes(), addresses);
            EXPECT_TRUE(call.run(scene));
          }
          TypeParam::fill(scene.s, scene.p, std::byte{1}, scene.bytes);
          for (void* const p : scene.more) {
            TypeParam::fill(scene.s, p, std::byte{1}, 1000);
            scene.pool.deallocate(scene.s, p, 1000, 256);
          }
          if (done) break;  // it makes no more calls of this step
        }
        EXPECT_EQ(faulty::given_out(), nothing);
      }
    }
  }
  EXPECT_EQ(failures, 2 * (4 + 3 + 9)) << "steps times pieces";
}

TYPED_TEST(vmm_failures, of_a_peers_access_change_nothing) {
  using faulty = typename TestFixture::device;
  if (support::device_count<TypeParam>() < 2) GTEST_SKIP() << "needs two devices";
  const auto nothing = faulty::given_out();
  holdfast::vmm_resource<faulty> pool{faulty{}, {.peers = {1}}};
  const auto s = TestFixture::drive::make_stream();
  faulty::fail(support::step::allow, 1);
  EXPECT_THROW(static_cast<void>(pool.allocate(s, 1000, 256)), holdfast::device_error);
  EXPECT_EQ(faulty::given_out(), nothing);
  faulty::heal();
  void* const p = pool.allocate(s, 1000, 256);
  pool.deallocate(s, p, 1000, 256);
  EXPECT_EQ(faulty::given_out(), nothing);
}

TYPED_TEST(vmm_failures, for_want_of_addresses_take_fewer) {
  using faulty = typename TestFixture::device;
  holdfast::vmm_resource<faulty> pool{faulty{}, {.reserve_bytes = 64 * this->granule()}};
  const auto s = TestFixture::drive::make_stream();
  const std::size_t tries = faulty::calls(support::step::reserve);
  faulty::fail(support::step::reserve, 0, support::failure::memory);
  EXPECT_THROW(static_cast<void>(pool.allocate(s, 5 * this->granule(), 256)), holdfast::out_of_memory);
  EXPECT_EQ(faulty::calls(support::step::reserve) - tries, 5U) << "64, 32, 16, 8 and 5 granules";
}

TYPED_TEST(vmm_failures, of_a_decommit_can_be_tried_again) {
  using faulty = typename TestFixture::device;
  for (std::size_t nth = 0; nth < 3; ++nth) {
    typename TestFixture::scene_type scene{this->granule()};
    faulty::fail(support::step::unmap, nth);
    EXPECT_THROW(scene.pool.decommit(scene.s, scene.p, scene.bytes), holdfast::device_error);
    faulty::heal();
    if (nth % 2 == 0) {
      scene.pool.decommit(scene.s, scene.p, scene.bytes);
      EXPECT_EQ(scene.pool.held_bytes(), 0U);
    }
    scene.pool.recommit(scene.s, scene.p, scene.bytes);
    EXPECT_EQ(scene.pool.held_bytes(), scene.bytes);
    TypeParam::fill(scene.s, scene.p, std::byte{1}, scene.bytes);
  }
}

}  // namespace
