// The world that a program runs in: threads, streams of all kinds, lanes, buffers, handles, captures and graphs of the real
// library on the host device, whose queued work is really executed, in a seeded order. It is the user: it keeps the user's
// side of the rules, and looks for breaches of the library's.
//
// The user's side, all of it:
//   1. Lanes and buffers. Graphs that share memory (of a lane, of a buffer, or an eager scratch that was pinned) never run
//      at the same time as each other or as eager work on that memory: `enter` waits, by events. Eager work on different
//      streams is not ordered by the user: acquire does that. Eager scratch is nobody else's, and is not ordered at all;
//      captured scratch that is used eagerly, after its capture ended, is ordered behind all eager work in its lane.
//   2. Rows alias. Only the newest handle of a block is used, for each capture and for eager work. One that is used
//      elsewhere than where it was acquired (on another stream, pinned in a capture, or eagerly after its capture ended) is
//      ordered behind what uses the block there, and released there at once. restore_padding counts as a newer handle; it
//      is ordered behind what handles still do with memory that growth replaced. Anchored scratch is as rows.
//   3. A handle that moves to another stream is ordered by the user. It is released where it was used last; what was queued
//      eagerly somewhere else than that, or than where it was acquired, is ordered before the stream where it was acquired.
//      So is eager work on the stream of the release, when that stream captures by then. What was pinned and used in a capture
//      is released there by release(stream), even on the stream where it was acquired.
//      Captured scratch is pinned only in captures that began after it was acquired.
//   4. Raw allocations are never used in captures, and go back on their own stream, which doesn't capture then.
//   5. Streams outlive the program, but for one that only raw allocations use, which may go once they are back.
//   6. Suspending is done while no graph that shares the memory runs or is being captured, and no work of handles that are
//      still held is queued; until it is resumed, nothing of it is used or launched.
//   7. A buffer on which eager work was queued before its stream began to capture: the next eager acquire elsewhere is
//      ordered by the user, because no event can be recorded on a capturing stream.
//   8. The legacy stream is left alone while a blocking stream captures, but for acquires, which are refused, and releases.
//      What was queued there before is ordered as in 7.
//   9. What was acquired on a per-thread default stream is used and released by that thread alone. The next acquire
//      elsewhere is ordered by the user, unless it was released by then, at a time when that stream did not capture. In the
//      end every thread collects.
//  10. Threads take turns, but for what is thread safe (`crowd`), which all of them do at once.
//
// The library's side, checked all the time:
//   - what work touches belongs to the allocation that it was acquired from, by the time that the work runs, and nobody
//     else's work comes between a write and the look at what was written;
//   - work that touches the same bytes is ordered, whatever the order it runs in (races.hpp): the user's, the library's
//     fills, the begin and the end of every allocation, and the unmapping of memory;
//   - padding and tails are zero whenever rows are used;
//   - handles that live at once don't overlap, unless they are of one buffer; anchored scratch is one handle's, and its end
//     never moves;
//   - nothing that a handle, a capture, a graph or an executable needs is given back;
//   - nothing throws but what is documented, failing changes nothing, and no capture is invalidated;
//   - in the end everything has gone back, and nothing is counted as pinned, retired or pending.
#pragma once

#include "crew.hpp"
#include "memory.hpp"
#include "observed_device.hpp"
#include "program.hpp"

#include <holdfast/anchored_scratch.hpp>
#include <holdfast/capture.hpp>
#include <holdfast/padded_query_buffer.hpp>
#include <holdfast/resource/caching.hpp>
#include <holdfast/resource/guard.hpp>
#include <holdfast/resource/vmm.hpp>
#include <holdfast/tail_padded_allocator.hpp>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace simulation {

class world {
 public:
  world(const program& made, bool tell) : program_(made), tell_(tell), schedule_(made.schedule) {
    observing = &observer_;
    generator random(made.seed ^ 0x5eed);
    observer_.on_unmap = [book = book_.get()](const void* p, std::size_t bytes) { book->unmapped(p, bytes); };
    choose_streams(random);
    for (int i = 0; i < lane_count; ++i) choose_resource(i, random);
    order_of_death_ = random.below(6);
  }
  world(const world&) = delete;
  world& operator=(const world&) = delete;
  ~world() {
    handles_.clear();
    for (lane_slot& mine : lanes_) mine = {};
    observing = nullptr;
  }

  /// Whether it went well; if not, found_misuse says what happened.
  bool run() {
    try {
      for (const operation& next : program_.operations) {
        if (next.what == verb::crowd) {
          crowd(lanes_[next.with[0] % lane_count]);
        } else {
          take_turn(next_thread_, [&] { step(next); });
        }
        if (!found_misuse.empty()) return false;
      }
      finish();
    } catch (const std::exception& e) {
      unexplained(e);
    }
    return found_misuse.empty();
  }

 private:
  using relaxed = device::relaxed_scope;
  using element = unsigned char;
  using buffer = holdfast::padded_query_buffer<element, device>;
  using allocator = holdfast::tail_padded_allocator<element, device>;
  using event = std::shared_ptr<device::event>;
  using serial = std::uint64_t;  // of a capture; 0: eager

  using anchored = holdfast::anchored_scratch<element, device>;

  static constexpr int lane_count = 2;
  static constexpr int transient = 3;  // the stream that comes and goes
  static constexpr int most_threads = 3;
  static constexpr int first_bound = 4;  // the per-thread default stream of the first thread; then those of the others
  static constexpr int stream_count = first_bound + most_threads;
  static constexpr std::size_t anchored_pages = 2;  // of addresses
  static constexpr std::size_t most_handles = 8, most_graphs = 4, most_captures = 2;

  struct stream {
    host::stream own{};
    host::stream_ref handle{};
    bool blocking = false;
    bool legacy = false;
    serial capture = 0;
    event before{};  // the end of its eager work, while that can't be told
    event latest{};  // the end of its work when its thread's last turn was over; of bound ones
  };

  /// Memory that is shared by graphs and eager work, which take turns.
  struct domain {
    unsigned eager = 0;   // streams with eager work since the last launch
    event launched;       // behind the last launch
    unsigned behind = 0;  // streams that have waited for it
    unsigned untold = 0;  // bound streams that captured when eager work there ended
    std::uint64_t turn = 0;
  };
  using shared_domain = std::shared_ptr<domain>;
  using flag = std::shared_ptr<bool>;

  struct buffer_slot {
    std::optional<buffer> own;
    buffer* of_lane = nullptr;
    shared_domain turns;
    flag suspended;
    [[nodiscard]] buffer* get() { return own ? &*own : of_lane; }
  };

  struct anchored_slot {
    std::optional<anchored> own;
    allocation_id id = 0;
    shared_domain turns;
    flag suspended;
  };

  struct lane_slot {
    std::optional<any_resource> resource;
    std::function<void(int)> fail;
    std::function<int()> shortages;
    std::optional<holdfast::caching_resource<device>> cache;
    bool streams_stay = false;  // the cache was promised that
    std::optional<holdfast::lane<device>> lane;
    std::optional<allocator> scratches;
    holdfast::over_read tail;
    std::size_t alignment = 64;
    bool refuses = false;  // to grow once captured
    shared_domain turns;
    std::array<buffer_slot, 2> buffers;  // the lane's, and one by itself
    anchored_slot end;
  };

  struct handle {
    enum class kind { rows, scratch, anchored, raw } what = kind::raw;
    int number = 0;
    int lane = 0;
    holdfast::query_rows<element, device> rows{};
    holdfast::scratch<element, device> scratch{};

