// fwd_sm80.cu: attention forward for every GPU from sm_80 on, mma.sync + cp.async.
//
//   O = softmax(scale * Q K^T + mask) V        LSE[m] = log sum_n exp(scale * q_m . k_n + mask)
//
// A CTA owns kBlockM query rows of one (batch, head) and walks their key blocks from last to first.
// A warp owns whole rows: its scores S become P and P becomes the operand of P V without leaving
// its registers.
//
//   shared   sQ [kBlockM][D]    sK, sV [kStages][kBlockN][D], a ring    (128-byte XOR swizzle)
//            one block ahead: cp.async of block n - 1 runs while block n is computed
//
//   a warp, block n, all keys visible (the usual case), halves a and b of the block:
//
//     tensor core   | S_a = Q K_a | S_b = Q K_b | O += P_a V_a | O += P_b V_b |
//     other units   |  cp.async   | P_a = 2^S_a | P_b = 2^S_b  |              |
//                                               ^ accept?      ^ accept?
//
//   2^S is taken against the row's reference, a maximum found earlier, with no maximum of this
//   block: see "at once" in attn/softmax.cuh. Where accept() says no, and where the band, the
//   sequence end or a mask tensor cuts through, the block goes in pieces of kPieceN keys through
//   the textbook order: S, mask, maximum, rescale O, P, O += P V.
//
//   D 256 where shared memory holds 128 rows: one piece a block, Q in registers (if no mask tensor
//   is read), and mbarriers in place of __syncthreads, so that the two warps of a scheduler drift
//   apart and one computes products while the other exponentiates.
//
// Units    strides count elements; scores are scaled into base 2 (scale * log2 e); LSE is natural.
// Needs    what FwdParams says of rows. A head_dim between 64, 128 and 256 is filled with zeros.
// Bounds   mma.sync reaches 645 TFLOPS on an H200. With operands out of shared memory it is 590
//          for 32 rows a warp and 470 for 16, which is all that D 256 leaves registers for.
// Numbers  benchmarks/results.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "../attn/block_info.cuh"
#include "../attn/mask.cuh"
#include "../attn/mask_summary.cuh"
#include "../attn/packed.cuh"
#include "../attn/scheduler.cuh"
#include "../attn/softmax.cuh"
#include "../tile/copy.cuh"
#include "../tile/mma_sm80.cuh"
#include "dispatch.h"
#include "launch.h"

