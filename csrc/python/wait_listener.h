// SPDX-License-Identifier: Apache-2.0
// A function of Python's that every thread calls now and then while it waits long. So what the
// protocol can't see, as the end of a group on another node, gets into a wait.
#pragma once

#include <Python.h>

namespace fastcoll {

// set_wait_listener(function). It takes nothing. An error of it ends the wait, as one of a signal
// handler does: a signal may come while it runs.
PyObject* set_wait_listener(PyObject*, PyObject* function);

}  // namespace fastcoll
