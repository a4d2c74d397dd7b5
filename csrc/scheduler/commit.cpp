// Applying what was sampled: tokens, the content cache, the ends of rows, and the next authors. See scheduler.h.
#include <algorithm>

#include "common/philox.h"
#include "scheduler/scheduler.h"

namespace fc {

// A hand-off's latency is the time from the last foreign token to the first own.
std::vector<int64_t> Scheduler::commit(int32_t m, std::span<const int64_t> ids, std::span<const float> logprobs,
                                       double now) {
  check_model(m);
  std::vector<Planned>& pending = pending_[m];
  const auto speaks = [](const Planned& p) { return p.speaks; };
  const auto sampled = static_cast<size_t>(std::count_if(pending.begin(), pending.end(), speaks));
  if (ids.size() < sampled || logprobs.size() < sampled) {
    throw std::out_of_range("commit: got " + std::to_string(std::min(ids.size(), logprobs.size())) + " tokens, need " +
                            std::to_string(sampled));
  }
  std::vector<int64_t> ended;
  size_t s = 0;
  for (const Planned& planned : pending) {
    Row& row = *planned.row;
    row.busy = false;
    publish(row, m, planned.n);
    if (planned.speaks) {
      const auto writer = static_cast<uint8_t>(row.writer());
      if (!row.author.empty() && row.author.back() != writer) {
        ++counters_[m].handoffs;
        if (row.last_time != 0)  // 0: its only tokens so far were forced, no clock saw them
          latencies_.push_back(now - row.last_time);
      }
      row.ids.push_back(static_cast<int32_t>(ids[s]));
      row.author.push_back(writer);
      row.logprob.push_back(logprobs[s]);
      row.last_time = now;
      ++s;
      ++counters_[m].sampled;
      settle(row);
      if (row.state != kRunning) ended.push_back(row.id);
    }
    rows_.refresh(row);
  }
  pending.clear();
  return ended;
}

// Advances kv_len by n; enters the blocks that are full now, and the prompt's partial tail, in the cache.
void Scheduler::publish(Row& row, int32_t m, int32_t n) {
  Held& held = row.held[m];
  BlockPool& pool = pools_[m];
  const int32_t before = held.kv_len, after = before + n, tail = row.prompt_len - 1;
  held.kv_len = after;
  if (!prefix_cache_) return;
  for (int32_t start = before - before % block_size_; start <= after; start += block_size_) {
    const int32_t end = start + block_size_;
    if (before < tail && tail <= after && start < tail && tail < end) {
      pool.publish(held.tip, row.tokens(start, tail), held.table[start / block_size_]);
    }
    if (end > after) break;
    Prefix* full = pool.publish(held.tip, row.tokens(start, end), held.table[start / block_size_]);
    BlockPool::hold(full);
    pool.drop(held.tip);
    held.tip = full;
  }
}

// Ends the row if its last token or its length says so, else chooses the next author if it is time.
void Scheduler::settle(Row& row) {
  const std::vector<int64_t>& eos = row.policy->eos;
  if (!row.author.empty() && !row.ignore_eos && std::find(eos.begin(), eos.end(), row.ids.back()) != eos.end()) {
    end(row, kEos);
  } else if (row.size() >= row.max_len) {
    end(row, kLength);
  } else {
    choose_author(row);
  }
}

void Scheduler::end(Row& row, State state) {
  row.state = state;
  row.asking = false;
  for (int32_t m = 0; m < num_models(); ++m) release(row, m);
}

// Chooses the author from this response position on, if the position has a choice and none was made.
void Scheduler::choose_author(Row& row) {
  const Policy& p = *row.policy;
  const int32_t t = row.length();
  if (!row.draws.empty() && row.draws.back().position == t) return;
  Reason reason;
  if (row.draws.empty()) {
    reason = kStart;
  } else if (p.is_boundary(row.ids.back())) {
    reason = kBoundary;
  } else if (p.max_gap && t - row.draws.back().position >= p.max_gap) {
    reason = kGap;
  } else if (p.kind == kAsk && !p.has_boundary) {
    reason = kCall;
  } else {
    return;
  }
  if (p.kind == kAsk) {
    row.asking = true;
    return;
  }
  const auto writers = static_cast<int32_t>(p.models.size());
  int32_t writer;
  if (reason == kStart && p.first >= 0) {
    writer = p.first;
  } else if (p.kind == kCycle && reason != kStart) {
    writer = (row.writer() + 1) % writers;
  } else {
    const double u = author_uniform(row.key, static_cast<uint32_t>(t), row.epoch);
    const auto above = std::find_if(p.cumulative.begin(), p.cumulative.end(), [u](double c) { return u < c; });
    writer = above == p.cumulative.end() ? writers - 1 : static_cast<int32_t>(above - p.cumulative.begin());
  }
  row.draws.push_back({t, reason, static_cast<uint8_t>(writer)});
}

}  // namespace fc
