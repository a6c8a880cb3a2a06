// Which keys a range of query rows has to visit, and which query rows a range of keys, from lengths
// and band alone.
#pragma once
#include "../params.h"
#include "../ptx/common.cuh"

namespace fa::attn {

// Below, a Band is what has lengths and band: the FwdParams, or a Sequence of packed ones.

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
template <class Band>
FA_DEVICE KeyRange key_range(const Band& p, int row_begin, int row_end) {
  if (row_begin >= row_end) return {0, 0, 0, 0};
  // Both limits of the band grow with the row: some row sees [first of the top row, end of the
  // bottom row), all rows see [first of the bottom row, end of the top row).
  const int64_t top = row_begin + p.diagonal, bottom = row_end - 1 + p.diagonal;
  auto key = [&](int64_t k) { return static_cast<int>(clamp(k, 0, p.seqlen_k)); };
  return {key(top - p.window_left), key(bottom + p.window_right + 1), key(bottom - p.window_left),
          key(top + p.window_right + 1)};
}

// The reverse: query rows [first, end) are those that see some of a range of keys; rows
// [full_first, full_end) see all of these keys (none when full_first >= full_end).
struct QueryRange {
  int first;
  int end;
  int full_first;
  int full_end;
};

// For keys [key_begin, key_end); no rows when that is empty.
template <class Band>
FA_DEVICE QueryRange query_range(const Band& p, int key_begin, int key_end) {
  if (key_begin >= key_end) return {0, 0, 0, 0};
  // A key is seen by the rows from key - window_right to key + window_left, both of which grow with
  // the key.
  const int64_t first_key = key_begin - p.diagonal, last_key = key_end - 1 - p.diagonal;
  auto row = [&](int64_t r) { return static_cast<int>(clamp(r, 0, p.seqlen_q)); };
  return {row(first_key - p.window_right), row(last_key + p.window_left + 1),
          row(last_key - p.window_right), row(first_key + p.window_left + 1)};
}

}  // namespace fa::attn
