// SPDX-License-Identifier: Apache-2.0
// Parts of a call, each by itself: a schedule's program, strided tensors, and the choice of how
// staging memory is filled. Needs no group.
//
//   test_parts
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/atomics.h"
#include "cpu/operands.h"
#include "cpu/program.h"
#include "cpu/staging_copy.h"
#include "cpu/strided.h"
#include "require.h"

using namespace fastcoll;

namespace {

// ---- a schedule's program -----------------------------------------------------------------------

using Words = std::vector<uint32_t>;
constexpr int kWorld = 3, kRank = 1;
constexpr ProgramBlocks kBlocks{2, 6, 8};

std::string refusal(const Words& words, const ProgramBlocks& blocks = kBlocks) {
  try {
    const Program program(kWorld, kRank, blocks, words);
  } catch (const Failure& failure) {
    const std::string text = failure.what(), prefix = "a schedule's program: ";
    require_start(text, prefix);
    return text.substr(prefix.size());
  }
  return "";
}

// ---- words of a place, of a copy out of the input
constexpr uint32_t kInput = 0, kOutput = 1, kScratch = 2, kNoBuffer = 3;
constexpr uint32_t owner(uint32_t rank, uint32_t buffer) { return rank << 2 | buffer; }
Words copy_to(uint32_t num_blocks, uint32_t to, uint32_t block) {
  return {0, num_blocks, to, block, owner(kRank, kInput), 0};
}

void check_blocks() {
  constexpr ProgramBlocks kGood[] = {{1, 1, 1}, {2, 2, 2}, {2, 6, 6}, {1, 1, 512}, {512, 512, 512}};
  for (const ProgramBlocks& blocks : kGood) require_equal(refusal({}, blocks), "", "good blocks");
  constexpr ProgramBlocks kBad[] = {{0, 1, 1}, {1, 0, 1}, {2, 1, 2},
                                    {2, 3, 3}, {1, 2, 1}, {1, 1, 513}};
  for (const ProgramBlocks& blocks : kBad)
    require_equal(refusal({}, blocks), "its blocks", "bad blocks");
}

void check_steps() {
  const Words steps[] = {
      {0, 2, owner(kRank, kOutput), 4, owner(kRank, kInput), 1},
      {1, 1, owner(2, kScratch), 7, 2, owner(0, kScratch), 3, owner(kRank, kInput), 5},
      {2, kMostSignals - 1},
      {3, 2, 1},
  };
  Words all;
  for (const Words& step : steps) {
    all.insert(all.end(), step.begin(), step.end());
    for (size_t length = 1; length < step.size(); ++length)
      require_equal(refusal({step.begin(), step.begin() + ptrdiff_t(length)}),
                    "it ends inside a step", "a step's beginning");
  }
  const Program program(kWorld, kRank, kBlocks, all);
  require(program.steps().size() == std::size(steps), "the number of steps");
  const ProgramStep& copy = program.steps()[0];
  const Place* places = program.places(copy);
  require(copy.kind == StepKind::copy && copy.num_blocks == 2 && copy.num_sources == 1, "a copy");
  require(places[0].rank == kRank && places[0].buffer == BufferKind::output && places[0].block == 4,
          "where a copy goes");
  require(places[1].buffer == BufferKind::input && places[1].block == 1, "where it comes from");
  const ProgramStep& reduction = program.steps()[1];
  places = program.places(reduction);
  require(reduction.kind == StepKind::reduce && reduction.num_sources == 2, "a reduction");
  require(places[0].rank == 2 && places[0].block == 7 && places[1].rank == 0 &&
              places[1].block == 3 && places[2].rank == kRank && places[2].block == 5,
          "its places");
  require(
      program.steps()[2].kind == StepKind::signal && program.steps()[2].count == kMostSignals - 1,
      "a signal");
  require(program.steps()[3].kind == StepKind::wait && program.steps()[3].peer == 2 &&
              program.steps()[3].count == 1,
          "a wait");
}

void check_refusals() {
  require_equal(refusal({4, 0, 0}), "an unknown kind of step", "a kind");
  const auto reduce = [](uint32_t count) {
    Words words{1, 1, owner(kRank, kOutput), 0, count};
    for (uint32_t i = 0; i < count; ++i) words.insert(words.end(), {owner(kRank, kInput), 0});
    return words;
  };
  for (const uint32_t count : {0, kWorld + 1})
    require_equal(refusal(reduce(count)), "a number of sources", "bad sources");
  for (const uint32_t count : {1, kWorld}) require_equal(refusal(reduce(count)), "", "sources");
  for (const uint32_t peer : {uint32_t(kWorld), uint32_t(kRank), ~0u})
    require_equal(refusal({3, peer, 1}), "a peer", "a peer that is none");
  require_equal(refusal({3, 0, 1}), "", "a peer");
  for (const uint32_t count : {0u, kMostSignals})
    require_equal(refusal({2, count}), "a number of signals", "signals");
  require_equal(refusal({2, 1}), "", "a signal");
  const std::string outside = "a place outside the message";
  for (const auto& [buffer, end] : {std::pair{kOutput, 6u}, {kScratch, 8u}}) {
    const uint32_t to = owner(kRank, buffer);
    require_equal(refusal(copy_to(2, to, end - 2)), "", "the last blocks");
    require_equal(refusal(copy_to(2, to, end - 1)), outside, "a block behind the last");
    require_equal(refusal(copy_to(0, to, 0)), outside, "no block");
    require_equal(refusal(copy_to(end + 1, to, 0)), outside, "more blocks than there are");
  }
  require_equal(refusal(copy_to(6, owner(kRank, kOutput), 0)), "", "all blocks");
  require_equal(refusal(copy_to(1, owner(kRank, kNoBuffer), 0)), outside, "an unknown buffer");
  require_equal(refusal(copy_to(1, owner(kWorld, kScratch), 0)), outside, "a rank that is none");
  require_equal(refusal(copy_to(1, owner(kWorld - 1, kScratch), 0)), "", "another's scratch");
  for (const uint32_t buffer : {kInput, kOutput})
    require_equal(refusal(copy_to(1, owner(0, buffer), 0)),
                  "a place in another rank's input or output", "another's tensor");
}

// ---- strided tensors ----------------------------------------------------------------------------

// A tensor in memory of its own, with other bytes around its elements.
struct Sample {
  std::vector<int64_t> shape, strides;
  size_t elem_bytes, numel = 1;
  std::vector<std::byte> memory;
  std::byte* first;

