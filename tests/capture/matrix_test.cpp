// Promise 4: no library call invalidates a capture: in any mode, on a blocking or a non-blocking stream, made by the thread
// that captures or by another one, on a capturing stream or beside it, succeeding or refusing.
#include "support/buffers.hpp"

#include <holdfast/capture.hpp>
#include <holdfast/padded_head_vector.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/default.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

using support::small_shape;

template <class Entry>
class every_public_operation : public support::device_test<typename Entry::device> {
 protected:
  using device = typename Entry::device;
  using drive = support::driver<device>;
  using stream_type = typename device::stream_type;
  using buffer_type = holdfast::padded_query_buffer<float, device>;

  /// What operations act on; made afresh for each, before the capture begins.
  struct bench {
    typename drive::stream other = drive::make_stream();  // streams outlive the blocks used on them
    typename drive::stream third = drive::make_stream();
    decltype(Entry::make()) resource = Entry::make();
    support::counting_resource<device> bytes{holdfast::any_resource<device>{resource}};
    std::optional<buffer_type> buffer{std::in_place, bytes, small_shape};
    std::optional<buffer_type> full{std::in_place, bytes, small_shape,
                                    holdfast::buffer_options{.growth = holdfast::growth::refuse, .strict = true}};
    holdfast::lane<device> lane{holdfast::any_resource<device>{resource}};
    std::optional<holdfast::padded_head_vector<float, device>> sink{
        std::in_place, bytes, holdfast::head_vector_shape<float>{.heads = 3, .padded_heads = 8, .fill = 1.0F}};
    typename drive::graph graph = drive::make_graph();
    std::optional<holdfast::query_rows<float, device>> used;
    void* memory = nullptr;
    float values[3] = {1, 2, 3};

    bench() {
      buffer->reserve(4);
      full->reserve(4);
      used = buffer->acquire(other.get(), 4);
      memory = resource.allocate(other.get(), 4096, 256);
    }
    ~bench() {
      used.reset();
      resource.deallocate(other.get(), memory, 4096, 256);
      buffer.reset();
      full.reset();
      sink.reset();
      drive::synchronize(other.get());
      holdfast::collect(device{});
    }
    bench(const bench&) = delete;
    bench& operator=(const bench&) = delete;
  };

  struct operation {
    const char* name;
    std::function<void(bench&, stream_type capturing)> run;
  };

  template <class Call>
  static void refused(Call&& call) {
    EXPECT_THROW(call(), std::exception);
  }

