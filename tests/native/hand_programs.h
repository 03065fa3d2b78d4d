// SPDX-License-Identifier: Apache-2.0
// A schedule by hand, for all_reduce: rank r pulls and adds everybody's chunk r, then pushes the
// sum into everybody's scratch. So ranks read and write each other's slots, under signals alone.
#pragma once

#include <vector>

#include "cpu/program.h"

inline fastcoll::Program pushing_program(int world_size, int rank) {
  const auto n = uint32_t(world_size), me = uint32_t(rank);
  const auto place = [](uint32_t owner, fastcoll::BufferKind buffer, uint32_t block) {
    return std::vector<uint32_t>{owner << 2 | uint32_t(buffer), block};
  };
  using enum fastcoll::BufferKind;
  std::vector<uint32_t> words;
  const auto put = [&](const std::vector<uint32_t>& more) {
    words.insert(words.end(), more.begin(), more.end());
  };
  const auto meet = [&](uint32_t count) {
    put({uint32_t(fastcoll::StepKind::signal), count});
    for (uint32_t peer = 0; peer < n; ++peer)
      if (peer != me) put({uint32_t(fastcoll::StepKind::wait), peer, count});
  };
  put({uint32_t(fastcoll::StepKind::copy), n});
  put(place(me, scratch, 0));
  put(place(me, input, 0));
  meet(1);
  put({uint32_t(fastcoll::StepKind::reduce), 1});
  put(place(me, scratch, me));
  put({n});
  for (uint32_t peer = 0; peer < n; ++peer) put(place(peer, scratch, me));
  for (uint32_t peer = 0; peer < n; ++peer) {
    if (peer == me) continue;
    put({uint32_t(fastcoll::StepKind::copy), 1});
    put(place(peer, scratch, me));
    put(place(me, scratch, me));
  }
  meet(2);
  put({uint32_t(fastcoll::StepKind::copy), n});
  put(place(me, output, 0));
  put(place(me, scratch, 0));
  return {world_size, rank, {n, n, n}, words};
}
