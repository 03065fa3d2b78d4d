// SPDX-License-Identifier: Apache-2.0
// Sends and receives under stress: ranks as threads on ONE shared mapping, as in test_protocol.cpp.
// Random transfers of all pairs run at once, each rank's in an order of its own. Ranks pause at
// every shared word.
//
//   test_p2p VARIANT [num_seeds [timeout_s [first]]]
//
// first: messages and chunks of every pair before.
//
// `correct` must pass. The other variants have one planted bug each (planted.h) and must not.
#include <map>
#include <random>

#include "cpu/p2p.h"
#include "thread_ranks.h"
#include "transfer_of.h"

using namespace fastcoll;

namespace {

thread_local std::minstd_rand pause_random;

template <class Base>
struct Perturbed : Base {
  static void pause() {
    if (pause_random() % 128 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(pause_random() % 50));
  }
  static void arrive(uint64_t& word, uint64_t value) {
    pause();
    Base::arrive(word, value);
  }
  static uint64_t load_acquire(const uint64_t& word) {
    const uint64_t value = Base::load_acquire(word);
    pause();
    return value;
  }
  // So that a message uses a place of chunks twice.
  static constexpr size_t kPairSpanBytes = PairChannel::kLeastSpanBytes;
  // Copies into the channels go past the caches after some calls, on every machine.
  static bool is_slow(uint64_t, uint64_t) { return pause_random() % 2 == 0; }
};

// ---- random transfers ---------------------------------------------------------------------------

struct Planned {
  int src, dst;
  uint32_t tag;
  size_t numel;
  uint64_t salt;
};

uint64_t value_of(const Planned& one, size_t i) { return mix64(one.salt + i); }

// From one word to more than the ring holds, and to sizes copied out of their owner's memory. Some
// pairs have more messages than a channel has places.
std::vector<Planned> draw(std::mt19937_64& random, int world_size) {
  constexpr size_t kMost[] = {1, 28, 200, 6000, 100000};
  std::vector<Planned> all;
  for (int src = 0; src < world_size; ++src)
    for (int dst = 0; dst < world_size; ++dst) {
      const bool are_many = random() % 8 == 0;
      const uint64_t most_count = are_many ? 2 * PairChannel::kMessages : 4;
      for (uint64_t count = random() % most_count; count > 0; --count)
        all.push_back({src, dst, uint32_t(random() % 2),
                       random() % (kMost[random() % (are_many ? 4 : 5)] + 1), random()});
    }
  return all;
}

struct Running {
  const Planned* planned;
  std::vector<uint64_t> data;
  std::shared_ptr<Transfer> transfer;
};

// The transfers of one rank: those of one pair, side and tag in their order, all others mixed.
std::vector<Running> transfers_of(const std::vector<Planned>& all, int rank, double timeout_s) {
  std::vector<Running> mine;
  std::map<std::tuple<bool, int, uint32_t>, std::vector<const Planned*>> queues;
  for (const Planned& one : all) {
    if (one.src == rank) queues[{true, one.dst, one.tag}].push_back(&one);
    if (one.dst == rank) queues[{false, one.src, one.tag}].push_back(&one);
  }
  while (!queues.empty()) {
    auto queue = std::next(queues.begin(), ptrdiff_t(pause_random() % queues.size()));
    const auto [sends, peer, tag] = queue->first;
    Running& one = mine.emplace_back();
    one.planned = queue->second.front();
    const size_t numel = one.planned->numel;
    one.data.assign(numel + 1, 0);
    for (size_t i = 0; sends && i < numel; ++i) one.data[i] = value_of(*one.planned, i);
    const auto bytes = bytes_of(one.data).first(numel * sizeof(uint64_t));
    one.transfer = transfer_of(sends, peer, DType::uint64, bytes, timeout_s);
    one.transfer->tag = tag;
    queue->second.erase(queue->second.begin());
    if (queue->second.empty()) queues.erase(queue);
  }
  return mine;
}

template <class P>
void run_rank(const std::vector<Planned>& all, const std::vector<std::byte*>& regions, int rank,
              uint64_t seed, double timeout_s) {
  pause_random.seed(uint32_t(mix64(seed * 64 + uint64_t(rank))));
  GroupOptions options = options_of(rank, regions, timeout_s);
  // Crowded: all allowed copies are made. Else a waiting rank sends chunks; others are copied from.
  const bool is_crowded = seed % 4 == 0;
  if (!is_crowded) options.num_cpus = options.world_size;
  Group<Perturbed<P>> group(options);
  PointToPoint<Perturbed<P>> engine(group);
  if (seed % 2 == 0) engine.allow_single_copy(seed % 8 == 0);
  Host host;
  std::vector<Running> mine = transfers_of(all, rank, timeout_s);
  // Sometimes another thread of the rank makes the progress, and this one only looks at `done`.
  const bool is_driven = seed % 6 == 0;
  std::jthread driver;
  try {
    for (Running& one : mine) {
      // Whether it is said to be waited for: it is, but the receiver does not know.
      if (seed % 3 == 0) engine.start({&one.transfer, 1}, host);
      else engine.post(one.transfer, host);
    }
    if (is_driven)
      driver = std::jthread([&engine, seed] {
        pause_random.seed(uint32_t(mix64(seed)));
        Host host;
        engine.drive(host);
      });
    for (Running& one : mine) {
      while (is_driven && !one.transfer->done) std::this_thread::yield();
      engine.wait(*one.transfer, host, 0);
      for (size_t i = 0; i < one.planned->numel; ++i) {
        if (one.transfer->sends) one.data[i] = 0;  // its owner's again
        else if (one.data[i] != value_of(*one.planned, i)) {
          std::fprintf(stderr, "WRONG: rank %d from %d, tag %u, element %zu of %zu\n", rank,
                       one.planned->src, one.planned->tag, i, one.planned->numel);
          std::exit(1);
        }
      }
    }
  } catch (const Failure& failure) {
    std::fprintf(stderr, "FAILED: rank %d: %s\n", rank, failure.what());
    std::exit(1);
  }
}

template <class P>
int run_all(uint64_t num_seeds, double timeout_s, uint64_t first) {
  for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
    std::mt19937_64 random(seed);
    const int world_size = 1 + int(random() % 4);
    const std::vector<Planned> all = draw(random, world_size);
    copy_ways.answers_in_place = seed % 4 != 3;
    const size_t region_bytes = mapped_bytes(world_size);
    const Memory memory = zeroed_pages(size_t(world_size) * region_bytes);
    const auto regions = regions_in(memory, world_size, region_bytes);
    set_words(memory.get(), region_bytes);
    for (std::byte* region : regions)
      for (int peer = 0; peer < world_size; ++peer) {
        auto& channel = pair_channel(region, peer, world_size);
        channel.offered.value = channel.sent.value = channel.received.value = first;
      }
    run_ranks(world_size, [&](int rank) { run_rank<P>(all, regions, rank, seed, timeout_s); });
  }
  std::printf("ok: %d seeds\n", int(num_seeds));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_stress(argc, argv, []<class P>(P, auto... limits) { return run_all<P>(limits...); });
}
