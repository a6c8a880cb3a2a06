// bwd_sm80.cu: attention backward for every GPU from sm_80 on, mma.sync + cp.async.
//
//   P = exp(scale * Q K^T + mask - LSE)      dV = P^T dO           dP = dO V^T
//   dS = P (dP - delta)                      dK = scale dS^T Q     dQ = scale dS K
//
// A CTA owns kBlockN keys of one key head and walks the blocks of query rows that see some of them,
// of every query head of the group. dK and dV stay in registers; dQ is added to an accumulator in
// global memory, which launch_bwd_pre clears and launch_bwd_post rounds.
//
// Scores are computed transposed, keys in rows, so that P^T and dS^T lie as the products that sum
// over queries want them. With D 64 a warp owns whole rows: P^T and dS^T become operands without
// leaving its registers.
//
//   shared   sK, sV [kBlockN][D]    sQ, sdO [kStages][kBlockM][D], a ring    (128-byte XOR swizzle)
//            sdS, sP [kBlockN][kBlockM]: dS^T and, above D 64, P^T
//
//   a block of query rows, | is a barrier and ~ the copies of the next Q and dO:
//
//     D 64 (two CTAs an SM)  | S^T = K Q^T, P^T, dP^T = V dO^T, dV += P^T dO, dS^T, dK += dS^T Q
//                            |~ dQ = dS K
//     D 128                  |~ S^T, P^T, dP^T, dS^T | dV += P^T dO, dK += dS^T Q, dQ = dS K
//     D 256                  | S^T, P^T, dP^T, dS^T | dV += P^T dO, dK += dS^T Q |~ dQ = dS K
//
// Units    strides count elements; exponents are in base 2. LSE is natural with a mask tensor, as a
//          bias near the lowest float leaves no room for a factor.
// Needs    what BwdParams says of rows. A head_dim between 64, 128 and 256 is filled with zeros.
// Bounds   mma.sync reaches 645 TFLOPS on an H200. With 128 bytes a cycle from shared memory,
//          products of 32x32 tiles a warp reach at most 500, those of 32x64 tiles 640.
// Numbers  benchmarks/results.
#include <cuda_runtime.h>

#include <limits>

#include "../attn/grad_scores.cuh"
#include "../tile/copy.cuh"
#include "../tile/mma_sm80.cuh"
#include "bwd_sm80_tile.cuh"
#include "dispatch.h"
#include "launch.h"

namespace fa {
namespace {

using bwd_sm80::BwdConfig;
using bwd_sm80::BwdOrder;
using bwd_sm80::KeyPlace;
using bwd_sm80::SmemSize;

// A block of query rows, as the main loop walks them: query heads of the group one after the other.
struct QueryBlock {
  int head_idx;
  int m_block;
};

// A tile of kRows rows from shared to global memory; rows_left rows exist.
template <int kRows, int kHeadDim, int kThreads>
FA_DEVICE void store_rows(uint16_t* gTile, int64_t row_stride, const unsigned char* sTile,
                          int head_dim, int rows_left, bool aligned, int thread) {
  using Copy = tile::TileCopy<kRows, kHeadDim, kThreads>;
  const int first_row = Copy::row(thread);
#pragma unroll
  for (int line = 0; line < Copy::kLines; ++line) {
    const int col = Copy::col(thread) + line * 64;
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
      const int row = first_row + i * Copy::kRowStep;
      if (row >= rows_left || col >= head_dim) continue;
      uint16_t* target = gTile + row * row_stride + col;
      const unsigned char* source = sTile + tile::swizzle<kHeadDim>(row, col / 8);
      if (aligned) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
      } else {
#pragma unroll 1
        for (int e = 0; e < min(8, head_dim - col); ++e)
          target[e] = reinterpret_cast<const uint16_t*>(source)[e];
      }
    }
  }
}