    std::byte* data = nullptr;
    std::size_t count = 0;      // rows
    std::size_t row_bytes = 0;  // of which `real_bytes` are written
    std::size_t real_bytes = 0;
    std::size_t tail_bytes = 0;
    std::size_t alignment = 0;  // raw
    allocation_id id = 0;

    serial in = 0;  // acquired there
    int acquired_on = 0;
    int stream = 0;  // used there from now on
    int used_on = 0;
    std::map<serial, int> last{};  // where it was used last, by capture
    std::vector<serial> pinned{};
    shared_domain turns{};
    flag suspended{};

    std::uint64_t tag = 0;  // written last, there and then
    serial tag_in = 0;
    std::uint64_t tag_turn = 0;

    [[nodiscard]] std::size_t bytes() const { return count * row_bytes + tail_bytes; }
    /// Whether others have the same memory, before and after.
    [[nodiscard]] bool aliases() const { return what == kind::rows || what == kind::anchored; }
  };

  /// What a capture recorded, and so its graphs and executables hold.
  struct record {
    std::vector<allocation_id> ids{};
    std::vector<shared_domain> turns{};
    std::vector<flag> suspended{};
  };
  struct capture {
    int origin = 0;
    int thread = 0;    // that must end it,
    bool any = false;  // if not any may
    int began = 0;     // after that many handles
    record holds{};
  };
  struct graph_slot {
    int number;
    simulation::graph graph;
    record holds;
  };
  struct exec_slot {
    int number;
    graph_exec exec;
    record holds;
  };

  // --- telling -------------------------------------------------------------------------------------------------------------

  [[gnu::format(printf, 2, 3)]] void say(const char* format, ...) const {
    if (!tell_) return;
    std::va_list with;
    va_start(with, format);
    std::printf("    ");
    std::vprintf(format, with);
    std::printf("\n");
    std::fflush(stdout);
    va_end(with);
  }

  static void unexplained(const std::exception& e) {
    misuse(std::string("an exception that nothing explains: ") + e.what());
  }

  static const char* kind_name(const handle& h) {
    switch (h.what) {
      case handle::kind::rows: return "rows";
      case handle::kind::scratch: return "scratch";
      case handle::kind::anchored: return "anchored scratch";
      default: return "raw";
    }
  }

  // --- setting up ------------------------------------------------------------------------------------------------------------

  /// Most programs have non-blocking streams and one thread.
  void choose_streams(generator& random) {
    const std::uint64_t kind = random.below(8);
    for (int s = 0; s <= transient; ++s) {
      at(s).blocking = kind >= 4 && random.below(2) == 0;
      make_stream(s);
    }
    if (kind == 5) {
      stream& last = at(transient - 1);
      last = {.handle = host::legacy_stream(), .blocking = false, .legacy = true};
      say("stream %d is the legacy stream", transient - 1);
    }
    has_bound_ = kind >= 6;
    if (has_bound_) {
      for (int s = first_bound; s < stream_count; ++s) {
        at(s).handle = host::per_thread_stream();
        at(s).blocking = true;
      }
      say("stream 1 is the per-thread default stream: %d, %d and %d", first_bound, first_bound + 1, first_bound + 2);
    }
    threads_ = kind == 7 || random.below(32) == 0 ? 1 + static_cast<int>(random.below(most_threads)) : 1;
  }

  void make_stream(int s) {
    at(s).own = host::stream{{}, at(s).blocking ? host::stream_kind::blocking : host::stream_kind::non_blocking};
    at(s).handle = at(s).own;
    if (at(s).blocking) say("stream %d is a blocking one", s);
  }

  void choose_resource(int i, generator& random) {
    lane_slot& mine = lanes_[static_cast<std::size_t>(i)];
    static constexpr holdfast::over_read tails[] = {holdfast::over_read{}, holdfast::over_read::rows_beyond(2),
                                                    holdfast::over_read::to_tile_end(4),
                                                    holdfast::over_read::at_least_rows(5)};
    mine.tail = tails[random.below(std::size(tails))];
    mine.alignment = std::size_t{64} << random.below(3);
    mine.refuses = random.below(4) == 0;
    choose_upstream(i, mine, random);
    if (mine.resource->omits_tails()) mine.tail = {};
  }

  void choose_upstream(int i, lane_slot& mine, generator& random) {
    const std::uint64_t kind = random.below(32);
    if (i != 0 && kind < 16) {
      lane_slot& first = lanes_[0];
      mine.resource = first.resource;
      mine.fail = first.fail;
      mine.shortages = first.shortages;
      mine.cache = first.cache;
      mine.streams_stay = first.streams_stay;
      say("lane %d takes the resource of lane 0", i);
    } else if (kind == 31) {
      record_calls<false>(mine, any_resource{pages{}, device{0}});
      say("lane %d takes malloc_resource", i);
    } else if (kind >= 28) {
      mine.streams_stay = kind == 28;
      mine.cache.emplace(any_resource{pages{}, device{0}},
                         holdfast::caching_options{.max_reserved_bytes = std::size_t{2} << (20 + random.below(3)),
                                                   .streams_stay = mine.streams_stay});
      record_calls<false>(mine, *mine.cache);
      say("lane %d takes caching_resource%s", i, mine.streams_stay ? ", whose streams stay" : "");
    } else if (kind == 27) {
      record_calls<true>(
          mine, holdfast::vmm_resource<device>{device{0}, {.reserve_bytes = std::size_t{1} << (12 + random.below(3))}});
      say("lane %d takes vmm_resource", i);
    } else if (kind == 26) {
      const bool omit = random.below(4) == 0;
      record_calls<false>(
          mine, holdfast::guard_resource<device>{device{0},
                                                 {.placement = random.below(2) == 0 ? holdfast::guard_placement::end
                                                                                    : holdfast::guard_placement::start,
                                                  .omit_tails = omit,
                                                  .unmapped_bytes = 4096,
                                                  .quarantine = 4}});
      say("lane %d takes guard_resource%s", i, omit ? ", which omits tails" : "");
    } else if (kind % 2 == 0) {
      record_calls<false>(mine, any_resource{pool{i}, device{0}});
      say("lane %d takes a pool", i);
    } else {
      const std::size_t room = std::size_t{256} << random.below(4);
      record_calls<true>(mine, any_resource{pool{i, room}, device{0}});
      say("lane %d takes a pool where memory grows in place, up to %zu bytes", i, room);
    }
  }

  template <bool Growing>
  void record_calls(lane_slot& mine, any_resource upstream) {
    recording_resource<Growing> recording{std::move(upstream), book_};
    mine.resource.emplace(recording);
    mine.fail = [recording](int count) mutable { recording.fail(count); };
    mine.shortages = [recording] { return recording.shortages(); };
  }

  lane_slot& lane_at(std::uint8_t n) {
    lane_slot& mine = lanes_[n % lane_count];
    if (!mine.lane) {
      mine.lane.emplace(*mine.resource);
      mine.turns = std::make_shared<domain>();
      mine.scratches.emplace(*mine.lane, holdfast::scratch_options{
                                             .row_elements = 64, .over_read = mine.tail, .alignment = mine.alignment});
    }
    return mine;
  }

