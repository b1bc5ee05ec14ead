// Runs seeded programs of the simulation, in child processes, because memory misuse may crash them; the one that fails is
// shrunk and printed.
//
//   simulation [--programs N] [--first SEED] [--jobs N] [--seed SEED] [--mutant NAME] [--expect-failure]
//
// SEED says which programs: first, first + 1, ... `--seed` runs that one alone, and tells what it does. With
// --expect-failure it is a failure to find none; otherwise HOLDFAST_SIMULATION_PROGRAMS in the environment replaces N.
#include "memory.hpp"
#include "mutants.hpp"
#include "program.hpp"
#include "world.hpp"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using namespace simulation;

constexpr unsigned patience = 30;  // seconds, for a program; more is a hang
constexpr int most_jobs = 64;
constexpr int schedules = 12;  // tried for each smaller program
constexpr int attempts = 400;  // at a smaller program
constexpr std::chrono::seconds patience_with_all{60};

/// What a child leaves behind.
struct shared {
  std::uint64_t current[most_jobs];
  std::uint64_t done[most_jobs];
  std::uint64_t schedule;
  char what[512];
};
shared* left = nullptr;

struct options {
  std::uint64_t programs = 20000;
  std::uint64_t first = 1;
  std::optional<std::uint64_t> only;
  int jobs = 2;
  bool expect_failure = false;
};

/// In a child: whether it went well. The world is left as it is: a broken one may not survive its end.
bool runs(const program& made, bool tell) {
  tell_misuse = [](const std::string& what) { std::snprintf(left->what, sizeof left->what, "%s", what.c_str()); };
  auto* const made_for_it = new world(made, tell);
  if (!made_for_it->run()) return false;
  delete made_for_it;
  return found_misuse.empty();
}

/// Forks. The parent has never used the device, which a child could not use then.
template <class Child>
pid_t spawn(const Child& child) {
  std::fflush(stdout);
  const pid_t id = fork();
  if (id == 0) {
    const bool good = child();
    std::fflush(stdout);
    _exit(good ? 0 : 1);
  }
  return id;
}

/// How a child ended; empty when all is well.
std::string verdict(int status) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  if (left->what[0] != '\0') return left->what;
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGALRM ? "it hangs" : strsignal(WTERMSIG(status));
  return "it ended with status " + std::to_string(WEXITSTATUS(status));
}

std::string run_alone(const program& made, bool tell) {
  left->what[0] = '\0';
  int status = 0;
  waitpid(spawn([&] {
            alarm(patience);
            return runs(made, tell);
          }),
          &status, 0);
  return verdict(status);
}

/// Whether it fails under one of a few schedules, which is then its own.
bool fails(program& made) {
  left->what[0] = '\0';
  int status = 0;
  waitpid(spawn([&] {
            if (freopen("/dev/null", "w", stderr) == nullptr) return false;  // a sanitizer would tell each time
            generator next(made.schedule);
            program again = made;
            for (int i = 0; i < schedules; ++i, again.schedule = next()) {
              alarm(patience / 5);
              left->schedule = again.schedule;
              if (!runs(again, false)) return false;
            }
            return true;
          }),
          &status, 0);
  if (verdict(status).empty()) return false;
  made.schedule = left->schedule;
  return true;
}

void report(std::uint64_t seed, const std::string& what) {
  std::printf("program %llu failed: %s\n", static_cast<unsigned long long>(seed), what.c_str());
  program failing = make_program(seed);
  const std::size_t length = failing.operations.size();
  if (!fails(failing)) {
    std::printf("  not when it runs alone; see what ran before it\n");
    return;
  }
  const auto end = std::chrono::steady_clock::now() + patience_with_all;
  failing = shrink(std::move(failing), attempts,
                   [&](program& smaller) { return std::chrono::steady_clock::now() < end && fails(smaller); });
  std::printf("  of its %zu operations, these are enough (schedule %llu):\n", length,
              static_cast<unsigned long long>(failing.schedule));
  const std::string again = run_alone(failing, true);
  std::printf("  => %s\n  again: --seed %llu\n", again.c_str(), static_cast<unsigned long long>(seed));
}