namespace fa {
namespace {

struct FwdTile {
  int warps;
  int row_tiles;    // 16-row tiles of a warp
  int block_n;      // keys of a block
  int pieces;       // parts of a block
  int stages;       // of the ring
  int min_ctas;     // per SM, for the register limit
  int q_reg_steps;  // 16-column steps of Q held in registers
  bool mbarriers;   // ring guarded by mbarriers, not __syncthreads
  bool pointers;  // each thread keeps its pointers into K and V, where there are registers for them
  bool seed;      // the first reference comes from a product of its own, not from a block in the
                  // textbook order
};

// large: for devices whose shared memory holds the 128-row tile of D 256 (192 KiB). A100 (163 KiB)
// and the 99 KiB devices lack it. Chosen by measurement on an H200; the compile report shows what
// each instance takes.
constexpr FwdTile fwd_tile(int head_dim, bool large, MaskMode mask_mode, bool packed) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  constexpr int kQRegSteps = 4;  // more of them spill in the code for other architectures
#else
  constexpr int kQRegSteps = 16;
#endif
  // Reading a mask needs some, and so does a sequence's place.
  const int q_256 = mask_mode == MaskMode::kTensor ? 0 : packed ? 4 : kQRegSteps;
  if (head_dim == 64) return FwdTile{4, 2, 64, 2, 2, 2, 4, false, true, true};
  if (head_dim == 128) return FwdTile{4, 2, 64, 2, 2, 2, 0, false, false, true};
  if (large) return FwdTile{8, 1, 32, 1, 4, 1, q_256, true, false, false};
  return FwdTile{4, 1, 32, 1, 2, 1, 0, false, false, false};
}

template <int kHeadDim_, bool kLarge_, Dtype kDtype_, MaskMode kMaskMode_, bool kPacked_ = false>
struct FwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr MaskMode kMaskMode = kMaskMode_;
  static constexpr bool kPacked = kPacked_;  // see attn/packed.cuh
  static_assert(!kPacked || kMaskMode == MaskMode::kBand);
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kLarge_, kMaskMode, kPacked_);
  static constexpr int kRowTiles = kTile.row_tiles, kWarpRows = 16 * kRowTiles;
  static constexpr int kBlockM = kTile.warps * kWarpRows, kBlockN = kTile.block_n;
  static constexpr int kPieces = kTile.pieces, kPieceN = kBlockN / kPieces;
  static constexpr int kStages = kTile.stages, kThreads = 32 * kTile.warps;
  static constexpr uint32_t kTileBytes = kBlockN * kHeadDim * 2, kPieceBytes = kTileBytes / kPieces;

  struct SharedStorage {
    uint16_t sQ[kBlockM][kHeadDim];  // O on the way out
    uint16_t sK[kStages][kBlockN][kHeadDim];
    uint16_t sV[kStages][kBlockN][kHeadDim];
    uint64_t full[kStages];   // kThreads arrivals: the tile's copies have landed; consumers wait
    uint64_t empty[kStages];  // one arrival a warp: the tile has been read; the next copies wait
    // [seqlen_k][head_dim] of this CTA's head. Needed once a block, so they wait here and not in
    // registers; volatile, or the compiler would load them once and spill them.
    const uint16_t* volatile gK;
    const uint16_t* volatile gV;
  };

  using Output = tile::Accumulator<kRowTiles, kHeadDim / 8>;  // [kWarpRows][kHeadDim]
  using Scores = tile::Accumulator<kRowTiles, kPieceN / 8>;   // [kWarpRows][kPieceN]
  using Softmax = attn::OnlineSoftmax<kRowTiles, kMaskMode == MaskMode::kTensor>;
};

// Folds what is special about a scale <= 0 into the warp's rows of Q, exactly, so that the main
// loop sees a positive one and the maximum of raw scores is the maximum of scaled ones. Negative:
// changes the signs. Zero: Q becomes 0 * Q (and the scale 1), since 0 times the -inf of a hidden
// score would be NaN.
template <class Config>
FA_DEVICE void fold_scale(uint16_t* sQ, float scale, int warp, int lane) {
  constexpr uint16_t kExponent = Config::kDtype == Dtype::kFloat16 ? 0x7c00 : 0x7f80, kNan = 0x7fff;
  constexpr int kElements = Config::kWarpRows * Config::kHeadDim;
  sQ += warp * kElements;
#pragma unroll 1
  for (int i = lane; i < kElements; i += 32) {
    const bool finite = (sQ[i] & kExponent) != kExponent;
    sQ[i] = scale < 0.f ? sQ[i] ^ 0x8000 : finite ? 0 : kNan;
  }
  __syncwarp();
}

