// Where both logs stop and what both were missing: a warp owns whole rows, and P stays in its
// registers.
//
//   A CTA owns 64 query rows of one head, 16 a warp, and walks over blocks of 64 keys.
//
//   shared   sQ [64][128]   sK [64][128]   sV [64][128]      48 KiB, 128-byte XOR swizzle
//
//     a block       | S = Q K^T | max, P = 2^S, O rescaled | O += P V |
//     cp.async      | V ...........................| K of the next ...
//
// No shuffle but over the four lanes of a quad, no score in shared memory: an accumulator of
// Q K^T is laid out as the A operand of P V (tile/fragment.cuh).
#pragma once
#include "rung.cuh"

namespace fa::ladder {

constexpr int kWholeRowsBlock = 64;  // query rows of a CTA, and keys of a block

template <bool kCausal>
__global__ void __launch_bounds__(kThreads) whole_rows_kernel(const __grid_constant__ Problem p) {
  constexpr int kBlock = kWholeRowsBlock;
  struct SharedStorage {
    uint16_t sQ[kBlock][kHeadDim];
    uint16_t sK[kBlock][kHeadDim];
    uint16_t sV[kBlock][kHeadDim];
  };
  __shared__ __align__(1024) SharedStorage smem;
  const int thread = threadIdx.x, warp = ptx::warp_id(), lane = ptx::lane_id();
  const uint32_t sQ = ptx::smem_addr(smem.sQ), sK = ptx::smem_addr(smem.sK),
                 sV = ptx::smem_addr(smem.sV);
  const Place place = place_of_cta<true>();
  const int batch_idx = place.head / p.heads_q, head_idx = place.head % p.heads_q;
  const int kv_head_idx = head_idx / (p.heads_q / p.heads_k);
  const int row_begin = place.m_block * kBlock, warp_row = row_begin + 16 * warp;
  const uint16_t* gQ = p.query + batch_idx * p.query_stride.batch + head_idx * p.query_stride.head;
  const uint16_t* gK = p.key + batch_idx * p.key_stride.batch + kv_head_idx * p.key_stride.head;
  const uint16_t* gV =
      p.value + batch_idx * p.value_stride.batch + kv_head_idx * p.value_stride.head;

  load_tile<kBlock>(sQ, gQ + row_begin * kHeadDim, kHeadDim, thread);
  load_tile<kBlock>(sK, gK, kHeadDim, thread);
  ptx::cp_async_commit_group();

  const float scale_log2 = p.scale * kLog2E;
  const uint32_t sQ_lane = sQ + warp * 16 * kHeadDim * 2 + tile::lane_offset_a<kHeadDim>(lane);
  const uint32_t sK_lane = sK + tile::lane_offset_b<kHeadDim>(lane);
  const uint32_t sV_lane = sV + tile::lane_offset_b_trans<kHeadDim>(lane);
  const tile::Fragment rQ[1][1] = {};  // Q is read out of shared memory
  auto nothing = [](int) {};
  tile::Accumulator<1, kHeadDim / 8> rO;
  rO.clear();
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};  // sums: the lane's part

  const int num_blocks = kCausal ? place.m_block + 1 : p.seqlen / kBlock;
#pragma unroll 1
  for (int block = 0; block < num_blocks; ++block) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // K is there for all; all have read the V before
    load_tile<kBlock>(sV, gV + block * kBlock * kHeadDim, kHeadDim, thread);
    ptx::cp_async_commit_group();

    tile::Accumulator<1, kBlock / 8> rS;
    rS.clear();
    tile::gemm_qk<kDtype, kHeadDim, 0>(rS, rQ, sQ_lane, sK_lane, nothing);
    if (kCausal && block == place.m_block) {
#pragma unroll
      for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = block * kBlock + 8 * n + tile::fragment_col(lane, e);
          if (key > warp_row + tile::fragment_row(lane, e)) rS.x[0][n][e] = -INFINITY;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_max = -INFINITY;
#pragma unroll
      for (int n = 0; n < kBlock / 8; ++n)
        tile_max = fmaxf(tile_max, fmaxf(rS.x[0][n][2 * r], rS.x[0][n][2 * r + 1]));
      // Finite from the first block on: every row sees key 0.
      const float new_max = fmaxf(row_max[r], tile::quad_max(tile_max));
      const float rescale = ptx::ex2_approx_ftz((row_max[r] - new_max) * scale_log2);
      row_max[r] = new_max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d) {
        rO.x[0][d][2 * r] *= rescale;
        rO.x[0][d][2 * r + 1] *= rescale;
      }
#pragma unroll
      for (int n = 0; n < kBlock / 8; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          rS.x[0][n][e] =
              ptx::ex2_approx_ftz(fmaf(rS.x[0][n][e], scale_log2, -new_max * scale_log2));
          row_sum[r] += rS.x[0][n][e];
        }
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // V is there for all; all have read K
    if (block + 1 < num_blocks)
      load_tile<kBlock>(sK, gK + (block + 1) * kBlock * kHeadDim, kHeadDim, thread);
    ptx::cp_async_commit_group();
    tile::gemm_pv<kDtype>(rO, rS, sV_lane, nothing);
  }

  uint16_t* gO = p.out + batch_idx * p.out_stride.batch + head_idx * p.out_stride.head;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    store_rows(gO + (warp_row + lane / 4 + 8 * r) * kHeadDim, rO.x[0], r,
               ptx::rcp_approx_ftz(tile::quad_sum(row_sum[r])), lane);
}

}  // namespace fa::ladder
