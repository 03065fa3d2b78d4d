// SPDX-License-Identifier: Apache-2.0
// The GIL, taken by a thread that may outlive the interpreter: a daemon that is in a call when the
// program ends. Part of fastcoll._C and of c10d_backend.cpp.
//
// Up to 3.13 Python ends such a thread by pthread_exit. That unwinds its stack, and a destructor on
// the way makes std::terminate of it. So the thread stops here for good, as from Python 3.14 on. It
// holds no group: the groups are closed before the interpreter ends.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <type_traits>

namespace fastcoll {

// Stops the thread in which it is destroyed, unless the thread has come back from Python.
struct StopUnlessBack {
  bool is_back = false;
  ~StopUnlessBack() {
    while (!is_back) ::pause();
  }
};

// Take the GIL by a function of Python's. Does not return once the interpreter ends. A frame of its
// own, as the unwinder calls std::terminate in one that is noexcept. A catch clause would not do:
// another exception may be on its way.
template <class Take>
[[gnu::noinline]] auto take_gil_or_stop(Take take) {
  StopUnlessBack stop;
  if constexpr (std::is_void_v<decltype(take())>) {
    take();
    stop.is_back = true;
  } else {
    const auto result = take();
    stop.is_back = true;
    return result;
  }
}

// Gives the GIL up for a scope.
class GilAway {
 public:
  GilAway() : thread_(PyEval_SaveThread()) {}
  GilAway(const GilAway&) = delete;
  GilAway& operator=(const GilAway&) = delete;
  ~GilAway() {
    take_gil_or_stop([this] { PyEval_RestoreThread(thread_); });
  }

 private:
  PyThreadState* const thread_;
};

// Has the GIL for a scope, in any thread, whether it had it before or not.
class GilHeld {
 public:
  GilHeld() : state_(take_gil_or_stop([] { return PyGILState_Ensure(); })) {}
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;
  ~GilHeld() { PyGILState_Release(state_); }

 private:
  const PyGILState_STATE state_;
};

}  // namespace fastcoll
