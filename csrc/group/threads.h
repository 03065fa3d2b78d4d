// SPDX-License-Identifier: Apache-2.0
// The threads of this process that run calls in the background. They hold no GIL. This file decides
// when to start one more; none exists before the first task.
//
// They belong to the process, not to a group. The calls of a group run in order, whichever thread
// runs them, so a mesh of many groups does not need a thread for each.
#pragma once

#include <functional>

namespace fastcoll {

enum class Draining { waits, ignores };

// Run a task, which may throw nothing, in some thread. A task that finds no idle one gets a new
// one, as tasks may wait for each other. Throws std::system_error where there is none to be had.
void run_in_thread(std::function<void()> task, Draining draining = Draining::waits);

// Wait until all tasks are over, those too that they start, but for those that it ignores.
void drain_threads();

}  // namespace fastcoll
