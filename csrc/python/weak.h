// SPDX-License-Identifier: Apache-2.0
// Weak references, in all versions of Python.
#pragma once

#include <Python.h>

namespace fastcoll {

// A new reference to the target of a weak one; null if the target is gone.
inline PyObject* target_of(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* target = nullptr;
  PyWeakref_GetRef(reference, &target);
  return target;
#else
  PyObject* target = PyWeakref_GET_OBJECT(reference);
  return target == Py_None ? nullptr : Py_NewRef(target);
#endif
}

// The caller holds the object.
inline bool refers_to(PyObject* reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* target = target_of(reference);
  Py_XDECREF(target);
  return target == object;
#else
  return PyWeakref_GET_OBJECT(reference) == object;
#endif
}

}  // namespace fastcoll
