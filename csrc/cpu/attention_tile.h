// One tile of paged attention: where its keys lie, scores of some queries against it, weights, and the weighted values.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/paged_attention.h"
#include "cpu/simd.h"

namespace fc {

constexpr int64_t kTile = 64;  // keys per tile, aligned to absolute position
constexpr int64_t kChunk = 8;  // keys whose rows are read for all heads in turn: almost as one stream
constexpr float kInfinity = std::numeric_limits<float>::infinity();

FC_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A tile of keys. Only keys first .. last are read; begin .. end are these rounded to 16, all counted from `start`.
struct Tile {
  int64_t start, first, last, begin, end;
  Tile(int64_t number, int64_t low, int64_t high)
      : start(number * kTile),
        first(std::max(low - start, int64_t{0})),
        last(std::min(high - start, kTile)),
        begin(first / 16 * 16),
        end(round_up(last, 16)) {}
  bool has(int64_t key) const { return key >= first && key < last; }
};

// Where the keys and values of a tile lie (head 0). Where it has no key, some row of it: to be prefetched, not read.
template <class P>
struct Rows {
  const P *key[kTile], *value[kTile];

  void find(const PagedAttention& a, const int32_t* table, const Tile& tile) {
    for (int64_t i = tile.first; i < tile.last;) {
      const int64_t page = (tile.start + i) / a.block, slot = (tile.start + i) % a.block;
      const P* k = static_cast<const P*>(a.k_pool) + table[page] * a.k_pool_block + slot * a.k_pool_slot;
      const P* v = static_cast<const P*>(a.v_pool) + table[page] * a.v_pool_block + slot * a.v_pool_slot;
      for (const int64_t stop = std::min(tile.last, i + a.block - slot); i < stop; ++i) {
        key[i] = k;
        value[i] = v;
        k += a.k_pool_slot;
        v += a.v_pool_slot;
      }
    }
    for (int64_t i = 0; i < kTile; ++i) {
      if (tile.has(i)) continue;
      key[i] = key[tile.first];
      value[i] = value[tile.first];
    }
  }
};

// The rows to be read after a chunk's: asked for while that is computed, or arithmetic and memory take turns.
template <class P>
struct Ahead {
  const P* const* row;  // null: asked for already
  int64_t offset;

