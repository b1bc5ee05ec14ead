// Every error Holdfast throws. Each message names the buffer or resource, what was asked and what is there; whatever
// throws one has changed nothing.
//
//   logic_error       a broken precondition (a negative extent, an implicit or invalidated capture, ...)
//   captured_growth   growth refused because live graphs hold the block (growth::refuse)
//   in_use            a second handle where only one may live
//   suspended         memory asked of a buffer that gave its own back to the device
//   out_of_memory     bytes asked, held by us, and free on the device
//   device_error      a device call failed; its code is kept
//
// Not here: error codes. Functions named try_... return instead of throwing.
#pragma once

#include <holdfast/version.hpp>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace holdfast::inline HOLDFAST_ABI {

struct logic_error : std::logic_error {
  using std::logic_error::logic_error;
};

struct captured_growth : logic_error {
  using logic_error::logic_error;
};

struct in_use : logic_error {
  using logic_error::logic_error;
};

struct suspended : logic_error {
  using logic_error::logic_error;
};

/// A call to the device's runtime failed. `code()` is the runtime's own number (a `cudaError_t`, or the host device's
/// `host::status`, which uses the same numbers).
class device_error : public std::runtime_error {
 public:
  device_error(int code, const std::string& what) : std::runtime_error(what), code_(code) {}
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

/// Memory could not be had. All figures in bytes: `requested()` by this call, `held()` by the resource or buffer that
/// asked (0 where it doesn't count), `free()` on the device at the time of failure (0 where unknown).
class out_of_memory : public std::bad_alloc {
 public:
  out_of_memory(const std::string& who, std::uint64_t requested, std::uint64_t held, std::uint64_t free)
      : what_(who + ": out of memory: " + std::to_string(requested) + " bytes asked, " + std::to_string(held) +
              " bytes held, " + std::to_string(free) + " bytes free on the device"),
        requested_(requested),
        held_(held),
        free_(free) {}

  [[nodiscard]] const char* what() const noexcept override { return what_.what(); }
  [[nodiscard]] std::uint64_t requested() const noexcept { return requested_; }
  [[nodiscard]] std::uint64_t held() const noexcept { return held_; }
  [[nodiscard]] std::uint64_t free() const noexcept { return free_; }

 private:
  std::runtime_error what_;  // a string whose copies cannot throw
  std::uint64_t requested_, held_, free_;
};

}  // namespace holdfast::HOLDFAST_ABI
