// SPDX-License-Identifier: Apache-2.0
// The byte layout of a rank's region, and the one source of offsets. A region is pad | scratch.
//
// Every word has ONE writer: the rank whose region it lies in (the owner), unless its comment says
// otherwise. Peers only read. The ordering, reuse and wrap of every word stand in
// kernels/README.md. The pad belongs to the group, never to a tensor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

inline constexpr int kMaxWorld = 64;
inline constexpr size_t kLineBytes = 64;

// Arrival lines (and inline areas) a rank owns; call c uses line c % kDepth. Two suffice when every
// call waits for every rank; four let a broadcast's root run ahead before it has to look at `done`.
inline constexpr int kDepth = 4;

// Largest message that travels inside the flag lines. Above it copy + one flag is cheaper
// (crossover measured between 2 and 3 KiB on Granite-/Sapphire-Rapids-class Xeons).
inline constexpr size_t kInlineMaxBytes = 2048;

// Staging: 3 MiB per rank, so that caches have let go of a place when its turn comes (cpu/slots.h).
inline constexpr int kNumSlots = 12;
inline constexpr size_t kSlotBytes = size_t{256} << 10;
// The least bytes of a place within a slot, which small messages take by turns (cpu/slots.h).
inline constexpr size_t kLeastPlaceBytes = size_t{8} << 10;  // less gains nothing more
// A two_shot takes so many of them, and so does a long message in direct. A line is written again
// sooner, while it is still in the cache. Three are the least that a two_shot's pipeline needs.
inline constexpr uint64_t kFewSlots = 4;
// Signals that one rank may raise in one segment of a schedule.
inline constexpr uint32_t kMostSignals = uint32_t{1} << 20;

inline constexpr uint64_t kLayoutMagic = 0x66636f6c6c000002ULL;  // "fcoll", layout version 2

// The one line per call and peer that changes owner on the fast path. `slot` is stored last.
struct alignas(kLineBytes) ArriveLine {
  static constexpr size_t kPayloadBytes = 48;
  uint64_t slot;  // epoch (32) | stamp (32): epoch = low half of the call number
  uint32_t cpu;   // the CPU the owner runs on, a hint for adaptive waiting
  uint32_t reserved;
  union {
    std::byte payload[kPayloadBytes];  // inline calls: the first bytes of the message
    struct {
      uint64_t input;   // staged calls: where the owner's input lies (see Location)
      uint64_t output;  // and where its output shall lie
    } location;
  };
};
static_assert(sizeof(ArriveLine) == kLineBytes);

// Continuation of an inline message: 56 bytes of data under a flag of their own. This memory never
// holds anything else, as raw data could mimic a flag.
struct alignas(kLineBytes) InlineLine {
  static constexpr size_t kPayloadBytes = 56;
  uint64_t slot;
  std::byte payload[kPayloadBytes];
};
static_assert(sizeof(InlineLine) == kLineBytes);

inline constexpr size_t kInlineLines =
    (kInlineMaxBytes - ArriveLine::kPayloadBytes + InlineLine::kPayloadBytes - 1) /
    InlineLine::kPayloadBytes;

struct alignas(kLineBytes) Word {
  uint64_t value;
};

// Sleep handshake. `sleepers`: set to 1 by any waiter, cleared by the owner. `wake`: futex word,
// advanced by the owner only.
struct alignas(kLineBytes) SleepLine {
  uint32_t sleepers;
  uint32_t wake;
};

// A rank's description of its call, for all peers to read while it is stuck. A sequence lock:
// `sequence` is 2 * call - 1 while the words change and 2 * call when they are whole.
struct alignas(128) Descriptor {
  static constexpr int kWords = 5;
  uint64_t sequence;
  uint64_t words[kWords];  // plan_words; [3]: stamp, and low half of the segment after the last
  // Outside the lock, written only by a call that waited long; they hold if `timed_call` is the
  // entry's. CLOCK_MONOTONIC, `wait_ended_us` is 0 while it waits.
  uint64_t timed_call;
  uint64_t wait_began_us;
  uint64_t wait_ended_us;
  // In a group that traces; else 0. `began_us` is within the lock.
  uint64_t began_us;
  uint64_t ended_us;     // 0 while the call runs, and if it failed
  uint64_t reserved[5];  // split hashes and tags of later verbs
};
static_assert(sizeof(Descriptor) == 128);
inline constexpr int kRingEntries = 64;

