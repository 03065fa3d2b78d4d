// SPDX-License-Identifier: Apache-2.0
// Calls that only move data, one step at a time. A call asks for room in a slot, a rank gives and
// gets parts, and ranks tell each other sizes. All ranks are in one thread (lone_world.h).
//
//   test_moves
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

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
        require_equal(int64_t(staging.segment_bytes), int64_t(num_parts * cut.chunk_bytes), "room");
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
  require_equal(int64_t(direct_staging(call).place_bytes()), int64_t(kSlotBytes), "room");
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
      require_equal(int64_t(world.pad(1).arrive[1].slot >> 32), 1, "a rank that has arrived");
    }
}

// A call that copies no private memory takes no place in it.
void refuse_private_places() {
  World world(2);
  const Plan plan = moves(Verb::all_gather, kSlotBytes);
  std::vector<int32_t> in(plan.numel), out(2 * plan.numel);
  world.enter(1, plan);
  world.group(1).arrive(Location::kPrivate | uint64_t(uintptr_t(in.data())), Location::kStaged);
  const Seen seen =
      error_of([&] { run(world.group(0), plan, in.data(), out.data(), world.host(0), kLimitS); });
  require(seen.text.find("rank 1 published a place") != std::string::npos, seen.text);
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
    require_equal(int64_t(world.pad(0).arrive[1].location.input),
                  int64_t(is_whole ? Location::encode(0, 0) : Location::kStaged), "its place");
  }
}

// A message that peers may copy is published where it lies, in symmetric memory or not.
void locate_messages() {
  constexpr size_t kBytes = 64 << 10;
  alignas(64) static std::byte memory[kBytes];
  for (const bool is_symmetric : {true, false}) {
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
    require_equal(int64_t(world.pad(0).arrive[1].location.input),
                  int64_t(is_symmetric ? Location::encode(0, 0) : address), "its place");
  }
}

// ---- parts of sizes that only their two ranks know --------------------------------------------

using Row = std::vector<uint64_t>;  // a place, the bytes for each rank, and those from each

// Rank 0 in a call with ranks that have arrived with these rows.
Seen count(World& world, const std::vector<Row>& rows, Algorithm algorithm = Algorithm::direct) {
  const Plan plan = moves(Verb::all_to_all, 0, algorithm, kCountedSplits);
  for (size_t rank = 1; rank < rows.size(); ++rank) {
    world.enter(int(rank), plan);
    world.group(int(rank)).arrive_inlined(rows[rank].data(), rows[rank].size() * sizeof(uint64_t));
  }
  std::vector<std::byte> in(64), out(64);
  Parts parts{};
  for (size_t peer = 0; peer < rows.size(); ++peer) {
    parts.inputs[peer] = {in.data(), rows[0][1 + peer]};
    parts.outputs[peer] = {out.data(), rows[0][1 + rows.size() + peer]};
  }
  Call<P> call{world.group(0), plan, nullptr, nullptr, &parts};
  return error_of([&] { run(call, world.host(0), kLimitS); });
}

void compare_counts() {
  {
    World world(3);
    const Seen seen =
        count(world, {{0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 4, 0, 0, 0}, {0, 0, 0, 0, 0, 8, 0}});
    require_error(seen,
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
    require(fits || seen.text.find("rank 1 published split sizes that no memory has") !=
                        std::string::npos,
            seen.text);
  }
}

// Where a peer gives nothing, this rank neither waits for it nor cares whether it is still there.
void get_nothing() {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "sockets");
  close(ends[1]);
  World world(kMaxWorld, [&](GroupOptions& options) { options.links[1].socket = ends[0]; });
  std::vector<Row> rows(kMaxWorld, Row(1 + 2 * kMaxWorld));
  rows[1][0] = Location::kPrivate | 64;
  require_equal(count(world, rows, Algorithm::single_copy).text, "no error", "nothing to get");
  close(ends[0]);
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

int main() {
  ask_for_room();
  ask_for_all_of_a_slot();
  fill_slots();
  give_nothing();
  refuse_private_places();
  locate_parts();
  locate_messages();
  compare_counts();
  get_nothing();
  reduce_lists();
  std::printf("ok\n");
  return 0;
}