// A CTA: its place, its tiles in shared memory, its dK and dV.
template <class Config>
struct KeyBlock {
  static constexpr int kHeadDim = Config::kHeadDim, kRowBytes = kHeadDim * 2;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads, kPairCols = Config::kPairCols;
  static constexpr Dtype kDtype = Config::kDtype;
  static constexpr bool kTensor = Config::kMaskMode == MaskMode::kTensor;
  static constexpr bool kPacked = Config::kPacked;
  using CopyQ = tile::TileCopy<kBlockM, kHeadDim, kThreads>;
  using CopyKv = tile::TileCopy<kBlockN, kHeadDim, kThreads>;

  const BwdParams& params;
  const FwdParams& p;
  const BwdOrder& order;
  typename Config::SharedStorage& smem;
  uint32_t sK, sV, sQ, sdO, sdS, sP, sLse, sDelta, sRest;
  KeyPlace kept_place;
  int first_block, end_block;  // blocks of query rows; none where first_block >= end_block
  typename Config::GradKey rdK, rdV;

  FA_DEVICE KeyBlock(const BwdParams& params, const BwdOrder& order, const KeyPlace& place,
                     unsigned char* smem_raw)
      : params(params),
        p(params.fwd),
        order(order),
        smem(*reinterpret_cast<typename Config::SharedStorage*>(smem_raw)),
        kept_place(place) {
    sK = ptx::smem_addr(smem.sK), sV = ptx::smem_addr(smem.sV);
    sQ = ptx::smem_addr(smem.sQ), sdO = ptx::smem_addr(smem.sdO);
    sdS = ptx::smem_addr(smem.sdS), sP = ptx::smem_addr(smem.sP);
    sLse = ptx::smem_addr(smem.lse), sDelta = ptx::smem_addr(smem.delta);
    sRest = ptx::smem_addr(smem.rest);
    if constexpr (kPacked) {
      if (threadIdx.x == 0) smem.packed[0] = {place, attn::sequence_of<true>(p, place.batch_idx)};
      __syncthreads();  // the place is there for all
    }
    const int key_begin = place.n_block * kBlockN;
    const attn::QueryRange rows =
        attn::query_range(band(), key_begin, min(key_begin + kBlockN, band().seqlen_k));
    first_block = rows.first / kBlockM;
    end_block = rows.first < rows.end ? (rows.end + kBlockM - 1) / kBlockM : first_block;
    rdK.clear();
    rdV.clear();
  }

  // What does not change in the main loop is not kept in registers where these do not suffice, but
  // computed where it is used from an index read anew: 2 to 4 % slower on an H200.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  static constexpr bool kFreshThread = !kTensor, kFreshPlace = kTensor;
#else
  static constexpr bool kFreshThread = kTensor, kFreshPlace = false;
#endif
  static FA_DEVICE int thread() {
    return kFreshThread ? ptx::thread_index_again() : static_cast<int>(threadIdx.x);
  }
  static FA_DEVICE int lane() { return thread() % 32; }
  static FA_DEVICE int warp() { return thread() / 32; }

  FA_DEVICE KeyPlace place() const {
    if constexpr (kPacked) return smem.packed[0].place;
    return kFreshPlace ? bwd_sm80::place_of_cta(order, ptx::block_index_again()) : kept_place;
  }
  // Of the sequence.
  FA_DEVICE const auto& band() const {
    if constexpr (kPacked) {
      return smem.packed[0].sequence;
    } else {
      return p;
    }
  }
  FA_DEVICE int first_query() const { return kPacked ? smem.packed[0].sequence.q_begin : 0; }
  FA_DEVICE int first_key() const { return kPacked ? smem.packed[0].sequence.k_begin : 0; }
  FA_DEVICE int rows_k() const { return kPacked ? smem.packed[0].sequence.rows_k : p.seqlen_k; }
  FA_DEVICE int scratch_begin() const {
    return attn::scratch_begin<kPacked>(p, first_query(), place().batch_idx, kBlockM);
  }

  FA_DEVICE int key_begin() const { return place().n_block * kBlockN; }
  FA_DEVICE int head_begin() const { return place().kv_head_idx * order.group; }

