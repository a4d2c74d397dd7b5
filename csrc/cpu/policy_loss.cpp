// Eight tokens at a time: fp32 arithmetic, sums over 64 tokens in fp32 lanes, from there on in fp64, blocks merged
// in order, so that bits depend on no thread.
#include "cpu/policy_loss.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "cpu/segments.h"
#include "cpu/token_lanes.h"

namespace fc {
namespace {

constexpr float kLogRatioCap = 20;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Settings {
  f32x8 low, high, dual, beta;  // low, high: bounds of the ratio
  int form, kl;                 // kl 0: no reference
  bool has_dual, sequence, penalty;
  // of an exponent; variables, since GCC compiles a minimum with a constant to a comparison and a blend
  f32x8 cap, bottom;

  bool is_plain() const { return form == 0 && !has_dual && !sequence && (kl == 0 || (kl == 3 && penalty)); }
};

Settings settings(const PolicyTerms& t, bool has_ref, bool sequence) {
  const auto vector = [](double x) { return splat8(static_cast<float>(x)); };
  Settings s;
  s.low = vector(1 - t.clip_low), s.high = vector(1 + t.clip_high), s.dual = vector(t.dual_clip);
  s.beta = vector(t.beta), s.cap = vector(kLogRatioCap), s.bottom = vector(-87);
  s.form = t.form, s.kl = has_ref ? t.kl : 0;
  s.has_dual = t.dual_clip > 0 && t.form == 0, s.sequence = sequence, s.penalty = t.beta != 0;
  return s;
}

// Eight tokens; all is 0 where keep is.
struct Tokens {
  f32x8 logprob, old, ref, advantage, weight, log_ratio;
  i32x8 keep = {};
};

struct Partial {
  f32x8 loss = {}, ratio = {}, approx_kl = {}, kl = {};
};

struct Lanes {
  Sums8 loss, ratio, approx_kl, kl;
  f32x8 least = splat8(kInfinity), most = {};
  i32x8 low = {}, high = {}, dual = {};
  f32x8 odd = {};  // not finite if a value was not

