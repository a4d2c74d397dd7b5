// Rows come, are intervened upon, and go. See scheduler.h.
#include "scheduler/scheduler.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <set>

namespace fc {

Scheduler::Scheduler(const std::vector<int32_t>& num_blocks, int32_t block_size, int64_t token_budget,
                     std::vector<double> costs, bool prefix_cache)
    : block_size_(block_size),
      token_budget_(token_budget),
      costs_(std::move(costs)),
      prefix_cache_(prefix_cache),
      rows_(static_cast<int32_t>(num_blocks.size())),
      pending_(num_blocks.size()),
      counters_(num_blocks.size()) {
  if (block_size < 1) throw std::invalid_argument("block_size: got " + std::to_string(block_size) + ", need >= 1");
  if (costs_.size() != num_blocks.size()) {
    throw std::invalid_argument("costs: got " + std::to_string(costs_.size()) + ", need one for each of " +
                                std::to_string(num_blocks.size()) + " models");
  }
  for (int32_t n : num_blocks) pools_.emplace_back(n, block_size);
}

int64_t Scheduler::add_policy(Policy policy) {
  const auto writers = static_cast<int64_t>(policy.models.size());
  if (writers < 1 || writers > 255 || policy.first < -1 || policy.first >= writers) {
    throw std::invalid_argument("add_policy: got " + std::to_string(writers) + " writers and first=" +
                                std::to_string(policy.first) + ", need 1..255 and one of them or -1");
  }
  for (int32_t m : policy.models) check_model(m);
  policies_.push_back(std::move(policy));
  return static_cast<int64_t>(policies_.size()) - 1;
}

int64_t Scheduler::add(std::vector<int32_t> prompt, uint64_t key, int64_t group, int64_t max_new, int64_t policy,
                       bool ignore_eos) {
  const Policy& p = policies_.at(static_cast<size_t>(policy));
  const auto length = static_cast<int32_t>(prompt.size());
  const int64_t need = (int64_t{length} + max_new - 1 + block_size_ - 1) / block_size_;
  for (int32_t m : std::set<int32_t>(p.models.begin(), p.models.end())) {
    if (need > pools_[m].num_blocks()) {
      throw std::invalid_argument("kv_memory: got " + std::to_string(pools_[m].num_blocks()) + " blocks of " +
                                  std::to_string(block_size_) + " tokens for model " + std::to_string(m) +
                                  ", need >= " + std::to_string(need) + " for one row of " + std::to_string(length) +
                                  " + " + std::to_string(max_new) + " tokens");
    }
  }
  auto made = std::make_unique<Row>();
  made->id = next_id_++;
  made->policy = &p;
  made->ids = std::move(prompt);
  made->prompt_len = length;
  made->max_len = static_cast<int32_t>(length + max_new);
  made->key = key;
  made->group = group;
  made->ignore_eos = ignore_eos;
  for (BlockPool& pool : pools_) {
    made->held.push_back({0, {}, pool.root()});
    BlockPool::hold(pool.root());
  }
  Row& row = rows_.add(std::move(made));
  choose_author(row);
  rows_.refresh(row);
  return row.id;
}

int32_t Scheduler::check_model(int32_t m) const {
  if (m < 0 || m >= num_models()) {
    throw std::out_of_range("model: got " + std::to_string(m) + ", need 0.." + std::to_string(num_models() - 1));
  }
  return m;
}

Row& Scheduler::idle(int64_t id) {
  Row& row = rows_.at(id);
  if (row.busy) {
    throw std::invalid_argument("got row " + std::to_string(id) + " inside a pending plan, need a committed one");
  }
  return row;
}

void Scheduler::set_author(int64_t id, int64_t writer) {
  Row& row = rows_.at(id);
  const auto writers = static_cast<int64_t>(row.policy->models.size());
  if (!row.asking) {
    throw std::invalid_argument("set_author: got row " + std::to_string(id) + ", need a row that asks");
  }
  if (writer < 0 || writer >= writers) {
    throw std::invalid_argument("set_author: got writer " + std::to_string(writer) + ", need 0.." +
                                std::to_string(writers - 1));
  }
  row.draws.push_back({row.length(), kCall, static_cast<uint8_t>(writer)});
  row.asking = false;
  rows_.refresh(row);
}

void Scheduler::truncate(int64_t id, int64_t keep) {
  Row& row = idle(id);
  if (keep < row.prompt_len || keep > row.size()) {
    throw std::invalid_argument("truncate: got keep=" + std::to_string(keep) + ", need " +
                                std::to_string(row.prompt_len) + ".." + std::to_string(row.size()));
  }
  row.ids.resize(keep);
  row.author.resize(row.length());
  row.logprob.resize(row.length());
  while (!row.draws.empty() && row.draws.back().position > row.length()) row.draws.pop_back();
  row.state = kRunning;
  row.asking = false;
  for (int32_t m = 0; m < num_models(); ++m) release(row, m, static_cast<int32_t>(keep) - 1);
  settle(row);
  rows_.refresh(row);
}

void Scheduler::append_forced(int64_t id, std::span<const int64_t> ids, int64_t writer) {
  Row& row = idle(id);
  const auto count = static_cast<int64_t>(ids.size());
  const auto writers = static_cast<int64_t>(row.policy->models.size());
  if (row.state != kRunning || row.size() + count > row.max_len) {
    throw std::invalid_argument("append_forced: got " + std::to_string(count) +
                                " ids, need <= " + std::to_string(row.max_len - row.size()) + " on a running row");
  }
  if (writer < 0 || writer >= writers) {
    throw std::invalid_argument("append_forced: got writer " + std::to_string(writer) + ", need 0.." +
                                std::to_string(writers - 1));
  }
  row.ids.insert(row.ids.end(), ids.begin(), ids.end());
  row.author.resize(row.length(), static_cast<uint8_t>(writer));
  row.logprob.resize(row.length(), std::numeric_limits<float>::quiet_NaN());
  ++row.epoch;
  settle(row);
  rows_.refresh(row);
}

int64_t Scheduler::fork(int64_t id, uint64_t key) {
  auto made = std::make_unique<Row>(idle(id));
  made->id = next_id_++;
  made->key = key;
  made->counted_ready = -1;
  made->counted_running = false;
  for (int32_t m = 0; m < num_models(); ++m) {
    for (int32_t block : made->held[m].table) pools_[m].share(block);
    BlockPool::hold(made->held[m].tip);
  }
  Row& row = rows_.add(std::move(made));
  for (int32_t m = 0; m < num_models(); ++m) rows_.refresh_holding(row, m);
  rows_.refresh(row);
  return row.id;
}

void Scheduler::finish(int64_t id, State state) {
  Row& row = idle(id);
  end(row, state);
  rows_.refresh(row);
}

void Scheduler::reset() {
  rows_.each([this](Row& row) {
    for (int32_t m = 0; m < num_models(); ++m) release(row, m);
  });
  rows_.clear();
  for (auto& planned : pending_) planned.clear();
}

Row Scheduler::take(int64_t id) {
  Row& row = rows_.at(id);
  if (row.state == kRunning) {
    throw std::invalid_argument("take: got row " + std::to_string(id) + " still running, need an ended row");
  }
  Row taken = std::move(row);
  rows_.erase(taken);
  return taken;
}

void Scheduler::invalidate(int32_t m) {
  check_model(m);
  if (!pending_[m].empty()) throw PlanPending("invalidate(m) with a pending plan");
  pools_[m].clear();
  rows_.each([this, m](Row& row) { release(row, m); });
}

}  // namespace fc
