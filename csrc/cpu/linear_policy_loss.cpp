// Kept rows are taken some at a time, as many as a buffer holds whole vocabularies. Their logits give log-sum-exp,
// log-prob and, by the loss itself, the upstream gradient, so that the same logits become dz where they lie. Rows with
// no gradient (clipped, advantage 0) leave no room in dz and are not multiplied again.
#include "cpu/linear_policy_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/head_gradient.h"
#include "cpu/linear_logprob.h"
#include "cpu/logits_tile.h"

namespace fc {
namespace {

constexpr int64_t kLogits = 72 << 20;  // floats of the buffer: 288 MiB
constexpr int64_t kVocab = 1024;       // columns of one task of the pass to dz
constexpr int64_t kInline = 1 << 20;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The kept tokens, checked, and each one's share of the loss where its segment's tokens share one.
struct Kept {
  std::vector<int64_t> token, target;
  std::vector<float> old, ref, advantage, weight;
  int64_t segments = 0;

  explicit Kept(const LinearPolicyLoss& a) {
    std::vector<int64_t> count(a.tokens.S);
    for (int64_t t = 0; t < a.tokens.T; ++t) {
      if (!a.tokens.mask[t]) continue;
      const int64_t s = a.tokens.segment_ids[t];
      const bool known = s >= 0 && s < a.tokens.S;
      if (!known || !std::isfinite(a.tokens.advantage[s] + a.old[t] + (a.ref ? a.ref[t] : 0.0f))) {
        report_bad_tokens(a.tokens, {{"old_logprob", a.old}, {"ref_logprob", a.ref}}, -kInfinity);
      }
      token.push_back(t);
      target.push_back(a.target[t]);
      old.push_back(a.old[t]);
      if (a.ref) ref.push_back(a.ref[t]);
      advantage.push_back(a.tokens.advantage[s]);
      segments += count[s]++ == 0;
    }
    need_ids("target", target.data(), size(), a.head.V);
    if (!a.per_sequence) return;
    for (const int64_t t : token) weight.push_back(1.0f / static_cast<float>(count[a.tokens.segment_ids[t]]));
  }
  int64_t size() const { return static_cast<int64_t>(token.size()); }
};

void report_bad_logprob(const LinearPolicyLoss& a, int64_t token, float logprob) {
  std::vector<float> all(a.tokens.T);
  all[token] = logprob;
  report_bad_tokens(a.tokens, {{"logprob", all.data()}}, -kInfinity);
}

struct RowTile {
  std::vector<double> lse;
  std::vector<float> logprob, entropy, grad;
  std::vector<RowGradient> row;  // those with a gradient,
  std::vector<int64_t> source;   // and where their logits lie
  explicit RowTile(int64_t n, bool entropies) : lse(n), logprob(n), entropy(entropies ? n : 0), grad(n) {}
};

// All logits of the tile's rows with a gradient become dz, packed towards the first row.
void pack_gradient(const Head& head, const RowTile& tile, float* x, int64_t stride, const Pool& pool) {
  const int64_t rows = static_cast<int64_t>(tile.row.size());
  const Cut vocab(head.V, kVocab);
  pool.run(vocab.parts, rows * head.V * 16 < kInline, [&](const auto& next) {
    for (int64_t v = next(); v >= 0; v = next()) {
      const LogitsTile part{vocab.begin(v), rows, vocab.length(v), x + vocab.begin(v), stride};
      to_gradient(head, part, tile.row.data(), tile.source.data());
    }
  });
}

}  // namespace

void linear_policy_loss(const LinearPolicyLoss& a, const HeadGradient& out, double* sums, const Pool& pool,
                        const Gemm& gemm) {
  const Kept kept(a);
  const int64_t D = a.head.D, V = a.head.V, stride = row_stride(V);
  const Cut tiles(kept.size(), std::max<int64_t>(16, kLogits / stride / 16 * 16));
  const bool dw_wide = a.head.weight.is_wide();
  const Floats logits = uninitialised(std::min(tiles.size, whole_rows(kept.size())) * stride);
  const Floats h = uninitialised(tiles.size * D), dh = uninitialised(out.dh ? tiles.size * D : 0);
  const Floats dw_copy = uninitialised(out.dw && !dw_wide ? V * D : 0);
  float* dw = !out.dw ? nullptr : dw_wide ? static_cast<float*>(out.dw) : dw_copy.get();
  std::vector<double> db(out.db ? V : 0);
  if (out.dh) scatter(nullptr, nullptr, 0, D, out.dh, a.head.h.type, a.head.N);
  if (dw && kept.size() == 0) std::fill_n(dw, V * D, 0.0f);

  PolicySums total;
  double entropy = 0;
  for (int64_t i = 0; i < tiles.parts; ++i) {
    const int64_t first = tiles.begin(i), n = tiles.length(i);
    const int64_t* token = kept.token.data() + first;
    a.head.h.gather(token, n, h.get());
    Head head = a.head;
    head.h = {h.get(), Type::kFloat32, D, D};
    head.N = n;
    RowTile tile(n, a.entropy);
    score(head, kept.target.data() + first, nullptr,
          {tile.logprob.data(), tile.lse.data(), a.entropy ? tile.entropy.data() : nullptr, nullptr, nullptr},
          logits.get(), stride, pool, gemm);
    for (int64_t r = 0; r < n; ++r) {
      need_finite_lse(token[r], tile.lse[r]);
      if (!std::isfinite(tile.logprob[r])) report_bad_logprob(a, token[r], tile.logprob[r]);
    }
    for (const float x : tile.entropy) entropy += x;
    const auto from = [&](const std::vector<float>& x) { return x.empty() ? nullptr : x.data() + first; };
    policy_tokens(a.terms, n, tile.logprob.data(), from(kept.old), from(kept.ref), from(kept.advantage),
                  from(kept.weight), tile.grad.data(), total);
    if (!out.dh && !out.dw && !out.db) continue;

    int64_t rows = 0;
    for (int64_t r = 0; r < n; ++r) {
      if (tile.grad[r] == 0) continue;
      tile.row.push_back({tile.lse[r], 0, static_cast<float>(tile.grad[r] * a.scale), 0, kept.target[first + r]});
      tile.source.push_back(r);
      std::copy_n(h.get() + r * D, D, h.get() + rows++ * D);
    }
    pack_gradient(head, tile, logits.get(), stride, pool);
    add_gradient(head.weight,
                 {logits.get(), stride, rows, 0, V, Matrix{h.get(), rows, D, D, 1}, out.dh ? dh.get() : nullptr, dw,
                  out.db ? db.data() : nullptr, true, i == 0},
                 pool, gemm);
    for (int64_t r = 0; out.dh && r < rows; ++r) {
      narrow_row(dh.get() + r * D, D, element(out.dh, a.head.h.type, token[tile.source[r]] * D), a.head.h.type);
    }
  }
  if (out.dw && !dw_wide) narrow_row(dw, V * D, out.dw, a.head.weight.type);
  if (out.db) {
    const std::vector<float> rounded(db.begin(), db.end());
    narrow_row(rounded.data(), V, out.db, out.bias_type);
  }
  std::copy_n(total.value, 12, sums);
  sums[1] = static_cast<double>(kept.size());
  sums[2] = static_cast<double>(kept.segments);
  sums[12] = entropy;
}

}  // namespace fc
