// Sixteen tokens at a time: fp32 arithmetic, sums over 128 tokens in fp32 lanes, from there on in fp64, blocks merged
// in order, so that bits depend on no thread.
#include "cpu/policy_loss.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "cpu/segments.h"

namespace fc {
namespace {

constexpr float kLogRatioCap = 20;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Settings {
  float low, high, dual, beta;  // bounds of the ratio
  int form, kl;                 // kl 0: no reference
  bool has_dual, sequence;
};

Settings settings(const PolicyTerms& t, bool has_ref, bool sequence) {
  return {static_cast<float>(1 - t.clip_low),
          static_cast<float>(1 + t.clip_high),
          static_cast<float>(t.dual_clip),
          static_cast<float>(t.beta),
          t.form,
          has_ref ? t.kl : 0,
          t.dual_clip > 0 && t.form == 0,
          sequence};
}

// Sixteen tokens; all is 0 where keep is.
struct Tokens {
  f32x16 logprob, old, ref, advantage, weight, log_ratio;
  i32x16 keep = {};
};

struct Partial {
  f32x16 loss = {}, ratio = {}, approx_kl = {}, kl = {};
};

struct Lanes {
  f64x16 loss = {}, ratio = {}, approx_kl = {}, kl = {};
  f32x16 least = splat(kInfinity), most = {};
  i32x16 tokens = {}, low = {}, high = {}, dual = {};
  f32x16 odd = {};  // NaN where a value was not finite

  FC_INLINE void add(const Partial& p) {
    loss += __builtin_convertvector(p.loss, f64x16);
    ratio += __builtin_convertvector(p.ratio, f64x16);
    approx_kl += __builtin_convertvector(p.approx_kl, f64x16);
    kl += __builtin_convertvector(p.kl, f64x16);
  }
};

struct Exponential {
  f32x16 value, minus_1, k3;  // e^x, e^x - 1 and e^x - 1 - x, each to its own last digits
};

// exp32's reduction and polynomial; x <= 20.
FC_INLINE Exponential exponential(f32x16 x) {
  const f32x16 bounded = max(x, splat(-87.0f));
  const f32x16 t = fma(bounded, splat(1.44269504088896341f), splat(12582912.0f));
  const f32x16 n = t - splat(12582912.0f);
  const f32x16 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), bounded));
  f32x16 y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  const f32x16 tail = y * (r * r), minus_1 = fma(y, r * r, r);
  u32x16 bits;
  std::memcpy(&bits, &t, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  f32x16 power;
  std::memcpy(&power, &bits, sizeof power);
  Exponential e;
  e.value = x < splat(-87.0f) ? splat(0) : power * (minus_1 + splat(1));
  e.minus_1 = fma(power, minus_1, power - splat(1));
  e.k3 = n == splat(0) ? tail : e.minus_1 - x;
  return e;
}

FC_INLINE f32x16 where(i32x16 keep, f32x16 x) { return keep ? x : splat(0); }
FC_INLINE f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }

// Adds the tokens' loss and metrics; returns the gradient of the loss in logprob.
FC_INLINE f32x16 step(const Settings& s, const Tokens& t, Partial& p, Lanes& l) {
  const f32x16 zero = {}, A = t.advantage, cap = splat(kLogRatioCap);
  const f32x16 difference = t.logprob - t.old;
  const Exponential drift = exponential(min(difference, cap));
  f32x16 ratio = drift.value, log_ratio = difference;
  if (s.sequence) {
    log_ratio = t.log_ratio;
    ratio = exponential(min(log_ratio, cap)).value;
  }
  const f32x16 clipped = min(max(ratio, splat(s.low)), splat(s.high));
  i32x16 low = ratio<splat(s.low), high = ratio> splat(s.high);
  f32x16 loss, grad;
  if (s.form == 0) {
    low &= A<zero, high &= A> zero;
    grad = -(ratio * A);
    loss = -min(ratio * A, clipped * A);
    i32x16 flat = low | high | (log_ratio > cap);
    if (s.has_dual) {
      const f32x16 most = splat(-s.dual) * A;
      const i32x16 dual = (A < zero) & (loss > most);
      loss = dual ? most : loss;
      flat |= dual;
      l.dual += dual;
    }
    grad = flat ? zero : grad;
  } else {
    grad = s.form == 1 ? -clipped * A : -A;
    loss = grad * t.logprob;
  }
  if (s.form != 2) l.low += low, l.high += high;
  if (s.kl) {
    const f32x16 d = t.ref - t.logprob;
    f32x16 kl = -d, slope = splat(1);
    if (s.kl == 2) kl = d * d * splat(0.5f), slope = -d;
    if (s.kl == 3) {
      const Exponential e = exponential(min(d, cap));
      kl = e.k3;
      slope = d > cap ? zero : -e.minus_1;
    }
    p.kl += kl;
    if (s.beta != 0) {
      loss += splat(s.beta) * kl;
      grad += splat(s.beta) * slope;
    }
  }
  p.loss += loss * t.weight;
  p.ratio += where(t.keep, ratio);
  p.approx_kl += drift.k3;
  l.least = min(l.least, t.keep ? ratio : splat(kInfinity));
  l.most = max(l.most, where(t.keep, ratio));
  l.tokens += t.keep;
  return where(t.keep, grad * t.weight);
}

