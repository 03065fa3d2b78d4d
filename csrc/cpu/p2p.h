// SPDX-License-Identifier: Apache-2.0
// Point-to-point: send and receive between two ranks, beside the group's calls and in any order.
//
// A sender offers a message in a place of its channel to the peer; a small message comes with its
// offer. The receiver looks for the oldest offer with its tag. It grants a large one, whose chunks
// go through the channel's ring, one message of a pair at a time. So both ranks copy at the same
// time. If the sender does something else meanwhile, or both send large messages, the receiver
// copies alone: out of the sender's memory, if it may. All operations of a rank make progress
// whenever one of its threads polls, for whichever operation.
//
// Why offers and grants: in an eager channel per pair, a message without a receive would block the
// next one with another tag. An offer is a line in a table; the receiver chooses, and only then do
// bytes move. Any thread that waits moves all open transfers of its rank.
//
// Tried without gain: smaller chunks for sends of a few (slower). The first free place for each
// message was up to a fifth slower, as it takes a look at the peer's line each time. Fetching the
// lines of the next bay, before there is a message for it, was slower as well. A receiver gained
// nothing by asking for a message's lines at once, rather than for one after the other.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <bitset>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cpu/group.h"
#include "cpu/p2p_bays.h"
#include "cpu/pair_channel.h"
#include "cpu/patience.h"
#include "cpu/single_copy.h"
#include "cpu/status.h"
#include "cpu/transfer.h"

namespace fastcoll {

template <class P>
class PointToPoint {
 public:
  explicit PointToPoint(Group<P>& group)
      : group_(group),
        span_bytes_(std::min(P::kPairSpanBytes, PairChannel::span_bytes(group.world_size()))),
        patience_(group.world_size(), group.options().num_cpus) {
    bays_.fill(Bays(span_bytes_));
    const auto& regions = group.options().regions;
    const int rank = group.rank(), world_size = group.world_size();
    for (int peer = 0; peer < world_size; ++peer) {
      mine_[size_t(peer)] = &pair_channel(regions[size_t(rank)], peer, world_size);
      theirs_[size_t(peer)] = &pair_channel(regions[size_t(peer)], rank, world_size);
    }
  }

  // Every rank can read every rank's memory. always: even where the sender is there to send chunks.
  void allow_single_copy(bool always) {
    may_copy_ = true;
    copies_always_ = always;
  }

  // Start a transfer that is waited for soon; it may be done at once.
  void post(const std::shared_ptr<Transfer>& transfer, Host& host) {
    const auto guard = lock(host);
    transfer->is_awaited = true;
    if (has_large_) say_polling(true);  // until the end of its wait
    open({&transfer, 1});
  }

  // Start transfers, in their order, that the program may never wait for. True: not all are done,
  // and no thread drives them yet.
  bool start(std::span<const std::shared_ptr<Transfer>> transfers, Host& host) {
    const auto guard = lock(host);
    if (!open(transfers)) return false;
    last_start_us_ = now_us();
    return !is_driven_;
  }

  // Make the progress that is possible now, unless another thread is at it. Returns whether the
  // transfer is done.
  bool look(const Transfer& transfer) {
    if (transfer.done) return true;
    const std::unique_lock guard(mutex_, std::try_to_lock);
    if (guard.owns_lock()) pass(true);
    return transfer.done;
  }

  // Wait for one transfer, while all make progress. False: limit_s > 0 ran out, and it goes on.
  bool wait(Transfer& transfer, Host& host, double limit_s) {
    if (!transfer.done) {
      WaitedTime waited(limit_s, limit_s > 0 ? now_us() : 0);
      const bool over = poll_until(
          [&] { return transfer.done || (limit_s > 0 && waited.is_over()); }, host, &transfer);
      if (!over) throw Interrupted{};
    }
    if (says_polling_) {
      const std::lock_guard guard(mutex_);
      say_polling(false);
    }
    if (!transfer.done) return false;
    if (transfer.error) std::rethrow_exception(transfer.error);
    return true;
  }

  // Take back a receive that no message was found for, which ends it. False: one was, or it failed.
  bool withdraw(Transfer& transfer) {
    const std::lock_guard guard(mutex_);
    if (transfer.done || transfer.sends || transfer.state != Transfer::State::fresh) return false;
    std::erase_if(open_, [&](const auto& one) { return one.get() == &transfer; });
    finish(transfer);
    return true;
  }

