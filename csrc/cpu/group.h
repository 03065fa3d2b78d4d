// SPDX-License-Identifier: Apache-2.0
// One rank's end of a group: its own pad to write, the peers' pads to read, and the state of the
// protocol (kernels/README.md). The algorithms (one_shot.h, ...) are written with its verbs:
// begin, arrive, wait_arrival, publish, wait_progress, claim, consume.
//
// One arrival line per rank: each rank writes one line of 64 bytes per call in its own pad, and
// all peers read it. A line per pair of ranks would cost n - 1 stores. The line holds the location
// or the inline data, the CPU, and last, with release, the slot word (epoch | stamp).
//
// One reuse rule: segments are numbered over the life of the group, equal on all ranks. A slot may
// be written when the `done` of every rank has passed the last segment in it (slots.h). The rule
// knows no verb, so it holds over any sequence of verbs. Cached lower bounds are compared first: an
// arrival proves that its rank has finished all earlier calls, so `done` itself is rarely read.
//
// Progress words count segments in 64 bits and are compared with >= on the circle. So an earlier
// call's progress never matches, and a fast peer may be ahead. A call number in 32 bits would not
// do: a word that lies idle through 2^31 inline calls would look ahead.
//
// Tried without gain: fetching the next arrival line for writing ahead of time is slower, as the
// polling peer takes it back at once. For the line after it there was no clear gain.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/atomics.h"
#include "cpu/copy.h"
#include "cpu/patience.h"
#include "cpu/process_memory.h"
#include "cpu/slots.h"
#include "cpu/staging_copy.h"
#include "cpu/wait.h"
#include "layout.h"
#include "plan.h"

// For the functions that every small call goes through. A compiler does not inline them by itself,
// as other files could call them. Calls of them then take a tenth of the shortest call's time.
#define FASTCOLL_HOT [[gnu::always_inline]] inline

namespace fastcoll {

struct GroupOptions {
  int rank = 0;
  int world_size = 1;
  std::string name;
  std::array<std::byte*, kMaxWorld> regions{};  // every rank's, mapped here; mapped_bytes() each
  std::array<PeerLink, kMaxWorld> links{};
  double timeout_s = 30;
  int num_cpus = 1;         // that the ranks have between them
  bool traces = false;      // note the time and the site of every call
  uint64_t first_call = 0;  // calls made before, of a segment each; tests start before a wrap
};

// A shared word and the value to wait for. exact: a slot, compared on == with the stamp; else >=.
struct Awaited {
  const uint64_t* word;
  uint64_t target;
  bool exact;
};

// An allocation of the symmetric heap, mapped from every rank; null bases once removed.
struct Arena {
  std::array<std::byte*, kMaxWorld> bases{};
  size_t num_bytes = 0;
  int fd = -1;  // of this rank's own memory
};

template <class P>
class Group {
 public:
  explicit Group(GroupOptions options);

  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }
  bool is_crowded() const { return is_crowded_; }  // more ranks than CPUs
  const GroupOptions& options() const { return options_; }
  Company& company() { return company_; }

  // The limit of calls that have none of their own, from any thread; calls under way keep theirs.
  double limit_s() const { return limit_s_.load(std::memory_order_relaxed); }
  void set_limit(double limit_s) { limit_s_.store(limit_s, std::memory_order_relaxed); }
  uint64_t call() const { return call_; }
  std::vector<Arena>& arenas() { return arenas_; }

  // ---- a call, from begin to end --------------------------------------------------------------
  // Number the call, write its descriptor and make the arrival line writable. Throws the verdict
  // of a broken group.
  void begin(const Plan& plan, Staging staging, Host& host, double timeout_s);
  void end();
  // Whether neither `begin` would have to wait, for the arrival line, nor, if a segment is to be
  // staged, claim_slot(0).
  bool may_begin(bool stages);
  void go_on(Host& host) { host_ = &host; }  // with a call that another thread began
  // Change the number of segments given to `begin`, before the first is staged. For calls whose
  // sizes the ranks learn from each other's arrival. The same on every rank, at least 1.
  void take_segments(uint64_t count) {
    next_segment_ = first_segment_ + count;
    slots_.take(count);
  }
  void abandon() { plan_ = nullptr; }  // after an exception: the group's verdict is set

  // ---- arrival: one line per call -------------------------------------------------------------
  void arrive(uint64_t input_location, uint64_t output_location);
  void arrive_inlined(const void* message, size_t num_bytes);
  const ArriveLine& wait_arrival(int peer);
  // The inline message of a peer that arrived, copied to `message` (up to kInlineMaxBytes).
  void read_inlined(int peer, void* message, size_t num_bytes);

