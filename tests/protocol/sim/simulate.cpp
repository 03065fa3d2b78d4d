// SPDX-License-Identifier: Apache-2.0
// The GPU kernels in the simulator.
//
//   simulate VARIANT SCHEDULE FIRST_SEED NUM_SEEDS ["ALGORITHM VERB"]
//
// Each seed is a workspace of 1 to 8 or 16 ranks. On it run 20 calls that mix verbs,
// algorithms, types, sizes and placements. `correct` must pass; the other variants have one planted
// bug each and must not, under some schedule or under ThreadSanitizer. `absent`, `aborted`,
// `mismatch`, `overlaps` and `misplaced` are in failures.h. The others are in the headers of their
// names.
#include <cstring>

#include "draw.h"
#include "failures.h"
#include "gauges.h"
#include "ll.h"
#include "loads.h"
#include "partials.h"
#include "probes.h"
#include "published.h"
#include "racks.h"
#include "shapes.h"
#include "variants.h"

using namespace fastcoll;
using namespace fastcoll::sim;

namespace {

constexpr int kCallsPerSeed = 20;
constexpr int kManyRanks = 16;  // the most there can be are in racks.h

// Any pairs, both directions: a batch must not care about cycles.
std::vector<Transfer> draw_transfers(Random& random, const Step& step) {
  std::vector<Transfer> transfers;
  for (int from = 0; from < step.world(); ++from)
    for (int to = 0; to < step.world(); ++to) {
      if (from == to || pick(random, 3) != 0) continue;
      transfers.push_back(draw_transfer(random, step, from, to));
    }
  return transfers;
}

template <class P>
int run_seeds(Schedule schedule, uint64_t first_seed, uint64_t num_seeds, const std::string& only) {
  for (uint64_t seed = first_seed; seed < first_seed + num_seeds; ++seed) {
    Random random(seed);
    const int world = pick(random, 16) == 0 ? kManyRanks : 1 + int(pick(random, 8));
    Machine machine(world, schedule, random(), ~uint64_t{0});
    if (seed % 4 == 0) machine.start_before_wrap();
    machine.heap_by_switch = seed % 3 != 0;
    machine.starts_early = seed % 5 != 0;
    const bool shares = seed % 2 == 0;
    if (shares) machine.share_device();
    for (int call = 0; call < kCallsPerSeed; ++call) {
      const Step step = draw_step<P>(random, world, only);
      if (std::is_same_v<P, Protocol> && pick(random, 8) == 0 && !shares)
        machine.enqueue_pairs(step, draw_transfers(random, step));
      for (int rank = 0; rank < world; ++rank) machine.enqueue(step, rank, kernel_of<P>(step));
    }
    if (!machine.run()) {
      std::fprintf(stderr, "FAILED: seed %llu\n", static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  std::printf("ok: %d calls on each of %d seeds\n", kCallsPerSeed, int(num_seeds));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string variant = argv[1];
  const Schedule schedule =
      std::strcmp(argv[2], "starving") == 0 ? Schedule::starving : Schedule::uniform;
  const uint64_t first = std::strtoull(argv[3], nullptr, 10);
  const uint64_t count = std::strtoull(argv[4], nullptr, 10);
  const std::string only = argc > 5 ? argv[5] : "";
  if (variant == "shapes") return check_shapes();
  if (variant == "racks") return run_racks<Protocol>(schedule, count);
  if (variant == "racks_absent") return run_racks_absent<Protocol>(count);
  if (variant == "absent") return run_absent<Protocol>(count);
  if (variant == "aborted") return run_aborted<Protocol>(count);
  if (variant == "mismatch") return run_mismatch(count);
  if (variant == "misplaced") return run_misplaced<Protocol>(count);
  if (variant == "overlaps") return run_overlaps<Protocol>(count);
  if (variant == "partials") return run_partials(count, false);
  if (variant == "partials_in_wrong_order") return run_partials(count, true);
  if (variant == "probes") return run_probes(count);
  if (variant == "gauges") return run_gauges(count, false);
  if (variant == "gauges_astray") return run_gauges(count, true);
  if (variant == "published") return run_published(count, true);
  if (variant == "published_unmet") return run_published(count, false);
  if (variant == "ll") return run_ll(schedule, count, false);
  if (variant == "ll_crowded") return run_ll(schedule, count, true);
  if (variant == "loads") return run_loads();
  if (variant == "loads_by_packs") return run_few_loads(false);
  if (variant == "loads_by_parts") return run_few_loads(true);
  if (variant == "correct") return run_seeds<Protocol>(schedule, first, count, only);
  const bool planted = plant(variant);
  if (planted && only == "probes") return run_probes(count);
  if (planted && only == "racks") return run_racks<Planted>(schedule, count);
  if (variant == "switch_without_signs") return run_seeds<Protocol>(schedule, first, count, only);
  if (variant == "ignored_turns" || variant == "old_state") return run_overlaps<Planted>(count);
  if (variant == "unreported") return run_absent<Planted>(count);
  if (variant == "unheard_aborts") return run_aborted<Planted>(count);
  if (variant == "unchecked_places") return run_misplaced<Planted>(count);
  if (planted) return run_seeds<Planted>(schedule, first, count, only);
  std::fprintf(stderr, "unknown variant %s\n", variant.c_str());
  return 2;
}
