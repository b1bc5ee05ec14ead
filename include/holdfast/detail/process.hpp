// What a process can do to memory that outlives its makers: exit, fork, and unload the code that a callback needs.
#pragma once

#include <holdfast/version.hpp>

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace holdfast::inline HOLDFAST_ABI::detail {

/// False once the process is exiting, or in a forked child: the device is gone or somebody else's, destructors do
/// nothing, and what is left is leaked.
[[gnu::visibility("default")]] inline std::atomic<bool>& device_usable() noexcept {
  static std::atomic<bool> usable{true};
  return usable;
}

/// A number of the calling thread's that no other ever had, unlike std::thread::id, which the next one may get.
[[gnu::visibility("default")]] inline std::uint64_t this_thread() noexcept {
  static std::atomic<std::uint64_t> last{0};
  thread_local const std::uint64_t mine = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return mine;
}

/// Makes the shared object that holds this code stay loaded: a graph may call into it at any time, and so may the exit.
inline void stay_resident() noexcept {
  static const bool resident = [] {
    Dl_info here{};
    if (dladdr(reinterpret_cast<void*>(&stay_resident), &here) != 0 && here.dli_fname != nullptr) {
      static_cast<void>(dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE));
    }
    return true;
  }();
  static_cast<void>(resident);
}

/// Starts to watch for exit and fork. Called after the device has been used once: exit handlers run in reverse order,
/// so this one runs before the runtime's own, and before the destructors of statics that existed by then.
inline void watch_process() noexcept {
  static const bool watching = [] {
    stay_resident();  // a handler of code that is unloaded would run then, and not at the exit
    static_cast<void>(device_usable());
    static_cast<void>(std::atexit([] { device_usable().store(false, std::memory_order_relaxed); }));
    static_cast<void>(
        pthread_atfork(nullptr, nullptr, [] { device_usable().store(false, std::memory_order_relaxed); }));
    return true;
  }();
  static_cast<void>(watching);
}

}  // namespace holdfast::HOLDFAST_ABI::detail