  // ---- progress inside a call -----------------------------------------------------------------
  void publish_staged(uint64_t count) { signal(me_->staged, progress(count)); }
  void publish_reduced(uint64_t count) { signal(me_->reduced, progress(count)); }
  // Whether a peer has arrived, with all of a message of so many bytes in its lines.
  bool has_arrived(int peer, size_t num_bytes) {
    const size_t line_idx = call_ % P::kLines;
    if (num_bytes <= ArriveLine::kPayloadBytes)
      return met({&pad(peer).arrive[line_idx].slot, slot_value(), true});
    const size_t last = (num_bytes - ArriveLine::kPayloadBytes - 1) / InlineLine::kPayloadBytes;
    return met({&pad(peer).inlined[line_idx][last].slot, slot_value(), true});
  }
  // Whether all other ranks have arrived in the next call, which is to be of this plan.
  bool has_next_arrivals(const Plan& plan) const;
  bool has_reduced(int peer, uint64_t count) {
    return met({&pad(peer).reduced.value, progress(count), false});
  }
  void wait_staged(int peer, uint64_t count) {
    wait(peer, {&pad(peer).staged.value, progress(count), false});
  }
  void wait_reduced(int peer, uint64_t count) {
    wait(peer, {&pad(peer).reduced.value, progress(count), false});
  }

  // ---- signals of a schedule: counted for each segment, up to kMostSignals --------------------
  void publish_signals(uint64_t segment_idx, uint64_t count) {
    signal(signals(rank(), segment_idx), signals_value(segment_idx, count));
  }
  bool has_signalled(int peer, uint64_t segment_idx, uint64_t count) {
    return met(signalled(peer, segment_idx, count));
  }
  void wait_signals(int peer, uint64_t segment_idx, uint64_t count) {
    wait(peer, signalled(peer, segment_idx, count));
  }

  // ---- scratch: a ring of slots, one per segment, over all calls ------------------------------
  // My slot for segment k of this call. Returns once all ranks have consumed its old contents.
  std::byte* claim_slot(uint64_t segment_idx) {
    require_done(slots_.done_before(segment_idx));
    return slot(rank(), segment_idx);
  }
  std::byte* slot(int peer, uint64_t segment_idx) {
    return peers_[slots_.owner(peer, segment_idx)].scratch + slots_.offset_bytes(segment_idx);
  }
  // Fills a claimed slot.
  StagingCopy<P>& staging_copy() { return staging_copy_; }
  // I need nothing more of segments below `count` of this call, in any rank's memory.
  void consume(uint64_t count) { signal(me_->done, first_segment_ + count); }
  // Wait until every rank has consumed segments below `count` of this call.
  void wait_consumed(uint64_t count) { require_done(first_segment_ + count); }

  // ---- symmetric memory -----------------------------------------------------------------------
  uint64_t locate(const void* ptr, size_t num_bytes) const;
  // Where `num_bytes` of a peer lie here, `start` bytes behind the place that it published; null if
  // it staged them. A place outside its memory becomes the group's verdict.
  std::byte* resolve(int peer, uint64_t location, uint64_t start, uint64_t num_bytes);

  // ---- failure --------------------------------------------------------------------------------
  void check() const;  // throws the verdict of a broken group
  bool is_broken() const { return P::load_acquire(me_->poison.value) != 0; }
  // Make this the group's verdict, unless it has one; returns 1 + the rank whose verdict holds.
  // In any thread, also beside a call that runs in another one.
  uint64_t decide_verdict(ErrorKind kind, const std::string& text, uint64_t ranks);
  // The same, and throw the one that holds.
  [[noreturn]] void fail(ErrorKind kind, const std::string& text, uint64_t ranks = 0) {
    throw_verdict(decide_verdict(kind, text, ranks));
  }
  // A peer's memory holds a value that no rank of this program writes.
  [[noreturn]] void fail_damaged(const std::string& name, int peer, const std::string& what) {
    fail(ErrorKind::desync,
         name + ": rank " + std::to_string(peer) + " published " + what +
             ": its memory is damaged, or it runs another build of fastcoll",
         uint64_t{1} << peer);
  }
  // The ranks that have not entered the call in which a peer waits, except those that wait
  // elsewhere. 0: it waits in no call. For an error's text.
  uint64_t awaited_by(int peer);
  std::string call_name() const;  // "barrier() #42 in group "world" (seen by rank 0 of 2)"

