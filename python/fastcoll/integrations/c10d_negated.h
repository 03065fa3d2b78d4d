// SPDX-License-Identifier: Apache-2.0
// Negated tensors, as the imaginary part of a conjugate, in torch's operators of collectives: part
// of c10d_backend.cpp, compiled with it.
//
// Torch gives a backend an ordinary copy of such a tensor, and drops what a call writes there. The
// program goes on with the old values, as on Gloo. A group of fastcoll gets the tensor itself: its
// Python half takes it. Other backends get the copy, as they take memory as it lies.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace {

// The device of the first tensor in an argument, also in lists of lists.
std::optional<c10::DeviceType> device_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().device().type();
  if (!value.isList() || value.toListRef().empty()) return std::nullopt;
  return device_of(value.toListRef()[0]);
}

bool asks_fastcoll(const c10::FunctionSchema& schema, const c10::IValue* values) {
  std::optional<c10::DeviceType> device;
  for (const auto& argument : schema.arguments()) {
    const c10::IValue& value = *values++;
    if (!device) device = device_of(value);
    if (!device || argument.name() != "process_group") continue;
    const auto group = value.toCustomClass<c10d::ProcessGroup>();
    // One without any stands for a group in Python, to whoever watches that (torch_dispatch.py).
    return !group->hasBackends() || group->getBackend(*device)->getBackendName() == "fastcoll";
  }
  return false;
}

void resolve(c10::IValue& value) {
  if (value.isTensor()) value = value.toTensor().resolve_neg();
  if (!value.isTensorList()) return;
  std::vector<at::Tensor> tensors = value.toTensorVector();
  for (at::Tensor& tensor : tensors) tensor = tensor.resolve_neg();
  value = std::move(tensors);
}

void call_with_negated(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  c10::IValue* const values = stack->data() + stack->size() - count;
  if (!asks_fastcoll(schema, values)) std::for_each(values, values + count, resolve);
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative);
  op.redispatchBoxed(keys & below, stack);
}

void take_negated() {
  // Never destroyed: torch's dispatcher may end earlier.
  auto& library = *new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::Negative,
                                      __FILE__, __LINE__);
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
        "allgather_coalesced_", "_allgather_base_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_",
        "scatter_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_with_negated>());
}

}  // namespace
