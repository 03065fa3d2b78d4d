// SPDX-License-Identifier: Apache-2.0
// MPI's side of `fastcoll bench --level c`: the windows, data and check of the Python rank
// processes with nothing but compiled code between the calls, built at run time with each MPI's own
// mpi.h. Usage: mpi_loop SOCKET RANK WORLD_SIZE CPU (-1: any CPU). Commands: see protocol.py.
#include <inttypes.h>
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

// The formula of pattern.py.
enum { kPeriod = 65521, kPoison = 77, kMaxWindows = 4096 };
// Cell.is_rewritten of pattern.py.
enum { kRewrittenBytes = 8 << 10, kLineBytes = 64 };

enum verb {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kBroadcast,
  kSendrecv,
  kBarrier,
  kNumVerbs
};
static const char* const kVerbNames[] = {"all_reduce", "reduce",  "reduce_scatter", "all_gather",
                                         "gather",     "scatter", "all_to_all",     "broadcast",
                                         "sendrecv",   "barrier"};

enum dtype { kFloat32, kFloat64, kInt8, kUint8, kInt16, kInt32, kInt64, kNumDtypes };
static const char* const kDtypeNames[] = {"float32", "float64", "int8", "uint8",
                                          "int16",   "int32",   "int64"};
static const size_t kItemsize[] = {4, 8, 1, 1, 2, 4, 8};

enum op { kSum, kProduct, kMin, kMax, kBand, kBor, kBxor, kNumOps };
static const char* const kOpNames[] = {"sum", "product", "min", "max", "band", "bor", "bxor"};

static struct {
  enum verb verb;
  enum dtype dtype;
  enum op op;
  int numel;
  int root;
  void* input;
  void* output;
  int is_rewritten;
  size_t rewritten_bytes;  // of the input
} cell;
static int rank, world_size;
static MPI_Datatype mpi_dtypes[kNumDtypes];
static MPI_Op mpi_ops[kNumOps];

