// Threads of the kernels: one pool for the process, which includes the caller.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tk {

using Task = void (*)(void* context, int64_t index);

// Calls task(context, i) for every i in [0, count) and waits for all. Free threads claim them in
// order. A task must not call this. A second caller waits for the first.
void run_tasks(int64_t count, Task task, void* context);

using RunTask = void (*)(void* context, int64_t index, int64_t next);

// The same for tasks whose neighbours share data. Each thread has a run of [0, count): it does its
// own in order, then helps with those of others. `next`: the thread's likely next task, or count.
void run_in_runs(int64_t count, RunTask task, void* context);

// Threads that a kernel may use, including the caller.
int64_t num_threads();

// Lets idle threads prefetch [begin, begin + bytes), which is read next, until the next call of
// this.
void expect(const void* begin, int64_t bytes);

// Returns a number that no earlier call has returned; never 0.
uint64_t new_number();

// Returns memory of the calling thread, aligned for vectors, and valid until its next call.
void* scratch(size_t bytes);

// run_tasks for a callable: parallel(n, [&](int64_t i) { ... }).
template <class F>
static inline void parallel(int64_t count, F&& body) {
  if (count == 1) {
    body(static_cast<int64_t>(0));
    return;
  }
  run_tasks(count, [](void* context, int64_t index) { (*static_cast<F*>(context))(index); }, &body);
}

// run_in_runs for a callable: parallel_runs(n, [&](int64_t i, int64_t next) { ... }).
template <class F>
static inline void parallel_runs(int64_t count, F&& body) {
  run_in_runs(
      count,
      [](void* context, int64_t index, int64_t next) { (*static_cast<F*>(context))(index, next); },
      &body);
}

}  // namespace tk
