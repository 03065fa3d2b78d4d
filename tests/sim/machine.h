// SPDX-License-Identifier: Apache-2.0
// Ranks with their regions and buffers, and one call of all of them as jobs of the simulator: fill
// the input, run the kernel, check the output, in every rank's stream order. So a peer that still
// touches a tensor after its owner's kernel has ended is seen, as a race or as a wrong result.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cuda/kernels.cuh"
#include "steps.h"

namespace fastcoll::sim {

inline constexpr size_t kDataBytes = size_t{1} << 20;
inline constexpr unsigned char kFiller = 0xa5;
inline constexpr size_t kMarginBytes = 32;

class Machine {
 public:
  Machine(int world_size, Schedule schedule, uint64_t seed, uint64_t limit_ns)
      : world_(world_size),
        limit_ns_(limit_ns),
        simulator_(world_size, schedule, seed),
        verdicts_(size_t(world_size)) {
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

  const DeviceVerdict& verdict(int rank) const { return verdicts_[size_t(rank)]; }
  GpuPad* pad(int rank) { return reinterpret_cast<GpuPad*>(regions_[size_t(rank)]); }
  bool run() { return simulator_.run(); }

  // One rank's part of a call. checks: its output must be right.
  void enqueue(const Step& step, int rank, KernelFn kernel, bool checks = true) {
    buffers_.push_back(std::make_unique<Buffers>());
    Buffers& buffers = *buffers_.back();
    place(step, rank, buffers);
    simulator_.enqueue(rank, {1, 1, [=, &buffers] { fill(step, rank, buffers); }});
    const DeviceCall call = make_call(step, rank, buffers);
    simulator_.enqueue(rank, {step.blocks, step.threads, [=] { kernel(call); }});
    simulator_.enqueue(rank, {1, 1, [=, this, &buffers] {
                                if (checks) check(step, rank, buffers);
                                else last_output_[rank] = copy_of(step, rank, buffers);
                              }});
  }
  // Of the last call of a rank that was not checked.
  const reference::Bytes& output(int rank) { return last_output_[rank]; }

 private:
  static constexpr size_t kRegion = kGpuDataOffsetBytes + kDataBytes;

  struct Buffers {
    reference::Bytes private_input, private_output;
    std::byte* input;
    std::byte* output;
    uint64_t splits[2 * kMaxGpuWorld];
  };

  static std::byte* aligned(reference::Bytes& bytes, size_t num_bytes) {
    bytes.assign(num_bytes + 2 * kMarginBytes + kPackBytes, kFiller);
    auto address = reinterpret_cast<uintptr_t>(bytes.data()) + kMarginBytes;
    address = (address + kPackBytes - 1) / kPackBytes * kPackBytes;
    return reinterpret_cast<std::byte*>(address);
  }

  void place(const Step& step, int rank, Buffers& buffers) {
    const Placement& where = step.places[size_t(rank)];
    const size_t elem = step.elem_bytes();
    // In place, either may hold the other.
    const size_t most_bytes = std::max(input_numel(step, rank), output_numel(step, rank)) * elem;
    std::byte* data = regions_[size_t(rank)] + kGpuDataOffsetBytes;
    buffers.input = where.symmetric_input ? data + kMarginBytes + where.input_shift_bytes
                                          : aligned(buffers.private_input, most_bytes + kPackBytes) +
                                                where.input_shift_bytes;
    buffers.output =
        where.symmetric_output
            ? data + kDataBytes / 2 + kMarginBytes + where.output_shift_bytes
            : aligned(buffers.private_output, most_bytes + kPackBytes) + where.output_shift_bytes;
    if (!where.in_place) return;
    if (step.verb == Verb::all_gather) {  // my chunk of the output
      buffers.input = buffers.output + size_t(rank) * step.numel * elem;
    } else if (step.verb == Verb::reduce_scatter) {  // my chunk of the input
      buffers.output = buffers.input + size_t(rank) * step.numel * elem;
    } else {
      buffers.output = buffers.input;
    }
  }

  uint32_t location(int rank, const std::byte* ptr) const {
    const std::byte* data = regions_[size_t(rank)] + kGpuDataOffsetBytes;
    if (ptr < data || ptr >= data + kDataBytes) return GpuLocation::kStaged;
    return GpuLocation::encode(uint64_t(ptr - data));
  }

  DeviceCall make_call(const Step& step, int rank, Buffers& buffers) {
    DeviceCall call{};
    for (int peer = 0; peer < world_; ++peer) call.regions[peer] = regions_[size_t(peer)];
    call.input = buffers.input;
    call.output = buffers.output;
    if (!step.even) {
      for (int peer = 0; peer < world_; ++peer) {
        buffers.splits[peer] = step.splits[size_t(rank)][size_t(peer)];
        buffers.splits[world_ + peer] = step.splits[size_t(peer)][size_t(rank)];
      }
      call.splits = buffers.splits;
    }
    call.verdict = &verdicts_[size_t(rank)];
    const int parts = dtype_kind(step.dtype) == Kind::complex ? 2 : 1;
    call.numel = step.numel * uint64_t(parts);
    call.limit_ns = limit_ns_;
    call.input_location = location(rank, buffers.input);
    call.output_location = location(rank, buffers.output);
    call.tile_bytes = step.tile_bytes;
    call.plan_hash = step.plan_hash();
    call.rank = rank;
    call.world_size = world_;
    call.root = step.root;
    call.op = step.op;
    call.verb = step.verb;
    call.dtype = kernel_dtype(step.dtype);
    call.elem_bytes = uint32_t(dtype_size(call.dtype));
    return call;
  }

  static void fill(const Step& step, int rank, Buffers& buffers) {
    const Placement& where = step.places[size_t(rank)];
    const size_t elem = step.elem_bytes();
    const size_t out_bytes = output_numel(step, rank) * elem;
    const bool shared_margin = where.in_place && step.verb == Verb::reduce_scatter;
    if (!shared_margin)
      std::memset(buffers.output - kMarginBytes / 2, kFiller, out_bytes + kMarginBytes);
    const Codes& codes = step.inputs[size_t(rank)];
    for (size_t i = 0; i < codes.size(); ++i)
      std::memcpy(buffers.input + i * elem, &codes[i], elem);
  }

  static reference::Bytes copy_of(const Step& step, int rank, const Buffers& buffers) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(buffers.output);
    return {bytes, bytes + output_numel(step, rank) * step.elem_bytes()};
  }