// The warp's rows of O and LSE to global memory; O goes through the warp's own rows of sQ for
// 16-byte stores. Indices are computed anew, so that none of them occupies a register during the
// main loop.
template <class Config>
FA_DEVICE void store_output(const FwdParams& p, const attn::TileOrder& order, unsigned char* sO,
                            typename Config::Output& rO, typename Config::Softmax& softmax) {
  constexpr int kHeadDim = Config::kHeadDim, kWarpRows = Config::kWarpRows, kChunks = kHeadDim / 8;
  const attn::WorkTile work =
      attn::work_of_cta<Config::kPacked>(p, order, ptx::block_index_again());
  const attn::Sequence sequence = attn::sequence_of<Config::kPacked>(p, work.batch_idx);
  const auto& band = attn::band_of<Config::kPacked>(p, sequence);
  const int lane = ptx::lane_id(), smem_row = ptx::thread_index_again() / 32 * kWarpRows;
  const int row_begin = work.m_block * Config::kBlockM + smem_row;

  float* gLse = p.lse +
                attn::head_of<Config::kPacked>(p, work.batch_idx, work.head_idx) * p.seqlen_q +
                sequence.q_begin;
  float lse[2 * Config::kRowTiles];
  softmax.finalize(rO, order.scale, lse);
#pragma unroll
  for (int r = 0; r < 2 * Config::kRowTiles; ++r) {
    const int row = row_begin + lane / 4 + 8 * r;
    if (lane % 4 == 0 && row < band.seqlen_q) gLse[row] = lse[r];
  }
  __syncwarp();  // other lanes' ldmatrix of Q are over; O overwrites it
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = smem_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int d = 0; d < kChunks; ++d)
        *reinterpret_cast<uint32_t*>(sO + tile::swizzle<kHeadDim>(row, d) + 4 * (lane % 4)) =
            ptx::cvt_rn_x2<Config::kDtype>(rO.x[m][d][2 * half], rO.x[m][d][2 * half + 1]);
    }
  }
  __syncwarp();
  uint16_t* gO = static_cast<uint16_t*>(p.out) + work.batch_idx * p.out_stride[0] +
                 work.head_idx * p.out_stride[1];
  constexpr int kPassRows = 32 / kChunks;  // rows that the warp stores at once
  const int chunk = lane % kChunks, columns = min(8, p.head_dim - chunk * 8);
  gO += (sequence.q_begin + row_begin + lane / kChunks) * p.out_stride[2] + chunk * 8;
  if (columns <= 0) return;
  if (order.out_aligned) {
#pragma unroll
    for (int i = 0; i < kWarpRows / kPassRows; ++i, gO += kPassRows * p.out_stride[2]) {
      const int r = lane / kChunks + i * kPassRows;
      if (row_begin + r < band.seqlen_q)
        *reinterpret_cast<uint4*>(gO) =
            *reinterpret_cast<const uint4*>(sO + tile::swizzle<kHeadDim>(smem_row + r, chunk));
    }
  } else {
#pragma unroll 1
    for (int r = lane / kChunks; r < kWarpRows; r += kPassRows, gO += kPassRows * p.out_stride[2]) {
      const auto* source =
          reinterpret_cast<const uint16_t*>(sO + tile::swizzle<kHeadDim>(smem_row + r, chunk));
#pragma unroll 1
      for (int e = 0; e < columns && row_begin + r < band.seqlen_q; ++e) gO[e] = source[e];
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.min_ctas)
    fwd_sm80_kernel(const __grid_constant__ FwdParams p,
                    const __grid_constant__ attn::TileOrder order) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kRowTiles = Config::kRowTiles, kWarpRows = Config::kWarpRows,
                kStages = Config::kStages;
  constexpr int kPieces = Config::kPieces, kPieceN = Config::kPieceN, kThreads = Config::kThreads;
  constexpr uint32_t kTileBytes = Config::kTileBytes, kPieceBytes = Config::kPieceBytes;
  constexpr Dtype kDtype = Config::kDtype;
  constexpr bool kTensor = Config::kMaskMode == MaskMode::kTensor;
  using Scores = typename Config::Scores;
  using CopyQ = tile::TileCopy<kBlockM, kHeadDim, kThreads>;
  using CopyKv = tile::TileCopy<kBlockN, kHeadDim, kThreads>;
  constexpr int kGroupsQk = tile::kGroupsQk<kHeadDim, kPieceN / 8>;
  constexpr int kGroupsPv = tile::kGroupsPv<kHeadDim / 8, kPieceN / 8>;

  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const uint32_t sQ = ptx::smem_addr(smem.sQ), sK = ptx::smem_addr(smem.sK),
                 sV = ptx::smem_addr(smem.sV);
  const uint32_t full = ptx::smem_addr(smem.full), empty = ptx::smem_addr(smem.empty);
  const int thread = threadIdx.x, warp = ptx::warp_id(), lane = ptx::lane_id();

  const attn::WorkTile work = attn::work_of_cta<Config::kPacked>(p, order, blockIdx.x);
  if (Config::kPacked && work.m_block < 0) return;
  const attn::Sequence sequence = attn::sequence_of<Config::kPacked>(p, work.batch_idx);
  const int row_begin = work.m_block * kBlockM, warp_row = row_begin + warp * kWarpRows;
  // The CTA loads the key blocks of all its rows; each warp computes on those of its own.
  const auto& band = attn::band_of<Config::kPacked>(p, sequence);
  const attn::KeyRange keys =
      attn::key_range(band, row_begin, min(row_begin + kBlockM, band.seqlen_q));
  const attn::KeyRange warp_keys =
      attn::key_range(band, min(warp_row, band.seqlen_q), min(warp_row + kWarpRows, band.seqlen_q));
  const int first_block = keys.first / kBlockN;
  const attn::MaskedBlocks<kBlockM, kBlockN> masked_blocks(p, work.batch_idx, work.head_idx,
                                                           row_begin);
  int last_block = (keys.end + kBlockN - 1) / kBlockN - 1;
  if constexpr (kTensor) last_block = masked_blocks.visible_from(last_block, first_block);
  // Possibly none. The copies below start at a block that exists all the same, and nothing uses it.
  const int num_blocks = last_block - first_block + 1;
  const int start_block = max(last_block, 0);

  typename Config::Output rO;
  typename Config::Softmax softmax;
  if (thread == 0) {
    smem.gK = static_cast<const uint16_t*>(p.key) + work.batch_idx * p.key_stride[0] +
              work.kv_head_idx * p.key_stride[1] + sequence.k_begin * p.key_stride[2];
    smem.gV = static_cast<const uint16_t*>(p.value) + work.batch_idx * p.value_stride[0] +
              work.kv_head_idx * p.value_stride[1] + sequence.k_begin * p.value_stride[2];
    if constexpr (Config::kTile.mbarriers) {
      for (int s = 0; s < kStages; ++s) {
        ptx::mbarrier_init(full + 8 * s, kThreads);
        ptx::mbarrier_init(empty + 8 * s, Config::kTile.warps);
      }
    }
  }
  __syncthreads();  // what thread 0 wrote is there for all

  // ---- Q and the last block, whose end may lie outside the tensors.
  const int col = CopyKv::col(thread);
  {
    const auto* gQ = static_cast<const uint16_t*>(p.query) + work.batch_idx * p.query_stride[0] +
                     work.head_idx * p.query_stride[1];
    const int row = row_begin + CopyQ::row(thread);
    CopyQ::load_bounded(sQ + CopyQ::smem_offset(thread),
                        gQ + (sequence.q_begin + row) * p.query_stride[2] + col, p.query_stride[2],
                        col, p.head_dim, band.seqlen_q - row);
  }
  if constexpr (Config::kTile.q_reg_steps > 0) ptx::cp_async_commit_group();
  const int last_row = start_block * kBlockN + CopyKv::row(thread);
  const uint16_t* gK_next = smem.gK + last_row * p.key_stride[2] + col;
  const uint16_t* gV_next = smem.gV + last_row * p.value_stride[2] + col;
  CopyKv::load_bounded(sK + CopyKv::smem_offset(thread), gK_next, p.key_stride[2], col, p.head_dim,
                       band.seqlen_k - last_row);
  CopyKv::load_bounded(sV + CopyKv::smem_offset(thread), gV_next, p.value_stride[2], col,
                       p.head_dim, band.seqlen_k - last_row);
  ptx::cp_async_commit_group();
  if constexpr (Config::kTile.mbarriers) ptx::cp_async_mbarrier_arrive_noinc(full);

  // Enqueues the copies of `block` to the ring's `stage` (an offset in bytes). Past the last block
  // nothing is read; zeros are written where a branch around them would cost more.
  int thread_block = start_block;  // where gK_next and gV_next point
  auto load_block = [&](int block, bool valid, uint32_t stage) {
    const int t = ptx::thread_index_again(), col = CopyKv::col(t);
    const uint16_t *k, *v;
    if constexpr (Config::kTile.pointers) {
      gK_next -= (thread_block - block) * kBlockN * p.key_stride[2];
      gV_next -= (thread_block - block) * kBlockN * p.value_stride[2];
      thread_block = block;
      k = gK_next;
      v = gV_next;
    } else {
      const int row = block * kBlockN + CopyKv::row(t);
      k = smem.gK + row * p.key_stride[2] + col;
      v = smem.gV + row * p.value_stride[2] + col;
    }
    const uint32_t offset = CopyKv::smem_offset(t) + stage;
    if (!Config::kTile.mbarriers || valid) {
#pragma unroll
      for (int i = 0; i < CopyKv::kSteps; ++i, k += CopyKv::kRowStep * p.key_stride[2])
        CopyKv::load_step(sK + offset, k, i, col, p.head_dim, valid);
#pragma unroll
      for (int i = 0; i < CopyKv::kSteps; ++i, v += CopyKv::kRowStep * p.value_stride[2])
        CopyKv::load_step(sV + offset, v, i, col, p.head_dim, valid);
    }
  };

  const uint32_t sQ_lane =
      sQ + warp * kWarpRows * kHeadDim * 2 + tile::lane_offset_a<kHeadDim>(lane);
  tile::Fragment rQ[kRowTiles][Config::kTile.q_reg_steps > 0 ? Config::kTile.q_reg_steps : 1];
  if (Config::kTile.q_reg_steps > 0 || p.scale <= 0.f) {
    if (p.scale <= 0.f) {
      ptx::cp_async_wait_group<0>();
    } else {
      ptx::cp_async_wait_group<1>();  // Q, not yet K and V
    }
    __syncthreads();
    if (p.scale <= 0.f) fold_scale<Config>(smem.sQ[0], p.scale, warp, lane);
    if constexpr (Config::kTile.q_reg_steps > 0) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int k = 0; k < Config::kTile.q_reg_steps; ++k)
          ptx::ldmatrix_x4(rQ[m][k], (sQ_lane ^ (k * 32)) + m * 16 * kHeadDim * 2);
    }
  }

  rO.clear();
  auto nothing = [](int) {};
  auto product_qk = [&](Scores& rS, uint32_t sK_piece, auto&& between) {
    rS.clear();
    tile::gemm_qk<kDtype, kHeadDim, Config::kTile.q_reg_steps>(rS, rQ, sQ_lane, sK_piece, between);
  };

  // Computes block number i of this CTA's, while the copies of block `next` run.
  auto compute_block = [&](int i, int block, int next, bool next_valid, uint32_t stage,
                           uint32_t next_stage, uint32_t next_full) {
    load_block(next, next_valid, next_stage);
    if constexpr (Config::kTile.mbarriers) {
      ptx::cp_async_mbarrier_arrive_noinc(next_full);
    } else {
      ptx::cp_async_commit_group();
    }

    const int key_begin = block * kBlockN;
    if (key_begin >= warp_keys.end || key_begin + kBlockN <= warp_keys.first) return;
    const int again = Config::kTile.mbarriers ? ptx::lane_id() : lane;
    const uint32_t sK_block = sK + tile::lane_offset_b<kHeadDim>(again) + stage;
    const uint32_t sV_block = sV + tile::lane_offset_b_trans<kHeadDim>(again) + stage;
    const bool mixed = kTensor && masked_blocks.classify(block) != attn::kMaskVisible;
    const bool visible =
        key_begin + kBlockN <= warp_keys.full_end && key_begin >= warp_keys.full_first && !mixed;

    int piece = 0;  // the next one to compute
    if (Config::kTile.seed && visible && i == 0) {
      Scores rS;
      product_qk(rS, sK_block, nothing);
      softmax.seed_reference(rS, order.scale);
    }
    if (visible && (Config::kTile.seed || i > 0)) {
      Scores rS_a;
      product_qk(rS_a, sK_block, nothing);
      if constexpr (kPieces == 1) {
        softmax.template exponentiate_at_once<1>(rS_a, 0, order.scale_log2);
        if (softmax.template accept<false>(order.scale_log2)) {
          tile::gemm_pv<kDtype>(rO, rS_a, sV_block, nothing);
          piece = 1;
        }
      } else {
        static_assert(kPieces == 2);
        Scores rS_b;
        product_qk(rS_b, sK_block + kPieceBytes, [&](int g) {
          softmax.template exponentiate_at_once<kGroupsQk>(rS_a, g, order.scale_log2);
        });
        if (softmax.template accept<false>(order.scale_log2)) {
          tile::gemm_pv<kDtype>(rO, rS_a, sV_block, [&](int g) {
            softmax.template exponentiate_at_once<kGroupsPv>(rS_b, g, order.scale_log2);
          });
          piece = 1;
          if (softmax.template accept<false>(order.scale_log2)) {
            tile::gemm_pv<kDtype>(rO, rS_b, sV_block + kPieceBytes, nothing);
            piece = 2;
          }
        }
      }
    }
#pragma unroll 1
    for (; piece < kPieces; ++piece) {
      const int key = key_begin + piece * kPieceN;
      if (key >= warp_keys.end || key + kPieceN <= warp_keys.first) continue;
      Scores rS;
      product_qk(rS, sK_block + piece * kPieceBytes, nothing);
      if constexpr (kTensor) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int n = 0; n < kPieceN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) rS.x[m][n][e] *= order.scale;
        if (mixed) {
          const attn::WorkTile here = attn::tile_of_cta(order, ptx::block_index_again());
          const int64_t slice =
              here.batch_idx * p.mask_stride[0] + here.head_idx * p.mask_stride[1];
          attn::mask_tensor<kDtype>(rS, p, slice, warp_row, key, ptx::lane_id());
        }
      }
      if (key + kPieceN > warp_keys.full_end || key < warp_keys.full_first)
        attn::mask_columns(rS, band, warp_row, key, ptx::lane_id());
      softmax.scan_max(rS);
      softmax.rescale(rO, order.scale_log2);
      softmax.exponentiate(rS, order.scale_log2);
      tile::gemm_pv<kDtype>(rO, rS, sV_block + piece * kPieceBytes, nothing);
    }
  };

  // ---- Main loop. Bands leave an unbroken range of blocks, mask tensors may not.
  auto block_after = [&](int i, int block) {
    if constexpr (kTensor) return masked_blocks.visible_from(block - 1, first_block);
    return last_block - i - 1;
  };
  int block = last_block;
