// Accumulator tiles of mma.m16n8k16 in the registers of one warp: which element a lane holds, how
// an accumulator becomes the A operand of the next product, and reductions along a row. (PTX
// manual, figures of mma.m16n8k16.)
#pragma once
#include "../ptx/sm80.cuh"

namespace fa::tile {

// Rows of a 16x8 accumulator held by a lane: element e of 4 lies in row lane/4 + 8 * (e / 2) ...
FA_DEVICE int fragment_row(int lane, int e) { return lane / 4 + 8 * (e / 2); }
// ... and in column 2 * (lane % 4) + e % 2.
FA_DEVICE int fragment_col(int lane, int e) { return 2 * (lane % 4) + e % 2; }

// kM x kN accumulators of 16 rows and 8 columns: a warp's tile [16 * kM][8 * kN] in fp32.
template <int kM, int kN>
struct Accumulator {
  float x[kM][kN][4];

  FA_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][n][e] = 0.f;
  }
};

// Columns 16 * k to 16 * k + 15 of row tile m as an A operand [16][16]: the layouts agree, so P
// never leaves the lane.
template <Dtype kDtype, int kM, int kN>
FA_DEVICE void as_operand_a(uint32_t (&a)[4], const Accumulator<kM, kN>& acc, int m, int k) {
  a[0] = ptx::cvt_rn_x2<kDtype>(acc.x[m][2 * k][0], acc.x[m][2 * k][1]);
  a[1] = ptx::cvt_rn_x2<kDtype>(acc.x[m][2 * k][2], acc.x[m][2 * k][3]);
  a[2] = ptx::cvt_rn_x2<kDtype>(acc.x[m][2 * k + 1][0], acc.x[m][2 * k + 1][1]);
  a[3] = ptx::cvt_rn_x2<kDtype>(acc.x[m][2 * k + 1][2], acc.x[m][2 * k + 1][3]);
}

// The same for all of an accumulator tile.
template <Dtype kDtype, int kM, int kN>
FA_DEVICE void as_operand_a(uint32_t (&a)[kM][kN / 2][4], const Accumulator<kM, kN>& acc) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) as_operand_a<kDtype>(a[m][k], acc, m, k);
}

// A row of an accumulator tile is spread over the four lanes of a quad.
FA_DEVICE float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
}
FA_DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffff, v, 1);
  return v + __shfl_xor_sync(0xffffffff, v, 2);
}

}  // namespace fa::tile
