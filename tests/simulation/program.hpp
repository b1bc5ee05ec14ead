// A program: a list of operations drawn from a seed. Their arguments are small numbers that the world makes sense of when
// it comes to them (the third handle there is, a stream, some rows), and what makes no sense then, or breaks the user's
// side of the rules, is skipped: so every part of a program is a program, which is what shrinking needs.
// Streams, threads and resources of the world are drawn from the same seed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <vector>

namespace simulation {

enum class verb : std::uint8_t {
  acquire_rows,      // lane, stream, rows
  acquire_scratch,   // lane, stream, rows
  acquire_anchored,  // lane, stream, rows
  allocate,          // lane, stream, bytes
  use,               // handle: writes it all, and looks at it later on
  write,             // handle
  check,             // handle: is what was written still there?
  hand_over,         // handle, stream: that is where it is used from now on
  pin,               // handle, stream that captures
  release,           // handle
  wait,              // stream, stream: the first waits for the second; forks and joins captures
  begin_capture,     // stream, mode
  end_capture,       // which
  instantiate,       // graph
  clone,             // graph
  update,            // executable, graph
  launch,            // executable, stream
  drop_graph,        // graph
  drop_exec,         // executable
  drop_buffer,       // lane
  drop_lane,         // lane
  reserve,           // lane, rows
  restore,           // lane, stream
  suspend,           // lane
  resume,            // lane
  collect,
  fail,            // lane, how often
  synchronize,     // stream
  recycle_stream,  // the one that may come and go
  trim,            // lane, stream, how
  turn,            // thread: it goes on with what follows
  crowd,           // lane: all threads at once
  count
};

struct operation {
  verb what;
  std::array<std::uint8_t, 4> with;
};

struct program {
  std::uint64_t seed = 0;
  std::uint64_t schedule = 0;  // in what order queued work runs
  std::vector<operation> operations;
};

/// splitmix64: the same numbers everywhere.
class generator {
 public:
  explicit generator(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return (*this)() % n; }

 private:
  std::uint64_t state_;
};

struct weight {
  verb what;
  unsigned usual;
};

/// Draws operations by weights.
class mixture {
 public:
  template <std::size_t N>
  explicit mixture(const weight (&weights)[N]) : weights_(weights, weights + N) {}

  /// Likes some better than others from now on, and some not at all: different mixtures together reach what an even one
  /// does not.
  void bias(generator& random) {
    static constexpr unsigned factors[] = {0, 1, 2, 2, 3, 8};
    for (weight& w : weights_) w.usual *= factors[random.below(std::size(factors))];
  }

  [[nodiscard]] verb operator()(generator& random) const {
    std::uint64_t total = 0;
    for (const weight& w : weights_) total += w.usual;
    if (total == 0) return verb::collect;
    std::uint64_t which = random.below(total);
    auto w = weights_.begin();
    for (; which >= w->usual; ++w) which -= w->usual;
    return w->what;
  }

