// SPDX-License-Identifier: Apache-2.0
#include "cpu/local_reduce.h"

#include <string>

#include "check.h"
#include "cpu/reduce.h"
#include "cpu/wire.h"

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

std::vector<const void*> to_ptrs(const std::vector<uintptr_t>& addresses) {
  std::vector<const void*> ptrs;
  for (const uintptr_t address : addresses) ptrs.push_back(to_ptr(address));
  return ptrs;
}

const WireFns& require_coding(int wire) {
  if (wire <= int(Wire::none) || wire >= kNumWires)
    throw Failure(ErrorKind::usage, "a code out of range");
  return *wire_fns(Wire(wire));
}

}  // namespace

void reduce_arrays(int dtype, int op, const std::vector<uintptr_t>& sources, uintptr_t target,
                   size_t numel) {
  require_meaning(dtype, op);
  if (sources.empty() || Op(op) == Op::avg)
    throw Failure(ErrorKind::usage, "reduce_arrays takes arrays, and no AVG: finish_array divides");
  const std::vector<const void*> srcs = to_ptrs(sources);
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

void code_array(int wire, uintptr_t source, uintptr_t coded, uintptr_t feedback, size_t numel,
                int divisor) {
  require_coding(wire).code({reinterpret_cast<void*>(coded), to_ptr(source),
                             reinterpret_cast<void*>(feedback), numel, divisor});
}

void add_coded_arrays(int wire, const std::vector<uintptr_t>& sources, uintptr_t target,
                      size_t numel, bool coded_again) {
  const WireFns& fns = require_coding(wire);
  if (sources.empty()) throw Failure(ErrorKind::usage, "add_coded_arrays takes arrays");
  const std::vector<const void*> rows = to_ptrs(sources);
  const auto add = coded_again ? fns.add_coded : fns.add;
  add(reinterpret_cast<void*>(target), rows.data(), int(rows.size()), numel);
}

size_t coded_array_bytes(int wire, size_t numel) {
  require_coding(wire);
  return coded_bytes(Wire(wire), numel);
}

}  // namespace fastcoll