  buffer_slot& buffer_at(lane_slot& mine, std::uint8_t n) {
    buffer_slot& slot = mine.buffers[n % 2];
    if (slot.get() == nullptr) {
      const holdfast::buffer_options options{
          .growth = mine.refuses ? holdfast::growth::refuse : holdfast::growth::retire, .alignment = 64};
      slot.suspended = std::make_shared<bool>(false);
      if (n % 2 == 0) {
        slot.of_lane = &mine.lane->padded_queries<element>({.heads = 3, .padded_heads = 4, .head_dim = 8}, options);
        slot.turns = mine.turns;
      } else {
        slot.own.emplace(*mine.resource, holdfast::query_shape{.heads = 2, .padded_heads = 3, .head_dim = 16}, options);
        slot.turns = std::make_shared<domain>();
      }
    }
    return slot;
  }

  anchored_slot& anchored_at(lane_slot& mine) {
    anchored_slot& slot = mine.end;
    if (!slot.own) {
      slot = {.own = anchored{*mine.lane,
                              {.row_elements = 64, .over_read = mine.tail, .alignment = 64},
                              anchored_pages * device{0}.granularity()},
              .id = book_->named(),
              .turns = std::make_shared<domain>(),
              .suspended = std::make_shared<bool>(false)};
    }
    return slot;
  }

  // --- order -----------------------------------------------------------------------------------------------------------------

  stream& at(int s) { return streams_[static_cast<std::size_t>(s)]; }
  [[nodiscard]] serial capture_of(int s) { return at(s).capture; }

  /// Which one is meant, of those that capture, or of all.
  [[nodiscard]] int stream_of(std::uint8_t n, int of = transient) const {
    const int s = n % of;
    return has_bound_ && s == 1 ? first_bound + thread_ : s;
  }
  static bool is_bound(int s) { return s >= first_bound; }
  /// Whether this thread can name it.
  [[nodiscard]] bool is_mine(int s) const { return !is_bound(s) || s == first_bound + thread_; }
  /// Whether nothing can be queued or recorded there eagerly now.
  [[nodiscard]] bool is_closed(int s) {
    const auto captures = [](const stream& one) { return one.blocking && one.capture != 0; };
    return capture_of(s) != 0 || (at(s).legacy && std::any_of(streams_.begin(), streams_.end(), captures));
  }
  [[nodiscard]] bool refuses_implicitly(int s) { return is_closed(s) && capture_of(s) == 0; }

  static event point(host::stream_ref s) {
    auto e = std::make_shared<device::event>(device{0});
    e->record(s);
    return e;
  }

  /// Behind the eager work of a stream.
  [[nodiscard]] event eager_end(int s) {
    return is_closed(s) ? at(s).before : is_mine(s) ? point(at(s).handle) : at(s).latest;
  }

  /// What is queued on `to` from now on comes after what is queued on `from`. False: that cannot be said.
  bool order(int from, int to) {
    if (from == to) return true;
    const bool in_one = capture_of(to) != 0 && capture_of(from) == capture_of(to);
    if (!is_mine(to) || (!in_one && is_closed(to))) return false;
    const relaxed scope;
    const event end = !in_one ? eager_end(from) : is_mine(from) ? point(at(from).handle) : at(from).latest;
    if (end != nullptr) device::wait(at(to).handle, *end);
    return true;
  }

  /// The capture that `s` is about to take part in will forbid to look at the end of this eager work.
  void note_ends(int s) {
    at(s).before = point(at(s).handle);
    if (!at(s).blocking) return;
    for (int other = 0; other < transient; ++other) {
      if (at(other).legacy && !is_closed(other)) at(other).before = point(at(other).handle);
    }
  }

  /// Eager work on `s` takes its turn.
  void enter(const shared_domain& turns, int s) {
    if (turns == nullptr) return;
    const unsigned bit = 1u << s;
    if (turns->launched != nullptr && (turns->behind & bit) == 0) {
      const relaxed scope;
      device::wait(at(s).handle, *turns->launched);
      turns->behind |= bit;
    }
    turns->eager |= bit;
  }

  /// Rules 7 and 9.
  void order_behind_unrecorded(const shared_domain& turns, int s) {
    const serial c = capture_of(s);
    for (int other = 0; other < stream_count && c == 0; ++other) {
      if ((turns->eager >> other & 1) != 0 && is_closed(other)) order(other, s);
      if ((turns->untold >> other & 1) != 0) order(other, s);
    }
    for (const handle& h : handles_) {
      if (h.turns == turns && h.last.contains(c) && is_bound(h.last.at(c))) order(h.last.at(c), s);
    }
  }

