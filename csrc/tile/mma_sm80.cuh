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

// Both kinds of A operand [16][16] of gemm_smem: out of a tile stored [m][k] (as lane_offset_a), or
// [k][m], through the transposing load.
enum class StorageA { kRowMajor, kTransposed };
template <StorageA kStorage, int kCols>
FA_DEVICE uint32_t lane_offset_a_of(int lane) {
  return kStorage == StorageA::kRowMajor ? lane_offset_a<kCols>(lane) : lane_offset_b<kCols>(lane);
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

// C [16 kM][8 kN] += A B, both in shared memory: A [16 kM][16 kSteps] by kStorage, in rows of
// kColsA elements; B [16 kSteps][8 kN] stored [k][n], in rows of kColsB. Addresses are those of the
// lane (lane_offset_a_of, lane_offset_b_trans), the place of the warp's part in the tile included.
template <Dtype kDtype, StorageA kStorage, int kColsA, int kColsB, int kSteps, int kM, int kN>
FA_DEVICE void gemm_smem(Accumulator<kM, kN>& rC, uint32_t sA, uint32_t sB) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Fragment a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (kStorage == StorageA::kRowMajor) {
        ptx::ldmatrix_x4(a[m], (sA ^ (k * 32)) + m * 16 * kColsA * 2);
      } else {
        ptx::ldmatrix_x4_trans(a[m], (sA ^ (m * 32)) + k * 16 * kColsA * 2);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, (sB ^ (n * 16)) + k * 16 * kColsB * 2);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<kDtype>(rC.x[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<kDtype>(rC.x[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// C [16 kM][8 kN] += A B with A [16 kM][16 kSteps] in registers, B as above.
template <Dtype kDtype, int kColsB, int kSteps, int kM, int kN>
FA_DEVICE void gemm_fragments(Accumulator<kM, kN>& rC, const Fragment (&rA)[kM][kSteps],
                              uint32_t sB) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, (sB ^ (n * 16)) + k * 16 * kColsB * 2);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16<kDtype>(rC.x[m][n], rA[m][k], b[0], b[1]);
        ptx::mma_m16n8k16<kDtype>(rC.x[m][n + 1], rA[m][k], b[2], b[3]);
      }
    }
  }
}

// Stores A operands [16 kM][16 kSteps] as elements of a tile in shared memory. address:
// lane_offset_c, the place of the warp's part in the tile included.
template <int kCols>
FA_DEVICE uint32_t lane_offset_c(int lane) {
  return swizzle<kCols>(lane / 4, 0) + 4 * (lane % 4);
}
template <int kCols, int kM, int kSteps>
FA_DEVICE void store_fragments(uint32_t address, const Fragment (&rA)[kM][kSteps]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::st_shared_u32((address ^ (k * 32 + i / 2 * 16)) + (16 * m + i % 2 * 8) * kCols * 2,
                           rA[m][k][i]);
}

// The same of an accumulator [16 kM][8 kN], rounded.
template <Dtype kDtype, int kCols, int kM, int kN>
FA_DEVICE void store_rounded(uint32_t address, const Accumulator<kM, kN>& acc) {
  Fragment rounded[kM][kN / 2];
  as_operand_a<kDtype>(rounded, acc);
  store_fragments<kCols>(address, rounded);
}

}  // namespace fa::tile
