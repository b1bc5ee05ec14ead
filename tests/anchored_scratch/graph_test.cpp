// Graphs over anchored scratch: growth inside captures, what the graphs own, what they cost.
#include "support/buffers.hpp"

#include <holdfast/anchored_scratch.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace {

using holdfast::over_read;
using bytes = std::vector<unsigned char>;

constexpr std::size_t row_bytes = 512;
constexpr std::size_t tail_bytes = 128 * row_bytes;

template <class Device>
class graphs_over_anchored_scratch : public support::buffer_test<Device> {
 protected:
  using drive = support::driver<Device>;
  using anchored = holdfast::anchored_scratch<unsigned char, Device>;

  void SetUp() override {
    support::buffer_test<Device>::SetUp();
    if (!this->IsSkipped()) {
      scratch.emplace(holdfast::lane<Device>{holdfast::any_resource<Device>{this->resource}},
                      holdfast::scratch_options{.row_elements = 512, .over_read = over_read::rows_beyond(128)});
    }
  }

  void TearDown() override {
    support::buffer_test<Device>::TearDown();
    for (void* output : outputs) {
      drive::deallocate(output);
    }
  }

  struct step_type {
    std::int64_t rows;
    std::byte value;
    unsigned char* output;
    [[nodiscard]] std::size_t real() const { return static_cast<std::size_t>(rows) * row_bytes; }
  };

  step_type make_step(std::int64_t rows, unsigned char value) {
    outputs.push_back(drive::allocate(static_cast<std::size_t>(rows) * row_bytes + tail_bytes));
    return {rows, std::byte{value}, static_cast<unsigned char*>(outputs.back())};
  }

  /// A producer writes the rows; a consumer reads them, and on to the end of the tail.
  void run(const step_type& s, const holdfast::scratch<unsigned char, Device>& rows) {
    Device::fill(this->stream.get(), rows.data(), s.value, s.real());
    Device::copy(this->stream.get(), s.output, rows.data(), s.real() + tail_bytes);
  }

  typename drive::graph capture(const step_type& s, support::capture_mode mode = support::capture_mode::thread_local_) {
    drive::begin_capture(this->stream.get(), mode);
    run(s, scratch->acquire(this->stream.get(), s.rows));
    return drive::end_capture(this->stream.get());
  }

  bool replays_right(typename drive::exec& exec, const step_type& s) {
    bytes expected(s.real() + tail_bytes, 0x33);
    drive::write(s.output, expected);
    drive::launch(exec, this->stream.get());
    drive::synchronize(this->stream.get());
    expected.assign(s.real(), std::to_integer<unsigned char>(s.value));
    expected.resize(s.real() + tail_bytes, 0);
    return drive::read(s.output, s.real() + tail_bytes) == expected;
  }

  std::optional<anchored> scratch;
  std::vector<void*> outputs;
};
TYPED_TEST_SUITE(graphs_over_anchored_scratch, support::both_devices, support::device_names);

TYPED_TEST(graphs_over_anchored_scratch, of_every_bucket_smallest_first_grow_it_and_all_stay_right) {
  using driver = support::driver<TypeParam>;
  const auto granule_rows =
      static_cast<std::int64_t>(TypeParam{}.granularity(holdfast::physical_options{}) / row_bytes);
  for (const support::capture_mode mode : support::capture_modes) {
    std::vector<typename TestFixture::step_type> steps;
    std::vector<typename driver::exec> execs;
    unsigned char* end = nullptr;
    for (const std::int64_t rows : {std::int64_t{1}, granule_rows, 2 * granule_rows, 3 * granule_rows + 1}) {
      steps.push_back(this->make_step(rows, static_cast<unsigned char>(7 * steps.size() + 1)));
      auto graph = this->capture(steps.back(), mode);
      ASSERT_TRUE(graph) << "mode " << static_cast<int>(mode);
      execs.push_back(driver::instantiate(graph));
      EXPECT_TRUE(end == nullptr || this->scratch->data_end() == end);
      end = this->scratch->data_end();
    }
    for (int round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < steps.size(); ++i) {
        EXPECT_TRUE(this->replays_right(execs[i], steps[i])) << "bucket " << i;
      }
    }
    EXPECT_EQ(this->scratch->capacity(), 4 * granule_rows) << "the largest, not the sum";
    const typename TestFixture::step_type eager = this->make_step(2, 0xEE);
    this->run(eager, this->scratch->acquire(this->stream.get(), 2));
    this->scratch.reset();
    this->scratch.emplace(TypeParam{},
                          holdfast::scratch_options{.row_elements = 512, .over_read = over_read::rows_beyond(128)});
  }
}

TYPED_TEST(graphs_over_anchored_scratch, hold_nothing_but_the_steps_own_nodes) {
  auto graph = this->capture(this->make_step(4, 1));
  const auto nodes = support::driver<TypeParam>::count(graph);
  EXPECT_EQ(nodes.memsets, 1);
  EXPECT_EQ(nodes.memcpys, 1);
  EXPECT_EQ(nodes.total(), 2);
}

