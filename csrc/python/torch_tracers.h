// SPDX-License-Identifier: Apache-2.0
// Torch's tracers: torch.jit.trace, and the mode of make_fx. They see torch's operators alone, so
// that what they trace would leave out a call of ours.
#pragma once

#include <Python.h>

#include <cstdint>

namespace fastcoll {

struct TorchTracers {
  uint64_t keys = 0;           // dispatch keys of torch.jit.trace and of modes; 0: not known
  void* library = nullptr;     // has the dispatch keys that each thread includes
  PyObject* refuse = nullptr;  // kept for ever
};

// Guarded by the GIL.
inline TorchTracers torch_tracers;

// The dispatch keys that this thread includes; null until it asks. Torch's functions that tell them
// made a call 8 ns longer.
constinit inline thread_local const uint64_t* included_keys = nullptr;

const uint64_t* find_included_keys();

// Whether a tracer, or another mode of the program's, may run in this thread.
[[gnu::always_inline]] inline bool may_be_traced() {
  if (!torch_tracers.keys) return false;
  const uint64_t* included = included_keys;
  if (!included) included = find_included_keys();
  return (*included & torch_tracers.keys) != 0;
}

// Refuse a call of this name where a tracer runs. False: a Python error is set.
bool refuse_traced(const char* verb);

// set_torch_tracers(library, keys, refuse). `library` is a handle of dlopen, and `keys` are as
// torch keeps them. `refuse` takes the name of a verb, and raises where a trace would leave it out.
PyObject* set_torch_tracers(PyObject*, PyObject* args);

}  // namespace fastcoll
