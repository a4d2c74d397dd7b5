// Flash attention over pages. A task is one row, some kv heads and up to 64 queries (tokens x query heads), so K and V
// are read once per group, and at decode as whole rows. Keys come in tiles of 64 aligned to absolute position and every
// (query, key) sum runs in one order, so a query's bits depend on its own row alone: not on its neighbours, nor on how
// its tokens are split over calls. Masked keys weigh 0 and unwritten slots are never read.
#include "cpu/paged_attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/attention_tile.h"
#include "cpu/scratch.h"

namespace fc {
namespace {

constexpr int64_t kQueries = 64;      // queries per task (more where one token's group is larger)
constexpr int64_t kInline = 1 << 18;  // multiply-adds below which threads cost more than they save

struct Task {
  int64_t row, token, count, head, heads;  // tokens token .. token + count of the packed batch; kv heads
};

// One worker's buffers, reused by all of its tasks.
struct Scratch {
  Floats memory;
  float *q, *rows, *score, *acc, *top, *mass, *zero;

  Scratch(const PagedAttention& a, int64_t queries) {
    const int64_t dk = round_up(a.Dk, 16), dv = round_up(a.Dv, 16), n = round_up(queries, 16),
                  widest = std::max(dk, dv);
    const int64_t size = n * (dk + kTile + dv + 2) + (kChunk + 1) * widest;
    memory = uninitialised(size);
    q = memory.get();
    rows = q + n * dk;
    score = rows + kChunk * widest;
    acc = score + n * kTile;
    zero = acc + n * dv;
    top = zero + widest;
    mass = top + n;
    std::fill_n(zero, widest, 0.0f);
  }
};

// Head of query i (tokens x heads of the group) of the task's h-th kv head, and the row of q and out it is.
struct Query {
  int64_t head, token;
  FC_INLINE Query(const PagedAttention& a, const Task& task, int64_t h, int64_t i)
      : head((task.head + h) * (a.H / a.Hkv) + i % (a.H / a.Hkv)), token(task.token + i / (a.H / a.Hkv)) {}
};

template <class T>
FC_INLINE void read_query(const PagedAttention& a, const Query& query, float* out) {
  const T* source = static_cast<const T*>(a.q) + query.token * a.q_token + query.head * a.q_head;
  for (int64_t d = 0; d < a.Dk; ++d) out[d] = widen(source[d]);
}

template <class T>
FC_INLINE void write_output(const PagedAttention& a, const Query& query, const float* acc, float mass) {
  T* target = static_cast<T*>(a.out) + (query.token * a.H + query.head) * a.Dv;
  for (int64_t d = 0; d < a.Dv; ++d) target[d] = narrow<T>(acc[d] / mass);
}

template <class P, class V>
FC_INLINE void attend(const PagedAttention& a, const Task& task, const Scratch& s) {
  // queries: of one kv head; position: of the first token
  const int64_t group = a.H / a.Hkv, queries = task.count * group, depth = round_up(a.Dk, 16),
                width = round_up(a.Dv, 16);
  const int64_t position = a.kv_len[task.row] - a.q_indptr[task.row + 1] + task.token;
  const int32_t* table = a.block_table + task.row * a.B;
  const bool wide = a.type == Type::kFloat32;

  for (int64_t h = 0, at = 0; h < task.heads; ++h) {
    for (int64_t i = 0; i < queries; ++i, ++at) {
      const Query query(a, task, h, i);
      float* q = s.q + at * depth;
      wide ? read_query<float>(a, query, q) : read_query<bf16>(a, query, q);
      for (int64_t d = a.Dk; d < depth; ++d) q[d] = 0;
      for (int64_t d = 0; d < width; ++d) s.acc[at * width + d] = 0;
      s.top[at] = a.sinks ? a.sinks[query.head] : -kInfinity;
      s.mass[at] = a.sinks ? 1 : 0;
    }
  }

  const int64_t low = a.first_visible(position), high = position + task.count;
  Rows<P> rows, next_rows;
  const P* lie[kChunk];
  const float* copy[kChunk];
  rows.find(a, table, Tile(low / kTile, low, high));
  for (int64_t number = low / kTile; number * kTile < high; ++number, rows = next_rows) {
    const Tile tile(number, low, high);
    const bool more = (number + 1) * kTile < high;
    if (more) next_rows.find(a, table, Tile(number + 1, low, high));
    // queries that see a key of this tile: those at or after its first key, whose window has not passed its last
    int64_t from = std::max<int64_t>(0, tile.start - position), to = task.count;
    while (a.first_visible(position + to - 1) >= tile.start + tile.last) --to;
    from *= group;
    const int64_t count = to * group - from;

    for (int64_t begin = tile.begin; begin < tile.end; begin += kChunk) {
      for (int64_t h = 0; h < task.heads; ++h) {
        const int64_t base = h * queries + from, offset = (task.head + h) * a.k_pool_head;
        const float* q = s.q + base * depth;
        float* score = s.score + base * kTile + begin;
        const Ahead<P> ahead = begin + kChunk < tile.end
                                   ? Ahead<P>{rows.key + begin + kChunk, offset}
                                   : Ahead<P>{rows.value + tile.begin, (task.head + h) * a.v_pool_head};
        if (in_place<P>(a.Dk, count)) {
          point(rows.key, tile, begin, offset, s.zero, lie);
          score_keys<V>(q, lie, depth, ahead, count, score);
        } else {
          widen_rows<V>(rows.key, tile, begin, offset, a.Dk, s.zero, s.rows, copy);
          score_keys<V>(q, copy, depth, ahead, count, score);
        }
      }
    }
    for (int64_t h = 0; h < task.heads; ++h) {
      for (int64_t i = from; i < from + count; ++i) {
        const int64_t at = h * queries + i, end = position + i / group - tile.start;
        const int64_t first = a.first_visible(end + tile.start) - tile.start;
        const float alpha = weigh<V>(a, tile, first, end + 1, s.score + at * kTile, s.top + at, s.mass + at);
        if (alpha == 1) continue;
        for (int64_t d = 0; d < width; ++d) s.acc[at * width + d] *= alpha;
      }
    }
    for (int64_t begin = tile.begin; begin < tile.end; begin += kChunk) {
      for (int64_t h = 0; h < task.heads; ++h) {
        const int64_t base = h * queries + from, offset = (task.head + h) * a.v_pool_head;
        const float* p = s.score + base * kTile + begin;
        float* acc = s.acc + base * width;
        const Ahead<P> ahead = begin + kChunk < tile.end ? Ahead<P>{rows.value + begin + kChunk, offset}
                               : more                    ? Ahead<P>{next_rows.key, (task.head + h) * a.k_pool_head}
                                                         : Ahead<P>{nullptr, 0};
        if (in_place<P>(a.Dv, count)) {
          point(rows.value, tile, begin, offset, s.zero, lie);
          add_values<V>(p, lie, width, ahead, count, acc);
        } else {
          widen_rows<V>(rows.value, tile, begin, offset, a.Dv, s.zero, s.rows, copy);
          add_values<V>(p, copy, width, ahead, count, acc);
        }
      }
    }
  }

  for (int64_t h = 0, at = 0; h < task.heads; ++h) {
    for (int64_t i = 0; i < queries; ++i, ++at) {
      const Query query(a, task, h, i);
      const float* acc = s.acc + at * width;
      wide ? write_output<float>(a, query, acc, s.mass[at]) : write_output<bf16>(a, query, acc, s.mass[at]);
    }
  }
}

using Attend = void(const PagedAttention&, const Task&, const Scratch&);
FC_VERSIONS(attend_float, (const PagedAttention& a, const Task& t, const Scratch& s), attend<float, V>(a, t, s))
FC_VERSIONS(attend_bf16, (const PagedAttention& a, const Task& t, const Scratch& s), attend<bf16, V>(a, t, s))

template <class T, class P>
void append_rows(const T* source, int64_t by_token, int64_t by_head, P* pool, int64_t by_block, int64_t by_slot,
                 int64_t pool_head, int64_t width, const PagedAttention& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = a.slot_mapping[t];
    for (int64_t h = 0; h < a.Hkv; ++h) {
      const T* from = source + t * by_token + h * by_head;
      P* to = pool + slot / a.block * by_block + slot % a.block * by_slot + h * pool_head;
      for (int64_t d = 0; d < width; ++d) to[d] = narrow<P>(widen(from[d]));
    }
  }
}

template <class T, class P>
void append(const PagedAttention& a, int64_t begin, int64_t end) {
  append_rows(static_cast<const T*>(a.k), a.k_token, a.k_head, static_cast<P*>(a.k_pool), a.k_pool_block, a.k_pool_slot,
              a.k_pool_head, a.Dk, a, begin, end);
  append_rows(static_cast<const T*>(a.v), a.v_token, a.v_head, static_cast<P*>(a.v_pool), a.v_pool_block, a.v_pool_slot,
              a.v_pool_head, a.Dv, a, begin, end);
}

void need(bool ok, const char* name, int64_t got, int64_t at, const std::string& needed) {
  if (ok) return;
  throw std::invalid_argument(std::string(name) + ": got " + std::to_string(got) + " at " + std::to_string(at) +
                              ", need " + needed);
}

void check_indices(const PagedAttention& a) {
  const int64_t slots = a.N * a.block;
  for (int64_t t = 0; t < a.T; ++t) {
    const int64_t slot = a.slot_mapping[t];
    need(slot >= 0 && slot < slots, "slot_mapping", slot, t, "a slot in [0, " + std::to_string(slots) + ")");
  }
  need(a.q_indptr[0] == 0, "q_indptr", a.q_indptr[0], 0, "0");
  need(a.q_indptr[a.R] == a.T, "q_indptr", a.q_indptr[a.R], a.R, std::to_string(a.T) + ", the number of tokens");
  for (int64_t r = 0; r < a.R; ++r) {
    const int64_t tokens = a.q_indptr[r + 1] - a.q_indptr[r], length = a.kv_len[r];
    need(tokens >= 0, "q_indptr", a.q_indptr[r + 1], r + 1, "a non-decreasing sequence");
    if (tokens == 0) continue;
    need(length >= tokens, "kv_len", length, r, ">= " + std::to_string(tokens) + ", the row's tokens");
    need(length <= a.B * a.block, "kv_len", length, r, "<= " + std::to_string(a.B * a.block) + ", its block table");
    for (int64_t b = a.first_visible(length - tokens) / a.block; b * a.block < length; ++b) {
      const int64_t id = a.block_table[r * a.B + b];
      need(id >= 0 && id < a.N, "block_table", id, r * a.B + b, "a block in [0, " + std::to_string(a.N) + ")");
    }
  }
}

}  // namespace