  // The program ends: end the transfers that no peer has met. Those that move go on.
  void end_unmet() {
    const std::lock_guard guard(mutex_);
    for (const auto& transfer : open_) {
      if (transfer->state == Transfer::State::moving) continue;
      transfer->error = std::make_exception_ptr(
          Failure(ErrorKind::usage, "the program ended before the transfer was complete"));
      finish(*transfer);
    }
    forget_done();
  }

  // Make progress for a program that does something else meanwhile. Returns once nothing is open
  // and no transfer was started for a while. So in a program that goes on starting transfers, no
  // call wakes a thread.
  void drive(Host& host) {
    poll_until(
        [&] {
          const std::unique_lock guard(mutex_, std::try_to_lock);
          if (!guard.owns_lock()) return false;  // its holder makes the progress
          is_driven_ = !open_.empty() || (!closed_ && now_us() - last_start_us_ < kLingerUs);
          return !is_driven_;
        },
        host, nullptr);
  }

  // Whether transfers are open that no thread drives. The caller then has to see to it that one
  // does.
  bool claim_drive() {
    const std::lock_guard guard(mutex_);
    return !open_.empty() && !std::exchange(is_driven_, true);
  }

  // There is no thread to drive them: a wait for a transfer moves all of them.
  void give_up_drive() {
    const std::lock_guard guard(mutex_);
    is_driven_ = false;
  }

  bool has_open() {
    const std::lock_guard guard(mutex_);
    return !open_.empty();
  }

  bool has_open_sends() {
    const std::lock_guard guard(mutex_);
    return std::any_of(open_.begin(), open_.end(), [](const auto& one) { return one->sends; });
  }

  // No transfer is open from here on, and none can be started.
  void close() {
    const std::lock_guard guard(mutex_);
    closed_ = true;
    fail_all(std::make_exception_ptr(
        Failure(ErrorKind::usage, "the group was destroyed before the transfer was complete")));
  }

 private:
  static constexpr int64_t kPatrolUs = 1000;
  static constexpr std::chrono::microseconds kNap{100};
  // Of a driving thread: short against a copy worth overlapping, and hardly a load on its CPU.
  static constexpr std::chrono::microseconds kLongNap{250};
  static constexpr int64_t kLingerUs = 20000;
  static constexpr int64_t kSleepUs = 20000;      // as Group's
  static constexpr int64_t kShortSleepUs = 2000;  // without membarrier
  // Below this a call of the kernel costs more than it saves the sender.
  static constexpr size_t kLeastCopiedBytes = size_t{64} << 10;
  // Time for a rank that has just sent a message to begin its wait, before the receiver copies
  // alone. It is at least this long, and a few percent of the copy's time.
  static constexpr int64_t kPatienceUs = 3;
  static constexpr size_t kPatienceBytes = size_t{256} << 10;  // another microsecond for each
  // At a time, so that the program may interrupt. The kernel pins 1024 pages at a time, too.
  static constexpr size_t kCopyBytes = size_t{4} << 20;
  static constexpr size_t kSharedCopyBytes = size_t{512} << 10;  // others progress in between

  std::unique_lock<std::mutex> try_lock() { return std::unique_lock(mutex_, std::try_to_lock); }
  // Another thread may hold it through long copies; the program's others are to run meanwhile.
  std::unique_lock<std::mutex> lock(Host& host) {
    std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock()) [[unlikely]] {
      host.blocking();
      guard.lock();
    }
    return guard;
  }

  void say_blocked(uint64_t what) {
    const std::lock_guard guard(mutex_);
    if (!closed_) P::store_relaxed(group_.pad(group_.rank()).blocked.value, what);
  }
  void say_polling(bool polling) {
    if (polling == says_polling_ || closed_) return;
    says_polling_ = polling;
    P::store_relaxed(group_.pad(group_.rank()).polling.value, uint64_t(polling));
  }