// The program's call site for the descriptor in the same place, within its lock: text, with zeros
// behind. Only in a group that traces.
struct alignas(128) SiteText {
  static constexpr size_t kWords = 16;
  uint64_t words[kWords];
};
static_assert(sizeof(SiteText) == 128);

// Written once by the owner before its number goes into a poison word.
struct alignas(kLineBytes) VerdictPage {
  uint32_t kind;    // ErrorKind
  uint32_t length;  // bytes of text
  uint64_t ranks;   // bit set of the ranks at fault
  char text[2032];
};
static_assert(sizeof(VerdictPage) == 2048);

// The owner's identity, for readers outside the group (`fastcoll inspect`). Written once, `magic`
// last.
struct alignas(kLineBytes) Identity {
  uint64_t magic;
  uint32_t rank;
  uint32_t world_size;
  char name[112];  // of the group, ends with a zero
};
static_assert(sizeof(Identity) == 2 * kLineBytes);

// The owner's calls of one verb so far, for readers outside the group.
struct VerbCount {
  uint64_t calls;
  uint64_t num_bytes;  // of their messages
  uint64_t waited_us;  // in waits that outlast the spinning
  uint64_t reserved;
};
inline constexpr int kCountedVerbs = 16;

struct alignas(4096) Pad {
  ArriveLine arrive[kDepth];
  InlineLine inlined[kDepth][kInlineLines];
  Word staged;   // segments (or ring steps) published, see Group::progress; only grows
  Word reduced;  // the same for reduced segments
  Word done;     // segments consumed since the group began
  Word poison;   // 0, or 1 + the rank whose verdict holds; written by compare-exchange by any rank
  SleepLine sleep;
  Word ping;     // flag-time measurement only
  Word blocked;  // the send or receive this rank waits in: kind | peer << 8; 0: none
  Word polling;  // 1: a thread looks after its transfers all the time, large sends among them
  // Before the first call: the address of a sample of the owner's private memory, and the result of
  // the owner's reads of all samples (single_copy.h).
  Word sample;
  Word single_copy;
  Descriptor ring[kRingEntries];
  VerdictPage verdict;
  Identity identity;
  SiteText sites[kRingEntries];
  Word signals[kNumSlots];  // of a schedule: raised so far for the segment in each slot
  // The ranks that go on after the group has broken, as bits (bootstrap/agreement.py).
  Word parts_held;  // the owner has the parts of the next group of these ranks
  Word survivors;   // rank 0's only: 0, or the survivors; written by compare-exchange by any rank
  alignas(kLineBytes) VerbCount counts[kCountedVerbs];
};
static_assert(kMaxWorld <= 64, "a word has a bit for every rank");

inline constexpr size_t kPadBytes = sizeof(Pad);
inline constexpr size_t kScratchOffsetBytes = kPadBytes;
inline constexpr size_t kScratchBytes = kNumSlots * kSlotBytes;
inline constexpr size_t kRegionBytes = kScratchOffsetBytes + kScratchBytes;
static_assert(kRegionBytes <= size_t{4} << 20,
              "staging memory per rank is promised to stay <= 4 MiB");
static_assert(kSlotBytes % (kMaxWorld * kLineBytes) == 0,
              "a slot holds a whole line for every rank");

// The place of a tensor: 0 = in scratch (staged), else arena index + 1 (16 bits) | offset (48
// bits). All ones | address: to be copied out of its owner's process.
struct Location {
  static constexpr uint64_t kStaged = 0;
  static constexpr int kOffsetBits = 48;
  static constexpr uint64_t encode(int arena_idx, uint64_t offset_bytes) {
    return (uint64_t(arena_idx) + 1) << kOffsetBits | offset_bytes;
  }
  static constexpr int arena_idx(uint64_t location) { return int(location >> kOffsetBits) - 1; }
  static constexpr uint64_t offset_bytes(uint64_t location) {
    return location & ((uint64_t{1} << kOffsetBits) - 1);
  }
  static constexpr uint64_t kPrivate = ~uint64_t{0} << kOffsetBits;
  static constexpr bool is_private(uint64_t location) { return location >= kPrivate; }
  static constexpr bool fits(uint64_t address) { return address >> kOffsetBits == 0; }
};

