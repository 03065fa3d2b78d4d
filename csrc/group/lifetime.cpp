// SPDX-License-Identifier: Apache-2.0
// The beginning and the end of a group in this process. Decides which mappings and descriptors a
// group keeps, and that a forked child keeps none.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "cpu/p2p.h"
#include "group/first_touch.h"
#include "group/peer_process.h"
#include "group/process_group.h"
#include "memory/memfd.h"

namespace fastcoll {

namespace {

// Every living group of this process, for the handler that runs in a forked child, and the peers of
// all. The mutex is held across fork() so that the child sees them whole.
std::mutex groups_mutex;
std::vector<ProcessGroup*> groups;
PeerTable peer_table;

}  // namespace

// A forked child (a DataLoader worker) must not keep its parent's sockets open: peers would not see
// the parent die. It can't use the group either, as it is no rank.
void ProcessGroup::forget_in_child() {
  for (ProcessGroup* group : groups) {
    group->forked_.store(true, std::memory_order_relaxed);
    group->close_fds();
  }
  groups.clear();
  groups_mutex.unlock();
}

ProcessGroup::ProcessGroup(int rank, int world_size, const std::string& name, const GroupFds& fds,
                           double timeout_s, int num_cpus, bool traces)
    : rank_(rank), world_size_(world_size), name_(name), traces_(traces) {
  static const int once = pthread_atfork([] { groups_mutex.lock(); }, [] { groups_mutex.unlock(); },
                                         &ProcessGroup::forget_in_child);
  (void)once;
  register_membarrier();
  std::copy_if(fds.sockets.begin(), fds.sockets.end(), std::back_inserter(fds_),
               [](int fd) { return fd >= 0; });
  {
    const std::lock_guard guard(groups_mutex);
    for (size_t peer = 0; peer < fds.pidfds.size(); ++peer)
      peers_.push_back(
          peer_table.meet(peer < fds.pids.size() ? fds.pids[peer] : 0, fds.pidfds[peer]));
  }

  GroupOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.name = name;
  options.timeout_s = timeout_s;
  options.num_cpus = num_cpus;
  options.traces = traces;
  std::string problem;
  const size_t world = size_t(std::max(world_size, 0));
  if (world > kMaxWorld || fds.regions.size() != world || fds.sockets.size() != world ||
      fds.pidfds.size() != world || fds.pids.size() != world)
    problem = "a group of " + std::to_string(world_size) + " ranks (1 to " +
              std::to_string(kMaxWorld) + " are possible) needs as many descriptors of each kind";
  try {
    if (!problem.empty()) throw Failure(ErrorKind::usage, problem);
    for (size_t peer = 0; peer < world; ++peer) {
      regions_[peer] = memfd_open(fds.regions[peer], mapped_bytes(world_size_));
      if (world > 1) map_touched(regions_[peer]);
      options.links[peer] = {fds.sockets[peer], peers_[peer]->pidfd(), fds.pids[peer]};
    }
    options.regions = regions_;
    group_ = std::make_shared<Group<StdAtomics>>(std::move(options));
    p2p_ = std::make_shared<PointToPoint<StdAtomics>>(*group_);
  } catch (const std::exception& error) {
    const auto* failure = dynamic_cast<const Failure*>(&error);
    const bool is_wrong = failure && failure->kind() != ErrorKind::driver;
    const ErrorKind kind = is_wrong ? ErrorKind::peer_lost : ErrorKind::driver;
    for (std::byte* region : regions_) memfd_close(region, mapped_bytes(world_size_));
    for (int fd : fds.regions) ::close(fd);
    for (int socket : fds.sockets)
      if (socket >= 0)
        leave_farewell(socket, kind, is_wrong ? uint64_t{1} << (rank & 63) : 0,
                       "rank " + std::to_string(rank) + " gave up: " + error.what());
    close_fds();
    throw;
  }
  for (size_t peer = 0; peer < world; ++peer) {                   // the mappings keep the memory
    if (peer == size_t(rank)) fds_.push_back(fds.regions[peer]);  // for `fastcoll inspect`
    else ::close(fds.regions[peer]);
  }
  Identity& identity = group_->pad(rank).identity;
  identity.rank = uint32_t(rank);
  identity.world_size = uint32_t(world_size);
  name.copy(identity.name, sizeof identity.name - 1);
  StdAtomics::store_release(identity.magic, kLayoutMagic);
  const std::lock_guard guard(groups_mutex);
  groups.push_back(this);
}

ProcessGroup::~ProcessGroup() {
  try {
    close();
  } catch (const Failure&) {  // about tensors, of which none is left
  }
  // In a forked child these addresses are unmapped, or another mapping's by now.
  if (forked_.load(std::memory_order_relaxed) || !group_) return;
  for (Arena& arena : group_->arenas()) memfd_close(arena.bases[rank_], arena.num_bytes);
}

void ProcessGroup::close() {
  if (forked_.load(std::memory_order_relaxed)) return;
  refuse_handler();
  Host host;
  await_queued(host);
  if (p2p_) p2p_->close();
  bool is_private = true;
  {
    const Turn turn(*this, host);
    const std::lock_guard pads(pads_mutex_);
    if (closed_.exchange(true)) return;
    openmp_waits_.release();
    // A rank that was stopped in the middle of a copy into this rank's tensors continues it when it
    // wakes up. The verdict does not stop that copy.
    if (group_ && group_->is_broken())
      for (Arena& arena : group_->arenas())
        if (arena.fd >= 0)
          is_private &= memfd_make_private(arena.fd, arena.bases[size_t(rank_)], arena.num_bytes);
    for (std::byte*& region : regions_) {
      memfd_close(region, mapped_bytes(world_size_));
      region = nullptr;
    }
    for (Arena& arena : group_->arenas()) {  // own arenas: tensors may still live in them
      for (int peer = 0; peer < world_size_; ++peer) {
        if (peer == rank_) continue;
        memfd_close(arena.bases[size_t(peer)], arena.num_bytes);
        arena.bases[size_t(peer)] = nullptr;
      }
    }
  }
  const std::lock_guard guard(groups_mutex);
  std::erase(groups, this);
  close_fds();
  if (!is_private)
    throw Failure(ErrorKind::driver, "group \"" + name_ +
                                         "\": no memory to copy its symmetric tensors to, so that "
                                         "a rank which was lost can still write there: drop them");
}

void ProcessGroup::close_fds() {
  for (int fd : fds_) ::close(fd);
  fds_.clear();
  peers_.clear();
  if (!group_) return;
  for (Arena& arena : group_->arenas()) {
    if (arena.fd >= 0) ::close(arena.fd);
    arena.fd = -1;
  }
}

}  // namespace fastcoll