  void recorded(serial c, const handle& h) {
    record& holds = captures_.at(c).holds;
    hold(holds, h.id);
    const auto add = [](auto& all, const auto& one) {
      if (one != nullptr && std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
    };
    add(holds.turns, h.turns);
    add(holds.suspended, h.suspended);
  }
  void hold(record& holds, allocation_id id) {
    if (std::find(holds.ids.begin(), holds.ids.end(), id) == holds.ids.end()) {
      holds.ids.push_back(id);
      book_->need(id);
    }
  }
  record copy(const record& holds) {
    for (const allocation_id id : holds.ids) book_->need(id);
    return holds;
  }
  void let_go(record& holds) {
    for (const allocation_id id : holds.ids) book_->need_no_more(id);
    holds = {};
  }

  // --- work ------------------------------------------------------------------------------------------------------------------

  /// A piece of queued work, as it was when it was queued.
  struct task {
    const ledger* book;
    std::byte* data;
    std::size_t count, row_bytes, real_bytes, tail_bytes;
    allocation_id id;
    std::uint64_t tag;
    int number;

    [[nodiscard]] accesses does(bool to_write) const {
      const auto n = static_cast<std::uint64_t>(number);
      if (!to_write) return {reads("work of #", n, data, count * row_bytes + tail_bytes)};
      access real = writes("work of #", n, data, real_bytes);
      access padding = reads("work of #", n, data + real_bytes, row_bytes - real_bytes);
      real.pitch = padding.pitch = row_bytes;
      real.rows = padding.rows = count;
      accesses all{real};
      if (padding.width != 0) all.push_back(padding);
      if (tail_bytes != 0) all.push_back(reads("work of #", n, data + count * row_bytes, tail_bytes));
      return all;
    }

    [[nodiscard]] bool usable() const {
      if (book->usable(data, count * row_bytes + tail_bytes, id)) return true;
      misuse("work of #" + std::to_string(number) + " touches memory that is not allocation " + std::to_string(id) +
             "'s when it runs");
      return false;
    }

    [[nodiscard]] bool holds(const std::byte* p, std::size_t bytes, std::uint64_t value) const {
      for (std::size_t i = 0; i < bytes; i += sizeof value) {
        std::uint64_t found = 0;
        std::memcpy(&found, p + i, sizeof found);
        if (found != value) return false;
      }
      return true;
    }

    void look_at_zeros() const {
      for (std::size_t row = 0; row < count; ++row) {
        if (!holds(data + row * row_bytes + real_bytes, row_bytes - real_bytes, 0)) {
          misuse("the padding of #" + std::to_string(number) + " is not zero in row " + std::to_string(row));
          return;
        }
      }
      if (!holds(data + count * row_bytes, tail_bytes, 0)) {
        misuse("the tail of #" + std::to_string(number) + " is not zero");
      }
    }

    void write() const {
      if (!usable()) return;
      look_at_zeros();
      for (std::size_t row = 0; row < count; ++row) {
        for (std::size_t i = 0; i < real_bytes; i += sizeof tag) {
          std::memcpy(data + row * row_bytes + i, &tag, sizeof tag);
        }
      }
    }

    void check() const {
      if (!usable()) return;
      look_at_zeros();
      for (std::size_t row = 0; row < count; ++row) {
        if (!holds(data + row * row_bytes, real_bytes, tag)) {
          misuse("somebody else wrote to #" + std::to_string(number) + " in row " + std::to_string(row));
          return;
        }
      }
    }
  };

  void queue(const handle& h, bool write) {
    // The tail of captured scratch is a node's business: elsewhere nobody may have written it.
    const std::size_t tail = h.in == capture_of(h.stream) ? h.tail_bytes : 0;
    const task made{book_.get(), h.data, h.count, h.row_bytes, h.real_bytes, tail, h.id, h.tag, h.number};
    const relaxed scope;
    if (write) {
      device::run(at(h.stream).handle, made.does(true), [made] { made.write(); });
    } else {
      device::run(at(h.stream).handle, made.does(false), [made] { made.check(); });
    }
  }

  /// Prepares a use of `h` on its stream, as the rules have it. False: they forbid it.
  bool begin_use(handle& h) {
    const serial c = capture_of(h.stream);
    if (h.suspended != nullptr && *h.suspended) return false;
    if (h.what == handle::kind::raw && c != 0) return false;
    if (!is_mine(h.stream) || !is_mine(h.acquired_on) || refuses_implicitly(h.stream)) return false;
    const bool elsewhere = c != h.in;
    if (elsewhere && c != 0 && std::find(h.pinned.begin(), h.pinned.end(), c) == h.pinned.end()) return false;
    if (elsewhere && c == 0 && captures_.contains(h.in)) return false;
    if (h.aliases()) {
      const auto newest = newest_.find({h.id, c});
      if (!elsewhere && newest->second != h.number) return false;
      newest_[{h.id, c}] = h.number;
    }
    // Nothing that is used exclusively needs this: rows alias, and so does captured scratch after the end of its capture.
    if (elsewhere && (h.aliases() || (h.in != 0 && c == 0))) {
      for (int s = 0; s < stream_count; ++s) {
        const bool there = c == 0 ? (h.turns->eager >> s & 1) != 0 : capture_of(s) == c;
        if (there) order(s, h.stream);
      }
    }
    if (const auto last = h.last.find(c); last != h.last.end() && last->second != h.stream) {
      if (!order(last->second, h.stream)) return false;
    } else if (last == h.last.end() && !elsewhere && h.stream != h.acquired_on) {
      if (!order(h.acquired_on, h.stream)) return false;
    }
    if (c == 0) {
      enter(h.turns, h.stream);
    } else {
      recorded(c, h);
    }
    h.last[c] = h.stream;
    h.used_on = h.stream;
    return true;
  }

  void write(handle& h) {
    h.tag = ++tags_;
    h.tag_in = capture_of(h.stream);
    h.tag_turn = h.turns == nullptr ? 0 : h.turns->turn;
    queue(h, true);
  }

  /// Whether what was written last must still be there.
  [[nodiscard]] bool keeps(const handle& h) {
    return h.tag != 0 && h.tag_in == capture_of(h.stream) &&
           (h.tag_in != 0 || h.turns == nullptr || h.tag_turn == h.turns->turn);
  }

  /// Rule 2, the end of it. The handle may be gone afterwards.
  void end_use(std::list<handle>::iterator h) {
    const bool elsewhere = h->in != capture_of(h->stream) || h->stream != h->acquired_on;
    if (h->aliases() && elsewhere) release(h);
  }

  // --- handles ---------------------------------------------------------------------------------------------------------------

  void add(handle made) {
    if (made.what != handle::kind::anchored) made.id = book_->owner(made.data, made.bytes());
    if (made.id == 0) {
      misuse("#" + std::to_string(made.number) + " lies outside of what its resource gave");
      return;
    }
    for (const handle& other : handles_) {
      const bool apart = made.data + made.bytes() <= other.data || other.data + other.bytes() <= made.data;
      const bool alias = made.what == handle::kind::rows && other.what == handle::kind::rows && made.id == other.id;
      if (!apart && !alias) {
        misuse("#" + std::to_string(made.number) + " overlaps #" + std::to_string(other.number) + ", which is held");
      }
    }
    book_->need(made.id);
    if (made.in != 0) recorded(made.in, made);
    if (made.aliases()) newest_[{made.id, made.in}] = made.number;
    handles_.push_back(std::move(made));
  }

  handle new_handle(handle::kind what, int lane, int s) {
    handle made;
    made.what = what;
    made.number = ++numbers_;
    made.lane = lane;
    made.in = capture_of(s);
    made.acquired_on = made.stream = made.used_on = s;
    return made;
  }

  /// The legacy stream, while a blocking one captures.
  template <class Acquire>
  void expect_refusal(int s, const Acquire& acquire) {
    say("... on stream %d, which must be refused: a blocking stream captures", s);
    try {
      static_cast<void>(acquire());
      misuse("the legacy stream was used while a blocking stream captures");
    } catch (const holdfast::logic_error&) {
    }
  }

  /// What a call of the library's may throw: memory ran out, if it did.
  void explain(const lane_slot& mine, int shortages_before, const char* call) {
    say("  ... out of memory");
    if (mine.shortages() == shortages_before) misuse(std::string(call) + " says out of memory, but there was enough");
  }

  void acquire_rows(std::uint8_t l, std::uint8_t on, std::uint8_t count) {
    if (handles_.size() == most_handles) return;
    lane_slot& mine = lane_at(l);
    buffer_slot& from = buffer_at(mine, l >> 1);
    buffer& rows = *from.get();
    const int s = stream_of(on);
    const std::int64_t n = 1 + count % 24;
    const serial c = capture_of(s);
    if (refuses_implicitly(s)) return expect_refusal(s, [&] { return rows.acquire(at(s).handle, n); });
    if (c == 0) enter(from.turns, s);
    order_behind_unrecorded(from.turns, s);
    handle made = new_handle(handle::kind::rows, l % lane_count, s);
    say("#%d = buffer %d of lane %d, acquire(stream %d, %d rows)%s", made.number, l >> 1 & 1, made.lane, s,
        static_cast<int>(n), c == 0 ? "" : " in a capture");
    const auto capacity = rows.capacity();
    const auto generation = rows.generation();
    const auto* const data = rows.data();
    const int shortages = mine.shortages();
    try {
      made.rows = rows.acquire(at(s).handle, n);
    } catch (const holdfast::suspended&) {
      if (!*from.suspended) misuse("acquire says suspended, which it isn't");
    } catch (const holdfast::captured_growth&) {
      if (rows.options().growth != holdfast::growth::refuse || n <= capacity) misuse("acquire refuses to grow");
      say("  ... refused to grow");
    } catch (const holdfast::out_of_memory&) {
      explain(mine, shortages, "acquire");
    }
    if (made.rows.data() == nullptr) {
      if (rows.capacity() != capacity || rows.generation() != generation || rows.data() != data) {
        misuse("acquire failed, and changed the buffer");
      }
      return;
    }
    if (*from.suspended) misuse("acquire gives rows of a suspended buffer");
    const auto& shape = rows.shape();
    made.data = reinterpret_cast<std::byte*>(const_cast<element*>(made.rows.data()));
    made.count = static_cast<std::size_t>(n);
    made.row_bytes = static_cast<std::size_t>(shape.padded_heads * shape.head_dim);
    made.real_bytes = static_cast<std::size_t>(shape.heads * shape.head_dim);
    made.turns = from.turns;
    made.suspended = from.suspended;
    add(std::move(made));
  }

  void acquire_scratch(std::uint8_t l, std::uint8_t on, std::uint8_t count) {
    if (handles_.size() == most_handles) return;
    lane_slot& mine = lane_at(l);
    const int s = stream_of(on);
    const std::int64_t n = 1 + count % 12;
    if (refuses_implicitly(s)) return expect_refusal(s, [&] { return mine.scratches->acquire(at(s).handle, n); });
    handle made = new_handle(handle::kind::scratch, l % lane_count, s);
    say("#%d = scratch of lane %d, acquire(stream %d, %d rows)%s", made.number, made.lane, s, static_cast<int>(n),
        made.in == 0 ? "" : " in a capture");
    const int shortages = mine.shortages();
    try {
      made.scratch = mine.scratches->acquire(at(s).handle, n);
    } catch (const holdfast::out_of_memory&) {
      explain(mine, shortages, "acquire");
      return;
    }
    if (made.scratch.tail_rows() != mine.tail.tail_rows(n)) misuse("scratch has another tail than was asked for");
    made.data = reinterpret_cast<std::byte*>(made.scratch.data());
    made.count = static_cast<std::size_t>(n);
    made.row_bytes = made.real_bytes = 64;
    made.tail_bytes = static_cast<std::size_t>(made.scratch.tail_rows()) * made.row_bytes;
    if (made.in != 0) made.turns = mine.turns;
    add(std::move(made));
  }

  void acquire_anchored(std::uint8_t l, std::uint8_t on, std::uint8_t count) {
    if (handles_.size() == most_handles) return;
    lane_slot& mine = lane_at(l);
    anchored_slot& from = anchored_at(mine);
    const int s = stream_of(on);
    const std::int64_t n = 1 + count % 160;
    if (refuses_implicitly(s)) return expect_refusal(s, [&] { return from.own->acquire(at(s).handle, n); });
    handle made = new_handle(handle::kind::anchored, l % lane_count, s);
    if (made.in == 0) enter(from.turns, s);
    order_behind_unrecorded(from.turns, s);
    say("#%d = anchored scratch of lane %d, acquire(stream %d, %d rows)%s", made.number, made.lane, s,
        static_cast<int>(n), made.in == 0 ? "" : " in a capture");
    const bool lent = std::any_of(handles_.begin(), handles_.end(), [&](const handle& h) { return h.id == from.id; });
    const auto* const end = from.own->data_end();
    const auto capacity = from.own->capacity();
    const bool fits = static_cast<std::size_t>(n) * 64 <= anchored_pages * device{0}.granularity();
    try {
      made.scratch = from.own->acquire(at(s).handle, n);
    } catch (const holdfast::in_use&) {
      if (!lent) misuse("acquire says in use, which it isn't");
    } catch (const holdfast::suspended&) {
      if (!*from.suspended) misuse("acquire says suspended, which it isn't");
    } catch (const holdfast::out_of_memory&) {
      say("  ... out of memory");
      if (fits) misuse("anchored scratch says out of memory, but there are addresses enough");
    }
    if (end != nullptr && from.own->data_end() != end) misuse("the end of anchored scratch moved");
    if (made.scratch.data() == nullptr) {
      if (from.own->capacity() != capacity) misuse("acquire failed, and changed the anchored scratch");
      return;
    }
    if (*from.suspended || lent) misuse("acquire gives anchored scratch that is suspended, or somebody's");
    if (made.scratch.data() + n * 64 != from.own->data_end()) misuse("anchored scratch isn't at the end");
    made.data = reinterpret_cast<std::byte*>(made.scratch.data());
    made.count = static_cast<std::size_t>(n);
    made.row_bytes = made.real_bytes = 64;
    made.tail_bytes = static_cast<std::size_t>(made.scratch.tail_rows()) * made.row_bytes;
    made.id = from.id;
    made.turns = from.turns;
    made.suspended = from.suspended;
    book_->belongs(made.id, made.data, made.count * made.row_bytes);
    add(std::move(made));
  }

  void allocate(std::uint8_t l, std::uint8_t on, std::uint8_t size, std::uint8_t alignment) {
    if (handles_.size() == most_handles) return;
    lane_slot& mine = lane_at(l);
    const int s = stream_of(on, transient + 1);
    const bool refused = is_closed(s);
    handle made = new_handle(handle::kind::raw, l % lane_count, s);
    made.count = 1;
    made.row_bytes = made.real_bytes = 8 * (1 + std::size_t{size} % 96);
    made.alignment = std::size_t{8} << alignment % 6;
    say("#%d = resource of lane %d, allocate(stream %d, %zu bytes)%s", made.number, made.lane, s, made.row_bytes,
        refused ? ", which must be refused: it captures" : "");
    const int shortages = mine.shortages();
    try {
      made.data = static_cast<std::byte*>(mine.resource->allocate(at(s).handle, made.row_bytes, made.alignment));
    } catch (const holdfast::out_of_memory&) {
      explain(mine, shortages, "allocate");
      return;
    } catch (const holdfast::logic_error&) {
      if (!refused) throw;
      return;
    }
    if (refused) {
      misuse("a resource allocated on a capturing stream");
      return;
    }
    add(std::move(made));
  }

  void release(std::list<handle>::iterator h, bool give = false) {
    // Rule 3: where is the last use?
    int where = h->used_on;
    int still_capturing = 0;
    for (const auto& [c, s] : h->last) {
      if (c != 0 && captures_.contains(c)) {
        where = s;
        ++still_capturing;
      }
    }
    if (still_capturing > 1) return;
    // Into a capture where it is not even used: that owns it from then on.
    const bool into = give && still_capturing == 0 && h->what != handle::kind::raw && capture_of(h->stream) != 0 &&
                      !captures_.contains(h->in) && h->stream != h->acquired_on;
    if (into) where = h->stream;
    if (!is_mine(where) || !is_mine(h->acquired_on)) return;
    if (refuses_implicitly(where) && where != h->acquired_on) return;
    const auto eager = h->last.find(0);
    if (eager != h->last.end() && eager->second != h->acquired_on &&
        (eager->second != where || capture_of(where) != 0)) {
      if (is_closed(h->acquired_on)) return;
      order(eager->second, h->acquired_on);
    }
    if (into) recorded(capture_of(where), *h);
    for (const int s : {h->acquired_on, eager == h->last.end() ? where : eager->second}) {
      if (h->turns != nullptr && is_bound(s) && is_closed(s)) h->turns->untold |= 1u << s;
    }
    if (h->what == handle::kind::raw) {
      const int home = h->acquired_on;
      if (is_closed(home)) return;
      if (eager != h->last.end()) order(eager->second, home);
      say("give #%d back to its resource", h->number);
      book_->need_no_more(h->id);
      lanes_[static_cast<std::size_t>(h->lane)].resource->deallocate(at(home).handle, h->data, h->row_bytes,
                                                                     h->alignment);
    } else {
      book_->need_no_more(h->id);
      const serial here = capture_of(where);
      const auto let_go_of = [&](auto& held) {
        if (where == h->acquired_on && (here == 0 || here == h->in || !h->last.contains(here))) {
          say("#%d.release()%s", h->number, capture_of(where) == 0 ? "" : ", while its stream captures");
          held.release();
        } else {
          say("#%d.release(stream %d)%s", h->number, where, capture_of(where) == 0 ? "" : " in a capture");
          held.release(at(where).handle);
        }
      };
      if (h->what == handle::kind::rows) {
        let_go_of(h->rows);
      } else {
        let_go_of(h->scratch);
      }
    }
    handles_.erase(h);
  }

  [[nodiscard]] bool may_pin(const handle& h, int s) {
    const serial c = capture_of(s);
    if (c == 0 || c == h.in || h.what == handle::kind::raw || captures_.contains(h.in) ||
        std::find(h.pinned.begin(), h.pinned.end(), c) != h.pinned.end()) {
      return false;
    }
    return h.what != handle::kind::scratch || h.in == 0 || h.number <= captures_.at(c).began;
  }

  void only_pin(const handle& h, int s) {
    const bool pinned = h.what == handle::kind::rows ? h.rows.pin(at(s).handle) : h.scratch.pin(at(s).handle);
    if (!pinned) misuse("a capturing stream does not pin");
  }

  void pin(handle& h, int s) {
    if (!may_pin(h, s)) return;
    const serial c = capture_of(s);
    say("#%d.pin(stream %d), and use it there", h.number, s);
    only_pin(h, s);
    if (h.turns == nullptr) {  // a graph shares it from now on
      h.turns = std::make_shared<domain>();
      h.turns->eager = 1u << h.acquired_on | 1u << h.used_on;
    }
    h.pinned.push_back(c);
    recorded(c, h);
    h.stream = s;
  }

  // --- captures and graphs ---------------------------------------------------------------------------------------------------

  void begin_capture(int s, std::uint8_t mode) {
    if (capture_of(s) != 0 || captures_.size() == most_captures || at(s).legacy) return;
    const relaxed scope;
    static constexpr host::capture_mode modes[] = {host::capture_mode::global, host::capture_mode::thread_local_,
                                                   host::capture_mode::relaxed};
    note_ends(s);
    at(s).handle.begin_capture(modes[mode % 3]);
    at(s).capture = ++serials_;
    captures_[serials_] = {.origin = s, .thread = thread_, .any = mode % 3 == 2 && !is_bound(s), .began = numbers_};
    say("begin_capture(stream %d)", s);
  }

  void end_capture(serial c) {
    capture& ended = captures_.at(c);
    if (!ended.any && ended.thread != thread_) return;
    for (int s = 0; s < stream_count; ++s) {
      if (capture_of(s) == c) order(s, ended.origin);
    }
    for (stream& s : streams_) {
      if (s.capture != c) continue;
      s.capture = 0;
      s.latest = s.before;
    }
    say("graph %d = end_capture(stream %d)", numbers_ + 1, ended.origin);
    record holds = std::move(ended.holds);
    const int origin = ended.origin;
    captures_.erase(c);
    const relaxed scope;
    try {
      graphs_.push_back({++numbers_, simulation::graph(at(origin).handle), std::move(holds)});
    } catch (const holdfast::device_error& e) {
      misuse(std::string("a capture was broken: ") + e.what());
      return;
    }
    if (graphs_.size() > most_graphs) drop_graph(graphs_.begin());
  }

  void wait(int a, int b) {
    if (a == b) return;
    if (capture_of(a) == 0 && capture_of(b) != 0) {  // a joins the capture
      if (a == transient || at(a).legacy) return;
      const relaxed scope;
      note_ends(a);
      device::wait(at(a).handle, *point(at(b).handle));
      at(a).capture = capture_of(b);
      say("stream %d waits for stream %d, and joins its capture", a, b);
    } else if (capture_of(a) == capture_of(b)) {
      order(b, a);
      say("stream %d waits for stream %d", a, b);
    }
  }

  void drop_graph(std::list<graph_slot>::iterator g) {
    say("destroy graph %d", g->number);
    let_go(g->holds);
    const relaxed scope;
    graphs_.erase(g);
  }

  void drop_exec(std::list<exec_slot>::iterator e) {
    say("destroy executable %d", e->number);
    let_go(e->holds);
    const relaxed scope;
    execs_.erase(e);
  }

  void instantiate(graph_slot& g) {
    say("executable %d = instantiate(graph %d)", numbers_ + 1, g.number);
    execs_.push_back({++numbers_, g.graph.instantiate(), copy(g.holds)});
    if (execs_.size() > most_graphs) drop_exec(execs_.begin());
  }

  void launch(exec_slot& e, int s) {
    if (is_closed(s)) return;
    for (const flag& suspended : e.holds.suspended) {
      if (*suspended) return;
    }
    const relaxed scope;
    for (const shared_domain& turns : e.holds.turns) {
      for (int other = 0; other < stream_count; ++other) {
        if ((turns->eager >> other & 1) != 0) order(other, s);
      }
      if (turns->launched != nullptr) device::wait(at(s).handle, *turns->launched);
    }
    say("launch(executable %d, stream %d)", e.number, s);
    e.exec.launch(at(s).handle);
    const event behind = point(at(s).handle);
    for (const shared_domain& turns : e.holds.turns) *turns = {0, behind, 1u << s, turns->untold, turns->turn + 1};
  }

  // --- buffers and lanes -------------------------------------------------------------------------------------------------------

  void reserve(std::uint8_t l, std::uint8_t count) {
    lane_slot& mine = lane_at(l);
    const int shortages = mine.shortages();
    const int scratch_rows = count % 16;
    buffer_slot& from = buffer_at(mine, l >> 1);
    try {
      if ((l >> 2) % 2 == 0) {
        say("scratch of lane %d, reserve(%d rows)", l % lane_count, scratch_rows);
        mine.scratches->reserve(scratch_rows);
      } else {
        say("buffer %d of lane %d, reserve(%d rows)", l >> 1 & 1, l % lane_count, count % 24);
        from.get()->reserve(count % 24);
      }
    } catch (const holdfast::out_of_memory&) {
      explain(mine, shortages, "reserve");
    } catch (const holdfast::suspended&) {
      if (!*from.suspended) misuse("reserve says suspended, which it isn't");
    } catch (const holdfast::captured_growth&) {
      if (from.get()->options().growth != holdfast::growth::refuse) misuse("reserve refuses to grow");
    }
  }

  void restore(std::uint8_t l, int s) {
    lane_slot& mine = lane_at(l);
    buffer_slot& from = buffer_at(mine, l >> 1);
    if (is_closed(s) || *from.suspended) return;
    say("buffer %d of lane %d, restore_padding(stream %d)", l >> 1 & 1, l % lane_count, s);
    enter(from.turns, s);
    order_behind_unrecorded(from.turns, s);
    for (const handle& h : handles_) {  // rule 2: the buffer has let go of that memory, and knows of no work since
      if (h.suspended == from.suspended && h.last.contains(0) && !is_current(from, h)) order(h.last.at(0), s);
    }
    from.get()->restore_padding(at(s).handle);
    make_stale(from);
  }

  /// Whether it is of the memory that the buffer has now.
  static bool is_current(buffer_slot& from, const handle& h) {
    return h.data == reinterpret_cast<const std::byte*>(from.get()->data());
  }

  /// No handle of the buffer's is the newest any more.
  void make_stale(const buffer_slot& from) {
    for (const handle& h : handles_) {
      if (h.suspended == from.suspended) newest_[{h.id, 0}] = 0;
    }
  }

  void suspend(std::uint8_t l) {
    lane_slot& mine = lane_at(l);
    buffer_slot& from = buffer_at(mine, l >> 1);
    if (*from.suspended || !mine.resource->suspendable()) return;
    for (const auto& [c, open] : captures_) {
      const auto& all = open.holds.suspended;
      if (std::find(all.begin(), all.end(), from.suspended) != all.end()) return;
    }
    say("buffer %d of lane %d, suspend", l >> 1 & 1, l % lane_count);
    {
      const relaxed scope;
      if (from.turns->launched != nullptr) from.turns->launched->synchronize();
      for (const handle& h : handles_) {
        if (h.suspended != from.suspended) continue;
        for (const auto& [c, s] : h.last) {
          if (c == 0) eager_end(s)->synchronize();
        }
      }
    }
    try {
      from.get()->suspend(holdfast::quiescent);
      *from.suspended = true;
      ++from.turns->turn;
    } catch (const holdfast::logic_error&) {
      say("  ... refused, because a stream captures, or did when it was used");
      if (captures_.empty() && from.turns->untold == 0) misuse("suspend is refused without a reason");
    }
    if (from.get()->suspended() != *from.suspended) misuse("suspended() says something else");
  }

  void resume(std::uint8_t l) {
    lane_slot& mine = lane_at(l);
    buffer_slot& from = buffer_at(mine, l >> 1);
    if (!*from.suspended) return;
    say("buffer %d of lane %d, resume", l >> 1 & 1, l % lane_count);
    const int shortages = mine.shortages();
    try {
      from.get()->resume();
      *from.suspended = false;
    } catch (const holdfast::out_of_memory&) {
      explain(mine, shortages, "resume");
    }
  }

  void suspend_anchored(lane_slot& mine) {
    anchored_slot& from = anchored_at(mine);
    if (*from.suspended) return;
    for (const auto& [c, open] : captures_) {
      const auto& all = open.holds.suspended;
      if (std::find(all.begin(), all.end(), from.suspended) != all.end()) return;
    }
    say("anchored scratch of lane %d, suspend", number_of(mine));
    if (from.turns->launched != nullptr) {
      const relaxed scope;
      from.turns->launched->synchronize();
    }
    const bool lent = std::any_of(handles_.begin(), handles_.end(), [&](const handle& h) { return h.id == from.id; });
    book_->suspends(from.id, true);
    try {
      from.own->suspend(holdfast::quiescent);
      *from.suspended = true;
      ++from.turns->turn;
    } catch (const holdfast::in_use&) {
      say("  ... refused: it is in use");
      if (!lent) misuse("suspend says in use, which it isn't");
    } catch (const holdfast::logic_error&) {
      say("  ... refused, because a stream captures, or did when it was used");
      if (captures_.empty() && from.turns->untold == 0) misuse("suspend is refused without a reason");
    }
    book_->suspends(from.id, *from.suspended);
    if (from.own->suspended() != *from.suspended) misuse("suspended() says something else");
  }

  void resume_anchored(lane_slot& mine) {
    anchored_slot& from = anchored_at(mine);
    if (!*from.suspended) return;
    say("anchored scratch of lane %d, resume", number_of(mine));
    from.own->resume();
    *from.suspended = false;
    book_->suspends(from.id, false);
  }

  /// Of the caches: what is free goes back, or to other streams.
  void trim(std::uint8_t l, std::uint8_t on, std::uint8_t how) {
    lane_slot& mine = lanes_[l % lane_count];
    if (!mine.cache) return;
    if (how % 2 == 0) {
      say("caching_resource of lane %d, trim", l % lane_count);
      mine.cache->trim(how % 4 == 0 ? 0 : std::size_t{2} << 20);
    } else if (const int s = stream_of(on, transient + 1); !is_closed(s)) {
      say("caching_resource of lane %d, release(stream %d)", l % lane_count, s);
      mine.cache->release(at(s).handle);
    }
  }

  /// What is promised to be thread safe, on all threads at the same time.
  void crowd(lane_slot& mine) {
    if (threads_ == 1) return;
    say("all threads at once, on lane %d", number_of(mine));
    std::array<const buffer*, most_threads> found{};
    const auto at_once = [&](int thread, handle* pinned, int capturing) {
      if (mine.lane) {
        found[static_cast<std::size_t>(thread)] =
            &mine.lane->padded_queries<element>({.heads = 3, .padded_heads = 4, .head_dim = 16});
        static_cast<void>(mine.lane->scratch_bytes());
      }
      if (pinned != nullptr) only_pin(*pinned, capturing);
      if (thread == 0) {
        const relaxed scope;
        if (!graphs_.empty()) drop_graph(graphs_.begin());
        if (!execs_.empty()) drop_exec(execs_.begin());
      }
      holdfast::collect(device{0});
      static_cast<void>(holdfast::counts(device{0}).pinned_bytes());
      if (mine.cache && !is_closed(thread)) {
        void* const p = mine.cache->allocate(at(thread).handle, 512, 256);
        mine.cache->deallocate(at(thread).handle, p, 512, 256);
      }
    };
    handle* pinned = nullptr;
    int capturing = 0;
    for (handle& h : handles_) {
      for (int s = 0; s < transient; ++s) {
        if (may_pin(h, s)) pinned = &h, capturing = s;
      }
    }
    crew_.run_together(threads_ - 1, [&](int thread) {
      try {
        at_once(thread, pinned, capturing);
      } catch (const holdfast::out_of_memory&) {  // of a cache with a limit
      } catch (const std::exception& e) {
        unexplained(e);
      }
    });
    if (pinned != nullptr) pin(*pinned, capturing);
    for (int thread = 1; thread < threads_; ++thread) {
      if (found[static_cast<std::size_t>(thread)] != found[0]) misuse("two threads find different buffers in a lane");
    }
  }

  void drop_anchored(lane_slot& mine) {
    if (!mine.end.own) return;
    say("destroy anchored scratch of lane %d", number_of(mine));
    mine.end = {};
  }

  int number_of(const lane_slot& mine) const { return static_cast<int>(&mine - lanes_.data()); }

  void drop_buffer(lane_slot& mine) {
    if (!mine.buffers[1].own) return;
    say("destroy buffer 1 of lane %d", number_of(mine));
    mine.buffers[1].own.reset();
  }

  void drop_lane(lane_slot& mine) {
    if (!mine.lane) return;
    say("destroy lane %d", number_of(mine));
    mine.buffers[0].of_lane = nullptr;
    mine.scratches.reset();
    mine.lane.reset();
  }

  void recycle_stream(bool by_release) {
    for (const handle& h : handles_) {
      if (h.acquired_on == transient || h.stream == transient) return;
      for (const auto& [c, s] : h.last) {
        if (s == transient) return;
      }
    }
    if (lanes_[0].streams_stay || lanes_[1].streams_stay) return;
    say("destroy stream %d, and make another one", transient);
    for (lane_slot& mine : lanes_) {  // a cache's own rule
      if (!mine.cache) continue;
      if (by_release) {
        mine.cache->release(at(transient).handle);
      } else {
        const relaxed scope;
        device::synchronize(at(transient).handle);
      }
    }
    at(transient).own.reset();
    make_stream(transient);
  }

  // --- the program -----------------------------------------------------------------------------------------------------------

  /// Any of them for small numbers, one of the newest for large ones; 255 is the newest.
  template <class List>
  static auto pick(List& from, std::uint8_t n) {
    const int size = static_cast<int>(from.size());
    return std::next(from.begin(), n < 128 ? n % size : size - 1 - (255 - n) % std::min(size, 3));
  }

  void step(const operation& next) {
    const auto [a, b, c, d] = next.with;
    switch (next.what) {
      case verb::acquire_rows: acquire_rows(a, b, c); break;
      case verb::acquire_scratch: acquire_scratch(a, b, c); break;
      case verb::acquire_anchored: acquire_anchored(a, b, c); break;
      case verb::allocate: allocate(a, b, c, d); break;
      case verb::use:
      case verb::write:
      case verb::check:
        if (handles_.empty()) break;
        if (const auto h = pick(handles_, a); next.what != verb::check || keeps(*h)) {
          if (!begin_use(*h)) break;
          say("%s #%d (%s) on stream %d%s",
              next.what == verb::use     ? "use"
              : next.what == verb::write ? "write"
                                         : "check",
              h->number, kind_name(*h), h->stream, capture_of(h->stream) == 0 ? "" : ", captured");
          if (next.what != verb::check) write(*h);
          if (next.what != verb::write) queue(*h, false);
          end_use(h);
        }
        break;
      case verb::hand_over:
        if (handles_.empty()) break;
        if (const auto h = pick(handles_, a); stream_of(b) != h->stream) {
          say("#%d moves to stream %d", h->number, stream_of(b));
          h->stream = stream_of(b);
        }
        break;
      case verb::pin:
        if (!handles_.empty()) pin(*pick(handles_, a), stream_of(b));
        break;
      case verb::release:
        if (!handles_.empty()) release(pick(handles_, a), b % 2 == 0);
        break;
      case verb::wait: wait(stream_of(a, transient + 1), stream_of(b, transient + 1)); break;
      case verb::begin_capture: begin_capture(stream_of(a), b); break;
      case verb::end_capture:
        if (!captures_.empty()) end_capture(pick(captures_, a)->first);
        break;
      case verb::instantiate:
        if (!graphs_.empty()) instantiate(*pick(graphs_, a));
        break;
      case verb::clone:
        if (!graphs_.empty() && graphs_.size() < most_graphs) {
          const auto g = pick(graphs_, a);
          say("graph %d = clone(graph %d)", numbers_ + 1, g->number);
          graphs_.push_back({++numbers_, g->graph.clone(), copy(g->holds)});
        }
        break;
      case verb::update:
        if (!graphs_.empty() && !execs_.empty()) {
          const auto e = pick(execs_, a);
          const auto g = pick(graphs_, b);
          const relaxed scope;
          record former = std::exchange(e->holds, copy(g->holds));
          let_go(former);
          if (!e->exec.update(g->graph)) {
            drop_exec(e);
          } else {
            say("update(executable %d, graph %d)", e->number, g->number);
          }
        }
        break;
      case verb::launch:
        if (!execs_.empty()) launch(*pick(execs_, a), stream_of(b));
        break;
      case verb::drop_graph:
        if (!graphs_.empty()) drop_graph(pick(graphs_, a));
        break;
      case verb::drop_exec:
        if (!execs_.empty()) drop_exec(pick(execs_, a));
        break;
      case verb::drop_buffer:
        if (b % 4 == 0) {
          drop_anchored(lanes_[a % lane_count]);
        } else {
          drop_buffer(lanes_[a % lane_count]);
        }
        break;
      case verb::drop_lane: drop_lane(lanes_[a % lane_count]); break;
      case verb::reserve: reserve(a, b); break;
      case verb::restore: restore(a, stream_of(b)); break;
      case verb::suspend:
        if (b % 4 == 0) {
          suspend_anchored(lane_at(a));
        } else {
          suspend(a);
        }
        break;
      case verb::resume:
        resume(a);
        resume_anchored(lane_at(a));
        break;
      case verb::trim: trim(a, b, c); break;
      case verb::collect:
        say("collect");
        holdfast::collect(device{0});
        break;
      case verb::fail:
        say("the next %d calls of lane %d's resource fail", 1 + b % 2, a % lane_count);
        lanes_[a % lane_count].fail(1 + b % 2);
        break;
      case verb::synchronize:
        if (const int s = stream_of(a, transient + 1); !is_closed(s)) {
          say("synchronize(stream %d)", s);
          const relaxed scope;
          device::synchronize(at(s).handle);
        }
        break;
      case verb::recycle_stream: recycle_stream(a % 2 == 0); break;
      case verb::turn:
        if (threads_ > 1) say("thread %d goes on", a % threads_);
        next_thread_ = a % threads_;
        break;
      case verb::crowd: break;  // by all threads
      case verb::count: break;
    }
  }

  /// `what`, by that thread, which leaves word of how far its own stream is.
  void take_turn(int thread, const std::function<void()>& what) {
    thread_ = next_thread_ = thread;
    crew_.run(thread, [&] {
      try {
        what();
        if (!has_bound_ || threads_ == 1) return;
        const relaxed scope;
        stream& own = at(first_bound + thread_);
        own.latest = point(own.handle);
      } catch (const std::exception& e) {
        unexplained(e);
      }
    });
  }

  /// Everything goes, in one order or another, and all of it must come back.
  void finish() {
    while (!captures_.empty() && found_misuse.empty()) {
      take_turn(captures_.begin()->second.thread, [&] { end_capture(captures_.begin()->first); });
    }
    for (std::uint64_t turn = 0; turn < 3; ++turn) {
      switch ((turn * (1 + order_of_death_ / 3) + order_of_death_) % 3) {
        case 0:
          for (int thread = 0; thread < threads_ && found_misuse.empty(); ++thread) {
            take_turn(thread, [&] {
              for (auto h = handles_.begin(); h != handles_.end();) release(h++);
            });
          }
          if (!handles_.empty()) misuse("handles are left that no thread may release");
          break;
        case 1:
          while (!graphs_.empty()) drop_graph(graphs_.begin());
          while (!execs_.empty()) drop_exec(execs_.begin());
          break;
        default:
          for (lane_slot& mine : lanes_) {
            drop_buffer(mine);
            drop_anchored(mine);
            drop_lane(mine);
          }
      }
    }
    for (int i = 0; i < 3; ++i) {
      device{0}.run_pending();
      for (int thread = 0; thread < threads_; ++thread) {  // rule 9
        take_turn(thread, [] { holdfast::collect(device{0}); });
      }
    }
    crew_.dismiss();
    device{0}.run_pending();
    if (book_->count() != 0 || book_->live() != 0) {
      misuse("in the end " + std::to_string(book_->count()) + " allocations have not gone back");
    }
    const auto& left = holdfast::counts(device{0});
    if (left.pinned_bytes() != 0 || left.retired_bytes() != 0 || left.pending_bytes() != 0 || left.failures() != 0) {
      misuse("in the end bytes are counted: " + std::to_string(left.pinned_bytes()) + " pinned, " +
             std::to_string(left.retired_bytes()) + " retired, " + std::to_string(left.pending_bytes()) + " pending, " +
             std::to_string(left.failures()) + " failures");
    }
  }

  const program& program_;
  const bool tell_;
  std::uint64_t order_of_death_ = 0;
  observer observer_;
  host::seeded_schedule schedule_;
  std::shared_ptr<ledger> book_ = std::make_shared<ledger>();
  crew crew_;
  int threads_ = 1;
  int thread_ = 0;       // whose turn it is
  int next_thread_ = 0;  // whose it is next
  bool has_bound_ = false;
  std::array<stream, stream_count> streams_{};
  std::array<lane_slot, lane_count> lanes_{};
  std::list<handle> handles_;
  std::map<serial, capture> captures_;  // those under way
  std::list<graph_slot> graphs_;
  std::list<exec_slot> execs_;
  std::map<std::pair<allocation_id, serial>, int> newest_;  // handle of rows, by block and capture
  int numbers_ = 0;
  serial serials_ = 0;
  std::uint64_t tags_ = 0;
};

}  // namespace simulation
