// SPDX-License-Identifier: Apache-2.0
#include "python/kept_memory.h"

#include <new>
#include <utility>
#include <vector>

namespace fastcoll {

namespace {

struct Kept {
  std::shared_ptr<const std::atomic<bool>> done;
  PyObject* object;
};
std::vector<Kept> all_kept;

}  // namespace

void keep_until(std::shared_ptr<const std::atomic<bool>> done, PyObject* kept) {
  try {
    all_kept.push_back({std::move(done), kept});
  } catch (const std::bad_alloc&) {  // then it stays for ever: the call may still use it
  }
}

void release_kept() {
  if (all_kept.empty()) return;
  std::vector<PyObject*> released;
  std::erase_if(all_kept, [&](const Kept& one) {
    const bool is_done = one.done->load();
    if (is_done) released.push_back(one.object);
    return is_done;
  });
  for (PyObject* object : released) Py_XDECREF(object);  // runs any code: the list is whole again
}

void release_kept_soon() {
  const auto release = [](void*) {
    release_kept();
    return 0;
  };
  Py_AddPendingCall(release, nullptr);
}

}  // namespace fastcoll
