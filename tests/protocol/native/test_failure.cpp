// SPDX-License-Identifier: Apache-2.0
// Calls that must end in an error on every rank; a rank is a thread here. Calls differ though no
// rank waited in them, or a rank waits in vain in a schedule. Or private memory can't be copied,
// or its owner gave up or ended first.
//
//   test_failure VARIANT [limit_s]
//
// `correct` must pass. The other variants have one planted bug each (planted.h) and must not.
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>

#include "cpu/p2p.h"
#include "cpu/run.h"
#include "hand_programs.h"
#include "stranger.h"
#include "thread_ranks.h"
#include "transfer_of.h"

using namespace fastcoll;

namespace {

constexpr int kWorld = 2, kOwner = 0;
constexpr size_t kNumel = 16 << 10;  // of uint64: a transfer of so much is copied
double limit_s = 60;                 // of a wait; never reached

// The reader has seen where the owner's memory lies, and goes on when the owner is through with it.
struct Meeting {
  Which word = Which::none;  // in which it sees that
  std::atomic<bool> has_looked{false}, is_over{false};
};
thread_local Meeting* meeting = nullptr;

template <class Base>
struct Held : Base {
  static uint64_t load_acquire(const uint64_t& word) {
    const uint64_t value = Base::load_acquire(word);
    if (meeting && value != 0 && word_of(&word) == meeting->word) {
      meeting->has_looked = true;
      while (!meeting->is_over) sched_yield();
    }
    return value;
  }
};

struct Died {};

// The owner's program: it is stopped, or it ends, once the reader has looked.
struct LeavingHost : Host {
  LeavingHost(const Meeting& with, bool ends) : with_(with), ends_(ends) {}
  bool interrupted() override {
    if (with_.has_looked && ends_) throw Died{};
    return with_.has_looked;
  }
  std::string interruption() override { return "a test"; }

 private:
  const Meeting& with_;
  const bool ends_;
};

struct Machine {
  Machine() {
    set_words(all.get(), mapped_bytes(kWorld));
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) std::abort();
  }
  ~Machine() {
    for (const int socket : sockets)
      if (socket >= 0) close(socket);
  }
  GroupOptions options(int rank) const {
    GroupOptions options = options_of(rank, regions_in(all, kWorld, mapped_bytes(kWorld)), limit_s);
    options.links[size_t(1 - rank)].socket = sockets[rank];
    return options;
  }
  const Memory all = zeroed_pages(kWorld * mapped_bytes(kWorld));
  int sockets[2];  // of each rank to the other
};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "no error";
}

Plan plan_of(Verb verb, int root, Algorithm algorithm, bool inlined) {
  Plan plan;
  plan.verb = verb;
  plan.dtype = DType::uint64;
  plan.algorithm = algorithm;
  plan.root = root;
  plan.inlined = inlined;
  plan.numel = verb == Verb::barrier ? 0 : inlined ? 2 : kNumel;
  plan.segment_bytes = uint32_t(kLeastSegmentBytes);
  return make_plan(plan);
}

Plan reduction_of(Algorithm algorithm, Op op) {
  Plan plan = plan_of(Verb::all_reduce, 0, algorithm, false);
  plan.op = op;
  return make_plan(plan);
}

// ---- calls that differ --------------------------------------------------------------------------

// Ranks differ in the root or the operation, and see it where they wait: in the next call.
template <class P>
void differ(Algorithm algorithm, bool inlined, int num_before, int num_calls) {
  const Machine machine;
  const bool meets = algorithm == Algorithm::ring || algorithm == Algorithm::chain;
  run_ranks(kWorld, [&](int rank) {
    Host host;
    Group<P> group(machine.options(rank));
    std::vector<uint64_t> data(kNumel);
    const Plan barrier = plan_of(Verb::barrier, 0, Algorithm::direct, true);
    const Program program = program_of(Verb::broadcast, kWorld, rank, rank);
    bool was_made = false;
    const std::string error = error_of([&] {
      for (int i = 0; i < num_before; ++i) run(group, barrier, nullptr, nullptr, host);
      Plan plan = plan_of(Verb::broadcast, rank, algorithm, inlined);
      if (meets) plan = reduction_of(algorithm, rank ? Op::max : Op::sum);
      for (int i = 0; i < num_calls; ++i)
        run(group, plan, data.data(), data.data(), host, -1, &program);
      was_made = true;
      run(group, barrier, nullptr, nullptr, host);
    });
    // Where all ranks meet first, none gets through. Else a late rank may hear it from the other.
    const bool stops = meets || algorithm == Algorithm::schedule;
    const bool finds = error.find(". Found by rank " + std::to_string(rank)) != std::string::npos;
    require(stops ? !was_made : was_made || !finds, "where the calls differ: " + error);
    require_part(error, std::string(meets ? "all_reduce #" : "broadcast #") +
                            std::to_string(num_before + 1) + " in group");
  });
}

