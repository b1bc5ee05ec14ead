// Promise 1: a graph captured over the buffer stays right, whatever the user does meanwhile. Over every resource.
//
// A step writes a byte value to the real heads and copies whole padded rows to an output, as a producer and an attention
// kernel would. Replays are checked against that, after a tenant took and overwrote whatever memory could be had.
#include "support/buffers.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace {

using support::small_shape;

constexpr std::size_t row_elements = 8 * 16;
constexpr std::size_t real_elements = 3 * 16;

template <class Entry>
class graphs_over_a_buffer : public support::device_test<typename Entry::device> {
 protected:
  using device = typename Entry::device;
  using drive = support::driver<device>;
  using stream_type = typename device::stream_type;
  using buffer_type = holdfast::padded_query_buffer<float, device>;

  void SetUp() override {
    support::device_test<device>::SetUp();
    if (!this->IsSkipped()) {
      resource.emplace(Entry::make());
      bytes.emplace(holdfast::any_resource<device>{*resource});
      bytes->poison(std::byte{0x7F});
      stream.emplace(drive::make_stream());
      buffer = std::make_unique<buffer_type>(*bytes, small_shape);
    }
  }

  void TearDown() override {
    if (stream) {
      drive::synchronize(stream->get());
    }
    for (void* output : outputs) {
      drive::deallocate(output);
    }
  }

  struct step_type {
    std::int64_t rows;
    std::byte value;
    float* output;
  };

  step_type make_step(std::int64_t rows, unsigned char value) {
    void* const output = drive::allocate(static_cast<std::size_t>(rows) * row_elements * sizeof(float));
    outputs.push_back(output);
    return {rows, std::byte{value}, static_cast<float*>(output)};
  }

  /// Queues the step on `on`.
  void run(const step_type& s, stream_type on, const holdfast::query_rows<float, device>& rows) {
    support::write_heads(on, rows, s.value);
    device::copy(on, s.output, rows.data(), static_cast<std::size_t>(s.rows) * row_elements * sizeof(float));
  }
  void run(const step_type& s, stream_type on) { run(s, on, buffer->acquire(on, s.rows)); }

  typename drive::graph capture(const step_type& s) {
    drive::begin_capture(stream->get());
    run(s, stream->get());
    return drive::end_capture(stream->get());
  }

  /// Somebody else takes the memory that can be had, and writes to it.
  void tenant_moves_in() {
    for (std::int64_t rows = 1; rows <= 64; rows *= 2) {
      const std::size_t size = static_cast<std::size_t>(rows) * row_elements * sizeof(float);
      void* const p = resource->allocate(stream->get(), size, 1024);
      device::fill(stream->get(), p, std::byte{0xEE}, size);
      drive::synchronize(stream->get());
      tenant.push_back({p, size});
    }
  }

  void tenant_moves_out() {
    for (const auto& [p, size] : tenant) {
      resource->deallocate(stream->get(), p, size, 1024);
    }
    tenant.clear();
  }

  void flush() {
    if constexpr (requires { resource->trim(std::size_t{0}); }) {
      resource->trim(std::size_t{0});
    } else if constexpr (requires { resource->trim(); }) {
      resource->trim();
    }
  }

  ::testing::AssertionResult replays_right(typename drive::exec& exec, const step_type& s) {
    const auto elements = static_cast<std::size_t>(s.rows) * row_elements;
    drive::write(s.output, std::vector<float>(elements, -1.0F));
    drive::launch(exec, stream->get());
    drive::synchronize(stream->get());
    const std::vector<float> output = drive::read(s.output, elements);
    float value{};
    std::memset(&value, std::to_integer<int>(s.value), sizeof(value));
    for (std::size_t i = 0; i < output.size(); ++i) {
      const float expected = i % row_elements < real_elements ? value : 0.0F;
      if (std::memcmp(&output[i], &expected, sizeof(float)) != 0) {
        return ::testing::AssertionFailure()
               << "element " << i << " of a step of " << s.rows << " rows is " << output[i] << ", not " << expected;
      }
    }
    return ::testing::AssertionSuccess();
  }

  /// Whatever of the graph's memory can be had has been taken and overwritten, and the graph is still right.
  void expect_right_under_a_tenant(typename drive::exec& exec, const step_type& s) {
    flush();
    tenant_moves_in();
    EXPECT_TRUE(replays_right(exec, s));
    tenant_moves_out();
  }