static double clock_s(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int find_name(const char* name, const char* const* names, int num_names) {
  for (int idx = 0; idx < num_names; ++idx)
    if (strcmp(name, names[idx]) == 0) return idx;
  return -1;
}

static int64_t value_at(int64_t idx, int of_rank) {
  uint32_t mixed = (((uint32_t)(idx % kPeriod) + 12289u * (uint32_t)of_rank) * 2654435761u) >> 7;
  return cell.op == kProduct ? 1 + mixed % 2 : mixed % 5;
}

static int64_t combine(int64_t a, int64_t b) {
  switch (cell.op) {
    case kSum:
      return a + b;
    case kProduct:
      return (int64_t)((uint64_t)a * (uint64_t)b);
    case kMin:
      return a < b ? a : b;
    case kMax:
      return a > b ? a : b;
    case kBand:
      return a & b;
    case kBor:
      return a | b;
    default:
      return a ^ b;
  }
}

static int64_t reduced_at(int64_t idx) {
  int64_t result = value_at(idx, 0);
  for (int r = 1; r < world_size; ++r) result = combine(result, value_at(idx, r));
  return result;
}

static void store(void* base, int64_t idx, int64_t value) {
  switch (cell.dtype) {
    case kFloat32:
      ((float*)base)[idx] = (float)value;
      break;
    case kFloat64:
      ((double*)base)[idx] = (double)value;
      break;
    case kInt8:
      ((int8_t*)base)[idx] = (int8_t)value;
      break;
    case kUint8:
      ((uint8_t*)base)[idx] = (uint8_t)value;
      break;
    case kInt16:
      ((int16_t*)base)[idx] = (int16_t)value;
      break;
    case kInt32:
      ((int32_t*)base)[idx] = (int32_t)value;
      break;
    default:
      ((int64_t*)base)[idx] = value;
      break;
  }
}

static void fill(void* base, int64_t numel, int64_t value) {
  for (int64_t idx = 0; idx < numel; ++idx) store(base, idx, value);
}

static int next(void) { return (rank + 1) % world_size; }
static int previous(void) { return (rank + world_size - 1) % world_size; }

static int64_t expected_at(int64_t idx) {
  switch (cell.verb) {
    case kAllReduce:
    case kReduce:
      return reduced_at(idx);
    case kReduceScatter:
      return reduced_at((int64_t)rank * cell.numel + idx);
    case kAllGather:
    case kGather:
      return value_at(idx % cell.numel, (int)(idx / cell.numel));
    case kScatter:
      return value_at((int64_t)rank * cell.numel + idx, cell.root);
    case kAllToAll:
      return value_at((int64_t)rank * cell.numel + idx % cell.numel, (int)(idx / cell.numel));
    case kSendrecv:
      return value_at(idx, previous());
    default:
      return value_at(idx, cell.root);
  }
}

static int call(void) {
  const MPI_Datatype dtype = mpi_dtypes[cell.dtype];
  const MPI_Op op = mpi_ops[cell.op];
  const MPI_Comm comm = MPI_COMM_WORLD;
  switch (cell.verb) {
    case kAllReduce:
      return MPI_Allreduce(MPI_IN_PLACE, cell.output, cell.numel, dtype, op, comm);
    case kReduce:
      return rank == cell.root
                 ? MPI_Reduce(MPI_IN_PLACE, cell.output, cell.numel, dtype, op, cell.root, comm)
                 : MPI_Reduce(cell.input, NULL, cell.numel, dtype, op, cell.root, comm);
    case kReduceScatter:
      return MPI_Reduce_scatter_block(cell.input, cell.output, cell.numel, dtype, op, comm);
    case kAllGather:
      return MPI_Allgather(cell.input, cell.numel, dtype, cell.output, cell.numel, dtype, comm);
    case kGather:
      return MPI_Gather(cell.input, cell.numel, dtype, cell.output, cell.numel, dtype, cell.root,
                        comm);
    case kScatter:
      return MPI_Scatter(cell.input, cell.numel, dtype, cell.output, cell.numel, dtype, cell.root,
                         comm);
    case kAllToAll:
      return MPI_Alltoall(cell.input, cell.numel, dtype, cell.output, cell.numel, dtype, comm);
    case kSendrecv:
      return MPI_Sendrecv(cell.input, cell.numel, dtype, next(), 0, cell.output, cell.numel, dtype,
                          previous(), 0, comm, MPI_STATUS_IGNORE);
    case kBroadcast:
      return MPI_Bcast(cell.output, cell.numel, dtype, cell.root, comm);
    default:
      return MPI_Barrier(comm);
  }
}

static void release(void) {
  if (cell.input != cell.output) free(cell.input);
  free(cell.output);
  cell.input = cell.output = NULL;
}

static void* allocate(int64_t numel) {
  // 64-byte aligned, ordinary pages: what torch.empty gives the other libraries.
  void* base = NULL;
  const size_t num_bytes = (size_t)numel * kItemsize[cell.dtype];
  if (posix_memalign(&base, 64, num_bytes ? num_bytes : 64) != 0) abort();
  return base;
}

static int64_t count_wrong(int64_t num_out) {
  int64_t num_wrong = 0;
  for (int64_t idx = 0; idx < num_out; ++idx) {
    char want[8];
    store(want, 0, expected_at(idx));
    const size_t itemsize = kItemsize[cell.dtype];
    num_wrong += memcmp(want, (char*)cell.output + (size_t)idx * itemsize, itemsize) != 0;
  }
  return num_wrong;
}

static void prepare(FILE* out, const char* command) {
  char verb[32], dtype[32], op[32];
  release();
  if (sscanf(command, "prepare %31s %31s %31s %d %d", verb, dtype, op, &cell.numel, &cell.root) !=
      5) {
    fprintf(out, "{\"error\": \"malformed prepare\", ");
    return;
  }
  const int verb_idx = find_name(verb, kVerbNames, kNumVerbs);
  const int dtype_idx = find_name(dtype, kDtypeNames, kNumDtypes);
  const int op_idx = find_name(op, kOpNames, kNumOps);
  if (verb_idx < 0 || dtype_idx < 0 || op_idx < 0) {
    fprintf(out, "{\"error\": \"MPI has no %s %s of %s\", ", verb, op, dtype);
    return;
  }
  cell.verb = (enum verb)verb_idx;
  cell.dtype = (enum dtype)dtype_idx;
  cell.op = (enum op)op_idx;
  cell.is_rewritten = 0;
  if (cell.verb == kBarrier) {
    call();
    fprintf(out, "{\"num_wrong\": null, ");
    return;
  }
  const int64_t wide = (int64_t)cell.numel * world_size;
  const enum verb v = cell.verb;
  const int64_t num_out = v == kAllGather || v == kGather || v == kAllToAll ? wide : cell.numel;
  const int64_t num_in = v == kReduceScatter || v == kScatter || v == kAllToAll ? wide : cell.numel;
  const int in_place = v == kAllReduce || v == kReduce || v == kBroadcast;
  const int gets = rank == cell.root || (v != kReduce && v != kGather);
  cell.output = allocate(num_out);
  cell.input = in_place ? cell.output : allocate(num_in);
  fill(cell.output, num_out, kPoison);
  if (cell.verb != kBroadcast || rank == cell.root)
    for (int64_t idx = 0; idx < num_in; ++idx) store(cell.input, idx, value_at(idx, rank));
  const size_t itemsize = kItemsize[cell.dtype];
  const size_t size_bytes = (size_t)(num_in > num_out ? num_in : num_out) * itemsize;
  const int gives = v == kReduce                       ? rank != cell.root
                    : v == kBroadcast || v == kScatter ? rank == cell.root
                                                       : 1;
  cell.is_rewritten = v != kAllReduce && size_bytes >= kRewrittenBytes;
  cell.rewritten_bytes = gives ? (size_t)num_in * itemsize : 0;
  MPI_Barrier(MPI_COMM_WORLD);
  call();
  const int64_t num_wrong = gets ? count_wrong(num_out) : 0;
  const int64_t neutral = cell.op == kProduct || cell.op == kBand;
  fill(cell.output, num_out, neutral);
  fill(cell.input, num_in, neutral);
  MPI_Barrier(MPI_COMM_WORLD);
  fprintf(out, "{\"num_wrong\": %" PRId64 ", ", num_wrong);
}

// Takes every line back from the caches of those who read it.
static void rewrite(void* bytes, size_t num_bytes) {
  volatile char* at = bytes;
  for (size_t i = 0; i < num_bytes; i += kLineBytes) at[i] = at[i];
}

static double time_loop(int iterations) {
  double begin = clock_s(CLOCK_MONOTONIC), total = 0;
  if (!cell.is_rewritten) {
    for (int iteration = 0; iteration < iterations; ++iteration) call();
    return clock_s(CLOCK_MONOTONIC) - begin;
  }
  for (int iteration = 0; iteration < iterations; ++iteration) {
    rewrite(cell.input, cell.rewritten_bytes);
    MPI_Barrier(MPI_COMM_WORLD);
    begin = clock_s(CLOCK_MONOTONIC);
    call();
    total += clock_s(CLOCK_MONOTONIC) - begin;
  }
  return total;
}

static void time_windows(FILE* out, const char* command) {
  static double seconds[kMaxWindows];
  int iterations = 1, num_windows = 1;
  if (sscanf(command, "time %d %d", &iterations, &num_windows) != 2 || num_windows > kMaxWindows) {
    fprintf(out, "{\"error\": \"malformed time\", ");
    return;
  }
  for (int window = 0; window < num_windows; ++window) {
    MPI_Barrier(MPI_COMM_WORLD);
    seconds[window] = time_loop(iterations);
  }
  fprintf(out, "{\"seconds\": [");
  for (int window = 0; window < num_windows; ++window)
    fprintf(out, "%s%.9f", window ? ", " : "", seconds[window]);
  fprintf(out, "], ");
}

static int connect_to(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof address) != 0) {
    perror("mpi_loop: connect");
    exit(1);
  }
  return fd;
}

