// Threads that allocate, fill, hand to each other, verify and free blocks of one caching_resource, for as long as they are
// told to. Every block is filled with its owner's pattern on the stream it was allocated on, and looked at, whole, on the
// stream of whoever frees it: a block that two had at once, or that was reused before its work was done, shows.
//
// Beside it streams come and go, their memory is released to others, the pool is trimmed, and its limit is met.
#pragma once

#include <holdfast/detail/kernel_attributes.hpp>
#include <holdfast/error.hpp>
#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/malloc.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace soak {

/// The word that a block with this pattern has at `i`.
[[nodiscard]] HOLDFAST_HOST_DEVICE inline std::uint64_t word(std::uint64_t pattern, std::uint64_t i) {
  std::uint64_t x = (pattern + i) * 0x9e3779b97f4a7c15u;  // the splitmix64 generator
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 27);
}

struct settings {
  double seconds = 3;
  unsigned threads = 8;
  std::uint64_t seed = 1;
};

/// What a World has: device_type; stream (an owner that converts to the device's stream_type); most_bytes of a block,
/// limit_bytes of the pool; fill(stream, words, count, pattern); verify(stream, words, count, pattern), which counts in
/// wrong() what differs.
template <class World>
class soak {
  using device = typename World::device_type;
  using event = typename device::event;

 public:
  soak(World& world, const settings& how)
      : world_(world),
        how_(how),
        pool_(holdfast::malloc_resource<device>{world.device()}, {.max_reserved_bytes = World::limit_bytes}),
        mailboxes_(how.threads) {}

