// SPDX-License-Identifier: Apache-2.0
// Stamps: two ranks' stamps of a call differ when their plans differ, in this call or in any call
// before. The same numbers on the CPU and on a GPU.
#pragma once

#include <cstdint>

namespace fastcoll {

// splitmix64's finaliser: every input bit reaches every output bit.
constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Mixing in the previous stamp shows a difference on which no rank waited, in the next call that
// waits.
constexpr uint32_t next_stamp(uint32_t stamp, uint32_t plan_hash) {
  return uint32_t(mix64(uint64_t{stamp} << 32 | plan_hash));
}

}  // namespace fastcoll
