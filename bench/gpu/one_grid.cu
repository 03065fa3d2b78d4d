// SPDX-License-Identifier: Apache-2.0
// All ranks of one GPU in one grid; row y of the grid is rank y. The library's kernels wait for
// each other, but compute-sanitizer and Nsight Compute run one kernel at a time.
//
//   one_grid check MOST_BYTES RANKS...
//
// It compares small calls with sums in float64, and all_reduces' bits between ranks.
//
//   one_grid time MOST_BYTES RANKS...
//
// It prints JSON. all_reduce is timed by size, beside the published kernels (published.cuh), and
// each kernel's registers are told.
//
// The kernels are those of kernels/cuda, as functions of one kernel each. Times are of a graph of
// calls, whose ranks start together, on memory of one GPU: no link takes part. Exit code: 0 all
// well, 1 a result was wrong or CUDA failed, 2 wrong arguments, 77 there is no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "prim.cuh"

using namespace fastcoll;

// The arguments of all ranks, and the one kind of kernel.
template <class Call>
struct Calls {
  static constexpr int kMostRanks = 8;
  Call of_rank[kMostRanks];
};
template <class Call, void (*kBody)(const Call&)>
FASTCOLL_KERNEL run_ranks(FASTCOLL_ARGUMENT(Calls<Call>) calls) {
  kBody(calls.of_rank[blockIdx.y]);
}

// The library's kernels become functions.
#undef FASTCOLL_KERNEL
#undef FASTCOLL_ARGUMENT
#undef FASTCOLL_KERNEL_FN
#define FASTCOLL_KERNEL __device__ void
#define FASTCOLL_ARGUMENT(type) const type&
#define FASTCOLL_KERNEL_FN void (*)(const DeviceCall&)
#include "cuda/kernels.cuh"
#include "cuda/shape.h"
#include "published.cuh"

namespace {

constexpr int kChannels = 16;     // of each rank: 8 x 16 blocks are resident on 132 SMs
constexpr uint64_t kLimitS = 60;  // of a wait: tools make kernels slow

void check(cudaError_t error, const char* step) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", step, cudaGetErrorString(error));
  std::exit(1);
}

// One way to make a call.
struct Way {
  const char* name;
  Algorithm algorithm;
  Verb verb;
  bool ll;
  const void* kernel;  // of DeviceCalls, or of PublishedCalls
  bool is_published = false;
};

template <void (*kBody)(const DeviceCall&)>
const void* ours() {
  return reinterpret_cast<const void*>(&run_ranks<DeviceCall, kBody>);
}
template <void (*kBody)(const PublishedCall&)>
const void* theirs() {
  return reinterpret_cast<const void*>(&run_ranks<PublishedCall, kBody>);
}

std::vector<Way> all_ways() {
  constexpr DType kType = DType::float32;
  using enum Algorithm;
  return {
      {"one_shot in LL packs", one_shot, Verb::all_reduce, true,
       ours<one_shot_ll<Protocol, kType>>()},
      {"one_shot", one_shot, Verb::all_reduce, false,
       ours<::fastcoll::one_shot<Protocol, kType>>()},
      {"two_shot", two_shot, Verb::all_reduce, false,
       ours<::fastcoll::two_shot<Protocol, kType>>()},
      {"ring", ring, Verb::all_reduce, false, ours<::fastcoll::ring<Protocol, kType>>()},
      {"chain", chain, Verb::all_reduce, false, ours<::fastcoll::chain<Protocol, kType>>()},
      {"reduce_scatter", one_shot, Verb::reduce_scatter, false,
       ours<::fastcoll::one_shot<Protocol, kType>>()},
      {"all_gather in LL packs", direct, Verb::all_gather, true, ours<move_ll<Protocol>>()},
      {"all_gather", direct, Verb::all_gather, false, ours<move<Protocol>>()},
      {"published one-stage", one_shot, Verb::all_reduce, false, theirs<published_one_stage>(),
       true},
      {"published two-stage", two_shot, Verb::all_reduce, false,
       theirs<published_two_stage<true>>(), true},
  };
}

template <class T>
T* allocate(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "allocating");
  check(cudaMemset(memory, 0, count * sizeof(T)), "clearing");
  return static_cast<T*>(memory);
}

