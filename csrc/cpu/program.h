// SPDX-License-Identifier: Apache-2.0
// One rank's part of a schedule (python/fastcoll_model), as its compiled.py writes it: a list of
// 32-bit words. Read and checked here once, so that the executor need not look again. Knows no
// memory and no group.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "layout.h"

namespace fastcoll {

enum class StepKind : uint32_t { copy = 0, reduce = 1, signal = 2, wait = 3 };
enum class BufferKind : uint32_t { input = 0, output = 1, scratch = 2 };

// Blocks of one rank's buffer, from `block` on.
struct Place {
  int rank;
  BufferKind buffer;
  uint32_t block;
};

struct ProgramStep {
  StepKind kind;
  uint32_t num_blocks;   // copy, reduce
  uint32_t first_place;  // copy, reduce: the destination; the sources follow
  uint32_t num_sources;  // copy: 1
  int peer;              // wait: the awaited rank
  uint32_t count;        // signal: signals raised by now; wait: by the peer
};

struct ProgramBlocks {
  uint32_t unit;     // of one rank's part of the message
  uint32_t message;  // of the message
  uint32_t scratch;  // of a rank's scratch: those of the message, and perhaps more
};

class Program {
 public:
  // `words`: per step its kind, then copy: num_blocks, dst, src; reduce: num_blocks, dst, number of
  // sources, sources; signal: count; wait: rank, count. A place is rank << 2 | buffer, block.
  Program(int world_size, int rank, const ProgramBlocks& blocks, const std::vector<uint32_t>& words)
      : world_size_(world_size), rank_(rank), blocks_(blocks) {
    require(blocks.unit > 0 && blocks.message >= blocks.unit && blocks.message % blocks.unit == 0 &&
                blocks.scratch >= blocks.message && blocks.scratch <= kMostBlocks,
            "its blocks");
    words_ = &words;
    while (at_ < words.size()) read_step();
    words_ = nullptr;
  }

  const ProgramBlocks& blocks() const { return blocks_; }
  const std::vector<ProgramStep>& steps() const { return steps_; }
  const Place* places(const ProgramStep& step) const { return &places_[step.first_place]; }

  // A segment has at least a line of every block: kLeastSegmentBytes holds so many.
  static constexpr uint32_t kMostBlocks = 512;

 private:
  static void require(bool right, const char* what) {
    if (!right) throw Failure(ErrorKind::usage, std::string("a schedule's program: ") + what);
  }
  uint32_t next() {
    require(at_ < words_->size(), "it ends inside a step");
    return (*words_)[at_++];
  }

  void read_step() {
    const uint32_t kind = next();
    require(kind <= uint32_t(StepKind::wait), "an unknown kind of step");
    ProgramStep step{StepKind(kind), 0, uint32_t(places_.size()), 0, -1, 0};
    switch (step.kind) {
      case StepKind::copy:
      case StepKind::reduce:
        step.num_blocks = next();
        read_place(step.num_blocks);
        step.num_sources = step.kind == StepKind::copy ? 1 : next();
        require(step.num_sources >= 1 && step.num_sources <= uint32_t(world_size_),
                "a number of sources");
        for (uint32_t i = 0; i < step.num_sources; ++i) read_place(step.num_blocks);
        break;
      case StepKind::wait:
        step.peer = int(next());
        require(step.peer >= 0 && step.peer < world_size_ && step.peer != rank_, "a peer");
        [[fallthrough]];
      case StepKind::signal:
        step.count = next();
        require(step.count > 0 && step.count < kMostSignals, "a number of signals");
    }
    steps_.push_back(step);
  }

  void read_place(uint32_t num_blocks) {
    const uint32_t owner = next(), block = next();
    const Place place{int(owner >> 2), BufferKind(owner & 3), block};
    const uint32_t end = place.buffer == BufferKind::scratch ? blocks_.scratch : blocks_.message;
    require((owner & 3) <= uint32_t(BufferKind::scratch) && place.rank < world_size_ &&
                num_blocks > 0 && num_blocks <= end && block <= end - num_blocks,
            "a place outside the message");
    require(place.buffer == BufferKind::scratch || place.rank == rank_,
            "a place in another rank's input or output");
    places_.push_back(place);
  }

  int world_size_, rank_;
  ProgramBlocks blocks_;
  std::vector<ProgramStep> steps_;
  std::vector<Place> places_;
  const std::vector<uint32_t>* words_ = nullptr;  // while they are read
  size_t at_ = 0;
};

}  // namespace fastcoll
