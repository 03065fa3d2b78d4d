// SPDX-License-Identifier: Apache-2.0
// All ranks of a group in one thread, for errors that have to say exactly what each rank did. Only
// the rank that is tested ever waits, with a short limit. A peer acts while it waits through a hook
// of its host. Its tests have the standard headers below from here.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/p2p.h"
#include "cpu/run.h"
#include "require.h"

namespace lone {

using namespace fastcoll;
// As shipped; a test may look on.
struct P : StdAtomics {
  static inline std::function<void(const uint64_t&)> on_load, on_arrive;
  static inline std::function<void(const uint64_t&)> on_store;  // relaxed
  static inline bool kChecksPlaces = true;
  static uint64_t load_acquire(const uint64_t& word) {
    if (on_load) on_load(word);
    return StdAtomics::load_acquire(word);
  }
  static void arrive(uint64_t& word, uint64_t value) {
    if (on_arrive) on_arrive(word);
    StdAtomics::arrive(word, value);
  }
  static void store_relaxed(uint64_t& word, uint64_t value) {
    if (on_store) on_store(word);
    StdAtomics::store_relaxed(word, value);
  }
};

}  // namespace lone

// Compiled once a build, in lone_world.cpp: each program would take seconds for the same code.
extern template class fastcoll::Group<lone::P>;
extern template class fastcoll::PointToPoint<lone::P>;
extern template void fastcoll::run(Call<lone::P>&, Host&, double);
extern template void fastcoll::run(Group<lone::P>&, const Plan&, const void*, void*, Host&, double,
                                   const Program*);

namespace lone {

// For a hook: acts when it is called first, and then no more.
template <class Act>
auto once(const Act& act) {
  return [act, is_over = false](auto&&...) mutable {
    if (!std::exchange(is_over, true)) act();
  };
}

// Counts what happens to a word while it is there.
class Counter {
 public:
  Counter(std::function<void(const uint64_t&)>& hook, const uint64_t& word) : hook_(hook) {
    hook_ = [this, &word](const uint64_t& touched) { count += &touched == &word; };
  }
  Counter(const Counter&) = delete;
  ~Counter() { hook_ = {}; }
  int count = 0;

 private:
  std::function<void(const uint64_t&)>& hook_;
};

constexpr double kLimitS = 0.03;

struct LoneHost : Host {
  bool interrupted() override {
    ++num_looks;
    if (hook) hook();
    return is_interrupted;
  }
  std::string interruption() override { return "a test"; }
  bool steps_out() override { return leaves; }
  std::string call_site() override {
    if (on_site) on_site();
    return site;
  }
  void blocking() override { ++num_waits; }
  std::function<void()> hook, on_site;
  int num_waits = 0;
  bool is_interrupted = false, leaves = false;
  int num_looks = 0;
  std::string site;
};

inline Plan plan_of(Verb verb, uint64_t numel = 2, int root = 0) {
  Plan plan;
  plan.verb = verb;
  plan.dtype = DType::int32;
  plan.numel = verb == Verb::barrier ? 0 : numel;
  plan.root = root;
  plan.inlined = true;
  plan.algorithm = verb == Verb::all_reduce ? Algorithm::one_shot : Algorithm::direct;
  plan.segment_bytes = uint32_t(kLeastSegmentBytes);
  return make_plan(plan);
}
inline const Plan kBarrier = plan_of(Verb::barrier);

class World {
 public:
  explicit World(int size, const std::function<void(GroupOptions&)>& change = {}) : size_(size) {
    // Zero, and only the pages that are touched take time.
    void* memory = mmap(nullptr, num_bytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(memory != MAP_FAILED, "memory");
    memory_ = static_cast<std::byte*>(memory);
    for (int rank = 0; rank < size; ++rank) {
      GroupOptions options;
      options.rank = rank;
      options.world_size = size;
      options.name = "lone";
      options.timeout_s = kLimitS;
      for (int peer = 0; peer < size; ++peer)
        options.regions[size_t(peer)] = memory_ + size_t(peer) * mapped_bytes(size);
      if (change) change(options);
      groups_.push_back(std::make_unique<Group<P>>(options));
      hosts_.push_back(std::make_unique<LoneHost>());
    }
  }
  World(const World&) = delete;
  ~World() {
    groups_.clear();
    munmap(memory_, num_bytes());
  }
  int size() const { return size_; }
  Group<P>& group(int rank) { return *groups_[size_t(rank)]; }
  LoneHost& host(int rank) { return *hosts_[size_t(rank)]; }
  Pad& pad(int rank) { return group(0).pad(rank); }

  // A rank comes to a call and goes no further, or gives its part; `all` get through with one.
  void enter(int rank, const Plan& plan = kBarrier) {
    group(rank).begin(plan, {1}, host(rank), kLimitS);
  }
  void arrive(int rank, const Plan& plan = kBarrier) {
    enter(rank, plan);
    group(rank).arrive_inlined(nullptr, 0);
  }
  void leave(int rank) { group(rank).end(); }
  void pass(int rank) {  // it waits for no rank, and is through
    arrive(rank);
    leave(rank);
  }
  void all(const Plan& plan = kBarrier) {
    for (int rank = 0; rank < size_; ++rank) arrive(rank, plan);
    for (int rank = 0; rank < size_; ++rank) {
      for (int peer = 0; peer < size_; ++peer) group(rank).wait_arrival(peer);
      leave(rank);
    }
  }

 private:
  size_t num_bytes() const { return size_t(size_) * mapped_bytes(size_); }
  const int size_;
  std::byte* memory_;
  std::vector<std::unique_ptr<Group<P>>> groups_;
  std::vector<std::unique_ptr<LoneHost>> hosts_;
};

// A test can't know times: "0.0312 s" becomes "T s", "31 ms" becomes "T ms".
inline std::string without_times(const std::string& text) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find_first_not_of("0123456789.e-", at);
    const std::string behind = end == std::string::npos ? "" : text.substr(end, 4);
    const bool is_number = end != at && end != std::string::npos && at > 0 && text[at - 1] == ' ';
    const bool is_time = behind.starts_with(" s ") || behind.starts_with(" ms ");
    result += is_number && is_time ? "T" : text.substr(at, std::max<size_t>(1, end - at));
    at = end == std::string::npos ? text.size() : std::max(end, at + 1);
  }
  return result;
}

