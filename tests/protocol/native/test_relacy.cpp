// SPDX-License-Identifier: Apache-2.0
// The real templates under weak memory (relacy_machine.h). Two or three ranks run in many orders of
// their accesses. A load sees every value that the C++ memory model allows.
//
//   test_relacy SCENARIO VARIANT [num_iterations]
//
// `correct` must pass. The other variants weaken one order of one word and must not.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cpu/halves.h"
#include "cpu/p2p.h"
#include "hand_programs.h"
#include "relacy_atomics.h"
#include "transfer_of.h"

// See relacy_machine.cpp.
[[gnu::noinline]] void* operator new(size_t num_bytes) {
  if (void* ptr = std::malloc(num_bytes)) return ptr;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](size_t num_bytes) { return operator new(num_bytes); }
[[gnu::noinline]] void operator delete(void* ptr) noexcept { std::free(ptr); }
void operator delete(void* ptr, size_t) noexcept { operator delete(ptr); }
[[gnu::noinline]] void operator delete[](void* ptr) noexcept { operator delete(ptr); }
void operator delete[](void* ptr, size_t) noexcept { operator delete(ptr); }

using namespace fastcoll;
using namespace weakened;

namespace {

// ---- ranks on one memory ------------------------------------------------------------------------

constexpr int kMostRanks = 3;
constexpr size_t kArenaNumel = 1024;
alignas(4096) std::byte regions[kMostRanks][mapped_bytes(kMostRanks)];
alignas(64) int32_t arenas[kMostRanks][2][kArenaNumel];
int num_ranks = 2;

void clear() {
  for (auto& region : regions) {
    std::memset(region, 0, kPadBytes);
    for (int peer = 0; peer < kMostRanks; ++peer)
      std::memset(&pair_channel(region, peer, kMostRanks), 0, offsetof(PairChannel, sites));
  }
}

template <class P = RelacyAtomics>
std::unique_ptr<Group<P>> join(int rank, int world_size = num_ranks, uint64_t first_call = 0,
                               int num_cpus = 1) {
  GroupOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.first_call = first_call;
  options.num_cpus = num_cpus;
  options.traces = true;
  options.timeout_s = 1e9;
  for (int peer = 0; peer < num_ranks; ++peer) options.regions[size_t(peer)] = regions[peer];
  auto group = std::make_unique<Group<P>>(options);
  Arena arena;
  arena.num_bytes = sizeof arenas[0];
  for (int peer = 0; peer < num_ranks; ++peer)
    arena.bases[size_t(peer)] = reinterpret_cast<std::byte*>(arenas[peer]);
  group->arenas().push_back(arena);
  return group;
}

int32_t value_of(int step, int rank, size_t i) {
  return int32_t(step * 1000 + rank * 100 + int(i));
}

// ---- calls: mixed sequences, in which lines and slots are used again ----------------------------

constexpr int kCalls = 6;
struct Step {
  Plan plan;
  bool symmetric;
};
std::vector<Step> steps;
constexpr uint32_t kSegmentBytes = 512;  // a short message has several
Plan barrier;

Step draw_step() {
  struct Kind {
    Verb verb;
    Algorithm algorithm;
    size_t numel;
    bool inlined, symmetric;
  };
  static constexpr Kind kKinds[] = {
      {Verb::barrier, Algorithm::direct, 0, true, false},
      {Verb::all_reduce, Algorithm::one_shot, 20, true, false},  // a line and one more
      {Verb::broadcast, Algorithm::direct, 20, true, false},
      {Verb::all_reduce, Algorithm::one_shot, 240, false, false},
      {Verb::all_reduce, Algorithm::two_shot, 240, false, false},
      {Verb::all_reduce, Algorithm::two_shot, 240, false, true},
      {Verb::all_reduce, Algorithm::ring, 240, false, false},
      {Verb::all_reduce, Algorithm::chain, 240, false, false},
      {Verb::all_reduce, Algorithm::schedule, 240, false, false},
      {Verb::broadcast, Algorithm::schedule, 240, false, false},
      {Verb::broadcast, Algorithm::direct, 240, false, false},
      {Verb::all_gather, Algorithm::direct, 80, false, false},
  };
  const Kind& kind = kKinds[machine::draw(std::size(kKinds))];
  Plan plan;
  plan.verb = kind.verb;
  plan.dtype = DType::int32;
  plan.algorithm = kind.algorithm;
  plan.numel = kind.numel;
  plan.inlined = kind.inlined;
  plan.root = verb_has_root(plan.verb) ? int(machine::draw(uint64_t(num_ranks))) : 0;
  plan.segment_bytes = uint32_t(kLeastSegmentBytes);
  plan = make_plan(plan);
  plan.segment_bytes = kSegmentBytes;  // less than make_plan allows
  return {plan, kind.symmetric};
}

void run_calls(int rank) {
  const auto group = join(rank);
  Host host;
  const auto buffers = std::make_unique<int32_t[][kArenaNumel]>(2);
  for (int s = 0; s < int(steps.size()); ++s) {
    const auto& [plan, symmetric] = steps[size_t(s)];
    int32_t* input = symmetric ? arenas[rank][0] : buffers[0];
    int32_t* output = symmetric ? arenas[rank][1] : buffers[1];
    if (plan.verb == Verb::broadcast) output = input;
    for (size_t i = 0; i < plan.numel; ++i) input[i] = value_of(s, rank, i);
    Call<RelacyAtomics> call{*group, plan, reinterpret_cast<std::byte*>(input),
                             reinterpret_cast<std::byte*>(output)};
    const Program program = program_of(plan.verb, num_ranks, rank, plan.root);
    call.program = &program;
    // In two halves, where there are two, or at once.
    if (machine::draw(2) == 0 && begin_half(call, host, -1)) {
      may_finish(call);
      finish(call, host);
    } else {
      run(call, host, -1);
    }
    const size_t num_outputs =
        plan.verb == Verb::all_gather ? plan.numel * size_t(num_ranks) : plan.numel;
    for (size_t i = 0; i < num_outputs; ++i) {
      int32_t expected = 0;
      if (plan.verb == Verb::broadcast) expected = value_of(s, plan.root, i);
      else if (plan.verb == Verb::all_gather)
        expected = value_of(s, int(i / plan.numel), i % plan.numel);
      else
        for (int peer = 0; peer < num_ranks; ++peer) expected += value_of(s, peer, i);
      machine::require(output[i] == expected, "a wrong result");
    }
  }
}

// ---- verdict: ranks fail at once ----------------------------------------------------------------

std::string verdicts[kMostRanks];

void run_verdict(int rank) {
  const auto group = join(rank);
  Host host;
  try {
    if (rank < 2) group->fail(ErrorKind::peer_lost, "reason " + std::to_string(rank));
    run(*group, barrier, nullptr, nullptr, host);
  } catch (const Failure& failure) {
    verdicts[rank] = failure.what();
  }
  const std::string& mine = verdicts[rank];
  const std::string over =
      ". Use of this group is over: call fastcoll.shrink() or fastcoll.destroy()";
  machine::require(mine == "reason 0" + over || mine == "reason 1" + over, "a torn verdict");
  for (int peer = 0; peer < num_ranks; ++peer)
    machine::require(verdicts[peer].empty() || verdicts[peer] == mine, "two verdicts");
}

// ---- status: a rank's calls, seen from outside while they are made ------------------------------

struct CallingHost : Host {
  static std::string site_of(uint64_t call) {
    return std::string(100, char('a' + call % 26)) + "/" + std::to_string(call);
  }
  std::string call_site() override { return site_of(call); }
  uint64_t call = 0;
};

void run_status(int rank) {
  if (rank == 0) {
    CallingHost host;
    for (const uint64_t first : {0, kRingEntries}) {  // all entries are written twice
      const auto group = join(0, 1, first);
      for (uint64_t call = first + 1; call <= first + 2; ++call) {
        Plan plan = barrier;
        plan.numel = plan.splits = call;
        plan.root = int(call);
        plan.op = call > kRingEntries ? Op::max : Op::sum;
        host.call = call;
        group->begin(plan, {call}, host, -1);
        group->end();
      }
    }
    return;
  }
  const Pad& pad = *reinterpret_cast<const Pad*>(regions[0]);
  constexpr uint64_t began_us_of_later = 9000;  // the machine's clock goes by 2 ms at each look
  for (int look = 0; look < 20; ++look) {
    const uint64_t entry = 1 + machine::draw(2);
    for (const uint64_t call : {entry, entry + kRingEntries}) {
      const auto seen = read_operation<RelacyAtomics>(pad, call);
      if (!seen) continue;
      // Segments of the calls before.
      const uint64_t before = (call - entry) + (entry == 1 ? 0 : call - 1);
      const bool is_whole = seen->plan.numel == call && seen->plan.splits == call &&
                            seen->plan.root == int(call) && seen->end_segment == before + call &&
                            (seen->plan.op == Op::max) == (call > kRingEntries) &&
                            (seen->began_us < began_us_of_later) == (call <= kRingEntries) &&
                            seen->site == CallingHost::site_of(call);
      machine::require(is_whole, "a torn entry");
    }
  }
}

// ---- waits: the notes of a rank about a wait, seen from outside ---------------------------------

void run_waits(int rank) {
  if (rank < num_ranks) {
    const auto group = join<Drowsy>(rank);
    Host host;
    for (int call = 0; call < 2; ++call) run(*group, barrier, nullptr, nullptr, host);
    return;
  }
  for (int look = 0; look < 20; ++look)
    for (int peer = 0; peer < num_ranks; ++peer)
      for (const Operation& seen :
           read_operations<RelacyAtomics>(*reinterpret_cast<const Pad*>(regions[peer])))
        machine::require(seen.wait_ended_us == 0 || seen.wait_began_us != 0,
                         "a wait that ended before it began");
}

// ---- sleep: a wake that is missed is a deadlock here --------------------------------------------

void run_sleep(int rank) {
  const auto group = join<Drowsy>(rank);
  Host host;
  for (int call = 0; call < 3; ++call) run(*group, barrier, nullptr, nullptr, host);
}

// ---- p2p: offers, chunks and copies, until places and chunks are used again ---------------------

constexpr size_t kMostMessages = PairChannel::kChunks + 3;
constexpr size_t kCopiedNumel = (128 << 10) / sizeof(uint64_t);
constexpr size_t kLongNumel =  // more chunks than the ring holds
    (PairChannel::kChunks + 2) * PairChannel::kChunkBytes / sizeof(uint64_t);
std::vector<uint64_t> sizes;
uint64_t sent[2][kLongNumel];

template <bool kMayCopy, bool kCrowded = true, class P = RelacyAtomics>
void run_p2p(int rank) {
  const auto group = join<P>(rank, num_ranks, 0, kCrowded ? 1 : num_ranks);
  auto engine = std::make_unique<PointToPoint<P>>(*group);
  if (kMayCopy) engine->allow_single_copy(false);
  Host host;
  const auto received = std::make_unique<uint64_t[]>(kLongNumel);
  for (size_t m = 0; m < sizes.size(); ++m) {
    const bool sends = (int(m) % 5 == 4 ? 1 : 0) == rank;  // some go back
    uint64_t* data = sends ? sent[rank] : received.get();
    auto transfer = transfer_of(sends, 1 - rank, DType::uint64,
                                std::as_writable_bytes(std::span(data, sizes[m])), 1e9);
    for (size_t i = 0; i < sizes[m]; ++i) data[i] = sends ? m * 1000 + i : 0;
    // Whether the sender says that it waits: by chance of the message.
    if (!kCrowded && m % 2 == 0) engine->start({&transfer, 1}, host);
    else engine->post(transfer, host);
    engine->wait(*transfer, host, 0);
    for (size_t i = 0; i < sizes[m]; ++i) {
      if (sends) data[i] = 0;  // its owner's again
      else machine::require(data[i] == m * 1000 + i, "a wrong message");
    }
  }
}

// ---- single_copy: whether all can read the memory of all ----------------------------------------

[[gnu::noinline]] void find_out(Group<RelacyAtomics>& group) {
  Host host;
  for (const int error : group.try_single_copy(true, host))
    machine::require(error == 0, "a sample that was gone");
}

[[gnu::noinline]] void reuse_stack() {
  std::byte room[4096];
  std::memset(room, 1, sizeof room);
  asm volatile("" ::"r"(room) : "memory");
}

void run_single_copy(int rank) {
  // The sample lies on the stack, further down.
  constexpr size_t kStackBytes = 8192;
  std::byte* here = static_cast<std::byte*>(__builtin_frame_address(0));
  machine::watch(here - kStackBytes, kStackBytes);
  const auto group = join(rank);
  find_out(*group);
  reuse_stack();
}

struct Named {
  const char* name;
  int num_ranks, num_threads;
  void (*thread)(int);
  uint64_t num_iterations;
  bool wakes_all = false;
};
constexpr Named kScenarios[] = {
    {"calls2", 2, 2, run_calls, 5000},
    {"calls3", 3, 3, run_calls, 2000},
    {"verdict", 3, 3, run_verdict, 3000},
    {"status", 2, 2, run_status, 20000},
    {"waits", 2, 3, run_waits, 5000},
    {"sleep", 2, 2, run_sleep, 20000, true},
    {"messages", 2, 2, run_p2p<true>, 300},
    {"chunks", 2, 2, run_p2p<false>, 100},
    {"either", 2, 2, run_p2p<true, false>, 100},
    {"rest", 2, 2, run_p2p<false, true, Drowsy>, 3000, true},
    {"single_copy", 3, 3, run_single_copy, 3000},
};

bool read_variant(const std::string& name) {
  if (name == "correct") return true;
  if (name == "no_membarrier") return mutation.removes_barrier = true;
  if (name == "no_look_before_sleep") return !(RelacyAtomics::kLooksBeforeSleep = false);
  for (int word = 0; word < int(Which::none); ++word) {
    mutation.word = Which(word);
    mutation.weakens_release = name == std::string("relaxed_release_of_") + kWordNames[word];
    mutation.weakens_acquire = name == std::string("relaxed_acquire_of_") + kWordNames[word];
    if (mutation.weakens_release || mutation.weakens_acquire) return true;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "calls2";
  if (!read_variant(argc > 2 ? argv[2] : "correct")) {
    std::fprintf(stderr, "unknown variant %s\n", argv[2]);
    return 2;
  }
  set_words(regions[0], sizeof regions[0]);
  copy_ways.answers_in_place = true;  // on every CPU
  machine::watch(regions, sizeof regions);
  machine::watch(arenas, sizeof arenas);
  machine::watch(sent, sizeof sent);
  barrier.inlined = true;
  barrier.segment_bytes = uint32_t(kLeastSegmentBytes);
  barrier = make_plan(barrier);
  for (const Named& one : kScenarios) {
    if (name != one.name) continue;
    num_ranks = one.num_ranks;
    const uint64_t iterations = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : one.num_iterations;
    steps.reserve(kCalls);
    const auto before = [thread = one.thread] {
      clear();
      steps.clear();
      for (int i = 0; i < kCalls; ++i) steps.push_back(draw_step());
      for (std::string& verdict : verdicts) verdict.clear();
      sizes.assign(1, kLongNumel);
      if (thread == run_p2p<true>) sizes.assign(kMostMessages, 0);
      if (thread == run_p2p<false, true, Drowsy>) {  // one in a chunk, or in more than there are
        sizes = {1, 27, 2100, 1, 40};
        if (machine::draw(32) == 0) sizes = {kLongNumel};
      }
      for (uint64_t& size : sizes) {
        constexpr uint64_t kSizes[] = {1, 27, 40, 2100, 5000, kCopiedNumel};
        if (size == 0) size = kSizes[machine::draw(5 + machine::draw(2))];
      }
    };
    if (!machine::simulate({one.num_threads, iterations, before, one.thread, one.wakes_all,
                            !mutation.removes_barrier}))
      return 1;
    std::printf("ok: %d iterations\n", int(iterations));
    return 0;
  }
  std::fprintf(stderr, "unknown scenario %s\n", name.c_str());
  return 2;
}
