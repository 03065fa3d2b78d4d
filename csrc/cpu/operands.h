// SPDX-License-Identifier: Apache-2.0
// The operands of a call that are more than one message: parts, lists, strided tensors. Says which
// plans take them, and knows no protocol.
//
// A list of tensors is one message. Algorithms never see where its elements lie: they ask for
// stretches of it (Call::each_stretch), staging gathers from the tensors, and results are spread
// over them. So a list has the segments, the synchronisation and the bits of one tensor of its
// size. It is always staged: otherwise the arrival line would need a location for each tensor.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "cpu/strided.h"
#include "layout.h"
#include "plan.h"

namespace fastcoll {

// The bytes that one rank gives to another, or gets from it.
struct Part {
  std::byte* ptr;
  size_t num_bytes;
};

// By rank; a side on which this rank gives or gets nothing is not read.
struct Parts {
  std::array<Part, kMaxWorld> inputs, outputs;
};

// One tensor of a list, and the place of its result. The message is the tensors end to end. Where a
// side has a part for each rank, every tensor has one. A part of the message is then the tensors'
// parts end to end.
struct Piece {
  const std::byte* input;
  std::byte* output;
  size_t start;  // its first element, counted in a part
  size_t numel;  // its elements in a part, at least 1
};
using List = std::vector<Piece>;

// Whether a plan can be carried out for elements that lie apart: of several tensors, or of a
// strided one.
inline bool takes_lists(const Plan& plan) {
  if (plan.verb == Verb::all_gather) return plan.algorithm == Algorithm::direct;
  return (plan.verb == Verb::all_reduce || plan.verb == Verb::reduce_scatter) &&
         (plan.algorithm == Algorithm::one_shot || plan.algorithm == Algorithm::two_shot);
}
inline bool takes_strided(const Plan& plan) {
  if (plan.verb == Verb::broadcast) return plan.algorithm == Algorithm::direct;
  if (plan.verb != Verb::reduce) return takes_lists(plan);
  return plan.algorithm == Algorithm::one_shot || plan.algorithm == Algorithm::two_shot;
}

}  // namespace fastcoll
