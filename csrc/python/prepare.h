// SPDX-License-Identifier: Apache-2.0
// From the arguments of a fast call to what the group runs: reads the tensors, checks what must be
// checked on every call, and looks up the plan. What it can't tell for right at a glance is no fast
// call; the Python function decides then.
//
// Small calls are counted in stalls, not in instructions. Most of the time beyond torch's own was
// waiting for words that had just been stored: two words stored apart and loaded as one must first
// reach the cache. So the library is compiled without SLP vectorisation (setup.py), values are
// written where they are needed, and no memory is cleared by `rep stos`. A sampling profiler shows
// such places: one instruction has half of its function's time.
#pragma once

#include <Python.h>

#include <array>
#include <vector>

#include "group/process_group.h"
#include "python/verbs.h"

namespace fastcoll {

struct Args {
  // Null: left out. More of them, and compilers would clear them by an instruction (rep stos) that
  // takes longer to begin than all these stores.
  std::array<PyObject*, kNumObjects> objects{};
  CallOptions options;
  double timeout_s = -1;  // below 0: the group's
  PyObject*& operator[](Param meaning) { return objects[meaning]; }
  PyObject* operator[](Param meaning) const { return objects[meaning]; }
};

// Where a call's arguments lie, if addresses don't tell. Not cleared for those that do.
struct Places {
  Parts parts;
  StridedPair strided;
};

struct Prepared {
  Plan plan;
  const void* input = nullptr;
  void* output = nullptr;
  size_t num_bytes = 0;  // how much moves, about
  bool in_parts = false, is_strided = false;
  bool is_fast() const { return plan.hash != 0; }
  Operands operands(const Places& places) const {
    return {.input = input,
            .output = output,
            .parts = in_parts ? &places.parts : nullptr,
            .strided = is_strided ? &places.strided : nullptr};
  }
};

// Of contiguous tensors. parts: where the parts lie, if the call has any; not cleared.
Prepared prepare(FastVerb verb, const ProcessGroup& group, const Args& args, Op op, Parts& parts);

// One tensor, or one of each kind, with the plan of the call; no fast call if there is none yet.
Prepared with_plan(const ProcessGroup& group, CallOptions options, Verb verb, DType dtype, Op op,
                   uint64_t numel, int root, const void* input, void* output);

// Of tensors of which one at least is not contiguous; of a verb without parts.
Prepared prepare_strided(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                         StridedPair& places);

// fast_parts.cpp
Prepared prepare_parts(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                       Parts& parts);

// The tensors of one dtype in a list.
struct PreparedList {
  DType dtype;
  size_t numel = 0;  // of a part of the message
  List list = {};
  Plan plan = {};
};

// In the order in which their dtypes first appear; none if it is no fast call.
std::vector<PreparedList> prepare_lists(Verb verb, const ProcessGroup& group, PyObject* outputs,
                                        PyObject* inputs, Op op, CallOptions options);

// Above this the GIL is given up at once: copying takes longer than handing it over.
inline constexpr size_t kGilFreeBytes = size_t{32} << 10;

void run_lists(ProcessGroup& group, const std::vector<PreparedList>& lists, Host& host,
               double timeout_s);

}  // namespace fastcoll
