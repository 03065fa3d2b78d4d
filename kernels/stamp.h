// SPDX-License-Identifier: Apache-2.0
// Stamps: what makes two ranks' calls look different when their plans, or the plans of any call
// before, are. The same numbers on the CPU and on a GPU.
#pragma once

#include <cstdint>

namespace fastcoll {

// splitmix64's finaliser: every input bit reaches every output bit.
constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Mixing in the previous stamp shows, in the next call that waits, a difference nobody waited on.
constexpr uint32_t next_stamp(uint32_t stamp, uint32_t plan_hash) {
  return uint32_t(mix64(uint64_t{stamp} << 32 | plan_hash));
}

}  // namespace fastcoll
