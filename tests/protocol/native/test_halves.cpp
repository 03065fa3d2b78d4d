// SPDX-License-Identifier: Apache-2.0
// Calls in two halves: which calls have them, when one may begin and end, and what it moves. All
// ranks are in one thread (lone_world.h).
//
//   test_halves
#include <cstdint>

#include "cpu/halves.h"
#include "lone_world.h"

using namespace fastcoll;
using namespace lone;

namespace {

// Whether a call has two halves; `num_bytes`: of a rank's message.
bool halves(int world_size, Verb verb, Algorithm algorithm, size_t num_bytes, bool inlined = false,
            size_t segment_bytes = kSlotBytes) {
  World world(world_size);
  Plan plan;
  plan.verb = verb;
  plan.algorithm = algorithm;
  plan.numel = num_bytes;
  plan.inlined = inlined;
  plan.segment_bytes = uint32_t(segment_bytes);
  plan = make_plan(plan);
  const Call<P> call{world.group(0), plan, nullptr, nullptr};
  return has_halves(call);
}

void halve_calls() {
  constexpr size_t kInPlace = 64 << 10, kMost = 128 << 10;
  using enum Verb;
  require(halves(2, all_reduce, Algorithm::one_shot, kMost / 2), "as much as takes no time");
  require(!halves(2, all_reduce, Algorithm::one_shot, kMost / 2 + 1), "more than that");
  require(halves(4, all_reduce, Algorithm::one_shot, kMost / 4), "the same of four ranks");
  require(!halves(4, all_reduce, Algorithm::one_shot, kMost / 4 + 1), "more than that");
  require(!halves(1, all_reduce, Algorithm::one_shot, 8), "a group of one rank");
  require(!halves(2, all_reduce, Algorithm::two_shot, 8), "a call in which all wait for all");
  require(!halves(2, reduce_scatter, Algorithm::one_shot, 8), "it is a two_shot");
  require(halves(2, reduce_scatter, Algorithm::one_shot, 8, true), "but for a small one");
  require(halves(2, all_gather, Algorithm::direct, kInPlace - 1), "a message that is staged");
  require(!halves(2, all_gather, Algorithm::direct, kInPlace), "one that is read where it lies");
  require(!halves(2, all_gather, Algorithm::direct, kInPlace - 1, false, kLeastSegmentBytes),
          "one of several segments");
  require(!halves(2, all_reduce, Algorithm::one_shot, kMost / 2, false, kLeastSegmentBytes),
          "another one of several segments");
}

struct Died {};

constexpr int kSize = 3, kRoot = 0;
constexpr size_t kNumel = 4;  // of a part

int32_t value_of(int rank, size_t i) { return 100 * rank + int32_t(i); }

void require_result(Verb verb, int rank, const int32_t* output) {
  using enum Verb;
  if (verb == barrier || ((verb == reduce || verb == gather) && rank != kRoot)) return;
  const bool joins = verb == gather || verb == all_gather;
  for (size_t i = 0; i < kNumel * (joins ? kSize : 1); ++i) {
    int32_t expected = 0;
    for (int peer = 0; verb_reduces(verb) && peer < kSize; ++peer) expected += value_of(peer, i);
    if (joins) expected = value_of(int(i / kNumel), i % kNumel);
    if (verb == broadcast) expected = value_of(kRoot, i);
    if (verb == scatter) expected = value_of(kRoot, size_t(rank) * kNumel + i);
    require_equal(output[i], expected, std::string("an element of ") + verb_name(verb));
  }
}

// A rank may finish a call when the ranks have arrived whose messages it gets, and no sooner.
void finish_halves() {
  using enum Verb;
  for (const Verb verb : {barrier, all_reduce, reduce, broadcast, scatter, gather, all_gather})
    for (const bool inlined : {true, false})
      for (int rank = 0; rank < kSize; ++rank) {
        if (verb == barrier && !inlined) continue;
        World world(kSize);
        Plan plan = plan_of(verb, kNumel, kRoot);
        plan.algorithm = verb_reduces(verb) ? Algorithm::one_shot : Algorithm::direct;
        plan.inlined = inlined;
        plan = make_plan(plan);
        std::vector<int32_t> data(2 * kSize * kSize * kNumel);
        const auto input_of = [&](int of) { return data.data() + size_t(of) * 2 * kSize * kNumel; };
        const auto output_of = [&](int of) {
          return input_of(of) + (verb == broadcast ? 0 : kSize * kNumel);
        };
        for (int of = 0; of < kSize; ++of)
          for (size_t i = 0; i < kSize * kNumel; ++i) input_of(of)[i] = value_of(of, i);
        const auto call_of = [&](int of) {
          int32_t *input = input_of(of), *output = output_of(of);
          return Call<P>{world.group(of), plan, reinterpret_cast<std::byte*>(input),
                         reinterpret_cast<std::byte*>(output)};
        };
        Call<P> call = call_of(rank);
        require(begin_half(call, world.host(rank), kLimitS), "a call that may begin");
        const bool from_root = verb == broadcast || verb == scatter;
        const bool to_root = verb == reduce || verb == gather;
        int num_awaited = from_root ? int(rank != kRoot) : to_root && rank != kRoot ? 0 : kSize - 1;
        for (int peer = kSize - 1; peer >= 0; --peer) {
          require_equal(may_finish(call), num_awaited == 0,
                        std::string("whether a rank may finish ") + verb_name(verb));
          if (peer == rank) continue;
          Call<P> other = call_of(peer);
          require(begin_half(other, world.host(peer), kLimitS), "a call that may begin");
          if (from_root ? rank != kRoot && peer == kRoot : num_awaited > 0) --num_awaited;
        }
        require(may_finish(call), "all have arrived");
        finish(call, world.host(rank));
        require_result(verb, rank, output_of(rank));
        require_equal(world.pad(rank).done.value, 1, "the segments of a call that ended");
      }
}

void begin_no_half() {
  World world(2);
  const Plan plan = plan_of(Verb::all_reduce, kInlineMaxBytes / 4 + 1);
  std::vector<int32_t> data(plan.numel);
  Call<P> call{world.group(0), plan, reinterpret_cast<std::byte*>(data.data()),
               reinterpret_cast<std::byte*>(data.data())};
  const Seen seen = error_of([&] { begin_half(call, world.host(0), kLimitS); });
  require_equal(seen.kind, ErrorKind::usage, seen.text);
  require_equal(world.group(0).call(), 0, "calls that began");
  // Neither a call of one half, nor one whose line is in use.
  Plan whole = plan;
  whole.algorithm = Algorithm::two_shot;
  whole.inlined = false;
  whole = make_plan(whole);
  Call<P> one{world.group(0), whole, call.input, call.output};
  require(!begin_half(one, world.host(0), kLimitS), "a call of one half");
  World busy(2);
  for (int i = 0; i < kDepth; ++i) busy.pass(0);
  Call<P> next{busy.group(0), kBarrier, nullptr, nullptr};
  require(!begin_half(next, busy.host(0), kLimitS), "a line that is in use");
}

// Another thread ends a call with a host of its own.
void finish_by_other_hosts() {
  World world(2);
  Call<P> empty{world.group(0), kBarrier, nullptr, nullptr};
  require(begin_half(empty, world.host(0), kLimitS), "a barrier");
  LoneHost other;
  other.leaves = true;
  require_equal(error_of([&] { finish(empty, other); }).text, "stepped out", "the other host");
  world.arrive(1);
  finish(empty, world.host(0));
}

// After an exception of the host no call runs.
void abandon_calls() {
  World world(2);
  Call<P> empty{world.group(0), kBarrier, nullptr, nullptr};
  require(begin_half(empty, world.host(0), kLimitS), "a barrier");
  world.host(0).hook = [] { throw Died{}; };
  bool has_died = false;
  try {
    finish(empty, world.host(0));
  } catch (const Died&) {
    has_died = true;
  }
  require(has_died, "an exception of the host");
  world.host(0).hook = {};
  const std::string text =
      error_of([&] { world.group(0).time_one_way_flag(1, world.host(0)); }).text;
  require_start(text, "between calls, after #1");
}

}  // namespace

int main() {
  halve_calls();
  finish_halves();
  begin_no_half();
  finish_by_other_hosts();
  abandon_calls();
}
