// What backward kernels make of transposed scores, in place: P^T from the LSE, and dS^T from dP^T.
// A lane's columns are queries, so their numbers come from shared memory, two at a time.
#pragma once
#include "mask_transposed.cuh"

namespace fa::attn {

// Raw scores to P^T. sLse: LSE of the lane's first query, in base 2; with a mask tensor natural,
// and what BwdParams::lse_log2 adds to it at sRest. cut: the band or an end cuts through the tile.
template <Dtype kDtype, bool kTensor, class Band, int kM, int kN>
FA_DEVICE void exponentiate(tile::Accumulator<kM, kN>& rS, const FwdParams& p, const Band& band,
                            float scale_log2, const MaskSummaryView& summary, uint32_t sLse,
                            uint32_t sRest, const TransposedTile<kM, kN>& at, bool cut,
                            int batch_idx, int head_idx) {
  if constexpr (kTensor) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rS.x[m][n][e] *= p.scale;
    mask_tensor_transposed<kDtype>(rS, p, summary, batch_idx, head_idx, at, ptx::lane_id());
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 lse = ptx::ld_shared_v2_f32(sLse + n * 32), rest{};
    if constexpr (kTensor) {
      rest = ptx::ld_shared_v2_f32(sRest + n * 32);
      // Rows without a key: -inf - -inf would be NaN.
      lse.x = lse.x == -INFINITY ? INFINITY : lse.x;
      lse.y = lse.y == -INFINITY ? INFINITY : lse.y;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = rS.x[m][n][e];
        const float row_lse = e % 2 == 0 ? lse.x : lse.y, row_rest = e % 2 == 0 ? rest.x : rest.y;
        // With a mask not one FFMA: the product of a far bias would leave the range of floats.
        s = kTensor ? fmaf(s - row_lse, kLog2E, -row_rest) : fmaf(s, scale_log2, -row_lse);
      }
    }
  }
  if (cut) mask_band_transposed(rS, band, at, ptx::lane_id());
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) rS.x[m][n][e] = ptx::ex2_approx_ftz(rS.x[m][n][e]);
}

// dP^T to dS^T. sDelta: delta of the lane's first query.
template <int kM, int kN>
FA_DEVICE void finish_grad_scores(tile::Accumulator<kM, kN>& rdP,
                                  const tile::Accumulator<kM, kN>& rP, uint32_t sDelta) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 delta = ptx::ld_shared_v2_f32(sDelta + n * 32);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = rdP.x[m][n][e];
        x = rP.x[m][n][e] * (x - (e % 2 == 0 ? delta.x : delta.y));
      }
    }
  }
}

// dS^T is 0 where P^T is. For tiles in which something may be hidden: there dP^T is whatever hidden
// values make it, NaN included.
template <int kM, int kN>
FA_DEVICE void clear_hidden(tile::Accumulator<kM, kN>& rdS, const tile::Accumulator<kM, kN>& rP) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) rdS.x[m][n][e] = rP.x[m][n][e] == 0.f ? 0.f : rdS.x[m][n][e];
}

}  // namespace fa::attn