#pragma unroll 1
  for (int i = 0; kTensor ? block >= first_block : i < num_blocks; ++i) {
    if constexpr (!kTensor) block = last_block - i;
    const int next = block_after(i, block);
    const bool next_valid = kTensor ? next >= first_block : i + 1 < num_blocks;
    if constexpr (Config::kTile.mbarriers) {
      const unsigned now = i % kStages, then = (i + 1) % kStages;
      // The first pass over the empty barriers must not wait: on a fresh barrier the phase before
      // the first is complete.
      ptx::mbarrier_wait_parity(empty + 8 * then, ((i + 1) / kStages + 1) & 1);
      ptx::mbarrier_wait_parity(full + 8 * now, i / kStages & 1);
      compute_block(i, block, next, next_valid, now * kTileBytes, then * kTileBytes,
                    full + 8 * then);
      __syncwarp();
      if (ptx::lane_id() == 0) ptx::mbarrier_arrive(empty + 8 * now);
    } else {
      static_assert(kStages == 2 || Config::kTile.mbarriers);
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // the block has landed for all; all have left the tile that the next
                        // copies overwrite
      const uint32_t stage = i % 2 * kTileBytes;
      compute_block(i, block, next, next_valid, stage, stage ^ kTileBytes, 0);
    }
    block = next;
  }
  ptx::cp_async_wait_group<0>();
  if (num_blocks <= 0) __syncthreads();  // the copies to sQ, where O goes, have landed
  store_output<Config>(p, order, smem_raw, rO, softmax);
}

