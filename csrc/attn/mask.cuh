// Masks on an accumulator tile of scores: sequence end and band by comparing columns, mask tensors
// by reading them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../tile/fragment.cuh"
#include "block_info.cuh"

namespace fa::attn {

// Sets the scores of keys that the band or the sequence end hides to -inf. The tile's first row is
// query row_begin and its first column key key_begin.
template <int kM, int kN>
FA_DEVICE void mask_columns(tile::Accumulator<kM, kN>& rS, const FwdParams& p, int row_begin,
                            int key_begin, int lane) {
  // Limits relative to the lane's first element, clamped to where they stop to matter, so that the
  // comparisons below are between 32-bit registers and compile-time offsets.
  constexpr int kFar = 16 * kM + 8 * kN;
  const int lane_col = 2 * (lane % 4), lane_row = lane / 4;
  const int tail = min(p.seqlen_k - key_begin, kFar) - lane_col;
  const int64_t center = row_begin + p.diagonal - key_begin;
  const int first =
      static_cast<int>(clamp(center - p.window_left, -kFar, kFar)) + lane_row - lane_col;
  const int end =
      static_cast<int>(clamp(center + p.window_right + 1, -kFar, kFar)) + lane_row - lane_col;
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const int row_first = first + 8 * r, row_end = min(end + 8 * r, tail);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = 8 * n + i;
        if (c < row_first || c >= row_end) rS.x[r / 2][n][2 * (r % 2) + i] = -INFINITY;
      }
    }
  }
}

// Element `offset` of an additive mask; 0 or -inf for a bool one.
template <Dtype kDtype>
FA_DEVICE float mask_value(const void* gMask, int64_t offset, MaskDtype dtype) {
  if (dtype == MaskDtype::kBool)
    return static_cast<const uint8_t*>(gMask)[offset] ? 0.f : -INFINITY;
  if (dtype == MaskDtype::kFloat32) return static_cast<const float*>(gMask)[offset];
  if constexpr (kDtype == Dtype::kFloat16) {
    return __half2float(static_cast<const __half*>(gMask)[offset]);
  } else {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(gMask)[offset]);
  }
}

// Adds the mask tensor to finished scores. What it hides becomes -inf whatever the score is, NaN
// included. gMask points at the slice of the batch entry and head, offset in elements.
template <Dtype kDtype, int kM, int kN>
FA_DEVICE void mask_tensor(tile::Accumulator<kM, kN>& rS, const FwdParams& p, int64_t slice_offset,
                           int row_begin, int key_begin, int lane) {
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const int row = min(row_begin + lane / 4 + 8 * r,
                        p.seqlen_q - 1);  // rows past the end are computed, not stored
    const int64_t row_offset = slice_offset + row * p.mask_stride[2];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = key_begin + 2 * (lane % 4) + 8 * n + i;
        float& s = rS.x[r / 2][n][2 * (r % 2) + i];
        if (key < p.seqlen_k) {
          const float bias =
              mask_value<kDtype>(p.mask, row_offset + key * p.mask_stride[3], p.mask_dtype);
          s = bias == -INFINITY ? -INFINITY : s + bias;
        }
      }
    }
  }
}

}  // namespace fa::attn
