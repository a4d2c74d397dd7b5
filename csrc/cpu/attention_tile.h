// One tile of paged attention: where its keys lie, scores of some queries against it, weights, and the weighted values.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/paged_attention.h"
#include "cpu/simd.h"

namespace fc {

constexpr int64_t kTile = 64;  // keys per tile, aligned to absolute position
constexpr float kInfinity = std::numeric_limits<float>::infinity();

FC_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A tile of keys. Only keys first .. last are read; begin .. end are these rounded to 32, all counted from `start`.
struct Tile {
  int64_t start, first, last, begin, end;
  Tile(int64_t number, int64_t low, int64_t high)
      : start(number * kTile),
        first(std::max(low - start, int64_t{0})),
        last(std::min(high - start, kTile)),
        begin(first / 32 * 32),
        end(round_up(last, 32)) {}
  bool has(int64_t key) const { return key >= first && key < last; }
};

// Where the keys and values of a tile lie (head 0).
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
  }
};

// Asks for one head's share of the tile's rows, to be read a little later.
template <class P>
FC_INLINE void prefetch(const P* const* row, const Tile& tile, int64_t offset, int64_t width) {
  for (int64_t i = tile.first; i < tile.last; ++i) {
    for (int64_t d = 0; d < width; d += 64 / sizeof(P)) __builtin_prefetch(row[i] + offset + d);
  }
}

// Keys as columns: out [Dk][kTile], 0 where the tile has no key.
template <class P>
FC_INLINE void pack_keys(const Rows<P>& rows, const Tile& tile, int64_t offset, int64_t dk, const P* zero, float* out) {
  for (int64_t key = tile.begin; key < tile.end; key += 8) {
    const P* source[8];
    FC_UNROLL
    for (int j = 0; j < 8; ++j) source[j] = tile.has(key + j) ? rows.key[key + j] + offset : zero;
    const P *s0 = source[0], *s1 = source[1], *s2 = source[2], *s3 = source[3];
    const P *s4 = source[4], *s5 = source[5], *s6 = source[6], *s7 = source[7];
    int64_t d = 0;
    for (; d + 8 <= dk; d += 8) {
      f32x8 r[8] = {load8(s0 + d), load8(s1 + d), load8(s2 + d), load8(s3 + d),
                    load8(s4 + d), load8(s5 + d), load8(s6 + d), load8(s7 + d)};
      transpose(r);
      FC_UNROLL
      for (int j = 0; j < 8; ++j) std::memcpy(out + (d + j) * kTile + key, &r[j], sizeof r[j]);
    }
    for (; d < dk; ++d) {
      for (int j = 0; j < 8; ++j) out[d * kTile + key + j] = widen(source[j][d]);
    }
  }
}

// Values as rows of Dv rounded to 16: where they lie if that is what they are, else a copy; zeros where there is no
// key.
template <class V, class P>
FC_INLINE void pack_values(const Rows<P>& rows, const Tile& tile, int64_t offset, int64_t dv, const float* zero,
                           float* out, const float** value) {
  const int64_t width = round_up(dv, 16);
  for (int64_t key = tile.begin; key < tile.end; ++key) {
    if (!tile.has(key)) {
      value[key] = zero;
      continue;
    }
    const P* source = rows.value[key] + offset;
    if constexpr (sizeof(P) == sizeof(float)) {
      if (width == dv) {
        value[key] = source;
        continue;
      }
    }
    float* row = out + key * width;
    int64_t d = 0;
    for (; d + kLanes<V> <= dv; d += kLanes<V>) write(row + d, read<V>(source + d));
    for (; d < width; ++d) row[d] = d < dv ? widen(source[d]) : 0.0f;
    value[key] = row;
  }
}

// score[i][key] = q[i] . k[key] for N queries and M vectors of keys; each sum runs over d in order.
template <class V, int N, int M>
FC_INLINE void multiply_keys(const float* q, const float* k, int64_t dk, float* score) {
  V sum[N][M];
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) sum[i][j] = V{};
  }
  for (int64_t d = 0; d < dk; ++d) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) {
      const V keys = read<V>(k + d * kTile + kLanes<V> * j);
      FC_UNROLL
      for (int i = 0; i < N; ++i) sum[i][j] = fused(fill<V>(q[i * dk + d]), keys, sum[i][j]);
    }
  }
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) write(score + i * kTile + kLanes<V> * j, sum[i][j]);
  }
}