  Pad& pad(int peer) { return *peers_[peer].pad; }
  // After words of mine have changed without `signal`.
  void wake_sleepers() {
    if (P::load_sleepers(me_->sleep)) [[unlikely]]
      wake();
  }

  // ---- private memory (single_copy.h) ---------------------------------------------------------
  std::array<int, kMaxWorld> try_single_copy(bool is_wanted, Host& host);
  // `memory`: see open_memory; the caller closes it after the group.
  void keep_memory(int peer, int memory) { options_.links[size_t(peer)].memory = memory; }
  Readable& readable() { return readable_; }

  // Private memory for one inlined message of each peer.
  std::byte* inbox(int peer) { return inbox_.get() + size_t(peer) * kInlineMaxBytes; }

  // Seconds one flag takes from rank 0 to rank 1: round trips on a word of the pads. Other ranks
  // return 0 at once. Only on an idle group.
  double time_one_way_flag(int iterations, Host& host);

 private:
  struct Peer {
    Pad* pad = nullptr;
    std::byte* scratch = nullptr;
    uint32_t cpu = ~0u;       // where it ran when it last arrived
    uint64_t known_done = 0;  // a lower bound of its `done`
    // While a wait is long: the last call it entered, and since when it is that one.
    uint64_t last_call = 0;
    int64_t since_us = 0;
    bool was_seen = false;  // entering it; else it did so some time before
  };

  static constexpr int kTrustedYields = 4;  // then a peer isn't here, even if its line says so
  static constexpr int64_t kPatrolUs = 1000;
  static constexpr int64_t kSpreadUs = 50000;     // moved too often, ranks would lose their caches
  static constexpr int64_t kSleepUs = 20000;      // with membarrier a wake can't be missed
  static constexpr int64_t kShortSleepUs = 2000;  // without it can: look again soon

  // Progress words only grow, over all calls, and have 64 bits. Counted in 32 bits, a word that
  // stays idle while 2^31 calls pass would look ahead. No call publishes more than 2n-1 steps
  // (ring) for each of its segments.
  uint64_t progress(uint64_t count) const { return first_segment_ * (2 * kMaxWorld) + count; }
  // Grows from segment to segment of a slot, too.
  uint64_t signals_value(uint64_t segment_idx, uint64_t count) const {
    return (first_segment_ + segment_idx) * kMostSignals + count;
  }
  Word& signals(int peer, uint64_t segment_idx) {
    return pad(peer).signals[slots_.slot(segment_idx)];
  }
  Awaited signalled(int peer, uint64_t segment_idx, uint64_t count) {
    return {&signals(peer, segment_idx).value, signals_value(segment_idx, count), false};
  }
  uint64_t slot_value() const { return call_ << 32 | stamp_; }
  static uint32_t stamp_after(uint32_t stamp, uint32_t hash) {
    return next_stamp(P::kChainsStamps ? stamp : 0, hash);
  }
  ArriveLine& my_line() { return me_->arrive[call_ % P::kLines]; }
  Descriptor& my_entry() { return me_->ring[call_ % kRingEntries]; }

  void signal(Word& word, uint64_t value) { signal(word.value, value); }
  void signal(uint64_t& word, uint64_t value) {
    P::arrive(word, value);
    wake_sleepers();
  }
  void wake();

  FASTCOLL_HOT bool met(const Awaited& awaited) const {
    const uint64_t seen = P::load_acquire(*awaited.word);
    return awaited.exact ? seen == awaited.target : P::reached(seen, awaited.target);
  }
  FASTCOLL_HOT void wait(int peer, Awaited awaited) {
    if (met(awaited)) return;
    if (peers_[peer].cpu != cpu_) {  // a peer that last ran on my CPU can't be running now
      for (int i = 0; i < num_spins_; ++i) {
        cpu_pause();
        if (met(awaited)) return;
      }
    }
    wait_long(peer, awaited);
  }
  void wait_long(int peer, const Awaited& awaited);
  bool spin_until(int peer, const Awaited& awaited, int64_t start_us);
  bool yield_until(int peer, const Awaited& awaited);
  void spread();
  bool sleep(int peer, const Awaited& awaited);  // whether a peer may have ended it
  void patrol(int peer, const Awaited& awaited, const WaitedTime& waited);
  void look_for_loss(int peer, const Awaited& awaited);

