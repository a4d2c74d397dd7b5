#include "cpu/segments.h"

#include <charconv>
#include <cmath>
#include <stdexcept>
#include <string>

#include "cpu/token_lanes.h"

namespace fc {
namespace {

struct Block {
  std::vector<SegmentRun>* runs;
  int64_t floored = 0;
  bool bad = false;
};

FC_CLONES void sum_block(const Packed& a, const float* x, const float* y, float floor, int64_t begin, int64_t end,
                         Block& block) {
  SegmentRun run{-1, begin, end, 0, 0};
  Sums8 total;
  f32x8 odd = {};
  i32x8 count = {}, floored = {};
  const auto close = [&](int64_t at) __attribute__((always_inline)) {
    run.end = at;
    run.sum += total.total();
    for (int k = 0; k < kTokens; ++k) run.count -= count[k];
    if (run.id >= 0) block.runs->push_back(run);
    total = {}, count = i32x8{};
  };
  for (int64_t i = begin; i < end; i += kTokens) {
    const int64_t n = std::min(kTokens, end - i);
    const uint64_t bytes = mask_bytes(a.mask + i, n);
    if (!bytes) continue;
    const i32x8 keep = kept(bytes);
    f32x8 high = {}, low = {};
    if (x) {
      const f32x8 raw = where(keep, load_tokens(x + i, n)), other = where(keep, load_tokens(y + i, n));
      floored -= keep & (raw < splat8(floor));
      high = where(keep, raw < splat8(floor) ? splat8(floor) : raw);
      low = where(keep, other < splat8(floor) ? splat8(floor) : other);
      odd += high - low;
    }
    if (run.id >= 0 && all_are(a.segment_ids + i, n, run.id)) {
      total.add(high, low);
      count += keep;
      continue;
    }
    for (int64_t k = 0; k < n; ++k) {
      if (!keep[k]) continue;
      const int64_t id = a.segment_ids[i + k];
      if (run.id < 0 || id != run.id) {
        close(i + k);
        if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(a.S)) {
          block.bad = true;
          return;
        }
        run = {id, i + k, end, 0, 0};
      }
      run.sum += static_cast<double>(high[k]) - static_cast<double>(low[k]);
      ++run.count;
    }
  }
  close(end);
  block.bad = !all_finite(odd);
  for (int k = 0; k < kTokens; ++k) block.floored += floored[k];
}

// As Python writes a float.
std::string text(float value) {
  char digits[64];
  const double x = value;
  if (x != x) return "nan";
  const auto end = std::to_chars(digits, digits + sizeof digits, x, std::chars_format::general).ptr;
  const std::string word(digits, end);
  return word.find_first_of(".ein") == std::string::npos ? word + ".0" : word;
}

}  // namespace

SegmentSums sum_segments(const Packed& tokens, const float* x, const float* y, float floor, const Pool& pool) {
  const int64_t blocks = tokens.blocks();
  SegmentSums all{std::vector<std::vector<SegmentRun>>(blocks), std::vector<int64_t>(tokens.S),
                  std::vector<double>(tokens.S), 0, false};
  std::vector<Block> block(blocks);
  pool.run(blocks, tokens.T <= kInlineTokens, [&](const auto& next) {
    for (int64_t b = next(); b >= 0; b = next()) {
      block[b].runs = &all.runs[b];
      sum_block(tokens, x, y, floor, b * kTokenBlock, std::min(tokens.T, (b + 1) * kTokenBlock), block[b]);
    }
  });
  for (const Block& b : block) {
    all.bad |= b.bad;
    all.floored += b.floored;
    for (const SegmentRun& run : *b.runs) {
      all.count[run.id] += run.count;
      all.sum[run.id] += run.sum;
    }
  }
  return all;
}

void report_bad_tokens(const Packed& a, const std::vector<std::pair<const char*, const float*>>& named, float floor) {
  const auto id = [&](int64_t t) { return a.mask[t] ? a.segment_ids[t] : 0; };
  int64_t low = id(0), high = id(0);
  for (int64_t t = 1; t < a.T; ++t) low = std::min(low, id(t)), high = std::max(high, id(t));
  if (low < 0 || high >= a.S) {
    throw std::invalid_argument("segment_ids: got (" + std::to_string(low) + ", " + std::to_string(high) +
                                "), need in [0, " + std::to_string(a.S) + ")");
  }
  for (int64_t t = 0; t < a.T; ++t) {
    if (a.mask[t] && !std::isfinite(a.advantage[id(t)])) {
      throw std::invalid_argument("advantage of segment " + std::to_string(id(t)) +
                                  ": got 'NaN or inf', need a finite value");
    }
  }
  for (int64_t t = 0; t < a.T; ++t) {
    std::string values;
    bool bad = false;
    for (const auto& [name, x] : named) {
      if (!x) continue;
      bad |= a.mask[t] && !std::isfinite(x[t] < floor ? floor : x[t]);
      values += std::string(values.empty() ? "{'" : ", '") + name + "': " + text(x[t]);
    }
    if (bad) {
      throw std::invalid_argument("token " + std::to_string(t) + " of segment " + std::to_string(id(t)) + ": got " +
                                  values + "}, need finite values under the mask");
    }
  }
}

}  // namespace fc