  static std::vector<operation> operations() {
    return {
        // on the capturing stream
        {"acquire", [](bench& b, stream_type s) { static_cast<void>(b.buffer->acquire(s, 4)); }},
        {"acquire, first",
         [](bench& b, stream_type s) {
           buffer_type fresh{b.bytes, small_shape};
           static_cast<void>(fresh.acquire(s, 4));
         }},
        {"acquire, growing", [](bench& b, stream_type s) { static_cast<void>(b.buffer->acquire(s, 40)); }},
        {"acquire, growing twice",
         [](bench& b, stream_type s) {
           static_cast<void>(b.buffer->acquire(s, 40));
           static_cast<void>(b.buffer->acquire(s, 400));
         }},
        {"try_acquire, refused", [](bench& b, stream_type s) { EXPECT_FALSE(b.full->try_acquire(s, 40)); }},
        {"acquire, refused",
         [](bench& b, stream_type s) {
           refused([&] { static_cast<void>(b.full->acquire(s, 40)); });
           refused([&] { static_cast<void>(b.buffer->acquire(s, -1)); });
         }},
        {"acquire, out of memory",
         [](bench& b, stream_type s) {
           b.bytes.fail(0, 9);
           refused([&] { static_cast<void>(b.buffer->acquire(s, 40)); });
         }},
        {"handle kept", [](bench& b, stream_type s) { b.used = b.buffer->acquire(s, 4); }},
        {"release on the capturing stream", [](bench& b, stream_type s) { b.used->release(s); }},
        {"handle pin", [](bench& b, stream_type s) { EXPECT_TRUE(b.used->pin(s)); }},
        {"buffer pin", [](bench& b, stream_type s) { EXPECT_TRUE(b.buffer->pin(s)); }},
        {"pin a graph", [](bench& b, stream_type) { b.buffer->pin(b.graph.get()); }},
        {"restore_padding, refused", [](bench& b, stream_type s) { refused([&] { b.buffer->restore_padding(s); }); }},
        {"head vector", [](bench& b, stream_type s) { static_cast<void>(b.sink->acquire(s)); }},
        {"head vector assign, refused", [](bench& b, stream_type s) { refused([&] { b.sink->assign(s, b.values); }); }},
        {"resource, refused",
         [](bench& b, stream_type s) { refused([&] { static_cast<void>(b.resource.allocate(s, 64, 64)); }); }},
        {"any_resource, refused",
         [](bench& b, stream_type s) {
           holdfast::any_resource<device> any{b.resource};
           refused([&] { static_cast<void>(any.allocate(s, 64, 64)); });
         }},
        {"lane",
         [](bench& b, stream_type s) {
           static_cast<void>(b.lane.template padded_queries<float>(small_shape).acquire(s, 4));
         }},
        // beside it
        {"acquire beside", [](bench& b, stream_type) { static_cast<void>(b.buffer->acquire(b.other.get(), 4)); }},
        {"acquire beside, growing",
         [](bench& b, stream_type) { static_cast<void>(b.buffer->acquire(b.other.get(), 40)); }},
        {"acquire on a second stream",
         [](bench& b, stream_type) {
           auto rows = b.buffer->acquire(b.third.get(), 4);
           rows.release();
           static_cast<void>(b.buffer->acquire(b.other.get(), 4));
         }},
        {"acquire on the legacy stream",
         [](bench& b, stream_type) {
           static_cast<void>(
               b.buffer->try_acquire(drive::legacy_stream(), 4));  // refused when it would break the capture
         }},
        {"acquire on the per-thread stream",
         [](bench& b, stream_type) { static_cast<void>(b.buffer->acquire(drive::per_thread_stream(), 4)); }},
        {"reserve", [](bench& b, stream_type) { b.buffer->reserve(100); }},
        {"release", [](bench& b, stream_type) { b.used->release(); }},
        {"release beside", [](bench& b, stream_type) { b.used->release(b.other.get()); }},
        {"restore_padding beside", [](bench& b, stream_type) { b.buffer->restore_padding(b.other.get()); }},
        {"head vector made and assigned",
         [](bench& b, stream_type) {
           holdfast::padded_head_vector<float, device> made{b.bytes, {.heads = 3, .padded_heads = 8, .fill = 0.0F}};
           made.assign(b.other.get(), b.values);
         }},
        {"buffer made",
         [](bench& b, stream_type) {
           buffer_type made{b.bytes, small_shape};
         }},
        {"lane made",
         [](bench& b, stream_type) { holdfast::lane<device> made{holdfast::any_resource<device>{b.bytes}}; }},
        {"buffer moved",
         [](bench& b, stream_type) {
           buffer_type moved{std::move(*b.buffer)};
           b.buffer.emplace(std::move(moved));
         }},
        {"buffer destroyed",
         [](bench& b, stream_type) {
           b.used.reset();
           b.buffer.reset();
         }},
        {"buffer destroyed after an acquire",
         [](bench& b, stream_type s) {
           static_cast<void>(b.buffer->acquire(s, 4));
           b.used.reset();
           b.buffer.reset();
         }},
        {"head vector destroyed", [](bench& b, stream_type) { b.sink.reset(); }},
        {"collect", [](bench&, stream_type) { static_cast<void>(holdfast::collect(device{})); }},
        {"wait_unpinned",
         [](bench& b, stream_type) { static_cast<void>(b.buffer->wait_unpinned(std::chrono::milliseconds{1})); }},
        {"counts", [](bench&, stream_type) { static_cast<void>(holdfast::counts(device{}).pinned_bytes()); }},
        {"resource beside",
         [](bench& b, stream_type) {
           void* const p = b.resource.allocate(b.other.get(), 1 << 20, 4096);
           b.resource.deallocate(b.other.get(), p, 1 << 20, 4096);
         }},
        {"resource made and gone",
         [](bench& b, stream_type) {
           auto made = Entry::make();
           made.deallocate(b.other.get(), made.allocate(b.other.get(), 4096, 256), 4096, 256);
         }},
        {"trim",
         [](bench& b, stream_type) {
           if constexpr (requires { b.resource.trim(std::size_t{0}); }) {
             b.resource.trim(std::size_t{0});
           } else if constexpr (requires { b.resource.trim(); }) {
             b.resource.trim();
           }
         }},
        {"default_resource", [](bench&, stream_type) { static_cast<void>(holdfast::default_resource(device{})); }},
        {"memory", [](bench&, stream_type) { static_cast<void>(device{}.memory()); }},
    };
  }
};
TYPED_TEST_SUITE(every_public_operation, support::resources_under_test, support::resource_names);

TYPED_TEST(every_public_operation, leaves_every_capture_valid) {
  using driver = typename TestFixture::drive;
  for (const auto& call : TestFixture::operations()) {
    for (const support::capture_mode mode : support::capture_modes) {
      for (const support::stream_kind kind : support::stream_kinds) {
        for (const bool same_thread : {true, false}) {
          SCOPED_TRACE(std::string{call.name} + (same_thread ? ", same thread" : ", another thread") + ", mode " +
                       std::to_string(static_cast<int>(mode)) +
                       (kind == support::stream_kind::blocking ? ", blocking" : ", non-blocking"));
          auto stream = driver::make_stream(kind);
          typename TestFixture::bench scene;
          driver::begin_capture(stream.get(), mode);
          try {
            if (same_thread) {
              call.run(scene, stream.get());
            } else {
              std::thread{[&] {
                try {
                  call.run(scene, stream.get());
                } catch (const std::exception& error) {
                  ADD_FAILURE() << error.what();
                }
              }}.join();
            }
          } catch (const std::exception& error) {
            ADD_FAILURE() << error.what();
          }
          EXPECT_TRUE(driver::end_capture(stream.get())) << "the capture was invalidated";
        }
      }
    }
  }
}

}  // namespace
