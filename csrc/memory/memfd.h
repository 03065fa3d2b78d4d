// SPDX-License-Identifier: Apache-2.0
// Shared memory without a name: create a memfd, open (map) it from its descriptor, close (unmap).
// Descriptors travel between processes by SCM_RIGHTS (python/fastcoll/bootstrap/rendezvous.py).
#pragma once

#include <cstddef>
#include <string>

namespace fastcoll {

// A new memfd of num_bytes zeroes, sealed so that no process can shrink it under another's feet
// (SIGBUS) or grow it. `name` shows in /proc/<pid>/maps only.
int memfd_create_sealed(const std::string& name, size_t num_bytes);

size_t memfd_bytes(int fd);

// Map all of it, read and write. Refuses a descriptor of another size or one that is not sealed.
// Not inherited by forked children (MADV_DONTFORK): a DataLoader worker must not keep or touch it.
std::byte* memfd_open(int fd, size_t num_bytes);
void memfd_close(std::byte* ptr, size_t num_bytes);

}  // namespace fastcoll
