// SPDX-License-Identifier: Apache-2.0
#include "group/first_touch.h"

#include <unistd.h>

#include "cpu/pair_channel.h"
#include "memory/memfd.h"

namespace fastcoll {

namespace {

// Every page of the pad, and of the scratch the first page of each place of a small message.
template <class Touch>
void each_small_page(const Touch& touch) {
  constexpr size_t kPageBytes = 4096;  // the least that a kernel has
  for (size_t at = 0; at < kPadBytes; at += kPageBytes) touch(at);
  for (size_t at = 0; at < kScratchBytes; at += kLeastPlaceBytes) touch(kScratchOffsetBytes + at);
}

}  // namespace

int create_region(int world_size) {
  const int fd = memfd_create_sealed("fastcoll-region", mapped_bytes(world_size));
  const std::byte zero{0};
  // By a write, as a mapping would be of use to nobody else. A page that the kernel refuses here is
  // asked for again by the call that needs it.
  if (world_size > 1) each_small_page([&](size_t at) { (void)!pwrite(fd, &zero, 1, off_t(at)); });
  return fd;
}

void map_touched(const std::byte* region) {
  // A peer may already write there, so the load is an atomic one, and its value of no interest.
  each_small_page([&](size_t at) {
    (void)__atomic_load_n(reinterpret_cast<const unsigned char*>(region) + at, __ATOMIC_RELAXED);
  });
}

}  // namespace fastcoll
