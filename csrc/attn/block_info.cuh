// Which keys a range of query rows has to visit, from lengths and band alone.
#pragma once
#include "../params.h"
#include "../ptx/common.cuh"

namespace fa::attn {

FA_DEVICE int64_t clamp(int64_t v, int64_t low, int64_t high) { return min(max(v, low), high); }

// Keys [first, end) are those that some of a range of query rows sees; keys [full_first, full_end)
// are visible to all of these rows (none when full_first >= full_end) and need no comparison.
struct KeyRange {
  int first;
  int end;
  int full_first;
  int full_end;
};

// For query rows [row_begin, row_end); no keys when that is empty.
FA_DEVICE KeyRange key_range(const FwdParams& p, int row_begin, int row_end) {
  if (row_begin >= row_end) return {0, 0, 0, 0};
  // Both limits of the band grow with the row: some row sees [first of the top row, end of the
  // bottom row), all rows see [first of the bottom row, end of the top row).
  const int64_t top = row_begin + p.diagonal, bottom = row_end - 1 + p.diagonal;
  auto key = [&](int64_t k) { return static_cast<int>(clamp(k, 0, p.seqlen_k)); };
  return {key(top - p.window_left), key(bottom + p.window_right + 1), key(bottom - p.window_left),
          key(top + p.window_right + 1)};
}

}  // namespace fa::attn
