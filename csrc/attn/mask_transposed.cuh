// attn/mask.cuh for transposed scores: an accumulator tile of S^T, whose rows are keys and whose
// columns are queries. Backward kernels compute these, because P^T is then in its place as the A
// operand of the products that are summed over queries.
#pragma once
#include "mask.cuh"
#include "mask_summary.cuh"

namespace fa::attn {

// MaskSummary for kernels that have no registers for what its constructor works out: the host does.
struct MaskSummaryView {
  const float* entries;                        // [batch][heads][row blocks][key blocks]
  const uint64_t* words;                       // [batch][heads][rows][key blocks]
  int64_t entries_stride[2], words_stride[2];  // batch, head; 0 where the mask broadcasts
  int last_row, key_blocks;

  MaskSummaryView() = default;
  explicit MaskSummaryView(const FwdParams& p) {
    const MaskSummaryShape shape(p);
    const auto* scratch = static_cast<const unsigned char*>(p.mask_summary);
    entries = reinterpret_cast<const float*>(scratch);
    words = reinterpret_cast<const uint64_t*>(scratch + shape.bits_offset_bytes());
    entries_stride[1] = shape.heads > 1 ? int64_t{shape.row_blocks} * shape.key_blocks : 0;
    words_stride[1] = shape.heads > 1 ? int64_t{shape.rows} * shape.key_blocks : 0;
    entries_stride[0] = shape.batches > 1 ? shape.entries() / shape.batches : 0;
    words_stride[0] = shape.batches > 1 ? shape.words() / shape.batches : 0;
    last_row = shape.rows - 1;
    key_blocks = shape.key_blocks;
  }
#ifdef __CUDACC__
  // Rows and blocks past the last one mean the last one.
  FA_DEVICE float entry(int batch_idx, int head_idx, int row, int key_block) const {
    return __ldg(entries + batch_idx * entries_stride[0] + head_idx * entries_stride[1] +
                 int64_t{min(row, last_row) / kMaskSummaryBlock} * key_blocks +
                 min(key_block, key_blocks - 1));
  }
  FA_DEVICE uint64_t bits(int batch_idx, int head_idx, int row, int key_block) const {
    return __ldg(words + batch_idx * words_stride[0] + head_idx * words_stride[1] +
                 int64_t{min(row, last_row)} * key_blocks + min(key_block, key_blocks - 1));
  }
#endif
};

// Where a tile of 16 kM keys and 8 kN queries stands to the band and the ends of both sequences.
// Band: see block_info.cuh.
template <int kM, int kN>
struct TransposedTile {
  int query_begin;
  int key_begin;
  int64_t center;  // query that the first key lies on the diagonal of, from the tile's first one

  template <class Band>
  FA_DEVICE TransposedTile(const Band& p, int query_begin, int key_begin)
      : query_begin(query_begin),
        key_begin(key_begin),
        center(key_begin - p.diagonal - query_begin) {}

  // No query sees any of the keys.
  template <class Band>
  FA_DEVICE bool is_hidden(const Band& p) const {
    return center - p.window_right > 8 * kN - 1 || center + p.window_left < -(16 * kM - 1) ||
           key_begin >= p.seqlen_k;
  }
  // Every query sees all of them. Queries past the end count as others do.
  template <class Band>
  FA_DEVICE bool is_visible(const Band& p) const {
    return center + (16 * kM - 1) <= p.window_right && center + p.window_left >= 8 * kN - 1 &&
           key_begin + 16 * kM <= p.seqlen_k;
  }
};

// Sets what the band and the ends of both sequences hide to -inf.
template <class Band, int kM, int kN>
FA_DEVICE void mask_band_transposed(tile::Accumulator<kM, kN>& rS, const Band& p,
                                    const TransposedTile<kM, kN>& at, int lane) {
  // Limits relative to the lane's first element, clamped to where they stop to matter: see
  // mask_columns.
  constexpr int kFar = 16 * kM + 8 * kN;
  const int lane_row = lane / 4, lane_col = 2 * (lane % 4);
  const int keys_left = p.seqlen_k - at.key_begin - lane_row;
  const int tail = min(p.seqlen_q - at.query_begin, kFar) - lane_col;
  const int first =
      static_cast<int>(clamp(at.center - p.window_right, -kFar, kFar)) + lane_row - lane_col;
  const int end =
      static_cast<int>(clamp(at.center + p.window_left + 1, -kFar, kFar)) + lane_row - lane_col;
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const int row_first = first + 8 * r, row_end = 8 * r < keys_left ? min(end + 8 * r, tail) : -1;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * n + i;
        if (column < row_first || column >= row_end) rS.x[r / 2][n][2 * (r % 2) + i] = -INFINITY;
      }
    }
  }
}

// Adds the elements of a mask to finished scores. gMask [seqlen_q][seqlen_k], by its strides.
template <class Element, int kM, int kN>
FA_DEVICE void add_mask_transposed(tile::Accumulator<kM, kN>& rS, const Element* gMask,
                                   const FwdParams& p, const TransposedTile<kM, kN>& at, int lane) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = min(at.query_begin + 8 * n + 2 * (lane % 4) + i, p.seqlen_q - 1);
      const Element* gRow = gMask + query * p.mask_stride[2];
#pragma unroll
      for (int r = 0; r < 2 * kM; ++r) {
        const int key = at.key_begin + 8 * r + lane / 4;
        if (key < p.seqlen_k)
          add_bias(rS.x[r / 2][n][2 * (r % 2) + i], mask_bias(gRow[key * p.mask_stride[3]]));
      }
    }
  }
}

// Applies the mask tensor to finished scores, by what its summary says of the block that the tile
// lies in.
template <Dtype kDtype, int kM, int kN>
FA_DEVICE void mask_tensor_transposed(tile::Accumulator<kM, kN>& rS, const FwdParams& p,
                                      const MaskSummaryView& summary, int batch_idx, int head_idx,
                                      const TransposedTile<kM, kN>& at, int lane) {
  static_assert(kMaskSummaryBlock % (16 * kM) == 0 && kMaskSummaryBlock % (8 * kN) == 0);
  const int key_block = at.key_begin / kMaskSummaryBlock;
  const float entry = summary.entry(batch_idx, head_idx, at.query_begin, key_block);
  if (is_constant(entry)) {
    if (entry == 0.f) return;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) add_bias(rS.x[m][n][e], entry);
  } else if (is_mixed_bits(entry)) {
    const int shift = at.key_begin % kMaskSummaryBlock + lane / 4;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Rows past the end mean the last one.
        const uint32_t bits = static_cast<uint32_t>(
            summary.bits(batch_idx, head_idx, at.query_begin + 8 * n + 2 * (lane % 4) + i,
                         key_block) >>
            shift);
#pragma unroll
        for (int r = 0; r < 2 * kM; ++r)
          if ((bits >> 8 * r & 1) == 0) rS.x[r / 2][n][2 * (r % 2) + i] = -INFINITY;
      }
    }
  } else {
    using Element = std::conditional_t<kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;
    const int64_t slice = batch_idx * p.mask_stride[0] + head_idx * p.mask_stride[1];
    if (p.mask_dtype == MaskDtype::kBool) {
      add_mask_transposed(rS, static_cast<const uint8_t*>(p.mask) + slice, p, at, lane);
    } else if (p.mask_dtype == MaskDtype::kFloat32) {
      add_mask_transposed(rS, static_cast<const float*>(p.mask) + slice, p, at, lane);
    } else {
      add_mask_transposed(rS, static_cast<const Element*>(p.mask) + slice, p, at, lane);
    }
  }
}

}  // namespace fa::attn