void paged_attention(const PagedAttention& a, const Pool& pool) {
  check_indices(a);
  const bool wide = a.type == Type::kFloat32, wide_pool = a.pool_type == Type::kFloat32;
  Attend *const float_pool = attend_float, *const bf16_pool = attend_bf16;
  Attend* const attend_task = wide_pool ? float_pool : bf16_pool;
  const auto append_tokens = wide ? (wide_pool ? append<float, float> : append<float, bf16>)
                                  : (wide_pool ? append<bf16, float> : append<bf16, bf16>);

  // pieces of rows by tokens; all kv heads of a piece in one task while its queries fit and every thread has tasks
  const int64_t group = a.H / a.Hkv, tokens = std::max<int64_t>(1, kQueries / group);
  std::vector<Task> pieces;
  int64_t work = 0;
  for (int64_t r = 0; r < a.R; ++r) {
    for (int64_t t = a.q_indptr[r]; t < a.q_indptr[r + 1]; t += tokens) {
      const int64_t count = std::min(tokens, a.q_indptr[r + 1] - t);
      const int64_t high = a.kv_len[r] - a.q_indptr[r + 1] + t + count;
      pieces.push_back({r, t, count, 0, std::clamp<int64_t>(kQueries / (count * group), 1, a.Hkv)});
      work += count * a.H * (high - a.first_visible(high - count)) * (a.Dk + a.Dv);
    }
  }
  const bool small = work < kInline;
  const int64_t share = static_cast<int64_t>(pieces.size()) * a.Hkv / (4 * pool.threads);
  std::vector<Task> tasks;
  for (Task task : pieces) {
    if (!small) task.heads = std::clamp<int64_t>(share, 1, task.heads);
    for (; task.head < a.Hkv; task.head += task.heads) {
      task.heads = std::min(task.heads, a.Hkv - task.head);
      tasks.push_back(task);
    }
  }

  constexpr int64_t kRows = 64;  // tokens per append task
  pool.run((a.T + kRows - 1) / kRows, a.T * a.Hkv * (a.Dk + a.Dv) < kInline, [&](const auto& next) {
    for (int64_t i = next(); i >= 0; i = next()) append_tokens(a, i * kRows, std::min(a.T, (i + 1) * kRows));
  });
  pool.run(static_cast<int64_t>(tasks.size()), small, [&](const auto& next) {
    const Scratch scratch(a, std::max(kQueries, group));
    for (int64_t i = next(); i >= 0; i = next()) attend_task(a, tasks[i], scratch);
  });
}

}  // namespace fc