  template <int64_t count>
  FC_INLINE void ask(int64_t key, int64_t d) const {
    const P* at = row[key] + offset + d;
    FC_UNROLL
    for (int64_t i = 0; i < count; i += 64 / sizeof(P)) __builtin_prefetch(at + i, 0, 2);
  }
};

// Rows of one head and chunk, `width` wide: where they lie. Zeros where the tile has no key.
template <class P>
FC_INLINE void point(const P* const* row, const Tile& tile, int64_t begin, int64_t offset, const float* zero,
                     const P** out) {
  for (int64_t i = 0; i < kChunk; ++i) {
    out[i] = tile.has(begin + i) ? row[begin + i] + offset : reinterpret_cast<const P*>(zero);
  }
}

// The same rows as fp32, filled up with zeros to a multiple of 16: in `copy` [kChunk][width rounded up].
template <class V, class P>
FC_INLINE void widen_rows(const P* const* row, const Tile& tile, int64_t begin, int64_t offset, int64_t width,
                          const float* zero, float* copy, const float** out) {
  const int64_t padded = round_up(width, 16);
  for (int64_t i = 0; i < kChunk; ++i, copy += padded) {
    out[i] = zero;
    if (!tile.has(begin + i)) continue;
    const P* source = row[begin + i] + offset;
    out[i] = copy;
    int64_t d = 0;
    for (; d + kLanes<V> <= width; d += kLanes<V>) write(copy + d, read<V>(source + d));
    for (; d < padded; ++d) copy[d] = d < width ? widen(source[d]) : 0.0f;
  }
}

// Whether rows are read where they lie: in whole vectors, and widened anew for every pair of queries.
template <class P>
FC_INLINE bool in_place(int64_t width, int64_t queries) {
  return width % 16 == 0 && (sizeof(P) == sizeof(float) || queries <= 4);
}

// score[i][j] = q[i] . key[j] for N queries and M keys. A sum runs over sixteen lanes d mod 16, these fold to eight,
// and eight sums at once fold to one lane each.
template <class V, int N, int M, class S>
FC_INLINE void dot(const float* q, const S* const* key, int64_t dk, float* score) {
  constexpr int parts = 16 / kLanes<V>, some = kLanes<V> == 16 ? M : 4 / N;  // `some` keys fill the registers
  static_assert(N * M % 8 == 0 && M % some == 0);
  f32x8 sums[N][M];
  FC_UNROLL
  for (int first = 0; first < M; first += some) {
    V sum[N][some][parts];
    FC_UNROLL
    for (int i = 0; i < N; ++i) {
      FC_UNROLL
      for (int j = 0; j < some; ++j) {
        FC_UNROLL
        for (int part = 0; part < parts; ++part) sum[i][j][part] = V{};
      }
    }
    for (int64_t d = 0; d < dk; d += 16) {
      FC_UNROLL
      for (int part = 0; part < parts; ++part) {
        const int64_t at = d + part * kLanes<V>;
        V keys[some];
        FC_UNROLL
        for (int j = 0; j < some; ++j) keys[j] = loaded(read<V>(key[first + j] + at));
        FC_UNROLL
        for (int i = 0; i < N; ++i) {
          const V query = loaded(read<V>(q + i * dk + at));
          FC_UNROLL
          for (int j = 0; j < some; ++j) sum[i][j][part] = fused(query, keys[j], sum[i][j][part]);
        }
      }
    }
    FC_UNROLL
    for (int i = 0; i < N; ++i) {
      FC_UNROLL
      for (int j = 0; j < some; ++j) sums[i][first + j] = halves(sum[i][j]);
    }
  }
  constexpr int together = M < 8 ? M : 8;  // keys of one query among eight sums
  FC_UNROLL
  for (int i = 0; i < N; i += 8 / together) {
    FC_UNROLL
    for (int j = 0; j < M; j += together) {
      f32x8 eight[8];
      FC_UNROLL
      for (int n = 0; n < 8; ++n) eight[n] = sums[i + n / together][j + n % together];
      const f32x8 total = fold_eight(eight);
      FC_UNROLL
      for (int n = 0; n < 8; n += together) {
        std::memcpy(score + (i + n / together) * kTile + j, reinterpret_cast<const float*>(&total) + n,
                    together * sizeof(float));
      }
    }
  }
}

template <class V, int N, class S, class P>
FC_INLINE void score_queries(const float* q, const S* const* key, int64_t dk, const Ahead<P>& ahead, float* score) {
  constexpr int M = N == 1 ? 8 : 4;
  for (int64_t j = 0; j < kChunk; j += M) {
    if (ahead.row) {
      for (int64_t d = 0; d < dk; d += 64 / sizeof(P)) {
        FC_UNROLL
        for (int64_t n = 0; n < M; ++n) ahead.template ask<1>(j + n, d);
      }
    }
    dot<V, N, M>(q, key + j, dk, score + j);
  }
}

template <class V, class S, class P>
FC_INLINE void score_keys(const float* q, const S* const* key, int64_t dk, Ahead<P> ahead, int64_t queries,
                          float* score) {
  int64_t i = 0;
  if constexpr (kLanes<V> == 16) {
    for (; i + 4 <= queries; i += 4, ahead.row = nullptr) {
      score_queries<V, 4>(q + i * dk, key, dk, ahead, score + i * kTile);
    }
  }
  for (; i + 2 <= queries; i += 2, ahead.row = nullptr) {
    score_queries<V, 2>(q + i * dk, key, dk, ahead, score + i * kTile);
  }
  for (; i < queries; ++i, ahead.row = nullptr) score_queries<V, 1>(q + i * dk, key, dk, ahead, score + i * kTile);
}

// acc[i] += sum over a chunk's keys of p[i][key] * value[key] for N queries and M vectors of columns; keys in order.
template <class V, int N, int M, class S, class P>
FC_INLINE void multiply_values(const float* p, const S* const* value, int64_t column, int64_t width,
                               const Ahead<P>& ahead, float* acc) {
  V sum[N][M];
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) sum[i][j] = read<V>(acc + i * width + kLanes<V> * j);
  }
  for (int64_t key = 0; key < kChunk; ++key) {
    if (ahead.row) ahead.template ask<M * kLanes<V>>(key, column);
    FC_UNROLL
    for (int j = 0; j < M; ++j) {
      const V v = loaded(read<V>(value[key] + column + kLanes<V> * j));
      FC_UNROLL
      for (int i = 0; i < N; ++i) sum[i][j] = fused(fill<V>(p[i * kTile + key]), v, sum[i][j]);
    }
  }
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) write(acc + i * width + kLanes<V> * j, sum[i][j]);
  }
}

