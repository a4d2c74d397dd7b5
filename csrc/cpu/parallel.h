// How CPU operators share their work: the caller's thread pool, tasks taken one by one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace fc {

// Runs f(begin, end) over pieces of [0, n), at most one piece per thread, in the caller's pool.
using ParallelFor = std::function<void(int64_t n, const std::function<void(int64_t, int64_t)>& f)>;

// The pool and its size; a size of 1 runs inline.
struct Pool {
  int64_t threads;
  ParallelFor parallel_for;

  // Calls worker(next) once per thread; each worker takes task numbers from next() until it answers -1. The tasks'
  // results may not depend on who runs them. `small` work runs inline: waking threads would cost more.
  template <class Worker>
  void run(int64_t tasks, bool small, const Worker& worker) const {
    std::atomic<int64_t> cursor{0};
    const auto next = [&] {
      const int64_t task = cursor.fetch_add(1, std::memory_order_relaxed);
      return task < tasks ? task : -1;
    };
    const int64_t workers = small ? 1 : std::min(threads, tasks);
    if (workers <= 1) return worker(next);
    parallel_for(workers, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) worker(next);
    });
  }
};

}  // namespace fc
