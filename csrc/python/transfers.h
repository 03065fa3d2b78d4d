// SPDX-License-Identifier: Apache-2.0
// Sends and receives as fast calls: of contiguous CPU tensors, within the group's limit.
#pragma once

#include <Python.h>

#include <optional>

#include "python/arguments.h"
#include "python/prepare.h"
#include "python/transfer_work.h"

namespace fastcoll {

// New references; null if it is no fast call: then nothing has happened. They throw Interrupted
// where a Python error is set.
PyObject* run_transfer(bool sends, ProcessGroup& group, const Args& args);     // send, recv
PyObject* start_transfer(bool sends, const Caller& caller, const Args& args);  // isend, irecv
PyObject* start_batch(const Caller& caller, const Args& args);                 // batch_isend_irecv

// One of a batch: a fastcoll.P2POp that names no group. None if it is anything else.
struct BatchItem {
  bool sends;
  Owned tensor, peer, tag;
};
std::optional<BatchItem> read_batch_item(PyObject* object);

// The class of a batch's items: fastcoll.P2POp.
PyObject* set_p2p_op_type(PyObject*, PyObject* object);

}  // namespace fastcoll
