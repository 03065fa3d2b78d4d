// SPDX-License-Identifier: Apache-2.0
#include "python/transfer_work.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "python/call_site.h"
#include "python/errors.h"
#include "python/host.h"
#include "python/kept_memory.h"
#include "python/prepare.h"

namespace fastcoll {

namespace {

struct TransferWork {
  PyObject ob_base;
  Caller caller;   // whose object this keeps
  PyObject* kept;  // the owner of the memory; null once the garbage collector has cleared it
  std::shared_ptr<Transfer> transfer;  // null until it is started
};

GroupOf* group_in_object = nullptr;
PyTypeObject* subclass = nullptr;

TransferWork& work_of(PyObject* object) { return *reinterpret_cast<TransferWork*>(object); }

PyObject* allocate(PyTypeObject* type, const Caller& caller, PyObject* kept) {
  PyObject* object = type->tp_alloc(type, 0);
  if (!object) return nullptr;
  TransferWork& work = work_of(object);
  new (&work.caller) Caller{caller.group, Py_NewRef(caller.object)};
  work.kept = Py_NewRef(kept);
  new (&work.transfer) std::shared_ptr<Transfer>();
  return object;
}

// TransferWork(group, sends, peer, tag, dtype, numel, ptr, timeout_s, kept, has_other_senders):
// starts it.
PyObject* start_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *group_object = nullptr, *kept = nullptr;
  int sends = 0, peer = 0, dtype = 0, has_other_senders = 0;
  unsigned int tag = 0;
  unsigned long long numel = 0, ptr = 0;
  double timeout_s = 0;
  if (!PyArg_ParseTuple(args, "OpiIiKKdO|p", &group_object, &sends, &peer, &tag, &dtype, &numel,
                        &ptr, &timeout_s, &kept, &has_other_senders))
    return nullptr;
  ProcessGroup* group = group_in_object(group_object);
  if (!group || peer < kAnyPeer || peer >= group->world_size() || dtype < 0 || dtype >= kNumDTypes)
    return PyErr_Format(PyExc_TypeError, "TransferWork: no group, or a code out of range");
  return or_python_error([&]() -> PyObject* {
    Owned object(allocate(type, {*group, group_object}, kept));
    if (!object.get()) return PyErr_NoMemory();
    auto transfer = std::make_shared<Transfer>();
    transfer->sends = sends != 0;
    transfer->peer = peer;
    transfer->tag = tag;
    transfer->dtype = DType(dtype);
    transfer->numel = numel;
    transfer->data = reinterpret_cast<std::byte*>(uintptr_t(ptr));
    transfer->num_bytes = numel * dtype_size(transfer->dtype);
    transfer->timeout_s = timeout_s;
    transfer->has_other_senders = has_other_senders != 0;
    if (group->traces()) [[unlikely]]
      transfer->site = find_call_site();
    {
      PythonHost host;
      if (transfer->num_bytes >= kGilFreeBytes) host.blocking();
      group->post(transfer, host);
    }
    work_of(object.get()).transfer = std::move(transfer);
    return object.release();
  });
}

bool goes_on(const TransferWork& work) { return work.transfer && !work.transfer->done; }

int traverse(PyObject* self, visitproc visit, void* arg) {
  const TransferWork& work = work_of(self);
  if (goes_on(work)) return 0;
  Py_VISIT(work.kept);
  Py_VISIT(work.caller.object);
  return 0;
}

int clear(PyObject* self) {
  TransferWork& work = work_of(self);
  if (!goes_on(work)) Py_CLEAR(work.kept);
  return 0;
}

void deallocate(PyObject* object) {
  PyObject_GC_UnTrack(object);
  TransferWork& work = work_of(object);
  if (goes_on(work))
    keep_until({work.transfer, &work.transfer->done}, std::exchange(work.kept, nullptr));
  work.transfer.~shared_ptr();
  Py_XDECREF(work.kept);
  Py_DECREF(work.caller.object);
  Py_TYPE(object)->tp_free(object);
}

PyObject* wait_at_most(PyObject* self, double limit_s) {
  TransferWork& work = work_of(self);
  return or_python_error([&] {
    bool is_complete;
    {
      PythonHost host;
      if (work.transfer->num_bytes >= kGilFreeBytes && !work.transfer->done) host.blocking();
      is_complete = work.caller.group.wait(*work.transfer, host, limit_s);
    }
    return PyBool_FromLong(is_complete);
  });
}

PyObject* is_completed(PyObject* self, PyObject*) {
  const TransferWork& work = work_of(self);
  bool is_done = work.transfer->done;
  if (!is_done) {
    PythonHost host;
    if (work.transfer->num_bytes >= kGilFreeBytes) host.blocking();
    is_done = work.caller.group.look(*work.transfer);
  }
  return PyBool_FromLong(is_done);
}

PyObject* withdraw(PyObject* self, PyObject*) {
  const TransferWork& work = work_of(self);
  bool is_withdrawn;
  {
    PythonHost host;
    host.blocking();
    is_withdrawn = work.caller.group.withdraw(*work.transfer);
  }
  return PyBool_FromLong(is_withdrawn);
}

PyObject* source_rank(PyObject* self, PyObject*) {
  return PyLong_FromLong(work_of(self).transfer->peer);
}

PyMethodDef methods[] = {
    wait_method<wait_at_most>(
        "wait(timeout=None)\n--\n\n"
        "Wait until the transfer is complete.\n\n"
        "Args:\n"
        "    timeout: Seconds to wait here; None or 0 wait as long as the transfer may take.\n\n"
        "Returns:\n"
        "    True.\n\n"
        "Raises:\n"
        "    FastcollError: What went wrong with the transfer.\n"
        "    CollectiveTimeout: `timeout` ran out; the transfer goes on."),
    {"is_completed", is_completed, METH_NOARGS,
     "is_completed()\n--\n\nReturn whether the transfer is over, well or not."},
    {"source_rank", source_rank, METH_NOARGS,
     "source_rank()\n--\n\n"
     "Return the group rank that sent what was received here; for complete transfers."},
    {"_wait_for", wait_for<wait_at_most>, METH_O, nullptr},
    {"_withdraw", withdraw, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* show(PyObject* self) {
  const TransferWork& work = work_of(self);
  if (!work.transfer) return PyUnicode_FromString("<fastcoll.Work, not started>");
  const bool is_over = work.transfer->done;
  const char* state = !is_over ? "begun" : work.transfer->error ? "failed" : "done";
  const std::string text = "<fastcoll.Work " + describe(*work.transfer) + " in group \"" +
                           work.caller.group.name() + "\", " + state + ">";
  return PyUnicode_FromString(text.c_str());
}

PyObject* kept(PyObject* self, void*) {
  PyObject* const found = work_of(self).kept;
  return Py_NewRef(found ? found : Py_None);
}

PyGetSetDef properties[] = {
    {"_kept", kept, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject type = handle_type<TransferWork>("fastcoll._C.TransferWork", deallocate, show, methods,
                                              properties, start_new, {traverse, clear});

}  // namespace

PyObject* new_transfer_work(const Caller& caller, PyObject* kept) {
  return allocate(subclass ? subclass : &type, caller, kept);
}

void start_works(const Caller& caller, std::span<const std::shared_ptr<Transfer>> transfers,
                 std::span<PyObject* const> works) {
  release_kept();
  bool must_drive;
  {
    PythonHost host;
    if (std::any_of(transfers.begin(), transfers.end(),
                    [](const auto& one) { return one->num_bytes >= kGilFreeBytes; }))
      host.blocking();
    must_drive = caller.group.start(transfers, host);
  }
  for (size_t i = 0; i < works.size(); ++i) work_of(works[i]).transfer = transfers[i];
  if (must_drive) caller.group.drive_transfers(release_kept_soon);
}

bool add_transfer_work(PyObject* module, GroupOf* group_of_object) {
  group_in_object = group_of_object;
  return PyModule_AddType(module, &type) == 0;
}

PyObject* set_transfer_work(PyObject*, PyObject* object) {
  return set_subclass(object, type, subclass);
}

}  // namespace fastcoll