  Sample(std::vector<int64_t> sizes, size_t bytes, std::mt19937& random)
      : shape(std::move(sizes)), strides(shape.size()), elem_bytes(bytes) {
    std::vector<size_t> order(shape.size());  // from the innermost in memory
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    int64_t extent = int64_t(bytes), below = 0;
    for (const size_t dim : order) {
      if (random() % 3 == 0) extent += int64_t(bytes) * (1 + int64_t(random() % 3));  // a gap
      strides[dim] = extent;
      numel *= size_t(shape[dim]);
      extent *= shape[dim];
      if (random() % 4 == 0) {
        strides[dim] = -strides[dim];
        below -= strides[dim] * (shape[dim] - 1);
      }
    }
    memory.resize(size_t(extent));
    for (std::byte& byte : memory) byte = std::byte(random());
    first = memory.data() + below;
  }
  std::byte* element(size_t number) const {
    std::byte* at = first;
    for (size_t i = shape.size(); i-- > 0; number /= size_t(shape[i]))
      at += int64_t(number % size_t(shape[i])) * strides[i];
    return at;
  }
};

void check_sample(Sample sample, std::mt19937& random) {
  Strided strided;
  require(strided.set(sample.first, sample.elem_bytes, int(sample.shape.size()),
                      sample.shape.data(), sample.strides.data()),
          "a tensor of so many dimensions");
  const size_t start = random() % 2 ? 0 : random() % sample.numel;
  const size_t numel = random() % 2 ? sample.numel - start : random() % (sample.numel - start + 1);
  std::vector<std::byte> dense(numel * sample.elem_bytes);
  strided.read(dense.data(), start, numel);
  for (size_t i = 0; i < numel; ++i)
    require(std::memcmp(dense.data() + i * sample.elem_bytes, sample.element(start + i),
                        sample.elem_bytes) == 0,
            "an element read");
  for (std::byte& byte : dense) byte = std::byte(random());
  std::vector<std::byte> expected = sample.memory;
  for (size_t i = 0; i < numel; ++i)
    std::memcpy(expected.data() + (sample.element(start + i) - sample.memory.data()),
                dense.data() + i * sample.elem_bytes, sample.elem_bytes);
  strided.write(start, dense.data(), numel);
  require(sample.memory == expected, "elements written, and nothing else");
}

void check_strided() {
  std::mt19937 random(1);
  for (int i = 0; i < 600; ++i) {
    std::vector<int64_t> shape;
    const size_t num_dims = random() % 6;
    for (int64_t numel = 1; shape.size() < num_dims; numel *= shape.back()) {
      const int64_t most = std::max<int64_t>(1, std::min<int64_t>(150, 12000 / numel));
      shape.push_back(
          1 + int64_t(random() % uint32_t(random() % 3 ? std::min<int64_t>(9, most) : most)));
    }
    check_sample(Sample(shape, size_t{1} << random() % 5, random), random);
  }
  // Dimensions of one element count for nothing, and those that merge for one.
  for (const int64_t size : {1, 2}) {
    std::vector<int64_t> shape, strides;
    for (int i = 0; i < 12; ++i) {
      shape.push_back(size);
      strides.push_back(size == 1 ? i * 7 : int64_t{1} << (11 - i));
    }
    std::vector<std::byte> memory(size_t{1} << 12);
    Strided strided;
    require(strided.set(memory.data(), 1, 12, shape.data(), strides.data()), "12 dimensions");
  }
  // A row alone is a matrix of one row, also where nothing was before.
  static Strided fresh;
  const std::byte row[3] = {std::byte{1}, std::byte{2}, std::byte{3}};
  const int64_t length = 3, stride = 1;
  std::byte seen[3];
  require(fresh.set(const_cast<std::byte*>(row), 1, 1, &length, &stride), "a row");
  fresh.read(seen, 0, 3);
  require(std::memcmp(seen, row, 3) == 0, "the elements of a row");
  // Every second element of every dimension, so that none merges with the next.
  for (const int num_dims : {Strided::kMostDims, Strided::kMostDims + 1}) {
    std::vector<int64_t> shape(size_t(num_dims), 2), strides;
    for (int i = 0; i < num_dims; ++i) strides.push_back(int64_t{1} << (2 * (num_dims - i)));
    std::vector<std::byte> memory(size_t{1} << (2 * num_dims + 1));
    Strided strided;
    const bool fits = strided.set(memory.data(), 1, num_dims, shape.data(), strides.data());
    require(fits == (num_dims == Strided::kMostDims), "the most dimensions");
  }
}

// ---- how staging memory is filled ---------------------------------------------------------------

struct Judged {
  static inline bool says_slow = false;
  static inline int num_asked = 0;
  static bool is_slow(uint64_t fetching, uint64_t) {
    require(fetching > 0, "a copy that was timed");
    ++num_asked;
    return says_slow;
  }
};

class Filling {
 public:
  // Copies one after another; counts the questions whether they were slow.
  int copy(int count, size_t num_bytes = kBytes) {
    Judged::num_asked = 0;
    for (int i = 0; i < count; ++i) {
      for (size_t at = 0; at < num_bytes; ++at) from_[at] = std::byte(i + int(at % 251));
      to_.fill(std::byte{0});
      copy_(to_.data(), from_.data(), num_bytes);
      require(std::memcmp(to_.data(), from_.data(), num_bytes) == 0, "a copy");
    }
    return Judged::num_asked;
  }
  // For so many copies of kBytes and not one more.
  void require_streams(int count) {
    require(copy_.streams(), "copies go past the caches");
    require_equal(copy(count - 1), 0, "copies that are not timed");
    require(copy_.streams(), "the last of them");
    copy(1);
    require(!copy_.streams(), "then they don't");
  }
  bool streams() const { return copy_.streams(); }
  static constexpr size_t kBytes = 1024;

