// Threads that help with a kernel when they come in time. Knows no kernel.
//
// The caller works through the items itself and waits only for items that a helper has taken. With OpenMP it would wait
// for every thread to show up: on a busy machine a few milliseconds for a kernel of a few microseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace tinyloop {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Helpers {
 public:
  // Runs work(data) here, and on up to `count` helpers. It must be safe to run it once everything is done.
  void run(int count, void (*work)(void*), void* data) {
    std::unique_lock<std::mutex> alone(callers_, std::try_to_lock);
    if (!alone) return work(data);  // another thread is computing: the cores have enough to do
    start(count);
    work_ = work, data_ = data, wanted_ = count;
    ticket_++;
    if (asleep_) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      bell_.notify_all();
    }
    work(data);
    ticket_++;
    for (int turns = 0; inside_; turns++) turns < 1000 ? relax() : std::this_thread::yield();
  }

 private:
  void start(int count) try {
    for (; started_ < count; started_++) std::thread([this, n = started_] { serve(n); }).detach();
  } catch (const std::system_error&) {  // no more threads to be had: do without
  }

  static constexpr int PATIENCE = 2000;  // turns before a helper goes to sleep: about 0.1 ms

  // Whoever enters counts itself in before it looks whether there is work; whoever closes looks who is in after that.
  void serve(int number) {
    for (uint64_t ticket = 0;;) {
      ticket = next(ticket);
      inside_++;
      if (ticket_ == ticket && number < wanted_) work_(data_);
      inside_--;
    }
  }

  // The ticket of work that is not the work served last.
  uint64_t next(uint64_t served) {
    uint64_t ticket;
    auto found = [&] { return (ticket = ticket_) % 2 && ticket != served; };
    for (int turn = 0; turn < PATIENCE; turn++, relax())
      if (found()) return ticket;
    std::unique_lock<std::mutex> lock(sleep_);
    asleep_++;
    bell_.wait(lock, found);
    asleep_--;
    return ticket;
  }

  std::mutex callers_, sleep_;
  std::condition_variable bell_;
  std::atomic<uint64_t> ticket_{0};  // odd while there is work
  std::atomic<int> inside_{0}, asleep_{0};
  void (*work_)(void*) = nullptr;
  void* data_ = nullptr;
  int wanted_ = 0, started_ = 0;
};

// The same for all kernels: a helper that still looks for work after one of them finds that of the next.
inline Helpers& helpers() {
  static Helpers& all = *new Helpers;  // never destroyed: its threads live as long as the process
  return all;
}

// worker(item) for 0 <= item < items, on up to `threads` threads, each with a worker of its own that `make` has made
// there. Each has a run of neighbouring items of its own, so that it reads memory in a straight line, and then takes
// what others have not come to.
template <class M>
void parallel_workers(int threads, long items, const M& make) {
  constexpr int MOST = 64;
  struct alignas(64) Run {
    std::atomic<long> next;
    long end;
  };
  struct Shared {
    const M& make;
    int count;
    std::atomic<int> joined;
    Run runs[MOST];
  } shared{make, (int)std::max<long>(1, std::min<long>({threads, items, MOST})), {0}, {}};
  for (int r = 0; r < shared.count; r++) {
    shared.runs[r].next = items * r / shared.count;
    shared.runs[r].end = items * (r + 1) / shared.count;
  }
  auto work = [](void* data) {
    Shared& s = *(Shared*)data;
    auto worker = s.make();
    int own = s.joined.fetch_add(1);
    for (int r = 0; r < s.count; r++) {
      Run& run = s.runs[(own + r) % s.count];
      for (long i; (i = run.next.fetch_add(1)) < run.end;) worker(i);
    }
  };
  shared.count > 1 ? helpers().run(shared.count - 1, work, &shared) : work(&shared);
}

// f(item) for 0 <= item < items, on up to `threads` threads.
template <class F>
void parallel(int threads, long items, const F& f) {
  parallel_workers(threads, items, [&] { return [&](long i) { f(i); }; });
}

// f(first, last) over blocks of rows that are worth a thread. `cost` of a row: about its elements read.
template <class F>
void parallel_rows(int threads, long rows, long cost, const F& f) {
  long block = std::max<long>(1, 32768 / cost);
  parallel(threads, (rows + block - 1) / block, [&](long i) { f(i * block, std::min(rows, (i + 1) * block)); });
}

}  // namespace tinyloop
