// SPDX-License-Identifier: Apache-2.0
// The kernels that measure one step. They must have done the work that they report, whatever else
// runs. A wait for a peer that never answers must end, and a mapping of other memory must show.
#pragma once

#include <cstdio>

#include "cuda/gauge.cuh"
#include "draw.h"

namespace fastcoll::sim {

struct Gauged {
  uint64_t answer[kGaugeAnswers];
};

// Regions as far as these kernels go, and the two ranks that measure.
class Gauging {
 public:
  static constexpr size_t kOffset = kGpuScratchOffsetBytes + 4 * kLineBytes;
  static constexpr size_t kMostBytes = 4096;
  static constexpr uint64_t kLimitNs = 100000000;

  // astray: the first rank's mapping of the other region is memory of no rank.
  Gauging(Random& random, bool astray)
      : random_(random), world_(2 + int(pick(random, kMaxGpuWorld - 1))), astray_(astray) {
    regions_.assign(size_t(world_) + 1, Region((kOffset + kMostBytes) / kPackBytes + 1));
    one_ = int(pick(random, uint64_t(world_)));
    other_ = (one_ + 1 + int(pick(random, uint64_t(world_) - 1))) % world_;
  }

  // The answers of both; is_late: the other one never runs.
  std::vector<Gauged> go(void (*kernel)(const GaugeCall&), uint32_t rounds, bool is_late) {
    std::vector<Gauged> answers(2, Gauged{});
    Simulator simulator(world_, Schedule::uniform, random_());
    const uint64_t token = random_();
    for (int which = 0; which < (is_late ? 1 : 2); ++which) {
      GaugeCall call = call_of(which == 0 ? one_ : other_, which == 0 ? other_ : one_);
      call.token = token;
      call.answer = answers[size_t(which)].answer;
      call.rounds = rounds;
      simulator.enqueue(call.rank, {1, 1, [=] { kernel(call); }});
    }
    if (!simulator.run()) std::exit(1);
    return answers;
  }

  // Whether bytes get from one side to the other, and nothing beside them is written.
  bool copies(bool puts) {
    const size_t num_bytes = 1 + pick(random_, kMostBytes - kPackBytes);
    std::vector<Pack> local(kMostBytes / kPackBytes);
    auto* mine = reinterpret_cast<std::byte*>(local.data());
    std::byte* theirs = region(other_) + kOffset;
    std::byte *from = puts ? mine : theirs, *to = puts ? theirs : mine;
    for (size_t i = 0; i < kMostBytes; ++i) from[i] = std::byte(1 + random_() % 255);
    std::memset(to, 0, kMostBytes);
    GaugeCall call = call_of(one_, other_);
    call.local = mine;
    call.offset_bytes = kOffset;
    call.num_bytes = num_bytes;
    Simulator simulator(world_, Schedule::uniform, random_());
    const int blocks = 1 + int(pick(random_, 4)), threads = 1 + int(pick(random_, 8));
    simulator.enqueue(one_, {blocks, threads, [=] { puts ? gauge_put(call) : gauge_get(call); }});
    if (!simulator.run()) std::exit(1);
    for (size_t i = 0; i < kMostBytes; ++i)
      if (to[i] != (i < num_bytes ? from[i] : std::byte{0})) return false;
    return true;
  }

 private:
  using Region = std::vector<Pack>;
  std::byte* region(int rank) {
    return reinterpret_cast<std::byte*>(regions_[size_t(rank)].data());
  }
  GaugeCall call_of(int rank, int peer) {
    GaugeCall call{};
    for (int of = 0; of < world_; ++of)
      call.regions[of] = region(astray_ && rank == one_ && of == other_ ? world_ : of);
    call.limit_ns = kLimitNs;
    call.rank = rank;
    call.peer = peer;
    return call;
  }

  Random& random_;
  const int world_;
  const bool astray_;
  int one_, other_;
  std::vector<Region> regions_;
};

inline int run_gauges(uint64_t num_seeds, bool astray) {
  return check_seeds(num_seeds, [&](Random& random, uint64_t) {
    Gauging gauging(random, astray);
    const auto rounds = uint32_t(1 + pick(random, 20));
    bool as_expected = gauging.copies(true) && gauging.copies(false);
    for (const auto kernel : {gauge_signal, gauge_ll_pack}) {
      for (const Gauged& one : gauging.go(kernel, rounds, false))
        as_expected = as_expected && one.answer[kGaugeRounds] == rounds &&
                      (rounds == 1 || one.answer[kGaugeNs] > 0);
      as_expected = as_expected && gauging.go(kernel, rounds, true)[0].answer[kGaugeRounds] == 0;
    }
    return as_expected;
  });
}

}  // namespace fastcoll::sim
