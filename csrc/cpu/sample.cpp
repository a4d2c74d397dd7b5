// Gumbel-max in three passes over one row in cache: temper and maximum; mass; noise. Weights exp(x - max) come from one
// polynomial and are summed in fp64, so every backend keeps the same tokens. Noise is drawn only for tiles of 64 that
// can still win: it never exceeds gumbel(0xffffffff). Filters select among what the tiles' maxima leave; nothing is
// sorted.
#include "cpu/sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/simd.h"

namespace fc {
namespace {

typedef double f64x16 __attribute__((vector_size(128)));

constexpr int64_t kTile = 64;
constexpr int64_t kInline = 1 << 15;  // logits below which threads cost more than they save
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
  float x, weight;  // weight: exp(x - the row's maximum)
  int64_t id;
};
bool ranks_before(const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

// A tempered row: x = z / temperature padded with -inf to whole tiles, the tiles' maxima, the row's maximum and mass.
struct Row {
  std::vector<float> x, peak;
  float top;
  bool valid;
  double mass;
};

template <class T>
FC_INLINE void temper(const T* logits, int64_t vocab, float temperature, Row& row) {
  const bool divide = temperature != 1;
  f32x16 best = splat(-kInfinity);
  i32x16 nan = {};
  for (int64_t tile = 0; tile * kTile < vocab; ++tile) {
    f32x16 high = splat(-kInfinity);
    for (int64_t v = tile * kTile; v < (tile + 1) * kTile; v += 16) {
      f32x16 x = splat(-kInfinity);
      if (v + 16 <= vocab) {
        x = load(logits + v);
        if (divide) x /= splat(temperature);
      } else {
        for (int64_t i = 0; v + i < vocab; ++i) x[i] = widen(logits[v + i]) / temperature;
      }
      nan |= x != x;
      high = max(high, x);
      store(row.x.data() + v, x);
    }
    row.peak[tile] = max(high);
    best = max(best, high);
  }
  row.top = max(best);
  int32_t bad = 0;
  for (int i = 0; i < 16; ++i) bad |= nan[i];
  row.valid = !bad && std::fabs(row.top) < kInfinity;
}

FC_INLINE void weigh(Row& row) {
  f64x16 total = {};
  for (size_t v = 0; v < row.x.size(); v += 16) {
    total += __builtin_convertvector(map<exp32>(load(row.x.data() + v) - splat(row.top)), f64x16);
  }
  row.mass = 0;
  for (int i = 0; i < 16; ++i) row.mass += total[i];
}

FC_CLONES void prepare(const float* logits, int64_t vocab, float temperature, Row& row) {
  temper(logits, vocab, temperature, row);
  weigh(row);
}
FC_CLONES void prepare(const bf16* logits, int64_t vocab, float temperature, Row& row) {
  temper(logits, vocab, temperature, row);
  weigh(row);
}

struct Best {
  float score = -kInfinity;
  int64_t id = -1;
  void offer(float y, int64_t v) {
    if (y > score || (y == score && v < id)) score = y, id = v;
  }
};

FC_CLONES void race_tile(const Row& row, int64_t tile, const Noise& noise, Best& best) {
  float g[4][16], y[kTile];
  for (int i = 0; i < 16; ++i) {
    const Words w = noise.words(tile * 16 + i);
    g[0][i] = gumbel(w.w0);
    g[1][i] = gumbel(w.w1);
    g[2][i] = gumbel(w.w2);
    g[3][i] = gumbel(w.w3);
  }
  const float* x = row.x.data() + tile * kTile;
  for (int i = 0; i < 16; ++i) {
    for (int w = 0; w < 4; ++w) y[4 * i + w] = x[4 * i + w] + g[w][i];
  }
  for (int64_t v = 0; v < kTile; ++v) best.offer(y[v], tile * kTile + v);
}

// argmax of x + noise over the whole vocabulary, from the tile of the largest x outwards.
int64_t race(const Row& row, const Noise& noise) {
  const float limit = gumbel(0xffffffffu);
  const int64_t first = std::find(row.peak.begin(), row.peak.end(), row.top) - row.peak.begin();
  Best best;
  race_tile(row, first, noise, best);
  for (int64_t tile = 0; tile < static_cast<int64_t>(row.peak.size()); ++tile) {
    if (tile != first && row.peak[tile] + limit >= best.score) race_tile(row, tile, noise, best);
  }
  return best.id;
}

// Every finite x >= low, by id.
FC_CLONES void collect(const Row& row, float low, std::vector<Candidate>& out) {
  out.clear();
  for (size_t tile = 0; tile < row.peak.size(); ++tile) {
    if (!(row.peak[tile] >= low)) continue;
    for (int64_t v = tile * kTile; v < static_cast<int64_t>(tile + 1) * kTile; ++v) {
      if (row.x[v] >= low && row.x[v] > -kInfinity) out.push_back({row.x[v], exp32(row.x[v] - row.top), v});
    }
  }
}

template <class Iterator>
double mass_of(Iterator begin, Iterator end) {
  double mass = 0;
  for (; begin != end; ++begin) mass += begin->weight;
  return mass;
}

// The k best; the k-th largest of the tiles' maxima bounds the k-th largest value from below.
void keep_top_k(const Row& row, int64_t k, std::vector<Candidate>& kept) {
  float low = -kInfinity;
  if (k <= static_cast<int64_t>(row.peak.size())) {
    std::vector<float> peaks = row.peak;
    std::nth_element(peaks.begin(), peaks.begin() + (k - 1), peaks.end(), std::greater<>());
    low = peaks[k - 1];
  }
  collect(row, low, kept);
  if (k < static_cast<int64_t>(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end(), ranks_before);
    kept.resize(k);
  }
}

// The fewest best whose mass reaches `needed`, at least one: a search by halves, so nothing is sorted.
void keep_top_p(double needed, std::vector<Candidate>& kept) {
  auto begin = kept.begin(), end = kept.end();
  for (double before = 0; end - begin > 1;) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, ranks_before);
    const double half = mass_of(begin, middle);
    if (before + half >= needed) {
      end = middle;
    } else {
      before += half;
      begin = middle;
    }
  }
  kept.erase(begin + 1, kept.end());
}