  // ---- waiting (p2p_wait.h) --------------------------------------------------------------------
  // awaited: the transfer that this is for, if it is for one. False: the program was interrupted.
  template <class Over>
  bool poll_until(Over over, Host& host, const Transfer* awaited);
  template <class Over>
  bool poll(Over over, Host& host, const Transfer* awaited, bool& is_blocked);
  // Each millisecond of a wait: why does nothing move? False: the program was interrupted.
  bool look_around(Host& host, int64_t& next_patrol_us, bool moves);
  void rest(const Transfer* awaited);
  bool interrupt(const std::string& interruption);

  // ---- progress (p2p_progress.h) ---------------------------------------------------------------
  // Start transfers; whether one is not done.
  bool open(std::span<const std::shared_ptr<Transfer>> transfers) {
    if (closed_) throw Failure(ErrorKind::usage, "the group was destroyed");
    group_.check();
    const bool is_alone = open_.empty() && transfers.size() == 1;
    if (is_alone && run_at_once(*transfers.front())) return false;
    open_.insert(open_.end(), transfers.begin(), transfers.end());
    if (!is_alone) pass(true);
    bool is_left = false;
    for (const auto& transfer : transfers) {
      if (transfer->done) continue;
      is_left = true;
      const double limit_s = std::max(transfer->timeout_s, WaitedTime::kAtOnceS);
      transfer->waited = WaitedTime(limit_s, tick_us());
    }
    return is_left;
  }
  // Whether the only transfer was done at once. Most sends are: they cost no place in `open_`.
  bool run_at_once(Transfer& transfer);

  // Advance all open transfers; returns whether any moved. again: another pass follows soon.
  bool pass(bool again);
  void begin_pass(bool again);
  bool advance(Transfer& transfer, std::bitset<kMaxWorld>& must_queue);
  void forget_done() {
    std::erase_if(open_, [](const auto& transfer) { return transfer->done.load(); });
  }
  void finish(Transfer& transfer) { transfer.done.store(true, std::memory_order_release); }
  bool advance_send(Transfer& transfer, std::bitset<kMaxWorld>& must_queue);
  // Whether all of a message, whose location is known, comes with the offer.
  static bool comes_with_offer(const Transfer& transfer) {
    return transfer.num_bytes <= Message::kPayloadBytes || (transfer.location & Bays::kAnyBay) != 0;
  }
  // Where such a message lies. from, to: the channels of its sender and its receiver.
  template <class Channel>
  static auto room(Channel& from, Channel& to, const Transfer& transfer)
      -> decltype(&from.messages[0].payload[0]) {
    if (transfer.location == 0) return from.messages[transfer.place].payload;
    Channel& owner = transfer.location & Message::kInBay ? from : to;
    return spans(owner) + Bays::offset_of(transfer.location);
  }
  // Choose the location of a message that has its place and number.
  uint64_t locate(const Transfer& transfer, const PairChannel& channel, const PairChannel& back);
  // A message longer than the span writes lines again anyway. It takes a short ring, which stays in
  // the caches. By turns on a Zen 3, an exchange of 16 MiB took 4.3 ms in the whole span, and takes
  // 3.7 ms. Chunks of two messages are never in flight at a time, so their rings may differ. On a
  // Zen 4 the ring is twice as long: with near CPUs 8 MiB took 1.12 ms, and take 0.67.
  size_t ring_bytes(const Transfer& transfer) const {
    if (transfer.num_bytes <= span_bytes_) return span_bytes_;
    const size_t most_bytes = PairChannel::kLeastSpanBytes << int(copy_ways.in_long_rings);
    return std::min(span_bytes_, most_bytes);
  }
  template <class Channel>
  auto chunk(Channel& channel, const Transfer& transfer, uint64_t number) const
      -> decltype(&channel.messages[0].payload[0]) {
    const size_t start = number * PairChannel::kChunkBytes % ring_bytes(transfer);
    return spans(channel) + span_bytes_ + start;
  }
  template <class Channel>
  static auto spans(Channel& channel) -> decltype(&channel.messages[0].payload[0]) {
    return reinterpret_cast<decltype(&channel.messages[0].payload[0])>(&channel + 1);
  }
  // Put the message where the peer sees it. False while all places hold messages not taken yet.
  bool offer(Transfer& transfer, PairChannel& channel, PairChannel& back);
  // The places whose messages the peer has taken, as bits. Their bays are free again, too.
  uint32_t find_free(int peer, const PairChannel& channel, const PairChannel& back);
  bool advance_receive(Transfer& transfer);
  // Whether I send a message, too, and both are so large that each is to be copied once.
  bool is_exchanged(const Transfer& receive) const;
  // Whether the sender of a message that I may copy is there to copy its half.
  bool comes_in_chunks(const Transfer& transfer, const Message& message, bool is_busy) const;
  // Whether a receive that does not move gives the sender of its message a moment to wait for it.
  bool is_patient(const Transfer& transfer) const {
    return transfer.matched_us != 0 && movers_[size_t(transfer.peer)] != &transfer;
  }
  bool copy_out(Transfer& transfer, PairChannel& back);
  bool taken(Transfer& transfer, PairChannel& back);
  size_t next_chunk(const Transfer& transfer) const {
    return std::min(PairChannel::kChunkBytes, transfer.num_bytes - transfer.moved_bytes);
  }
  // Find the oldest offer that is for this receive.
  bool match(Transfer& transfer);
  // The same for all receives of a pass. Otherwise an offer that comes in between could go to a
  // later receive, since an earlier one has looked already.
  uint64_t offered_by(int peer);
  bool match_from(Transfer& transfer, int peer);
  // The next message of a pair mostly lies in the next place, with all before it claimed. A look at
  // its line then does for two. After a look in vain by an earlier receive of the pass it is none
  // of this one's.
  bool match_next(Transfer& transfer, int peer);
  void claim(Transfer& transfer, int peer, int place, uint64_t number);

