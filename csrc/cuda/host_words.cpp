// SPDX-License-Identifier: Apache-2.0
#include "cuda/host_words.h"

#include <cuda_runtime_api.h>

#include <mutex>
#include <new>
#include <vector>

#include "memory/cuda_driver.h"

namespace fastcoll {

namespace {

constexpr size_t kPageBytes = 4096;  // taken at once

std::mutex mutex;
// Never destroyed: groups may outlive static objects at the end of the process.
std::vector<HostWords*>& free_words() {
  static auto* words = new std::vector<HostWords*>;
  return *words;
}

}  // namespace

HostWords* borrow_host_words() {
  const std::lock_guard guard(mutex);
  std::vector<HostWords*>& words = free_words();
  if (words.empty()) {
    void* page = nullptr;
    check_cuda(cudaHostAlloc(&page, kPageBytes, cudaHostAllocMapped | cudaHostAllocPortable),
               "allocating host memory for verdicts");
    for (size_t i = 0; i < kPageBytes / sizeof(HostWords); ++i)
      words.push_back(static_cast<HostWords*>(page) + i);
  }
  HostWords* lent = words.back();
  words.pop_back();
  return new (lent) HostWords{};
}

void return_host_words(HostWords* words) {
  const std::lock_guard guard(mutex);
  free_words().push_back(words);
}

}  // namespace fastcoll
