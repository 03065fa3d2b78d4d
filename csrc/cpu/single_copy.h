// SPDX-License-Identifier: Apache-2.0
// single_copy: direct, but a message in private memory is not staged. Each getter copies it out of
// its owner's process (process_vm_readv, where the kernel lets ranks do that). The owner waits
// until all have copied. Ranks only read. A write into a peer that has given up a call could hit
// memory that it uses otherwise by now.
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "cpu/group.h"

namespace fastcoll {

// Whether every rank can read every rank's memory, found out by doing it: errno by rank, 0 where
// that rank could. Collective, before the first call. A rank that declines publishes ECANCELED.
template <class P>
std::array<int, kMaxWorld> Group<P>::try_single_copy(bool is_wanted, Host& host) {
  host_ = &host;
  timeout_s_ = limit_s();
  std::array<uint64_t, 8> sample, got;
  const auto address = uint64_t(uintptr_t(sample.data()));
  for (size_t i = 0; i < sample.size(); ++i) sample[i] = mix64(address + i);
  signal(me_->sample, address);
  int error = is_wanted ? 0 : ECANCELED;
  for (int peer = 0; peer < world_size() && error == 0; ++peer) {
    if (peer == rank()) continue;
    wait(peer, {&pad(peer).sample.value, 1, false});
    const uint64_t theirs = P::load_relaxed(pad(peer).sample.value);
    error = read_process(options_.links[size_t(peer)].pid, theirs, got.data(), sizeof got);
    for (size_t i = 0; i < got.size() && error == 0; ++i)
      if (got[i] != mix64(theirs + i)) error = ESRCH;  // the number is another process's here
  }
  signal(me_->single_copy, uint64_t(error) + 1);
  std::array<int, kMaxWorld> errors{};
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) wait(peer, {&pad(peer).single_copy.value, 1, false});
    errors[size_t(peer)] = int(P::load_relaxed(pad(peer).single_copy.value) - 1);
  }
  return errors;
}

// Copy bytes that a peer published as private. Throws the group's verdict if that fails. name():
// the operation's name, for the error.
template <class P, class Name>
void read_private(Group<P>& group, int peer, uint64_t address, void* dst, size_t num_bytes,
                  const Name& name) {
  const PeerLink& link = group.options().links[size_t(peer)];
  if (link.pid == group.options().links[size_t(group.rank())].pid) {  // ranks that are threads
    std::memcpy(dst, reinterpret_cast<const void*>(uintptr_t(address)), num_bytes);
  } else if (const int error = read_process(link.pid, address, dst, num_bytes, link.memory)) {
    const bool is_gone = error == ESRCH || peer_is_gone(link);
    group.fail(is_gone ? ErrorKind::peer_lost : ErrorKind::driver,
               name() + " could not copy " + std::to_string(num_bytes) +
                   " bytes from the memory of rank " + std::to_string(peer) + " (process " +
                   std::to_string(link.pid) + "): " +
                   (is_gone ? fate(link)
                            : std::strerror(error) +
                                  std::string(". FASTCOLL_SINGLE_COPY=never goes without")),
               uint64_t{1} << peer);
  }
  if (!P::kLooksAfterCopies) return;
  // An owner that gives up sets the verdict before its memory is used otherwise. The process number
  // of a lost owner may belong to another process by now.
  group.check();
  if (peer_is_gone(link))
    group.fail(ErrorKind::peer_lost,
               name() + " lost rank " + std::to_string(peer) + ": process " +
                   std::to_string(link.pid) + " " + fate(link),
               uint64_t{1} << peer);
}

}  // namespace fastcoll
