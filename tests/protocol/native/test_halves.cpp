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
  std::byte output;
  const Call<P> call{world.group(0), plan, nullptr, &output};
  return has_halves(call);
}

void halve_calls() {
  constexpr size_t kInPlace = 64 << 10, kMost = 128 << 10;
  using enum Verb;
  require(halves(2, all_reduce, Algorithm::one_shot, kMost / 2), "as much as takes no time");
  require(!halves(2, all_reduce, Algorithm::one_shot, kMost / 2 + 1), "more than that");
  require(halves(4, all_reduce, Algorithm::one_shot, kMost / 4), "the same of four ranks");
  require(!halves(4, all_reduce, Algorithm::one_shot, kMost / 4 + 1), "more than that");
  require(halves(1, all_reduce, Algorithm::two_shot, kMost), "a group of one rank");
  require(!halves(1, all_reduce, Algorithm::two_shot, kMost + 1), "more than that");
  require(!halves(2, all_reduce, Algorithm::two_shot, 8), "nobody has arrived");
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

// A rank alone waits for nobody, and gets its own bits, here of NaNs.
void halve_lone_calls() {
  using enum Verb;
  for (const auto& [verb, algorithm] :
       {std::pair{all_reduce, Algorithm::two_shot}, std::pair{reduce_scatter, Algorithm::one_shot},
        std::pair{all_gather, Algorithm::direct}}) {
    World world(1);
    Plan plan = plan_of(verb, kNumel);
    plan.dtype = DType::float32;
    plan.algorithm = algorithm;
    plan.inlined = false;
    plan = make_plan(plan);
    const uint32_t input[kNumel] = {0x7f800001, 0xff800002, 0x7fc00003, 0xffc00004};
    for (uint64_t call_number = 1; call_number <= 2; ++call_number) {
      uint32_t output[kNumel] = {};
      Call<P> call{world.group(0), plan, reinterpret_cast<const std::byte*>(input),
                   reinterpret_cast<std::byte*>(output)};
      if (call_number == 1) {
        require(begin_half(call, world.host(0), kLimitS), "a call of a rank alone");
        require(may_finish(call), "nobody else has to arrive");
        finish(call, world.host(0));
      } else {
        run(call, world.host(0), kLimitS);
      }
      for (size_t i = 0; i < kNumel; ++i)
        require_equal(output[i], input[i], std::string("an element of ") + verb_name(verb));
      require_equal(world.pad(0).done.value, call_number, "the segments of calls that ended");
    }
  }
}

// A rank alone has nothing to do in place, whatever the size.
void halve_lone_call_in_place() {
  World world(1);
  Plan plan = plan_of(Verb::all_reduce, size_t{1} << 20);
  plan.algorithm = Algorithm::two_shot;
  plan.inlined = false;
  plan = make_plan(plan);
  std::vector<int32_t> tensor(plan.numel, 7);
  std::byte* memory = reinterpret_cast<std::byte*>(tensor.data());
  Call<P> call{world.group(0), plan, memory, memory};
  require(begin_half(call, world.host(0), kLimitS), "a large call in place");
  finish(call, world.host(0));
  for (const int32_t element : tensor) require_equal(element, 7, "an element in place");

  Call<P> out_of_place = call;
  out_of_place.input = memory + 1;
  require(!has_halves(out_of_place), "a large copy");
  Call<P> of_parts = call, of_list = call;
  const Parts parts{};
  const List list{};
  of_parts.parts = &parts;
  of_list.list = &list;
  require(!has_halves(of_parts) && !has_halves(of_list), "tensors that may lie elsewhere");
  World pair(2);
  const Call<P> of_pair{pair.group(0), plan, memory, memory};
  require(!has_halves(of_pair), "a large call of two ranks in place");
}

// A two_shot has halves once the others have arrived, and they get through without the second.
void halve_two_shot(Verb verb, int root, bool is_symmetric) {
  using enum Verb;
  World world(2);
  Plan plan = plan_of(verb, kNumel, root);
  plan.algorithm = Algorithm::two_shot;
  plan.inlined = false;
  plan = make_plan(plan);
  constexpr size_t kOutput = 2 * kNumel;
  std::vector<int32_t> memory[2];
  for (int rank = 0; rank < 2; ++rank) {
    memory[rank].assign(2 * kOutput, -1);
    for (size_t i = 0; i < kOutput; ++i) memory[rank][i] = value_of(rank, i);
  }
  if (is_symmetric)
    for (int rank = 0; rank < 2; ++rank) {
      Arena arena;
      arena.num_bytes = sizeof(int32_t) * memory[0].size();
      for (int of = 0; of < 2; ++of) arena.bases[of] = reinterpret_cast<std::byte*>(&memory[of][0]);
      world.group(rank).arenas().push_back(arena);
    }
  const auto call_of = [&](int rank) {
    return Call<P>{world.group(rank), plan, reinterpret_cast<std::byte*>(&memory[rank][0]),
                   reinterpret_cast<std::byte*>(&memory[rank][kOutput])};
  };
  Call<P> first = call_of(0), second = call_of(1);
  const std::string name = verb_name(verb);
  require(!begin_half(second, world.host(1), kLimitS), name + " in which nobody has arrived");
  Plan other_plan = plan;
  other_plan.numel += 1;
  other_plan = make_plan(other_plan);
  Call<P> differing{world.group(1), other_plan, second.input, second.output};
  const bool waits = verb == all_reduce || (verb == reduce && root == 1) || is_symmetric;
  world.host(0).hook = once([&] {
    require(!begin_half(differing, world.host(1), kLimitS), name + " after another call's arrival");
    require(begin_half(second, world.host(1), kLimitS), name + " in which the other has arrived");
    require_equal(may_finish(second), !waits, "whether it may end a " + name);
    LoneHost other;
    other.leaves = true;
    if (waits)
      require_equal(error_of([&] { finish(second, other); }).text, "stepped out", "the other host");
  });
  run(first, world.host(0), kLimitS);
  require(may_finish(second), "the first rank has reduced");
  finish(second, world.host(1));
  for (int rank = 0; rank < 2; ++rank)
    for (size_t i = 0; i < kNumel && (verb != reduce || rank == root); ++i) {
      const size_t at = i + (verb == reduce_scatter ? size_t(rank) * kNumel : 0);
      require_equal(memory[rank][kOutput + i], value_of(0, at) + value_of(1, at),
                    "an element of " + name);
    }
  require_equal(world.pad(1).done.value, 1, "the segments of a call that ended");
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
  halve_lone_calls();
  halve_lone_call_in_place();
  for (const bool is_symmetric : {false, true}) {
    halve_two_shot(Verb::all_reduce, 0, is_symmetric);
    halve_two_shot(Verb::reduce_scatter, 0, is_symmetric);
    for (const int root : {0, 1}) halve_two_shot(Verb::reduce, root, is_symmetric);
  }
  begin_no_half();
  finish_by_other_hosts();
  abandon_calls();
}
