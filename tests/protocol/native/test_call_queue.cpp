// SPDX-License-Identifier: Apache-2.0
// The queue of asynchronous calls under threads: order, one call at a time, the end of calls.
// Exits 0, or prints the fault.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "group/call_queue.h"
#include "group/threads.h"
#include "queued_calls.h"

using namespace fastcoll;
using namespace std::chrono_literals;

namespace {

bool push(CallQueue& queue, std::function<void()> run, std::function<void()> over = [] {}) {
  return queue.push(std::make_shared<Task>(std::move(run), std::move(over)));
}

void await(CallQueue& queue) { check(queue.await(10s), "the queue is not empty after 10 s"); }

// Calls of several threads: one at a time, and each thread's in its order. The queue runs dry and
// starts again all the time.
void calls_are_in_order() {
  constexpr int kThreads = 3, kCalls = 2000;
  const auto queue = std::make_shared<CallQueue>();
  std::vector<int> seen[kThreads];  // guarded by nothing but the queue
  std::atomic<int> num_running{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, thread] {
      for (int number = 0; number < kCalls; ++number) {
        const auto run = [&, thread, number] {
          check(num_running.fetch_add(1) == 0, "two calls run at once");
          seen[thread].push_back(number);
          num_running.fetch_sub(1);
        };
        check(push(*queue, run), "a call was refused");
        if (number % 50 == 0) await(*queue);
      }
    });
  for (std::thread& thread : threads) thread.join();
  await(*queue);
  for (const std::vector<int>& numbers : seen) {
    check(numbers.size() == kCalls, "not every call ran");
    check(std::is_sorted(numbers.begin(), numbers.end()), "calls ran in another order");
  }
}

// A caller told that its call is over may call at once. After a wait for the queue, all are told.
void what_is_known_when() {
  const auto queue = std::make_shared<CallQueue>();
  for (int round = 0; round < 300; ++round) {
    bool was_idle = false, is_told = false;
    push(
        *queue, [] {},
        [&] {
          was_idle = queue->idle();
          std::this_thread::sleep_for(100us);
          is_told = true;
        });
    await(*queue);
    check(was_idle, "a call is over, but the group not idle");
    check(is_told, "nothing is queued, but not everybody told");
    check(queue->idle(), "nothing is queued, but the group not idle");
  }
}

void python_goes_first() {
  const auto queue = std::make_shared<CallQueue>();
  queue->begin_in_python();
  check(!queue->idle() && !queue->takes_calls(), "a call of Python's is not seen");
  check(!push(*queue, [] {}), "a call went ahead of Python's");
  check(queue->await(0ms), "a refused call is waited for");
  queue->end_in_python();
  std::atomic<bool> may_end{false};
  push(*queue, [&] { may_end.wait(false); });
  queue->begin_in_python();  // behind it, and waits for it
  check(!queue->await(1ms), "a call that runs is not waited for");
  check(!push(*queue, [] {}), "a call went ahead of Python's, which waits");
  may_end = true;
  may_end.notify_all();
  await(*queue);
  queue->end_in_python();
  check(queue->idle() && push(*queue, [] {}), "the queue takes no calls again");
  await(*queue);
}