/// The seed of a program that failed, if any.
std::optional<std::uint64_t> run_all(const options& o) {
  std::vector<pid_t> children;
  for (int j = 0; j < o.jobs; ++j) {
    children.push_back(spawn([&] {
      for (std::uint64_t i = static_cast<std::uint64_t>(j); i < o.programs; i += static_cast<std::uint64_t>(o.jobs)) {
        if (left->done[j] % 64 == 0) alarm(patience);
        left->current[j] = o.first + i;
        if (!runs(make_program(o.first + i), false)) return false;
        ++left->done[j];
      }
      return true;
    }));
  }
  std::optional<std::uint64_t> failed;
  for (std::size_t running = children.size(); running != 0; --running) {
    int status = 0;
    const pid_t id = waitpid(-1, &status, 0);
    for (std::size_t j = 0; j < children.size(); ++j) {
      if (children[j] != id) continue;
      children[j] = 0;
      if (!verdict(status).empty() && !failed) {
        failed = left->current[j];
        std::printf("after %llu programs: ", static_cast<unsigned long long>(left->current[j] - o.first + 1));
        report(*failed, verdict(status));
        for (const pid_t other : children) {
          if (other != 0) kill(other, SIGKILL);
        }
      }
    }
  }
  return failed;
}

[[noreturn]] void usage(const char* argument) {
  std::fprintf(stderr, "what is '%s'?\n", argument);
  std::exit(2);
}

options read(int argc, char** argv) {
  options o;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--expect-failure") {
      o.expect_failure = true;
      continue;
    }
    if (i + 1 == argc) usage(argv[i]);
    const char* const value = argv[++i];
    if (name == "--mutant") {
      int which = 0;
      while (which < static_cast<int>(mutant::count) && std::string_view{mutant_names[which]} != value) ++which;
      if (which == static_cast<int>(mutant::count)) usage(value);
      active_mutant = static_cast<mutant>(which);
      continue;
    }
    const std::uint64_t number = std::strtoull(value, nullptr, 0);
    if (name == "--programs") {
      o.programs = number;
    } else if (name == "--first") {
      o.first = number;
    } else if (name == "--seed") {
      o.only = number;
    } else if (name == "--jobs" && number >= 1 && number <= most_jobs) {
      o.jobs = static_cast<int>(number);
    } else {
      usage(argv[i - 1]);
    }
  }
  const char* const programs = std::getenv("HOLDFAST_SIMULATION_PROGRAMS");
  if (programs != nullptr && !o.expect_failure) o.programs = std::strtoull(programs, nullptr, 0);
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const options o = read(argc, argv);
  void* const memory = mmap(nullptr, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  left = static_cast<shared*>(memory);

  if (o.only) {
    std::printf("program %llu:\n", static_cast<unsigned long long>(*o.only));
    const std::string what = run_alone(make_program(*o.only), true);
    std::printf("  => %s\n", what.empty() ? "all is well" : what.c_str());
    if (!what.empty()) report(*o.only, what);
    return what.empty() == o.expect_failure ? 1 : 0;
  }

  const auto start = std::chrono::steady_clock::now();
  const bool failed = run_all(o).has_value();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::uint64_t done = 0;
  for (int j = 0; j < o.jobs; ++j) done += left->done[j];
  std::printf("%llu programs ran well, in %.1f s by %d processes (%.0f a second)\n",
              static_cast<unsigned long long>(done), took.count(), o.jobs, static_cast<double>(done) / took.count());
  if (o.expect_failure)
    std::printf("%s\n", failed ? "found, as it should be" : "nothing found, but something is wrong");
  return failed == o.expect_failure ? 0 : 1;
}