template <class Config>
cudaError_t launch_config(const FwdParams& p, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(typename Config::SharedStorage);
  const auto kernel = fwd_sm80_kernel<Config>;
  if (const cudaError_t status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
      status != cudaSuccess) {
    return status;
  }
  constexpr int64_t kSectionBytes = int64_t{48} << 20;  // the L2 of an H200; 24 is 2 to 10 % slower
  const int64_t m_blocks = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t ctas =
      p.heads_q * (Config::kPacked ? p.packed.max_tiles : int64_t{p.batch} * m_blocks);
  if (ctas > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  const attn::TileOrder order = attn::make_tile_order(p, Config::kBlockM, kSectionBytes);
  kernel<<<static_cast<unsigned>(ctas), Config::kThreads, kSmemBytes, stream>>>(p, order);
  return cudaGetLastError();
}

// Calls f(integral_constant head_dim instance, bool_constant large) for the tile that serves
// head_dim on this device.
template <class F>
cudaError_t dispatch_tile(int head_dim, int smem_limit_bytes, F&& f) {
  constexpr std::false_type small;
  constexpr std::true_type large;
  if (head_dim <= 64) return f(std::integral_constant<int, 64>{}, small);
  if (head_dim <= 128) return f(std::integral_constant<int, 128>{}, small);
  constexpr std::integral_constant<int, 256> d;
  using Large = FwdConfig<256, true, Dtype::kFloat16, MaskMode::kBand>;
  if (smem_limit_bytes >= static_cast<int>(sizeof(Large::SharedStorage))) return f(d, large);
  return f(d, small);
}

}  // namespace

