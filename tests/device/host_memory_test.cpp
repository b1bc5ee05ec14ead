// Virtual memory of the host device: mapped or not, nothing in between.
#include <holdfast/device/host.hpp>

#include "support/host_driver.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace {

using holdfast::access;
using holdfast::host_device;
using holdfast::host::status;
using holdfast::host::stream;
using support::error_code;

constexpr int code(status s) { return static_cast<int>(s); }

struct host_memory : testing::Test {
  host_device d{6};  // nobody else's, so that figures are exact
  std::size_t page = d.granularity();

  char* reserve(std::size_t pages, std::size_t alignment = 0) {
    return static_cast<char*>(d.reserve(pages * page, alignment));
  }
  static void map(host_device of, char* p, std::size_t bytes, host_device::physical_type memory, access allowed) {
    of.map(p, bytes, memory);
    of.allow(p, bytes, allowed);
  }
  void TearDown() override { holdfast::host::set_memory_size(d, std::size_t{1} << 30); }
};

[[gnu::noinline]] char read_byte(const volatile char* p) { return *p; }
[[gnu::noinline]] void write_byte(volatile char* p) { *p = 1; }

TEST_F(host_memory, maps_writes_and_reads) {
  char* const p = reserve(4);
  const auto memory = d.create(2 * page);
  map(d, p + page, 2 * page, memory, access::read_write);
  std::memset(p + page, 7, 2 * page);
  EXPECT_EQ(p[page], 7);
  EXPECT_EQ(p[3 * page - 1], 7);
  d.unmap(p + page, 2 * page);
  map(d, p, page, memory, access::read);
  EXPECT_EQ(p[0], 7) << "the memory kept its contents";
  d.unmap(p, page);
  d.destroy(memory);
  d.unreserve(p, 4 * page);
}

TEST_F(host_memory, fresh_memory_is_zero) {
  char* const p = reserve(1);
  for (int i = 0; i < 2; ++i) {
    const auto memory = d.create(page);
    map(d, p, page, memory, access::read_write);
    EXPECT_EQ(p[17], 0);
    std::memset(p, 1, page);
    d.unmap(p, page);
    d.destroy(memory);
  }
  d.unreserve(p, page);
}

TEST_F(host_memory, the_same_memory_appears_at_many_addresses) {
  char* const p = reserve(3);
  const auto memory = d.create(page);
  map(d, p, page, memory, access::read_write);
  map(d, p + page, page, memory, access::read);
  map(d, p + 2 * page, page, memory, access::read);
  p[5] = 42;
  EXPECT_EQ(p[page + 5], 42);
  EXPECT_EQ(p[2 * page + 5], 42);
  d.unmap(p, 3 * page);
  d.destroy(memory);
  d.unreserve(p, 3 * page);
}

TEST_F(host_memory, aligns_reservations) {
  for (const std::size_t alignment :
       {std::size_t{0}, std::size_t{1}, page, std::size_t{1} << 16, std::size_t{1} << 21}) {
    char* const p = reserve(3, alignment);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) & (std::max(alignment, page) - 1), 0u);
    const auto memory = d.create(3 * page);
    map(d, p, 3 * page, memory, access::read_write);
    std::memset(p, 1, 3 * page);
    d.unmap(p, 3 * page);
    d.destroy(memory);
    d.unreserve(p, 3 * page);
  }
}

TEST_F(host_memory, runs_out_with_the_figures_in_the_error) {
  holdfast::host::set_memory_size(d, 8 * page);
  const auto held = d.create(3 * page);
  EXPECT_EQ(d.memory().free, 5 * page);
  EXPECT_EQ(d.memory().total, 8 * page);
  try {
    (void)d.create(6 * page);
    FAIL() << "no error";
  } catch (const holdfast::out_of_memory& e) {
    EXPECT_EQ(e.requested(), 6 * page);
    EXPECT_EQ(e.held(), 3 * page);
    EXPECT_EQ(e.free(), 5 * page);
    EXPECT_NE(std::string(e.what()).find("host device 6"), std::string::npos) << e.what();
  }
  EXPECT_EQ(d.memory().free, 5 * page) << "a refusal changes nothing";
  const auto rest = d.create(5 * page);
  EXPECT_EQ(d.memory().free, 0u);
  holdfast::host::set_memory_size(d, 4 * page);
  EXPECT_EQ(d.memory().free, 0u);
  d.destroy(held);
  d.destroy(rest);
  EXPECT_EQ(d.memory().free, 4 * page);
}