// ---- GPU ----------------------------------------------------------------------------------------
// A channel is one thread block of every rank: block b waits for block b of its peers only. It has
// its own words, LL area and scratch, with any grid of a call. Signals are PUSHED: rank s writes
// into the pad of the rank that waits, so polling stays in local memory.

inline constexpr int kMaxGpuWorld = 72;  // as many as one NVLink domain has
inline constexpr int kMaxChannels = 64;
inline constexpr int kMaxBlockThreads = 512;
inline constexpr size_t kPackBytes = 16;

// Channels with an LL area, and its packs for each parity and source.
inline constexpr int kMaxLlChannels = 16;
inline constexpr int kLlPacks = 512;
inline constexpr size_t kLlBytes = 8;  // data in one pack
static_assert(kMaxLlChannels * kLlPacks * kLlBytes == 64 << 10, "see choose/algorithms/shared.py");

// Point-to-point: channels of their own for each peer and direction.
inline constexpr int kPairChannels = 4;

// One atom. It holds the location of the data, too (see GpuLocation).
struct alignas(kPackBytes) ArrivePack {
  uint64_t slot;  // epoch (32) | stamp (32)
  uint64_t location;
};

// Data and flag in one atom. This memory never holds anything else: raw data could mimic a flag.
struct alignas(kPackBytes) LlPack {
  uint64_t data;
  uint64_t slot;
};

// The words of one peer to me on one channel; only that peer writes them.
struct alignas(kLineBytes) GpuWords {
  ArrivePack arrive[2];  // of the last two pipelined calls, by their parity
  uint64_t progress;     // number of the pipelined call (32) | steps of it that the peer has done
};

// Half of a channel's state, in one atom.
struct alignas(kPackBytes) StateHalf {
  uint64_t slot;
  uint32_t count, mark;
};

// Kept by the kernel itself in the owner's memory, so that a captured graph can be replayed. Both
// halves and the turn hold the epoch of the last call: a read while they are written shows by it.
struct alignas(kLineBytes) ChannelState {
  StateHalf last;       // slot of the last call; LL calls; 1: in the last pipelined call I met
                        // every peer
  StateHalf pipelined;  // slot of the last pipelined call; how many those were; the epoch
                        // of the last call
  uint64_t turn;        // epoch (32) of the last call | 0 (32), or kTaken while a kernel is in one

  static constexpr uint64_t kTaken = 1;
  static constexpr uint64_t turn_after(uint64_t slot) { return slot >> 32 << 32; }
};

// For a peer that has waited long: the call that I am in. Written by the owner.
struct alignas(kLineBytes) ChannelStatus {
  uint64_t slot;
};

struct GpuChannel {
  GpuWords from[kMaxGpuWorld];  // by source rank
  ChannelState state;
  ChannelStatus status;
};

// One direction of one pair of ranks.
struct GpuPairChannel {
  GpuWords from_peer;
  ChannelState state;
  ChannelStatus status;
};

// The start of a region. Zeroed by the owner before any peer maps it, like the rest.
struct alignas(4096) GpuPad {
  GpuChannel channels[kMaxChannels];
  GpuPairChannel receive[kMaxGpuWorld][kPairChannels];  // by source rank
  GpuPairChannel send[kMaxGpuWorld][kPairChannels];     // by destination rank
  alignas(kLineBytes) uint64_t poison;                  // see Poison; any rank writes it
  alignas(kLineBytes) uint64_t claimed;  // 1: a thread of the owner wrote the verdict
  alignas(kLineBytes) uint64_t magic;
};

// Staging: two halves for each channel, used in turn by its calls. All channels together have as
// much memory, however many a group agreed on: 16 MiB, less the room of a pad. So the region of 8
// ranks takes 22 MiB, in pieces of 2 MiB, and that of 72 ranks 70 MiB.
inline constexpr size_t kChannelsHalfBytes = (size_t{8} << 20) - (size_t{256} << 10);
inline constexpr size_t kMostHalfBytes = size_t{512} << 10;
inline constexpr size_t kPairHalfBytes = size_t{64} << 10;
inline constexpr size_t kGpuScratchOffsetBytes = sizeof(GpuPad);

