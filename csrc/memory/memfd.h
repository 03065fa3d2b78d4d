// SPDX-License-Identifier: Apache-2.0
// Shared memory without a name: create a memfd, open (map) it from its descriptor, close (unmap).
// Descriptors travel between processes by SCM_RIGHTS (python/fastcoll/bootstrap/rendezvous.py).
//
// A memfd has no name: nothing leaks, and no limit of /dev/shm applies. A huge page per arena was
// tried: a little quicker, as memory is the limit, and slow to make.
//
// memfd_make_private protects a shrunk group. A stopped rank may wake up in the middle of a copy
// into its peers' symmetric tensors. So when a broken group is closed, these become private memory
// with the same bytes at the same address. In the new group they are ordinary tensors, and staged.
// Moving the symmetric heap instead would need all ranks to agree on its state in the middle of a
// failure.
#pragma once

#include <cstddef>
#include <string>

namespace fastcoll {

// A new memfd of num_bytes zeroes, sealed so that no process can shrink it under another's feet
// (SIGBUS) or grow it. `name` shows in /proc/<pid>/maps only.
int memfd_create_sealed(const std::string& name, size_t num_bytes);

size_t memfd_bytes(int fd);

// Map the first num_bytes, read and write. Refuses a descriptor of less or one that is not sealed.
// Not inherited by forked children (MADV_DONTFORK): a DataLoader worker must not keep or touch it.
std::byte* memfd_open(int fd, size_t num_bytes);
// The same to read only, for readers outside the group.
const std::byte* memfd_view(int fd, size_t num_bytes);
void memfd_close(const std::byte* ptr, size_t num_bytes);

// Put private memory with the same bytes in the place of a mapping of all of `fd`. Other processes
// that map `fd` can then no longer change these bytes. False if there is no memory for it.
bool memfd_make_private(int fd, std::byte* ptr, size_t num_bytes);

}  // namespace fastcoll
