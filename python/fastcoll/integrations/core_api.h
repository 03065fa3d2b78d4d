// SPDX-License-Identifier: Apache-2.0
// The table of C functions that fastcoll._C hands in a capsule to code that is compiled later:
// c10d_backend.cpp, against the installed torch. Plain C types only, and no exception gets
// through, as the two sides may come from different compilers.
#pragma once

#include <cstddef>
#include <cstdint>

struct FastcollGroup;  // the group inside a Communicator, which must outlive its use here

// A copy of a plan: the agreement of the ranks for calls of one kind.
struct FastcollPlan {
  alignas(8) unsigned char bytes[64];
};

struct FastcollFailure {
  uint32_t kind;
  uint64_t ranks;
  char text[4096];
};

// The codes of fastcoll.types, as far as they are needed there.
enum FastcollVerb {
  kFastcollAllReduce = 0,
  kFastcollReduceScatter = 1,
  kFastcollAllGather = 2,
  kFastcollBroadcast = 3,
  kFastcollBarrier = 4,
  kFastcollAllToAll = 5,
  kFastcollGather = 6,
  kFastcollScatter = 7,
  kFastcollReduce = 8,
};
enum FastcollDType {
  kFastcollFloat32 = 0,
  kFastcollFloat64 = 1,
  kFastcollFloat16 = 2,
  kFastcollBfloat16 = 3,
  kFastcollInt8 = 6,
  kFastcollUint8 = 7,
  kFastcollInt32 = 9,
  kFastcollInt64 = 10,
  kFastcollBool = 11,
  kFastcollComplex64 = 12,
  kFastcollComplex128 = 13,
};

// kFastcollPending: it goes on.
enum FastcollOutcome { kFastcollDone, kFastcollFailed, kFastcollInterrupted, kFastcollPending };

inline constexpr int kFastcollAnyPeer = -1;

// One rank's data for another, or the place for data from it.
struct FastcollPart {
  void* ptr;
  size_t num_bytes;
};

inline constexpr int kFastcollMaxWorld = 64;

// By rank.
struct FastcollParts {
  FastcollPart inputs[kFastcollMaxWorld], outputs[kFastcollMaxWorld];
};

// The memory that a call reads and writes: one message, or parts (not null) in place of it; a
// reduce_scatter of parts has an output.
struct FastcollOperands {
  const void* input;
  void* output;
  const FastcollParts* parts;
};

struct FastcollTensor {  // contiguous
  void* ptr;
  uint64_t numel;
  FastcollDType dtype;
  int32_t ndim;
  const int64_t* shape;
};

// The tensors of a call that has a part for each rank; see csrc/python/read_parts.h.
struct FastcollPartsCall {
  FastcollVerb verb;
  int root;
  const FastcollTensor *outputs, *inputs;
  size_t num_outputs, num_inputs;
  bool cuts;
  const int64_t *output_sizes, *input_sizes;
  size_t num_output_sizes, num_input_sizes;
};

// The norm of rows behind an all_reduce of `x`; `out` and `summed` are like `x`.
struct FastcollRowsCall {
  FastcollTensor x;
  void *out, *summed;
  const FastcollTensor *residual, *weight;  // null: left out
  double epsilon, offset;
  bool rounds_first, wide_sum;
  int64_t op;
};

// The same as the kernels take it.
struct FastcollRows {
  alignas(8) unsigned char bytes[96];
};

// Calls of one kind have one plan.
struct FastcollKind {
  FastcollVerb verb;
  FastcollDType dtype;
  int op;
  int root;
  uint64_t numel;
  uint64_t splits;
  bool in_parts;
};

// A call for the queue, and the work that it is for.
struct FastcollQueuedCall {
  const FastcollPlan* plan;
  FastcollOperands operands;  // the parts are copied
  double timeout_s;           // < 0: the group's
  void* work;
  // It is over: `failure` is null if it went well. Never takes the GIL.
  void (*over)(void* work, const FastcollFailure* failure);
  void (*drop)(void* work);  // afterwards; may take the GIL
};

struct FastcollTransfer;  // a handle of a send or a receive that was started

// A send or a receive of contiguous memory.
struct FastcollTransferCall {
  bool sends;
  int peer;  // kFastcollAnyPeer: receives from the first sender
  uint32_t tag;
  FastcollDType dtype;
  uint64_t numel;
  void* data;        // is only read where it sends
  double timeout_s;  // < 0: the group's
};