// Ranks on the current GPU. Inputs are registered with all ranks: symmetric tensors, to fastcoll.
class Ranks {
 public:
  Ranks(int world, uint64_t most_bytes)
      : world_(world), most_bytes_(most_bytes), random_(std::random_device{}()) {
    for (int rank = 0; rank < world; ++rank) {
      regions_.push_back(allocate<std::byte>(GpuLayout::of(kChannels, world).num_bytes()));
      inputs_.push_back(allocate<std::byte>(heap_bytes()));
      outputs_.push_back(allocate<std::byte>(heap_bytes()));
      sums_.push_back(allocate<std::byte>(most_bytes));
      flags_.push_back(allocate<uint64_t>(PublishedCall::num_flags(kPublishedBlocks)));
      epochs_.push_back(allocate<uint64_t>(kPublishedBlocks));
      check(cudaHostAlloc(reinterpret_cast<void**>(&hosts_.emplace_back()), sizeof(HostWords),
                          cudaHostAllocMapped),
            "allocating the host's words");
      std::memset(static_cast<void*>(hosts_.back()), 0, sizeof(HostWords));
    }
    check(cudaStreamCreate(&stream_), "making a stream");
  }
  ~Ranks() {
    cudaStreamDestroy(stream_);
    for (const auto* memory : {&regions_, &inputs_, &outputs_, &sums_})
      for (std::byte* one : *memory) cudaFree(one);
    for (const auto* words : {&flags_, &epochs_})
      for (uint64_t* one : *words) cudaFree(one);
    for (HostWords* one : hosts_) cudaFreeHost(one);
  }
  Ranks(const Ranks&) = delete;

  // Start the kernel of all ranks. num_bytes: of the message, or of a chunk where there are such.
  void start(const Way& way, uint64_t num_bytes) {
    if (way.is_published) return start_published(way, num_bytes);
    const LaunchShape shape = shape_of(way, num_bytes);
    Calls<DeviceCall> calls{};
    for (int rank = 0; rank < world_; ++rank)
      calls.of_rank[rank] = call_of(way, rank, num_bytes, shape);
    launch(way, shape.blocks, shape.threads, &calls);
  }

  // Whether a call gives each rank the sums in float64, but for rounding; an all_reduce all ranks
  // the same bits.
  bool is_right(const Way& way, uint64_t num_bytes) {
    const bool gathers = way.verb == Verb::all_gather, scatters = way.verb == Verb::reduce_scatter;
    const size_t numel = num_bytes / 4, chunks = size_t(world_);
    std::vector<std::vector<float>> inputs;
    std::uniform_real_distribution<float> draw(-1, 1);
    for (int rank = 0; rank < world_; ++rank) {
      std::vector<float>& input = inputs.emplace_back(scatters ? numel * chunks : numel);
      for (float& value : input) value = draw(random_);
      put(inputs_[size_t(rank)], input);
      // NaNs, where a result is missing.
      check(cudaMemset(outputs_[size_t(rank)], 0xff, gathers ? num_bytes * chunks : num_bytes),
            "poisoning an output");
    }
    start(way, num_bytes);
    check(cudaStreamSynchronize(stream_), way.name);
    bool right = has_no_verdict(way);
    std::vector<float> first;
    for (size_t rank = 0; rank < chunks && right; ++rank) {
      std::vector<float> output(gathers ? numel * chunks : numel);
      check(cudaMemcpy(output.data(), outputs_[rank], output.size() * 4, cudaMemcpyDeviceToHost),
            "reading an output");
      if (rank == 0) first = output;
      if (!scatters && std::memcmp(first.data(), output.data(), output.size() * 4) != 0) {
        std::fprintf(stderr,
                     "WRONG: %s, %d ranks, %llu bytes: rank %zu has other bits than rank 0\n",
                     way.name, world_, static_cast<unsigned long long>(num_bytes), rank);
        return false;
      }
      for (size_t i = 0; i < output.size() && right; ++i) {
        double wanted = 0, size = 0;
        if (gathers) {
          wanted = inputs[i / numel][i % numel];
        } else {
          for (const std::vector<float>& input : inputs) {
            const double value = input[scatters ? rank * numel + i : i];
            wanted += value;
            size += std::fabs(value);
          }
        }
        right = std::fabs(output[i] - wanted) <= size * world_ * 6e-8;  // false for a NaN
        if (!right)
          std::fprintf(stderr, "WRONG: %s, %d ranks, %llu bytes: rank %zu has %g, not %g, at %zu\n",
                       way.name, world_, static_cast<unsigned long long>(num_bytes), rank,
                       double(output[i]), wanted, i);
      }
    }
    return right;
  }