struct Seen {
  std::string text;
  ErrorKind kind = ErrorKind::usage;
  uint64_t ranks = 0;
};
inline Seen error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return {failure.what(), failure.kind(), failure.ranks()};
  } catch (const Interrupted&) {
    return {"interrupted"};
  } catch (const SteppedOut&) {
    return {"stepped out"};
  }
  return {"no error"};
}
inline void require_error(const Seen& seen, const std::string& text, ErrorKind kind,
                          uint64_t ranks) {
  require_equal(without_times(seen.text), text, "an error");
  require_equal(int64_t(seen.kind), int64_t(kind), text + ": its kind");
  require_equal(int64_t(seen.ranks), int64_t(ranks), text + ": the ranks at fault");
}
inline const std::string kOver =
    ". Use of this group is over: call fastcoll.shrink() or fastcoll.destroy()";
inline void require_verdict(const Seen& seen, const std::string& text, ErrorKind kind,
                            uint64_t ranks) {
  require_error(seen, text + kOver, kind, ranks);
}

// ---- words of errors ------------------------------------------------------------------------

inline const std::string kName = "barrier() #";
inline const std::string kAdvice =
    ". Plan: direct inlined, numerics=same_bits. If the ranks are only slow, raise the timeout "
    "(timeout_s=, FASTCOLL_TIMEOUT_S); `fastcoll inspect` shows what every rank of this machine "
    "does, `fastcoll doctor` the machine";

inline std::string place(int rank, int world_size) {
  return " in group \"lone\" (seen by rank " + std::to_string(rank) + " of " +
         std::to_string(world_size) + ")";
}

// Rank 0 waits in its next call.
inline Seen wait_in_vain(World& world, const Plan& plan = kBarrier) {
  return error_of([&] { run(world.group(0), plan, nullptr, nullptr, world.host(0), kLimitS); });
}
// A process that is stopped.
class Stopped {
 public:
  Stopped() : parent(getpid()), pid(fork()) {
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() == parent) raise(SIGSTOP);
      _exit(0);
    }
    waitpid(pid, nullptr, WUNTRACED);
  }
  ~Stopped() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  const pid_t parent, pid;
};

}  // namespace lone