  // ---- failure (p2p_failure.h) ----------------------------------------------------------------
  void fail_all(const std::exception_ptr& error);
  // Looks for a reason why nothing moves, and ends all open transfers if there is one.
  void patrol(int64_t time_us);
  std::string name(const Transfer& transfer) const;
  void look_for_loss(Transfer& transfer);
  // Advance it by what its peer left here: messages that it sent, marks for those that it took.
  bool advance_alone(Transfer& transfer);
  [[noreturn]] void fail_timeout(const Transfer& transfer);
  std::string chain(const Transfer& transfer, uint64_t* ranks) const;

  Group<P>& group_;
  const size_t span_bytes_;  // of a pair's chunks, and of its bays
  Patience patience_;        // of the main thread
  std::mutex mutex_;
  StagingCopy<P> staging_copy_;
  std::vector<std::shared_ptr<Transfer>> open_;  // in the order they were started
  bool is_under_way_ = false;                    // a part of one of them has come or gone
  bool has_large_ = false;                       // sends that the receivers may copy
  bool looks_again_ = false;                     // this pass is one of many
  std::atomic<bool> says_polling_{false};
  std::atomic<int> num_looking_{0};  // threads that wait for transfers, and do not sleep
  bool is_driven_ = false;           // drive() runs, and will see new transfers
  int64_t last_start_us_ = 0;
  std::array<PairChannel*, kMaxWorld> mine_{}, theirs_{};
  // As sender, by receiver: places that are free, as bits. Others may be free by now, too.
  std::array<uint32_t, kMaxWorld> free_{};
  std::array<Bays, kMaxWorld> bays_;  // shared with each peer
  static constexpr uint32_t kUsualPlaces = (uint32_t{1} << PairChannel::kUsualPlaces) - 1;
  static_assert(PairChannel::kMessages <= 32);
  std::array<int, kMaxWorld> expected_{};  // as receiver, by sender: where its next message may lie
  std::array<uint64_t, kMaxWorld> offered_{};  // to me, by sender, when this pass looked
  std::bitset<kMaxWorld> looked_;
  // As receiver: numbers of the messages that a receive has, by sender and place.
  std::array<std::array<uint64_t, PairChannel::kMessages>, kMaxWorld> claimed_{};
  // As receiver, by sender: a receive has each message up to this number.
  std::array<uint64_t, kMaxWorld> all_claimed_{};
  std::array<Transfer*, kMaxWorld> movers_{};  // whose chunks come, by sender
  Readable readable_;
  bool may_copy_ = false, copies_always_ = false;
  bool closed_ = false;
};

}  // namespace fastcoll

#include "cpu/p2p_failure.h"
#include "cpu/p2p_progress.h"
#include "cpu/p2p_wait.h"
