// A row: one response being written, its authors, and what it holds in each model's pool.
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/blocks.h"

namespace fc {

enum Kind : uint8_t { kDraw, kCycle, kAsk };               // how the next author is chosen
enum Reason : uint8_t { kStart, kBoundary, kGap, kCall };  // why it was chosen
enum State : uint8_t { kRunning, kEos, kLength, kStop, kAbort };

// Who writes next, as data. models[w] is the model that writer w speaks through.
struct Policy {
  Kind kind;
  std::vector<int32_t> models;
  std::vector<double> cumulative;  // of the writers' probabilities
  bool has_boundary;
  std::vector<uint8_t> boundary;  // per id: the author is chosen anew after it
  int32_t max_gap;                // the same after this many tokens without a choice; 0 is never
  int32_t first;                  // writer of the first token; -1 draws
  std::vector<int64_t> eos;

  bool is_boundary(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < boundary.size() && boundary[static_cast<size_t>(id)];
  }
};

struct Draw {
  int32_t position;  // in the response; the writer holds from here on
  Reason reason;
  uint8_t writer;
};

// What a row holds in one model's pool: KV is valid for exactly kv_len leading ids.
struct Held {
  int32_t kv_len = 0;
  std::vector<int32_t> table;
  Prefix* tip = nullptr;  // the prefix of the kv_len / block_size full blocks; the pool's root without a prefix cache
};

struct Row {
  int64_t id;
  int32_t slot;  // in the row table
  const Policy* policy;
  std::vector<int32_t> ids;  // prompt and response
  int32_t prompt_len;
  int32_t max_len;
  uint64_t key;
  int64_t group;
  bool ignore_eos;
  std::vector<Held> held;
  std::vector<uint8_t> author;  // per response token
  std::vector<float> logprob;   // per response token
  std::vector<Draw> draws;
  uint32_t epoch = 0;
  bool asking = false;
  bool busy = false;  // in a plan that is not committed
  State state = kRunning;
  double last_time = 0;  // clock of the last commit

  // What the row table has counted this row as.
  int32_t counted_ready = -1;
  bool counted_running = false;

  int32_t size() const { return static_cast<int32_t>(ids.size()); }
  int32_t length() const { return size() - prompt_len; }
  int32_t writer() const { return draws.back().writer; }
  int32_t model() const { return draws.empty() ? -1 : policy->models[draws.back().writer]; }
  Tokens tokens(int32_t start, int32_t end) const { return Tokens(ids).subspan(start, end - start); }
};

}  // namespace fc