template <class V, int N>
FC_INLINE void score_queries(const float* q, const float* k, const Tile& tile, int64_t dk, float* score) {
  constexpr int64_t two = 2 * kLanes<V>, four = 4 * kLanes<V>;
  int64_t key = tile.begin;
  if constexpr (N <= 2) {
    for (; key + four <= tile.end; key += four) multiply_keys<V, N, 4>(q, k + key, dk, score + key);
  }
  for (; key < tile.end; key += two) multiply_keys<V, N, 2>(q, k + key, dk, score + key);
}

template <class V>
FC_INLINE void score_tile(const float* q, const float* k, const Tile& tile, int64_t dk, int64_t queries, float* score) {
  int64_t i = 0;
  for (; i + 4 <= queries; i += 4) score_queries<V, 4>(q + i * dk, k, tile, dk, score + i * kTile);
  for (; i + 2 <= queries; i += 2) score_queries<V, 2>(q + i * dk, k, tile, dk, score + i * kTile);
  for (; i < queries; ++i) score_queries<V, 1>(q + i * dk, k, tile, dk, score + i * kTile);
}

// acc[i] = alpha[i] * acc[i] + sum over keys of p[i][key] * v[key], for N queries and M vectors of columns; keys in
// order.
template <class V, int N, int M>
FC_INLINE void multiply_values(const float* p, const float* const* value, int64_t column, const Tile& tile,
                               int64_t width, const float* alpha, float* acc) {
  V sum[N][M];
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) sum[i][j] = read<V>(acc + i * width + kLanes<V> * j) * fill<V>(alpha[i]);
  }
  for (int64_t key = tile.begin; key < tile.end; ++key) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) {
      const V v = read<V>(value[key] + column + kLanes<V> * j);
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

template <class V, int N>
FC_INLINE void accumulate(const float* p, const float* const* value, const Tile& tile, int64_t width,
                          const float* alpha, float* acc) {
  constexpr int64_t four = 4 * kLanes<V>;
  int64_t d = 0;
  for (; d + four <= width; d += four) multiply_values<V, N, 4>(p, value, d, tile, width, alpha, acc + d);
  for (; d < width; d += 16) multiply_values<V, N, 16 / kLanes<V>>(p, value, d, tile, width, alpha, acc + d);
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
  Sixteen<V> best, total;
  FC_UNROLL
  for (int j = 0; j < parts; ++j) best.part[j] = fill<V>(-kInfinity), total.part[j] = V{};
  Index lane;
  for (int i = 0; i < kLanes<V>; ++i) lane[i] = i;
  const bool partial = low > tile.begin || high < tile.end;
  for (int64_t start = tile.begin; start < tile.end; start += 16) {
    FC_UNROLL
    for (int j = 0; j < parts; ++j) {
      const int64_t key = start + j * kLanes<V>;
      V x = read<V>(score + key) * fill<V>(a.scale);
      if (a.softcap > 0) x = fill<V>(a.softcap) * each<tanh32>(x / fill<V>(a.softcap));
      if (partial) {
        const Index index = lane + static_cast<int32_t>(key);
        const Index visible = (index >= static_cast<int32_t>(low)) & (index < static_cast<int32_t>(high));
        x = visible ? x : fill<V>(-kInfinity);
      }
      write(score + key, x);
      best.part[j] = best.part[j] > x ? best.part[j] : x;
    }
  }
  const float peak = max(best.whole()), now = peak > *top ? peak : *top, alpha = exp32(*top - now);
  for (int64_t start = tile.begin; start < tile.end; start += 16) {
    FC_UNROLL
    for (int j = 0; j < parts; ++j) {
      float* at = score + start + j * kLanes<V>;
      const V p = each<exp32>(read<V>(at) - fill<V>(now));
      write(at, p);
      total.part[j] += p;
    }
  }
  *top = now;
  *mass = fmaf(*mass, alpha, sum(total.whole()));
  return alpha;
}

}  // namespace fc