  bool everything_is_back() {
    return support::eventually([this] {
      holdfast::collect(device{});
      return bytes->live_bytes() == 0;
    });
  }

  std::optional<decltype(Entry::make())> resource;
  std::optional<support::counting_resource<device>> bytes;
  std::optional<typename drive::stream> stream;
  std::unique_ptr<buffer_type> buffer;
  std::vector<void*> outputs;
  std::vector<std::pair<void*, std::size_t>> tenant;
};
TYPED_TEST_SUITE(graphs_over_a_buffer, support::resources_under_test, support::resource_names);

TYPED_TEST(graphs_over_a_buffer, stay_right_when_the_buffer_grows) {
  const auto step = this->make_step(4, 0x11);
  auto graph = this->capture(step);
  auto exec = TestFixture::drive::instantiate(graph);
  this->buffer->reserve(64);
  this->expect_right_under_a_tenant(exec, step);
}

TYPED_TEST(graphs_over_a_buffer, stay_right_when_more_rows_are_acquired_eagerly) {
  const auto small = this->make_step(4, 0x11);
  auto graph = this->capture(small);
  auto exec = TestFixture::drive::instantiate(graph);
  const auto large = this->make_step(32, 0x22);
  this->run(large, this->stream->get());
  EXPECT_TRUE(this->replays_right(exec, small));
  EXPECT_TRUE(support::padding_is_zero<typename TestFixture::device>(this->buffer->data(), 32, small_shape));
}

TYPED_TEST(graphs_over_a_buffer, stay_right_when_the_buffer_is_destroyed_and_the_resource_flushed) {
  const auto step = this->make_step(4, 0x11);
  auto graph = this->capture(step);
  auto exec = TestFixture::drive::instantiate(graph);
  graph.reset();
  this->buffer.reset();
  holdfast::collect(typename TestFixture::device{});
  this->expect_right_under_a_tenant(exec, step);
  EXPECT_GT(this->bytes->live_bytes(), 0U);
}

TYPED_TEST(graphs_over_a_buffer, stay_right_when_the_last_handle_of_the_resource_is_gone) {
  const auto step = this->make_step(4, 0x11);
  auto graph = this->capture(step);
  auto exec = TestFixture::drive::instantiate(graph);
  this->buffer.reset();
  this->bytes.reset();
  this->resource.reset();
  EXPECT_TRUE(this->replays_right(exec, step));
}

TYPED_TEST(graphs_over_a_buffer, give_the_bytes_back_when_the_last_of_them_is_gone) {
  const auto step = this->make_step(4, 0x11);
  auto graph = this->capture(step);
  auto exec = TestFixture::drive::instantiate(graph);
  this->buffer.reset();
  graph.reset();
  EXPECT_FALSE(support::eventually(
      [this] {
        holdfast::collect(typename TestFixture::device{});
        return this->bytes->live_bytes() == 0;
      },
      std::chrono::milliseconds{20}))
      << "the executable has it still";
  exec.reset();
  EXPECT_TRUE(this->everything_is_back());
  EXPECT_EQ(this->bytes->mistakes(), 0U);
}

TYPED_TEST(graphs_over_a_buffer, of_every_bucket_largest_first_share_one_block) {
  std::vector<typename TestFixture::step_type> steps;
  std::vector<typename TestFixture::drive::exec> execs;
  for (std::int64_t rows = 64; rows >= 1; rows /= 2) {
    steps.push_back(this->make_step(rows, static_cast<unsigned char>(rows)));
    execs.push_back(TestFixture::drive::instantiate(this->capture(steps.back())));
  }
  EXPECT_EQ(this->bytes->live_bytes(), 64 * row_elements * sizeof(float));
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_TRUE(this->replays_right(execs[i], steps[i]));
  }
}

TYPED_TEST(graphs_over_a_buffer, of_every_bucket_smallest_first_all_stay_right) {
  std::vector<typename TestFixture::step_type> steps;
  std::vector<typename TestFixture::drive::exec> execs;
  for (std::int64_t rows = 1; rows <= 64; rows *= 2) {
    steps.push_back(this->make_step(rows, static_cast<unsigned char>(rows)));
    execs.push_back(TestFixture::drive::instantiate(this->capture(steps.back())));
  }
  this->flush();
  this->tenant_moves_in();
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_TRUE(this->replays_right(execs[i], steps[i]));
  }
  this->tenant_moves_out();
}