  FA_DEVICE QueryBlock first() const { return visible_from({head_begin(), first_block}); }
  FA_DEVICE bool is_valid(const QueryBlock& at) const {
    return at.head_idx < head_begin() + order.group;
  }

  // The next block at or after `at` with something to do. A CTA that has to take its turn takes it
  // in hidden blocks as well.
  FA_DEVICE QueryBlock visible_from(QueryBlock at) const {
    for (;; ++at.m_block) {
      if (at.m_block >= end_block)
        at = {at.head_idx + (first_block < end_block ? 1 : order.group), first_block};
      if (!is_valid(at)) return at;
      if (!kTensor || params.turns != nullptr) return at;
      constexpr int kSize = kMaskSummaryBlock;
#pragma unroll
      for (int m = 0; m < kBlockM; m += kSize)
#pragma unroll
        for (int n = 0; n < kBlockN; n += kSize)
          if (order.summary.entry(place().batch_idx, at.head_idx, at.m_block * kBlockM + m,
                                  (key_begin() + n) / kSize) != -INFINITY)
            return at;
    }
  }

  // Enqueues the copies of K and V.
  FA_DEVICE void load_keys() const {
    const auto [n_block, kv_head_idx, batch_idx] = place();
    const int row = n_block * kBlockN + CopyKv::row(threadIdx.x), col = CopyKv::col(threadIdx.x);
    const auto* gK = static_cast<const uint16_t*>(p.key) + batch_idx * p.key_stride[0] +
                     kv_head_idx * p.key_stride[1] + (first_key() + row) * p.key_stride[2] + col;
    const auto* gV = static_cast<const uint16_t*>(p.value) + batch_idx * p.value_stride[0] +
                     kv_head_idx * p.value_stride[1] + (first_key() + row) * p.value_stride[2] +
                     col;
    const uint32_t offset = CopyKv::smem_offset(threadIdx.x);
    CopyKv::load_bounded(sK + offset, gK, p.key_stride[2], col, p.head_dim, band().seqlen_k - row);
    CopyKv::load_bounded(sV + offset, gV, p.value_stride[2], col, p.head_dim,
                         band().seqlen_k - row);
  }

  // Enqueues the copies of Q, dO and the numbers of their rows.
  FA_DEVICE void load_queries(const QueryBlock& at, int stage) const {
    const int batch_idx = place().batch_idx;
    const int t = ptx::thread_index_again(), col = CopyQ::col(t);
    const int row_begin = at.m_block * kBlockM, row = row_begin + CopyQ::row(t);
    const uint32_t offset = CopyQ::smem_offset(t) + stage * Config::kQueryBytes;
    const auto* gQ = static_cast<const uint16_t*>(p.query) + batch_idx * p.query_stride[0] +
                     at.head_idx * p.query_stride[1] + (first_query() + row) * p.query_stride[2] +
                     col;
    const auto* gdO = static_cast<const uint16_t*>(params.grad_out) +
                      batch_idx * params.grad_out_stride[0] +
                      at.head_idx * params.grad_out_stride[1] +
                      (first_query() + row) * params.grad_out_stride[2] + col;
    CopyQ::load_bounded(sQ + offset, gQ, p.query_stride[2], col, p.head_dim, band().seqlen_q - row);
    CopyQ::load_bounded(sdO + offset, gdO, params.grad_out_stride[2], col, p.head_dim,
                        band().seqlen_q - row);
    const int64_t head = attn::head_of<kPacked>(p, batch_idx, at.head_idx);
    const int64_t stats = head * params.rows_rounded + scratch_begin() + row_begin;
    const uint32_t stat_offset = stage * Config::kStatBytes;
    static_assert(kBlockM <= kThreads);
    if (t < kBlockM / 4) {
      ptx::cp_async_cg_16(sDelta + stat_offset + t * 16, params.delta + stats + t * 4, true);
      ptx::cp_async_cg_16((kTensor ? sRest : sLse) + stat_offset + t * 16,
                          params.lse_log2 + stats + t * 4, true);
    }
    if constexpr (kTensor) {
      if (t < kBlockM)
        ptx::cp_async_ca_4(sLse + stat_offset + t * 4, p.lse + head * p.seqlen_q + row_begin + t,
                           row_begin + t < p.seqlen_q);
    }
  }

