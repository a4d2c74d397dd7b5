// One row of `sample` by a team of lanes: a thread block on CUDA, a loop on CPU where tests run the same code.
//
// Nothing is sorted. A token's rank is its 64-bit key: how far below the maximum (in sixteenths), x, id. Top-k and
// top-p find the last key that they keep digit by digit, each digit by one histogram of counts and masses. At one depth
// all weights exp(x - max) are whole multiples of a power of two, so a histogram adds integers: exact in any order. All
// other sums are fp64 in an order that depends on V alone.
//
// A Team has kLanes and, called by all lanes alike: lanes(f), f(lane) for each lane, then a barrier; barrier(); and, by
// one lane, add(counter, n), which is atomic. Between barriers no lane reads what another writes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/sample.h"
#include "common/softmax.h"

#ifdef __CUDACC__
#define FC_TEAM __device__ __forceinline__
#else
#define FC_TEAM inline
#endif

namespace fc {

constexpr int64_t kMaxVocab = 1 << 19;  // tokens: what a bin can count and weigh
constexpr int kDepthBits = 11, kIdBits = 21, kBinBits = 11, kGroup = 64;
constexpr int kBins = 1 << kBinBits, kGroups = kBins / kGroup;
constexpr int kCountShift = 44;  // a bin: the count above, the mass in grains below
constexpr uint64_t kAll = ~uint64_t{0};

FC_HD float widen(float x) { return x; }
FC_HD float widen(uint16_t bf16) { return float_of(static_cast<int32_t>(static_cast<uint32_t>(bf16) << 16)); }

// The larger; NaN where one is.
FC_HD float peak(float a, float b) { return a > b || a != a ? a : b; }

// The exponent field of the smallest weight at a depth, or one less: exp(-(depth + 1) / 16) as a power of two.
FC_HD int exponent_at(int depth) { return 126 - static_cast<int>(static_cast<float>(depth + 1) * 0.0901686f); }

// A weight at a depth in grains of the last bit of the smallest: below 2^25.
FC_HD uint64_t grains(float weight, int depth) {
  const int32_t bits = bits_of(weight);
  return static_cast<uint64_t>((bits & 0x7fffff) | 0x800000) << ((bits >> 23) - exponent_at(depth));
}

struct Tally {
  double mass, count;
  FC_HD Tally operator+(const Tally& other) const { return {mass + other.mass, count + other.count}; }
};

FC_HD Tally tally(uint64_t bin, int depth) {
  const int64_t bits = static_cast<int64_t>(exponent_at(depth) - 127 - 23 + 1023) << 52;
  double grain;
  std::memcpy(&grain, &bits, 8);
  const uint64_t mass = bin & ((uint64_t{1} << kCountShift) - 1);
  return {static_cast<double>(mass) * grain, static_cast<double>(bin >> kCountShift)};
}

struct Draw {
  double mass;
  float score;
  int id;
  FC_HD void offer(float y, int v) {
    if (y > score || (y == score && v < id)) score = y, id = v;
  }
};

struct Step {
  int bin;
  Tally before, after;
};

template <int kLanes>
struct Scratch {  // a team's shared memory
  union {
    float peaks[kLanes];
    double sums[kLanes];
    Draw draws[kLanes];
    struct {
      uint64_t bins[kBins];
      Tally groups[kGroups];
    };
  };
  Step step;
};

template <class T, class Team>
struct SampleRow {
  const Team& team;
  Scratch<Team::kLanes>& scratch;
  const T* logits;
  int vocab;
  float temperature, top = 0;

  // All lanes' values folded by halves.
  template <class Value, class F, class Op>
  FC_TEAM Value reduce(Value* slots, const F& of_lane, const Op& op) const {
    team.lanes([&](int lane) { slots[lane] = of_lane(lane); });
    for (int half = Team::kLanes / 2; half; half /= 2) {
      team.lanes([&](int lane) {
        if (lane < half) slots[lane] = op(slots[lane], slots[lane + half]);
      });
    }
    const Value result = slots[0];
    team.barrier();
    return result;
  }