// --- what CUDA lets one make of a graph ---------------------------------------------------------------------------------

TYPED_TEST(graphs_over_a_buffer, cloned_stay_right_without_the_original) {
  const auto step = this->make_step(4, 0x11);
  auto graph = this->capture(step);
  auto clone = TestFixture::drive::clone(graph);
  graph.reset();
  this->buffer.reset();
  auto exec = TestFixture::drive::instantiate(clone);
  this->expect_right_under_a_tenant(exec, step);
}

TYPED_TEST(graphs_over_a_buffer, made_children_of_another_stay_right_without_the_original) {
  const auto step = this->make_step(4, 0x11);
  auto graph = this->capture(step);
  auto parent = TestFixture::drive::make_graph();
  TestFixture::drive::add_child(parent, graph);
  graph.reset();
  this->buffer.reset();
  auto exec = TestFixture::drive::instantiate(parent);
  this->expect_right_under_a_tenant(exec, step);
}

TYPED_TEST(graphs_over_a_buffer, that_an_executable_was_updated_to_replace_the_old_one) {
  const auto old_step = this->make_step(4, 0x11);
  auto old_graph = this->capture(old_step);
  auto exec = TestFixture::drive::instantiate(old_graph);
  const float* const old_block = this->buffer->data();
  this->buffer->reserve(64);
  const auto new_step = this->make_step(4, 0x22);
  auto new_graph = this->capture(new_step);
  ASSERT_TRUE(TestFixture::drive::update(exec, new_graph));
  old_graph.reset();
  new_graph.reset();
  EXPECT_TRUE(support::eventually([&] {
    holdfast::collect(typename TestFixture::device{});
    return !this->bytes->is_live(old_block);
  })) << "the update released what the executable had";
  this->buffer.reset();
  this->expect_right_under_a_tenant(exec, new_step);
}

TYPED_TEST(graphs_over_a_buffer, captured_on_a_forked_stream_stay_right) {
  using driver = typename TestFixture::drive;
  auto side = driver::make_stream();
  const auto step = this->make_step(4, 0x11);
  driver::begin_capture(this->stream->get());
  driver::fork(this->stream->get(), side.get());
  this->run(step, side.get());
  driver::fork(side.get(), this->stream->get());
  auto graph = driver::end_capture(this->stream->get());
  ASSERT_TRUE(graph);
  auto exec = driver::instantiate(graph);
  this->buffer.reset();
  this->expect_right_under_a_tenant(exec, step);
}

TYPED_TEST(graphs_over_a_buffer, captured_into_a_conditional_body_stay_right) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(4, 0x11);
  auto graph = driver::make_graph();
  const auto body = driver::add_conditional_body(graph);
  driver::begin_capture_to(this->stream->get(), body);
  this->run(step, this->stream->get());
  static_cast<void>(driver::end_capture(this->stream->get()));
  auto exec = driver::instantiate(graph);
  graph.reset();
  this->buffer.reset();
  this->expect_right_under_a_tenant(exec, step);
  exec.reset();
  EXPECT_TRUE(this->everything_is_back());
}

TYPED_TEST(graphs_over_a_buffer, captured_to_an_existing_graph_stay_right) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(4, 0x11);
  auto graph = driver::make_graph();
  driver::begin_capture_to(this->stream->get(), graph.get());
  this->run(step, this->stream->get());
  static_cast<void>(driver::end_capture(this->stream->get()));
  auto exec = driver::instantiate(graph);
  graph.reset();
  this->buffer.reset();
  this->expect_right_under_a_tenant(exec, step);
}

TYPED_TEST(graphs_over_a_buffer, two_of_one_step_with_eager_work_between_stay_right) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(4, 0x11);
  auto rows = this->buffer->acquire(this->stream->get(), step.rows);  // for the whole step
  driver::begin_capture(this->stream->get());
  ASSERT_TRUE(rows.pin(this->stream->get()));
  support::write_heads(this->stream->get(), rows, step.value);
  auto produce = driver::end_capture(this->stream->get());
  driver::begin_capture(this->stream->get());
  ASSERT_TRUE(rows.pin(this->stream->get()));
  typename TestFixture::device::stream_type s = this->stream->get();
  TestFixture::device::copy(s, step.output, rows.data(), 4 * row_elements * sizeof(float));
  auto consume = driver::end_capture(s);
  rows.release();
  auto first = driver::instantiate(produce);
  auto second = driver::instantiate(consume);
  this->buffer.reset();
  this->flush();
  this->tenant_moves_in();
  driver::launch(first, s);
  for (const auto& [p, size] : this->tenant) {
    TestFixture::device::fill(s, p, std::byte{0xCC}, size);  // eager work between
  }
  EXPECT_TRUE(this->replays_right(second, step));
  this->tenant_moves_out();
}