  // P^T and dS^T of the block to shared memory; with kOwnRows, the block's part of dV and dK.
  FA_DEVICE void compute_scores(const QueryBlock& block, int stage) {
    const uint32_t sQ_now = sQ + stage * Config::kQueryBytes;
    const uint32_t sdO_now = sdO + stage * Config::kQueryBytes;
    const tile::Fragment no_fragments[Config::kKeyTiles][1] = {};  // of K or V in registers
    auto nothing = [](int) {};
#pragma unroll 1
    for (int pass = 0; pass < Config::kPasses; ++pass) {
      const int key = warp() / Config::kQueryWarps * Config::kWarpKeys;
      const int query =
          warp() % Config::kQueryWarps * Config::kWarpQueries + pass * Config::kTileQueries;
      const attn::TransposedTile<Config::kKeyTiles, Config::kQueryTiles> at(
          band(), block.m_block * kBlockM + query, key_begin() + key);
      const bool cut =
          !at.is_visible(band()) || (kTensor && at.query_begin + Config::kTileQueries > p.seqlen_q);
      // Lane's addresses in K and V, in Q and dO, in P^T and dS^T, and of its numbers of the rows.
      const uint32_t a = tile::lane_offset_a<kHeadDim>(lane()) + key * kRowBytes;
      const uint32_t b = tile::lane_offset_b<kHeadDim>(lane()) + query * kRowBytes;
      const uint32_t c =
          (tile::lane_offset_c<kPairCols>(lane()) ^ (query * 2)) + key * kPairCols * 2;
      const uint32_t stats = stage * Config::kStatBytes + query * 4 + lane() % 4 * 8;

      typename Config::Scores rP, rdS;
      rP.clear();
      tile::gemm_qk<kDtype, kHeadDim, 0>(rP, no_fragments, sK + a, sQ_now + b, nothing);
      attn::exponentiate<kDtype, kTensor>(rP, p, band(), order.scale_log2, order.summary,
                                          sLse + stats, sRest + stats, at, cut, place().batch_idx,
                                          block.head_idx);
      rdS.clear();
      tile::gemm_qk<kDtype, kHeadDim, 0>(rdS, no_fragments, sV + a, sdO_now + b, nothing);
      tile::Fragment rounded[Config::kKeyTiles][Config::kQueryTiles / 2];
      tile::as_operand_a<kDtype>(rounded, rP);
      const uint32_t own_b = tile::lane_offset_b_trans<kHeadDim>(lane()) + query * kRowBytes;
      if constexpr (Config::kOwnRows) {
        tile::gemm_fragments<kDtype, kHeadDim>(rdV, rounded, sdO_now + own_b);
      } else {
        tile::store_fragments<kPairCols>(sP + c, rounded);
      }
      attn::finish_grad_scores(rdS, rP, sDelta + stats);
      if (cut || kTensor) {
        ptx::keep_order_of_accesses();  // a branch, not 64 more instructions for all
        attn::clear_hidden(rdS, rP);
      }
      tile::as_operand_a<kDtype>(rounded, rdS);
      tile::store_fragments<kPairCols>(sdS + c, rounded);
      if constexpr (Config::kOwnRows)
        tile::gemm_fragments<kDtype, kHeadDim>(rdK, rounded, sQ_now + own_b);
    }
  }

