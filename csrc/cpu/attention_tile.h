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

// Keys of a tile that are packed and multiplied at once: four vectors of them fill the registers.
template <class V>
inline constexpr int64_t kChunk = 4 * kLanes<V>;

struct Chunk {
  int64_t begin, size;
};

// Where the keys and values of a tile lie (head 0). Where it has no key, some row of it: fit to be prefetched, not
// read.
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

// Rows to be read next: while a chunk is read, as much is asked for here, so that memory never waits for arithmetic.
template <class P>
struct Ahead {
  const P* const* row;
  int64_t offset;

  template <int64_t count>
  FC_INLINE void prefetch(int64_t key, int64_t d) const {
    const P* at = row[key] + offset + d;
    FC_UNROLL
    for (int64_t i = 0; i < count; i += 64 / sizeof(P)) __builtin_prefetch(at + i, 0, 2);
  }
};

// Keys as columns: out [Dk][kChunk], 0 where the tile has no key.
template <class V, class P>
FC_INLINE void pack_keys(const Rows<P>& rows, const Tile& tile, const Chunk& chunk, int64_t offset, int64_t dk,
                         const P* zero, const Ahead<P>& ahead, float* out) {
  constexpr int64_t line = 64 / sizeof(P);
  for (int64_t key = 0; key < chunk.size; key += 8) {
    const P* source[8];
    FC_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int64_t at = chunk.begin + key + j;
      source[j] = tile.has(at) ? rows.key[at] + offset : zero;
    }
    const P *s0 = source[0], *s1 = source[1], *s2 = source[2], *s3 = source[3];
    const P *s4 = source[4], *s5 = source[5], *s6 = source[6], *s7 = source[7];
    int64_t d = 0;
    for (; d + 8 <= dk; d += 8) {
      if (d % line == 0) {
        FC_UNROLL
        for (int j = 0; j < 8; ++j) ahead.template prefetch<line>(key + j, d);
      }
      f32x8 r[8] = {load8(s0 + d), load8(s1 + d), load8(s2 + d), load8(s3 + d),
                    load8(s4 + d), load8(s5 + d), load8(s6 + d), load8(s7 + d)};
      transpose(r);
      FC_UNROLL
      for (int j = 0; j < 8; ++j) std::memcpy(out + (d + j) * kChunk<V> + key, &r[j], sizeof r[j]);
    }
    for (; d < dk; ++d) {
      for (int j = 0; j < 8; ++j) out[d * kChunk<V> + key + j] = widen(source[j][d]);
    }
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
      const V keys = loaded(read<V>(k + d * kChunk<V> + kLanes<V> * j));
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
FC_INLINE void score_queries(const float* q, const float* k, int64_t keys, int64_t dk, float* score) {
  int64_t key = 0;
  if constexpr (N <= 2) {
    for (; key + kChunk<V> <= keys; key += kChunk<V>) multiply_keys<V, N, 4>(q, k + key, dk, score + key);
  }
  for (; key < keys; key += 2 * kLanes<V>) multiply_keys<V, N, 2>(q, k + key, dk, score + key);
}

template <class V>
FC_INLINE void score_keys(const float* q, const float* k, int64_t keys, int64_t dk, int64_t queries, float* score) {
  int64_t i = 0;
  for (; i + 4 <= queries; i += 4) score_queries<V, 4>(q + i * dk, k, keys, dk, score + i * kTile);
  for (; i + 2 <= queries; i += 2) score_queries<V, 2>(q + i * dk, k, keys, dk, score + i * kTile);
  for (; i < queries; ++i) score_queries<V, 1>(q + i * dk, k, keys, dk, score + i * kTile);
}

// acc[i] += sum over keys of p[i][key] * v[key] for N queries and M vectors of columns; keys in order.
template <class V, int N, int M, class S, class P>
FC_INLINE void multiply_values(const float* p, const S* const* value, int64_t column, int64_t keys, int64_t width,
                               const Ahead<P>* ahead, float* acc) {
  V sum[N][M];
  FC_UNROLL
  for (int i = 0; i < N; ++i) {
    FC_UNROLL
    for (int j = 0; j < M; ++j) sum[i][j] = read<V>(acc + i * width + kLanes<V> * j);
  }
  for (int64_t key = 0; key < keys; ++key) {
    if (ahead) ahead->template prefetch<M * kLanes<V>>(key, column);
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
FC_INLINE void accumulate(const float* p, const S* const* value, int64_t keys, int64_t width, const Ahead<P>* ahead,
                          float* acc) {
  int64_t d = 0;
  for (; d + 4 * kLanes<V> <= width; d += 4 * kLanes<V>) {
    multiply_values<V, N, 4>(p, value, d, keys, width, ahead, acc + d);
  }
  for (; d < width; d += 16) multiply_values<V, N, 16 / kLanes<V>>(p, value, d, keys, width, ahead, acc + d);
}

template <class V, class S, class P>
FC_INLINE void accumulate_queries(const float* p, const S* const* value, int64_t keys, int64_t width,
                                  const Ahead<P>& ahead, int64_t queries, float* acc) {
  int64_t i = 0;
  for (; i + 2 <= queries; i += 2) {
    accumulate<V, 2>(p + i * kTile, value, keys, width, i ? nullptr : &ahead, acc + i * width);
  }
  for (; i < queries; ++i) accumulate<V, 1>(p + i * kTile, value, keys, width, i ? nullptr : &ahead, acc + i * width);
}

// Adds the chunk's weighted values to acc. Rows are read where they lie if that is whole vectors and they need no
// widening worth keeping, else from a copy [kChunk][Dv rounded to 16]; zeros where the tile has no key.
template <class V, class P>
FC_INLINE void add_values(const Rows<P>& rows, const Tile& tile, const Chunk& chunk, int64_t offset, int64_t dv,
                          const float* zero, const Ahead<P>& ahead, const float* p, int64_t queries, float* copy,
                          float* acc) {
  const int64_t width = round_up(dv, 16);
  if (width == dv && (sizeof(P) == sizeof(float) || queries <= 4)) {
    const P* value[kTile];
    for (int64_t key = 0; key < chunk.size; ++key) {
      const int64_t at = chunk.begin + key;
      value[key] = tile.has(at) ? rows.value[at] + offset : reinterpret_cast<const P*>(zero);
    }
    return accumulate_queries<V>(p, value, chunk.size, width, ahead, queries, acc);
  }
  const float* value[kTile];
  for (int64_t key = 0; key < chunk.size; ++key) {
    const int64_t at = chunk.begin + key;
    value[key] = zero;
    if (!tile.has(at)) continue;
    const P* source = rows.value[at] + offset;
    float* row = copy + key * width;
    value[key] = row;
    int64_t d = 0;
    for (; d + kLanes<V> <= dv; d += kLanes<V>) write(row + d, read<V>(source + d));
    for (; d < width; ++d) row[d] = d < dv ? widen(source[d]) : 0.0f;
  }
  accumulate_queries<V>(p, value, chunk.size, width, ahead, queries, acc);
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
      if (capped) x = softcap * each<tanh32>(x / softcap);
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
