// Buffers inside shared objects that are opened with RTLD_LOCAL and closed while graphs still own their blocks.
// HOLDFAST_TEST_PLUGINS: the same plugin built with shared template statics, without them, and by another compiler.
#include "plugin.hpp"

#include "support/cuda_driver.hpp"
#include "support/devices.hpp"
#include "support/host_driver.hpp"

#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/malloc.hpp>

#include <gtest/gtest.h>

#include <dlfcn.h>

#include <string>
#include <tuple>
#include <vector>

namespace {

std::vector<std::string> plugin_paths() {
  std::vector<std::string> paths;
  std::string all = HOLDFAST_TEST_PLUGINS;
  for (std::size_t start = 0; start < all.size();) {
    const std::size_t end = std::min(all.find('|', start), all.size());
    paths.push_back(all.substr(start, end - start));
    start = end + 1;
  }
  return paths;
}

class plugin {
 public:
  explicit plugin(const std::string& path) : path_(path), library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ != nullptr) {
      api_ = reinterpret_cast<const plugin_api* (*)()>(dlsym(library_, "holdfast_test_plugin"))();
    }
  }
  [[nodiscard]] bool opened() const { return library_ != nullptr; }
  [[nodiscard]] const plugin_api* operator->() const { return api_; }
  void close() { dlclose(library_); }
  [[nodiscard]] bool loaded() const {
    void* const found = dlopen(path_.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (found != nullptr) {
      dlclose(found);
    }
    return found != nullptr;
  }

 private:
  std::string path_;
  void* library_;
  const plugin_api* api_ = nullptr;
};

void make(const plugin& from, holdfast::host_device device) { from->make(device); }
[[maybe_unused]] void make(const plugin& from, holdfast::cuda_device device) { from->make_cuda(device); }
const void* acquire(const plugin& from, holdfast::host::stream_ref s, long rows) { return from->acquire(s, rows); }
[[maybe_unused]] const void* acquire(const plugin& from, cudaStream_t s, long rows) {
  return from->acquire_cuda(s, rows);
}

template <class Device>
class shared_objects : public support::device_test<Device> {};
TYPED_TEST_SUITE(shared_objects, support::both_devices, support::device_names);

TYPED_TEST(shared_objects, a_graph_that_owns_a_plugins_block_outlives_dlclose) {
  using driver = support::driver<TypeParam>;
  for (const std::string& path : plugin_paths()) {
    SCOPED_TRACE(path);
    plugin extension{path};
    ASSERT_TRUE(extension.opened()) << dlerror();
    auto stream = driver::make_stream();
    make(extension, TypeParam{});

    driver::begin_capture(stream.get());
    void* const rows = const_cast<void*>(acquire(extension, stream.get(), 3));
    TypeParam::fill(stream.get(), rows, std::byte{1}, 4);
    auto graph = driver::end_capture(stream.get());
    ASSERT_TRUE(graph);
    auto exec = driver::instantiate(graph);

    extension->destroy();
    extension.close();
    EXPECT_TRUE(extension.loaded()) << "a graph may call into it at any time";
    driver::launch(exec, stream.get());
    driver::synchronize(stream.get());
    exec.reset();
    graph.reset();
    EXPECT_TRUE(support::eventually([&] {
      extension->collect();
      return extension->pending() == 0;
    }));
  }
}

TYPED_TEST(shared_objects, a_plugin_that_only_allocated_leaves_the_device_usable) {
  using driver = support::driver<TypeParam>;
  for (const std::string& path : plugin_paths()) {
    SCOPED_TRACE(path);
    plugin extension{path};
    ASSERT_TRUE(extension.opened()) << dlerror();
    auto stream = driver::make_stream();
    make(extension, TypeParam{});
    static_cast<void>(acquire(extension, stream.get(), 3));
    extension->destroy();
    extension.close();
    holdfast::padded_query_buffer<float, TypeParam> own{
        holdfast::any_resource<TypeParam>{holdfast::malloc_resource<TypeParam>{TypeParam{}}},
        {.heads = 2, .padded_heads = 4, .head_dim = 8}};
    EXPECT_NO_THROW(own.reserve(3));
  }
}

TYPED_TEST(shared_objects, one_graph_can_own_blocks_of_several_plugins) {
  using driver = support::driver<TypeParam>;
  std::vector<plugin> extensions;
  for (const std::string& path : plugin_paths()) {
    extensions.emplace_back(path);
    ASSERT_TRUE(extensions.back().opened()) << dlerror();
    make(extensions.back(), TypeParam{});
  }
  auto stream = driver::make_stream();
  driver::begin_capture(stream.get());
  std::vector<float*> rows;
  for (const plugin& extension : extensions) {
    rows.push_back(static_cast<float*>(const_cast<void*>(acquire(extension, stream.get(), 2))));
    TypeParam::fill(stream.get(), rows.back(), std::byte{1}, sizeof(float));
  }
  auto graph = driver::end_capture(stream.get());
  ASSERT_TRUE(graph);
  for (const plugin& extension : extensions) {
    extension->destroy();
  }
  auto exec = driver::instantiate(graph);
  driver::launch(exec, stream.get());
  driver::synchronize(stream.get());
  for (const float* row : rows) {
    EXPECT_NE(driver::template read<float>(row, 1)[0], 0.0F);
  }
}

}  // namespace