template <class V, int N, class S, class P>
FC_INLINE void accumulate(const float* p, const S* const* value, int64_t width, const Ahead<P>& ahead, float* acc) {
  int64_t d = 0;
  for (; d + 4 * kLanes<V> <= width; d += 4 * kLanes<V>) multiply_values<V, N, 4>(p, value, d, width, ahead, acc + d);
  for (; d < width; d += 16) multiply_values<V, N, 16 / kLanes<V>>(p, value, d, width, ahead, acc + d);
}

template <class V, class S, class P>
FC_INLINE void add_values(const float* p, const S* const* value, int64_t width, Ahead<P> ahead, int64_t queries,
                          float* acc) {
  int64_t i = 0;
  for (; i + 2 <= queries; i += 2, ahead.row = nullptr) {
    accumulate<V, 2>(p + i * kTile, value, width, ahead, acc + i * width);
  }
  for (; i < queries; ++i, ahead.row = nullptr) accumulate<V, 1>(p + i * kTile, value, width, ahead, acc + i * width);
}

// Sixteen running lanes in vectors V, and their sum or maximum by the tree of simd.h.
template <class V>
struct Sixteen {
  V part[16 / kLanes<V>];
  FC_INLINE f32x16 whole() const {
    f32x16 v;
    static_assert(sizeof part == sizeof v);
    std::memcpy(&v, part, sizeof v);
    return v;
  }
};

// Scores of one query over a tile to weights, in place; updates its running maximum and mass. Returns what the weights
// of earlier tiles shrink by. Keys low .. high (counted from the tile's start) are visible.
template <class V>
FC_INLINE float weigh(const PagedAttention& a, const Tile& tile, int64_t low, int64_t high, float* score, float* top,
                      float* mass) {
  using Index = typename Integers<kLanes<V>>::index;
  constexpr int parts = 16 / kLanes<V>;
  const V infinity = fill<V>(kInfinity), scale = fill<V>(a.scale), softcap = fill<V>(a.softcap);
  Sixteen<V> best, total;
  FC_UNROLL
  for (int j = 0; j < parts; ++j) best.part[j] = -infinity, total.part[j] = V{};
  Index lane;
  for (int i = 0; i < kLanes<V>; ++i) lane[i] = i;
  const bool capped = a.softcap > 0, partial = low > tile.begin || high < tile.end;
  for (int64_t start = tile.begin; start < tile.end; start += 16) {
    FC_UNROLL
    for (int j = 0; j < parts; ++j) {
      const int64_t key = start + j * kLanes<V>;
      V x = read<V>(score + key) * scale;
      if (capped) x = softcap * hyperbolic_tangent(x / softcap);
      if (partial) {
        const Index index = lane + static_cast<int32_t>(key);
        const Index visible = (index >= static_cast<int32_t>(low)) & (index < static_cast<int32_t>(high));
        x = visible ? x : -infinity;
      }
      write(score + key, x);
      best.part[j] = best.part[j] > x ? best.part[j] : x;
    }
  }
  const float peak = max(best.whole()), now = peak > *top ? peak : *top, alpha = exp32(*top - now);
  const V shift = fill<V>(now);
  for (int64_t start = tile.begin; start < tile.end; start += 16) {
    FC_UNROLL
    for (int j = 0; j < parts; ++j) {
      float* at = score + start + j * kLanes<V>;
      const V p = exponential(read<V>(at) - shift);
      write(at, p);
      total.part[j] += p;
    }
  }
  *top = now;
  *mass = fmaf(*mass, alpha, sum(total.whole()));
  return alpha;
}

}  // namespace fc
