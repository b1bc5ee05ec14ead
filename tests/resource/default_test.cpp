// The default resources. Each test uses an ordinal of its own, since a default is made once a process.
#include "support/resources.hpp"

#include <holdfast/error.hpp>
#include <holdfast/resource/default.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

using holdfast::any_resource;
using holdfast::cuda_device;
using holdfast::host_device;

/// The environment's HOLDFAST_RESOURCE, for as long as it lives.
class environment {
 public:
  explicit environment(const char* value) {
    if (const char* const now = std::getenv(variable)) former_ = now;
    set(value);
  }
  environment(const environment&) = delete;
  environment& operator=(const environment&) = delete;
  ~environment() { set(former_ ? former_->c_str() : nullptr); }

 private:
  static constexpr const char* variable = "HOLDFAST_RESOURCE";
  static void set(const char* value) {
    static_cast<void>(value == nullptr ? ::unsetenv(variable) : ::setenv(variable, value, 1));
  }
  std::optional<std::string> former_;
};

template <class Device>
std::string refusal(Device device, const char* name) {
  try {
    static_cast<void>(holdfast::detail::make_resource(device, name));
    return {};
  } catch (const holdfast::logic_error& refused) {
    return refused.what();
  }
}

TEST(default_resource, is_of_its_device) {
  const environment none{nullptr};
  EXPECT_EQ(holdfast::default_resource(host_device{1}).device().ordinal, 1);
  EXPECT_EQ(holdfast::default_resource(host_device{1}).persistent().device().ordinal, 1);
}

TEST(default_resource, keeps_what_stays_in_virtual_memory) {
  const environment none{nullptr};
  EXPECT_STREQ(holdfast::default_resource(host_device{1}).persistent().name(), "vmm_resource");
  EXPECT_TRUE(holdfast::default_resource(host_device{1}).persistent().extensible());
  EXPECT_FALSE(holdfast::default_resource(host_device{1}).extensible());
}

TEST(default_resource, falls_back_where_there_is_no_virtual_memory_and_says_so) {
  const environment none{nullptr};
  const auto all = holdfast::detail::make_default<host_device>({}, false);
  EXPECT_STREQ(all.persistent().name(), "malloc_resource");
  EXPECT_TRUE(all.persistent() == all);
}

TEST(default_resource, that_was_chosen_is_used_for_everything) {
  const auto chosen = holdfast::detail::make_resource(host_device{}, "malloc");
  EXPECT_TRUE(chosen.persistent() == chosen);
}

TEST(default_resource, stays_the_same) {
  const environment none{nullptr};
  EXPECT_TRUE(holdfast::default_resource(host_device{1}) == holdfast::default_resource(host_device{1}));
}

TEST(default_resource, is_one_a_device) {
  const environment none{nullptr};
  EXPECT_FALSE(holdfast::default_resource(host_device{1}) == holdfast::default_resource(host_device{2}));
}

TEST(default_resource, takes_the_environments_choice) {
  const environment choice{"malloc"};
  EXPECT_STREQ(holdfast::default_resource(host_device{3}).name(), "malloc_resource");
}

TEST(default_resource, takes_an_empty_choice_for_none) {
  EXPECT_STREQ(holdfast::detail::make_resource(host_device{}, "").name(), "default_resource");
}

TEST(default_resource, refuses_a_name_that_the_device_lacks_and_lists_what_it_has) {
  EXPECT_EQ(refusal(host_device{}, "async"), "HOLDFAST_RESOURCE=async: host devices have malloc, caching, vmm, guard");
  EXPECT_EQ(refusal(cuda_device{}, "mallocs"),
            "HOLDFAST_RESOURCE=mallocs: cuda devices have async, malloc, caching, cub, vmm, guard");
}

TEST(default_resource, remembers_nothing_of_a_refusal) {
  {
    const environment choice{"cub"};
    EXPECT_THROW(static_cast<void>(holdfast::default_resource(host_device{4})), holdfast::logic_error);
  }
  const environment none{nullptr};
  EXPECT_STREQ(holdfast::default_resource(host_device{4}).name(), "default_resource");
}

TEST(default_resource, can_be_replaced_and_returns_the_former) {
  const environment none{nullptr};
  const any_resource<host_device> former = holdfast::default_resource(host_device{1});
  const any_resource<host_device> mine{support::counting_resource<host_device>{host_device{1}}};
  const auto returned = holdfast::set_default_resource(mine);
  EXPECT_TRUE(holdfast::default_resource(host_device{1}) == mine);
  ASSERT_TRUE(returned);
  EXPECT_TRUE(*returned == former);
  holdfast::set_default_resource(*returned);
  EXPECT_TRUE(holdfast::default_resource(host_device{1}) == former);
}

TEST(default_resource, can_be_set_before_its_first_use) {
  const environment choice{"no such resource"};
  const holdfast::malloc_resource<host_device> mine{host_device{5}};
  EXPECT_FALSE(holdfast::set_default_resource(mine));
  EXPECT_TRUE(holdfast::default_resource(host_device{5}) == any_resource<host_device>{mine});
}

TEST(default_resource, is_made_once_by_many_threads) {
  const environment none{nullptr};
  std::vector<std::optional<any_resource<host_device>>> seen(8);
  std::vector<std::thread> threads;
  for (auto& one : seen) threads.emplace_back([&one] { one = holdfast::default_resource(host_device{7}); });
  for (std::thread& one : threads) one.join();
  for (const auto& one : seen) EXPECT_TRUE(*one == *seen.front());
}

class default_resource_cuda : public support::device_test<cuda_device> {};

TEST_F(default_resource_cuda, is_virtual_memory_for_what_stays) {
  const environment none{nullptr};
  const auto all = holdfast::default_resource(cuda_device{});
  EXPECT_STREQ(all.persistent().name(), cuda_device{}.has_virtual_memory() ? "vmm_resource" : "async_resource");
}

TEST_F(default_resource_cuda, is_async_for_calls) {
  EXPECT_STREQ(holdfast::detail::make_default<cuda_device>({}, false).name(), "async_resource");
}

TEST_F(default_resource_cuda, has_what_the_environment_can_choose) {
  EXPECT_STREQ(holdfast::detail::make_resource(cuda_device{}, "async").name(), "async_resource");
  EXPECT_STREQ(holdfast::detail::make_resource(cuda_device{}, "malloc").name(), "malloc_resource");
  EXPECT_STREQ(holdfast::detail::make_resource(cuda_device{}, "caching").name(), "caching_resource");
  EXPECT_STREQ(holdfast::detail::make_resource(cuda_device{}, "cub").name(), "cub_caching_resource");
  EXPECT_STREQ(holdfast::detail::make_resource(cuda_device{}, "vmm").name(), "vmm_resource");
  EXPECT_STREQ(holdfast::detail::make_resource(cuda_device{}, "guard").name(), "guard_resource");
}

}  // namespace
