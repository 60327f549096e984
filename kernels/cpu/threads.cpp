// A pool of its own instead of OpenMP's. Tasks are claimed one by one, so a preempted thread claims
// fewer, and no other thread waits for it. OpenMP ends every region with a barrier of all threads,
// which on a shared machine costs a time slice whenever one is preempted. And torch's installation
// decides which of several OpenMP libraries is loaded.
#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "variant.h"

namespace tk {
namespace {

// Time for which an idle thread looks for work before it sleeps. It is longer than the host takes
// between two kernels of a step, so that no kernel waits for a thread to wake, and too short to
// show in an idle server.
constexpr std::chrono::microseconds kSpinTime{500};
// Looks for work before the thread yields; about 20 us.
constexpr int kSpins = 500;
// Bytes that a thread prefetches between two looks.
constexpr int64_t kPrefetchBytes = 1024;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  void resize(int64_t size) {
    std::lock_guard<std::mutex> lock(caller_);
    if (size == static_cast<int64_t>(helpers_.size()) + 1) return;
    ending_ = true;
    wake_all();
    for (auto& helper : helpers_) helper.join();
    helpers_.clear();
    ending_ = false;
    for (int64_t i = 1; i < size; ++i) helpers_.emplace_back([this] { help(); });
    size_ = size;
  }

  int64_t size() const { return size_; }

  // Binds a helper to these processors. Returns false if the system refuses.
  bool bind(int64_t helper, const int64_t* cpus, int64_t count) {
    std::lock_guard<std::mutex> lock(caller_);
    if (helper < 1 || helper > static_cast<int64_t>(helpers_.size())) return false;
#ifdef __linux__
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) last = cpus[i] > last ? cpus[i] : last;
    cpu_set_t* set = CPU_ALLOC(last + 1);
    if (!set) return false;
    const size_t size = CPU_ALLOC_SIZE(last + 1);
    CPU_ZERO_S(size, set);
    for (int64_t i = 0; i < count; ++i) CPU_SET_S(cpus[i], size, set);
    const bool done = pthread_setaffinity_np(helpers_[helper - 1].native_handle(), size, set) == 0;
    CPU_FREE(set);
    return done;
#else
    (void)cpus, (void)count;
    return false;
#endif
  }

  void run(int64_t count, Task task, void* context) {
    std::lock_guard<std::mutex> lock(caller_);
    if (helpers_.empty()) {
      for (int64_t i = 0; i < count; ++i) task(context, i);
      return;
    }
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    prefetched_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | static_cast<uint64_t>(count), std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst)) wake_all();
    work();
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < 100 * kSpins) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

  void expect(const void* begin, int64_t bytes) {
    expected_.store(static_cast<const char*>(begin), std::memory_order_relaxed);
    expected_bytes_.store(bytes, std::memory_order_relaxed);
    prefetched_.store(0, std::memory_order_relaxed);
  }

 private:
  // Runs tasks of the current job until none is left to claim. A job's fields change only when all
  // of its tasks are done, so those read before a successful claim belong to the claimed job.
  void work() {
    uint64_t now = ticket_.load(std::memory_order_acquire);
    while (now & 0xffffffffu) {
      const Task task = task_.load(std::memory_order_relaxed);
      void* const context = context_.load(std::memory_order_relaxed);
      const int64_t index =
          count_.load(std::memory_order_relaxed) - static_cast<int64_t>(now & 0xffffffffu);
      if (!ticket_.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire))
        continue;
      task(context, index);
      done_.fetch_add(1, std::memory_order_release);
      now = ticket_.load(std::memory_order_acquire);
    }
  }

  void help() {
    uint64_t seen = 0;
    while (!ending_.load(std::memory_order_relaxed)) {
      const uint64_t job = ticket_.load(std::memory_order_acquire) >> 32;
      if (job == seen) {
        await(seen);
      } else {
        seen = job;
        work();
      }
    }
  }

  // Waits for a job other than `seen`, or for the end of the pool: spins first, then sleeps.
  void await(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < kSpins; ++i) {
        if (is_news(seen)) return;
        if (!prefetch()) pause();
      }
      sched_yield();
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return is_news(seen); });
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Prefetches some more of the expected bytes. Returns false if none are left. Another thread may
  // replace the address meanwhile: that is harmless, since a prefetch reads nothing.
  bool prefetch() {
    const int64_t bytes = expected_bytes_.load(std::memory_order_relaxed);
    if (prefetched_.load(std::memory_order_relaxed) >= bytes) return false;
    const int64_t from = prefetched_.fetch_add(kPrefetchBytes, std::memory_order_relaxed);
    if (from >= bytes) return false;
    const char* place = expected_.load(std::memory_order_relaxed) + from;
    for (int64_t i = 0; i < kPrefetchBytes; i += 64) __builtin_prefetch(place + i, 0, 2);
    return true;
  }

  bool is_news(uint64_t seen) const {
    return ticket_.load(std::memory_order_seq_cst) >> 32 != seen ||
           ending_.load(std::memory_order_relaxed);
  }

  void wake_all() {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }

  // The job's number (high 32 bits) and its number of unclaimed tasks (low 32). A claim exchanges
  // both, and fails if the job has changed, so a late thread does no harm.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> count_{0}, done_{0};
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};

  std::atomic<const char*> expected_{nullptr};
  std::atomic<int64_t> expected_bytes_{0}, prefetched_{0};

  std::atomic<int> sleeping_{0};
  std::atomic<bool> ending_{false};
  std::mutex sleep_;
  std::condition_variable wake_;

  std::mutex caller_;
  std::atomic<int64_t> size_{1};
  std::vector<std::thread> helpers_;
};

