// SPDX-License-Identifier: Apache-2.0
// The actions at the named points of fault_points.h: a rank arms one of them through the C
// functions at the end. The middle of a copy, of a reduction, and of a copy out of another process
// are points as well. Each is done in halves: the linker wraps memcpy and process_vm_readv, and
// reduce.cpp is compiled with its reduce_fn called plain_reduce_fn.
#include "fault_points.h"

#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "cpu/copy.h"
#include "cpu/reduce.h"

namespace fastcoll {
ReduceFn plain_reduce_fn(DType dtype, Op op);
}

using namespace fastcoll;

namespace fault_points {
namespace {

constexpr int kBefore = 0, kAfter = int(Which::none), kCopy = 2 * kAfter, kReduction = kCopy + 1,
              kForeignCopy = kCopy + 2, kNumPoints = kCopy + 3;
enum class Action { none, delay, stop, kill };

struct {
  std::atomic<bool> is_on{false};
  std::array<std::atomic<int>, kNumPoints> num_reached{};
  int point = -1, number = 0;  // that number of times it is reached
  Action action = Action::none;
  unsigned delay_us = 0;
} state;

// Memory that ranks share: a region, or the memory of symmetric tensors.
struct Range {
  uintptr_t begin, end;
  bool is_region;
};
std::array<Range, 256> ranges;
std::atomic<size_t> num_ranges{0};

const Range* range_of(const void* ptr) {
  const auto address = uintptr_t(ptr);
  for (size_t i = 0; i < num_ranges; ++i)
    if (address >= ranges[i].begin && address < ranges[i].end) return &ranges[i];
  return nullptr;
}

void reach(int point) {
  if (!state.is_on) return;
  const int number = ++state.num_reached[size_t(point)];
  if (point != state.point || number != state.number) return;
  if (state.action == Action::delay) usleep(state.delay_us);
  if (state.action == Action::stop) ::kill(getpid(), SIGSTOP);
  if (state.action == Action::kill) ::kill(getpid(), SIGKILL);
}

void reach_word(int first, const uint64_t& word) {
  if (!state.is_on) return;
  const Range* range = range_of(&word);
  if (!range || !range->is_region) return;
  const Which which = word_at(uintptr_t(&word) - range->begin, range->end - range->begin);
  if (which != Which::none) reach(first + int(which));
}

const void* offset(const void* ptr, size_t num_bytes) {
  return static_cast<const std::byte*>(ptr) + num_bytes;
}

template <size_t kKind>
void reduce_in_halves(const ReduceArgs& args) {
  constexpr DType kDType = DType(kKind / kNumOps);
  const ReduceFn plain = plain_reduce_fn(kDType, Op(kKind % kNumOps));
  ReduceArgs half = args;
  half.numel = args.numel / 2;
  if (half.numel != 0) plain(half);
  reach(kReduction);
  void* dsts[kMaxWorld + 1];
  const void* srcs[kMaxWorld];
  const size_t done_bytes = half.numel * dtype_size(kDType);
  for (int i = 0; i < args.num_dsts; ++i)
    dsts[i] = const_cast<void*>(offset(args.dsts[i], done_bytes));
  for (int i = 0; i < args.num_srcs; ++i) srcs[i] = offset(args.srcs[i], done_bytes);
  plain({dsts, args.num_dsts, srcs, args.num_srcs, args.numel - half.numel, args.avg_world});
}

template <size_t... kKinds>
constexpr std::array<ReduceFn, sizeof...(kKinds)> all_in_halves(std::index_sequence<kKinds...>) {
  return {reduce_in_halves<kKinds>...};
}

}  // namespace

void before(const uint64_t& word) { reach_word(kBefore, word); }
void after(const uint64_t& word) { reach_word(kAfter, word); }

}  // namespace fault_points

namespace fastcoll {

ReduceFn reduce_fn(DType dtype, Op op) {
  static constexpr auto kAll =
      fault_points::all_in_halves(std::make_index_sequence<size_t(kNumDTypes) * kNumOps>());
  return plain_reduce_fn(dtype, op) ? kAll[size_t(dtype) * kNumOps + size_t(op)] : nullptr;
}

}  // namespace fastcoll

extern "C" {

void* __real_memcpy(void* dst, const void* src, size_t num_bytes);
void* __wrap_memcpy(void* dst, const void* src, size_t num_bytes) {
  using namespace fault_points;
  if (!state.is_on || (!range_of(dst) && !range_of(src))) return __real_memcpy(dst, src, num_bytes);
  const size_t half = num_bytes / 2;
  __real_memcpy(dst, src, half);
  reach(kCopy);
  __real_memcpy(static_cast<std::byte*>(dst) + half, offset(src, half), num_bytes - half);
  return dst;
}

ssize_t __real_process_vm_readv(pid_t pid, const iovec* to, unsigned long num_to, const iovec* from,
                                unsigned long num_from, unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t pid, const iovec* to, unsigned long, const iovec* from,
                                unsigned long, unsigned long flags) {
  constexpr size_t kLeastBytes = 4096;  // read_process goes on where it got less than it asked for
  const size_t num_bytes = to->iov_len < kLeastBytes ? to->iov_len : to->iov_len / 2;
  const iovec to_half{to->iov_base, num_bytes}, from_half{from->iov_base, num_bytes};
  const ssize_t count = __real_process_vm_readv(pid, &to_half, 1, &from_half, 1, flags);
  if (num_bytes != to->iov_len) fault_points::reach(fault_points::kForeignCopy);
  return count;
}

#define FOR_TESTS __attribute__((visibility("default")))

// The name of a point, null behind the last one.
FOR_TESTS const char* fault_points_name(int point) {
  using namespace fault_points;
  static std::string name;
  if (point >= kNumPoints) return nullptr;
  if (point == kCopy) name = "copy";
  else if (point == kReduction) name = "reduction";
  else if (point == kForeignCopy) name = "foreign copy";
  else name = (point < kAfter ? "before " : "after ") + std::string(kWordNames[point % kAfter]);
  return name.c_str();
}

// Shared memory of this process; earlier ranges are forgotten if `is_first`.
FOR_TESTS void fault_points_watch(uintptr_t begin, uintptr_t end, bool is_region, bool is_first) {
  using namespace fault_points;
  if (is_first) num_ranges = 0;
  if (num_ranges == ranges.size()) return;
  ranges[num_ranges] = {begin, end, is_region};
  ++num_ranges;
}

// Count from here on how often each point is reached; act where `point` is the number'th time.
FOR_TESTS void fault_points_arm(int point, int number, int action, unsigned delay_us) {
  using namespace fault_points;
  state.is_on = false;
  for (auto& one : state.num_reached) one = 0;
  state.point = point;
  state.number = number;
  state.action = Action(action);
  state.delay_us = delay_us;
  auto& ways = fastcoll::copy_ways;  // memcpy has a point
  ways.by_vectors = ways.by_string = fastcoll::CopyWays::kNever;
  state.is_on = true;
}
FOR_TESTS void fault_points_disarm() { fault_points::state.is_on = false; }
FOR_TESTS int fault_points_reached(int point) {
  return fault_points::state.num_reached[size_t(point)];
}
FOR_TESTS bool fault_points_plant(const char* bug) { return planted::plant(bug); }
}