void require_soon(const std::atomic<bool>& holds, const char* what) {
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (!holds && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  check(holds, what);
}

using Begun = QueuedCall::Begun;

class Impatient final : public Host {
  bool steps_out() override { return true; }
};

void halves() {
  const auto queue = std::make_shared<CallQueue>();
  Company company(INT64_MAX);  // however long the yields take
  Host host;
  for (int round = 0; round < 300; ++round) {
    std::vector<int> order;
    const auto call = [&](int number, Begun part = Begun::half) {
      return std::make_shared<TwoHalves>(order, number, part);
    };
    const auto at_once = call(0, Begun::all);
    check(queue->push(at_once) && at_once->is_over && queue->idle(), "a call that was done rests");

    // A wait for the call goes on with it.
    auto one = call(1);
    check(queue->push(one) && one->begun && !queue->idle(), "a call is not begun where it is made");
    check(!queue->finish(at_once.get(), host), "another call was taken than asked for");
    one->meanwhile = [&] { check(!queue->finish(nullptr, host), "a call was taken twice"); };
    check(queue->finish(one.get(), host), "it did not get on");
    check(one->is_over && queue->idle(), "a call that is done is not over");

    // A wait that ends leaves the call to a thread; calls queued meanwhile come behind it.
    one = call(2);
    auto two = call(3);
    queue->push(one);
    one->meanwhile = [&] { queue->push(two); };
    Impatient impatient;
    check(!queue->finish(nullptr, impatient), "it got on although nobody waited");
    check(!two->begun, "a call was begun behind another one");
    await(*queue);

    // Without a wait for it, another call, a question, or a wait for the queue make it go on.
    one = call(4);
    two = call(5);
    queue->push(one);
    queue->push(two);
    check(!two->begun, "a call was begun behind another one");
    await(*queue);
    one = call(6);
    queue->push(one);
    queue->go_on();
    while (!one->is_over) std::this_thread::yield();
    one = call(7);
    queue->push(one);
    queue->begin_in_python();
    await(*queue);
    queue->end_in_python();
    check(one->is_over, "nothing is queued, but a call rests");

    // A question or another call carries out a call without a wait at once; the other may rest.
    one = call(8);
    two = call(9);
    queue->push(one);
    one->is_ready = true;
    queue->push(two);
    check(one->is_over && two->begun && !two->is_over, "a call that was ready was not carried out");
    two->is_ready = true;
    push(*queue, [&] { order.push_back(10); });
    check(two->is_over, "a call that was ready was not carried out");
    await(*queue);
    one = call(11);
    queue->push(one);
    one->is_ready = true;
    queue->go_on();
    check(one->is_over && queue->idle(), "a call that was ready is not over");

    // A wait for a moment carries out a call that is ready, and leaves another one to a thread.
    one = call(12);
    queue->push(one);
    one->is_ready = true;
    queue->linger(one.get(), company);
    check(one->is_over && queue->idle(), "a call that was ready is not over");
    one = call(13);
    two = call(14);
    queue->push(one);
    queue->linger(two.get(), company);
    check(!one->is_over && !queue->idle(), "a wait for another call went on with this one");
    queue->linger(one.get(), company);
    require_soon(one->is_over, "a call that is not waited for any more rests");

    await(*queue);
    check(order == std::vector<int>({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}),
          "calls ran in another order");
  }
}

// A wait for a moment ends with the call that a thread carries out, or after that moment.
void waits_for_a_moment() {
  const auto queue = std::make_shared<CallQueue>();
  Company company(INT64_MAX);
  std::atomic<bool> may_end{false}, is_over{false};
  const auto task = std::make_shared<Task>([&] { may_end.wait(false); }, [&] { is_over = true; });
  queue->push(task);
  queue->linger(task.get(), company);
  check(!is_over, "a call is over that goes on");
  const auto start = std::chrono::steady_clock::now();
  queue->linger(task.get(), company);
  check(std::chrono::steady_clock::now() - start > 50us, "no call of a thread is waited for");
  may_end = true;
  may_end.notify_all();
  await(*queue);
  check(is_over, "a call is not over that nobody waits for");
}

// Beside strangers such a wait goes on with the call here, as a wait for it does, for some
// milliseconds. A yield that lasts as long as a time slice tells of them.
void waits_beside_strangers() {
  const auto queue = std::make_shared<CallQueue>();
  Company company;
  const int64_t time_us = now_us();
  company.note_pause(time_us, time_us + 5000000);
  std::vector<int> order;
  auto call = std::make_shared<TwoHalves>(order, 0);
  queue->push(call);
  const auto waiter = std::this_thread::get_id();
  queue->linger(call.get(), company);
  check(call->is_over && call->carried_out_by == waiter, "the call was left to a thread");

  call = std::make_shared<TwoHalves>(order, 1);
  queue->push(call);
  call->meanwhile = [&] { std::this_thread::sleep_for(5ms); };
  queue->linger(call.get(), company);
  require_soon(call->is_over, "a call that is not waited for any more rests");
  check(call->carried_out_by != waiter, "a wait for a moment beside strangers lasts");
  await(*queue);

  Company learning(0);  // each yield counts as a slice
  for (int i = 0; i < 10000 && !learning.is_there(now_us()); ++i) {
    call = std::make_shared<TwoHalves>(order, 2);
    queue->push(call);
    queue->linger(call.get(), learning);
    await(*queue);
  }
  check(learning.is_there(now_us()), "lost slices are not noted");

  Company trusting(0);  // what the call's own thread takes is not lost
  std::atomic<bool> may_end{false};
  const auto task = std::make_shared<Task>([&] { may_end.wait(false); }, [] {});
  queue->push(task);
  for (int i = 0; i < 1000; ++i) queue->linger(task.get(), trusting);
  check(!trusting.is_there(now_us()), "the time of the call's thread counts as lost");
  may_end = true;
  may_end.notify_all();
  await(*queue);
}

// The thread that carried out the last call runs its callback, which may wait for further calls.
// A call that comes behind does not keep a callback waiting.
void callbacks_run_behind_the_last_call() {
  const auto queue = std::make_shared<CallQueue>();
  std::thread::id thread_of_call, thread_of_callback;
  std::atomic<bool> is_inner_over{false}, is_over{false};
  const auto callback = [&] {
    thread_of_callback = std::this_thread::get_id();
    push(*queue, [] {});
    await(*queue);
    CallQueue::run_callback([&] { is_inner_over = true; });
    require_soon(is_inner_over, "a callback that a callback waits for does not run");
    is_over = true;
  };
  push(
      *queue, [&] { thread_of_call = std::this_thread::get_id(); },
      [&] {
        CallQueue::run_callback(callback);
        std::this_thread::sleep_for(20ms);  // for an idle thread to take it
      });
  require_soon(is_over, "a callback does not run");
  check(thread_of_callback == thread_of_call, "another thread woke up for a callback");

  std::atomic<bool> may_begin{false}, may_end{false};
  push(
      *queue, [&] { may_begin.wait(false); },
      [&] {
        CallQueue::run_callback([&] {
          may_end = true;
          may_end.notify_all();
        });
      });
  push(*queue, [&] { may_end.wait(false); });
  may_begin = true;
  may_begin.notify_all();
  await(*queue);
}

// Notes that it is carried out, and takes its time for that.
class Alone final : public QueuedCall {
 public:
  Alone(std::atomic<int>& num_running, Begun part) : num_running_(num_running), part_(part) {}
  Begun begin() noexcept override { return part_; }
  void run() noexcept override { work(); }
  bool finish(Host&) noexcept override {
    work();
    return true;
  }
  void over() noexcept override { is_over = true; }
  std::atomic<bool> is_over{false};

 private:
  void work() {
    check(num_running_.fetch_add(1) == 0, "two calls run at once");
    std::this_thread::sleep_for(200us);
    num_running_.fetch_sub(1);
  }
  std::atomic<int>& num_running_;
  const Begun part_;
};

// A thread whose call is over queues another one. In between a second thread begins a call: the
// first one's is behind that. A third thread keeps the queue busy, so that there is an in-between.
void puts_away_before_others_begin() {
  constexpr int kRounds = 500;
  const auto queue = std::make_shared<CallQueue>();
  Host host;
  std::atomic<int> num_running{0};
  std::atomic<bool> is_done{false};
  const auto none = std::make_shared<Alone>(num_running, Begun::no);
  Company company(INT64_MAX);
  std::thread busy([&] {
    while (!is_done) queue->linger(none.get(), company);
  });
  for (int round = 0; round < kRounds; ++round) {
    const auto call = [&](Begun part) { return std::make_shared<Alone>(num_running, part); };
    const auto first = call(Begun::half), second = call(Begun::half), third = call(Begun::no);
    queue->push(first);
    std::thread other([&] {
      while (!first->is_over) continue;
      queue->push(second);
      queue->finish(second.get(), host);
    });
    queue->finish(first.get(), host);
    queue->push(third);
    other.join();
    await(*queue);
  }
  is_done = true;
  busy.join();
}

// The group may be gone as soon as nothing is queued, while the thread still puts things away.
void a_queue_outlives_its_group() {
  for (int round = 0; round < 30; ++round) {
    auto queue = std::make_shared<CallQueue>();
    std::shared_ptr<void> slow(nullptr, [](void*) { std::this_thread::sleep_for(2ms); });
    push(*queue, [slow = std::move(slow)] {});
    await(*queue);
  }
}

}  // namespace

int main() {
  calls_are_in_order();
  what_is_known_when();
  python_goes_first();
  halves();
  waits_for_a_moment();
  waits_beside_strangers();
  callbacks_run_behind_the_last_call();
  puts_away_before_others_begin();
  a_queue_outlives_its_group();
  drain_threads();
  std::puts("all well");
}
