// Masks on an accumulator tile of scores: sequence end and band by comparing columns, mask tensors
// by reading them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../tile/fragment.cuh"
#include "block_info.cuh"

namespace fa::attn {

// Sets the scores of keys that the band or the sequence end hides to -inf. The tile's first row is
// query row_begin and its first column key key_begin. Band: see block_info.cuh.
template <class Band, int kM, int kN>
FA_DEVICE void mask_columns(tile::Accumulator<kM, kN>& rS, const Band& p, int row_begin,
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
  // Most tiles that need this lie at the end of the band or of the keys, not at its beginning.
  const bool cuts_left = center - p.window_left + 16 * kM - 1 > 0;
  auto hide = [&](auto&& is_hidden) {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int row_first = first + 8 * r, row_end = min(end + 8 * r, tail);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (is_hidden(8 * n + i, row_first, row_end)) rS.x[r / 2][n][2 * (r % 2) + i] = -INFINITY;
        }
      }
    }
  };
  if (cuts_left) {
    hide([](int c, int row_first, int row_end) { return c < row_first || c >= row_end; });
  } else {
    hide([](int c, int, int row_end) { return c >= row_end; });
  }
}

// Sets the scores of keys whose bits are 0 to -inf. The tile's columns start at a multiple of 64
// keys; row_bits [2][words of a row] are those of the lane's rows.
template <int kN>
FA_DEVICE void mask_bits(tile::Accumulator<1, kN>& rS, const uint64_t (&row_bits)[2][kN / 8],
                         int lane) {
  static_assert(kN % 8 == 0, "a word has 64 bits");
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int half = 0; half < kN / 4; ++half) {
      // Once shifted by the lane's column, an element's bit is the same one in all lanes. The 25 of
      // the last element and the 6 of the last lane stay within the half.
      const uint32_t bits =
          static_cast<uint32_t>(row_bits[r][half / 2] >> 32 * (half % 2)) >> 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((bits >> (8 * n + i) & 1) == 0) rS.x[0][4 * half + n][2 * r + i] = -INFINITY;
        }
      }
    }
  }
}

// What an element of a mask adds to its score: for a bool mask, 0 or -inf.
FA_DEVICE float mask_bias(uint8_t visible) { return visible ? 0.f : -INFINITY; }
FA_DEVICE float mask_bias(__half bias) { return __half2float(bias); }
FA_DEVICE float mask_bias(__nv_bfloat16 bias) { return __bfloat162float(bias); }
FA_DEVICE float mask_bias(float bias) { return bias; }

// What the mask hides becomes -inf whatever the score is, NaN included.
FA_DEVICE void add_bias(float& score, float bias) {
  score = bias == -INFINITY ? -INFINITY : score + bias;
}

// mask_tensor for one type of elements. gMask [seqlen_q][seqlen_k], by its strides. kByRows: for
// kernels that have no registers to load more than a row at once.
template <bool kByRows, class Element, int kM, int kN>
FA_DEVICE void add_mask(tile::Accumulator<kM, kN>& rS, const Element* gMask, const FwdParams& p,
                        int row_begin, int key_begin, int lane) {
  struct alignas(2 * sizeof(Element)) Pair {
    Element x[2];
  };
  // A lane's two neighbouring columns come in one load where it is aligned in all rows.
  const bool paired = p.mask_stride[3] == 1 && p.mask_stride[2] % 2 == 0 &&
                      reinterpret_cast<uintptr_t>(gMask) % sizeof(Pair) == 0 &&
                      key_begin + 8 * kN <= p.seqlen_k;
  const int lane_key = key_begin + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    const int row = min(row_begin + lane / 4 + 8 * r,
                        p.seqlen_q - 1);  // rows past the end are computed, not stored
    const Element* gRow = gMask + row * p.mask_stride[2];
    if constexpr (kByRows) ptx::keep_order_of_accesses();
    if (paired) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const Pair pair = *reinterpret_cast<const Pair*>(gRow + lane_key + 8 * n);
#pragma unroll
        for (int i = 0; i < 2; ++i) add_bias(rS.x[r / 2][n][2 * (r % 2) + i], mask_bias(pair.x[i]));
      }
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = lane_key + 8 * n + i;
          if (key < p.seqlen_k)
            add_bias(rS.x[r / 2][n][2 * (r % 2) + i], mask_bias(gRow[key * p.mask_stride[3]]));
        }
      }
    }
  }
}

// Adds the mask tensor to finished scores. slice_offset, in elements, is that of the batch entry
// and head. kAdditive: the mask is not a bool one.
template <Dtype kDtype, bool kAdditive = false, int kM, int kN>
FA_DEVICE void mask_tensor(tile::Accumulator<kM, kN>& rS, const FwdParams& p, int64_t slice_offset,
                           int row_begin, int key_begin, int lane) {
  using Element = std::conditional_t<kDtype == Dtype::kFloat16, __half, __nv_bfloat16>;
  auto add = [&](auto* gMask) {
    add_mask<kAdditive>(rS, gMask + slice_offset, p, row_begin, key_begin, lane);
  };
  if (!kAdditive && p.mask_dtype == MaskDtype::kBool) {
    add(static_cast<const uint8_t*>(p.mask));
  } else if (p.mask_dtype == MaskDtype::kFloat32) {
    add(static_cast<const float*>(p.mask));
  } else {
    add(static_cast<const Element*>(p.mask));
  }
}

}  // namespace fa::attn