  FASTCOLL_HOT void require_done(uint64_t segment) {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (int64_t(peers_[peer].known_done - segment) >= 0 || peer == rank()) continue;
      if (P::kChecksDone) await_done(peer, segment);
    }
  }
  [[gnu::noinline]] void await_done(int peer, uint64_t segment) {
    wait(peer, {&pad(peer).done.value, segment, false});
    peers_[peer].known_done = segment;
  }

  void write_descriptor();
  uint64_t last_entered_call(int peer);
  void note_wait(int64_t since_us);  // if long: in my descriptor, and then what peers enter
  // "entered all_reduce(SUM, float32, numel=8) #41, not #42, 12.3 s ago; process 4711 is stopped"
  std::string describe_last_call(int peer, int64_t time_us);
  void compare_descriptors(int peer);
  bool waits_itself(int peer);
  // Names the ranks that hold up the others, not those that wait in turn.
  [[noreturn]] void fail_timeout(int peer, int64_t waited_us);
  [[noreturn]] void throw_verdict(uint64_t poison) const;

  GroupOptions options_;
  const bool is_crowded_ = options_.world_size > options_.num_cpus;
  int num_spins_ = is_crowded_ ? P::kSpinsIfCrowded : P::kSpins;
  std::array<Peer, kMaxWorld> peers_{};
  Pad* me_ = nullptr;
  std::vector<Arena> arenas_;

  uint64_t call_ = 0;   // number of the running, else of the last call
  uint32_t stamp_ = 0;  // of that call
  uint32_t hash_ = 0;   // of its plan
  uint32_t stamp_if_same_ = next_stamp(0, 0);
  uint64_t first_segment_ = 0;  // its first segment, counted over all calls
  uint64_t next_segment_ = 0;
  Slots<P> slots_;
  std::array<uint64_t, kDepth> first_segments_{};  // of the last kDepth calls
  uint32_t cpu_ = ~0u;
  const Plan* plan_ = nullptr;  // set while a call runs
  Host* host_ = nullptr;
  Company company_{P::kSliceUs};
  Patience patience_{options_.world_size, options_.num_cpus};
  int64_t next_spread_us_ = 0;
  int watched_ = 0;  // whose end a long wait looked for last, beside that of the awaited rank
  std::atomic<double> limit_s_;
  double timeout_s_ = 0;
  std::unique_ptr<std::byte[]> inbox_;
  StagingCopy<P> staging_copy_;
  Readable readable_;
  enum class Page { blank, being_written, written };
  std::atomic<Page> page_{Page::blank};  // of my verdict
};

template <class P>
Group<P>::Group(GroupOptions options) : options_(std::move(options)), limit_s_(options_.timeout_s) {
  if (world_size() < 1 || world_size() > kMaxWorld || rank() < 0 || rank() >= world_size())
    throw Failure(ErrorKind::usage, "rank " + std::to_string(rank()) + " of " +
                                        std::to_string(world_size()) + " ranks (1 to " +
                                        std::to_string(kMaxWorld) + " are possible)");
  call_ = next_segment_ = options_.first_call;
  for (int peer = 0; peer < world_size(); ++peer) {
    peers_[peer].pad = reinterpret_cast<Pad*>(options_.regions[peer]);
    peers_[peer].scratch = options_.regions[peer] + kScratchOffsetBytes;
    peers_[peer].known_done = options_.first_call;
  }
  me_ = peers_[rank()].pad;
  cpu_ = current_cpu();
  inbox_ = std::make_unique<std::byte[]>(size_t(world_size()) * kInlineMaxBytes);
}

template <class P>
FASTCOLL_HOT void Group<P>::begin(const Plan& plan, Staging staging, Host& host, double timeout_s) {
  if constexpr (P::kChecksCalls)
    if (P::load_relaxed(me_->poison.value)) [[unlikely]]
      check();
  plan_ = &plan;
  host_ = &host;
  timeout_s_ = timeout_s < 0 ? limit_s() : timeout_s;
  ++call_;
  if constexpr (P::kChecksCalls) {
    if (plan.hash == hash_) [[likely]]
      stamp_ = stamp_if_same_;
    else stamp_ = stamp_after(stamp_, plan.hash);
    // For the next call, if it is like this one: mixed while ranks wait, not before they arrive.
    hash_ = plan.hash;
    stamp_if_same_ = stamp_after(stamp_, hash_);
  }
  first_segment_ = next_segment_;
  next_segment_ += staging.num_segments;
  slots_.begin(staging, first_segment_, world_size());
  first_segments_[call_ % kDepth] = first_segment_;
  if constexpr (P::kChecksCalls) write_descriptor();
  // Line call % kDepth was last used by call - kDepth. All ranks must have finished that call: then
  // they have consumed the segments before those of call - kDepth + 1.
  require_done(first_segments_[(call_ + 1) % kDepth]);
}