TEST_F(host_memory, is_freed_once_destroyed_and_unmapped_in_either_order) {
  const std::size_t before = d.memory().free;
  char* const p = reserve(2);
  const auto memory = d.create(page);
  map(d, p, page, memory, access::read_write);
  map(d, p + page, page, memory, access::read_write);
  d.destroy(memory);
  p[0] = 3;
  EXPECT_EQ(p[page], 3) << "mapped memory lives";
  d.unmap(p, page);
  EXPECT_EQ(d.memory().free, before - page);
  d.unmap(p + page, page);
  EXPECT_EQ(d.memory().free, before);
  EXPECT_EQ(error_code([&] { map(d, p, page, memory, access::read); }), code(status::invalid_handle));
  d.unreserve(p, 2 * page);
}

TEST_F(host_memory, refuses_what_is_no_pages_or_not_there) {
  char* const p = reserve(4);
  const auto memory = d.create(2 * page);
  const int bad = code(status::invalid_value);
  EXPECT_EQ(error_code([&] { (void)d.reserve(page + 1, 0); }), bad);
  EXPECT_EQ(error_code([&] { (void)d.reserve(0, 0); }), bad);
  EXPECT_EQ(error_code([&] { (void)d.reserve(page, 3 * page); }), bad);
  EXPECT_EQ(error_code([&] { (void)d.create(page - 1); }), bad);
  EXPECT_EQ(error_code([&] { map(d, p + 1, page, memory, access::read); }), bad);
  EXPECT_EQ(error_code([&] { map(d, p, 3 * page, memory, access::read); }), bad) << "more than there is";
  EXPECT_EQ(error_code([&] { map(d, p + 3 * page, 2 * page, memory, access::read); }), bad) << "past the reservation";
  EXPECT_EQ(error_code([&] { map(d, p, page, {}, access::read); }), code(status::invalid_handle));
  EXPECT_EQ(error_code([&] { map(host_device{7}, p, page, memory, access::read); }), code(status::invalid_handle));
  map(d, p + page, 2 * page, memory, access::read);
  EXPECT_EQ(error_code([&] { map(d, p, 2 * page, memory, access::read); }), bad) << "overlaps the next";
  EXPECT_EQ(error_code([&] { map(d, p + 2 * page, 2 * page, memory, access::read); }), bad) << "overlaps the former";
  EXPECT_EQ(error_code([&] { d.unmap(p, page); }), bad) << "nothing there";
  EXPECT_EQ(error_code([&] { d.unmap(p + page, page); }), bad) << "cuts it";
  EXPECT_EQ(error_code([&] { d.unmap(p + 2 * page, 2 * page); }), bad) << "cuts it";
  EXPECT_EQ(error_code([&] { d.unreserve(p, 4 * page); }), bad) << "mapped";
  d.unmap(p, 4 * page);
  EXPECT_EQ(error_code([&] { d.unreserve(p, 2 * page); }), bad) << "not all of it";
  d.unreserve(p, 4 * page);
  d.destroy(memory);
  EXPECT_EQ(error_code([&] { d.destroy(memory); }), code(status::invalid_handle));
  EXPECT_THROW((void)d.reserve(std::size_t{1} << 60, 0), holdfast::out_of_memory);
  EXPECT_THROW((void)host_device{8}.create(page), holdfast::logic_error);
}

