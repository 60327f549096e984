// The threads that kernels run on: one pool for the process, the caller among them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tk {

using Task = void (*)(void* context, int64_t index);

// task(context, i) for every i in [0, count), claimed in order by whichever thread is free; returns when all are done.
// A task must not call it. One caller at a time; a second waits.
void run_tasks(int64_t count, Task task, void* context);

using RunTask = void (*)(void* context, int64_t index, int64_t next);

// The same for tasks whose neighbours belong together: [0, count) is cut into a run for each thread, which goes through its own in order and
// then helps others with theirs. `next`: the task that the thread most likely does next, or count.
void run_in_runs(int64_t count, RunTask task, void* context);

// Threads that a kernel may use, the caller included.
int64_t num_threads();

// Threads that have nothing to do bring [begin, begin + bytes) into the caches, until something else is expected: it is read next.
void expect(const void* begin, int64_t bytes);

// A number that no earlier call has returned; never 0.
uint64_t new_number();

// Memory of the calling thread's own, aligned for vectors; the next call may hand out the same.
void* scratch(size_t bytes);

// run_tasks with a callable: parallel(n, [&](int64_t i) { ... }).
template <class F>
static inline void parallel(int64_t count, F&& body) {
  if (count == 1) {
    body(static_cast<int64_t>(0));
    return;
  }
  run_tasks(count, [](void* context, int64_t index) { (*static_cast<F*>(context))(index); }, &body);
}

// run_in_runs with a callable: parallel_runs(n, [&](int64_t i, int64_t next) { ... }).
template <class F>
static inline void parallel_runs(int64_t count, F&& body) {
  run_in_runs(count, [](void* context, int64_t index, int64_t next) { (*static_cast<F*>(context))(index, next); }, &body);
}

}  // namespace tk
