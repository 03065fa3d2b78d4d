// SPDX-License-Identifier: Apache-2.0
// The arguments and answers of a kernel that measures one step; see cuda/gauge.cuh. For the host,
// too.
#pragma once

#include "layout.h"

namespace fastcoll {

// signal, ll_pack: there and back again, many times. put, get: packs into the peer's region, or out
// of it.
enum class Gauge { signal, ll_pack, put, get };

// The answer of signal and ll_pack: the rounds that came to their end, and a time. It runs from the
// end of the first round to that of the last.
inline constexpr int kGaugeRounds = 0, kGaugeNs = 1, kGaugeAnswers = 2;

// Of copy_tile(), which counts in 32 bits: far from where they wrap.
inline constexpr uint64_t kMostTileBytes = uint64_t{2} << 30;

struct GaugeCall {
  std::byte* regions[kMaxGpuWorld];  // every rank's region as mapped here
  std::byte* local;                  // put, get: this rank's memory
  uint64_t offset_bytes;             // and where in a region the peer's lies
  uint64_t num_bytes;
  uint64_t token;    // signal, ll_pack: the same on both ranks, and another one each time, so that
                     // no earlier word can be taken for this one's
  uint64_t* answer;  // out: this rank's, kGaugeAnswers words
  uint64_t limit_ns;
  uint32_t rounds;
  int32_t rank, peer;
};

}  // namespace fastcoll
