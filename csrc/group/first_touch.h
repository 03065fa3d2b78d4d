// SPDX-License-Identifier: Apache-2.0
// The pages of a region that small calls use are taken from the kernel while a group is made. Else
// each of its first 256 small calls takes a fault per rank (2 KiB on two ranks: 11 us, not 3).
//
// The owner touches them, before a peer has the descriptor: so the kernel puts them on the owner's
// NUMA node. It writes there, and its peers read; two ranks also write each other's (slots.h).
// Larger messages soon touch all pages by themselves, and a group that makes none is spared their
// memory.
#pragma once

#include <cstddef>

namespace fastcoll {

// A descriptor of this rank's new pad, scratch and channels; the caller's to close.
int create_region(int world_size);

// Enter the pages that a region's owner has touched into this process's table of pages.
void map_touched(const std::byte* region);

}  // namespace fastcoll