  // dV += P^T dO and dK += dS^T Q, all out of shared memory.
  FA_DEVICE void add_to_grad_keys(int stage) {
    const int key = warp() / Config::kGradKeyColWarps * 16 * Config::kGradKeyTiles;
    const int col = warp() % Config::kGradKeyColWarps * Config::kGradKeyCols;
    const uint32_t a = tile::lane_offset_a<kPairCols>(lane()) + key * kPairCols * 2;
    const uint32_t b =
        (tile::lane_offset_b_trans<kHeadDim>(lane()) ^ (col * 2)) + stage * Config::kQueryBytes;
    constexpr auto kStorage = tile::StorageA::kRowMajor;
    tile::gemm_smem<kDtype, kStorage, kPairCols, kHeadDim, kBlockM / 16>(rdV, sP + a, sdO + b);
    tile::gemm_smem<kDtype, kStorage, kPairCols, kHeadDim, kBlockM / 16>(rdK, sdS + a, sQ + b);
  }

  // Adds dQ = dS K to the accumulator of the block.
  FA_DEVICE void add_grad_query(const QueryBlock& block) const {
    const int64_t head = attn::head_of<kPacked>(p, place().batch_idx, block.head_idx);
    const int row_begin = block.m_block * kBlockM;
    unsigned *turn = nullptr, turn_of_block = 0;
    if (params.turns != nullptr) {
      // Key blocks add in ascending order, which is that of CTAs: none waits for one that has not
      // started.
      turn = params.turns + head * (params.rows_rounded / kBlockM) + scratch_begin() / kBlockM +
             block.m_block;
      turn_of_block =
          place().n_block -
          attn::key_range(band(), row_begin, min(row_begin + kBlockM, band().seqlen_q)).first /
              kBlockN;
      if (threadIdx.x == 0) {
        while (ptx::ld_acquire_gpu_global_u32(turn) != turn_of_block) {
        }
      }
      __syncthreads();  // it is the CTA's turn
    }
#pragma unroll 1
    for (int pass = 0; pass < Config::kGradQueryPasses; ++pass) {
      const int row = warp() / Config::kGradQueryColWarps * 16 * Config::kGradQueryTiles +
                      pass * Config::kGradQueryRows;
      const int col = warp() % Config::kGradQueryColWarps * Config::kGradQueryCols;
      constexpr auto kStorage = tile::StorageA::kTransposed;
      typename Config::GradQuery rdQ;
      rdQ.clear();
      tile::gemm_smem<kDtype, kStorage, kPairCols, kHeadDim, kBlockN / 16>(
          rdQ, sdS + (tile::lane_offset_a_of<kStorage, kPairCols>(lane()) ^ (row * 2)),
          sK + (tile::lane_offset_b_trans<kHeadDim>(lane()) ^ (col * 2)));
      float* gdQ = params.grad_query_accum +
                   (head * params.rows_rounded + scratch_begin() + row_begin + row) * kHeadDim +
                   col * 16 + lane() * 4;
#pragma unroll
      for (int m = 0; m < Config::kGradQueryTiles; ++m)
#pragma unroll
        for (int n = 0; n < Config::kGradQueryCols / 8; ++n)
          ptx::red_global_add_v4_f32(gdQ + (m * (kHeadDim / 8) + n) * 128, rdQ.x[m][n]);
    }
    if (params.turns != nullptr) {
      __syncthreads();  // all have added, before the next CTA may
      if (threadIdx.x == 0) ptx::st_release_gpu_global_u32(turn, turn_of_block + 1);
    }
  }

