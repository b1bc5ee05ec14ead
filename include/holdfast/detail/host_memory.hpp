// The host device's memory: a reservation is inaccessible address space, physical memory is a range of one sparse
// memory file, and a mapping is a shared mapping of it, so that the same bytes can appear at many addresses.
#include <holdfast/device/host.hpp>

#ifndef HOLDFAST_DETAIL_HOST_MEMORY_HPP
#define HOLDFAST_DETAIL_HOST_MEMORY_HPP

#include <holdfast/detail/host_state.hpp>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace holdfast::inline HOLDFAST_ABI {
namespace host {
namespace detail {

inline std::size_t page_size() {
  static const std::size_t size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

inline std::size_t default_memory_size() {
  constexpr std::size_t most = std::size_t{64} << 30;
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  return pages <= 0 ? most : std::min(most, static_cast<std::size_t>(pages) * page_size());
}

[[noreturn, gnu::noinline, gnu::cold]] inline void fail_system(const char* call) {
  const int error = errno;
  fail(error == ENOMEM ? status::memory_allocation : status::unknown,
       std::string(call) + ": " + std::generic_category().message(error));
}

inline std::uintptr_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

inline void check_bytes(const char* call, std::size_t bytes) {
  if (bytes == 0 || bytes % page_size() != 0) {
    fail(status::invalid_value,
         std::string(call) + ": " + std::to_string(bytes) + " bytes are no multiple of " + std::to_string(page_size()));
  }
}

inline void check_range(const char* call, const void* p, std::size_t bytes) {
  check_bytes(call, bytes);
  if (p == nullptr || address(p) % page_size() != 0 ||
      bytes > std::numeric_limits<std::uintptr_t>::max() - address(p)) {
    fail(status::invalid_value, std::string(call) + ": no such range of pages");
  }
}

inline std::size_t free_bytes(const device_state& d) {
  return d.memory_size > d.memory_used ? d.memory_size - d.memory_used : 0;
}

/// Gives the bytes back once nothing names or maps them.
inline void free_if_unused(registry& reg, std::unordered_map<std::uint64_t, physical_memory>::iterator m) {
  const physical_memory& memory = m->second;
  if (!memory.destroyed || memory.mappings != 0) return;
  (void)::fallocate(reg.memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory.offset,
                    static_cast<off_t>(memory.bytes));
  device_at(reg, memory.ordinal).memory_used -= memory.bytes;
  reg.physical.erase(m);
}

inline std::unordered_map<std::uint64_t, physical_memory>::iterator find_physical(registry& reg, physical_ref m,
                                                                                  int ordinal, const char* call) {
  const auto found = internals::owner(m) == &reg ? reg.physical.find(internals::id(m)) : reg.physical.end();
  if (found == reg.physical.end() || found->second.destroyed || found->second.ordinal != ordinal) {
    fail(status::invalid_handle, std::string(call) + ": no such physical memory on this device");
  }
  return found;
}

}  // namespace detail

inline void set_memory_size(host_device device, std::size_t bytes) {
  detail::registry& reg = detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  detail::device_at(reg, device.ordinal).memory_size = bytes;
}

}  // namespace host

inline memory_info host_device::memory() const {
  host::detail::check_phase("memory", true);
  host::detail::registry& reg = host::detail::shared_registry();
  const std::lock_guard lock(reg.mutex);
  const host::detail::device_state& d = host::detail::device_at(reg, ordinal);
  return {host::detail::free_bytes(d), d.memory_size};
}

inline std::size_t host_device::granularity(const physical_options&) const { return host::detail::page_size(); }

inline void* host_device::reserve(std::size_t bytes, std::size_t alignment) const {
  using namespace host::detail;
  check_phase("reserve", true);
  check_bytes("reserve", bytes);
  if ((alignment & (alignment - 1)) != 0) {
    fail(host::status::invalid_value, "reserve: alignment " + std::to_string(alignment) + " is no power of two");
  }
  const std::size_t slack = alignment > page_size() ? alignment - page_size() : 0;
  if (bytes > std::numeric_limits<std::size_t>::max() - slack) {
    throw out_of_memory("host device " + std::to_string(ordinal) + ": address space", bytes, 0, 0);
  }
  registry& reg = shared_registry();
  const std::lock_guard lock(reg.mutex);
  (void)device_at(reg, ordinal);
  void* const raw = ::mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw out_of_memory("host device " + std::to_string(ordinal) + ": address space", bytes, 0, 0);
  }
  std::byte* const begin = static_cast<std::byte*>(raw);
  const std::size_t before = slack == 0 ? 0 : (alignment - address(raw) % alignment) % alignment;
  if (before != 0) (void)::munmap(begin, before);
  if (slack != before) (void)::munmap(begin + before + bytes, slack - before);
  reg.reservations.emplace(address(begin + before), bytes);
  return begin + before;
}

inline void host_device::unreserve(void* p, std::size_t bytes) const {
  using namespace host::detail;
  check_phase("unreserve", true);
  check_range("unreserve", p, bytes);
  registry& reg = shared_registry();
  const std::lock_guard lock(reg.mutex);
  const auto reservation = reg.reservations.find(address(p));
  if (reservation == reg.reservations.end() || reservation->second != bytes) {
    fail(host::status::invalid_value, "unreserve: not what reserve returned");
  }
  const auto mapped = reg.mappings.lower_bound(address(p));
  if (mapped != reg.mappings.end() && mapped->first < address(p) + bytes) {
    fail(host::status::invalid_value, "unreserve: something is still mapped there");
  }
  if (::munmap(p, bytes) != 0) fail_system("unreserve");
  reg.reservations.erase(reservation);
}

