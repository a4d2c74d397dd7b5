// The scheduler: a state machine over rows. It owns tokens, authors, KV blocks, author draws and limits. plan(m) emits
// the flat arrays of one forward of model m; commit(m) applies what was sampled. Per row and model, KV is valid for
// exactly kv_len leading ids, and table.size() == ceil(kv_len / block_size) between a commit and the next plan.
// fastcollab/scheduler.py is the same machine in readable Python, and the oracle of the tests: equal, block ids
// included.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "scheduler/blocks.h"
#include "scheduler/row.h"
#include "scheduler/rows.h"

namespace fc {

struct PlanPending : std::logic_error {
  using std::logic_error::logic_error;
};

// One forward: R rows, T new tokens, S of them yield a logit row (the last token of a row that will speak).
struct Plan {
  std::vector<int64_t> rows;          // [R]
  std::vector<int64_t> input_ids;     // [T]
  std::vector<int64_t> position_ids;  // [T]
  std::vector<int32_t> q_indptr;      // [R + 1]
  std::vector<int32_t> kv_len;        // [R], after the append
  std::vector<int32_t> block_table;   // [R, B]
  std::vector<int32_t> slot_mapping;  // [T]
  std::vector<int64_t> copies;        // [P, 2], (source, destination) blocks, before the forward, in order
  std::vector<int64_t> logit_index;   // [S], into T
  std::vector<int64_t> sample_rows;   // [S], row ids
  std::vector<int64_t> key;           // [S]
  std::vector<int32_t> position;      // [S], response position of the token to draw
  std::vector<int32_t> epoch;         // [S]

  void reserve(size_t most);  // rows; and begins q_indptr
};

// Per model; the names are those that Python sees.
struct Counters {
  int64_t forwards = 0, tokens = 0, sampled = 0, catch_up = 0, cached = 0, handoffs = 0, preemptions = 0, copies = 0;
};

class Scheduler {
 public:
  Scheduler(const std::vector<int32_t>& num_blocks, int32_t block_size, int64_t token_budget, std::vector<double> costs,
            bool prefix_cache);

  int64_t add_policy(Policy policy);
  int64_t add(std::vector<int32_t> prompt, uint64_t key, int64_t group, int64_t max_new, int64_t policy,
              bool ignore_eos);

  // Planning (plan.cpp).
  std::vector<int32_t> next_models() const;
  Plan plan(int32_t m);

  // Applying (commit.cpp): returns the rows that ended.
  std::vector<int64_t> commit(int32_t m, std::span<const int64_t> ids, std::span<const float> logprobs, double now);

  // Intervening.
  void set_author(int64_t id, int64_t writer);
  void truncate(int64_t id, int64_t keep);
  void append_forced(int64_t id, std::span<const int64_t> ids, int64_t writer);
  int64_t fork(int64_t id, uint64_t key);
  void finish(int64_t id, State state);
  void reset();
  Row take(int64_t id);
  void invalidate(int32_t m);

  // Looking in.
  int32_t num_models() const { return static_cast<int32_t>(pools_.size()); }
  int32_t block_size() const { return block_size_; }
  int64_t token_budget() const { return token_budget_; }
  bool prefix_cache() const { return prefix_cache_; }
  const std::vector<double>& costs() const { return costs_; }
  int64_t ready(int32_t m) const { return rows_.num_ready(check_model(m)); }
  int64_t unfinished() const { return rows_.num_running(); }
  std::vector<int64_t> asking() const { return rows_.asking(); }
  const Row& row(int64_t id) { return rows_.at(id); }
  const BlockPool& pool(int32_t m) const { return pools_[check_model(m)]; }
  const std::vector<Counters>& counters() const { return counters_; }
  const std::vector<double>& latencies() const { return latencies_; }
  std::vector<double> take_latencies() { return std::exchange(latencies_, {}); }

 private:
  struct Planned {
    Row* row;
    int32_t n;
    bool speaks;  // its last token is fed, so it yields a logit row
  };
  using CachedBlocks = std::vector<std::pair<int32_t, int32_t>>;  // block, tokens used of it

  int32_t check_model(int32_t m) const;
  Row& idle(int64_t id);

  bool share_cached(Row& row, int32_t m);
  Prefix* find_cached(const Row& row, int32_t m, CachedBlocks& found);
  bool reserve(Row& row, int32_t m, int32_t n, int32_t spare, Plan& plan);
  void release(Row& row, int32_t m, int32_t keep = 0);
  void preempt(Row& row);
  void emit(Row& row, int32_t m, int32_t n, Plan& plan);
  void emit_tables(Plan& plan) const;

  void publish(Row& row, int32_t m, int32_t n);
  void settle(Row& row);
  void end(Row& row, State state);
  void choose_author(Row& row);

  int32_t block_size_;
  int64_t token_budget_;
  std::vector<double> costs_;
  bool prefix_cache_;
  std::deque<BlockPool> pools_;
  std::deque<Policy> policies_;
  RowTable rows_;
  int64_t next_id_ = 0;
  std::vector<std::vector<Planned>> pending_;
  std::vector<Counters> counters_;
  std::vector<double> latencies_;

  // Of one plan, kept for their memory.
  std::unordered_set<int64_t> prefilling_;  // groups whose prompt a row of the plan computes
  CachedBlocks found_;
  std::vector<int32_t> tables_;  // of the planned rows, one after the other
  int32_t youngest_ = 0;         // no idle holder is in a slot above
};

}  // namespace fc
