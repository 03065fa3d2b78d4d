// SPDX-License-Identifier: Apache-2.0
// Calls that only move data, one step at a time. A call asks for room in a slot, a rank gives and
// gets parts, and ranks tell each other sizes. All ranks are in one thread (lone_world.h). The
// operating system is lone_machine.h.
//
//   test_moves [unchecked_places]
//
// With that planted bug it must not pass.
#include <array>
#include <cerrno>
#include <iterator>

#include "lone_machine.h"
#include "lone_world.h"

using namespace fastcoll;
using namespace lone;

namespace {

Plan moves(Verb verb, size_t numel, Algorithm algorithm = Algorithm::direct, uint64_t splits = 0) {
  Plan plan = plan_of(verb, numel);
  plan.algorithm = algorithm;
  plan.splits = splits;
  plan.inlined = false;
  plan.segment_bytes = uint32_t(kSlotBytes);
  return make_plan(plan);
}
void give(Call<P>& call, LoneHost& host) {
  call.group.begin(call.plan, staging(call), host, kLimitS);
  Direct<P>(call).give();
}

// A call writes exactly the bytes of a slot that it asks for.
void ask_for_room() {
  for (const int world_size : {2, 3, 7})
    for (const Verb verb : {Verb::all_gather, Verb::all_to_all, Verb::scatter})
      for (const size_t numel :
           {size_t{1}, size_t{1000}, size_t{100000}, kSlotBytes / 4 - 1, kSlotBytes / 4}) {
        World world(world_size);
        Plan plan = plan_of(verb);
        plan.numel = numel;
        plan.inlined = false;
        plan.segment_bytes = uint32_t(kSlotBytes);
        plan = make_plan(plan);
        const Call<P> call{world.group(0), plan, nullptr, nullptr};
        const Staging staging = direct_staging(call);
        const PartCut cut(plan, world_size, numel * 4);
        const size_t num_parts = verb == Verb::all_gather ? 1 : size_t(world_size) - 1;
        require_equal(staging.segment_bytes, num_parts * cut.chunk_bytes, "room");
        require(staging.segment_bytes <= kSlotBytes, "no more than a slot");
        require(staging.num_segments * cut.chunk_bytes >= numel * 4, "room for all of it");
        require((staging.num_segments - 1) * (kSlotBytes / num_parts / 64 * 64) < numel * 4,
                "segments that are full");
      }
}

// Of parts that differ, any may take all of a slot.
void ask_for_all_of_a_slot() {
  World world(3);
  const Plan plan = moves(Verb::all_to_all, 0, Algorithm::direct, kCountedSplits);
  const Call<P> call{world.group(0), plan, nullptr, nullptr};
  require_equal(direct_staging(call).place_bytes(), kSlotBytes, "room");
}

// Of parts whose sizes all ranks know, the largest is cut.
void ask_for_the_largest_part() {
  World world(3);
  const Plan plan = moves(Verb::all_gather, 0, Algorithm::direct, kCountedSplits + 1);
  Parts parts{};
  const size_t num_slots[] = {1, 3, 2, 9};  // the last is no rank's
  for (size_t i = 0; i < std::size(num_slots); ++i)
    parts.outputs[i].num_bytes = num_slots[i] * kSlotBytes;
  const Call<P> call{world.group(0), plan, nullptr, nullptr, &parts};
  require_equal(direct_staging(call).num_segments, 3, "segments");
}

// A long message takes few slots by turns. On some CPUs it takes all, but in an all_to_all.
void ask_for_slots() {
  for (const bool is_long : {false, true})
    for (const Verb verb : {Verb::all_gather, Verb::all_to_all, Verb::broadcast, Verb::gather})
      for (const size_t num_segments : {size_t{kNumSlots}, size_t{kNumSlots} + 1}) {
        const bool usual = std::exchange(copy_ways.in_long_rings, is_long);
        World world(2);
        const Plan plan = moves(verb, num_segments * kSlotBytes / 4);
        const Staging staging = direct_staging(Call<P>{world.group(0), plan, nullptr, nullptr});
        require_equal(staging.num_segments, num_segments, "segments");
        const bool is_few = num_segments > kNumSlots && (!is_long || verb == Verb::all_to_all);
        require_equal(staging.in_few_slots, is_few, "few slots");
        copy_ways.in_long_rings = usual;
      }
}

// A rank copies its own part between the segments of the others, where these wait for it.
void keep_own_part() {
  const struct {
    Verb verb;
    size_t num_segments;
    Algorithm algorithm = Algorithm::direct;
    bool lies_apart = false;
    bool is_late = true;
  } cases[] = {{Verb::gather, kNumSlots + 1},
               {Verb::gather, kNumSlots, Algorithm::direct, false, false},
               {Verb::all_gather, kNumSlots + 1},
               {Verb::all_gather, kNumSlots + 1, Algorithm::direct, true, false},
               {Verb::all_gather, kNumSlots + 1, Algorithm::single_copy, false, false},
               {Verb::scatter, 2},
               {Verb::scatter, 1, Algorithm::direct, false, false}};
  for (const auto& one : cases) {
    World world(2);
    const size_t numel = one.num_segments * kSlotBytes / sizeof(int32_t);
    std::vector<int32_t> in(2 * numel, 1), out(2 * numel);
    auto *from = reinterpret_cast<std::byte*>(in.data()),
         *to = reinterpret_cast<std::byte*>(out.data());
    const Plan plan = moves(one.verb, numel, one.algorithm);
    const List list{{from, to, 0, numel}};
    Call<P> call{world.group(0), plan, from, to, nullptr, one.lies_apart ? &list : nullptr};
    give(call, world.host(0));
    require_equal(out[0], one.is_late ? 0 : 1, "its own part");
    require_equal(out[numel - 1], one.is_late ? 0 : 1, "the end of its own part");
  }
}

// The parts for all ranks fill a slot, and nothing behind it is written.
void fill_slots() {
  constexpr int kSize = 3;
  constexpr size_t kNumel = kSlotBytes / (kSize - 1) / sizeof(int32_t);
  const Plan plan = moves(Verb::all_to_all, kNumel);
  std::vector<int32_t> in((kSize + 1) * kNumel, 1), out(kSize * kNumel);
  for (int rank = 0; rank < kSize; ++rank) {
    World world(kSize);
    Call<P> call{world.group(rank), plan, reinterpret_cast<std::byte*>(in.data()),
                 reinterpret_cast<std::byte*>(out.data())};
    give(call, world.host(rank));
    const std::byte* next = world.group(rank).slot(rank, 1);
    require(
        std::all_of(next - kSlotBytes, next, [](std::byte one) { return one != std::byte{2}; }) &&
            std::count(next - kSlotBytes, next, std::byte{1}) == kSlotBytes / 4,
        "a slot that is full");
    require(std::count(next, next + kSlotBytes, std::byte{0}) == kSlotBytes, "the slot behind it");
  }
}

// A rank that gives nothing has no message, and stages none.
void give_nothing() {
  for (const Verb verb : {Verb::scatter, Verb::broadcast})
    for (const bool inlined : {true, false}) {
      World world(2);
      Plan plan = moves(verb, 16);
      plan.inlined = inlined;
      plan = make_plan(plan);
      Call<P> call{world.group(1), plan, nullptr, nullptr};
      give(call, world.host(1));
      require_equal(world.pad(1).arrive[1].slot >> 32, 1, "a rank that has arrived");
    }
}

// A message is read where it lies if its parts lie end to end.
void locate_parts() {
  constexpr size_t kPart = 64 << 10;
  alignas(64) static std::byte memory[3 * kPart];
  for (const bool is_whole : {true, false}) {
    World world(3);
    Arena arena;
    arena.num_bytes = sizeof memory;
    arena.bases.fill(memory);
    world.group(0).arenas().push_back(arena);
    std::vector<std::byte> out(3 * kPart);
    Parts parts{};
    for (size_t peer = 0; peer < 3; ++peer) {
      parts.inputs[peer] = {memory + (is_whole ? peer : std::min<size_t>(peer, 1)) * kPart, kPart};
      parts.outputs[peer] = {out.data() + peer * kPart, kPart};
    }
    const Plan plan = moves(Verb::all_to_all, kPart / 4);
    Call<P> call{world.group(0), plan, nullptr, nullptr, &parts};
    give(call, world.host(0));
    require_equal(world.pad(0).arrive[1].location.input,
                  is_whole ? Location::encode(0, 0) : Location::kStaged, "its place");
  }
}

// A message that peers may copy is published where it lies, in symmetric memory or not. They can't
// copy a driver's memory.
void locate_messages() {
  constexpr size_t kBytes = 64 << 10;
  alignas(64) static std::byte memory[kBytes];
  for (const auto& [is_symmetric, is_readable] :
       {std::pair{true, true}, {true, false}, {false, true}, {false, false}}) {
    machine::is_readable = is_readable;
    World world(2);
    Arena arena;
    arena.num_bytes = is_symmetric ? kBytes : 0;
    arena.bases.fill(memory);
    world.group(0).arenas().push_back(arena);
    std::vector<std::byte> out(2 * kBytes);
    const Plan plan = moves(Verb::all_gather, kBytes / 4, Algorithm::single_copy);
    Call<P> call{world.group(0), plan, memory, out.data()};
    give(call, world.host(0));
    const uint64_t address = Location::kPrivate | uint64_t(uintptr_t(memory));
    const uint64_t place = is_symmetric  ? Location::encode(0, 0)
                           : is_readable ? address
                                         : Location::kStaged;
    require_equal(world.pad(0).arrive[1].location.input, place, "its place");
  }
  machine::clear();
}

// Ranks try beforehand whether they can copy. The first reason against it is published.
void try_copies() {
  std::array<uint64_t, 8> sample;
  const auto address = uint64_t(uintptr_t(sample.data()));
  const auto outcome = [&](bool is_wanted, int error, uint64_t wrong) {
    World world(3);
    for (size_t i = 0; i < sample.size(); ++i) sample[i] = mix64(address + i);
    sample.back() += wrong;
    for (const int peer : {1, 2}) {
      world.pad(peer).sample.value = address;
      world.pad(peer).single_copy.value = uint64_t(peer);  // the error, and 1
    }
    machine::read_error = error;
    const auto errors = world.group(0).try_single_copy(is_wanted, world.host(0));
    machine::clear();
    require(errors[1] == 0 && errors[2] == 1, "the outcomes of others");
    require_equal(world.pad(0).single_copy.value, errors[0] + 1, "what others see");
    return errors[0];
  };
  require_equal(outcome(true, 0, 0), 0, "copies");
  require_equal(outcome(true, EPERM, 0), EPERM, "copies that the kernel refuses");
  require_equal(outcome(true, 0, 1), ESRCH, "the memory of a stranger");
  require_equal(outcome(false, 0, 0), ECANCELED, "copies that are not wanted");
  World world(2);
  world.group(0).keep_memory(1, 7);
  require_equal(world.group(0).options().links[1].memory, 7, "the memory that is kept");
}

// ---- parts of sizes that only their two ranks know --------------------------------------------

using Row = std::vector<uint64_t>;  // a place, the bytes for each rank, and those from each

// A rank in a call with ranks that have arrived with these rows.
Seen count(World& world, const std::vector<Row>& rows, Algorithm algorithm = Algorithm::direct,
           size_t rank = 0, std::byte* output = nullptr) {
  const Plan plan = moves(Verb::all_to_all, 0, algorithm, kCountedSplits);
  for (size_t peer = 0; peer < rows.size(); ++peer) {
    if (peer == rank) continue;
    world.enter(int(peer), plan);
    world.group(int(peer)).arrive_inlined(rows[peer].data(), rows[peer].size() * sizeof(uint64_t));
  }
  std::vector<std::byte> in(64), out(64);
  Parts parts{};
  for (size_t peer = 0; peer < rows.size(); ++peer) {
    parts.inputs[peer] = {in.data(), rows[rank][1 + peer]};
    parts.outputs[peer] = {output ? output : out.data(), rows[rank][1 + rows.size() + peer]};
  }
  Call<P> call{world.group(int(rank)), plan, nullptr, nullptr, &parts};
  return error_of([&] { run(call, world.host(int(rank)), kLimitS); });
}

// No rank reads or writes at a place that the peer's memory does not have, or that is private in a
// call without copies.
void refuse_places() {
  constexpr size_t kNumel = 1024, kBytes = kNumel * sizeof(int32_t), kArenaBytes = 4 * kBytes;
  static std::byte memory[kArenaBytes];
  const auto refuse = [](size_t num_bytes, const std::function<Seen(World&, uint64_t)>& call) {
    for (const uint64_t place :
         {Location::encode(1, 0), Location::encode(40000, 64),
          Location::encode(0, kArenaBytes + 64), Location::encode(0, kArenaBytes - num_bytes + 64),
          Location::kPrivate | 4096}) {
      World world(2);
      Arena arena;
      arena.num_bytes = kArenaBytes;
      arena.bases.fill(memory);
      world.group(0).arenas().push_back(arena);
      const Seen seen = call(world, place);
      require_part(seen.text, "rank 1 published a place");
      require_equal(seen.ranks, 2, "whose place it was");
      require(world.group(1).is_broken(), "all ranks are told");
    }
  };
  const auto call = [](Plan plan, World& world, uint64_t input, uint64_t output) {
    std::vector<int32_t> in(2 * kNumel), out(2 * kNumel);
    if (plan.verb == Verb::broadcast) plan.root = 1;
    plan = make_plan(plan);
    world.enter(1, plan);
    world.group(1).arrive(input, output);
    int32_t* to = plan.verb == Verb::broadcast ? in.data() : out.data();
    return error_of([&] { run(world.group(0), plan, in.data(), to, world.host(0), kLimitS); });
  };
  const Plan all_reduce = moves(Verb::all_reduce, kNumel, Algorithm::two_shot);
  for (const Plan& plan : {all_reduce, moves(Verb::reduce_scatter, kNumel / 2, Algorithm::two_shot),
                           moves(Verb::all_gather, kNumel), moves(Verb::broadcast, kNumel)})
    refuse(kBytes, [&](World& world, uint64_t place) {
      return call(plan, world, place, Location::kStaged);
    });
  refuse(kBytes, [&](World& world, uint64_t place) {
    return call(all_reduce, world, Location::encode(0, 0), place);
  });
  refuse(64, [](World& world, uint64_t place) {
    return count(world, {{0, 0, 64, 0, 64}, {place, 64, 0, 64, 0}});
  });
}

void compare_counts() {
  {
    World world(3);
    const Seen seen =
        count(world, {{0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 4, 0, 0, 0}, {0, 0, 0, 0, 0, 8, 0}});
    require_verdict(
        seen,
        "all_to_all(int32, split sizes given) #1" + place(0, 3) +
            ": rank 1 gives 1 elements to rank 2, which expects 2: input_split_sizes and "
            "output_split_sizes do not match. Outputs of this call are undefined",
        ErrorKind::desync, 6);
  }
  for (const uint64_t most :
       {(uint64_t{1} << Location::kOffsetBits) - 1, uint64_t{1} << Location::kOffsetBits}) {
    World world(3);
    const Seen seen =
        count(world, {{0, 0, 0, 0, 0, 0, 0}, {0, 0, most, 0, 0, most, 0}, {0, 0, 0, 0, 0, 0, 0}});
    const bool fits = Location::fits(most);
    require((seen.text == "no error") == fits, seen.text);
    if (!fits) require_part(seen.text, "rank 1 published split sizes that no memory has");
  }
}

// A rank's part lies behind those for the ranks before it.
void get_counted_part() {
  World world(3);
  const std::string message = "01234567";
  const uint64_t place = Location::kPrivate | uint64_t(uintptr_t(message.data()));
  std::string got(8, ' ');
  const Seen seen =
      count(world, {{place, 0, 4, 4, 0, 0, 0}, {0, 0, 0, 0, 4, 0, 0}, {0, 0, 0, 0, 4, 0, 0}},
            Algorithm::single_copy, 2, reinterpret_cast<std::byte*>(got.data()));
  require_equal(seen.text, "no error", "a part of an own size");
  require_equal(got, "4567    ", "its bytes");
}

// Where a peer gives nothing, this rank neither waits for it nor cares whether it is still there.
void get_nothing() {
  World world(kMaxWorld, [](GroupOptions& options) { options.links[1].socket = 1; });
  machine::gone = {1};
  std::vector<Row> rows(kMaxWorld, Row(1 + 2 * kMaxWorld));
  rows[1][0] = Location::kPrivate | 64;
  require_equal(count(world, rows, Algorithm::single_copy).text, "no error", "nothing to get");
  machine::clear();
}

// A list in a group of as many ranks as there can be.
void reduce_lists() {
  World world(kMaxWorld);
  Plan plan = plan_of(Verb::all_reduce, 4);
  plan.inlined = false;
  plan = make_plan(plan);
  for (int rank = 1; rank < kMaxWorld; ++rank) {
    world.enter(rank, plan);
    auto* slot = reinterpret_cast<int32_t*>(world.group(rank).claim_slot(0));
    std::fill_n(slot, plan.numel, rank);
    world.group(rank).arrive(Location::kStaged, Location::kStaged);
  }
  std::vector<int32_t> data(plan.numel, 0);
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const List list{{bytes, bytes, 0, 1}, {bytes + 4, bytes + 4, 1, 3}};
  Call<P> call{world.group(0), plan, nullptr, nullptr, nullptr, &list};
  run(call, world.host(0), kLimitS);
  for (const int32_t sum : data)
    require_equal(sum, kMaxWorld * (kMaxWorld - 1) / 2, "a sum of all ranks");
}

}  // namespace

int main(int argc, char** argv) {
  P::kChecksPlaces = argc < 2 || std::string(argv[1]) != "unchecked_places";
  ask_for_room();
  ask_for_all_of_a_slot();
  ask_for_the_largest_part();
  ask_for_slots();
  keep_own_part();
  fill_slots();
  give_nothing();
  locate_parts();
  locate_messages();
  try_copies();
  refuse_places();
  compare_counts();
  get_counted_part();
  get_nothing();
  reduce_lists();
}
