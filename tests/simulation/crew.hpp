// Threads that take turns: what one of them is given to do is done when the call returns. So a program on several threads
// runs the same each time, but for what it leaves to all of them at once.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <semaphore>
#include <thread>
#include <vector>

namespace simulation {

class crew {
 public:
  crew() = default;
  crew(const crew&) = delete;
  crew& operator=(const crew&) = delete;
  ~crew() { dismiss(); }

  /// By the thread of that number; 0 is the caller's own. `work` doesn't throw.
  void run(int thread, const std::function<void()>& work) {
    if (thread == 0) {
      work();
    } else {
      member& one = at(thread);
      one.begin(work);
      one.done.acquire();
    }
  }

  /// By threads 0 to `last`, at the same time.
  void run_together(int last, const std::function<void(int)>& work) {
    std::vector<std::function<void()>> parts;
    for (int thread = 0; thread <= last; ++thread) parts.emplace_back([&work, thread] { work(thread); });
    for (int thread = 1; thread <= last; ++thread) at(thread).begin(parts[static_cast<std::size_t>(thread)]);
    work(0);
    for (int thread = 1; thread <= last; ++thread) at(thread).done.acquire();
  }

  /// The threads end, and what is bound to them with them.
  void dismiss() {
    for (const auto& one : members_) {
      one->begin({});
      one->thread.join();
    }
    members_.clear();
  }

 private:
  struct member {
    std::function<void()> work{};
    std::binary_semaphore given{0}, done{0};
    std::thread thread{[this] {
      for (;;) {
        given.acquire();
        if (!work) return;
        work();
        done.release();
      }
    }};

    void begin(std::function<void()> next) {
      work = std::move(next);
      given.release();
    }
  };

  member& at(int thread) {
    while (members_.size() < static_cast<std::size_t>(thread)) members_.push_back(std::make_unique<member>());
    return *members_[static_cast<std::size_t>(thread) - 1];
  }

  std::vector<std::unique_ptr<member>> members_;
};

}  // namespace simulation