 private:
  std::vector<weight> weights_;
};

inline constexpr weight anything[] = {
    {verb::acquire_rows, 10},
    {verb::acquire_scratch, 16},
    {verb::allocate, 4},
    {verb::use, 14},
    {verb::write, 8},
    {verb::check, 10},
    {verb::hand_over, 7},
    {verb::pin, 5},
    {verb::release, 16},
    {verb::wait, 9},
    {verb::begin_capture, 7},
    {verb::end_capture, 6},
    {verb::instantiate, 6},
    {verb::clone, 1},
    {verb::update, 1},
    {verb::launch, 12},
    {verb::drop_graph, 4},
    {verb::drop_exec, 3},
    {verb::drop_buffer, 2},
    {verb::drop_lane, 1},
    {verb::reserve, 2},
    {verb::restore, 1},
    {verb::suspend, 1},
    {verb::resume, 2},
    {verb::collect, 2},
    {verb::fail, 2},
    {verb::synchronize, 3},
    {verb::recycle_stream, 2},
    {verb::acquire_anchored, 4},
    {verb::trim, 2},
    {verb::turn, 6},
    {verb::crowd, 1},
};
inline constexpr weight while_capturing[] = {
    {verb::acquire_rows, 3},
    {verb::acquire_scratch, 10},
    {verb::use, 10},
    {verb::write, 4},
    {verb::check, 4},
    {verb::hand_over, 3},
    {verb::pin, 2},
    {verb::release, 10},
    {verb::wait, 4},
    {verb::collect, 1},
    {verb::acquire_anchored, 2},
    {verb::turn, 2},
};

[[nodiscard]] inline operation draw(verb what, generator& random) {
  const std::uint64_t bits = random();
  operation drawn{what, {}};
  for (std::size_t k = 0; k < drawn.with.size(); ++k) drawn.with[k] = static_cast<std::uint8_t>(bits >> (8 * k));
  return drawn;
}

/// A capture from its beginning to its launches, with work on a few streams of it: what an even mixture seldom draws.
inline void add_capture(std::vector<operation>& to, generator& random) {
  const auto lane = static_cast<std::uint8_t>(random.below(2));
  const auto origin = static_cast<std::uint8_t>(random.below(3));
  mixture mix(while_capturing);
  mix.bias(random);
  to.push_back({verb::begin_capture, {origin, static_cast<std::uint8_t>(random.below(3))}});
  if (random.below(3) == 0) {  // with something that was held before
    const auto user = static_cast<std::uint8_t>(random.below(3));
    const auto held = static_cast<std::uint8_t>(255 - random.below(3));
    to.push_back({verb::wait, {user, origin}});
    to.push_back({verb::pin, {held, user}});
    to.push_back({verb::use, {held}});
    to.push_back({verb::release, {held}});
  }
  for (std::uint64_t n = 4 + random.below(16); n != 0; --n) {
    operation next = draw(mix(random), random);
    const bool acquires =
        next.what == verb::acquire_rows || next.what == verb::acquire_scratch || next.what == verb::acquire_anchored;
    if (acquires && random.below(4) != 0) next.with[0] = lane;
    if (random.below(4) == 0) {  // a fork; or a join, or a wait
      const auto other = static_cast<std::uint8_t>((origin + 1 + random.below(2)) % 3);
      to.push_back({verb::wait, {other, origin}});
    }
    to.push_back(next);
  }
  to.push_back({verb::end_capture, {static_cast<std::uint8_t>(random.below(2))}});
  to.push_back({verb::instantiate, {255}});  // the newest
  for (std::uint64_t n = random.below(3); n != 0; --n) {
    to.push_back({verb::launch, {255, static_cast<std::uint8_t>(random.below(3))}});
  }
}

[[nodiscard]] inline program make_program(std::uint64_t seed) {
  generator random(seed);
  program made{.seed = seed, .schedule = random(), .operations = {}};
  mixture mix(anything);
  mix.bias(random);
  const std::uint64_t captures = random.below(8);  // in 64 draws
  const std::size_t length = 20 + random.below(60);
  while (made.operations.size() < length) {
    if (random.below(64) < captures) {
      add_capture(made.operations, random);
    } else {
      const operation next = draw(mix(random), random);
      if (next.what == verb::suspend && random.below(2) == 0) {  // and resume, while rows are held
        const std::uint8_t which = next.with[0];
        const operation after[] = {{verb::acquire_rows, {which, next.with[1], next.with[2]}},
                                   next,
                                   {verb::resume, {which}},
                                   {verb::use, {255}},
                                   {verb::acquire_rows, {which, next.with[2], next.with[1]}},
                                   {verb::use, {255}}};
        made.operations.insert(made.operations.end(), std::begin(after), std::end(after));
      } else {
        made.operations.push_back(next);
      }
    }
  }
  return made;
}

/// Leaves out operations for as long as the program `still_fails`, which is asked a bounded number of times.
[[nodiscard]] inline program shrink(program failing, int attempts, const std::function<bool(program&)>& still_fails) {
  for (std::size_t piece = (failing.operations.size() + 1) / 2; piece != 0;) {
    bool shorter = false;
    for (std::size_t at = failing.operations.size(); at != 0;) {
      const std::size_t begin = at > piece ? at - piece : 0;
      program without = failing;
      without.operations.erase(without.operations.begin() + static_cast<std::ptrdiff_t>(begin),
                               without.operations.begin() + static_cast<std::ptrdiff_t>(at));
      if (attempts-- <= 0) return failing;
      if (still_fails(without)) {
        failing = std::move(without);
        shorter = true;
      }
      at = begin;
    }
    if (!shorter || piece > 1) piece = shorter && piece == 1 ? 1 : piece / 2;
  }
  return failing;
}

}  // namespace simulation
