// SPDX-License-Identifier: Apache-2.0
// A peer's words, damaged one at a time: rank 1 publishes a place, a size or a count that none of
// its memory has. Every rank must end with the same error, which names rank 1. No rank may read at
// that place (AddressSanitizer).
//
//   test_damage [correct|unchecked_places [timeout_s]]
#include <sched.h>

#include "cpu/p2p.h"
#include "cpu/run.h"
#include "thread_ranks.h"
#include "transfer_of.h"

using namespace fastcoll;

namespace {

constexpr int kWorld = 3, kLiar = 1;
constexpr size_t kArenaBytes = size_t{1} << 20;
constexpr size_t kNumel = 64 << 10;  // of int32: as large as the lesser of a message's two places
// Of a transfer: twice the ring, so that its sender needs to be told that chunks were received.
constexpr size_t kMessageBytes = 2 * PairChannel::kChunks * PairChannel::kChunkBytes;
double timeout_s = 20;  // of a wait; never reached

// Changes a word of the liar's own right before the liar publishes it.
using Lie = std::function<void(uint64_t& word, uint64_t& value)>;
thread_local const Lie* lie = nullptr;

struct Lying : StdAtomics {
  static void arrive(uint64_t& word, uint64_t value) {
    if (lie) (*lie)(word, value);
    StdAtomics::arrive(word, value);
  }
};
struct UncheckedPlaces : Lying {
  static constexpr bool kChecksPlaces = false;
};

struct Machine {
  const Pieces regions{kWorld, mapped_bytes(kWorld)}, arenas{kWorld, kArenaBytes};
};

Pad& pad_of(const Machine& machine, int rank) {
  return *reinterpret_cast<Pad*>(machine.regions.bases[size_t(rank)]);
}

// The arrival line whose slot this is, if it is one of the liar's.
ArriveLine* line_of(const Machine& machine, uint64_t& word) {
  for (ArriveLine& line : pad_of(machine, kLiar).arrive)
    if (&word == &line.slot) return &line;
  return nullptr;
}

// The liar reads this word of its own, too: nothing more of it before another rank has seen it.
void publish_and_hold(const Machine& machine, uint64_t& word, uint64_t value) {
  StdAtomics::store_release(word, value);
  while (StdAtomics::load_acquire(pad_of(machine, kLiar).poison.value) == 0) sched_yield();
}

Plan plan_of(Verb verb, Algorithm algorithm) {
  Plan plan;
  plan.verb = verb;
  plan.algorithm = algorithm;
  plan.dtype = DType::int32;
  plan.numel = kNumel / (verb == Verb::reduce_scatter || verb == Verb::all_to_all ? kWorld : 1);
  plan.segment_bytes = uint32_t(64 << 10);
  if (verb == Verb::all_to_all) plan.splits = kCountedSplits;
  if (verb == Verb::broadcast) plan.root = kLiar;
  return make_plan(plan);
}

template <class P>
void call(Group<P>& group, const Plan& plan, const Machine& machine) {
  Host host;
  std::byte* input = machine.arenas.bases[size_t(group.rank())];
  std::vector<std::byte> output(kWorld * kNumel * sizeof(int32_t));
  if (plan.verb == Verb::broadcast) return run(group, plan, input, input, host);
  if (plan.splits != kCountedSplits) return run(group, plan, input, output.data(), host);
  Parts parts{};
  const size_t part_bytes = plan.numel * sizeof(int32_t);
  for (size_t peer = 0; peer < kWorld; ++peer) {
    parts.inputs[peer] = {input + peer * part_bytes, part_bytes};
    parts.outputs[peer] = {output.data() + peer * part_bytes, part_bytes};
  }
  Call<P> counted{group, plan, nullptr, nullptr, &parts};
  run(counted, host, -1);
}

// A large message around the ring of ranks.
template <class P>
void transfer(Group<P>& group, PointToPoint<P>& pairs) {
  Host host;
  std::vector<std::byte> from(kMessageBytes), to(kMessageBytes);
  const auto post = [&](bool sends, std::vector<std::byte>& data) {
    const int peer = (group.rank() + (sends ? 1 : kWorld - 1)) % kWorld;
    const auto one = transfer_of(sends, peer, DType::int32, data, timeout_s);
    pairs.post(one, host);
    return one;
  };
  for (const auto& one : {post(true, from), post(false, to)}) pairs.wait(*one, host, 0);
}

struct Damage {
  std::string name;
  std::string expected;  // part of every rank's error
  Plan plan;             // unless it is one of a transfer
  bool transfers;
  std::function<void(const Machine&, uint64_t& word, uint64_t& value)> lie;
};

std::vector<Damage> all_damages() {
  std::vector<Damage> all;
  const std::pair<const char*, uint64_t> places[] = {
      {"an arena that is none", Location::encode(1, 0)},
      {"an arena far away", Location::encode(40000, 64)},
      {"a place behind the arena", Location::encode(0, kArenaBytes + 64)},
      {"a place that ends behind the arena",
       Location::encode(0, kArenaBytes - kNumel * sizeof(int32_t) / kWorld + 64)},
      {"a private place in a call without", Location::kPrivate | 4096},
  };
  const Plan plans[] = {plan_of(Verb::all_reduce, Algorithm::two_shot),
                        plan_of(Verb::reduce_scatter, Algorithm::two_shot),
                        plan_of(Verb::all_gather, Algorithm::direct),
                        plan_of(Verb::broadcast, Algorithm::direct),
                        plan_of(Verb::all_to_all, Algorithm::direct)};
  const std::string place = "rank 1 published a place";
  for (const auto& [what, location] : places) {
    for (const Plan& plan : plans)
      all.push_back({std::string(what) + ", in " + verb_name(plan.verb), place, plan, false,
                     [location](const Machine& machine, uint64_t& word, uint64_t&) {
                       // A counted call's header begins where other lines have the place.
                       if (ArriveLine* line = line_of(machine, word))
                         line->location.input = location;
                     }});
    all.push_back({std::string(what) + ", for the output", place, plans[0], false,
                   [location](const Machine& machine, uint64_t& word, uint64_t&) {
                     if (ArriveLine* line = line_of(machine, word))
                       line->location.output = location;
                   }});
  }
  all.push_back({"a part larger than memory, for itself", "split sizes that no memory has",
                 plans[4], false, [](const Machine& machine, uint64_t& word, uint64_t&) {
                   if (ArriveLine* line = line_of(machine, word)) {
                     const uint64_t row = ~uint64_t{0} - 4096;  // given, and wanted further on
                     std::memcpy(line->payload + (1 + kLiar) * 8, &row, 8);
                     std::memcpy(line->payload + (1 + kWorld + kLiar) * 8, &row, 8);
                   }
                 }});
  for (const bool sends : {true, false})
    all.push_back({sends ? "chunks not sent" : "chunks not received",
                   sends ? "chunks that it was not asked for" : "chunks nobody sent",
                   {},
                   true,
                   [sends](const Machine& machine, uint64_t& word, uint64_t& value) {
                     for (int peer = 0; peer < kWorld; ++peer) {
                       auto& channel = pair_channel(machine.regions.bases[kLiar], peer, kWorld);
                       if (&word == &(sends ? channel.sent : channel.received).value)
                         publish_and_hold(machine, word, value + 1000);
                     }
                   }});
  all.push_back({"a poison word", "a poison word is damaged", plans[0], false,
                 [](const Machine& machine, uint64_t&, uint64_t&) {
                   for (int peer = 0; peer < kWorld; ++peer)
                     StdAtomics::store_release(pad_of(machine, peer).poison.value, 77);
                 }});
  return all;
}

template <class P>
std::string run_rank(const Machine& machine, int rank, const Damage& damage) {
  Group<P> group(options_of(rank, machine.regions.bases, timeout_s));
  PointToPoint<P> pairs(group);
  group.arenas().push_back(arena_of(machine.arenas.bases, kArenaBytes));
  const Lie mine = [&](uint64_t& word, uint64_t& value) { damage.lie(machine, word, value); };
  if (rank == kLiar) lie = &mine;
  std::string verdict = "no error";
  try {
    if (damage.transfers) transfer(group, pairs);
    else call(group, damage.plan, machine);
    // A rank that needed no data of the liar gets the error when it next waits.
    for (int i = 0; i < 2; ++i) call(group, plan_of(Verb::all_gather, Algorithm::direct), machine);
  } catch (const Failure& failure) {
    verdict = failure.what();
  }
  lie = nullptr;
  return verdict;
}

template <class P>
int run_all() {
  for (const Damage& damage : all_damages()) {
    const Machine machine;
    std::vector<std::string> verdicts(kWorld);
    run_ranks(kWorld,
              [&](int rank) { verdicts[size_t(rank)] = run_rank<P>(machine, rank, damage); });
    for (const std::string& verdict : verdicts)
      if (verdict != verdicts[0] || verdict.find(damage.expected) == std::string::npos) {
        std::fprintf(stderr, "WRONG: %s: \"%s\", another rank: \"%s\"\n", damage.name.c_str(),
                     verdict.c_str(), verdicts[0].c_str());
        return 1;
      }
  }
  std::printf("ok: %zu kinds of damage\n", all_damages().size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string variant = argc > 1 ? argv[1] : "correct";
  if (argc > 2) timeout_s = std::strtod(argv[2], nullptr);
  if (variant == "correct") return run_all<Lying>();
  if (variant == "unchecked_places") return run_all<UncheckedPlaces>();
  std::fprintf(stderr, "unknown variant %s\n", variant.c_str());
  return 2;
}