// Tokens [0, n) of a source; source.load(i, n, t) fills t, or says that none of the sixteen is kept.
template <class Source>
FC_INLINE void walk(const Settings& s, int64_t n, Source& source, float* grad, Lanes& lanes) {
  for (int64_t i = 0; i < n; i += 128) {
    Partial partial;
    for (int64_t j = i; j < std::min(n, i + 128); j += 16) {
      const int64_t width = std::min<int64_t>(16, n - j);
      Tokens t;
      const f32x16 g = source.load(j, width, t) ? step(s, t, partial, lanes) : splat(0);
      if (width == 16) {
        store(grad + j, g);
      } else {
        store(grad + j, g, width);
      }
    }
    lanes.add(partial);
  }
}

struct Given {
  const float *logprob, *old, *ref, *advantage, *weight, *log_ratio;

  FC_INLINE bool load(int64_t i, int64_t n, Tokens& t) {
    for (int64_t k = 0; k < 16; ++k) t.keep[k] = k < n ? -1 : 0;
    t.logprob = load_part(logprob + i, n);
    t.old = load_part(old + i, n);
    t.advantage = load_part(advantage + i, n);
    t.ref = ref ? load_part(ref + i, n) : splat(0);
    t.weight = weight ? load_part(weight + i, n) : splat(1);
    t.log_ratio = log_ratio ? load_part(log_ratio + i, n) : splat(0);
    return true;
  }
};

struct PerSegment {
  const float *weight, *log_ratio;            // [S]; null: 1, none
  std::vector<std::atomic<bool>>& has_token;  // [S]
};

// Masked tokens with what belongs to their segments looked up, a lookup only where the segment changes.
struct Masked {
  const PolicyLoss& a;
  const PerSegment& segments;
  int64_t begin;
  Lanes& lanes;
  int64_t id = -1;
  float advantage = 0, weight = 1, log_ratio = 0;

  FC_INLINE void enter(int64_t next) {
    id = next;
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(a.S)) {
      lanes.odd[0] = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    advantage = a.advantage[id];
    lanes.odd[0] += advantage - advantage;
    if (segments.weight) weight = segments.weight[id];
    if (segments.log_ratio) log_ratio = segments.log_ratio[id];
    segments.has_token[id].store(true, std::memory_order_relaxed);
  }

  FC_INLINE bool load(int64_t i, int64_t n, Tokens& t) {
    i += begin;
    if (!any_kept(a.mask + i, n)) return false;
    t.keep = load_mask(a.mask + i, n);
    t.logprob = where(t.keep, load_part(a.logprob + i, n));
    t.old = where(t.keep, load_part(a.old + i, n));
    t.ref = a.ref ? where(t.keep, load_part(a.ref + i, n)) : splat(0);
    lanes.odd += (t.logprob - t.logprob) + (t.old - t.old) + (t.ref - t.ref);
    if (all_are(a.segment_ids + i, n, id)) {
      t.advantage = splat(advantage), t.weight = splat(weight), t.log_ratio = splat(log_ratio);
    } else {
      float each[3][16] = {};
      for (int64_t k = 0; k < n; ++k) {
        if (!t.keep[k]) continue;
        if (a.segment_ids[i + k] != id) enter(a.segment_ids[i + k]);
        each[0][k] = advantage, each[1][k] = weight, each[2][k] = log_ratio;
      }
      t.advantage = fc::load(each[0]), t.weight = fc::load(each[1]), t.log_ratio = fc::load(each[2]);
    }
    t.advantage = where(t.keep, t.advantage);
    t.log_ratio = where(t.keep, t.log_ratio);
    return true;
  }
};