static void send_version(FILE* out) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  version[strcspn(version, ",\n\"\\")] = '\0';
  for (char* c = version; *c; ++c)
    if (*c == '\t') *c = ' ';
  fprintf(out, "{\"version\": \"%s\", \"pid\": %d}\n", version, (int)getpid());
  fflush(out);
}

static void serve(int fd) {
  FILE* in = fdopen(fd, "r");
  FILE* out = fdopen(dup(fd), "w");
  fprintf(out, "{\"rank\": %d}\n", rank);
  send_version(out);
  char command[256];
  double cpu_at_reply_s = clock_s(CLOCK_PROCESS_CPUTIME_ID);
  while (fgets(command, sizeof command, in) && strncmp(command, "quit", 4) != 0) {
    const double idle_cpu_s = clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu_at_reply_s;
    if (strncmp(command, "prepare", 7) == 0) {
      prepare(out, command);
    } else if (strncmp(command, "time", 4) == 0) {
      time_windows(out, command);
    } else {
      release();
      fprintf(out, "{");
    }
    fprintf(out, "\"idle_cpu_s\": %.6f}\n", idle_cpu_s);
    fflush(out);
    cpu_at_reply_s = clock_s(CLOCK_PROCESS_CPUTIME_ID);
  }
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int cpu = atoi(argv[4]);
  if (cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(cpu, &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus);
  }
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  if (rank != atoi(argv[2]) || world_size != atoi(argv[3])) MPI_Abort(MPI_COMM_WORLD, 3);
  const MPI_Datatype dtypes[] = {MPI_FLOAT,   MPI_DOUBLE,  MPI_INT8_T, MPI_UINT8_T,
                                 MPI_INT16_T, MPI_INT32_T, MPI_INT64_T};
  const MPI_Op ops[] = {MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX, MPI_BAND, MPI_BOR, MPI_BXOR};
  memcpy(mpi_dtypes, dtypes, sizeof dtypes);
  memcpy(mpi_ops, ops, sizeof ops);
  serve(connect_to(argv[1]));
  MPI_Finalize();
  return 0;
}