TYPED_TEST(graphs_over_anchored_scratch, stay_right_when_it_is_destroyed_and_give_the_memory_back_in_the_end) {
  using driver = support::driver<TypeParam>;
  const auto before = holdfast::counts(TypeParam{}).pinned_bytes();
  const auto step = this->make_step(4, 0x11);
  auto graph = this->capture(step);
  auto exec = driver::instantiate(graph);
  graph.reset();
  this->scratch.reset();
  holdfast::collect(TypeParam{});
  EXPECT_EQ(holdfast::counts(TypeParam{}).pinned_bytes() - before,
            TypeParam{}.granularity(holdfast::physical_options{}));
  holdfast::anchored_scratch<unsigned char, TypeParam> tenant{TypeParam{}, {.row_elements = 512}};
  TypeParam::fill(this->stream.get(), tenant.acquire(this->stream.get(), 64).data(), std::byte{0xEE}, 64 * row_bytes);
  EXPECT_TRUE(this->replays_right(exec, step));
  exec.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(TypeParam{});
    return holdfast::counts(TypeParam{}).pinned_bytes() == before && holdfast::counts(TypeParam{}).pending_bytes() == 0;
  }));
}

TYPED_TEST(graphs_over_anchored_scratch, own_the_memory_once_however_often_it_is_acquired) {
  using driver = support::driver<TypeParam>;
  driver::begin_capture(this->stream.get());
  for (int layer = 0; layer < 61; ++layer) {
    static_cast<void>(this->scratch->acquire(this->stream.get(), 4));
  }
  auto graph = driver::end_capture(this->stream.get());
  EXPECT_EQ(this->scratch->pinned_bytes(), TypeParam{}.granularity(holdfast::physical_options{}));
  this->scratch->reserve(this->scratch->capacity() + 1);
  EXPECT_EQ(this->scratch->pinned_bytes(), 2 * TypeParam{}.granularity(holdfast::physical_options{}));
  graph.reset();
  EXPECT_TRUE(this->scratch->wait_unpinned(std::chrono::seconds{5}));
  EXPECT_EQ(this->scratch->pinned_bytes(), 0U);
}

TYPED_TEST(graphs_over_anchored_scratch, own_a_handle_that_was_acquired_before_by_pin) {
  using driver = support::driver<TypeParam>;
  const auto step = this->make_step(4, 0x11);
  auto rows = this->scratch->acquire(this->stream.get(), 4);
  EXPECT_FALSE(rows.pin(this->stream.get())) << "not capturing";
  driver::begin_capture(this->stream.get());
  EXPECT_TRUE(rows.pin(this->stream.get()));
  this->run(step, rows);
  auto graph = driver::end_capture(this->stream.get());
  rows.pin(graph.get());
  rows.release();
  this->scratch.reset();
  auto exec = driver::instantiate(graph);
  EXPECT_TRUE(this->replays_right(exec, step));
}

TYPED_TEST(graphs_over_anchored_scratch, own_what_is_released_on_their_stream) {
  using driver = support::driver<TypeParam>;
  const auto step = this->make_step(4, 0x11);
  auto other = driver::make_stream();
  auto rows = this->scratch->acquire(other.get(), 4);
  driver::begin_capture(this->stream.get());
  this->run(step, rows);
  rows.release(this->stream.get());
  auto graph = driver::end_capture(this->stream.get());
  ASSERT_TRUE(graph);
  this->scratch.reset();
  auto exec = driver::instantiate(graph);
  EXPECT_TRUE(this->replays_right(exec, step));
}

TYPED_TEST(graphs_over_anchored_scratch, being_captured_defer_the_end_of_eager_use_of_the_same_stream) {
  using driver = support::driver<TypeParam>;
  static_cast<void>(this->scratch->acquire(this->stream.get(), 4));
  driver::begin_capture(this->stream.get(), support::capture_mode::global);
  this->scratch.reset();
  holdfast::collect(TypeParam{});
  EXPECT_GT(holdfast::counts(TypeParam{}).pending_bytes(), 0U);
  EXPECT_TRUE(driver::end_capture(this->stream.get())) << "and the capture survives";
}

TYPED_TEST(graphs_over_anchored_scratch, of_every_kind_survive_all_that_it_does) {
  using driver = support::driver<TypeParam>;
  auto beside = driver::make_stream();
  for (const support::capture_mode mode : support::capture_modes) {
    for (const support::stream_kind kind : support::stream_kinds) {
      auto capturing = driver::make_stream(kind);
      driver::begin_capture(capturing.get(), mode);
      {
        holdfast::anchored_scratch<unsigned char, TypeParam> own{
            TypeParam{}, {.row_elements = 512, .over_read = over_read::rows_beyond(128)}};
        static_cast<void>(own.acquire(capturing.get(), 4));
        static_cast<void>(own.acquire(beside.get(), 4));
        own.reserve(10000);
        auto held = own.acquire(capturing.get(), 20000);
        EXPECT_FALSE(own.try_acquire(beside.get(), 4));
        EXPECT_FALSE(own.try_acquire(capturing.get(), -1));
      }
      EXPECT_TRUE(driver::end_capture(capturing.get())) << static_cast<int>(mode);
    }
  }
}

}  // namespace
