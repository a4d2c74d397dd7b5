// Planning: which rows go into the next forward of a model, with which tokens and blocks. See scheduler.h.
#include <algorithm>

#include "scheduler/scheduler.h"

namespace fc {

void Plan::reserve(size_t most) {
  for (auto* array : {&rows, &input_ids, &position_ids, &logit_index, &sample_rows, &key}) array->reserve(most);
  for (auto* array : {&kv_len, &slot_mapping, &position, &epoch}) array->reserve(most);
  q_indptr.reserve(most + 1);
  q_indptr.push_back(0);
}

std::vector<int32_t> Scheduler::next_models() const {
  std::vector<std::pair<double, int32_t>> ready;
  for (int32_t m = 0; m < num_models(); ++m) {
    if (rows_.num_ready(m) > 0) ready.emplace_back(-static_cast<double>(rows_.num_ready(m)) / costs_[m], m);
  }
  std::sort(ready.begin(), ready.end());
  std::vector<int32_t> models;
  for (const auto& [score, m] : ready) models.push_back(m);
  return models;
}

// Rows by age, each with its lag or a chunk of it, within the token budget. Once a row could not start, only rows that
// hold blocks are looked at.
Plan Scheduler::plan(int32_t m) {
  check_model(m);
  if (!pending_[m].empty()) throw PlanPending("plan(m) before the last plan of m was committed");
  Plan plan;
  plan.reserve(static_cast<size_t>(std::min(rows_.num_ready(m), token_budget_)));
  auto older = rows_.older_holders(m);
  int64_t budget = token_budget_;
  bool full = false;
  youngest_ = rows_.num_slots() - 1;
  tables_.clear();
  if (!prefilling_.empty()) prefilling_.clear();
  for (int32_t slot = 0; (slot = rows_.next_ready(m, slot, full)) >= 0 && budget > 0; ++slot) {
    Row& row = rows_[slot];
    const bool holds = !row.held[m].table.empty();
    if (!holds && !share_cached(row, m)) continue;
    const int32_t start = row.held[m].kv_len;
    if (holds && prefix_cache_ && start < row.prompt_len - 1) prefilling_.insert(row.group);
    const auto n = static_cast<int32_t>(std::min<int64_t>(row.size() - start, budget));
    if (reserve(row, m, n, holds ? 0 : older.before(slot), plan)) {
      if (!holds) {
        counters_[m].cached += start;
        rows_.refresh_holding(row, m);
      }
      rows_.enter_plan(row);
      budget -= n;
      pending_[m].push_back({&row, n, start + n == row.size()});
      emit(row, m, n, plan);
    } else if (holds) {
      preempt(row);
      break;
    } else {
      release(row, m);
      full = true;
    }
  }
  emit_tables(plan);
  counters_[m].tokens += static_cast<int64_t>(plan.input_ids.size());
  counters_[m].forwards += !plan.rows.empty();
  return plan;
}

// Lets a row that starts hold the cached blocks of its leading ids. False, and nothing held, if another row of its
// group computes more of the prompt right now: it will wait for that.
bool Scheduler::share_cached(Row& row, int32_t m) {
  BlockPool& pool = pools_[m];
  Held& held = row.held[m];
  Prefix* tip = find_cached(row, m, found_);
  int32_t known = 0;
  for (const auto& [block, tokens] : found_) known += tokens;
  if (prefix_cache_ && known < row.prompt_len - 1 && !prefilling_.insert(row.group).second) return false;
  for (const auto& [block, tokens] : found_) {
    pool.share(block);
    held.table.push_back(block);
  }
  held.kv_len = known;
  BlockPool::hold(tip);
  pool.drop(held.tip);
  held.tip = tip;
  return true;
}

// Blocks that hold leading ids of the row; the last id is always left to feed. Returns the prefix of the full ones.
Prefix* Scheduler::find_cached(const Row& row, int32_t m, CachedBlocks& found) {
  BlockPool& pool = pools_[m];
  found.clear();
  Prefix* tip = pool.root();
  if (!prefix_cache_) return tip;
  int32_t end = 0;
  while (end + block_size_ <= row.size() - 1) {
    Prefix* next = pool.find(tip, row.tokens(end, end + block_size_));
    if (!next || next->block < 0) break;
    end += block_size_;
    found.emplace_back(next->block, block_size_);
    tip = next;
  }
  const int32_t tail = row.prompt_len - 1;
  if (end < tail && tail < end + block_size_) {
    const Prefix* partial = pool.find(tip, row.tokens(end, tail));
    if (partial && partial->block >= 0) found.emplace_back(partial->block, tail - end);
  }
  return tip;
}

// Gives the row the blocks for n more tokens, preempting younger rows, the youngest first, while it must. A row that
// starts leaves `spare` blocks: one for each older row to grow into. False if there is no room.
bool Scheduler::reserve(Row& row, int32_t m, int32_t n, int32_t spare, Plan& plan) {
  BlockPool& pool = pools_[m];
  std::vector<int32_t>& table = row.held[m].table;
  const int32_t start = row.held[m].kv_len;
  const int32_t part = start % block_size_;
  const int32_t blocks = (start + n + block_size_ - 1) / block_size_;
  bool shared;
  while (true) {
    shared = part > 0 && pool.ref(table.back()) > 1;
    const int32_t need = blocks - static_cast<int32_t>(table.size()) + shared;
    if (pool.num_free() >= need + spare) break;
    youngest_ = rows_.youngest_idle_holder(m, youngest_);
    if (youngest_ <= row.slot || pool.num_free() >= need) return false;
    preempt(rows_[youngest_]);
  }
  if (shared) {
    const int32_t source = table.back(), target = pool.allocate();
    plan.copies.insert(plan.copies.end(), {source, target});
    pool.release(source);
    table.back() = target;
    ++counters_[m].copies;
  } else if (part > 0) {
    pool.unpublish(table.back(), part);
  }
  while (static_cast<int32_t>(table.size()) < blocks) table.push_back(pool.allocate());
  return true;
}

// Gives back the blocks of the row beyond the first `keep` tokens, the last block first.
void Scheduler::release(Row& row, int32_t m, int32_t keep) {
  BlockPool& pool = pools_[m];
  Held& held = row.held[m];
  const int32_t kept = std::min(held.kv_len, keep);
  for (int32_t level = held.kv_len / block_size_; prefix_cache_ && level > kept / block_size_; --level) {
    Prefix* parent = held.tip->parent;
    BlockPool::hold(parent);
    pool.drop(held.tip);
    held.tip = parent;
  }
  held.kv_len = kept;
  while (!held.table.empty() && (static_cast<int32_t>(held.table.size()) - 1) * block_size_ >= kept) {
    pool.release(held.table.back());
    held.table.pop_back();
  }
  rows_.refresh_holding(row, m);
}

// Takes all blocks of a row; it will replay its own ids, never redraw them.
void Scheduler::preempt(Row& row) {
  for (int32_t m = 0; m < num_models(); ++m) {
    counters_[m].preemptions += !row.held[m].table.empty();
    release(row, m);
  }
}

void Scheduler::emit(Row& row, int32_t m, int32_t n, Plan& plan) {
  const Held& held = row.held[m];
  const int32_t start = held.kv_len, end = start + n;
  plan.rows.push_back(row.id);
  plan.input_ids.insert(plan.input_ids.end(), row.ids.begin() + start, row.ids.begin() + end);
  int32_t offset = start % block_size_;
  const int32_t* block = held.table.data() + start / block_size_;
  for (int32_t t = start; t < end; ++t) {
    plan.position_ids.push_back(t);
    plan.slot_mapping.push_back(*block * block_size_ + offset);
    if (++offset == block_size_) offset = 0, ++block;
  }
  tables_.insert(tables_.end(), held.table.begin(), held.table.end());
  plan.q_indptr.push_back(plan.q_indptr.back() + n);
  plan.kv_len.push_back(end);
  if (end == row.size()) {
    plan.logit_index.push_back(plan.q_indptr.back() - 1);
    plan.sample_rows.push_back(row.id);
    plan.key.push_back(static_cast<int64_t>(row.key));
    plan.position.push_back(row.length());
    plan.epoch.push_back(static_cast<int32_t>(row.epoch));
  }
  for (int32_t t = std::max(start, row.prompt_len) - row.prompt_len; t < end - row.prompt_len; ++t) {
    counters_[m].catch_up += row.policy->models[row.author[t]] != m;
  }
}

void Scheduler::emit_tables(Plan& plan) const {
  const auto blocks_of = [this](int32_t tokens) { return (tokens + block_size_ - 1) / block_size_; };
  int32_t width = 0;
  for (int32_t kv_len : plan.kv_len) width = std::max(width, blocks_of(kv_len));
  plan.block_table.reserve(plan.kv_len.size() * width);
  auto table = tables_.cbegin();
  for (int32_t kv_len : plan.kv_len) {
    const int32_t blocks = blocks_of(kv_len);
    plan.block_table.insert(plan.block_table.end(), table, table + blocks);
    plan.block_table.resize(plan.block_table.size() + width - blocks);
    table += blocks;
  }
}

}  // namespace fc
