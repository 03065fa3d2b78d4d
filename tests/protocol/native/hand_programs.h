// SPDX-License-Identifier: Apache-2.0
// Schedules by hand, of one rank each. In that of all_reduce, ranks read and write each other's
// slots, under signals alone. In those with a root, some ranks wait for no rank: their claim
// of a segment holds them back.
#pragma once

#include <vector>

#include "cpu/program.h"
#include "dtypes.h"

class ProgramWords {
 public:
  explicit ProgramWords(int rank) : rank_(uint32_t(rank)) {}

  using Buffer = fastcoll::BufferKind;
  using Step = fastcoll::StepKind;
  void place(uint32_t owner, Buffer buffer, uint32_t block) {
    put({owner << 2 | uint32_t(buffer), block});
  }
  // Within this rank's memory.
  void copy(uint32_t num_blocks, Buffer to, uint32_t to_block, Buffer from, uint32_t from_block) {
    put({uint32_t(Step::copy), num_blocks});
    place(rank_, to, to_block);
    place(rank_, from, from_block);
  }
  void copy_block(uint32_t to_rank, Buffer to, uint32_t to_block, uint32_t from_rank,
                  uint32_t from_block) {
    put({uint32_t(Step::copy), 1});
    place(to_rank, to, to_block);
    place(from_rank, Buffer::scratch, from_block);
  }
  // Each rank's block in scratch.
  void reduce(Buffer to, uint32_t to_block, uint32_t world, uint32_t block) {
    put({uint32_t(Step::reduce), 1});
    place(rank_, to, to_block);
    put({world});
    for (uint32_t peer = 0; peer < world; ++peer) place(peer, Buffer::scratch, block);
  }
  void signal(uint32_t count) { put({uint32_t(Step::signal), count}); }
  void wait(uint32_t peer, uint32_t count) {
    if (peer != rank_) put({uint32_t(Step::wait), peer, count});
  }
  const std::vector<uint32_t>& words() const { return words_; }

 private:
  void put(const std::vector<uint32_t>& more) {
    words_.insert(words_.end(), more.begin(), more.end());
  }
  const uint32_t rank_;
  std::vector<uint32_t> words_;
};

// Rank r pulls and adds chunk r of all ranks, then pushes the sum into the scratch of all.
inline fastcoll::Program pushing_program(int world_size, int rank) {
  using enum fastcoll::BufferKind;
  const auto n = uint32_t(world_size), me = uint32_t(rank);
  ProgramWords words(rank);
  const auto meet = [&](uint32_t count) {
    words.signal(count);
    for (uint32_t peer = 0; peer < n; ++peer) words.wait(peer, count);
  };
  words.copy(n, scratch, 0, input, 0);
  meet(1);
  words.reduce(scratch, me, n, me);
  for (uint32_t peer = 0; peer < n; ++peer)
    if (peer != me) words.copy_block(peer, scratch, me, me, me);
  meet(2);
  words.copy(n, output, 0, scratch, 0);
  return {world_size, rank, {n, n, n}, words.words()};
}

// A rank that gives copies its input to scratch and signals; a rank that gets waits and pulls.
inline fastcoll::Program rooted_program(fastcoll::Verb verb, int world_size, int rank, int root) {
  using enum fastcoll::BufferKind;
  using fastcoll::Verb;
  const auto n = uint32_t(world_size), me = uint32_t(rank), top = uint32_t(root);
  const bool splits = verb == Verb::scatter, joins = verb == Verb::gather;
  const bool from_root = verb == Verb::broadcast || splits;
  const uint32_t num_blocks = splits || joins ? n : 1;
  ProgramWords words(rank);
  if (from_root ? me == top : me != top || verb == Verb::reduce) {
    words.copy(splits ? n : 1, scratch, 0, input, 0);
    words.signal(1);
  }
  if (from_root && me != top) {
    words.wait(top, 1);
    words.copy_block(me, output, 0, top, splits ? me : 0);
  } else if (!from_root && me == top) {
    for (uint32_t peer = 0; peer < n; ++peer) words.wait(peer, 1);
    for (uint32_t peer = 0; joins && peer < n; ++peer)
      if (peer != me) words.copy_block(me, output, peer, peer, 0);
    if (!joins) words.reduce(output, 0, n, 0);
  }
  if (me == top && (splits || joins)) words.copy(1, output, joins ? me : 0, input, splits ? me : 0);
  return {world_size, rank, {1, num_blocks, num_blocks}, words.words()};
}

inline fastcoll::Program program_of(fastcoll::Verb verb, int world_size, int rank, int root) {
  return fastcoll::verb_has_root(verb) ? rooted_program(verb, world_size, rank, root)
                                       : pushing_program(world_size, rank);
}
