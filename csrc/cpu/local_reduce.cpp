// SPDX-License-Identifier: Apache-2.0
#include "cpu/local_reduce.h"

#include <string>

#include "check.h"
#include "cpu/reduce.h"

namespace fastcoll {

namespace {

void require_meaning(int dtype, int op) {
  if (dtype < 0 || dtype >= kNumDTypes || op < 0 || op >= kNumOps)
    throw Failure(ErrorKind::usage, "a code out of range");
  if (!op_has_meaning(DType(dtype), Op(op)))
    throw Failure(ErrorKind::unsupported,
                  std::string(op_name(Op(op))) + " has no meaning for " + dtype_name(DType(dtype)));
}

const void* to_ptr(uintptr_t address) { return reinterpret_cast<const void*>(address); }

}  // namespace

void reduce_arrays(int dtype, int op, const std::vector<uintptr_t>& sources, uintptr_t target,
                   size_t numel) {
  require_meaning(dtype, op);
  if (sources.empty() || Op(op) == Op::avg)
    throw Failure(ErrorKind::usage, "reduce_arrays takes arrays, and no AVG: finish_array divides");
  std::vector<const void*> srcs;
  for (const uintptr_t source : sources) srcs.push_back(to_ptr(source));
  void* const dst = reinterpret_cast<void*>(target);
  reduce_fn(DType(dtype), Op(op))({&dst, 1, srcs.data(), int(srcs.size()), numel, 1});
}

void widen_array(int dtype, uintptr_t source, uintptr_t target, size_t numel) {
  require_meaning(dtype, int(Op::sum));
  partial_fns(DType(dtype), Op::sum)->load(reinterpret_cast<void*>(target), to_ptr(source), numel);
}

void finish_array(int dtype, int op, uintptr_t source, uintptr_t target, size_t numel,
                  int world_size) {
  require_meaning(dtype, op);
  partial_fns(DType(dtype), Op(op))
      ->finish(reinterpret_cast<void*>(target), to_ptr(source), numel, world_size);
}

}  // namespace fastcoll