// What top-k, top-p and min-p keep, in that order, each on what the previous kept.
void filter(const Row& row, int64_t vocab, int64_t k, float p, float min_p, std::vector<Candidate>& kept) {
  const bool ranked = k > 0 && k < vocab;
  if (ranked) keep_top_k(row, k, kept);
  if (p < 1) {
    const double needed = static_cast<double>(p) * (ranked ? mass_of(kept.begin(), kept.end()) : row.mass);
    for (float depth = 8; !ranked && depth <= 128; depth *= 2) {
      collect(row, row.top - depth, kept);
      if (mass_of(kept.begin(), kept.end()) >= needed) break;
    }
    keep_top_p(needed, kept);
  } else if (!ranked) {
    collect(row, row.top + std::log(min_p) - 1e-3f * (1 + std::fabs(row.top)), kept);  // a little below the bound
  }
  std::erase_if(kept, [&](const Candidate& c) { return c.weight < min_p; });
}

// argmax of x + noise over the kept.
FC_CLONES int64_t race(const std::vector<Candidate>& kept, const Noise& noise) {
  const float limit = gumbel(0xffffffffu);
  Best best;
  for (const Candidate& c : kept) {
    if (c.x + limit >= best.score) best.offer(c.x + Noise::pick(noise.words(c.id / 4), c.id), c.id);
  }
  return best.id;
}

void sample_row(const Sample& a, int64_t r, Row& row, std::vector<Candidate>& kept) {
  const bool greedy = a.temperature[r] == 0;
  const float temperature = greedy ? 1.0f : a.temperature[r];
  if (a.type == Type::kFloat32) {
    prepare(static_cast<const float*>(a.logits) + r * a.stride, a.V, temperature, row);
  } else {
    prepare(static_cast<const bf16*>(a.logits) + r * a.stride, a.V, temperature, row);
  }
  a.id[r] = -1;
  a.logprob[r] = a.kept_mass[r] = std::numeric_limits<float>::quiet_NaN();
  if (!row.valid) return;

  const Noise noise = Noise::of(a, r);
  const bool truncated = (a.top_k[r] > 0 && a.top_k[r] < a.V) || a.top_p[r] < 1 || a.min_p[r] > 0;
  a.kept_mass[r] = 1;
  if (greedy) {
    a.id[r] = std::find(row.x.begin(), row.x.end(), row.top) - row.x.begin();
  } else if (!truncated) {
    a.id[r] = race(row, noise);
  } else {
    filter(row, a.V, a.top_k[r], a.top_p[r], a.min_p[r], kept);
    a.kept_mass[r] = static_cast<float>(mass_of(kept.begin(), kept.end()) / row.mass);
    a.id[r] = race(kept, noise);
  }
  a.logprob[r] = static_cast<float>(static_cast<double>(row.x[a.id[r]]) - row.top - std::log(row.mass));
}

void need(bool ok, const char* name, double got, int64_t row, const char* needed) {
  if (ok) return;
  throw std::invalid_argument(std::string(name) + ": got " + std::to_string(got) + " in row " + std::to_string(row) +
                              ", need " + needed);
}

}  // namespace

void sample(const Sample& a, const Pool& pool) {
  for (int64_t r = 0; r < a.R; ++r) {
    need(a.temperature[r] >= 0 && a.temperature[r] < kInfinity, "temperature", a.temperature[r], r,
         "a finite number >= 0");
    need(a.top_k[r] >= 0, "top_k", a.top_k[r], r, ">= 0 (0 keeps all)");
    need(a.top_p[r] > 0, "top_p", a.top_p[r], r, "in (0, 1]");
    need(a.min_p[r] >= 0 && a.min_p[r] <= 1, "min_p", a.min_p[r], r, "in [0, 1]");
  }
  const int64_t tiles = (a.V + kTile - 1) / kTile;
  pool.run(a.R, a.R * a.V < kInline, [&](const auto& next) {
    Row row{std::vector<float>(tiles * kTile), std::vector<float>(tiles), 0, false, 0};
    std::vector<Candidate> kept;
    for (int64_t r = next(); r >= 0; r = next()) sample_row(a, r, row, kept);
  });
}

}  // namespace fc
