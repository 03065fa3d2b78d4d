// SPDX-License-Identifier: Apache-2.0
// The real moves of the compiled algorithms: one call on ranks that are threads, with every copy,
// every reduction and every wait written down. Prints JSON for test_trace.py, which holds it
// against the model's schedules.
//
//   trace_algorithms WORLD_SIZE VERB ALGORITHM NUMEL [lose]
//
// Built without csrc/cpu/reduce*.cpp and the compiler's memcpy. This file has its own of both; they
// take notes. `lose`: rank 0's notes of copies are lost, for a test of the test.
#include <array>
#include <atomic>
#include <set>
#include <tuple>

#include "cpu/run.h"
#include "thread_ranks.h"

using namespace fastcoll;

namespace {

int world_size = 0;
Memory memory;                 // of all ranks, one after another
std::byte* regions = nullptr;  // the same
bool loses_copies = false;

struct Notes {
  bool is_on = false;
  int rank = 0;
  std::array<size_t, kMaxWorld> read_bytes{};     // that each rank wrote, in any rank's scratch
  std::array<size_t, kMaxWorld> written_bytes{};  // into each rank's scratch
  size_t num_moves = 0;                           // copies and reductions with a peer's bytes
  std::set<std::tuple<const uint64_t*, uint64_t>> waits;
  std::array<size_t, kMaxWorld> num_waits{};  // for each rank
};
thread_local Notes notes;

// The rank in whose scratch this lies, or -1.
int owner(const void* ptr) {
  const auto at = static_cast<const std::byte*>(ptr) - regions;
  if (!regions || at < 0 || at >= ptrdiff_t(size_t(world_size) * kRegionBytes)) return -1;
  return size_t(at) % kRegionBytes < kScratchOffsetBytes ? -1 : int(size_t(at) / kRegionBytes);
}

// By line of the regions: 1 + the rank that wrote it last; 0: none did, so there is nothing to
// read.
std::vector<std::atomic<uint8_t>> writers;

std::atomic<uint8_t>& writer(const void* ptr) {
  return writers[size_t(static_cast<const std::byte*>(ptr) - regions) / kLineBytes];
}

// Whether a peer's bytes are read, or a peer's memory is written; they take the note.
bool note_read(const void* ptr, size_t num_bytes) {
  const int rank = owner(ptr) < 0 ? -1 : writer(ptr) - 1;
  if (rank < 0) return false;
  notes.read_bytes[size_t(rank)] += num_bytes;
  return rank != notes.rank;
}
bool note_write(const void* ptr, size_t num_bytes) {
  const int rank = owner(ptr);
  if (rank < 0) return false;
  notes.written_bytes[size_t(rank)] += num_bytes;
  return rank != notes.rank;
}
void sign(const void* ptr, size_t num_bytes) {
  for (size_t at = 0; owner(ptr) >= 0 && at < num_bytes; at += kLineBytes)
    writer(static_cast<const std::byte*>(ptr) + at) = uint8_t(notes.rank + 1);
}

// A wait is a word and the least value that it may have; looking again is no other wait.
struct Traced : StdAtomics {
  static uint64_t load_acquire(const uint64_t& word) {
    last = &word;
    const size_t at = place(&word);
    if (at % kRegionBytes < offsetof(Pad, staged)) take_note(&word, 0);  // a slot, awaited exactly
    return StdAtomics::load_acquire(word);
  }
  static bool reached(uint64_t seen, uint64_t target) {
    const size_t in_pad = place(last) % kRegionBytes;
    if (in_pad >= offsetof(Pad, staged) && in_pad < offsetof(Pad, done)) take_note(last, target);
    return StdAtomics::reached(seen, target);
  }
  static constexpr bool is_slow(uint64_t, uint64_t) { return false; }  // our memcpy takes the notes