  FC_TEAM float x_of(int v) const { return widen(logits[v]) / temperature; }

  // f(v, x) for the tokens of one lane, four neighbours at a time as the noise comes.
  template <class F>
  FC_TEAM void each(int lane, const F& f) const {
    for (int quad = 4 * lane; quad < vocab; quad += 4 * Team::kLanes) {
      for (int v = quad; v < quad + 4 && v < vocab; ++v) f(v, x_of(v));
    }
  }

  FC_TEAM void find_top() {
    const auto of_lane = [&](int lane) {
      float best = -INFINITY;
      each(lane, [&](int, float x) { best = peak(best, x); });
      return best;
    };
    top = reduce(scratch.peaks, of_lane, peak);
  }

  FC_TEAM float weight(float x) const { return exp32(add(x, -top)); }

  FC_TEAM double mass() const {
    const auto of_lane = [&](int lane) {
      double sum = 0;
      each(lane, [&](int, float x) { sum += weight(x); });
      return sum;
    };
    return reduce(scratch.sums, of_lane, [](double a, double b) { return a + b; });
  }

  FC_TEAM uint64_t key(int v, float x) const {  // of a token with a weight: the smaller, the better its rank
    const uint64_t depth = static_cast<int>(mul(add(top, -x), 16.0f));
    const uint32_t bits = static_cast<uint32_t>(bits_of(add(x, 0.0f)));  // -0 becomes 0
    const uint32_t descending = bits ^ (bits >> 31 ? 0 : 0x7fffffff);
    return depth << (64 - kDepthBits) | static_cast<uint64_t>(descending) << kIdBits | static_cast<uint64_t>(v);
  }

  // The last key of the fewest best, up to `limit`, whose number (or mass) reaches `goal`; of all, where all do not.
  // `mass` becomes theirs. Tokens without a weight do not count: they can neither win nor weigh.
  FC_TEAM uint64_t cut(uint64_t limit, bool by_mass, double goal, double& mass) const {
    uint64_t prefix = 0;
    Tally before = {0, 0};
    for (int high = 64;;) {
      const int low = high > kBinBits ? high - kBinBits : 0;
      const auto depth_of = [&](int bin) {
        return high == 64 ? bin : static_cast<int>(prefix >> (64 - kDepthBits - high));
      };
      team.lanes([&](int lane) {
        for (int bin = lane; bin < kBins; bin += Team::kLanes) scratch.bins[bin] = 0;
      });
      team.lanes([&](int lane) {
        each(lane, [&](int v, float x) {
          const float w = weight(x);
          if (!(w > 0)) return;
          const uint64_t k = key(v, x);
          if (k > limit || (high < 64 && k >> high != prefix)) return;
          const uint64_t one = uint64_t{1} << kCountShift;
          team.add(&scratch.bins[(k >> low) & ((1 << (high - low)) - 1)],
                   one + grains(w, static_cast<int>(k >> (64 - kDepthBits))));
        });
      });
      team.lanes([&](int lane) {
        for (int group = lane; group < kGroups; group += Team::kLanes) {
          Tally sum = {0, 0};
          for (int bin = group * kGroup; bin < (group + 1) * kGroup; ++bin) {
            sum = sum + tally(scratch.bins[bin], depth_of(bin));
          }
          scratch.groups[group] = sum;
        }
      });
      team.lanes([&](int lane) {
        if (lane) return;
        Step step = {0, before, before};
        // To the first with which the goal is reached, or the last that is not empty.
        const auto walk = [&](int begin, int end, const auto& tally_of) {
          step.after = step.before;
          for (int at = begin; at < end; ++at) {
            const Tally here = tally_of(at);
            if (here.count == 0) continue;
            step = {at, step.after, step.after + here};
            if ((by_mass ? step.after.mass : step.after.count) >= goal) return;
          }
        };
        walk(0, kGroups, [&](int group) { return scratch.groups[group]; });
        walk(step.bin * kGroup, (step.bin + 1) * kGroup,
             [&](int bin) { return tally(scratch.bins[bin], depth_of(bin)); });
        scratch.step = step;
      });
      const Step step = scratch.step;
      prefix = prefix << (high - low) | static_cast<uint64_t>(step.bin);
      before = step.before;
      high = low;
      const bool whole = (by_mass ? step.after.mass : step.after.count) <= goal;
      if (whole || step.after.count - step.before.count == 1 || high == 0) {
        mass = step.after.mass;
        const uint64_t last = prefix << high | ((uint64_t{1} << high) - 1);
        return last < limit ? last : limit;
      }
    }
  }

