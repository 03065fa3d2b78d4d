// SPDX-License-Identifier: Apache-2.0
// The shared memory of sends and receives: one channel for every ordered pair of ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace fastcoll {

// Point-to-point, behind the region in the same memfd. For each peer: the owner's messages to it,
// and marks of those taken from it. A pair that never talks takes no memory: pages come when
// touched.
struct alignas(4 * kLineBytes) Message {  // offered by the owner; `number` is stored last
  static constexpr size_t kPayloadBytes = 224;
  uint64_t number;  // of the pair's messages, from 1; 0: never used
  uint64_t numel;
  uint64_t tag_and_dtype;  // tag (32) | dtype (8) | kWaited if its sender is about to wait for it
  static constexpr uint64_t kWaited = uint64_t{1} << 40;
  // The place of its bytes. In a bay it is an offset in the bays of the sender, or of the receiver.
  // A large message that the receiver may copy has its address in the sender's process. 0: the
  // bytes lie in `payload`, or come in chunks.
  uint64_t location;
  static constexpr uint64_t kInBay = uint64_t{1} << 62, kInPeersBay = uint64_t{1} << 63;
  std::byte payload[kPayloadBytes];  // all of a small message
};
static_assert(sizeof(Message) == 256);

struct alignas(4096) PairChannel {
  static constexpr int kMessages = 32;  // offered at once; more wait with their sender
  static constexpr int kChunks = 16;    // in flight: many, as ranks that share a CPU take turns
  static constexpr size_t kChunkBytes = size_t{32} << 10;
  static constexpr int kUsualPlaces = 8;  // taken by turns; the others once those are in use
  static constexpr int kBays = 8;
  static constexpr size_t kBayBytes = size_t{64} << 10;  // of a message in a bay, at most
  // Chunks take a span by turns, and bays another one. A line that the receiver's cache still holds
  // takes long to write again. On a Zen 4 64 KiB take 9 us, and 2 us after 2 MiB of others.
  static constexpr size_t kMostSpanBytes = size_t{2} << 20, kLeastSpanBytes = kMostSpanBytes / 4;
  // In larger groups a rank writes to more peers in between, so a pair takes less.
  static constexpr size_t span_bytes(int world_size) {
    return kMostSpanBytes >> (world_size > 4) >> (world_size > 8);
  }
  static_assert(kLeastSpanBytes >= kChunks * kChunkBytes && kLeastSpanBytes >= kBays * kBayBytes);
  // Written by the owner as sender, for the peer.
  Word offered;  // messages offered so far
  Word sent;     // chunks sent so far
  Message messages[kMessages];
  // Written by the owner as receiver, from the peer.
  Word granted;                           // number of the message whose chunks shall come now
  Word received;                          // chunks received so far
  alignas(64) uint64_t taken[kMessages];  // number of the message last taken from each place, and
  static constexpr uint64_t kKept = uint64_t{1} << 63;  // whether the receiver keeps its bay
  SiteText sites[kMessages];  // where the program sent each message; only in a group that traces
};
// Behind a channel lie the spans of its bays (p2p_bays.h) and of its chunks.
constexpr size_t channel_bytes(int world_size) {
  return sizeof(PairChannel) + 2 * PairChannel::span_bytes(world_size);
}
inline PairChannel& pair_channel(std::byte* region, int peer, int world_size) {
  return *reinterpret_cast<PairChannel*>(region + kRegionBytes +
                                         size_t(peer) * channel_bytes(world_size));
}
constexpr size_t mapped_bytes(int world_size) {
  return kRegionBytes + size_t(world_size) * channel_bytes(world_size);
}

}  // namespace fastcoll