 private:
  static size_t place(const uint64_t* word) {
    return size_t(reinterpret_cast<const std::byte*>(word) - regions);
  }
  static void take_note(const uint64_t* word, uint64_t target) {
    const size_t rank = place(word) / kRegionBytes;
    if (notes.is_on && int(rank) != notes.rank && notes.waits.emplace(word, target).second)
      ++notes.num_waits[rank];
  }
  static thread_local const uint64_t* last;
};
thread_local const uint64_t* Traced::last = nullptr;

void add(const ReduceArgs& args) {
  if (notes.is_on) {
    bool crosses = false;
    for (int i = 0; i < args.num_srcs; ++i) crosses |= note_read(args.srcs[i], args.numel * 4);
    for (int i = 0; i < args.num_dsts; ++i) {
      crosses |= note_write(args.dsts[i], args.numel * 4);
      sign(args.dsts[i], args.numel * 4);
    }
    notes.num_moves += crosses;
  }
  for (size_t k = 0; k < args.numel; ++k) {
    int32_t sum = 0;
    for (int i = 0; i < args.num_srcs; ++i) sum += static_cast<const int32_t*>(args.srcs[i])[k];
    for (int i = 0; i < args.num_dsts; ++i) static_cast<int32_t*>(args.dsts[i])[k] = sum;
  }
}

void load(void* acc, const void* src, size_t numel) { std::memcpy(acc, src, numel * 4); }
void accumulate(void* out, const void* in, const void* src, size_t numel) {
  const void* both[] = {in, src};
  add({&out, 1, both, 2, numel, 1});
}
void finish(void* dst, const void* acc, size_t numel, int) {
  if (dst != acc) std::memcpy(dst, acc, numel * 4);
}
constexpr PartialFns kPartialFns = {load, accumulate, finish};

void run_rank(int rank, const Plan& plan, size_t in_numel, size_t out_numel, Notes& result) {
  Group<Traced> group(options_of(rank, regions_in(memory, world_size, kRegionBytes), 30));
  Host host;
  std::vector<int32_t> input(in_numel, rank + 1), output(out_numel);
  notes.rank = rank;
  notes.is_on = true;
  int32_t* out = plan.verb == Verb::broadcast ? input.data() : output.data();
  run(group, plan, input.data(), out, host);
  notes.is_on = false;
  result = notes;
}

template <class List>
void print(const char* name, const List& values) {
  std::printf("\"%s\": [", name);
  for (int i = 0; i < world_size; ++i) std::printf("%s%zu", i ? ", " : "", values[size_t(i)]);
  std::printf("]");
}

template <class Enum>
Enum named(const char* text, int count, const char* (*name)(Enum)) {
  for (int i = 0; i < count; ++i)
    if (std::strcmp(text, name(Enum(i))) == 0) return Enum(i);
  std::fprintf(stderr, "no %s\n", text);
  std::exit(2);
}

}  // namespace

// The notes' own; volatile, so that no compiler makes a memcpy of it again.
extern "C" void* memcpy(void* dst, const void* src, size_t num_bytes) {
  if (notes.is_on && num_bytes != 0 && !(loses_copies && notes.rank == 0)) {
    const bool reads = note_read(src, num_bytes);
    const bool writes = note_write(dst, num_bytes);
    notes.num_moves += reads || writes;
  }
  if (notes.is_on) sign(dst, num_bytes);
  auto* to = static_cast<volatile char*>(dst);
  const auto* from = static_cast<const volatile char*>(src);
  for (size_t i = 0; i < num_bytes; ++i) to[i] = from[i];
  return dst;
}

namespace fastcoll {
ReduceFn reduce_fn(DType, Op) { return add; }
const PartialFns* partial_fns(DType, Op) { return &kPartialFns; }
}  // namespace fastcoll

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  copy_ways = {};  // our memcpy takes the notes
  world_size = std::atoi(argv[1]);
  loses_copies = argc > 5;
  Plan plan;
  plan.verb = named<Verb>(argv[2], kNumVerbs, verb_name);
  plan.algorithm = named<Algorithm>(argv[3], kNumAlgorithms, algorithm_name);
  plan.numel = std::strtoull(argv[4], nullptr, 10);
  plan.dtype = DType::int32;
  plan.op = Op::sum;
  plan.segment_bytes = uint32_t(kSlotBytes);
  plan = make_plan(plan);
  const bool gives_parts = plan.verb == Verb::reduce_scatter || plan.verb == Verb::scatter ||
                           plan.verb == Verb::all_to_all;
  const bool gets_parts =
      plan.verb == Verb::all_gather || plan.verb == Verb::gather || plan.verb == Verb::all_to_all;
  const size_t world = size_t(world_size);
  memory = zeroed_pages(world * kRegionBytes);
  regions = memory.get();
  writers = std::vector<std::atomic<uint8_t>>(world * kRegionBytes / kLineBytes);
  std::vector<Notes> all(world);
  run_ranks(world_size, [&](int rank) {
    run_rank(rank, plan, plan.numel * (gives_parts ? world : 1),
             plan.numel * (gets_parts ? world : 1), all[size_t(rank)]);
  });
  std::printf("[");
  for (size_t rank = 0; rank < world; ++rank) {
    std::printf("%s{", rank ? ",\n " : "");
    print("read_bytes", all[rank].read_bytes);
    std::printf(", ");
    print("written_bytes", all[rank].written_bytes);
    std::printf(", ");
    print("num_waits", all[rank].num_waits);
    std::printf(", \"num_moves\": %zu}", all[rank].num_moves);
  }
  std::printf("]\n");
}