Pool* pool = nullptr;

// The pool lives as long as the process: sleeping threads do no harm at its end. A forked child has
// no threads, and gets a new pool.
Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

struct Scratch {
  void* memory = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(memory); }
};

thread_local Scratch own;

}  // namespace

void run_tasks(int64_t count, Task task, void* context) {
  if (count > 0) the_pool().run(count, task, context);
}

void run_in_runs(int64_t count, RunTask task, void* context) {
  struct Run {
    std::atomic<int64_t> next;
    int64_t end;
    char padding[112];  // two runs never share a cache line
  };
  const int64_t num_runs = num_threads() < count ? num_threads() : count;
  std::vector<Run> runs(num_runs);
  for (int64_t i = 0; i < num_runs; ++i) {
    runs[i].next.store(count * i / num_runs, std::memory_order_relaxed);
    runs[i].end = count * (i + 1) / num_runs;
  }
  parallel(num_runs, [&](int64_t own) {
    for (int64_t i = 0; i < num_runs; ++i) {
      Run& run = runs[(own + i) % num_runs];
      for (int64_t index; (index = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) {
        task(context, index, index + 1 < run.end ? index + 1 : count);
      }
    }
  });
}

int64_t num_threads() { return the_pool().size(); }

void expect(const void* begin, int64_t bytes) { the_pool().expect(begin, bytes); }

uint64_t new_number() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

void* scratch(size_t bytes) {
  if (own.size < bytes) {
    std::free(own.memory);
    own.size = (bytes + 4095) / 4096 * 4096;
    own.memory = nullptr;  // macOS has aligned_alloc only since 10.15
    if (posix_memalign(&own.memory, 64, own.size)) {
      own.size = 0;
      throw std::bad_alloc();
    }
  }
  return own.memory;
}

}  // namespace tk

TK_API void tk_set_num_threads(int64_t count) { tk::the_pool().resize(count < 1 ? 1 : count); }

// Binds the thread `index` (0: the caller) to `cpus` [count]. Returns 0 if the system refuses.
TK_API int64_t tk_bind_thread(int64_t index, const int64_t* cpus, int64_t count) {
  return tk::the_pool().bind(index, cpus, count);
}

TK_API int64_t tk_num_threads() { return tk::num_threads(); }
