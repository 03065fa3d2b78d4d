// SPDX-License-Identifier: Apache-2.0
// Ranks with their regions and buffers, and one call of all of them as jobs of the simulator. They
// fill the input, run the kernel and check the output, in every rank's stream order. So a peer
// that still touches a tensor after its owner's kernel has ended is seen, as race or wrong result.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "buffers.h"
#include "cuda/kernels.cuh"

namespace fastcoll::sim {

struct Transfer {
  int from, to;
  Codes codes;
  size_t shift_bytes;
  bool symmetric;
  uint32_t pair_channels;
};

inline constexpr int kChannels = 4;  // that a group agreed on: as many as most calls have blocks
inline constexpr size_t kHeapBytes = size_t{1} << 20;
inline constexpr size_t kPairHeapBytes =  // from one rank to another
    kHeapBytes / kMaxGpuWorld / kPackBytes * kPackBytes;

class Machine {
 public:
  Machine(int world_size, Schedule schedule, uint64_t seed, uint64_t limit_ns,
          int num_channels = kChannels)
      : world_(world_size),
        layout_(GpuLayout::of(num_channels, world_size)),
        limit_ns_(limit_ns),
        simulator_(world_size * kStreams, schedule, seed),
        hosts_(size_t(world_size)) {
    for (int rank = 0; rank < world_; ++rank) {
      void* region = mmap(nullptr, kRegion, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (region == MAP_FAILED) {
        std::perror("region");
        std::exit(2);
      }
      regions_.push_back(static_cast<std::byte*>(region));
    }
  }
  ~Machine() {
    for (std::byte* region : regions_) munmap(region, kRegion);
  }

  // A planted bug: a reduce_scatter in place puts its result where another rank's part is read.
  static inline bool misplaces_parts = false;
  // Another: parts that lie apart are given to the wrong ranks.
  static inline bool swaps_parts = false;

  // Whether kernels start early, as do the program's between them.
  bool starts_early = true;
  // The ranks share one device, which has room for a kernel of each.
  void share_device() { simulator_.limit_blocks(world_ * kChannels); }

  // Whether the switch knows the heaps, as it knows the regions.
  bool heap_by_switch = true;

  const DeviceVerdict& verdict(int rank) const { return hosts_[size_t(rank)].verdict; }
  bool is_late(int rank, int peer) const { return hosts_[size_t(rank)].late[peer] != 0; }
  bool run() { return simulator_.run(); }
  uint64_t elapsed_ns() const { return simulator_.elapsed_ns(); }
  const LoadRuns& load_runs() const { return simulator_.load_runs(); }

  // As if nearly 2^32 calls had been made before: epochs and progress wrap.
  void start_before_wrap() {
    constexpr uint64_t kBefore = 0xfffffff8;
    for (std::byte* region : regions_) {
      auto* pad = reinterpret_cast<GpuPad*>(region);
      for (GpuChannel& channel : pad->channels) {
        channel.state = {{kBefore << 32, uint32_t(kBefore), 1},
                         {0, uint32_t(kBefore), uint32_t(kBefore)},
                         ChannelState::turn_after(kBefore << 32)};
        for (GpuWords& words : channel.from) words.progress = kBefore << 32;
      }
    }
  }

  // The checks of a call: its output; that, unless the rank has a verdict by then; nothing.
  enum class Checks { output, unless_failed, nothing };

  // One rank's part of a call. lies: alters the kernel's arguments. Streams of a rank don't wait
  // for each other.
  void enqueue(const Step& step, int rank, KernelFn kernel, Checks checks = Checks::output,
               const std::function<void(DeviceCall&)>& lies = nullptr, int stream = 0) {
    buffers_.push_back(std::make_unique<Buffers>());
    Buffers& buffers = *buffers_.back();
    buffers.place(step, rank, regions_[size_t(rank)] + kHeapOffsetBytes, kHeapBytes,
                  misplaces_parts);
    const int queue = rank + stream * world_;
    simulator_.enqueue(queue, of_program([=, &buffers] { buffers.fill(step, rank); }));
    DeviceCall call = make_call(step, rank, buffers);
    if (lies) lies(call);
    simulator_.enqueue(queue, {step.blocks, step.threads, [=] { kernel(call); }, starts_early});
    simulator_.enqueue(
        queue, of_program([=, this, &buffers] {
          const bool failed = __atomic_load_n(&verdict(rank).kind, __ATOMIC_ACQUIRE) != 0;
          if (checks == Checks::output || (checks == Checks::unless_failed && !failed))
            check(step, rank, buffers);
          else if (checks == Checks::nothing) last_output_[rank] = buffers.results();
        }));
  }
  // Delays the next job of this stream.
  void delay(int rank, int stream, uint64_t steps) {
    simulator_.enqueue(rank + stream * world_, {1, 1, [=] {
                                                  for (uint64_t i = 0; i < steps; ++i) yield();
                                                }});
  }
  // The host of a rank gives up, behind the earlier jobs of this stream.
  void give_up(int rank, int stream, int peer) {
    simulator_.enqueue(
        rank + stream * world_,
        {1, 1, [=, this] { store_release(&hosts_[size_t(rank)].abort, HostWords::lost(peer)); }});
  }
  // Sends and receives between pairs of ranks, one kernel for all of a rank's: each (from, to) at
  // most once.
  void enqueue_pairs(const Step& step, const std::vector<Transfer>& transfers) {
    for (int rank = 0; rank < world_; ++rank) {
      batches_.push_back(std::make_unique<Batch>());
      Batch& batch = *batches_.back();
      for (const Transfer& transfer : transfers)
        if (transfer.from == rank || transfer.to == rank) add_transfer(step, transfer, rank, batch);
      const int num_parts = int(batch.transfers.size());
      if (num_parts == 0) continue;
      batch.call.common = group_call(rank);
      simulator_.enqueue(rank, of_program([&batch, elem = step.elem_bytes()] {
                           for (size_t i = 0; i < batch.transfers.size(); ++i)
                             fill_transfer(batch, i, elem);
                         }));
      simulator_.enqueue(rank, {num_parts * kPairChannels, step.threads,
                                [&batch] { send_recv<Protocol>(batch.call); }, starts_early});
      simulator_.enqueue(rank, of_program([=, this, &batch] {
                           for (size_t i = 0; i < batch.transfers.size(); ++i)
                             check_transfer(step, rank, batch, i);
                         }));
    }
  }

  // Of the last call of a rank that was not checked.
  const reference::Bytes& output(int rank) { return last_output_[rank]; }

 private:
  static constexpr int kStreams = 2;
  // A heap begins far from the end of its region. Behind it lies memory that a rank with a wrong
  // place reads, and that no rank owns.
  static constexpr size_t kHeapOffsetBytes =
      GpuLayout::of(kMaxLlChannels, kMaxGpuWorld).num_bytes() + 4096;
  static constexpr size_t kRegion = kHeapOffsetBytes + 2 * kHeapBytes;

  struct Batch {
    PairCall call{};
    std::vector<Transfer> transfers;
    std::vector<std::unique_ptr<reference::Array>> arrays;
  };

  // A kernel of the program. It lets the next one start at once, long before its own work is done.
  Job of_program(std::function<void()> work) const {
    if (!starts_early) return {1, 1, std::move(work)};
    return {1, 1,
            [work = std::move(work)] {
              let_next_start();
              await_stream();
              yield();
              work();
            },
            true};
  }

  void add_transfer(const Step& step, const Transfer& transfer, int rank, Batch& batch) {
    const bool sends = transfer.from == rank;
    const size_t elem = step.elem_bytes();
    batch.arrays.push_back(
        std::make_unique<reference::Array>(transfer.codes.size() * elem, transfer.shift_bytes));
    std::byte* bytes = reinterpret_cast<std::byte*>(batch.arrays.back()->data());
    if (sends) {
      // A symmetric one lies behind those of the other transfers to its receiver.
      if (transfer.symmetric)
        bytes = regions_[size_t(rank)] + kHeapOffsetBytes + size_t(transfer.to) * kPairHeapBytes;
    }
    PairPart& part = batch.call.parts[batch.transfers.size()];
    part.data = bytes;
    part.numel = transfer.codes.size();
    part.location = location(rank, bytes);
    part.tile_bytes = std::min(step.tile_bytes, 64u);
    part.plan_hash = uint32_t(mix64(transfer.codes.size()));
    part.elem_bytes = uint32_t(elem);
    part.channels = transfer.pair_channels;
    part.peer = sends ? transfer.to : transfer.from;
    part.verb = sends ? Verb::send : Verb::recv;
    part.dtype = step.dtype;
    batch.transfers.push_back(transfer);
  }

  static void fill_transfer(Batch& batch, size_t i, size_t elem) {
    const PairPart& part = batch.call.parts[i];
    if (part.verb != Verb::send) return;
    const Codes& codes = batch.transfers[i].codes;
    for (size_t k = 0; k < codes.size(); ++k) std::memcpy(part.data + k * elem, &codes[k], elem);
  }

  void check_transfer(const Step& step, int rank, const Batch& batch, size_t i) const {
    const PairPart& part = batch.call.parts[i];
    if (verdict(rank).kind != 0) wrong(step, rank, describe(verdict(rank)));
    if (part.verb == Verb::send) return;
    const Codes& codes = batch.transfers[i].codes;
    for (size_t k = 0; k < codes.size(); ++k)
      if (std::memcmp(part.data + k * step.elem_bytes(), &codes[k], step.elem_bytes()) != 0)
        wrong(step, rank,
              "element " + std::to_string(k) + " from rank " + std::to_string(part.peer));
    if (!batch.arrays[i]->margins_intact())
      wrong(step, rank, "bytes beside the output were written");
  }

  uint32_t location(int rank, const std::byte* ptr) const {
    const std::byte* data = regions_[size_t(rank)] + kHeapOffsetBytes;
    if (ptr < data || ptr >= data + kHeapBytes) return GpuLocation::kStaged;
    return GpuLocation::encode(uint64_t(ptr - data));
  }

  GroupCall group_call(int rank) {
    GroupCall call{};
    for (int peer = 0; peer < world_; ++peer) {
      call.regions[peer] = regions_[size_t(peer)];
      call.heaps[peer] = regions_[size_t(peer)] + kHeapOffsetBytes;
    }
    if (heap_by_switch) call.heap_multicast = call.heaps[rank];  // here any address will do
    call.layout = layout_;
    call.host = &hosts_[size_t(rank)];
    call.limit_ns = limit_ns_;
    call.report_ns = limit_ns_ / 4;
    call.heap_bytes = kHeapBytes;
    call.rank = rank;
    call.world_size = world_;
    return call;
  }

  DeviceCall make_call(const Step& step, int rank, Buffers& buffers) {
    DeviceCall call{};
    static_cast<GroupCall&>(call) = group_call(rank);
    call.tile_bytes = step.tile_bytes;
    call.op = step.op;
    call.dtype = kernel_dtype(step.dtype);
    call.elem_bytes = uint32_t(dtype_size(call.dtype));
    const Placement& where = step.places[size_t(rank)];
    call.input_apart = where.input_apart;
    call.output_apart = where.output_apart;
    call.input = where.input_apart ? nullptr : buffers.given[0].begin;
    call.output = where.output_apart ? nullptr : buffers.taken[0].begin;
    for (int peer = 0; peer < world_; ++peer) {
      const int to = swaps_parts ? (peer + 1) % world_ : peer;
      if (where.input_apart) call.input_parts[peer] = buffers.given[size_t(to)].begin;
      if (where.output_apart) call.output_parts[peer] = buffers.taken[size_t(peer)].begin;
    }
    if (!step.even) {
      for (int peer = 0; peer < world_; ++peer) {
        call.counts[peer] = step.splits[size_t(rank)][size_t(peer)];
        call.counts[world_ + peer] = step.splits[size_t(peer)][size_t(rank)];
      }
      call.counted = true;
    }
    const int parts = dtype_kind(step.dtype) == Kind::complex ? 2 : 1;
    call.numel = step.numel * uint64_t(parts);
    call.input_location = location(rank, call.input);
    call.output_location = location(rank, call.output);
    call.plan_hash = step.plan_hash();
    call.root = step.root;
    call.verb = step.verb;
    return call;
  }

  [[noreturn]] static void wrong(const Step& step, int rank, const std::string& what) {
    const Placement& where = step.places[size_t(rank)];
    const auto memory = [](bool symmetric, bool apart) {
      return apart ? "apart" : symmetric ? "symmetric" : "private";
    };
    std::fprintf(
        stderr, "WRONG: rank %d, %s: %s (input %s, output %s%s)\n", rank, step.name().c_str(),
        what.c_str(), memory(where.symmetric_input, where.input_apart),
        memory(where.symmetric_output, where.output_apart), where.in_place ? ", in place" : "");
    std::exit(1);
  }

  void check(const Step& step, int rank, const Buffers& buffers) const {
    if (verdict(rank).kind != 0) wrong(step, rank, "a verdict: " + describe(verdict(rank)));
    const size_t elem = step.elem_bytes();
    const Codes expected = expected_output(step, rank);
    const reference::Bytes results = buffers.results();
    for (size_t i = 0; i < expected.size(); ++i) {
      uint64_t code = 0;
      std::memcpy(&code, &results[i * elem], elem);
      if (code != expected[i])
        wrong(step, rank,
              "element " + std::to_string(i) + " is " + std::to_string(code) + ", expected " +
                  std::to_string(expected[i]));
    }
    if (!step.places[size_t(rank)].in_place && !buffers.margins_intact())
      wrong(step, rank, "bytes beside the output were written");
  }

 public:
  static std::string describe(const DeviceVerdict& verdict) {
    return "kind " + std::to_string(verdict.kind) + ", raised by rank " +
           std::to_string(verdict.raiser) + ", at fault rank " + std::to_string(verdict.rank) +
           ", channel " + std::to_string(verdict.channel) + ", epoch " +
           std::to_string(verdict.epoch) + ", phase " + kPhaseNames[verdict.phase];
  }

 private:
  const int world_;
  const GpuLayout layout_;
  const uint64_t limit_ns_;
  Simulator simulator_;
  std::vector<HostWords> hosts_;
  std::vector<std::byte*> regions_;
  std::vector<std::unique_ptr<Buffers>> buffers_;
  std::vector<std::unique_ptr<Batch>> batches_;
  std::vector<reference::Bytes> last_output_ = std::vector<reference::Bytes>(size_t(world_));
};

}  // namespace fastcoll::sim