TYPED_TEST(graphs_over_a_buffer, pinned_as_graphs_stay_right) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(4, 0x11);
  auto rows = this->buffer->acquire(this->stream->get(), step.rows);
  driver::begin_capture(this->stream->get());
  this->run(step, this->stream->get(), rows);
  auto graph = driver::end_capture(this->stream->get());
  rows.pin(graph.get());
  rows.release();
  auto exec = driver::instantiate(graph);
  this->buffer.reset();
  this->expect_right_under_a_tenant(exec, step);
}

TYPED_TEST(graphs_over_a_buffer, pinned_through_the_buffer_stay_right) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(4, 0x11);
  auto rows = this->buffer->acquire(this->stream->get(), step.rows);
  EXPECT_FALSE(this->buffer->pin(this->stream->get())) << "not capturing";
  driver::begin_capture(this->stream->get());
  EXPECT_TRUE(this->buffer->pin(this->stream->get()));
  this->run(step, this->stream->get(), rows);
  auto graph = driver::end_capture(this->stream->get());
  rows.release();
  auto exec = driver::instantiate(graph);
  this->buffer.reset();
  this->expect_right_under_a_tenant(exec, step);
}

TYPED_TEST(graphs_over_a_buffer, of_a_recycled_stream_handle_each_own_the_block) {
  using driver = typename TestFixture::drive;
  this->buffer->reserve(4);
  typename TestFixture::device::stream_type former{};
  std::optional<typename driver::graph> first;
  bool recycled = false;
  for (int i = 0; i < 64 && !recycled; ++i) {
    auto capturing = driver::make_stream();
    recycled = first.has_value() && capturing.get() == former;
    former = capturing.get();
    driver::begin_capture(capturing.get());
    static_cast<void>(this->buffer->acquire(capturing.get(), 4));
    auto graph = driver::end_capture(capturing.get());
    ASSERT_TRUE(graph);
    if (recycled) {
      this->buffer.reset();
      first.reset();
      EXPECT_FALSE(support::eventually(
          [this] {
            holdfast::collect(typename TestFixture::device{});
            return this->bytes->live_bytes() == 0;
          },
          std::chrono::milliseconds{20}))
          << "the second capture's graph owns it too";
    } else {
      first.emplace(std::move(graph));
    }
  }
  if (!recycled) {
    GTEST_SKIP() << "the device did not recycle a stream handle";
  }
}

TYPED_TEST(graphs_over_a_buffer, in_flight_when_their_executable_is_destroyed_finish_right) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(64, 0x11);
  {
    auto graph = this->capture(step);
    auto exec = driver::instantiate(graph);
    this->buffer.reset();
    for (int i = 0; i < 8; ++i) {
      driver::launch(exec, this->stream->get());
    }
  }
  holdfast::collect(typename TestFixture::device{});
  driver::synchronize(this->stream->get());
  EXPECT_EQ(driver::read(step.output + real_elements, 1)[0], 0.0F);
  EXPECT_TRUE(this->everything_is_back());
}

TYPED_TEST(graphs_over_a_buffer, that_were_never_made_release_the_block) {
  using driver = typename TestFixture::drive;
  driver::begin_capture(this->stream->get(), support::capture_mode::thread_local_);
  static_cast<void>(this->buffer->acquire(this->stream->get(), 4));
  ASSERT_TRUE(driver::unsafe_call());
  EXPECT_FALSE(driver::end_capture(this->stream->get())) << "the capture was invalidated by somebody";
  EXPECT_TRUE(this->buffer->wait_unpinned(std::chrono::seconds{5}));
  this->buffer.reset();
  EXPECT_TRUE(this->everything_is_back());
}

TYPED_TEST(graphs_over_a_buffer, hold_no_memory_nodes) {
  const auto step = this->make_step(64, 0x11);
  auto graph = this->capture(step);
  const auto nodes = TestFixture::drive::count(graph);
  EXPECT_EQ(nodes.memory, 0);
  EXPECT_EQ(nodes.total(), 2) << "the step's own fill and copy";
}

