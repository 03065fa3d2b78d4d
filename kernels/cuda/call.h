// SPDX-License-Identifier: Apache-2.0
// One call as a kernel gets it, and a kernel's verdict when the call fails. Plain data, for the
// host, the device and the simulator.
#pragma once

#include "dtypes.h"
#include "layout.h"

namespace fastcoll {

static_assert(sizeof(GpuPad) + 2 * kChannelsHalfBytes <= size_t{16} << 20, "see layout.h");
static_assert(kMaxGpuWorld <= 256, "a rank has 8 bits in a poison word");

// The numbers are those of ErrorKind (csrc/check.h).
enum class DeviceError : uint32_t { none = 0, usage = 1, timeout = 3, desync = 4, peer_lost = 5 };

// The word that a thread waited for, or the mistake that it found.
enum class Phase : uint32_t {
  previous_call,  // the arrival of a peer in the call before this one
  arrival,        // its arrival in this call
  progress,       // its progress in this call
  exit,           // the end of its part, before a symmetric tensor is its owner's again
  count,          // it arrived, but the counts of an all_to_all differ
  place,          // it arrived, but its tensor would lie outside of its region
  turn,           // this rank itself is in another call already
};
inline constexpr const char* kPhaseNames[] = {"previous call", "arrival", "progress", "exit",
                                              "count",         "place",   "turn"};

// The kernels' finding. `kind` is stored last. Later verdicts of the same group are not recorded.
struct DeviceVerdict {
  uint32_t kind;   // DeviceError
  int32_t raiser;  // the rank that found it; if it is another one, the fields below `epoch` are 0
  int32_t rank;    // the peer at fault
  uint32_t channel;
  uint32_t epoch;  // of the channel: the low half of its call count
  uint32_t expected_stamp, seen_stamp;
  uint32_t phase;  // Phase
};

// One for each rank, zeroed, in host memory that the device reads and writes.
struct HostWords {
  DeviceVerdict verdict;
  alignas(kLineBytes) uint64_t abort;  // written by the host: 0, or the reason to stop waiting
  // Written by the kernels, by peer: the slot of the last call that waited long for it; 0: none
  // did.
  alignas(kLineBytes) uint64_t late[kMaxGpuWorld];

  // The abort of a rank whose host has lost `peer`, in the lost rank's name. Kernels pass their own
  // findings on to all ranks, and the memory of a lost one may be gone.
  static constexpr uint64_t lost(int peer) {
    return Poison::encode(uint32_t(DeviceError::peer_lost), peer, peer, 0, 0);
  }
};

// Memory of all ranks and the one address of the switch's that means all of it; or nullptr.
struct SwitchMemory {
  std::byte* multicast;
  std::byte* const* regions;
  int32_t world_size;
};

// The types that the switch reduces: half a word or more of floats, whole words of integers.
constexpr bool switch_reduces_integers(DType dtype) {
  return dtype == DType::int32 || dtype == DType::uint32 || dtype == DType::int64 ||
         dtype == DType::uint64;
}
constexpr bool switch_reduces(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16 ||
         switch_reduces_integers(dtype);
}

// All calls of a group share these fields.
struct GroupCall {
  std::byte* regions[kMaxGpuWorld];  // every rank's region as mapped here
  std::byte* heaps[kMaxGpuWorld];    // and every rank's symmetric tensors
  std::byte* multicast;              // all regions at once, for multimem; else nullptr
  std::byte* heap_multicast;         // all heaps at once, likewise
  HostWords* host;
  uint64_t limit_ns;    // of every single wait
  uint64_t report_ns;   // after so long a wait the host is told for which rank
  uint64_t heap_bytes;  // of every heap
  GpuLayout layout;     // of every region
  int32_t rank, world_size;
};

// By value, as `const __grid_constant__ DeviceCall`. Every kernel of a collective has this
// argument.
struct DeviceCall : GroupCall {
  const std::byte* input;  // this rank's own pointers, private or in its region; any
  std::byte* output;       // alignment; equal or disjoint, as each verb allows
  uint64_t numel;  // the plan's: of a chunk where a verb has one per rank, else of the message.
                   // Complex numbers count as two floats.
  uint32_t input_location, output_location;  // GpuLocation: of the pointers above
  uint32_t tile_bytes;                       // see LaunchShape
  uint32_t plan_hash;                        // of everything that must be equal on all ranks,
                                             // tile_bytes and the grid included
  int32_t root;
  Op op;
  Verb verb;
  DType dtype;          // of the kernel: float32 for complex64
  uint32_t elem_bytes;  // of dtype
  bool counted;         // all_to_all, all_gather: parts of any size, in `counts`
  // Whether the parts of a side lie apart, not end to end: then they are below, by rank. `input` or
  // `output` is nullptr, and staged. Only kernels of takes_parts_apart have such calls.
  bool input_apart, output_apart;
  // Elements sent to each rank, then those received from each. Here, not behind a pointer, so that
  // a captured graph keeps them.
  uint64_t counts[2 * kMaxGpuWorld];
  const std::byte* input_parts[kMaxGpuWorld];  // for each rank
  std::byte* output_parts[kMaxGpuWorld];       // from each rank
};
static_assert(sizeof(DeviceCall) <= 4096, "a kernel's arguments have 4 KiB on older drivers");

// The others need all parts of a side end to end.
constexpr bool takes_parts_apart(Algorithm algorithm) {
  return algorithm == Algorithm::direct || algorithm == Algorithm::one_shot ||
         algorithm == Algorithm::ring;
}

// Transfers of one kernel: no fewer than its blocks serve (csrc/group/gpu_batches.h).
inline constexpr int kMaxPairs = 32;
static_assert(kMaxPairs >= kMaxChannels / kPairChannels);

// One send or receive.
struct PairPart {
  std::byte* data;
  uint64_t numel;
  uint32_t location;    // GpuLocation of the data
  uint32_t tile_bytes;  // see LaunchShape
  uint32_t plan_hash;   // of everything that must be equal on both sides
  uint32_t elem_bytes;
  uint32_t channels;  // blocks that move data, up to kPairChannels
  int32_t peer;
  Verb verb;
  DType dtype;
};

// Sends and receives for one kernel, each pair and direction at most once. kPairChannels blocks
// for each. All of it is the kernel's argument: memory of the device would be overwritten by the
// replay of a captured graph beside another batch.
struct PairCall {
  GroupCall common;
  PairPart parts[kMaxPairs];
};
static_assert(sizeof(PairCall) <= 4096);

}  // namespace fastcoll
