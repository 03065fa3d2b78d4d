// SPDX-License-Identifier: Apache-2.0
// A call one step at a time: inline messages of every size, and places in symmetric memory. A call
// may begin, and a slot be written again, at the right step only. All ranks are in one
// thread (lone_world.h).
//
//   test_steps
#include <cstring>

#include "lone_world.h"

using namespace fastcoll;
using namespace lone;

namespace {

// ---- inline messages ----------------------------------------------------------------------------

void send_inlined() {
  World world(2, [](GroupOptions& options) { options.timeout_s = 60; });
  std::vector<std::byte> message(kInlineMaxBytes), got(kInlineMaxBytes + 1);
  for (size_t num_bytes = 0; num_bytes <= kInlineMaxBytes; ++num_bytes) {
    for (size_t i = 0; i < num_bytes; ++i) message[i] = std::byte(num_bytes + i * 3);
    std::fill(got.begin(), got.end(), std::byte{0});
    for (const int rank : {0, 1}) world.enter(rank);
    InlineLine* lines = world.pad(1).inlined[world.group(1).call() % kDepth];
    require(!world.group(0).has_arrived(1, num_bytes), "a message that was not sent");
    const size_t num_lines =
        num_bytes <= 48 ? 0 : (num_bytes - 48 + InlineLine::kPayloadBytes - 1) / 56;
    const uint64_t behind = num_lines < kInlineLines ? lines[num_lines].slot : 0;
    world.group(1).arrive_inlined(message.data(), num_bytes);
    require(world.group(0).has_arrived(1, num_bytes), "a message that was sent");
    require(num_lines == kInlineLines || lines[num_lines].slot == behind, "a line too much");
    if (num_lines != 0) {
      uint64_t& last = lines[num_lines - 1].slot;
      const uint64_t slot = std::exchange(last, 0);
      require(!world.group(0).has_arrived(1, num_bytes), "a message without its last line");
      last = slot;
    }
    world.group(0).read_inlined(1, got.data(), num_bytes);
    require(std::memcmp(got.data(), message.data(), num_bytes) == 0, "an inline message");
    require(got[num_bytes] == std::byte{0}, "a byte behind it");
    for (const int rank : {0, 1}) world.leave(rank);
  }
}

// Data may look like the flag of a line: none lies in a flag's place.
void send_flags() {
  World world(2);
  world.enter(1);
  world.arrive(0);
  const uint64_t flag = world.pad(0).arrive[1].slot;  // as rank 1's will be
  const std::vector<uint64_t> message(kInlineMaxBytes / sizeof flag, flag);
  const InlineLine* lines = world.pad(1).inlined[1];
  int num_arrived = -1;  // the first flag is the arrival line's
  P::on_arrive = [&](const uint64_t& word) {
    require(num_arrived < 0 || &word == &lines[num_arrived].slot, "the next line's flag");
    for (int i = std::max(num_arrived, 0); i < int(kInlineLines); ++i)
      require(lines[i].slot != flag, "a flag that is no data");
    ++num_arrived;
  };
  world.group(1).arrive_inlined(message.data(), kInlineMaxBytes);
  P::on_arrive = {};
  require_equal(num_arrived, int(kInlineLines), "lines");
}

// ---- reuse --------------------------------------------------------------------------------------

bool would_wait(const std::function<void()>& step) {
  return error_of(step).kind == ErrorKind::timeout;
}

// Rank 0 runs ahead of the others.
void begin_calls() {
  for (const bool stages : {false, true}) {
    World world(3);
    for (int i = 1; i <= kDepth; ++i) {
      require(world.group(0).may_begin(stages), "a call whose line is free");
      world.pass(0);
    }
    require(!world.group(0).may_begin(stages), "a call whose line is in use");
    world.pass(1);
    require(!world.group(0).may_begin(stages), "a line that one rank still reads");
    world.pass(2);
    require(world.group(0).may_begin(stages), "a line that nobody reads");
    world.pass(0);
    require(!world.group(0).may_begin(stages), "the next line");
    for (const int rank : {1, 2}) world.pass(rank);
    require(world.group(0).may_begin(stages), "the next line, which nobody reads");
    for (const int rank : {1, 2})
      for (int i = 0; i < 3; ++i) world.pass(rank);
    world.pass(0);
  }
  World world(2);
  for (int i = 0; i < kDepth; ++i) world.pass(0);
  require(would_wait([&] { world.enter(0); }), "begin() waits for a line");
}

// A call of many segments takes the slots that the next one stages in.
void stage_segments() {
  World world(2);
  Group<P>& group = world.group(0);
  const auto begin = [&](int rank, uint64_t num_segments) {
    world.group(rank).begin(kBarrier, {num_segments}, world.host(rank), kLimitS);
  };
  begin(0, kNumSlots - 2);
  group.consume(kNumSlots - 2);
  world.leave(0);
  require(group.may_begin(true) && group.may_begin(false), "two slots are free");
  begin(0, 2);
  world.leave(0);
  require(group.may_begin(false) && !group.may_begin(true), "no slot is free");
  begin(1, kNumSlots - 2);
  world.group(1).consume(1);
  require(group.may_begin(true), "one slot is free");
  begin(0, 3);
  std::byte* first = group.claim_slot(0);
  require(would_wait([&] { group.claim_slot(1); }), "only one slot is free");
  require(first == group.slot(0, 0), "the slot that was claimed");
  // And a slot is another's until kNumSlots segments later.
  World large(1);
  large.group(0).begin(kBarrier, {2 * kNumSlots}, large.host(0), kLimitS);
  std::vector<std::byte*> slots;
  for (uint64_t k = 0; k < 2 * kNumSlots; ++k) {
    slots.push_back(large.group(0).claim_slot(k));
    large.group(0).consume(k + 1);
  }
  for (size_t i = 0; i < slots.size(); ++i)
    for (size_t j = i + 1; j < slots.size(); ++j)
      require((slots[i] == slots[j]) == (j - i == kNumSlots), "slots by turns");
  require(slots[0] == large.group(0).options().regions[0] + kScratchOffsetBytes, "the first slot");
}

// The next call's first slot, behind calls that staged one segment, or none.
void skip_slots() {
  World world(1);
  Group<P>& group = world.group(0);
  const auto next_slot = [&](bool stages) {
    group.begin(kBarrier, {.num_segments = 1, .stages = stages}, world.host(0), kLimitS);
    const auto start = size_t(group.slot(0, 0) - group.options().regions[0]) - kScratchOffsetBytes;
    world.leave(0);
    return start / kSlotBytes;
  };
  require_equal(next_slot(true), 0, "the first slot");
  require_equal(next_slot(true), 1, "the next one");
  for (int i = 0; i < 3; ++i) next_slot(false);
  require_equal(next_slot(true), 2, "the slot behind calls that stage nothing");
}

// A call is behind the last one in the same slot: a call that takes few slots, all of the time.
void claim_behind_few_slots() {
  constexpr uint64_t kBefore = kFewSlots + 1;      // turns; the next goes to slot 1, of few slots
  constexpr uint64_t kFree = kNumSlots - kBefore;  // until slot 1 comes again
  for (const bool is_behind : {true, false}) {
    World world(2);
    const auto pass = [&](int rank, Staging staging) {
      world.group(rank).begin(kBarrier, staging, world.host(rank), kLimitS);
      world.leave(rank);
    };
    for (const int rank : {0, 1}) pass(rank, {kBefore});
    pass(0, {1, kSlotBytes, true});
    if (!is_behind) pass(1, {1, kSlotBytes, true});
    Group<P>& group = world.group(0);
    group.begin(kBarrier, {kFree + 1}, world.host(0), kLimitS);
    for (uint64_t k = 0; k < kFree; ++k) group.claim_slot(k);
    if (is_behind)
      require(would_wait([&] { group.claim_slot(kFree); }), "a slot that is read still");
    else group.claim_slot(kFree);
  }
}

// Of a call with more segments than slots, the last one in a slot counts.
void claim_behind_many_segments() {
  World world(2);
  Group<P>&group = world.group(0), &peer = world.group(1);
  for (const int rank : {0, 1})
    world.group(rank).begin(kBarrier, {kNumSlots + 1}, world.host(rank), kLimitS);
  for (uint64_t k = 0; k < kNumSlots; ++k) group.claim_slot(k);
  peer.consume(1);
  group.claim_slot(kNumSlots);
  peer.consume(kNumSlots);
  world.leave(0);
  group.begin(kBarrier, {kNumSlots}, world.host(0), kLimitS);
  for (uint64_t k = 0; k + 1 < kNumSlots; ++k) group.claim_slot(k);
  require(would_wait([&] { group.claim_slot(kNumSlots - 1); }), "the last segment is read still");

  World early(2);
  for (const int rank : {0, 1})
    early.group(rank).begin(kBarrier, {kNumSlots + 1}, early.host(rank), kLimitS);
  require(would_wait([&] { early.group(0).claim_slot(kNumSlots); }), "the first is read still");
}

// A call may learn late how many segments it has.
void take_more_segments() {
  World world(1);
  Group<P>& group = world.group(0);
  group.begin(kBarrier, {1}, world.host(0), kLimitS);
  group.take_segments(3);
  const std::byte* last = group.slot(0, 2);
  world.leave(0);
  world.enter(0);
  require(group.slot(0, 0) == last + kSlotBytes, "the slot behind all of them");
}

// ---- symmetric memory ---------------------------------------------------------------------------

void place_tensors() {
  World world(2);
  Group<P>& group = world.group(0);
  constexpr size_t kBytes = 4096;
  alignas(64) static std::byte memory[5 * kBytes];
  for (const size_t first : {size_t{0}, 3 * kBytes}) {
    Arena arena;
    arena.num_bytes = kBytes;
    arena.bases[0] = memory + kBytes + first;
    arena.bases[1] = memory + first;
    group.arenas().push_back(arena);
  }
  group.arenas().push_back({});  // one that was removed
  std::byte* base = memory + kBytes;
  require_equal(group.locate(base, kBytes), Location::encode(0, 0), "all of it");
  require_equal(group.locate(base + 8, kBytes - 8), Location::encode(0, 8), "its end");
  require_equal(group.locate(base + 3 * kBytes, 1), Location::encode(1, 0), "another arena");
  for (const auto& [at, num_bytes] : {std::pair{0, kBytes + 1}, {-1, size_t{2}}, {4096, size_t{1}}})
    require_equal(group.locate(base + at, num_bytes), Location::kStaged, "not in it");

  require(group.resolve(1, Location::kStaged, 0, 1 << 30) == nullptr, "what is staged");
  require(group.resolve(1, Location::encode(0, 0), 0, kBytes) == memory, "all of it");
  require(
      group.resolve(1, Location::encode(1, 96), 1000, kBytes - 1096) == memory + 3 * kBytes + 1096,
      "what ends with it");
  require(group.resolve(1, Location::encode(0, kBytes), 0, 0) == memory + kBytes, "nothing of it");
  struct Bad {
    uint64_t location, start, num_bytes;
  };
  const uint64_t huge = ~uint64_t{0} - 8;
  const Bad bad[] = {{Location::encode(0, 0), 0, kBytes + 1},
                     {Location::encode(0, 8), 0, kBytes - 7},
                     {Location::encode(0, 8), 8, kBytes - 15},
                     {Location::encode(0, kBytes + 1), 0, 0},
                     {Location::encode(0, 0), kBytes + 1, 0},
                     {Location::encode(0, 8), kBytes - 7, 0},
                     {Location::encode(0, 8), huge, 16},
                     {Location::encode(0, 8), 16, huge},
                     {Location::encode(0, kBytes + 8), huge, 0},
                     {Location::encode(2, 0), 0, 0},
                     {Location::encode(3, 0), 0, 0},
                     {Location::kPrivate | 64, 0, 0}};
  for (const Bad& one : bad) {
    World broken(2);
    broken.group(0).arenas() = group.arenas();
    const Seen seen =
        error_of([&] { broken.group(0).resolve(1, one.location, one.start, one.num_bytes); });
    require_part(seen.text, "rank 1 published a place");
    require_equal(seen.ranks, 2, "whose place it was");
  }
}

// ---- notes --------------------------------------------------------------------------------------

void note_calls() {
  for (const bool traces : {false, true}) {
    World world(2, [&](GroupOptions& options) { options.traces = traces; });
    const int64_t before_us = now_us();
    world.all();
    const Operation call = *read_operation<P>(world.pad(0), 1);
    if (traces)
      require(int64_t(call.began_us) >= before_us && call.ended_us >= call.began_us, "its times");
    else require(world.pad(0).ring[1].began_us == 0 && world.pad(0).ring[1].ended_us == 0, "none");
    require_equal(call.end_segment, 1, "the segment behind it");
    const Seen seen = error_of([&] { world.group(0).time_one_way_flag(1, world.host(0)); });
    require_start(seen.text, "between calls, after #1 in group");
  }
}

// While an entry is written, and in its old place, no reader takes it for a whole one.
void write_entries() {
  World world(1, [](GroupOptions& options) { options.traces = true; });
  int num_looks = 0;
  world.host(0).on_site = [&] {
    const uint64_t call = world.group(0).call();
    require_equal(world.pad(0).ring[call % kRingEntries].sequence, 2 * call - 1,
                  "an entry that is written");
    ++num_looks;
  };
  for (int i = 0; i <= kRingEntries; ++i) world.all();
  world.enter(0);
  require_equal(num_looks, kRingEntries + 2, "entries");
  const Operation running = *read_operation<P>(world.pad(0), kRingEntries + 2);
  require(running.began_us != 0 && running.ended_us == 0, "a call that runs");
}

void count_calls() {
  World world(2);
  for (int i = 0; i < 2; ++i) world.all(plan_of(Verb::all_reduce, 3));
  world.all();
  wait_in_vain(world);
  const std::vector<VerbCount> counts = read_counts<P>(world.pad(0));
  require_equal(counts.size(), kNumVerbs, "verbs");
  for (int verb = 0; verb < kNumVerbs; ++verb) {
    const VerbCount& count = counts[size_t(verb)];
    const bool reduces = Verb(verb) == Verb::all_reduce, waits = Verb(verb) == Verb::barrier;
    require_equal(count.calls, reduces || waits ? 2 : 0, "calls of a verb");
    require_equal(count.num_bytes, reduces ? 24 : 0, "bytes of a verb");
    require_equal(count.waited_us, 0, "a wait that failed counts for none");
  }
  World waiting(2);
  waiting.host(0).hook = once([&] { waiting.arrive(1); });
  const int64_t start_us = now_us();
  require_equal(wait_in_vain(waiting).text, "no error", "a wait");
  const auto waited_us = int64_t(read_counts<P>(waiting.pad(0))[size_t(Verb::barrier)].waited_us);
  require(waited_us >= 1000 && waited_us <= now_us() - start_us, "how long a rank waited");
}

// Two ranks write small segments where they have read the peer's a round before. Other segments lie
// in their rank's own scratch, at another place in each round while they leave room in the slot.
void change_scratch() {
  const struct {
    bool answers, exchanges;
    int world_size;
    size_t num_bytes;
    bool changes;
  } cases[] = {{true, true, 2, 1, true},      {true, true, 2, 64 << 10, true},
               {true, true, 3, 4096, false},  {true, true, 2, (64 << 10) + 1, false},
               {true, true, 1, 4096, false},  {true, true, 2, kSlotBytes, false},
               {false, true, 2, 4096, false}, {true, false, 2, 4096, false}};
  for (const auto& one : cases) {
    const bool usual = std::exchange(copy_ways.answers_in_place, one.answers);
    Slots<P> slots;
    size_t last_offset = 0;
    for (uint64_t round = 0; round < 8; ++round)
      for (uint64_t call = 0; call < kNumSlots; ++call) {
        slots.begin({.num_segments = 1, .segment_bytes = one.num_bytes, .exchanges = one.exchanges},
                    round * kNumSlots + call, one.world_size);
        for (int rank = 0; rank < one.world_size; ++rank)
          require_equal(slots.owner(rank, 0), one.changes && round % 2 ? 1 - rank : rank, "whose");
        require_equal(slots.slot(0), call, "a slot");
        const size_t offset = slots.offset_bytes(0);
        if (call == 0 && round > 0) {
          const bool is_same = one.changes || one.num_bytes == kSlotBytes;
          require_equal(offset == last_offset, is_same, "the place of the round before");
        }
        if (call == 0) last_offset = offset;
        slots.end();
      }
    copy_ways.answers_in_place = usual;
  }
}

}  // namespace

int main() {
  send_inlined();
  send_flags();
  begin_calls();
  stage_segments();
  skip_slots();
  claim_behind_few_slots();
  claim_behind_many_segments();
  take_more_segments();
  change_scratch();
  place_tensors();
  note_calls();
  write_entries();
  count_calls();
}