// ---- schedules ----------------------------------------------------------------------------------

// Each rank waits for a signal that the other's program does not have.
template <class P>
void wait_in_vain(double timeout_s) {
  const Machine machine;
  run_ranks(kWorld, [&](int rank) {
    Host host;
    Group<P> group(machine.options(rank));
    std::vector<uint64_t> data(kNumel);
    const Plan plan = plan_of(Verb::broadcast, 0, Algorithm::schedule, false);
    ProgramWords words(rank);
    words.wait(uint32_t(1 - rank), 1);
    const Program program(kWorld, rank, {1, 1, 1}, words.words());
    const std::string error =
        error_of([&] { run(group, plan, data.data(), data.data(), host, timeout_s, &program); });
    require_part(error, " waited ");
    require(group.is_broken(), "a group with a verdict");
  });
}

// Calls that are refused before any word is shared.
template <class P>
void refuse() {
  const Machine machine;
  Host host;
  Group<P> group(machine.options(0));
  const Plan plan = plan_of(Verb::broadcast, 0, Algorithm::schedule, false);
  const std::string error = error_of([&] { run(group, plan, nullptr, nullptr, host); });
  require_equal(error, "a plan of a schedule that was not added", "a schedule without program");
  constexpr struct {
    int rank, world_size;
    bool is_possible;
  } kRanks[] = {{0, 0, false}, {-1, 2, false},
                {2, 2, false}, {0, kMaxWorld + 1, false},
                {0, 1, true},  {kMaxWorld - 1, kMaxWorld, true}};
  for (const auto& [rank, world_size, is_possible] : kRanks) {
    GroupOptions options = machine.options(0);
    options.rank = rank;
    options.world_size = world_size;
    const std::string refused = error_of([&] { const Group<P> other(options); });
    require((refused == "no error") == is_possible, "ranks that there can be: " + refused);
  }
}

// ---- the memory of other processes --------------------------------------------------------------

// Rank 0 takes process `pid` for rank 1.
template <class P>
void find_out(int pid, bool is_wanted, const std::array<int, kWorld>& expected) {
  const Machine machine;
  run_ranks(kWorld, [&](int rank) {
    Host host;
    GroupOptions options = machine.options(rank);
    for (PeerLink& link : options.links) link.pid = getpid();
    if (rank == 0) options.links[1].pid = pid;
    Group<P> group(options);
    // Longer than a sleep of the other rank, which then looks at its limit.
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto errors = group.try_single_copy(rank == 0 || is_wanted, host);
    for (size_t peer = 0; peer < kWorld; ++peer)
      require_equal(errors[peer], expected[peer],
                    "what rank " + std::to_string(peer) + " can read");
  });
}

template <class P>
void copy_from(int pid, bool has_hung_up, ErrorKind kind, const std::string& expected) {
  Machine machine;
  GroupOptions options = machine.options(1);
  options.links[1].pid = getpid();
  options.links[kOwner].pid = pid;
  if (has_hung_up) close(std::exchange(machine.sockets[kOwner], -1));
  Group<P> group(options);
  volatile uint64_t nowhere = 8;  // no page of any process; volatile: the compiler would warn
  uint64_t word = 0;
  try {
    read_private(group, kOwner, nowhere, &word, sizeof word, [] { return std::string("A test"); });
    require(false, "a copy from nowhere");
  } catch (const Failure& failure) {
    require_equal(failure.kind(), kind, failure.what());
    require_part(failure.what(), expected);
  }
}