  FC_INLINE void add(const Partial& p) {
    loss.add(p.loss);
    ratio.add(p.ratio);
    approx_kl.add(p.approx_kl);
    kl.add(p.kl);
  }
};

struct Exponential {
  f32x8 value, minus_1, k3;  // e^x, e^x - 1 and e^x - 1 - x, each to its own last digits
};

// exp32's reduction and coefficients; x <= 20, and below `bottom` e^x is e^bottom.
FC_INLINE Exponential exponential(f32x8 x, f32x8 bottom) {
  const f32x8 bounded = max(x, bottom);
  const f32x8 t = fma(bounded, splat8(1.44269504088896341f), splat8(12582912.0f));
  const f32x8 n = t - splat8(12582912.0f);
  const f32x8 r = fma(n, splat8(2.12194440e-4f), fma(n, splat8(-0.693359375f), bounded));
  const f32x8 r2 = r * r;  // the polynomial in pairs: half the latency
  const f32x8 c4 = fma(splat8(1.9875691500e-4f), r, splat8(1.3981999507e-3f));
  const f32x8 c2 = fma(splat8(8.3334519073e-3f), r, splat8(4.1665795894e-2f));
  const f32x8 c0 = fma(splat8(1.6666665459e-1f), r, splat8(5.0000001201e-1f));
  const f32x8 tail = fma(fma(c4, r2, c2), r2, c0) * r2, minus_1 = tail + r;
  u32x8 bits;
  std::memcpy(&bits, &t, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  f32x8 power;
  std::memcpy(&power, &bits, sizeof power);
  Exponential e;
  e.value = power * (minus_1 + splat8(1));
  e.minus_1 = fma(power, minus_1, power - splat8(1));
  e.k3 = n == splat8(0) ? tail : e.minus_1 - x;
  return e;
}

// Adds the tokens' loss and metrics; returns the gradient of the loss in logprob. kPlain: the settings are plain, the
// usual case without its branches.
template <bool kPlain>
FC_INLINE f32x8 step(const Settings& s, const Tokens& t, Partial& p, Lanes& l) {
  const int form = kPlain ? 0 : s.form, kl_kind = kPlain ? 3 : s.kl;
  const f32x8 zero = {}, A = t.advantage, cap = s.cap;
  const f32x8 difference = t.logprob - t.old;
  const Exponential drift = exponential(min(difference, cap), s.bottom);
  l.odd += difference;
  f32x8 ratio = drift.value, log_ratio = difference;
  if (!kPlain && s.sequence) {
    log_ratio = t.log_ratio;
    ratio = exponential(min(log_ratio, cap), s.bottom).value;
  }
  const f32x8 clipped = min(max(ratio, s.low), s.high);
  i32x8 low = ratio<s.low, high = ratio> s.high;
  f32x8 loss, grad;
  if (form == 0) {
    low &= A<zero, high &= A> zero;
    grad = -(ratio * A);
    loss = -min(ratio * A, clipped * A);
    i32x8 flat = low | high | (log_ratio > cap);
    if (!kPlain && s.has_dual) {
      const f32x8 most = -(s.dual * A);
      const i32x8 dual = (A < zero) & (loss > most);
      loss = dual ? most : loss;
      flat |= dual;
      l.dual += dual;
    }
    grad = flat ? zero : grad;
  } else {
    grad = form == 1 ? -clipped * A : -A;
    loss = grad * t.logprob;
  }
  if (form != 2) l.low += low, l.high += high;
  if (s.kl) {
    const f32x8 d = t.ref - t.logprob;
    l.odd += d;
    f32x8 kl = -d, slope = splat8(1);
    if (kl_kind == 2) kl = d * d * splat8(0.5f), slope = -d;
    if (kl_kind == 3) {
      const Exponential e = exponential(min(d, cap), s.bottom);
      kl = e.k3;
      slope = d > cap ? zero : -e.minus_1;
    }
    p.kl += kl;
    if (kPlain || s.penalty) {
      loss += s.beta * kl;
      grad += s.beta * slope;
    }
  }
  p.loss += loss * t.weight;
  p.ratio += where(t.keep, ratio);
  p.approx_kl += drift.k3;
  l.least = min(l.least, t.keep ? ratio : splat8(kInfinity));
  l.most = max(l.most, where(t.keep, ratio));
  return where(t.keep, grad * t.weight);
}

struct Given {
  const float *logprob, *old, *ref, *advantage, *weight, *log_ratio;
  int64_t tokens = 0;

  FC_INLINE bool load(int64_t i, int64_t n, Tokens& t, Lanes&) {
    for (int k = 0; k < kTokens; ++k) t.keep[k] = k < n ? -1 : 0;
    t.logprob = load_tokens(logprob + i, n);
    t.old = load_tokens(old + i, n);
    t.advantage = load_tokens(advantage + i, n);
    t.ref = ref ? load_tokens(ref + i, n) : splat8(0);
    t.weight = weight ? load_tokens(weight + i, n) : splat8(1);
    t.log_ratio = log_ratio ? load_tokens(log_ratio + i, n) : splat8(0);
    tokens += n;
    return true;
  }
};

// Masked tokens with what belongs to their segments looked up, a lookup only where the segment changes.
struct Masked {
  const float *logprob, *old, *ref;
  const bool* mask;
  const int64_t* segment_ids;
  int64_t S;
  const float *advantages, *weights, *log_ratios;  // [S]; weights null: 1, log_ratios null: none
  std::atomic<bool>* has_token;                    // [S]
  int64_t id = -1, tokens = 0;                     // id < 0: no segment yet
  f32x8 advantage = {}, weight = splat8(1), log_ratio = {};

  FC_INLINE void enter(int64_t next, Lanes& lanes) {
    id = next;
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(S)) {
      lanes.odd[0] = kInfinity;
      return;
    }
    advantage = splat8(advantages[id]);
    lanes.odd += advantage;
    if (weights) weight = splat8(weights[id]);
    if (log_ratios) log_ratio = splat8(log_ratios[id]);
    has_token[id].store(true, std::memory_order_relaxed);
  }

  FC_INLINE bool load(int64_t i, int64_t n, Tokens& t, Lanes& lanes) {
    const uint64_t bytes = mask_bytes(mask + i, n);
    if (!bytes) return false;
    tokens += __builtin_popcountll(bytes);
    t.keep = kept(bytes);
    t.logprob = where(t.keep, load_tokens(logprob + i, n));
    t.old = where(t.keep, load_tokens(old + i, n));
    t.ref = ref ? where(t.keep, load_tokens(ref + i, n)) : splat8(0);
    t.advantage = advantage, t.weight = weight, t.log_ratio = log_ratio;
    if (id < 0 || !all_are(segment_ids + i, n, id)) {
      for (int64_t k = 0; k < n; ++k) {
        if (mask[i + k] && (id < 0 || segment_ids[i + k] != id)) enter(segment_ids[i + k], lanes);
        t.advantage[k] = advantage[0], t.weight[k] = weight[0], t.log_ratio[k] = log_ratio[0];
      }
    }
    t.advantage = where(t.keep, t.advantage);
    t.log_ratio = where(t.keep, t.log_ratio);
    return true;
  }
};

PolicySums fold(const Lanes& l, int64_t tokens) {
  PolicySums sums;
  double* v = sums.value;
  v[0] = l.loss.total(), v[3] = l.ratio.total(), v[6] = l.approx_kl.total(), v[11] = l.kl.total();
  v[1] = static_cast<double>(tokens);
  for (int i = 0; i < kTokens; ++i) {
    v[4] = std::min<double>(v[4], l.least[i]);
    v[5] = std::max<double>(v[5], l.most[i]);
    v[7] -= l.low[i];
    v[8] -= l.high[i];
    v[10] -= l.dual[i];
  }
  v[9] = v[7] + v[8];  // a token is never clipped at both ends
  return sums;
}

// Tokens [0, n) of a source; source.load fills t, or says that none of the eight is kept. Adds to sums; false if a
// value was not finite. Settings and source come by value: in registers, nothing that grad could alias.
template <bool kPlain, class Source>
FC_INLINE bool walk(const Settings s, int64_t n, Source source, float* grad, PolicySums& sums) {
  Lanes lanes;
  for (int64_t i = 0; i < n; i += 64) {
    Partial partial;
    for (int64_t j = i; j < std::min(n, i + 64); j += kTokens) {
      const int64_t width = std::min(kTokens, n - j);
      Tokens t;
      const f32x8 g = source.load(j, width, t, lanes) ? step<kPlain>(s, t, partial, lanes) : splat8(0);
      store_tokens(grad + j, g, width);
    }
    lanes.add(partial);
  }
  sums.merge(fold(lanes, source.tokens));
  return all_finite(lanes.odd);
}
FC_CLONES bool walk_given(const Settings& s, int64_t n, const Given& source, float* grad, PolicySums& sums) {
  return walk<false>(s, n, source, grad, sums);
}
FC_CLONES bool walk_given_plain(const Settings& s, int64_t n, const Given& source, float* grad, PolicySums& sums) {
  return walk<true>(s, n, source, grad, sums);
}
FC_CLONES bool walk_masked(const Settings& s, int64_t n, const Masked& source, float* grad, PolicySums& sums) {
  return walk<false>(s, n, source, grad, sums);
}
FC_CLONES bool walk_masked_plain(const Settings& s, int64_t n, const Masked& source, float* grad, PolicySums& sums) {
  return walk<true>(s, n, source, grad, sums);
}

}  // namespace

void policy_tokens(const PolicyTerms& terms, int64_t n, const float* logprob, const float* old, const float* ref,
                   const float* advantage, const float* weight, float* grad, PolicySums& sums, const float* log_ratio) {
  const Settings s = settings(terms, ref, log_ratio);
  (s.is_plain() ? walk_given_plain : walk_given)(s, n, {logprob, old, ref, advantage, weight, log_ratio}, grad, sums);
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
  const Settings s = settings(a.terms, a.ref, a.sequence_ratio);
  std::vector<PolicySums> part(packed.blocks());
  std::atomic<bool> bad{false};
  pool.run(packed.blocks(), a.T <= kInlineTokens, [&](const auto& next) {
    for (int64_t b = next(); b >= 0; b = next()) {
      const int64_t t = b * kTokenBlock;
      const Masked source{a.logprob + t,
                          a.old + t,
                          a.ref ? a.ref + t : nullptr,
                          a.mask + t,
                          a.segment_ids + t,
                          a.S,
                          a.advantage,
                          a.per_sequence ? weight.data() : nullptr,
                          a.sequence_ratio ? log_ratio.data() : nullptr,
                          has_token.data()};
      const auto run = s.is_plain() ? walk_masked_plain : walk_masked;
      if (!run(s, std::min(kTokenBlock, a.T - t), source, a.grad + t, part[b])) bad = true;
    }
  });
  if (bad) report();
  PolicySums sums;
  for (const PolicySums& p : part) sums.merge(p);
  for (const std::atomic<bool>& x : has_token) sums.value[2] += x;
  return sums;
}

}  // namespace fc