inline constexpr char kFastcollCoreApiName[] = "fastcoll._C.core_api";
inline constexpr uint32_t kFastcollCoreApiVersion = 11;

struct FastcollCoreApi {
  uint32_t version;

  // ---- with the GIL ----
  // The group of a Python object, or null.
  FastcollGroup* (*group_of)(void* object);
  // The object of the default group, which Python keeps; null where Python has to find it.
  void* (*default_group)();
  // Whether calls of this kind have a plan, and which; the codes are those of fastcoll.types.
  bool (*find_plan)(FastcollGroup* group, const FastcollKind* kind, FastcollPlan* plan);
  void (*set_python_error)(const FastcollFailure* failure);

  // ---- without the GIL ----
  // Whether it traces the places of calls in the program, which only Python can find.
  bool (*traces)(const FastcollGroup* group);
  // Whether it was closed: it takes no calls, and its name may be another group's by now.
  bool (*closed)(const FastcollGroup* group);
  // Whether a call may run at once, ahead of nothing.
  bool (*idle)(const FastcollGroup* group);
  // Carry out a call; `rows`: and the steps behind it, if not null. `timeout_s` < 0: the group's.
  // Where it was interrupted the calling thread has a Python error.
  FastcollOutcome (*run)(FastcollGroup* group, const FastcollPlan* plan,
                         const FastcollOperands* operands, const FastcollRows* rows,
                         double timeout_s, FastcollFailure* failure);
  // Find a call's parts and kind, but for its op. `is_whole`: equal parts, end to end in one tensor
  // on either side. False if it is to be left to Python.
  bool (*read_parts)(const FastcollGroup* group, const FastcollPartsCall* call, FastcollKind* kind,
                     FastcollParts* parts, bool* is_whole);
  // Find the form of a norm for `run`. False if it is to be left to Python.
  bool (*read_rows)(const FastcollRowsCall* call, FastcollRows* rows);
  // Whether a call may be queued here: none is queued in Python, which it would have to go behind.
  bool (*takes_calls)(FastcollGroup* group);
  // Carry out a call behind those that are queued here, in a thread. A small one may rest until
  // `finish`, `go_on` or another call. kFastcollPending where another thread has queued one in
  // Python meanwhile. On each outcome `drop` is called. `place`: for `finish`.
  FastcollOutcome (*queue)(FastcollGroup* group, const FastcollQueuedCall* call, const void** place,
                           FastcollFailure* failure);
  // Go on in this thread with a call that is not over, if it rests. `limit_s` <= 0: without a
  // limit. kFastcollPending: It does not rest, or is not over after `limit_s` seconds, and goes on.
  // As `run` where it was interrupted.
  FastcollOutcome (*finish)(FastcollGroup* group, const void* place, double limit_s,
                            FastcollFailure* failure);
  // Get on with the call that rests, if one does: here if that takes no wait, else in a thread.
  void (*go_on)(FastcollGroup* group);
  // Wait for a call as long as a hand-over to a thread takes. If it is not over then, a thread goes
  // on with it.
  void (*linger)(FastcollGroup* group, const void* place);
  // Run a task, which throws nothing, in a thread of this process.
  void (*run_task)(void (*task)(void* context), void* context);
  void (*drain_threads)();  // waits until calls and tasks are over

  // Sends and receives, whose memory must live until they are over, also without a handle.
  // Start one; null where that failed. `must_drive`: it is not over, and the caller has to call
  // drive_transfers, as there may never be a wait for it.
  FastcollTransfer* (*start_transfer)(FastcollGroup* group, const FastcollTransferCall* call,
                                      bool* must_drive, FastcollFailure* failure);
  // Move all bytes that can move now; return whether this one is over.
  bool (*look_at_transfer)(FastcollGroup* group, const FastcollTransfer* transfer);
  // Wait until it is over, where `limit_s` > 0 that long at most. As `run` where it was
  // interrupted.
  FastcollOutcome (*wait_for_transfer)(FastcollGroup* group, FastcollTransfer* transfer,
                                       double limit_s, FastcollFailure* failure);
  bool (*transfer_is_over)(const FastcollTransfer* transfer);
  int (*peer_of_transfer)(const FastcollTransfer* transfer);  // of one that is over
  void (*drop_transfer)(FastcollTransfer* transfer);          // lets go of the handle
  // Let a thread move those that are not over. Where there is none their waits do. The thread calls
  // `end`, without the GIL, once all are over.
  void (*drive_transfers)(FastcollGroup* group, void (*end)());
};