constexpr size_t channel_half_bytes(int num_channels) {
  const size_t share = kChannelsHalfBytes / size_t(num_channels) / 4096 * 4096;
  return share < kMostHalfBytes ? share : kMostHalfBytes;
}

// A region of a group: pad | scratch of channels | scratch of pairs | LL areas. It has room for the
// channels and ranks that the group has, and no more. All offsets are from its start.
struct GpuLayout {
  int num_channels, world_size;
  uint32_t half_bytes;  // kept, as kernels would take long to divide

  static constexpr GpuLayout of(int num_channels, int world_size) {
    return {num_channels, world_size, uint32_t(channel_half_bytes(num_channels))};
  }
  constexpr size_t scratch(uint32_t channel) const {
    return kGpuScratchOffsetBytes + size_t{channel} * 2 * half_bytes;
  }
  constexpr size_t pair_scratch(int receiver, uint32_t idx) const {
    return scratch(uint32_t(num_channels)) +
           (size_t(receiver) * kPairChannels + idx) * 2 * kPairHalfBytes;
  }
  constexpr int num_ll_channels() const {
    return num_channels < kMaxLlChannels ? num_channels : kMaxLlChannels;
  }
  // Packs from one rank to another, for each parity of calls.
  constexpr size_t ll(uint32_t channel, uint32_t parity, int source) const {
    return pair_scratch(world_size, 0) +
           ((size_t{channel} * 2 + parity) * size_t(world_size) + size_t(source)) * kLlPacks *
               sizeof(LlPack);
  }
  constexpr size_t num_bytes() const { return ll(uint32_t(num_ll_channels()), 0, 0); }
};
inline constexpr uint64_t kGpuLayoutMagic = 0x66636f6c6c670003ULL;  // "fcollg", layout version 3

// The place of a rank's input and output, in one word. It is 0 if staged in scratch, else 1 + packs
// from the start of the rank's heap. A tensor that does not start on a pack is staged.
struct GpuLocation {
  static constexpr uint32_t kStaged = 0;
  static constexpr uint32_t encode(uint64_t heap_offset_bytes) {
    const uint64_t packs = heap_offset_bytes / kPackBytes + 1;
    return heap_offset_bytes % kPackBytes != 0 || packs > 0xffffffffu ? kStaged : uint32_t(packs);
  }
  static constexpr uint64_t heap_offset_bytes(uint32_t location) {
    return (uint64_t{location} - 1) * kPackBytes;
  }
  // Whether num_bytes from there on lie in a heap.
  static constexpr bool fits(uint32_t location, uint64_t num_bytes, uint64_t heap_bytes) {
    return location == kStaged ||
           (num_bytes <= heap_bytes && heap_offset_bytes(location) <= heap_bytes - num_bytes);
  }
  static constexpr uint64_t both(uint32_t input, uint32_t output) {
    return uint64_t{output} << 32 | input;
  }
  static constexpr uint32_t input(uint64_t both) { return uint32_t(both); }
  static constexpr uint32_t output(uint64_t both) { return uint32_t(both >> 32); }
};

// The poison word: 0, or the failure that broke the group.
struct Poison {
  static constexpr uint64_t encode(uint32_t kind, int raiser, int rank, int channel,
                                   uint32_t epoch) {
    return uint64_t{kind & 0xff} | uint64_t(raiser & 0xff) << 8 | uint64_t(rank & 0xff) << 16 |
           uint64_t(channel & 0xff) << 24 | uint64_t{epoch} << 32;
  }
  static constexpr uint32_t kind(uint64_t word) { return uint32_t(word & 0xff); }
  static constexpr int raiser(uint64_t word) { return int(word >> 8 & 0xff); }
  static constexpr int rank(uint64_t word) { return int(word >> 16 & 0xff); }
  static constexpr int channel(uint64_t word) { return int(word >> 24 & 0xff); }
  static constexpr uint32_t epoch(uint64_t word) { return uint32_t(word >> 32); }
};

}  // namespace fastcoll
