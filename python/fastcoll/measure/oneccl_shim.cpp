// SPDX-License-Identifier: Apache-2.0
// oneCCL behind C functions, which Python loads: oneCCL itself has an interface of C++ alone. Built
// at run time with the wheel's own header (oneccl.py). Each function returns 0, or -1 with the
// reason in fc_ccl_error.
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>
#include <optional>
#include <string>

namespace {

std::shared_ptr<ccl::kvs> store;
std::optional<ccl::communicator> comm;
std::string error;

const std::pair<const char*, ccl::datatype> kDtypes[] = {
    {"float32", ccl::datatype::float32}, {"float64", ccl::datatype::float64},
    {"float16", ccl::datatype::float16}, {"bfloat16", ccl::datatype::bfloat16},
    {"int8", ccl::datatype::int8},       {"uint8", ccl::datatype::uint8},
    {"int32", ccl::datatype::int32},     {"int64", ccl::datatype::int64},
};
const std::pair<const char*, ccl::reduction> kOps[] = {
    {"sum", ccl::reduction::sum},
    {"product", ccl::reduction::prod},
    {"min", ccl::reduction::min},
    {"max", ccl::reduction::max},
};

template <class Table>
int find(const Table& table, const char* name) {
  int idx = 0;
  for (const auto& row : table) {
    if (std::strcmp(row.first, name) == 0) return idx;
    ++idx;
  }
  return -1;
}

template <class Body>
int kept(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& raised) {
    error = raised.what();
    return -1;
  }
}

enum Verb { kAllReduce, kReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast, kBarrier };

// A call as Python names it. `numel`: of a part where each rank has one, else of the message.
struct Call {
  int verb, dtype, op, root;
  size_t numel;
  const void* input;
  void* output;
};

void make(const Call& call) {
  const auto dtype = kDtypes[call.dtype].second;
  const auto op = kOps[call.op].second;
  switch (call.verb) {
    case kAllReduce:
      return ccl::allreduce(call.input, call.output, call.numel, dtype, op, *comm).wait();
    case kReduce:
      return ccl::reduce(call.input, call.output, call.numel, dtype, op, call.root, *comm).wait();
    case kReduceScatter:
      return ccl::reduce_scatter(call.input, call.output, call.numel, dtype, op, *comm).wait();
    case kAllGather:
      return ccl::allgather(call.input, call.output, call.numel, dtype, *comm).wait();
    case kAllToAll:
      return ccl::alltoall(call.input, call.output, call.numel, dtype, *comm).wait();
    case kBroadcast:
      return ccl::broadcast(call.output, call.numel, dtype, call.root, *comm).wait();
    default:
      return ccl::barrier(*comm).wait();
  }
}

}  // namespace

extern "C" {

const char* fc_ccl_error() { return error.c_str(); }
const char* fc_ccl_version() {
  static const std::string text = ccl::get_library_version().full;
  return text.c_str();
}
size_t fc_ccl_address_bytes() { return ccl::kvs::address_max_size; }
int fc_ccl_dtype(const char* name) { return find(kDtypes, name); }
int fc_ccl_op(const char* name) { return find(kOps, name); }

// On rank 0, which then tells the others the address.
int fc_ccl_make_address(char* address) {
  return kept([&] {
    ccl::init();
    store = ccl::create_main_kvs();
    const auto made = store->get_address();
    std::memcpy(address, made.data(), made.size());
  });
}

// Collective.
int fc_ccl_join(const char* address, int rank, int world_size) {
  return kept([&] {
    ccl::init();
    if (!store) {
      ccl::kvs::address_type its;
      std::memcpy(its.data(), address, its.size());
      store = ccl::create_kvs(its);
    }
    comm.emplace(ccl::create_communicator(world_size, rank, store));
  });
}

int fc_ccl_run(const Call* call) {
  return kept([&] { make(*call); });
}

// The seconds of so many calls, or -1.
double fc_ccl_loop(const Call* call, int iterations) {
  const auto start = std::chrono::steady_clock::now();
  const int failed = kept([&] {
    for (int i = 0; i < iterations; ++i) make(*call);
  });
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return failed ? -1 : taken.count();
}

}  // extern "C"
