// Faults that the simulation must find. Some live in its own doubles; those of the library are put into patched copies of
// its headers (CMakeLists.txt), where `HOLDFAST_MUTANT(name)` says whether that one is switched on in this process.
#pragma once

namespace simulation {

enum class mutant {
  none,

  // of a resource
  pool_publishes_early,         // a freed block is for everybody before its work is done (cub#156, A7.1)
  pool_takes_errors_for_ready,  // an event that was recorded in a capture cannot be asked, and is taken for done
  pool_trusts_handles,          // a handle of a stream is taken for the stream, though that has been destroyed since

  // of the library: what graphs and handles hold
  acquire_does_not_pin,            // rows acquired in a capture
  arena_does_not_pin,              // scratch acquired in a capture
  anchored_does_not_pin,           // anchored scratch acquired in a capture
  only_the_first_graph_pins,       // the death of that one frees the memory of all
  pinned_is_evicted_in_the_retry,  // when memory is short
  capture_end_forgets_handles,     // scratch that is still held is overlaid by the next capture
  forgets_more_than_it_replaces,   // released pieces that a new one merely meets
  anchored_lends_twice,            // the same memory, to two handles

  // order
  reuse_without_a_path,               // on another branch of the same capture
  streams_do_not_wait,                // an acquire, for earlier users on other streams
  restore_does_not_wait,              // zeros are written over zeros that are being read: no run can tell
  freed_before_other_streams_finish,  // the final free waits for its own stream alone
  freed_while_capturing_unfenced,     // a use on a stream that captures is taken for fenced
  release_elsewhere_is_forgotten,     // release(stream) on another stream than acquire's
  guard_unmaps_early,                 // before the work queued on its stream is done
  caching_publishes_early,            // a segment goes to others without an event behind its last use
  caching_does_not_wait,              // a stream, for the last work in a segment that was another one's
  caching_gives_back_early,           // a segment goes to the upstream before its last work is done

  // the per-thread default stream: one handle, many streams
  arena_trusts_bound_handles,       // what one thread released is taken for ordered on another
  caching_trusts_bound_handles,     // what one thread freed is taken for ordered on another
  bound_use_is_marked_in_captures,  // an eager use that ends while the stream captures

  // contents, and failure
  padding_is_not_zeroed,  // of a new block
  growth_is_not_zeroed,   // in place
  resume_does_not_zero,
  tail_is_not_zeroed,
  calls_are_not_relaxed,  // a memset of ours breaks a capture of somebody's
  failed_growth_changes,  // out of memory leaves a buffer with a capacity that it lacks
  count
};

inline constexpr const char* mutant_names[] = {"none",
                                               "pool_publishes_early",
                                               "pool_takes_errors_for_ready",
                                               "pool_trusts_handles",
                                               "acquire_does_not_pin",
                                               "arena_does_not_pin",
                                               "anchored_does_not_pin",
                                               "only_the_first_graph_pins",
                                               "pinned_is_evicted_in_the_retry",
                                               "capture_end_forgets_handles",
                                               "forgets_more_than_it_replaces",
                                               "anchored_lends_twice",
                                               "reuse_without_a_path",
                                               "streams_do_not_wait",
                                               "restore_does_not_wait",
                                               "freed_before_other_streams_finish",
                                               "freed_while_capturing_unfenced",
                                               "release_elsewhere_is_forgotten",
                                               "guard_unmaps_early",
                                               "caching_publishes_early",
                                               "caching_does_not_wait",
                                               "caching_gives_back_early",
                                               "arena_trusts_bound_handles",
                                               "caching_trusts_bound_handles",
                                               "bound_use_is_marked_in_captures",
                                               "padding_is_not_zeroed",
                                               "growth_is_not_zeroed",
                                               "resume_does_not_zero",
                                               "tail_is_not_zeroed",
                                               "calls_are_not_relaxed",
                                               "failed_growth_changes"};
static_assert(sizeof(mutant_names) / sizeof(*mutant_names) == static_cast<int>(mutant::count));

inline mutant active_mutant = mutant::none;

}  // namespace simulation

#define HOLDFAST_MUTANT(name) (::simulation::active_mutant == ::simulation::mutant::name)
