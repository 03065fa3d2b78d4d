// SPDX-License-Identifier: Apache-2.0
// A multicast object: one address that stands for the same offset in every rank's region. Through
// it the switch adds the regions' values and stores into all of them. One rank makes the object and
// hands its descriptor to the others, over the same sockets as the regions'. Then every rank takes
// these steps, each when all ranks have taken the one before: add_device, bind, map. Binding or
// mapping earlier would block in the driver, perhaps for ever.
//
// A region that is bound to such an object is parked like one of cuda_ipc.h, until every peer has
// left. The switch keeps no memory, and a peer's kernel may still read the region through it.
#pragma once

#include <cstddef>

namespace fastcoll {

// num_bytes of every region must be a multiple of this; `least_bytes` is any size it may have.
size_t cuda_multicast_granularity(int world_size, size_t least_bytes);

class CudaMulticast {
 public:
  // fd < 0: make the object, for world_size devices that bind num_bytes each; else open it from its
  // descriptor, which stays the caller's.
  CudaMulticast(int device, int world_size, size_t num_bytes, int fd);
  ~CudaMulticast();
  CudaMulticast(const CudaMulticast&) = delete;
  CudaMulticast& operator=(const CudaMulticast&) = delete;

  int export_fd() const;  // the caller's to close
  void add_device();
  // Put this rank's region, which cuda_vmm_create made, behind the object's address.
  void bind(std::byte* region);
  // at: its place in reserved addresses; nullptr: anywhere.
  std::byte* map(std::byte* at = nullptr);

  // Unmap, unbind and release the object, as far as that was done; the region must still be there.
  // No kernel of any rank may use the object any more: a binding that its owner ends is gone for
  // all ranks. Idempotent.
  void close();

 private:
  const int device_;
  const int world_size_;
  const size_t num_bytes_;
  unsigned long long handle_ = 0;  // CUmemGenericAllocationHandle; 0: closed
  bool bound_ = false;
  bool is_placed_ = false;
  std::byte* ptr_ = nullptr;
};

}  // namespace fastcoll
