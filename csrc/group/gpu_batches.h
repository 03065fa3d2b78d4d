// SPDX-License-Identifier: Apache-2.0
// Which sends and receives of a batch share a kernel on a GPU. Decides the kernels and their order,
// which both ends of every transfer must see alike. Pure: knows no device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace fastcoll {

// A transfer of this rank, as far as the kernels depend on it.
struct TransferPair {
  bool sends;
  int peer;
  auto operator<=>(const TransferPair&) const = default;
};

// The places of each kernel's transfers in the batch, in the order in which the kernels run.
//
// A kernel has each peer and direction at most once, and no more blocks than may be resident. The
// order is first by the number of a transfer within its pair, which is equal on both sides. Next it
// is by the distance from sender to receiver, a few distances in each kernel. Every rank has one
// send and one receive of a distance. So all ranks come to the kernels of a distance together, and
// none waits for another one's later kernel.
//
// channels: thread blocks that may be resident. blocks: of one transfer, at most half of them.
inline std::vector<std::vector<size_t>> transfer_kernels(const std::vector<TransferPair>& pairs,
                                                         int rank, int world_size, int channels,
                                                         int blocks) {
  const int distances = std::max(1, channels / (2 * blocks));
  std::map<TransferPair, int> seen;
  std::map<std::pair<int, int>, std::vector<size_t>> grouped;
  for (size_t i = 0; i < pairs.size(); ++i) {
    const TransferPair& pair = pairs[i];
    const int ahead = pair.sends ? pair.peer - rank : rank - pair.peer;
    const int distance = (ahead + world_size) % world_size;
    grouped[{seen[pair]++, distance / distances}].push_back(i);
  }
  std::vector<std::vector<size_t>> kernels;
  for (auto& [key, transfers] : grouped) kernels.push_back(std::move(transfers));
  return kernels;
}

}  // namespace fastcoll
