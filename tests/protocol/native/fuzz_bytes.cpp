// SPDX-License-Identifier: Apache-2.0
// Every reader of bytes that a peer wrote, fed by libFuzzer. Any bytes are taken or refused by a
// Failure. There is no other exception, no access outside of the buffers (AddressSanitizer), and no
// wait without an end (libFuzzer's limit).
//
//   fuzz_bytes --target=NAME [options of libFuzzer]
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cpu/p2p.h"
#include "cpu/program.h"
#include "cpu/text.h"
#include "transfer_of.h"

using namespace fastcoll;

namespace {

void require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "WRONG: %s\n", what);
  std::abort();
}

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  template <class T>
  T next() {
    T value{};
    const size_t length = std::min(sizeof value, size_);
    std::memcpy(&value, data_, length);
    data_ += length;
    size_ -= length;
    return value;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Damages words here and there; the bytes choose the places, the ways and the values.
void damage(Bytes& bytes, std::byte* begin, size_t num_bytes) {
  for (int left = bytes.next<uint8_t>() % 16; left > 0 && !bytes.empty(); --left) {
    const size_t at = bytes.next<uint16_t>() % (num_bytes / sizeof(uint64_t)) * sizeof(uint64_t);
    uint64_t word;
    std::memcpy(&word, begin + at, sizeof word);
    word = bytes.next<uint8_t>() % 2 ? word + bytes.next<uint8_t>() : bytes.next<uint64_t>();
    std::memcpy(begin + at, &word, sizeof word);
  }
}

constexpr int kWorld = 2;
constexpr uint64_t kArenaBytes = 4096;

// Rank 0, and the memory of rank 1, which is damaged.
struct Machine {
  Machine() {
    GroupOptions options;
    options.world_size = kWorld;
    options.name = "fuzzed";
    for (int rank = 0; rank < kWorld; ++rank) {
      std::byte*& region = options.regions[size_t(rank)];
      region = static_cast<std::byte*>(std::aligned_alloc(4096, mapped_bytes(kWorld)));
      regions[rank].reset(region);
      clear(rank);
    }
    options.links[1].pid = getpid();  // another process, as far as single copies go
    group = std::make_unique<Group<StdAtomics>>(options);
    Arena arena;
    arena.num_bytes = kArenaBytes;
    memory.resize(kArenaBytes);
    arena.bases.fill(memory.data());
    group->arenas() = {Arena{}, arena};  // the first was removed
  }
  PairChannel& channel(int rank, int peer) {
    return pair_channel(regions[rank].get(), peer, kWorld);
  }
  void clear(int rank) {
    std::memset(regions[rank].get(), 0, kPadBytes);
    for (int peer = 0; peer < kWorld; ++peer)
      std::memset(&channel(rank, peer), 0, offsetof(PairChannel, sites));
  }
  struct Free {
    void operator()(std::byte* ptr) const { std::free(ptr); }
  };
  std::unique_ptr<std::byte, Free> regions[kWorld];
  std::vector<std::byte> memory;
  std::unique_ptr<Group<StdAtomics>> group;
};

// ---- a schedule's program -----------------------------------------------------------------------

void read_program(Bytes& bytes) {
  constexpr int kRanks = 4, kRank = 1;
  const ProgramBlocks blocks{bytes.next<uint8_t>(), bytes.next<uint8_t>(), bytes.next<uint16_t>()};
  std::vector<uint32_t> words;
  while (!bytes.empty()) {  // mostly small ones
    const auto byte = bytes.next<uint8_t>();
    words.push_back(byte < 250 ? byte : bytes.next<uint32_t>());
  }
  const Program program(kRanks, kRank, blocks, words);
  for (const ProgramStep& step : program.steps()) {
    if (step.kind == StepKind::wait)
      require(step.peer >= 0 && step.peer < kRanks && step.peer != kRank, "a wait for nobody");
    if (step.kind != StepKind::copy && step.kind != StepKind::reduce) continue;
    require(step.num_sources <= uint32_t(kRanks), "more sources than ranks");
    for (uint32_t i = 0; i <= step.num_sources; ++i) {
      const Place& place = program.places(step)[i];
      const bool is_scratch = place.buffer == BufferKind::scratch;
      require(place.rank >= 0 && place.rank < kRanks, "a place of no rank");
      require(is_scratch || place.rank == kRank, "a place in another's tensor");
      require(
          uint64_t(place.block) + step.num_blocks <= (is_scratch ? blocks.scratch : blocks.message),
          "a place outside the message");
    }
  }
}

// ---- the calls in a pad, and a verdict ----------------------------------------------------------

void read_status(Bytes& bytes) {
  static Machine machine;
  Pad& pad = *reinterpret_cast<Pad*>(machine.regions[1].get());
  machine.clear(1);
  for (uint64_t call = 1; call <= 4; ++call) {
    Descriptor& entry = pad.ring[call];
    entry.sequence = 2 * call;
    entry.timed_call = call;
    entry.began_us = call;
  }
  pad.verdict.kind = uint32_t(ErrorKind::timeout);
  auto* begin = reinterpret_cast<std::byte*>(&pad.ring);
  if (bytes.next<uint8_t>() % 2) damage(bytes, begin, 6 * sizeof(Descriptor));
  else damage(bytes, begin, offsetof(Pad, signals) - offsetof(Pad, ring));
  size_t length = 0;
  for (const Operation& operation : read_operations<StdAtomics>(pad)) {
    length += describe(operation.plan).size() + describe_choice(operation.plan).size() +
              operation.site.size() + operation.plan.elem_bytes();
  }
  require(length < (1 << 20), "a name without an end");
  auto& poison = reinterpret_cast<Pad*>(machine.regions[0].get())->poison.value;
  poison = bytes.next<uint8_t>() % 4 ? 2 : bytes.next<uint64_t>() | 1;
  try {
    machine.group->check();
    require(false, "poison unseen");
  } catch (const Failure& failure) {
    require(failure.kind() >= ErrorKind::usage && failure.kind() <= kLastKind, "an unknown kind");
    constexpr size_t kEscaped = 4;  // "\x1b" in place of one byte
    require(std::strlen(failure.what()) <= kEscaped * sizeof pad.verdict.text, "a text too long");
    require(printable(failure.what()) == failure.what(), "a text for no terminal");
  }
}

// ---- the message that a rank left in its socket -------------------------------------------------

void hear_farewell(Bytes& bytes) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0) std::abort();
  while (!bytes.empty()) {
    Farewell farewell{kFarewell, uint64_t(ErrorKind::timeout), 1};
    damage(bytes, reinterpret_cast<std::byte*>(&farewell), sizeof farewell);
    std::byte message[64] = {};
    std::memcpy(message, &farewell, sizeof farewell);
    send(sockets[1], message, 1 + bytes.next<uint8_t>() % sizeof message, MSG_DONTWAIT);
  }
  close(sockets[1]);
  Farewell farewell;
  std::string text;
  while (read_farewell({sockets[0], -1, 0}, &farewell, &text)) {
    require(farewell.tag == kFarewell, "somebody else's message");
    require(farewell.kind <= uint64_t(kLastKind), "an unknown kind");
  }
  close(sockets[0]);
}

