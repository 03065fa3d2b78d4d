// SPDX-License-Identifier: Apache-2.0
#include "python/gpu_transfers.h"

#include <vector>

#include "group/gpu_batches.h"
#include "python/gpu_start.h"
#include "python/gpu_work.h"
#include "python/transfers.h"

namespace fastcoll {

namespace {

// Null where the group has no GPU, or Python takes its transfers.
GpuCalls* calls_of(const ProcessGroup& group) {
  GpuCalls* calls = group.gpu_calls();
  return calls && !group.traces() && calls->pair_channels() != 0 ? calls : nullptr;
}

std::optional<DeviceMessage> read_message(const ProcessGroup& group, GpuCalls& calls, bool sends,
                                          PyObject* tensor, PyObject* peer, PyObject* tag) {
  const std::optional<TensorView> view = OnGpu{group, calls}.view(tensor);
  const std::optional<int> rank = root_of(group, peer);
  const auto number = tag ? number_of(tag) : std::optional<uint64_t>(0);
  if (!view || view->numel == 0 || !rank || *rank == group.rank() || !number ||
      *number > UINT32_MAX)
    return std::nullopt;
  return DeviceMessage{sends, view->ptr, view->numel, view->dtype, *rank, uint32_t(*number)};
}

// A message, and the stream in which it goes.
struct MessageOnGpu {
  DeviceMessage message;
  StreamsOnGpu streams;
};

std::optional<MessageOnGpu> prepare(bool sends, const ProcessGroup& group, const Args& args,
                                    bool beside) {
  GpuCalls* calls = calls_of(group);
  if (!calls) return std::nullopt;
  const auto message = read_message(group, *calls, sends, args[kTensor], args[kRoot], args[kTag]);
  if (!message) return std::nullopt;
  const std::optional<StreamsOnGpu> streams = streams_of(*calls, beside);
  if (!streams || !calls->may_start(group, message->data, message->data, streams->stream))
    return std::nullopt;
  return MessageOnGpu{*message, *streams};
}

void start_messages(GpuCalls& calls, std::span<const DeviceMessage> messages, void* stream,
                    double timeout_s) {
  calls.note(messages);
  start(calls, stream, limit_of(calls, timeout_s), messages);
}

PyObject* new_work(const Caller& caller, PyObject* tensor, int peer) {
  const Owned outputs(PyList_New(1));
  if (!outputs.get()) throw Interrupted{};
  PyList_SET_ITEM(outputs.get(), 0, Py_NewRef(tensor));
  return new_gpu_work(caller, outputs.get(), peer);
}

}  // namespace

PyObject* run_transfer_on_gpu(bool sends, ProcessGroup& group, const Args& args) {
  const auto one = prepare(sends, group, args, false);
  if (!one) return nullptr;
  if (!sends) count_write(args[kTensor]);
  start_messages(*group.gpu_calls(), {&one->message, 1}, one->streams.stream, args.timeout_s);
  return sends ? Py_NewRef(Py_None) : PyLong_FromLong(one->message.peer);
}

PyObject* start_transfer_on_gpu(bool sends, const Caller& caller, const Args& args) {
  const auto one = prepare(sends, caller.group, args, true);
  if (!one) return nullptr;
  Owned work(new_work(caller, args[kTensor], one->message.peer));
  if (!sends) count_write(args[kTensor]);
  GpuCalls& calls = *caller.group.gpu_calls();
  follow(calls, one->streams.current);
  start_messages(calls, {&one->message, 1}, one->streams.stream, args.timeout_s);
  PyObject* const works[] = {work.get()};
  begin_gpu_works(works);
  keep_for(calls, args[kTensor]);
  return work.release();
}

PyObject* start_batch_on_gpu(const Caller& caller, const Args& args) {
  const ProcessGroup& group = caller.group;
  GpuCalls* calls = calls_of(group);
  const std::span<PyObject* const> items = items_of(args[kTensor]);
  if (!calls || items.empty()) return nullptr;
  const std::optional<StreamsOnGpu> streams = streams_of(*calls, true);
  if (!streams || !calls->is_healthy(group)) return nullptr;
  std::vector<DeviceMessage> messages;
  std::vector<TransferPair> pairs;
  std::vector<PyObject*> tensors;  // the works keep them
  const Owned works(PyList_New(0));
  for (PyObject* item : items) {
    const std::optional<BatchItem> one = read_batch_item(item);
    if (!one) return nullptr;
    const auto message =
        read_message(group, *calls, one->sends, one->tensor.get(), one->peer.get(), one->tag.get());
    if (!message || !calls->is_known_use(message->data, streams->stream)) return nullptr;
    const Owned work(new_work(caller, one->tensor.get(), message->peer));
    if (PyList_Append(works.get(), work.get()) != 0) throw Interrupted{};
    messages.push_back(*message);
    pairs.push_back({message->sends, message->peer});
    tensors.push_back(one->tensor.get());
  }
  for (size_t i = 0; i < tensors.size(); ++i)
    if (!messages[i].sends) count_write(tensors[i]);
  follow(*calls, streams->current);
  for (const auto& kernel : transfer_kernels(pairs, group.rank(), group.world_size(),
                                             calls->num_channels(), calls->pair_channels())) {
    std::vector<DeviceMessage> together;
    for (const size_t i : kernel) together.push_back(messages[i]);
    start_messages(*calls, together, streams->stream, -1);
  }
  begin_gpu_works({PySequence_Fast_ITEMS(works.get()), size_t(PyList_GET_SIZE(works.get()))});
  for (PyObject* tensor : tensors) keep_for(*calls, tensor);
  return Py_NewRef(works.get());
}

}  // namespace fastcoll