template <class P>
void read_strangers() {
  const Stranger gone(true), other(false);
  find_out<P>(getpid(), true, {0, 0});
  find_out<P>(getpid(), false, {0, ECANCELED});
  find_out<P>(gone.pid, true, {ESRCH, 0});
  find_out<P>(other.pid, true, {ESRCH, 0});
  copy_from<P>(gone.pid, false, ErrorKind::peer_lost, "A test could not copy 8 bytes");
  copy_from<P>(other.pid, false, ErrorKind::driver, "FASTCOLL_SINGLE_COPY=never");
  copy_from<P>(other.pid, true, ErrorKind::peer_lost, "A test could not copy 8 bytes");
}

// ---- private memory of an owner that is through with it -----------------------------------------

// A rank's message: `hands_over` gives the owner's to the other rank, or takes it there.
template <class P>
void copy_too_late(
    Which word, bool ends,
    const std::function<void(Group<P>&, std::vector<uint64_t>&, Host&)>& hands_over) {
  Machine machine;
  Meeting with;
  with.word = word;
  // A rank that still holds the lines can read the program's later data there.
  std::vector<uint64_t> message(kNumel, 1);
  run_ranks(kWorld, [&](int rank) {
    auto group = std::make_unique<Group<P>>(machine.options(rank));
    if (rank == kOwner) {
      LeavingHost host(with, ends);
      try {
        hands_over(*group, message, host);
        require(false, "an owner that gives up");
      } catch (const Interrupted&) {
      } catch (const Died&) {
        close(std::exchange(machine.sockets[kOwner], -1));
      }
      std::fill(message.begin(), message.end(), 2);
      with.is_over = true;
      return;
    }
    meeting = &with;
    Host host;
    std::vector<uint64_t> data(kNumel);
    const std::string error = error_of([&] { hands_over(*group, data, host); });
    meeting = nullptr;
    require_part(error, ends ? "lost rank 0" : "was interrupted (a test)");
  });
}

template <class P>
void broadcast(Group<P>& group, std::vector<uint64_t>& data, Host& host) {
  run(group, plan_of(Verb::broadcast, kOwner, Algorithm::single_copy, false), data.data(),
      data.data(), host);
}

template <class P>
void transfer(Group<P>& group, std::vector<uint64_t>& data, Host& host) {
  PointToPoint<P> pairs(group);
  pairs.allow_single_copy(true);
  const auto one =
      transfer_of(group.rank() == kOwner, 1 - group.rank(), DType::uint64, bytes_of(data), limit_s);
  pairs.post(one, host);
  pairs.wait(*one, host, 0);
}

// The sender's message differs from the one that the receiver expects.
template <class P>
void mismatch(DType dtype, size_t numel) {
  const Machine machine;
  run_ranks(kWorld, [&](int rank) {
    Host host;
    Group<P> group(machine.options(rank));
    PointToPoint<P> pairs(group);
    const bool sends = rank == 0;
    std::vector<uint64_t> data(sends ? kNumel : numel);
    const auto one =
        transfer_of(sends, 1 - rank, sends ? DType::uint64 : dtype, bytes_of(data), limit_s);
    const std::string error = error_of([&] {
      pairs.post(one, host);
      pairs.wait(*one, host, 0);
    });
    require_part(error, "rank 0 sends 16384 x uint64 to rank 1");
  });
}

template <class P>
int run_all() {
  for (const int num_before : {0, 1, 5}) {
    for (const int num_calls : {1, 2}) {
      differ<P>(Algorithm::direct, true, num_before, num_calls);
      differ<P>(Algorithm::direct, false, num_before, num_calls);
    }
    for (const Algorithm algorithm : {Algorithm::schedule, Algorithm::ring, Algorithm::chain})
      differ<P>(algorithm, false, num_before, 1);
  }
  for (const double timeout_s : {0.0, 0.1}) wait_in_vain<P>(timeout_s);
  refuse<P>();
  read_strangers<P>();
  mismatch<P>(DType::int64, kNumel);
  mismatch<P>(DType::uint64, kNumel - 1);
  for (const bool ends : {false, true}) {
    copy_too_late<P>(Which::arrive, ends, broadcast<P>);
    copy_too_late<P>(Which::message, ends, transfer<P>);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) limit_s = std::strtod(argv[2], nullptr);
  return run_variant(argc > 1 ? argv[1] : "correct", []<class P>(P) { return run_all<Held<P>>(); });
}
