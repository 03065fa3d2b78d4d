// SPDX-License-Identifier: Apache-2.0
// The memory of calls and transfers that go on although their handles are gone. Everything
// but the last function needs the GIL.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>

namespace fastcoll {

// Keep an object, whose reference passes over, until `done` is true and release_kept is called.
void keep_until(std::shared_ptr<const std::atomic<bool>> done, PyObject* kept);

// Release the objects whose `done` is true.
void release_kept();

// Let Python's main thread do that; this one needs no GIL. Where Python has no room for one more
// task of that thread, the next asynchronous call does it.
void release_kept_soon();

}  // namespace fastcoll