TYPED_TEST(graphs_over_a_buffer, own_a_block_once_however_often_it_is_acquired_in_a_capture) {
  using driver = typename TestFixture::drive;
  driver::begin_capture(this->stream->get());
  for (int layer = 0; layer < 61; ++layer) {
    static_cast<void>(this->buffer->acquire(this->stream->get(), 4));
  }
  auto graph = driver::end_capture(this->stream->get());
  EXPECT_EQ(this->buffer->pinned_bytes(), 4 * row_elements * sizeof(float));
  graph.reset();
  EXPECT_TRUE(this->buffer->wait_unpinned(std::chrono::seconds{5}));
  EXPECT_EQ(this->buffer->pinned_bytes(), 0U);
}

TYPED_TEST(graphs_over_a_buffer, keep_their_block_while_the_buffer_is_destroyed_inside_the_capture) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(4, 0x11);
  driver::begin_capture(this->stream->get());
  this->run(step, this->stream->get());
  this->buffer.reset();
  auto graph = driver::end_capture(this->stream->get());
  ASSERT_TRUE(graph);
  this->flush();
  this->tenant_moves_in();
  auto exec = driver::instantiate(graph);
  EXPECT_TRUE(this->replays_right(exec, step));
  this->tenant_moves_out();
}

TYPED_TEST(graphs_over_a_buffer, being_captured_defer_the_end_of_eager_use_of_the_same_stream) {
  using driver = typename TestFixture::drive;
  this->run(this->make_step(4, 0x11), this->stream->get());
  driver::begin_capture(this->stream->get(), support::capture_mode::global);
  this->buffer.reset();  // used eagerly on a stream that captures now: no event can be recorded there
  holdfast::collect(typename TestFixture::device{});
  EXPECT_GT(this->bytes->live_bytes(), 0U);
  EXPECT_TRUE(driver::end_capture(this->stream->get())) << "and the capture survives";
  EXPECT_TRUE(this->everything_is_back());
}

TYPED_TEST(graphs_over_a_buffer, may_end_after_the_streams_that_used_the_buffer) {
  using driver = typename TestFixture::drive;
  std::optional<typename driver::stream> eager{driver::make_stream()};
  this->run(this->make_step(4, 0x11), eager->get());
  auto graph = this->capture(this->make_step(4, 0x22));
  this->buffer.reset();  // from here on the stream is not asked for anything
  driver::synchronize(eager->get());
  eager.reset();
  graph.reset();
  EXPECT_TRUE(this->everything_is_back());
}

TYPED_TEST(graphs_over_a_buffer, may_end_after_the_stream_of_a_handle_that_outlived_the_buffer) {
  using driver = typename TestFixture::drive;
  std::optional<typename driver::stream> eager{driver::make_stream()};
  auto graph = this->capture(this->make_step(4, 0x22));
  auto rows = this->buffer->acquire(eager->get(), 4);
  this->buffer.reset();
  rows.release();
  driver::synchronize(eager->get());
  eager.reset();
  graph.reset();
  EXPECT_TRUE(this->everything_is_back());
}

TYPED_TEST(graphs_over_a_buffer, may_be_captured_on_a_stream_that_the_buffer_outlives) {
  using driver = typename TestFixture::drive;
  std::optional<typename driver::stream> capturing{driver::make_stream()};
  driver::begin_capture(capturing->get());
  auto rows = this->buffer->acquire(capturing->get(), 4);
  auto graph = driver::end_capture(capturing->get());
  rows.release();  // after the end of its capture
  capturing.reset();
  this->buffer.reset();
  graph.reset();
  EXPECT_TRUE(this->everything_is_back());
}

TYPED_TEST(graphs_over_a_buffer, can_be_used_eagerly_through_a_handle_held_past_the_capture) {
  using driver = typename TestFixture::drive;
  const auto step = this->make_step(4, 0x11);
  driver::begin_capture(this->stream->get());
  auto rows = this->buffer->acquire(this->stream->get(), 4);
  auto graph = driver::end_capture(this->stream->get());
  graph.reset();
  this->run(step, this->stream->get(), rows);  // eager, and the graph is gone
  this->buffer.reset();
  rows.release();
  this->flush();
  driver::synchronize(this->stream->get());
  EXPECT_EQ(driver::read(step.output + real_elements, 1)[0], 0.0F);
  EXPECT_TRUE(this->everything_is_back());
}

}  // namespace