  // The winner among the keys up to `limit` that weigh min_p or more, and their mass.
  FC_TEAM Draw race(uint64_t limit, float min_p, bool greedy, const Noise& noise) const {
    const float most = gumbel(0xffffffffu), least = add(top, gumbel(0));  // the best token scores `least` or more
    const auto of_lane = [&](int lane) {
      Draw draw = {0, -INFINITY, -1};
      Words words = {};
      int block = -1;
      each(lane, [&](int v, float x) {
        const float w = weight(x);
        if (!(w > 0 && w >= min_p) || (limit != kAll && key(v, x) > limit)) return;
        draw.mass += w;
        if (greedy) return draw.offer(x, v);
        if (add(x, most) < (draw.score > least ? draw.score : least)) return;
        if (block != v / 4) words = noise.words(block = v / 4);
        draw.offer(add(x, Noise::pick(words, v)), v);
      });
      return draw;
    };
    return reduce(scratch.draws, of_lane, [](Draw a, const Draw& b) {
      a.mass += b.mass;
      a.offer(b.score, b.id);
      return a;
    });
  }
};

template <class T, class Team>
FC_TEAM void sample_row(const Team& team, Scratch<Team::kLanes>& scratch, const Sample& a, int64_t r) {
  const float temperature = a.temperature[r], top_p = a.top_p[r], min_p = a.min_p[r];
  const int top_k = a.top_k[r];
  const bool greedy = temperature == 0;
  int64_t id = -1;
  float logprob = NAN, kept_mass = logprob;
  SampleRow<T, Team> row{team, scratch, static_cast<const T*>(a.logits) + r * a.stride, static_cast<int>(a.V),
                         greedy ? 1.0f : temperature};
  row.find_top();
  const bool lawful = temperature >= 0 && temperature < INFINITY && top_k >= 0 && top_p > 0 && min_p >= 0 && min_p <= 1;
  if (lawful && fabsf(row.top) < INFINITY) {
    const bool ranked = top_k > 0 && top_k < a.V;
    const bool truncated = !greedy && (ranked || top_p < 1 || min_p > 0);
    double mass = 0;
    uint64_t limit = kAll;
    if (truncated) {
      mass = row.mass();
      double total = mass;
      for (int by_mass = 0; by_mass < 2; ++by_mass) {  // top-k, then top-p
        if (by_mass ? top_p < 1 : ranked) {
          limit = row.cut(limit, by_mass, by_mass ? static_cast<double>(top_p) * total : top_k, total);
        }
      }
    }
    const Draw draw = row.race(limit, truncated ? min_p : 0.0f, greedy, Noise::of(a, r));
    if (!truncated) mass = draw.mass;
    id = draw.id;
    logprob = static_cast<float>(static_cast<double>(row.x_of(draw.id)) - row.top - log(mass));
    kept_mass = static_cast<float>(draw.mass / mass);
  }
  team.lanes([&](int lane) {
    if (lane == 0) a.id[r] = id, a.logprob[r] = logprob, a.kept_mass[r] = kept_mass;
  });
}

}  // namespace fc
