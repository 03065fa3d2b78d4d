// SPDX-License-Identifier: Apache-2.0
#include "python/transfers.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "python/call_site.h"
#include "python/fast_calls.h"
#include "python/host.h"
#include "python/transfer_work.h"

namespace fastcoll {

namespace {

PyTypeObject* p2p_op_type = nullptr;  // of the items of a batch

// The transfer of these arguments; null if it is no fast call. A receive may have a null `peer`, or
// None: it takes the first message of any rank.
std::shared_ptr<Transfer> prepare(bool sends, const ProcessGroup& group, PyObject* tensor,
                                  PyObject* peer, PyObject* tag, double timeout_s = -1) {
  const std::optional<TensorView> view = view_argument(tensor);
  const auto rank = sends || given(peer) ? root_of(group, peer) : std::optional<int>(kAnyPeer);
  const auto number = tag ? number_of(tag) : std::optional<uint64_t>(0);
  if (!view || !rank || !number || *number > UINT32_MAX) return nullptr;
  auto transfer = std::make_shared<Transfer>();
  transfer->sends = sends;
  transfer->peer = *rank;
  transfer->tag = uint32_t(*number);
  transfer->dtype = view->dtype;
  transfer->numel = view->numel;
  transfer->data = view->ptr;
  transfer->num_bytes = view->num_bytes();
  transfer->timeout_s = timeout_s;
  if (group.traces()) [[unlikely]]
    transfer->site = find_call_site();
  return transfer;
}

// Whether the `op` of a P2POp sends; nothing if it is none of the usual words for it.
std::optional<bool> is_send(PyObject* op) {
  const auto is = [op](const char* name, FastVerb verb) {
    if (PyUnicode_Check(op)) return PyUnicode_CompareWithASCIIString(op, name) == 0;
    return PyCFunction_Check(op) && PyCFunction_GET_FUNCTION(op) == function_of(verb);
  };
  if (op && is("isend", FastVerb::isend)) return true;
  if (op && is("irecv", FastVerb::irecv)) return false;
  return std::nullopt;
}

}  // namespace

PyObject* run_transfer(bool sends, ProcessGroup& group, const Args& args) {
  const auto transfer =
      prepare(sends, group, args[kTensor], args[kRoot], args[kTag], args.timeout_s);
  if (!transfer || (sends && transfer->peer == group.rank())) return nullptr;  // refused there
  if (!sends) count_write(args[kTensor]);
  {
    PythonHost host;
    if (transfer->num_bytes >= kGilFreeBytes) host.blocking();
    group.post(transfer, host);
    group.wait(*transfer, host, 0);
  }
  return sends ? Py_NewRef(Py_None) : PyLong_FromLong(transfer->peer);
}

PyObject* start_transfer(bool sends, const Caller& caller, const Args& args) {
  const auto transfer =
      prepare(sends, caller.group, args[kTensor], args[kRoot], args[kTag], args.timeout_s);
  if (!transfer) return nullptr;
  Owned work(new_transfer_work(caller, args[kTensor]));
  if (!work.get()) throw Interrupted{};
  if (!sends) count_write(args[kTensor]);
  PyObject* const works[] = {work.get()};
  start_works(caller, {&transfer, 1}, works);
  return work.release();
}

std::optional<BatchItem> read_batch_item(PyObject* object) {
  static PyObject* const op_name = PyUnicode_InternFromString("op");
  static PyObject* const tensor_name = PyUnicode_InternFromString("tensor");
  static PyObject* const peer_name = PyUnicode_InternFromString("peer");
  static PyObject* const tag_name = PyUnicode_InternFromString("tag");
  static PyObject* const group_name = PyUnicode_InternFromString("group");
  static PyObject* const group_peer_name = PyUnicode_InternFromString("group_peer");
  if (Py_TYPE(object) != p2p_op_type) return std::nullopt;
  const Owned op(PyObject_GetAttr(object, op_name)), group(PyObject_GetAttr(object, group_name)),
      group_peer(PyObject_GetAttr(object, group_peer_name));
  if (group.get() != Py_None || group_peer.get() != Py_None) return std::nullopt;
  const std::optional<bool> sends = is_send(op.get());
  if (!sends) return std::nullopt;
  std::optional<BatchItem> item(BatchItem{*sends, Owned(PyObject_GetAttr(object, tensor_name)),
                                          Owned(PyObject_GetAttr(object, peer_name)),
                                          Owned(PyObject_GetAttr(object, tag_name))});
  if (!item->tag.get()) item.reset();
  return item;
}

PyObject* start_batch(const Caller& caller, const Args& args) {
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::vector<PyObject*> received;  // the works keep them
  Owned works(PyList_New(0));
  for (PyObject* object : items_of(args[kTensor])) {
    const std::optional<BatchItem> one = read_batch_item(object);
    if (!one) return nullptr;
    PyObject* const tensor = one->tensor.get();
    auto transfer = prepare(one->sends, caller.group, tensor, one->peer.get(), one->tag.get());
    if (!transfer) return nullptr;
    const Owned work(new_transfer_work(caller, tensor));
    if (!work.get() || PyList_Append(works.get(), work.get()) != 0) throw Interrupted{};
    transfers.push_back(std::move(transfer));
    if (!one->sends) received.push_back(tensor);
  }
  if (transfers.empty()) return nullptr;
  for (PyObject* tensor : received) count_write(tensor);
  start_works(caller, transfers,
              {PySequence_Fast_ITEMS(works.get()), size_t(PyList_GET_SIZE(works.get()))});
  return works.release();
}

PyObject* set_p2p_op_type(PyObject*, PyObject* object) {
  if (!PyType_Check(object)) return PyErr_Format(PyExc_TypeError, "%R is not a type", object);
  Py_XSETREF(p2p_op_type, reinterpret_cast<PyTypeObject*>(Py_NewRef(object)));
  Py_RETURN_NONE;
}

}  // namespace fastcoll
