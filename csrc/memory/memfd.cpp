// SPDX-License-Identifier: Apache-2.0
#include "memory/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

namespace fastcoll {

int memfd_create_sealed(const std::string& name, size_t num_bytes) {
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const std::string bytes = std::to_string(num_bytes) + " bytes";
  if (fd < 0) throw_system("memfd_create for " + bytes);
  const bool is_sized = ftruncate(fd, off_t(num_bytes)) == 0;
  if (!is_sized || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    if (is_sized) throw_system("fcntl(F_ADD_SEALS) of a memfd of " + bytes);
    throw_system("ftruncate of a memfd to " + bytes);
  }
  return fd;
}

size_t memfd_bytes(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw_system("fstat of a region's descriptor");
  return size_t(status.st_size);
}

namespace {

std::byte* map(int fd, size_t num_bytes, int protection) {
  const size_t found_bytes = memfd_bytes(fd);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (found_bytes < num_bytes || seals < 0 || !(seals & F_SEAL_SHRINK))
    throw Failure(ErrorKind::driver, "a peer's region has " + std::to_string(found_bytes) +
                                         " bytes where " + std::to_string(num_bytes) +
                                         " were expected, or is not sealed: do all ranks run the "
                                         "same version of fastcoll?");
  void* ptr = mmap(nullptr, num_bytes, protection, MAP_SHARED, fd, 0);
  if (ptr == MAP_FAILED)
    throw_system("mapping " + std::to_string(num_bytes) + " bytes of shared memory");
  madvise(ptr, num_bytes, MADV_DONTFORK);
  return static_cast<std::byte*>(ptr);
}

}  // namespace

std::byte* memfd_open(int fd, size_t num_bytes) {
  return map(fd, num_bytes, PROT_READ | PROT_WRITE);
}

const std::byte* memfd_view(int fd, size_t num_bytes) { return map(fd, num_bytes, PROT_READ); }

void memfd_close(const std::byte* ptr, size_t num_bytes) {
  if (ptr) munmap(const_cast<std::byte*>(ptr), num_bytes);
}

bool memfd_make_private(int fd, std::byte* ptr, size_t num_bytes) {
  void* copy = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (copy == MAP_FAILED) return false;
  // Only the pages that were ever written: the rest of an arena has none.
  for (off_t at = 0; (at = lseek(fd, at, SEEK_DATA)) >= 0;) {
    off_t end = lseek(fd, at, SEEK_HOLE);
    while (at < end) {
      const ssize_t length = pread(fd, static_cast<std::byte*>(copy) + at, size_t(end - at), at);
      if (length <= 0) {
        munmap(copy, num_bytes);
        return false;
      }
      at += length;
    }
  }
  // In one step: another thread may be reading there.
  return mremap(copy, num_bytes, num_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, ptr) != MAP_FAILED;
}

}  // namespace fastcoll