inline host_device::physical_type host_device::create(std::size_t bytes, const physical_options& options) const {
  using namespace host::detail;
  check_phase("create", true);
  check_bytes("create", bytes);
  if (options.sharing != sharing::none) {
    throw logic_error("create: a host device's memory cannot be shared with other processes");
  }
  registry& reg = shared_registry();
  const std::lock_guard lock(reg.mutex);
  device_state& d = device_at(reg, ordinal);
  const auto none_left = [&] {
    return out_of_memory("host device " + std::to_string(ordinal), bytes, d.memory_used, free_bytes(d));
  };
  if (bytes > free_bytes(d) ||
      bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max() - reg.memory_end)) {
    throw none_left();
  }
  if (reg.memory_file < 0) {
    reg.memory_file = ::memfd_create("holdfast host device", MFD_CLOEXEC);
    if (reg.memory_file < 0) fail_system("create");
  }
  // Offsets are never used again: a sparse file has enough of them, and freed ranges become holes.
  const std::int64_t end = reg.memory_end + static_cast<std::int64_t>(bytes);
  if (::ftruncate(reg.memory_file, end) != 0) throw none_left();
  const std::uint64_t id = reg.last_physical + 1;
  reg.physical.emplace(id, physical_memory{ordinal, reg.memory_end, bytes});
  reg.last_physical = id;
  reg.memory_end = end;
  d.memory_used += bytes;
  return internals::make_physical_ref(reg, id);
}

inline void host_device::destroy(physical_type memory) const {
  using namespace host::detail;
  check_phase("destroy", true);
  registry& reg = shared_registry();
  const std::lock_guard lock(reg.mutex);
  const auto found = find_physical(reg, memory, ordinal, "destroy");
  found->second.destroyed = true;
  free_if_unused(reg, found);
}

inline void host_device::map(void* p, std::size_t bytes, physical_type memory) const {
  using namespace host::detail;
  check_phase("map", true);
  check_range("map", p, bytes);
  registry& reg = shared_registry();
  const std::lock_guard lock(reg.mutex);
  const auto found = find_physical(reg, memory, ordinal, "map");
  if (bytes > found->second.bytes) {
    fail(host::status::invalid_value,
         "map: " + std::to_string(bytes) + " bytes of physical memory that has " + std::to_string(found->second.bytes));
  }
  const auto past = reg.reservations.upper_bound(address(p));
  if (past == reg.reservations.begin() || std::prev(past)->first + std::prev(past)->second < address(p) + bytes) {
    fail(host::status::invalid_value, "map: the range is not inside one reservation");
  }
  const auto next = reg.mappings.lower_bound(address(p));
  const bool meets_next = next != reg.mappings.end() && next->first < address(p) + bytes;
  const bool meets_former =
      next != reg.mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address(p);
  if (meets_next || meets_former) fail(host::status::invalid_value, "map: something is mapped there already");
  const auto entry = reg.mappings.emplace_hint(next, address(p), mapping{bytes, found->first});
  if (::mmap(p, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, reg.memory_file, found->second.offset) == MAP_FAILED) {
    reg.mappings.erase(entry);
    fail_system("map");
  }
  ++found->second.mappings;
  ++reg.counts.mappings;
}

inline void host_device::allow(void* p, std::size_t bytes, access allowed) const {
  using namespace host::detail;
  check_phase("allow", true);
  check_range("allow", p, bytes);
  registry& reg = shared_registry();
  const std::lock_guard lock(reg.mutex);
  (void)device_at(reg, ordinal);
  const std::uintptr_t end = address(p) + bytes;
  std::uintptr_t mapped = address(p);  // from p up to here
  auto m = reg.mappings.upper_bound(mapped);
  for (m = m == reg.mappings.begin() ? m : std::prev(m); mapped < end && m != reg.mappings.end() && m->first <= mapped;
       ++m) {
    mapped = std::max(mapped, m->first + m->second.bytes);
  }
  if (mapped < end) fail(host::status::invalid_value, "allow: not all of the range is mapped");
  if (::mprotect(p, bytes, allowed == access::read ? PROT_READ : PROT_READ | PROT_WRITE) != 0) fail_system("allow");
}

inline void host_device::unmap(void* p, std::size_t bytes) const {
  using namespace host::detail;
  check_phase("unmap", true);
  check_range("unmap", p, bytes);
  registry& reg = shared_registry();
  const std::lock_guard lock(reg.mutex);
  const auto first = reg.mappings.lower_bound(address(p));
  const auto last = reg.mappings.lower_bound(address(p) + bytes);
  const bool cuts_first =
      first != reg.mappings.begin() && std::prev(first)->first + std::prev(first)->second.bytes > address(p);
  if (first == last || cuts_first || std::prev(last)->first + std::prev(last)->second.bytes > address(p) + bytes) {
    fail(host::status::invalid_value, "unmap: nothing is mapped there, or the range would cut a mapping");
  }
  // Also across gaps between mappings: those are reserved, or the next range's check would have failed.
  for (auto m = first; m != last; m = reg.mappings.erase(m)) {
    void* const begin = reinterpret_cast<void*>(m->first);
    if (::mmap(begin, m->second.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED) {
      fail_system("unmap");
    }
    const auto memory = reg.physical.find(m->second.physical);
    --memory->second.mappings;
    free_if_unused(reg, memory);
  }
}

}  // namespace holdfast::HOLDFAST_ABI

#endif
