// SPDX-License-Identifier: Apache-2.0
// Sends and receives between the ranks of a lone_world.h.
#pragma once

#include "lone_world.h"
#include "transfer_of.h"

namespace lone {

// A send or a receive, and its memory.
struct Posted {
  std::shared_ptr<Transfer> transfer = std::make_shared<Transfer>();
  std::vector<std::byte> data;
};

class Pairs {
 public:
  explicit Pairs(int size, const std::function<void(GroupOptions&)>& change = {})
      : world(size, change) {
    for (int rank = 0; rank < size; ++rank)
      engines_.push_back(std::make_unique<PointToPoint<P>>(world.group(rank)));
  }
  PointToPoint<P>& engine(int rank) { return *engines_[size_t(rank)]; }
  Posted send(int rank, int peer, size_t num_bytes, uint32_t tag = 5, int value = 1) {
    return make(rank, peer, num_bytes, tag, true, value);
  }
  Posted receive(int rank, int peer, size_t num_bytes, uint32_t tag = 5) {
    return make(rank, peer, num_bytes, tag, false, 0);
  }
  bool look(int rank, const Posted& message) { return engine(rank).look(*message.transfer); }
  // Starts a transfer with tag 5 that a thread may drive, or that moves by looks.
  std::shared_ptr<Transfer> start(int rank, std::vector<std::byte>& data, bool sends) {
    auto one = transfer_of(sends, 1 - rank, DType::int32, data);
    one->tag = 5;
    engine(rank).start({&one, 1}, world.host(rank));
    return one;
  }
  Seen wait(int rank, const Posted& message) {
    return error_of([&] { engine(rank).wait(*message.transfer, world.host(rank), 0); });
  }
  World world;

 private:
  Posted make(int rank, int peer, size_t num_bytes, uint32_t tag, bool sends, int value) {
    Posted message;
    message.data.assign(num_bytes, std::byte(value));
    message.transfer = transfer_of(sends, peer, DType::int32, message.data, kLimitS);
    message.transfer->tag = tag;
    message.transfer->site = world.host(rank).site;
    engine(rank).post(message.transfer, world.host(rank));
    return message;
  }
  std::vector<std::unique_ptr<PointToPoint<P>>> engines_;
};

// The channel in a rank's region for a peer.
inline PairChannel& channel_of(Pairs& pairs, int rank, int peer) {
  const auto& options = pairs.world.group(0).options();
  return pair_channel(options.regions[size_t(rank)], peer, options.world_size);
}

inline void require_message(const Posted& message, int value) {
  require(message.transfer->done && !message.transfer->error, "a message that has come");
  require(std::all_of(message.data.begin(), message.data.end(),
                      [&](std::byte byte) { return byte == std::byte(value); }),
          "the bytes of a message");
}

}  // namespace lone
