// Which keys and key blocks a range of query rows has to visit, from lengths, band and mask summary
// alone.
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

// What a kMaskSummaryBlock x kMaskSummaryBlock block of a mask tensor holds.
enum MaskClass : uint8_t {
  kMaskHidden,  // nothing is visible
  kMaskMixed,
  kMaskVisible,  // everything is visible and nothing is added
};

// Layout of FwdParams::mask_summary: [batch][heads][row blocks][key blocks] of MaskClass, without
// the dimensions that the mask broadcasts (their stride is 0).
struct MaskSummaryShape {
  int64_t batches, heads, row_blocks, key_blocks;

  __host__ __device__ explicit MaskSummaryShape(const FwdParams& p)
      : batches(p.mask_stride[0] ? p.batch : 1),
        heads(p.mask_stride[1] ? p.heads_q : 1),
        row_blocks(p.mask_stride[2] ? (p.seqlen_q + kMaskSummaryBlock - 1) / kMaskSummaryBlock : 1),
        key_blocks(p.mask_stride[3] ? (p.seqlen_k + kMaskSummaryBlock - 1) / kMaskSummaryBlock
                                    : 1) {}

  __host__ __device__ int64_t size() const { return batches * heads * row_blocks * key_blocks; }
};

// The key blocks that a mask tensor leaves to the query rows of one CTA, from last to first.
template <int kBlockM, int kBlockN>
class MaskedBlocks {
 public:
  FA_DEVICE MaskedBlocks(const FwdParams& p, int batch_idx, int head_idx, int row_begin) {
    const MaskSummaryShape shape(p);
    const int64_t slice =
        (shape.batches > 1 ? batch_idx : 0) * shape.heads + (shape.heads > 1 ? head_idx : 0);
    // The CTA's rows lie in one or two row blocks of the summary.
    int64_t row_block = row_begin / kMaskSummaryBlock,
            last = row_block + (kBlockM - 1) / kMaskSummaryBlock;
    if (shape.row_blocks == 1) row_block = 0;
    last = min(last, shape.row_blocks - 1);
    row_ = p.mask_summary + (slice * shape.row_blocks + row_block) * shape.key_blocks;
    to_last_row_ = static_cast<int>((last - row_block) * shape.key_blocks);
    varies_ = shape.key_blocks > 1;
  }

  FA_DEVICE MaskClass classify(int block) const {
    const int key_block =
        varies_ ? static_cast<int>(static_cast<int64_t>(block) * kBlockN / kMaskSummaryBlock) : 0;
    const uint8_t a = row_[key_block], b = row_[key_block + to_last_row_];
    return a == b ? static_cast<MaskClass>(a) : kMaskMixed;
  }

  // The last block at or before `block` that is not hidden; below `first` if there is none.
  FA_DEVICE int visible_from(int block, int first) const {
    while (block >= first && classify(block) == kMaskHidden) --block;
    return block;
  }

 private:
  static_assert(kBlockM <= 2 * kMaskSummaryBlock && kMaskSummaryBlock % kBlockN == 0);
  const uint8_t* row_;
  int to_last_row_;
  bool varies_;
};

}  // namespace fa::attn