  [[noreturn]] static void wrong(const Step& step, int rank, const std::string& what) {
    const Placement& where = step.places[size_t(rank)];
    std::fprintf(stderr, "WRONG: rank %d, %s: %s (input %s, output %s%s)\n", rank,
                 step.name().c_str(), what.c_str(), where.symmetric_input ? "symmetric" : "private",
                 where.symmetric_output ? "symmetric" : "private",
                 where.in_place ? ", in place" : "");
    std::exit(1);
  }

  void check(const Step& step, int rank, const Buffers& buffers) const {
    if (verdict(rank).kind != 0) wrong(step, rank, "a verdict: " + describe(verdict(rank)));
    const Placement& where = step.places[size_t(rank)];
    const size_t elem = step.elem_bytes();
    const Codes expected = expected_output(step, rank);
    for (size_t i = 0; i < expected.size(); ++i) {
      uint64_t code = 0;
      std::memcpy(&code, buffers.output + i * elem, elem);
      if (code != expected[i])
        wrong(step, rank,
              "element " + std::to_string(i) + " is " + std::to_string(code) + ", expected " +
                  std::to_string(expected[i]));
    }
    if (where.in_place) return;
    const size_t out_bytes = expected.size() * elem;
    for (size_t i = 0; i < kMarginBytes / 2; ++i)
      if (buffers.output[out_bytes + i] != std::byte{kFiller} ||
          *(buffers.output - 1 - i) != std::byte{kFiller})
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
  const uint64_t limit_ns_;
  Simulator simulator_;
  std::vector<DeviceVerdict> verdicts_;
  std::vector<std::byte*> regions_;
  std::vector<std::unique_ptr<Buffers>> buffers_;
  std::vector<reference::Bytes> last_output_ = std::vector<reference::Bytes>(size_t(world_));
};

}  // namespace fastcoll::sim
