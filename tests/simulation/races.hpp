// Who may touch the same bytes at the same time: a race detector by vector clocks.
//
// Work is ordered by what the program and the library asked for, and by nothing else: streams, events recorded and waited
// for, graph edges, launches, what the host waited for, and the end of what graphs own, which all their launches precede. Two accesses of which one writes, and neither comes after the
// other by that order, are a race, in whatever order the work then happens to run.
//
// Eager work has its clock when it is queued, and captured work at every launch: nothing here depends on the schedule.
// Clocks are kept for chains of work in which each comes after the one before: one for each stream, some for branches of
// graphs. The host has none: it is known by what it has waited for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace simulation {

/// Bytes that a piece of work reads or writes: `rows` runs of `width` bytes, whose starts are `pitch` bytes apart.
struct access {
  const char* what;  // with `number`: whose, for people
  std::uint64_t number;
  bool writes;
  std::uintptr_t begin;
  std::size_t width, pitch = 0, rows = 1;

  [[nodiscard]] std::uintptr_t end() const { return begin + (rows - 1) * pitch + width; }
  [[nodiscard]] bool is_near(const access& other) const { return begin < other.end() && other.begin < end(); }

  [[nodiscard]] bool meets(const access& other) const {
    if (rows > other.rows) return other.meets(*this);
    for (std::size_t row = 0; row < rows; ++row) {
      if (other.meets(begin + row * pitch, begin + row * pitch + width)) return true;
    }
    return false;
  }

  /// Whether whoever meets the other meets this one.
  [[nodiscard]] bool covers(const access& other) const {
    if (rows == 1) return begin <= other.begin && other.end() <= end();
    return begin == other.begin && pitch == other.pitch && width >= other.width && rows >= other.rows;
  }

 private:
  [[nodiscard]] bool meets(std::uintptr_t from, std::uintptr_t to) const {
    if (to <= begin || end() <= from) return false;
    if (rows == 1 || from <= begin) return true;
    const std::size_t into = (from - begin) % pitch;
    return into < width || to - from > pitch - into;  // inside a run, or reaches the next one, which there is
  }
};

[[nodiscard]] inline access reads(const char* what, std::uint64_t number, const void* p, std::size_t bytes) {
  return {what, number, false, reinterpret_cast<std::uintptr_t>(p), bytes};
}
[[nodiscard]] inline access writes(const char* what, std::uint64_t number, const void* p, std::size_t bytes) {
  return {what, number, true, reinterpret_cast<std::uintptr_t>(p), bytes};
}

using accesses = std::vector<access>;

/// For each chain, up to which of its works everything is done.
class vector_clock {
 public:
  [[nodiscard]] bool includes(std::size_t chain, std::uint32_t time) const {
    return chain < times_.size() && times_[chain] >= time;
  }
  void include(std::size_t chain, std::uint32_t time) {
    if (chain >= times_.size()) times_.resize(chain + 1);
    times_[chain] = std::max(times_[chain], time);
  }
  void join(const vector_clock& other) {
    if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<std::uint32_t> times_;
};

/// What a graph does when it is launched, in a topological order.
struct recorded_work {
  struct node {
    std::vector<std::size_t> after;
    accesses does;
  };
  std::vector<node> nodes;
  std::vector<std::shared_ptr<vector_clock>> owns;  // things that go after all launches, which these collect
};

class races {
 public:
  /// Work that is queued one by one: a stream.
  struct line {
    std::size_t chain = 0;
    vector_clock done;  // before what is queued next
  };

  /// `report` is told of the first race.
  explicit races(void (*report)(std::string)) : report_(report) {}

  [[nodiscard]] line new_line() { return {new_chain(), {}}; }

  /// The host knows that this is done, and so does all that it queues from now on.
  void host_waits_for(const vector_clock& done) { host_.join(done); }
  /// What is queued on `on` next comes after this.
  static void wait(line& on, const vector_clock& done) { on.done.join(done); }
  /// What is done before anything that is queued on `on` from now on.
  [[nodiscard]] const vector_clock& point(line& on) const {
    on.done.join(host_);
    return on.done;
  }

  void work(line& on, const accesses& does) {
    on.done.join(host_);
    run(on.chain, on.done, does);
  }

  /// One run of a graph, after the `last` one of its executable, which it is then.
  void launch(line& on, const recorded_work& graph, vector_clock& last) {
    on.done.join(host_);
    on.done.join(last);
    std::vector<vector_clock> done(graph.nodes.size(), on.done);
    for (std::size_t i = 0; i < done.size(); ++i) {
      for (const std::size_t before : graph.nodes[i].after) done[i].join(done[before]);
      run(chain_for(done[i], on.chain), done[i], graph.nodes[i].does);
    }
    for (const vector_clock& node : done) on.done.join(node);
    last = on.done;
    for (const auto& owned : graph.owns) owned->join(on.done);
  }

  /// By the host itself, at once.
  void host_work(const access& does) {
    check(does, host_);
    forget(does);
  }

  /// The bytes are new ones, although others had the same addresses before.
  void forget(const access& bytes) {
    std::erase_if(past_, [&](const past& before) { return before.did.is_near(bytes); });
  }

 private:
  struct past {
    access did;
    std::size_t chain;
    std::uint32_t time;
  };

  std::size_t new_chain() {
    last_.push_back(0);
    return last_.size() - 1;
  }

  /// A chain all of whose work is done: the stream's own, or that of some branch.
  std::size_t chain_for(const vector_clock& done, std::size_t own) {
    if (done.includes(own, last_[own])) return own;
    for (const std::size_t branch : branches_) {
      if (done.includes(branch, last_[branch])) return branch;
    }
    branches_.push_back(new_chain());
    return branches_.back();
  }

  void run(std::size_t chain, vector_clock& done, const accesses& does) {
    const std::uint32_t time = ++last_[chain];
    done.include(chain, time);
    for (const access& one : does) {
      check(one, done);
      past_.push_back({one, chain, time});
    }
  }

  /// Earlier accesses that the new one stands for from now on are not kept.
  void check(const access& now, const vector_clock& done) {
    for (std::size_t i = 0; i < past_.size();) {
      past& before = past_[i];
      if (now.is_near(before.did)) {
        if (done.includes(before.chain, before.time)) {
          if ((now.writes || !before.did.writes) && now.covers(before.did)) {
            before = past_.back();
            past_.pop_back();
            continue;
          }
        } else if ((now.writes || before.did.writes) && now.meets(before.did)) {
          report_("a race: " + name(now) + " is not ordered after " + name(before.did) + " of the same bytes");
        }
      }
      ++i;
    }
  }

  static std::string name(const access& of) {
    return std::string(of.what) + (of.number == 0 ? "" : std::to_string(of.number)) +
           (of.writes ? " (a write)" : " (a read)");
  }

  void (*report_)(std::string);
  std::vector<std::uint32_t> last_;    // by chain: its newest work
  std::vector<std::size_t> branches_;  // chains of graphs' branches
  std::vector<past> past_;
  vector_clock host_;  // what it has waited for
};

}  // namespace simulation
