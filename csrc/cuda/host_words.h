// SPDX-License-Identifier: Apache-2.0
// The words by which a group's kernels and its host reach each other in host memory.
//
// They are lent, and lent again, but never freed. Freeing host memory waits for all work on the
// device, and threads that watch a group may look at its words at any time. Decides where words
// lie; knows no group.
#pragma once

#include "cuda/call.h"

namespace fastcoll {

// Zeroed words that every device of this process can reach by this address.
HostWords* borrow_host_words();
// No kernel and no thread uses them any more.
void return_host_words(HostWords* words);

}  // namespace fastcoll
