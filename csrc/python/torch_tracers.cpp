// SPDX-License-Identifier: Apache-2.0
#include "python/torch_tracers.h"

#include <dlfcn.h>

namespace fastcoll {

const uint64_t* find_included_keys() {
  static constexpr uint64_t kNone = 0;
  // A variable of each thread: dlsym gives this thread's.
  const void* found = dlsym(torch_tracers.library, "_ZN3c104impl26raw_local_dispatch_key_setE");
  return included_keys = found ? static_cast<const uint64_t*>(found) : &kNone;
}

bool refuse_traced(const char* verb) {
  PyObject* nothing = PyObject_CallFunction(torch_tracers.refuse, "s", verb);
  Py_XDECREF(nothing);
  return nothing != nullptr;
}

PyObject* set_torch_tracers(PyObject*, PyObject* args) {
  unsigned long long library = 0, keys = 0;
  PyObject* refuse = nullptr;
  if (!PyArg_ParseTuple(args, "KKO", &library, &keys, &refuse)) return nullptr;
  Py_XDECREF(torch_tracers.refuse);
  torch_tracers = {keys, reinterpret_cast<void*>(library), Py_NewRef(refuse)};
  Py_RETURN_NONE;
}

}  // namespace fastcoll