template <class P>
FASTCOLL_HOT void Group<P>::end() {
  consume(next_segment_ - first_segment_);
  slots_.end();
  if (options_.traces) [[unlikely]]
    P::store_relaxed(my_entry().ended_us, uint64_t(now_us()));
  plan_ = nullptr;
}

template <class P>
void Group<P>::arrive(uint64_t input_location, uint64_t output_location) {
  ArriveLine& line = my_line();
  line.cpu = cpu_ = current_cpu();
  line.location = {input_location, output_location};
  signal(line.slot, slot_value());
}

template <class P>
FASTCOLL_HOT void Group<P>::arrive_inlined(const void* message, size_t num_bytes) {
  ArriveLine& line = my_line();
  line.cpu = cpu_ = current_cpu();
  const auto* bytes = static_cast<const std::byte*>(message);
  copy_bytes(line.payload, bytes, std::min(num_bytes, sizeof line.payload));
  signal(line.slot, slot_value());
  InlineLine* next = me_->inlined[call_ % P::kLines];
  for (size_t at = sizeof line.payload; at < num_bytes; at += sizeof next->payload, ++next) {
    if (num_bytes - at >= sizeof next->payload)
      std::memcpy(next->payload, bytes + at, sizeof next->payload);
    else std::memcpy(next->payload, bytes + at, num_bytes - at);
    signal(next->slot, slot_value());
  }
}

template <class P>
FASTCOLL_HOT const ArriveLine& Group<P>::wait_arrival(int peer) {
  const ArriveLine& line = pad(peer).arrive[call_ % P::kLines];
  wait(peer, {&line.slot, slot_value(), true});
  peers_[peer].cpu = line.cpu;
  // It arrived here, so it has finished every earlier call.
  if (int64_t(first_segment_ - peers_[peer].known_done) > 0)
    peers_[peer].known_done = first_segment_;
  return line;
}

template <class P>
void Group<P>::read_inlined(int peer, void* message, size_t num_bytes) {
  const ArriveLine& line = wait_arrival(peer);
  auto* bytes = static_cast<std::byte*>(message);
  copy_bytes(bytes, line.payload, std::min(num_bytes, sizeof line.payload));
  const InlineLine* next = pad(peer).inlined[call_ % P::kLines];
  for (size_t at = sizeof line.payload; at < num_bytes; at += sizeof next->payload, ++next) {
    wait(peer, {&next->slot, slot_value(), true});
    if (num_bytes - at >= sizeof next->payload)
      std::memcpy(bytes + at, next->payload, sizeof next->payload);
    else std::memcpy(bytes + at, next->payload, num_bytes - at);
  }
}

template <class P>
uint64_t Group<P>::locate(const void* ptr, size_t num_bytes) const {
  const auto* bytes = static_cast<const std::byte*>(ptr);
  for (size_t i = 0; i < arenas_.size(); ++i) {
    const std::byte* base = arenas_[i].bases[rank()];
    if (base && bytes >= base && bytes + num_bytes <= base + arenas_[i].num_bytes)
      return Location::encode(int(i), uint64_t(bytes - base));
  }
  return Location::kStaged;
}

template <class P>
std::byte* Group<P>::resolve(int peer, uint64_t location, uint64_t start, uint64_t num_bytes) {
  if (location == Location::kStaged) return nullptr;
  const auto arena_idx = size_t(Location::arena_idx(location));
  const uint64_t offset = Location::offset_bytes(location);
  if (P::kChecksPlaces) {
    const bool is_known = arena_idx < arenas_.size() && arenas_[arena_idx].bases[peer];
    const uint64_t size = is_known ? arenas_[arena_idx].num_bytes : 0;
    if (!is_known || offset > size || start > size - offset || num_bytes > size - offset - start)
        [[unlikely]]
      fail_damaged(call_name(), peer,
                   "a place of " + std::to_string(num_bytes) + " bytes at " +
                       std::to_string(offset) + " + " + std::to_string(start) + " of arena " +
                       std::to_string(arena_idx) + ", which has " + std::to_string(size));
  }
  return arenas_[arena_idx].bases[peer] + offset + start;
}

}  // namespace fastcoll

#include "cpu/group_status.h"
#include "cpu/group_wait.h"