 private:
  StagingCopy<Judged> copy_;
  alignas(64) std::array<std::byte, 4 * kBytes> from_, to_;
};

void check_filling() {
  Filling filling;
  require_equal(filling.copy(40, Filling::kBytes - 1), 0, "small copies are not timed");
  Judged::says_slow = false;
  require(filling.copy(1) > 0, "the first is timed");
  require_equal(filling.copy(15), 0, "the next 15 are not");
  require(filling.copy(1) > 0, "the sixteenth is");
  filling.copy(15);
  // Two pairs in a row have to be slow: one of each is ordinary.
  Judged::says_slow = true;
  for (int pair = 0; pair < 2; ++pair) {
    for (int i = 0; i < 2; ++i) {
      require(!filling.streams(), "before two slow pairs");
      require_equal(filling.copy(1), 1, "each of a pair is timed");
    }
    if (pair == 0) require_equal(filling.copy(15), 0, "ordinary copies between two pairs");
  }
  filling.require_streams(800);
  require_equal(filling.copy(15), 0, "ordinary copies before the next pair");
  require_equal(filling.copy(2), 2, "one slow pair is enough now");
  filling.require_streams(800);
  // A copy larger than the rest of them is the last.
  filling.copy(15 + 2);
  filling.copy(798);
  filling.copy(1, 3 * Filling::kBytes);
  require(!filling.streams(), "after a large copy");
  // A quick one starts the count anew.
  for (const int num_slow : {1, 2 + 15, 2 + 15 + 1}) {
    Judged::says_slow = false;
    filling.copy(15 + 1 + 15);
    Judged::says_slow = true;
    filling.copy(num_slow);
    Judged::says_slow = false;
    require(filling.copy(1) > 0 && !filling.streams(), "a quick copy");
    Judged::says_slow = true;
    filling.copy(15 + 2 + 15 + 1);
    require(!filling.streams(), "one and a half slow pairs");
    filling.copy(1);
    filling.require_streams(800);
  }
}

// ---- words of one process, plans ----------------------------------------------------------------

void check_words() {
  uint64_t word = 0;
  require(StdAtomics::set_once(word, 5) == 5 && StdAtomics::set_once(word, 6) == 5 && word == 5,
          "a word that is set once");
  for (const uint64_t target : {uint64_t{0}, uint64_t{7}, ~uint64_t{0}, uint64_t{1} << 63})
    require(StdAtomics::reached(target, target) && StdAtomics::reached(target + 1, target) &&
                !StdAtomics::reached(target - 1, target),
            "whether a word has come so far");
  for (const uint64_t streaming : {0, 6, 7, 30}) {
    const uint64_t least = std::max<uint64_t>(streaming, 6) + 10;
    require(StdAtomics::is_slow(least, streaming) && !StdAtomics::is_slow(least - 1, streaming),
            "whether fetching is slow");
    require(StdAtomics::is_slow(140, streaming) && !StdAtomics::is_slow(141, streaming),
            "what was not fetching alone");
  }
  SleepLine line{};
  StdAtomics::set_sleepers(line);
  require(StdAtomics::load_sleepers(line) == 1, "somebody sleeps");
  StdAtomics::clear_sleepers(line);
  require(StdAtomics::load_sleepers(line) == 0, "nobody sleeps");
  StdAtomics::advance_wake(line);
  require(StdAtomics::load_wake(line) == 1, "a wake");
}

void check_plans() {
  for (int verb = 0; verb < kNumVerbs; ++verb)
    for (int algorithm = 0; algorithm < kNumGpuAlgorithms; ++algorithm) {
      Plan plan;
      plan.verb = Verb(verb);
      plan.algorithm = Algorithm(algorithm);
      using enum Verb;
      const bool shots =
          plan.algorithm == Algorithm::one_shot || plan.algorithm == Algorithm::two_shot;
      const bool is_direct = plan.algorithm == Algorithm::direct;
      const bool lists = plan.verb == all_gather                                  ? is_direct
                         : plan.verb == all_reduce || plan.verb == reduce_scatter ? shots
                                                                                  : false;
      const bool strided = plan.verb == broadcast      ? is_direct
                           : plan.verb == Verb::reduce ? shots
                                                       : lists;
      require(takes_lists(plan) == lists, describe(plan) + " of a list");
      require(takes_strided(plan) == strided, describe(plan) + " of a strided tensor");
    }
}

}  // namespace

int main() {
  check_blocks();
  check_steps();
  check_refusals();
  check_strided();
  check_filling();
  check_words();
  check_plans();
}