  // dK and dV to global memory, through the tiles of K and V for 16-byte stores.
  FA_DEVICE void store_grad_keys() {
#pragma unroll
    for (int m = 0; m < Config::kGradKeyTiles; ++m)
#pragma unroll
      for (int n = 0; n < Config::kGradKeyCols / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) rdK.x[m][n][e] *= p.scale;
    const int t = ptx::thread_index_again(), warp = t / 32;
    const int key = warp / Config::kGradKeyColWarps * 16 * Config::kGradKeyTiles;
    const int col = warp % Config::kGradKeyColWarps * Config::kGradKeyCols;
    if constexpr (kPacked) {
      // Rows that the sequence has and does not use: theirs were products of 0 with anything.
      const int keys_left = band().seqlen_k - key_begin() - key - t % 32 / 4;
#pragma unroll
      for (int r = 0; r < 2 * Config::kGradKeyTiles; ++r) {
#pragma unroll
        for (int i = 0; i < Config::kGradKeyCols / 4; ++i) {
          if (8 * r < keys_left) continue;
          rdK.x[r / 2][i / 2][2 * (r % 2) + i % 2] = 0.f;
          rdV.x[r / 2][i / 2][2 * (r % 2) + i % 2] = 0.f;
        }
      }
    }
    const uint32_t c = (tile::lane_offset_c<kHeadDim>(t % 32) ^ (col * 2)) + key * kRowBytes;
    tile::store_rounded<kDtype, kHeadDim>(sK + c, rdK);
    tile::store_rounded<kDtype, kHeadDim>(sV + c, rdV);
    __syncthreads();  // dK and dV are whole
    const KeyPlace at = place();
    auto store = [&](void* grad, const int64_t* stride, const uint16_t* tile, bool aligned) {
      const int key_begin = at.n_block * kBlockN;
      store_rows<kBlockN, kHeadDim, kThreads>(
          static_cast<uint16_t*>(grad) + at.batch_idx * stride[0] + at.kv_head_idx * stride[1] +
              (first_key() + key_begin) * stride[2],
          stride[2], reinterpret_cast<const unsigned char*>(tile), p.head_dim, rows_k() - key_begin,
          aligned, t);
    };
    store(params.grad_key, params.grad_key_stride, smem.sK[0], order.grad_key_aligned);
    store(params.grad_value, params.grad_value_stride, smem.sV[0], order.grad_value_aligned);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.min_ctas)
    bwd_sm80_kernel(const __grid_constant__ BwdParams params,
                    const __grid_constant__ BwdOrder order) {
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const KeyPlace place = Config::kPacked
                             ? bwd_sm80::packed_place_of_cta(params.fwd.packed, order, blockIdx.x)
                             : bwd_sm80::place_of_cta(order, blockIdx.x);
  if (Config::kPacked && place.n_block < 0) return;
  KeyBlock<Config> cta(params, order, place, smem_raw);
  cta.load_keys();
  QueryBlock block = cta.first();
  if (cta.is_valid(block)) cta.load_queries(block, 0);
  ptx::cp_async_commit_group();

  int stage = 0;
#pragma unroll 1
  while (cta.is_valid(block)) {
    QueryBlock next;
    auto load_next = [&](int to_stage) {
      next = cta.visible_from({block.head_idx, block.m_block + 1});
      if (cta.is_valid(next)) cta.load_queries(next, to_stage);
      ptx::cp_async_commit_group();
    };
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the block has landed for all; all are done with the one before, so that
                      // its stage, sP and sdS may be overwritten
    if constexpr (kStages == 2) load_next(stage ^ 1);
    cta.compute_scores(block, stage);
    __syncthreads();  // P^T and dS^T of all warps are there
    if constexpr (!Config::kOwnRows) {
      cta.add_to_grad_keys(stage);
      if constexpr (kStages == 1) __syncthreads();  // all have read Q and dO
    }
    if constexpr (kStages == 1) load_next(0);
    cta.add_grad_query(block);
    block = next;
    if constexpr (kStages == 2) stage ^= 1;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // all have read K; and where there was no block, the copies have landed
  cta.store_grad_keys();
}

bool takes_pieces(const void* tensor, const int64_t* stride, int head_dim) {
  return head_dim % 8 == 0 && reinterpret_cast<uintptr_t>(tensor) % 16 == 0 && stride[0] % 8 == 0 &&
         stride[1] % 8 == 0 && stride[2] % 8 == 0;
}

template <class Config>
cudaError_t launch_config(const BwdParams& params, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(typename Config::SharedStorage);
  static_assert(kSmemBytes <= bwd_sm80::smem_bytes_of(Config::kSmemSize));
  const auto kernel = bwd_sm80_kernel<Config>;
  if (const cudaError_t status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
      status != cudaSuccess) {
    return status;
  }
  const FwdParams& p = params.fwd;
  const int64_t n_blocks = (int64_t{p.seqlen_k} + Config::kBlockN - 1) / Config::kBlockN;
  const int64_t ctas =
      p.heads_k * (Config::kPacked ? p.packed.max_tiles : int64_t{p.batch} * n_blocks);
  if (ctas > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  BwdOrder order;
  order.n_blocks = attn::FastDivide(n_blocks);
  order.heads_k = attn::FastDivide(p.heads_k);
  order.group = p.heads_q / p.heads_k;
  order.scale_log2 = p.scale * kLog2E;
  order.grad_key_aligned = takes_pieces(params.grad_key, params.grad_key_stride, p.head_dim);
  order.grad_value_aligned = takes_pieces(params.grad_value, params.grad_value_stride, p.head_dim);
  if constexpr (Config::kMaskMode == MaskMode::kTensor) order.summary = attn::MaskSummaryView(p);
  kernel<<<static_cast<unsigned>(ctas), Config::kThreads, kSmemBytes, stream>>>(params, order);
  return cudaGetLastError();
}

// Calls f(integral_constant head_dim instance, integral_constant SmemSize) for the tile that serves
// head_dim on this device.
template <class F>
cudaError_t dispatch_tile(int head_dim, int smem_limit_bytes, F&& f) {
  SmemSize size = SmemSize::kSmall;
  for (const SmemSize larger : {SmemSize::kMedium, SmemSize::kLarge})
    if (smem_limit_bytes >= bwd_sm80::smem_bytes_of(larger)) size = larger;
  constexpr std::integral_constant<SmemSize, SmemSize::kSmall> small;
  constexpr std::integral_constant<SmemSize, SmemSize::kMedium> medium;
  if (head_dim <= 64) return f(std::integral_constant<int, 64>{}, small);
  if (head_dim <= 128) {
    constexpr std::integral_constant<int, 128> d;
    return size == SmemSize::kSmall ? f(d, small) : f(d, medium);
  }
  return dispatch_value<SmemSize::kSmall, SmemSize::kMedium, SmemSize::kLarge>(
      size, [&](auto size) { return f(std::integral_constant<int, 256>{}, size); });
}

}  // namespace

BwdShape describe_bwd_sm80(int head_dim, int smem_limit_bytes) {
  BwdShape shape{};
  dispatch_tile(head_dim, smem_limit_bytes, [&](auto d, auto size) {
    using Config = BwdConfig<d(), size(), Dtype::kFloat16, MaskMode::kBand>;
    shape = {{Config::kBlockM, Config::kBlockN, Config::kThreads,
              static_cast<int>(sizeof(typename Config::SharedStorage))},
             Config::kHeadDim,
             GradQueryLayout::kRows};
    return cudaSuccess;
  });
  return shape;
}

cudaError_t launch_bwd_sm80(const BwdParams& params, int smem_limit_bytes, cudaStream_t stream) {
  const MaskMode mode =
      params.fwd.mask_mode == MaskMode::kFull ? MaskMode::kBand : params.fwd.mask_mode;
  const bool packed = params.fwd.packed.cu_seqlens_q != nullptr;
  return dispatch_tile(params.fwd.head_dim, smem_limit_bytes, [&](auto d, auto size) {
    if (packed) {
      return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.fwd.dtype, [&](auto dtype) {
        return launch_config<BwdConfig<d(), size(), dtype(), MaskMode::kBand, true>>(params,
                                                                                     stream);
      });
    }
    return dispatch_value<MaskMode::kBand, MaskMode::kTensor>(mode, [&](auto mask_mode) {
      return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.fwd.dtype, [&](auto dtype) {
        return launch_config<BwdConfig<d(), size(), dtype(), mask_mode()>>(params, stream);
      });
    });
  });
}

}  // namespace fa
