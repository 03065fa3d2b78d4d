// SPDX-License-Identifier: Apache-2.0
// The work of c10d_backend.cpp in threads of the core: part of that one source, compiled with it.
//
// All of it is over before the interpreter ends. Releasing a tensor may need the GIL (torch 2.13).
// Python unwinds a thread that asks for the GIL of an ending interpreter. If that happens in a
// destructor, the process aborts.
//
// So calls and callbacks run in threads that are counted (csrc/group/threads.cpp), not in torch's,
// and an atexit handler waits for them (tests/torch/test_exit.py).
#pragma once

#include <c10/util/Logging.h>

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "core_api.h"

namespace {

const FastcollCoreApi* core = nullptr;  // set when the module is imported

// Throws std::system_error where there is no thread; the task does not run then.
void run_in_thread(std::function<void()> task) {
  using Task = std::function<void()>;
  auto run = [](void* context) {
    const std::unique_ptr<Task> task(static_cast<Task*>(context));
    try {
      (*task)();
    } catch (const std::exception& error) {
      LOG(ERROR) << "fastcoll: a callback of a call raised: " << error.what();
    }
  };
  auto context = std::make_unique<Task>(std::move(task));
  core->run_task(run, context.get());
  context.release();
}

}  // namespace