FC_CLONES void walk_given(const Settings& s, int64_t n, Given& source, float* grad, Lanes& lanes) {
  walk(s, n, source, grad, lanes);
}
FC_CLONES void walk_masked(const Settings& s, int64_t n, Masked& source, float* grad, Lanes& lanes) {
  walk(s, n, source, grad, lanes);
}

PolicySums fold(const Lanes& l) {
  PolicySums sums;
  double* v = sums.value;
  for (int i = 0; i < 16; ++i) {
    v[0] += l.loss[i];
    v[1] -= l.tokens[i];
    v[3] += l.ratio[i];
    v[4] = std::min<double>(v[4], l.least[i]);
    v[5] = std::max<double>(v[5], l.most[i]);
    v[6] += l.approx_kl[i];
    v[7] -= l.low[i];
    v[8] -= l.high[i];
    v[10] -= l.dual[i];
    v[11] += l.kl[i];
  }
  v[9] = v[7] + v[8];  // a token is never clipped at both ends
  return sums;
}

}  // namespace

void policy_tokens(const PolicyTerms& terms, int64_t n, const float* logprob, const float* old, const float* ref,
                   const float* advantage, const float* weight, float* grad, PolicySums& sums, const float* log_ratio) {
  Given source{logprob, old, ref, advantage, weight, log_ratio};
  Lanes lanes;
  walk_given(settings(terms, ref, log_ratio), n, source, grad, lanes);
  sums.merge(fold(lanes));
}

PolicySums policy_loss(const PolicyLoss& a, const Pool& pool) {
  const Packed packed{a.T, a.S, a.mask, a.segment_ids, a.advantage};
  const auto report = [&] {
    report_bad_tokens(packed, {{"logprob", a.logprob}, {"old_logprob", a.old}, {"ref_logprob", a.ref}}, -kInfinity);
  };
  std::vector<float> weight(a.per_sequence ? a.S : 0), log_ratio(a.sequence_ratio ? a.S : 0);
  if (a.per_sequence || a.sequence_ratio) {
    const float *x = a.sequence_ratio ? a.logprob : nullptr, *y = a.sequence_ratio ? a.old : nullptr;
    const SegmentSums segments = sum_segments(packed, x, y, -kInfinity, pool);
    if (segments.bad) report();
    for (int64_t s = 0; s < a.S; ++s) {
      const double n = std::max<int64_t>(segments.count[s], 1);
      if (a.per_sequence) weight[s] = static_cast<float>(1 / n);
      if (a.sequence_ratio) log_ratio[s] = static_cast<float>(segments.sum[s] / n);
    }
  }
  std::vector<std::atomic<bool>> has_token(a.S);
  const PerSegment per_segment{a.per_sequence ? weight.data() : nullptr, a.sequence_ratio ? log_ratio.data() : nullptr,
                               has_token};
  const Settings s = settings(a.terms, a.ref, a.sequence_ratio);
  std::vector<PolicySums> part(packed.blocks());
  std::atomic<bool> bad{false};
  pool.run(packed.blocks(), a.T <= kInlineTokens, [&](const auto& next) {
    for (int64_t b = next(); b >= 0; b = next()) {
      const int64_t begin = b * kTokenBlock;
      Lanes lanes;
      Masked source{a, per_segment, begin, lanes};
      walk_masked(s, std::min(kTokenBlock, a.T - begin), source, a.grad + begin, lanes);
      part[b] = fold(lanes);
      const float odd = sum(lanes.odd);
      if (odd != odd) bad = true;
    }
  });
  if (bad) report();
  PolicySums sums;
  for (const PolicySums& p : part) sums.merge(p);
  for (const std::atomic<bool>& x : has_token) sums.value[2] += x;
  return sums;
}

}  // namespace fc
