// SPDX-License-Identifier: Apache-2.0
#include "group/openmp.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "cpu/wait.h"

namespace fastcoll {

namespace {

// The functions of libgomp, if torch or another library has loaded it by now. Other OpenMP
// libraries have the first function, too, but a call of their own by which waits get short.
struct LibGomp {
  using Region = void (*)(void*);
  void (*run)(Region, void*, unsigned num_threads, unsigned flags);
  int (*num_cpus)();

  static LibGomp find() {
    if (dlsym(RTLD_DEFAULT, "kmp_set_blocktime")) return {};
    return {symbol<decltype(run)>("GOMP_parallel"),
            symbol<decltype(num_cpus)>("omp_get_num_procs")};
  }
  bool is_there() const { return run && num_cpus; }

 private:
  template <class Function>
  static Function symbol(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
};

}  // namespace

class RestingThread {
 public:
  // Never destroyed: the thread may rest in it until the process is gone.
  static RestingThread*& of_process() {
    static RestingThread* resting = new RestingThread;
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      of_process() = new RestingThread;  // a forked child has no such thread
    });
    (void)registered;
    return resting;
  }

  // False where there is no thread to be had.
  bool hold(const LibGomp& openmp, int num_threads) {
    const std::lock_guard lock(mutex_);
    if (!is_there_) try {
        std::thread([this, openmp, num_threads] { rest(openmp, num_threads); }).detach();
      } catch (const std::system_error&) {
        return false;
      }
    is_there_ = true;
    ++holders_;
    return true;
  }

  void release() {
    const std::lock_guard lock(mutex_);
    if (--holders_ == 0) released_.notify_all();
  }

 private:
  void rest(const LibGomp& openmp, int num_threads) {
    openmp.run([](void*) {}, nullptr, unsigned(num_threads), 0);
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return holders_ == 0; });
    is_there_ = false;  // the end of a thread takes its team along
  }

  std::mutex mutex_;
  std::condition_variable released_;
  bool is_there_ = false;
  int holders_ = 0;
};

ShortOpenMpWaits::~ShortOpenMpWaits() { release(); }

bool ShortOpenMpWaits::hold_if_crowded(int ranks, int ranks_cpus) {
  if (held_ || gettid() != getpid()) return false;
  const LibGomp openmp = LibGomp::find();
  if (!openmp.is_there()) return false;
  const int num_threads =
      resting_threads(num_openmp_threads(), ranks, ranks_cpus, openmp.num_cpus());
  RestingThread* resting = RestingThread::of_process();
  if (num_threads == 0 || !resting->hold(openmp, num_threads)) return false;
  held_ = resting;
  return true;
}

void ShortOpenMpWaits::release() {
  // Not that of the process from which this one was forked.
  if (held_ && held_ == RestingThread::of_process()) held_->release();
  held_ = nullptr;
}

}  // namespace fastcoll