  /// Whether nothing was found; prints what was done, and what was found.
  bool run() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(how_.seconds);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < how_.threads; ++t) {
      threads.emplace_back([this, t, until] {
        try {
          worker one{*this, t};
          while (std::chrono::steady_clock::now() < until && failures_ == 0) one.step();
          one.finish();
        } catch (const std::exception& e) {
          fail("thread " + std::to_string(t) + ": " + e.what());
        }
      });
    }
    for (std::thread& one : threads) one.join();
    worker last{*this, 0};  // what was sent to those who had ended
    for (unsigned t = 0; t < how_.threads; ++t) last.open(t);
    last.finish();

    const auto count = pool_.statistics();
    if (const std::uint64_t wrong = world_.wrong(); wrong != 0)
      fail(std::to_string(wrong) + " words are not their owner's");
    if (count.used_bytes != 0) fail(std::to_string(count.used_bytes) + " bytes count as used at the end");
    if (count.errors != 0) fail(std::to_string(count.errors) + " deallocations were ignored");
    pool_.trim();
    if (pool_.reserved_bytes() != 0) fail(std::to_string(pool_.reserved_bytes()) + " bytes did not go back");
    std::printf(
        "soak: %.0f s, %u threads, seed %llu: %llu blocks of %.1f GiB in all, %llu handed over, %llu streams, "
        "%llu allocations of the upstream's, %llu segments from stream to stream, limit met %llu times: %s\n",
        how_.seconds, how_.threads, number(how_.seed), number(count.allocations),
        static_cast<double>(bytes_) / (std::size_t{1} << 30), number(handed_over_), number(streams_),
        number(count.upstream_allocations), number(count.cross_stream_reuses), number(shortages_),
        failures_ == 0 ? "nothing found" : "FAULTS FOUND");
    return failures_ == 0;
  }

 private:
  static unsigned long long number(std::uint64_t n) { return n; }

  struct owned_stream {
    typename World::stream handle{};
  };
  struct block {
    std::uint64_t* words = nullptr;
    std::size_t bytes = 0, alignment = 0;
    std::uint64_t pattern = 0;
    std::shared_ptr<owned_stream> home;
    std::shared_ptr<event> filled;  // for who gets it from another thread

    [[nodiscard]] std::size_t count() const { return bytes / sizeof(std::uint64_t); }
  };
  struct mailbox {
    std::mutex mutex;
    std::vector<block> blocks;
  };

  class worker {
   public:
    worker(soak& of, unsigned self) : of_(of), self_(self), random_(of.how_.seed * 1000 + self) {
      for (auto& one : streams_) one = make_stream();
    }

    void step() {
      switch (random_() % 32) {
        case 0: return renew(random_() % std::size(streams_));
        case 1: return of_.pool_.release(pick()->handle);
        case 2: return random_() % 64 == 0 ? of_.pool_.trim(random_() % World::limit_bytes) : open(self_);
        case 3:
        case 4: return open(self_);
        case 5:
        case 6: return send();
        default: break;
      }
      if (live_.size() < 48 && random_() % 2 == 0) {
        allocate();
      } else if (!live_.empty()) {
        free_one(random_() % live_.size());
      }
    }

    /// Takes what was sent to `whom`.
    void open(unsigned whom) {
      std::vector<block> got;
      {
        const std::lock_guard lock{of_.mailboxes_[whom].mutex};
        got.swap(of_.mailboxes_[whom].blocks);
      }
      for (block& one : got) {
        device::wait(pick()->handle, *one.filled);
        one.filled.reset();
        // looked at on a stream of ours, and given back naming that one: the pool waits for it
        const auto here = pick_last_;
        of_.world_.verify(here->handle, one.words, one.count(), one.pattern);
        of_.pool_.deallocate(here->handle, one.words, one.bytes, one.alignment);
      }
    }

    void finish() {
      open(self_);
      while (!live_.empty()) free_one(live_.size() - 1);
      for (auto& one : streams_) retire(one);
    }

   private:
    [[nodiscard]] std::shared_ptr<owned_stream> make_stream() {
      ++of_.streams_;
      return std::make_shared<owned_stream>();
    }
    const std::shared_ptr<owned_stream>& pick() { return pick_last_ = streams_[random_() % std::size(streams_)]; }

    void allocate() {
      block made;
      made.home = pick();
      // mostly small, seldom vast, sizes of words
      const std::size_t scale = random_() % 16 == 0 ? World::most_bytes : random_() % 4 == 0 ? 2 << 20 : 64 << 10;
      made.bytes = (random_() % scale + 8) / 8 * 8;
      made.alignment = std::size_t{1} << (random_() % 13);
      made.pattern = random_();
      try {
        made.words = static_cast<std::uint64_t*>(of_.pool_.allocate(made.home->handle, made.bytes, made.alignment));
      } catch (const holdfast::out_of_memory&) {
        ++of_.shortages_;
        for (std::size_t i = live_.size() / 2; i < live_.size();) free_one(live_.size() - 1);
        return;
      }
      if (reinterpret_cast<std::uintptr_t>(made.words) % made.alignment != 0) of_.fail("a block is not aligned");
      of_.bytes_ += made.bytes;
      of_.world_.fill(made.home->handle, made.words, made.count(), made.pattern);
      live_.push_back(std::move(made));
    }

    void free_one(std::size_t i) {
      std::swap(live_[i], live_.back());
      block& one = live_.back();
      of_.world_.verify(one.home->handle, one.words, one.count(), one.pattern);
      of_.pool_.deallocate(one.home->handle, one.words, one.bytes, one.alignment);
      live_.pop_back();
    }

    /// To another thread.
    void send() {
      if (live_.empty() || of_.how_.threads == 1) return;
      block one = std::move(live_.back());
      live_.pop_back();
      one.filled = std::make_shared<event>(of_.world_.device());
      one.filled->record(one.home->handle);
      ++of_.handed_over_;
      mailbox& to = of_.mailboxes_[(self_ + 1 + random_() % (of_.how_.threads - 1)) % of_.how_.threads];
      const std::lock_guard lock{to.mutex};
      to.blocks.push_back(std::move(one));
    }

    void renew(std::size_t which) {
      auto next = make_stream();
      std::swap(streams_[which], next);
      retire(next);
    }

    /// The stream ends once nobody holds a block of its.
    void retire(std::shared_ptr<owned_stream>& one) {
      std::erase_if(live_, [&](block& held) {
        if (held.home != one) return false;
        of_.world_.verify(one->handle, held.words, held.count(), held.pattern);
        of_.pool_.deallocate(one->handle, held.words, held.bytes, held.alignment);
        return true;
      });
      of_.pool_.release(one->handle);
      if (pick_last_ == one) pick_last_.reset();
      one.reset();
    }

    soak& of_;
    const unsigned self_;
    std::mt19937_64 random_;
    std::shared_ptr<owned_stream> streams_[3], pick_last_;
    std::vector<block> live_;
  };

  void fail(const std::string& what) {
    ++failures_;
    std::printf("soak: %s\n", what.c_str());
  }

  World& world_;
  const settings how_;
  std::atomic<std::uint64_t> failures_{0}, handed_over_{0}, streams_{0}, shortages_{0}, bytes_{0};
  holdfast::caching_resource<device> pool_;
  std::vector<mailbox> mailboxes_;
};

/// soak [--seconds N] [--threads N] [--seed N]
template <class World>
int main(int argc, char** argv) {
  settings how;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--seconds") how.seconds = std::atof(argv[i + 1]);
    if (name == "--threads") how.threads = static_cast<unsigned>(std::atoi(argv[i + 1]));
    if (name == "--seed") how.seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  World world;
  return soak<World>(world, how).run() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace soak
