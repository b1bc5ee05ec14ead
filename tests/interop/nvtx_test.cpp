// nvtx_resource and nvtx_heap_resource: what a tool is told. Without one: they are among the policies of the conformance
// suite.
#include "nvtx_tool.hpp"
#include "support/resources.hpp"

#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/nvtx.hpp>
#include <holdfast/resource/tracking.hpp>
#include <holdfast/resource/vmm.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <thread>
#include <vector>

namespace {

using holdfast::nvtx_heap_resource;
using holdfast::nvtx_resource;
using holdfast::owner_scope;

template <class Device>
class nvtx : public support::device_test<Device> {
 protected:
  using drive = support::driver<Device>;

  void TearDown() override {
    EXPECT_TRUE(told().regions.empty());
    EXPECT_TRUE(told().heaps.empty());
    EXPECT_EQ(told().mistakes, 0);
    told() = {};
  }
  static support::nvtx_books& told() { return support::nvtx_told(); }
};
TYPED_TEST_SUITE(nvtx, support::both_devices, support::device_names);

TYPED_TEST(nvtx, regions_are_allocations_by_their_owners) {
  nvtx_resource memory{holdfast::malloc_resource<TypeParam>{}, "decode"};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 1000, 256);
  void* q = nullptr;
  {
    const owner_scope owner{"kv scratch"};
    q = memory.allocate(s, 77, 16);
  }
  ASSERT_EQ(this->told().regions.size(), 2U);
  EXPECT_EQ(this->told().regions.at(p).bytes, 1000U);
  EXPECT_EQ(this->told().regions.at(p).name, "decode");
  EXPECT_EQ(this->told().regions.at(p).heap, nullptr);
  EXPECT_EQ(this->told().regions.at(q).bytes, 77U);
  EXPECT_EQ(this->told().regions.at(q).name, "kv scratch");
  memory.deallocate(s, p, 1000, 256);
  EXPECT_EQ(this->told().regions.count(p), 0U);
  memory.deallocate(s, q, 77, 16);
}

TYPED_TEST(nvtx, what_was_not_allocated_is_no_region) {
  support::counting_resource<TypeParam> witness;
  witness.fail();
  nvtx_resource memory{nvtx_heap_resource{witness}};
  const auto s = TestFixture::drive::make_stream();
  EXPECT_THROW(static_cast<void>(memory.allocate(s, 1000, 256)), holdfast::out_of_memory);
  EXPECT_EQ(memory.allocate(s, 0, 256), nullptr);
  EXPECT_TRUE(this->told().regions.empty());
  EXPECT_TRUE(this->told().heaps.empty());
}

TYPED_TEST(nvtx, a_pool_cuts_regions_out_of_heaps) {
  const auto s = TestFixture::drive::make_stream();
  holdfast::caching_resource pool{nvtx_heap_resource{holdfast::malloc_resource<TypeParam>{}, "segment"}};
  nvtx_resource memory{pool};
  void* const p = memory.allocate(s, 1000, 256);
  void* const q = memory.allocate(s, 5000, 256);
  ASSERT_EQ(this->told().heaps.size(), 1U);
  const auto& [handle, heap] = *this->told().heaps.begin();
  EXPECT_EQ(heap.name, "segment");
  EXPECT_EQ(heap.bytes, pool.reserved_bytes());
  for (void* const one : {p, q}) {
    EXPECT_EQ(this->told().regions.at(one).heap, handle);
    EXPECT_GE(one, heap.start);
    EXPECT_LT(one, static_cast<const void*>(static_cast<const std::byte*>(heap.start) + heap.bytes));
  }
  memory.deallocate(s, p, 1000, 256);
  EXPECT_EQ(this->told().regions.count(p), 0U) << "it is in the pool's hands";
  void* const again = memory.allocate(s, 999, 256);
  EXPECT_EQ(again, p);
  EXPECT_EQ(this->told().regions.at(p).bytes, 999U);
  memory.deallocate(s, again, 999, 256);
  memory.deallocate(s, q, 5000, 256);
  EXPECT_EQ(this->told().heaps.size(), 1U);
  TestFixture::drive::synchronize(s);
  pool.trim();
  EXPECT_TRUE(this->told().heaps.empty());
}

TYPED_TEST(nvtx, threads_tell_of_their_own_regions) {
  holdfast::caching_resource pool{nvtx_heap_resource{holdfast::malloc_resource<TypeParam>{}}};
  nvtx_resource memory{pool};
  std::vector<std::thread> threads;
  for (std::size_t id = 1; id <= 4; ++id) {
    threads.emplace_back([=]() mutable {
      const owner_scope owner{std::to_string(id)};
      const auto s = TestFixture::drive::make_stream();
      for (std::size_t i = 1; i <= 200; ++i)
        memory.deallocate(s, memory.allocate(s, id * i * 100, 256), id * i * 100, 256);
      TestFixture::drive::synchronize(s);
    });
  }
  for (std::thread& one : threads) one.join();
  pool.trim();
}

TYPED_TEST(nvtx, regions_grow_and_heaps_do_not) {
  support::growing_resource<TypeParam> growing{holdfast::malloc_resource<TypeParam>{}, 4096};
  nvtx_resource memory{growing};
  const auto s = TestFixture::drive::make_stream();
  void* const p = memory.allocate(s, 100, 256);
  EXPECT_TRUE(memory.extensible());
  EXPECT_TRUE(memory.extend(s, p, 100, 3000));
  EXPECT_EQ(this->told().regions.at(p).bytes, 3000U);
  EXPECT_FALSE(memory.extend(s, p, 3000, 5000));
  EXPECT_EQ(this->told().regions.at(p).bytes, 3000U);
  memory.deallocate(s, p, 3000, 256);

  holdfast::any_resource<TypeParam> heaps = nvtx_heap_resource{growing};
  void* const q = heaps.allocate(s, 100, 256);
  EXPECT_FALSE(heaps.extensible());
  EXPECT_FALSE(heaps.extend(s, q, 100, 3000));
  EXPECT_EQ(growing.live_bytes(), 100U);
  heaps.deallocate(s, q, 100, 256);
  EXPECT_EQ(growing.mistakes(), 0U);
}

}  // namespace
