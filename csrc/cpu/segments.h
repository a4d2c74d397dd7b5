// Packed tokens and the segments they belong to: sums by segment in a fixed order, and the name of what is wrong.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace fc {

typedef double f64x16 __attribute__((vector_size(128)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

// Sixteen lanes of a mask, -1 or 0: the first n bools, the others 0.
FC_INLINE i32x16 load_mask(const bool* mask, int64_t n) {
  u8x16 bytes = {};
  if (n == 16) {
    std::memcpy(&bytes, mask, 16);
  } else {
    std::memcpy(&bytes, mask, n);
  }
  return -__builtin_convertvector(bytes, i32x16);
}
FC_INLINE bool any_kept(const bool* mask, int64_t n) {
  uint64_t word[2] = {};
  if (n == 16) {
    std::memcpy(word, mask, 16);
  } else {
    std::memcpy(word, mask, n);
  }
  return word[0] | word[1];
}
FC_INLINE bool all_are(const int64_t* ids, int64_t n, int64_t id) {
  if (n != 16) return false;
  int64_t differs = 0;
  for (int64_t k = 0; k < 16; ++k) differs |= ids[k] ^ id;
  return !differs;
}
FC_INLINE f32x16 load_part(const float* p, int64_t n) { return n == 16 ? load(p) : load(p, n); }

constexpr int64_t kTokenBlock = 2048;        // tokens of one task; partial sums are merged in the order of the blocks
constexpr int64_t kInlineTokens = 4 * 2048;  // up to here threads cost more than they save

struct Packed {
  int64_t T, S;
  const bool* mask;            // [T]: False tokens count nowhere, whatever they hold
  const int64_t* segment_ids;  // [T], any order
  const float* advantage;      // [S]

  int64_t blocks() const { return (T + kTokenBlock - 1) / kTokenBlock; }
};

// Tokens [begin, end) of a block, the kept ones among them all of one segment.
struct SegmentRun {
  int64_t id, begin, end, count;
  double sum;
};

struct SegmentSums {
  std::vector<std::vector<SegmentRun>> runs;  // by block
  std::vector<int64_t> count;                 // [S] kept tokens
  std::vector<double> sum;                    // [S] of max(x, floor) - max(y, floor) over the kept tokens
  int64_t floored;                            // kept tokens with x < floor
  bool bad;                                   // a kept token has no segment, or a value that is not finite
};

// x and y [T], or both null to count only.
SegmentSums sum_segments(const Packed& tokens, const float* x, const float* y, float floor, const Pool& pool);

// Throws std::invalid_argument for the first thing wrong under the mask: segment ids, advantages, then the named [T]
// arrays (null ones are left out), of which the first two are clamped at `floor`.
[[noreturn]] void report_bad_tokens(const Packed& tokens,
                                    const std::vector<std::pair<const char*, const float*>>& named, float floor);

}  // namespace fc
