// Packed tokens and the segments they belong to: sums by segment in a fixed order, and the name of what is wrong.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/parallel.h"

namespace fc {

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
  bool bad;                                   // a kept token has no segment, or a value may not be finite
};

// x and y [T], or both null to count only.
SegmentSums sum_segments(const Packed& tokens, const float* x, const float* y, float floor, const Pool& pool);

// Throws std::invalid_argument for the first thing wrong under the mask: segment ids, advantages, then the named [T]
// arrays (null ones are left out) clamped at `floor`. Returns if nothing is: finite values may overflow a sum.
void report_bad_tokens(const Packed& tokens, const std::vector<std::pair<const char*, const float*>>& named,
                       float floor);

}  // namespace fc