TEST_F(host_memory, allows_what_is_mapped_and_nothing_else) {
  char* const p = reserve(4);
  const auto memory = d.create(2 * page);
  const int bad = code(status::invalid_value);
  d.map(p, page, memory);
  d.map(p + page, 2 * page, memory);
  EXPECT_EQ(error_code([&] { d.allow(p, 4 * page, access::read); }), bad) << "past the last mapping";
  EXPECT_EQ(error_code([&] { d.allow(p + 3 * page, page, access::read); }), bad);
  EXPECT_EQ(error_code([&] { d.allow(p + 1, page, access::read); }), bad);
  d.allow(p, 3 * page, access::read_write);
  p[0] = p[2 * page] = 1;
  host_device{7}.allow(p + 2 * page, page, access::read);  // a peer, inside a mapping
  EXPECT_THROW(host_device{8}.allow(p, page, access::read), holdfast::logic_error);
  d.unmap(p, 3 * page);
  d.destroy(memory);
  d.unreserve(p, 4 * page);
}

TEST_F(host_memory, does_not_share_memory_with_other_processes) {
  const std::size_t before = d.memory().free;
  EXPECT_THROW((void)d.create(page, {.sharing = holdfast::sharing::file_descriptor}), holdfast::logic_error);
  EXPECT_EQ(d.memory().free, before);
}

TEST_F(host_memory, many_allocations_need_no_more_than_addresses) {
  constexpr int n = 3000;  // more than a process has file descriptors
  char* const p = reserve(n);
  for (int i = 0; i < n; ++i) {
    const auto memory = d.create(page);
    map(d, p + static_cast<std::size_t>(i) * page, page, memory, access::read_write);
    d.destroy(memory);
  }
  p[(n - 1) * page] = 1;
  d.unmap(p, n * page);
  d.unreserve(p, n * page);
}

struct host_memory_death : host_memory {
  void SetUp() override {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    d = {4};  // what these leave behind shall not count in the other tests
  }
};

TEST_F(host_memory_death, reading_past_a_mapping_dies) {
  char* const p = reserve(2);
  const auto memory = d.create(page);
  map(d, p, page, memory, access::read_write);
  EXPECT_EQ(read_byte(p + page - 1), 0);
  EXPECT_EXIT((void)read_byte(p + page), support::died_of_access, "");
}

TEST_F(host_memory_death, memory_that_nobody_may_use_is_no_memory) {
  char* const p = reserve(1);
  const auto memory = d.create(page);
  d.map(p, page, memory);
  EXPECT_EXIT((void)read_byte(p), support::died_of_access, "");
}

TEST_F(host_memory_death, writing_read_only_memory_dies_though_it_is_writable_elsewhere) {
  char* const p = reserve(2);
  const auto memory = d.create(page);
  map(d, p, page, memory, access::read);
  map(d, p + page, page, memory, access::read_write);
  write_byte(p + page);
  EXPECT_EQ(read_byte(p), 1);
  EXPECT_EXIT(write_byte(p), support::died_of_access, "");
}

TEST_F(host_memory_death, touching_unmapped_memory_dies) {
  char* const p = reserve(1);
  const auto memory = d.create(page);
  map(d, p, page, memory, access::read_write);
  write_byte(p);
  d.unmap(p, page);
  EXPECT_EXIT((void)read_byte(p), support::died_of_access, "");
}

TEST_F(host_memory_death, a_replay_over_unmapped_memory_dies) {
  const stream s(d);
  char* const p = reserve(1);
  const auto memory = d.create(page);
  map(d, p, page, memory, access::read_write);
  s.begin_capture();
  host_device::fill(s, p, std::byte{1}, page);
  const holdfast::host::graph g = s.end_capture();
  const holdfast::host::graph_exec exec = g.instantiate();
  exec.launch(s);
  host_device::synchronize(s);
  exec.launch(s);
  d.unmap(p, page);
  EXPECT_EXIT(host_device::synchronize(s), support::died_of_access, "");
  map(d, p, page, memory, access::read_write);
  EXPECT_NO_THROW(host_device::synchronize(s)) << "mapped again, the replay is fine";
}

}  // namespace
