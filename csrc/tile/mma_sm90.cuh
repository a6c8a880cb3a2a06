// Products of a warpgroup (wgmma) on tiles in panels of 64 columns, [cols / 64][rows][64] with
// 128-byte swizzle; and the same scores for one warp alone (mma.sync).
#pragma once
#include "../ptx/sm80.cuh"
#include "../ptx/wgmma.cuh"
#include "fragment.cuh"

namespace fa::tile {

constexpr int kPanelRowBytes = 128;

// Keeps the compiler from touching registers of products in flight; see ptx::pin.
template <int kN>
FA_DEVICE void pin(Accumulator<1, kN>& acc) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::pin(acc.x[0][n][e]);
}
template <int kK>
FA_DEVICE void pin(uint32_t (&a)[kK][4]) {
#pragma unroll
  for (int k = 0; k < kK; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::pin(a[k][e]);
}

// Enqueues rS = Q K^T: 64 rows of a tile of kQRows rows (Q at desc_q), 8 * kN keys (K at desc_k).
template <Dtype kDtype, int kHeadDim, int kQRows, int kN>
FA_DEVICE void wgmma_qk(Accumulator<1, kN>& rS, uint64_t desc_q, uint64_t desc_k) {
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const int panel = k / 4, step = k % 4 * 2;
    ptx::Wgmma<kDtype, 8 * kN>::ss(rS.x[0], desc_q + panel * (kQRows * kPanelRowBytes >> 4) + step,
                                   desc_k + panel * (8 * kN * kPanelRowBytes >> 4) + step, k > 0);
  }
}

// The same with Q in registers.
template <Dtype kDtype, int kHeadDim, int kN>
FA_DEVICE void wgmma_qk(Accumulator<1, kN>& rS, const uint32_t (&rQ)[kHeadDim / 16][4],
                        uint64_t desc_k) {
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
    ptx::Wgmma<kDtype, 8 * kN>::template rs<false>(
        rS.x[0], rQ[k], desc_k + k / 4 * (8 * kN * kPanelRowBytes >> 4) + k % 4 * 2, k > 0);
}

// Enqueues rO += P V for 16 * kK keys: P in registers, V [16 * kK][8 * kD] at desc_v (MN-major).
template <Dtype kDtype, int kD, int kK>
FA_DEVICE void wgmma_pv(Accumulator<1, kD>& rO, const uint32_t (&rP)[kK][4], uint64_t desc_v) {
#pragma unroll
  for (int k = 0; k < kK; ++k)
    ptx::Wgmma<kDtype, 8 * kD>::template rs<true>(rO.x[0], rP[k],
                                                  desc_v + k * (16 * kPanelRowBytes >> 4), true);
}

// Enqueues acc = A^T B over 16 * kSteps rows of both: A [rows][64] and B [rows][8 * kN] are single
// panels.
template <Dtype kDtype, int kSteps, int kN>
FA_DEVICE void wgmma_outer(Accumulator<1, kN>& acc, uint64_t desc_a, uint64_t desc_b) {
  constexpr int kStep = 16 * kPanelRowBytes >> 4;
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    ptx::Wgmma<kDtype, 8 * kN>::ss_mn(acc.x[0], desc_a + k * kStep, desc_b + k * kStep, k > 0);
}

// Address that this lane gives ldmatrix or stmatrix (x4) for the 16 x 16 elements at (row, 16 * k)
// of a tile of kRows rows: lanes 0 to 15 name the rows of the left half, 16 to 31 of the right one.
template <int kRows>
FA_DEVICE uint32_t panel_address(uint32_t smem, int row, int k, int lane) {
  const int r = row + lane % 16, chunk = k % 4 * 2 + lane / 16;
  return smem + (k / 4 * kRows + r) * kPanelRowBytes + ((chunk ^ (r & 7)) << 4);
}

// rS = Q K^T for the warp's 16 rows alone, by mma.sync: for a warp that needs its scores again
// while the other warps of its warpgroup do not.
template <Dtype kDtype, int kHeadDim, int kQRows, int kN>
FA_DEVICE void warp_qk(Accumulator<1, kN>& rS, uint32_t sQ, int row, uint32_t sK, int lane) {
  rS.clear();
#pragma unroll 1
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4(a, panel_address<kQRows>(sQ, row, k, lane));
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      ptx::ldmatrix_x4(b, panel_address<8 * kN>(sK, 16 * n, k, lane));
      ptx::mma_m16n8k16<kDtype>(rS.x[0][2 * n], a, b[0], b[2]);
      ptx::mma_m16n8k16<kDtype>(rS.x[0][2 * n + 1], a, b[1], b[3]);
    }
  }
}

// Rounds probabilities to the A operand of P V: the layouts agree.
template <Dtype kDtype, int kN>
FA_DEVICE void pack_operand_a(uint32_t (&rP)[kN / 2][4], const Accumulator<1, kN>& acc) {
#pragma unroll
  for (int k = 0; k < kN / 2; ++k) as_operand_a<kDtype>(rP[k], acc, 0, k);
}

}  // namespace fa::tile
