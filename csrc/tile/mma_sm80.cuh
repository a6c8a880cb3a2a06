// Products of one warp over tiles in shared memory and registers, with mma.m16n8k16.
//
// Addresses: in a swizzled tile the chunk of a lane is (2 k + c) ^ (row & 7) with row & 7 and c
// fixed per lane, and XOR distributes, so a lane's address for step k is its address for step 0 XOR
// 32 k.
#pragma once
#include "fragment.cuh"
#include "swizzle.cuh"

namespace fa::tile {

// Lane's ldmatrix.x4 address, step 0, for an A operand [16][16] (row-major) ...
template <int kCols>
FA_DEVICE uint32_t lane_offset_a(int lane) {
  return swizzle<kCols>(lane % 16, lane / 16);
}
// ... for a pair of B operands [16][8] out of a tile stored [n][k] (K of S = Q K^T) ...
template <int kCols>
FA_DEVICE uint32_t lane_offset_b(int lane) {
  return swizzle<kCols>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// ... and, through the transposing load, for a pair out of a tile stored [k][n] (V of O = P V).
template <int kCols>
FA_DEVICE uint32_t lane_offset_b_trans(int lane) {
  return swizzle<kCols>(lane % 16, lane / 16);
}

// The products below call between(g) for g = 0, 1, ... kGroups - 1 as they go, with independent
// work of the same warp: the tensor core runs behind the issuing warp, so the scheduler fills its
// time with that work.

using Fragment = uint32_t[4];  // a lane's share of an A operand [16][16]

template <int kCols, int kN>
constexpr int kGroupsQk = kCols / 16 * (kN / 2);
template <int kN, int kKeys>
constexpr int kGroupsPv = kKeys / 2 * (kN / 2);

// S [16 kM][8 kN] += Q K^T with K [8 kN][kCols] in shared memory. Q [16 kM][kCols] lies in shared
// memory as well, and its first kRegSteps steps of 16 columns also in registers: rQ[m][k] holds
// rows 16 m and columns 16 k. Addresses are those of the lane, lane_offset_* included.
template <Dtype kDtype, int kCols, int kRegSteps, int kM, int kN, class Between>
FA_DEVICE void gemm_qk(Accumulator<kM, kN>& rS, const Fragment (&rQ)[kM][kRegSteps ? kRegSteps : 1],
                       uint32_t sQ, uint32_t sK, Between&& between) {
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    Fragment loaded[kM];
    if (k >= kRegSteps) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
        ptx::ldmatrix_x4(loaded[m], (sQ ^ (k * 32)) + m * 16 * kCols * 2);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, (sK ^ (k * 32)) + n * 8 * kCols * 2);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const Fragment& a =
            k < kRegSteps ? rQ[m][k < kRegSteps ? k : 0] : static_cast<const Fragment&>(loaded[m]);
        ptx::mma_m16n8k16<kDtype>(rS.x[m][n], a, b[0], b[1]);
        ptx::mma_m16n8k16<kDtype>(rS.x[m][n + 1], a, b[2], b[3]);
      }
      between(k * (kN / 2) + n / 2);
    }
  }
}

// O [16 kM][8 kN] += P V with P an accumulator [16 kM][8 kKeys] in registers and V [8 kKeys][8 kN]
// in shared memory.
template <Dtype kDtype, int kM, int kN, int kKeys, class Between>
FA_DEVICE void gemm_pv(Accumulator<kM, kN>& rO, const Accumulator<kM, kKeys>& rP, uint32_t sV,
                       Between&& between) {
  constexpr int kCols = kN * 8;
#pragma unroll
  for (int k = 0; k < kKeys / 2; ++k) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) as_operand_a<kDtype>(a[m], rP, m, k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, (sV ^ (n * 16)) + k * 16 * kCols * 2);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<kDtype>(rO.x[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<kDtype>(rO.x[m][n + 1], a[m], b[2], b[3]);
      }
      between(k * (kN / 2) + n / 2);
    }
  }
}

}  // namespace fa::tile
