// SPDX-License-Identifier: Apache-2.0
// The byte layout of a rank's region, and the one source of offsets: pad | scratch.
//
// Every word has ONE writer: the rank whose region it lies in (the owner), unless its comment says
// otherwise. Peers only read. kernels/README.md tells the protocol of every word: its ordering, its
// reuse and its wrap. The pad belongs to the group, never to a tensor.
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

// Staging: 8 slots of 256 KiB, 2 MiB per rank whatever the message. More slots leave the L2 cache.
inline constexpr int kNumSlots = 8;
inline constexpr size_t kSlotBytes = size_t{256} << 10;

inline constexpr uint64_t kLayoutMagic = 0x66636f6c6c000001ULL;  // "fcoll", layout version 1

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
      uint64_t output;  // and where it wants its output
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

// What a rank says it is calling, for everybody to read while it is stuck. A sequence lock:
// `sequence` is 2 * call - 1 while the words change and 2 * call when they are whole.
struct alignas(128) Descriptor {
  static constexpr int kWords = 5;
  uint64_t sequence;
  uint64_t words[kWords];  // see describe.h
  uint64_t reserved[10];   // split hashes, tags and times of later verbs
};
static_assert(sizeof(Descriptor) == 128);
inline constexpr int kRingEntries = 64;

// Written once by the owner before its number goes into a poison word.
struct alignas(kLineBytes) VerdictPage {
  uint32_t kind;    // ErrorKind
  uint32_t length;  // bytes of text
  uint64_t ranks;   // bit set of the ranks at fault
  char text[2032];
};
static_assert(sizeof(VerdictPage) == 2048);

struct alignas(4096) Pad {
  ArriveLine arrive[kDepth];
  InlineLine inlined[kDepth][kInlineLines];
  Word staged;   // segments (or ring steps) published, see Group::progress; only grows
  Word reduced;  // the same for reduced segments
  Word done;     // segments consumed since the group began
  Word poison;   // 0, or 1 + the rank whose verdict holds; written by compare-exchange by any rank
  SleepLine sleep;
  Word ping;  // flag-time measurement only
  Descriptor ring[kRingEntries];
  VerdictPage verdict;
  uint64_t magic;
};

inline constexpr size_t kPadBytes = sizeof(Pad);
inline constexpr size_t kScratchOffsetBytes = kPadBytes;
inline constexpr size_t kScratchBytes = kNumSlots * kSlotBytes;
inline constexpr size_t kRegionBytes = kScratchOffsetBytes + kScratchBytes;
static_assert(kRegionBytes <= size_t{4} << 20,
              "staging memory per rank is promised to stay <= 4 MiB");
static_assert(kSlotBytes % (kMaxWorld * kLineBytes) == 0,
              "a slot holds a whole line for every rank");

// Where a tensor lies: 0 = in scratch (staged), else arena index + 1 (16 bits) | offset (48 bits).
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
};

}  // namespace fastcoll
