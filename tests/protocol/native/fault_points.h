// SPDX-License-Identifier: Apache-2.0
// Named points of the protocol at which a test delays, stops or kills a rank (fault_points.cpp,
// tests/faults/fault_points.py). The compiler includes this before every source file of an
// extension that is built for tests alone. There the policy by which shared words are written gets
// another definition. So neither the sources nor the shipped extension have any of it. The bugs of
// planted.h can be planted here, too.
#pragma once

#define StdAtomics PlainAtomics
#include "planted.h"
#undef StdAtomics

namespace fault_points {

// This rank is about to publish a word, or has just done so.
void before(const uint64_t& word);
void after(const uint64_t& word);

}  // namespace fault_points

namespace fastcoll {

struct StdAtomics : planted::Atomics {
  // Else copies past the caches, which are no points, would come and go with the machine's mood.
  static constexpr bool is_slow(uint64_t, uint64_t) { return false; }
  static void arrive(uint64_t& word, uint64_t value) {
    fault_points::before(word);
    planted::Atomics::arrive(word, value);
    fault_points::after(word);
  }
};

}  // namespace fastcoll