KernelShape describe_fwd_sm80(int head_dim, int smem_limit_bytes) {
  KernelShape shape{};
  dispatch_tile(head_dim, smem_limit_bytes, [&](auto d, auto large) {
    using Config = FwdConfig<d(), large(), Dtype::kFloat16, MaskMode::kBand>;
    shape = {Config::kBlockM, Config::kBlockN, Config::kThreads,
             static_cast<int>(sizeof(typename Config::SharedStorage))};
    return cudaSuccess;
  });
  return shape;
}

cudaError_t launch_fwd_sm80(const FwdParams& params, int smem_limit_bytes, cudaStream_t stream) {
  // Without a mask the band is unlimited: a kernel of its own gains nothing (0 to 3 % slower on an
  // H200, D 64 and 128).
  const MaskMode mode = params.mask_mode == MaskMode::kFull ? MaskMode::kBand : params.mask_mode;
  const bool packed = params.packed.cu_seqlens_q != nullptr;
  return dispatch_tile(params.head_dim, smem_limit_bytes, [&](auto d, auto large) {
    if (packed) {
      return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.dtype, [&](auto dtype) {
        return launch_config<FwdConfig<d(), large(), dtype(), MaskMode::kBand, true>>(params,
                                                                                      stream);
      });
    }
    return dispatch_value<MaskMode::kBand, MaskMode::kTensor>(mode, [&](auto mask_mode) {
      return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.dtype, [&](auto dtype) {
        return launch_config<FwdConfig<d(), large(), dtype(), mask_mode()>>(params, stream);
      });
    });
  });
}

}  // namespace fa
