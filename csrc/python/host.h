// SPDX-License-Identifier: Apache-2.0
// The Python interpreter as a waiting rank sees it: the GIL, Ctrl-C. A wait gives the GIL up once
// it gets long, and only the main thread looks for signals.
#pragma once

#include <Python.h>

#include "cpu/wait.h"
#include "fastcoll/integrations/gil.h"
#include "python/call_site.h"

namespace fastcoll {

// Holds the GIL at first; gives it up when a wait gets long, takes it back at the end.
class PythonHost : public Host {
 public:
  PythonHost() = default;
  PythonHost(const PythonHost&) = delete;
  PythonHost& operator=(const PythonHost&) = delete;
  ~PythonHost() override { take_gil(); }

  void blocking() override {
    if (!thread_) thread_ = PyEval_SaveThread();
  }
  bool interrupted() override;
  std::string interruption() override;
  std::string call_site() override { return fastcoll::call_site(); }

 private:
  void take_gil() {
    if (thread_) take_gil_or_stop([this] { PyEval_RestoreThread(thread_); });
    thread_ = nullptr;
  }
  PyThreadState* thread_ = nullptr;
  int64_t next_look_us_ = 0;
};

// In a thread that does not hold the GIL: takes it only to ask for Ctrl-C.
class DetachedHost : public Host {
 public:
  bool interrupted() override;
  std::string interruption() override;

 private:
  int64_t next_look_us_ = 0;
};

// For a wait of a call that can go on in another thread. The wait ends if the thread is interrupted
// or has waited up to its limit.
template <class Base>
class WaiterHost final : public Base {
 public:
  explicit WaiterHost(WaitedTime& waited) : waited_(waited) {}
  bool interrupted() override { return false; }
  bool steps_out() override {
    if (waited_.is_over()) return true;
    was_interrupted_ = was_interrupted_ || Base::interrupted();
    return was_interrupted_;
  }
  bool was_interrupted() const { return was_interrupted_; }  // then a Python error is set

 private:
  WaitedTime& waited_;
  bool was_interrupted_ = false;
};

}  // namespace fastcoll