// ---- places that a peer published ---------------------------------------------------------------

void resolve_place(Bytes& bytes) {
  static Machine machine;
  uint64_t location = bytes.next<uint64_t>();
  if (location % 2) location = Location::encode(int(location >> 8 & 1), location >> 16 & 0x1fff);
  const uint64_t start = bytes.next<uint16_t>(), num_bytes = bytes.next<uint16_t>();
  if (Location::is_private(location)) return;  // never resolved: the kernel looks at it
  for (const auto& region : machine.regions) std::memset(region.get(), 0, kPadBytes);
  const std::byte* first = machine.group->resolve(1, location, start, num_bytes);
  if (!first) return require(location == Location::kStaged, "a place that is nowhere");
  const std::byte* begin = machine.memory.data();
  require(first >= begin && first + num_bytes <= begin + kArenaBytes, "a place outside the arena");
}

// ---- a peer's half of a pair's channel ----------------------------------------------------------

void talk(Bytes& bytes) {
  static Machine machine;
  machine.clear(0);
  machine.clear(1);
  Host host;
  PointToPoint<StdAtomics> engine(*machine.group);
  engine.allow_single_copy(false);
  std::vector<uint8_t> data[2];
  std::shared_ptr<Transfer> transfers[2];
  constexpr size_t kSizes[] = {1, 300, 20000, 100000};
  for (const bool sends : {false, true}) {
    data[sends].resize(kSizes[bytes.next<uint8_t>() % std::size(kSizes)]);
    transfers[sends] = transfer_of(sends, 1, DType::uint8, bytes_of(data[sends]), 1e9);
  }
  PairChannel& theirs = machine.channel(1, 0);
  Message& message = theirs.messages[bytes.next<uint8_t>() % PairChannel::kMessages];
  message.number = theirs.offered.value = 1;  // an offer that fits
  message.numel = data[0].size();
  message.tag_and_dtype = uint64_t(DType::uint8) << 32;
  damage(bytes, reinterpret_cast<std::byte*>(&message), offsetof(Message, payload));
  try {
    for (const auto& transfer : transfers) engine.post(transfer, host);
    for (int round = 0; round < 4; ++round) {
      damage(bytes, reinterpret_cast<std::byte*>(&theirs), offsetof(PairChannel, sites));
      for (const auto& transfer : transfers)
        if (!transfer->done) engine.wait(*transfer, host, 1e-6);
    }
  } catch (const Failure&) {
  }
  engine.close();
}

using Target = void (*)(Bytes&);
struct Named {
  const char* name;
  Target run;
};
constexpr Named kTargets[] = {{"program", read_program},
                              {"status", read_status},
                              {"farewell", hear_farewell},
                              {"places", resolve_place},
                              {"messages", talk}};
Target target = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i)
    for (const Named& one : kTargets)
      if ((*argv)[i] == std::string("--target=") + one.name) target = one.run;
  require(target != nullptr, "no such --target");
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  try {
    target(bytes);
  } catch (const Failure&) {
  }
  return 0;
}
