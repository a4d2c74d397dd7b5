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
template <class P>
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
    for (; d + 16 <= dv; d += 16) store(row + d, load(source + d));
    if (d < dv) store(row + d, load(source + d, dv - d));
    value[key] = row;
  }
}

// score[i][key] = q[i] . k[key] for N queries and 16 M keys; each sum runs over d in order.
template <int N, int M>
FC_INLINE void multiply_keys(const float* q, const float* k, int64_t dk, float* score) {
  f32x16 sum[N][M];
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) sum[i][j] = f32x16{};
  }
  for (int64_t d = 0; d < dk; ++d) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) {
      const f32x16 keys = load(k + d * kTile + 16 * j);
      FC_UNROLL
      for (int i = 0; i < N; ++i) sum[i][j] = fma(splat(q[i * dk + d]), keys, sum[i][j]);
    }
  }
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) store(score + i * kTile + 16 * j, sum[i][j]);
  }
}

FC_INLINE void score_tile(const float* q, const float* k, const Tile& tile, int64_t dk, int64_t queries, float* score) {
  int64_t i = 0;
  for (; i + 4 <= queries; i += 4) {
    for (int64_t key = tile.begin; key < tile.end; key += 32) {
      multiply_keys<4, 2>(q + i * dk, k + key, dk, score + i * kTile + key);
    }
  }
  const bool whole = tile.end - tile.begin == kTile;
  for (; i + 2 <= queries; i += 2) {
    if (whole) {
      multiply_keys<2, 4>(q + i * dk, k, dk, score + i * kTile);
    } else {
      multiply_keys<2, 2>(q + i * dk, k + tile.begin, dk, score + i * kTile + tile.begin);
    }
  }
  for (; i < queries; ++i) {
    if (whole) {
      multiply_keys<1, 4>(q + i * dk, k, dk, score + i * kTile);
    } else {
      multiply_keys<1, 2>(q + i * dk, k + tile.begin, dk, score + i * kTile + tile.begin);
    }
  }
}

// acc[i] = alpha[i] * acc[i] + sum over keys of p[i][key] * v[key], for N queries and 16 M columns; keys in order.
template <int N, int M>
FC_INLINE void multiply_values(const float* p, const float* const* value, int64_t column, const Tile& tile,
                               int64_t width, const float* alpha, float* acc) {
  f32x16 sum[N][M];
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) sum[i][j] = load(acc + i * width + 16 * j) * splat(alpha[i]);
  }
  for (int64_t key = tile.begin; key < tile.end; ++key) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) {
      const f32x16 v = load(value[key] + column + 16 * j);
      FC_UNROLL
      for (int i = 0; i < N; ++i) sum[i][j] = fma(splat(p[i * kTile + key]), v, sum[i][j]);
    }
  }
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) store(acc + i * width + 16 * j, sum[i][j]);
  }
}

template <int N>
FC_INLINE void accumulate(const float* p, const float* const* value, const Tile& tile, int64_t width,
                          const float* alpha, float* acc) {
  int64_t d = 0;
  for (; d + 64 <= width; d += 64) multiply_values<N, 4>(p, value, d, tile, width, alpha, acc + d);
  for (; d < width; d += 16) multiply_values<N, 1>(p, value, d, tile, width, alpha, acc + d);
}

// Scores of one query over a tile to weights, in place; updates its running maximum and mass. Returns what the weights
// of earlier tiles shrink by. Keys low .. high (counted from the tile's start) are visible.
FC_INLINE float weigh(const PagedAttention& a, const Tile& tile, int64_t low, int64_t high, float* score, float* top,
                      float* mass) {
  f32x16 best = splat(-kInfinity);
  const bool partial = low > tile.begin || high < tile.end;
  for (int64_t key = tile.begin; key < tile.end; key += 16) {
    f32x16 x = load(score + key) * splat(a.scale);
    if (a.softcap > 0) x = splat(a.softcap) * map<tanh32>(x / splat(a.softcap));
    if (partial) {
      const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const i32x16 index = lane + static_cast<int32_t>(key);
      const i32x16 visible = (index >= static_cast<int32_t>(low)) & (index < static_cast<int32_t>(high));
      x = visible ? x : splat(-kInfinity);
    }
    store(score + key, x);
    best = max(best, x);
  }
  const float peak = max(best), now = peak > *top ? peak : *top, alpha = exp32(*top - now);
  f32x16 total = {};
  for (int64_t key = tile.begin; key < tile.end; key += 16) {
    const f32x16 p = map<exp32>(load(score + key) - splat(now));
    store(score + key, p);
    total += p;
  }
  *top = now;
  *mass = fmaf(*mass, alpha, sum(total));
  return alpha;
}

}  // namespace fc