  // The median microseconds of a call, of windows of `calls` in a graph.
  double time_us(const Way& way, uint64_t num_bytes, int calls) {
    constexpr int kWindows = 15;
    cudaGraph_t graph;
    cudaGraphExec_t runs;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "a capture");
    for (int i = 0; i < calls; ++i) start(way, num_bytes);
    check(cudaStreamEndCapture(stream_, &graph), "the end of a capture");
    check(cudaGraphInstantiate(&runs, graph, 0), "making a graph");
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "making an event");
    check(cudaEventCreate(&end), "making an event");
    std::vector<double> times;
    for (int window = 0; window <= kWindows; ++window) {
      float ms = 0;
      check(cudaEventRecord(begin, stream_), "marking");
      check(cudaGraphLaunch(runs, stream_), "starting a graph");
      check(cudaEventRecord(end, stream_), "marking");
      check(cudaEventSynchronize(end), way.name);
      check(cudaEventElapsedTime(&ms, begin, end), "reading the time");
      if (window > 0) times.push_back(ms * 1e3 / calls);  // the first one warms up
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(runs);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + kWindows / 2, times.end());
    return times[kWindows / 2];
  }

 private:
  // A chunk for each rank, where there are such.
  uint64_t heap_bytes() const { return uint64_t(world_) * most_bytes_; }

  static void put(std::byte* to, const std::vector<float>& values) {
    check(cudaMemcpy(to, values.data(), values.size() * 4, cudaMemcpyHostToDevice),
          "writing an input");
  }

  LaunchShape shape_of(const Way& way, uint64_t num_bytes) const {
    const bool whole =
        way.verb != Verb::all_reduce || way.ll || !splits_message(way.algorithm, way.verb);
    const uint64_t part = whole ? num_bytes : fastcoll::detail::div_up(num_bytes, uint64_t(world_));
    return shape_for(way.algorithm, way.verb, DType::float32, way.ll, part, world_, kChannels);
  }

  DeviceCall call_of(const Way& way, int rank, uint64_t num_bytes, const LaunchShape& shape) const {
    DeviceCall call{};
    std::copy(regions_.begin(), regions_.end(), call.regions);
    std::copy(inputs_.begin(), inputs_.end(), call.heaps);
    call.input = inputs_[size_t(rank)];
    call.output = outputs_[size_t(rank)];
    call.host = hosts_[size_t(rank)];
    call.numel = num_bytes / 4;
    call.limit_ns = kLimitS * 1000000000;
    call.report_ns = ~uint64_t{0};
    call.heap_bytes = heap_bytes();
    call.input_location = GpuLocation::encode(0);
    call.tile_bytes = shape.tile_bytes;
    call.plan_hash = uint32_t(mix64(num_bytes + uint64_t(way.algorithm) + uint64_t(way.verb)));
    call.rank = rank;
    call.world_size = world_;
    call.layout = GpuLayout::of(kChannels, world_);
    call.op = Op::sum;
    call.verb = way.verb;
    call.dtype = DType::float32;
    call.elem_bytes = 4;
    return call;
  }

  void start_published(const Way& way, uint64_t num_bytes) {
    Calls<PublishedCall> calls{};
    for (int rank = 0; rank < world_; ++rank) {
      PublishedCall& call = calls.of_rank[rank];
      std::copy(inputs_.begin(), inputs_.end(), call.inputs);
      std::copy(sums_.begin(), sums_.end(), call.sums);
      std::copy(flags_.begin(), flags_.end(), call.flags);
      call.epochs = epochs_[size_t(rank)];
      call.output = outputs_[size_t(rank)];
      call.num_packs = (num_bytes + kPackBytes - 1) / kPackBytes;
      call.rank = rank;
      call.world_size = world_;
    }
    // As many blocks as one rank of our kernels may have, so that both share the GPU alike.
    launch(way, std::min(kPublishedBlocks, kChannels), kPublishedThreads, &calls);
  }

  void launch(const Way& way, int blocks, int threads, void* calls) const {
    void* args[] = {calls};
    // Cooperative: it fails where not all blocks are resident together, instead of waiting.
    check(cudaLaunchCooperativeKernel(way.kernel, dim3(unsigned(blocks), unsigned(world_)),
                                      dim3(unsigned(threads)), args, 0, stream_),
          way.name);
  }

  bool has_no_verdict(const Way& way) const {
    for (int rank = 0; rank < world_; ++rank)
      if (const uint32_t kind = hosts_[size_t(rank)]->verdict.kind; kind != 0) {
        std::fprintf(stderr, "WRONG: %s: rank %d has a verdict of kind %u\n", way.name, rank, kind);
        return false;
      }
    return true;
  }

  const int world_;
  const uint64_t most_bytes_;
  std::mt19937 random_;
  std::vector<std::byte*> regions_, inputs_, outputs_, sums_;
  std::vector<uint64_t*> flags_, epochs_;
  std::vector<HostWords*> hosts_;
  cudaStream_t stream_;
};

