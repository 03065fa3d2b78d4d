// SPDX-License-Identifier: Apache-2.0
// Turns the arguments of a fast call into a plan and its operands. It reads the tensors, makes the
// checks of every call, and looks the plan up. A call that needs a closer look is no fast call; the
// Python function decides then.
//
// Small calls are counted in stalls, not in instructions. Most of the time beyond torch's own was
// waits for words that had just been stored. Two words that are stored apart and loaded as one must
// first reach the cache. So the library is compiled without SLP vectorisation (setup.py), values
// are written where they are needed, and no memory is cleared by `rep stos`. A sampling profiler
// shows such places: one instruction has half of its function's time.
#pragma once

#include <Python.h>

#include <array>
#include <vector>

#include "group/process_group.h"
#include "python/verbs.h"

namespace fastcoll {

class DenseCopies;

struct Args {
  std::array<PyObject*, kNumObjects> objects{};  // null: left out
  CallOptions options;
  double timeout_s = -1;  // below 0: the group's
  PyObject*& operator[](Param meaning) { return objects[meaning]; }
  PyObject* operator[](Param meaning) const { return objects[meaning]; }
};
// Compilers would clear more by an instruction (rep stos) that takes 25 ns to begin.
static_assert(sizeof(Args) <= 88);

// The places of a call's arguments, if addresses don't give them. Not cleared for calls without.
struct Places {
  Parts parts;
  StridedPair strided;
  RowCall rows;
};

struct Prepared {
  Plan plan;
  const void* input = nullptr;
  void* output = nullptr;
  size_t num_bytes = 0;  // how much moves, about
  bool in_parts = false, is_strided = false, has_rows = false;
  bool is_fast() const { return plan.hash != 0; }
  Operands operands(const Places& places) const {
    return {.input = input,
            .output = output,
            .parts = in_parts ? &places.parts : nullptr,
            .strided = is_strided ? &places.strided : nullptr,
            .rows = has_rows ? &places.rows : nullptr};
  }
};

// Of contiguous tensors. parts: the places of the parts, if the call has any; not cleared.
Prepared prepare(FastVerb verb, const ProcessGroup& group, const Args& args, Op op, Parts& parts);

// One tensor, or one of each kind, with the plan of the call; no fast call if there is none yet.
Prepared with_plan(const ProcessGroup& group, CallOptions options, Verb verb, DType dtype, Op op,
                   uint64_t numel, int root, const void* input, void* output);

// Of tensors of which one at least is not contiguous; of a verb without parts.
Prepared prepare_strided(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                         StridedPair& places);

// Of a verb with a part for each rank (parts.cpp).
Prepared prepare_parts(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                       Parts& parts);

// The same, with copies of the tensors that are not contiguous.
Prepared prepare_copied_parts(FastVerb verb, const ProcessGroup& group, const Args& args, Op op,
                              Parts& parts, DenseCopies& copies);

// The tensors of one dtype in a list.
struct PreparedList {
  DType dtype;
  size_t numel = 0;  // of a part of the message
  List list = {};
  Plan plan = {};
};

// In the order in which their dtypes first appear; none if it is no fast call. Tensors that are not
// contiguous need `copies`.
std::vector<PreparedList> prepare_lists(Verb verb, const ProcessGroup& group, PyObject* outputs,
                                        PyObject* inputs, Op op, CallOptions options,
                                        DenseCopies* copies = nullptr);

// Above this the GIL is given up at once: copying takes longer than handing it over.
inline constexpr size_t kGilFreeBytes = size_t{32} << 10;

void run_lists(ProcessGroup& group, const std::vector<PreparedList>& lists, Host& host,
               double timeout_s);

}  // namespace fastcoll