bool fits(const Way& way, uint64_t num_bytes) {
  return !way.ll || num_bytes <= max_ll_bytes(kChannels);
}

bool check_ways(int world, uint64_t most_bytes) {
  Ranks ranks(world, most_bytes);
  for (const Way& way : all_ways())
    for (const uint64_t num_bytes : {16, 4096, 40000})
      if (num_bytes <= most_bytes && fits(way, num_bytes) && !ranks.is_right(way, num_bytes))
        return false;
  return true;
}

void add_row(std::string& rows, const Way& way, const std::string& of, double value,
             const std::string& unit) {
  rows += rows.empty() ? "" : ",\n";
  rows += R"( {"what": "one grid: )" + std::string(way.name) + R"(", "case": ")" + of +
          R"(", "value": )" + std::to_string(value) + R"(, "unit": )" + unit + "}";
}

void add_registers(std::string& rows) {
  for (const Way& way : all_ways()) {
    cudaFuncAttributes of;
    int per_sm = 0;
    check(cudaFuncGetAttributes(&of, way.kernel), way.name);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, way.kernel, kMaxBlockThreads, 0),
          way.name);
    add_row(rows, way, "a thread", of.numRegs, R"("registers")");
    add_row(rows, way, "a thread", double(of.localSizeBytes), R"("bytes of local memory")");
    add_row(rows, way, "an SM", per_sm, R"("blocks")");
  }
}

// Every way is right before it is timed. rows: behind those of other numbers of ranks.
bool time_ways(int world, uint64_t most_bytes, std::string& rows) {
  constexpr uint64_t kLargeBytes = 1 << 20, kMostReadBytes = 4 << 20;
  Ranks ranks(world, most_bytes);
  for (uint64_t num_bytes = 16; num_bytes <= most_bytes; num_bytes *= 8)
    for (const Way& way : all_ways()) {
      const bool reads_all = way.algorithm == Algorithm::one_shot;
      if (way.verb != Verb::all_reduce || !fits(way, num_bytes) ||
          (reads_all && num_bytes > kMostReadBytes))
        continue;
      if (!ranks.is_right(way, num_bytes)) return false;
      const double us = ranks.time_us(way, num_bytes, num_bytes > kLargeBytes ? 5 : 50);
      const std::string size = std::to_string(num_bytes), number = std::to_string(world);
      add_row(rows, way, size + " bytes, " + number + " ranks", us,
              R"("us", "ranks": )" + number + R"(, "size_bytes": )" + size);
    }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string step = argc > 1 ? argv[1] : "";
  const uint64_t most_bytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if ((step != "check" && step != "time") || most_bytes == 0 || argc < 4) {
    std::fprintf(stderr, "one_grid check or time, MOST_BYTES, RANKS...\n");
    return 2;
  }
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || num_gpus == 0) {
    std::fprintf(stderr, "no GPU: nothing was run\n");
    return 77;
  }
  std::string rows;
  if (step == "time") add_registers(rows);
  for (int i = 3; i < argc; ++i) {
    const int world = std::atoi(argv[i]);
    if (world < 1 || world > Calls<DeviceCall>::kMostRanks) {
      std::fprintf(stderr, "%s: 1 to 8 ranks are possible\n", argv[i]);
      return 2;
    }
    if (!(step == "check" ? check_ways(world, most_bytes) : time_ways(world, most_bytes, rows)))
      return 1;
  }
  if (step == "check") std::printf("ok\n");
  else std::printf("{\"rows\": [\n%s\n], \"complete\": true}\n", rows.c_str());
  return 0;
}
