// decode_sm90.cu: decoding on Hopper for 33 rows and more, where mma.sync is slower than the
// memory; also a chunk of queries over so few key heads that only splits of the keys fill the GPU.
//
//   O = softmax(scale * Q K^T) V        LSE[m] = log sum_n exp(scale * q_m . k_n)
//
// Rows, splits and results are those of decode.cu. A CTA has two warpgroups and 128 or 64 rows:
//
//   128 rows   warpgroup 0: rows 0 to 63, warpgroup 1: rows 64 to 127; both, all 128 keys of a tile
//    64 rows   both have all rows, warpgroup g the keys 64 g to 64 g + 63 of a tile; their
//    softmaxes
//              and O are merged at the end
//
//   time ──►          tile n - 1                  tile n                      tile n + 1
//   cp.async    K(n+1) V(n)            |  K(n+2) V(n+1)             |  K(n+3) V(n+2)
//   wgmma       QK(n-1)   PV(n-2)      |  QK(n)   PV(n-1)           |  QK(n+1)   PV(n)
//   softmax               of n-1       |          of n              |            of n+1
//
//   shared      sQ [rows][head_dim], a ring of kStages tiles of keys and values, all in panels of
//   64
//               columns with 128-byte swizzle; O leaves through the ring
//
// All threads copy, by cp.async, since rows past a length or in pages that are not ours must arrive
// as zeros, whatever memory holds there. A barrier for each tile makes the copies of all visible.
//
// Needs    what DecodeParams says, head_dim up to 128, rows of query, key and value in 16-byte
// pieces.
#include <cuda_runtime.h>

#include "../ptx/sm90.cuh"
#include "../tile/mma_sm90.cuh"
#include "decode_store.cuh"
#include "decode_tile.cuh"
#include "dependent_launch.cuh"
#include "dispatch.h"
#include "shared_memory.h"

namespace fa::decode {
namespace {

template <int kHeadDim_, int kBlockM_, Dtype kDtype_>
struct DecodeSm90Config {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int kThreads = 256, kRowGroups = kBlockM / 64, kKeyWarps = 2 / kRowGroups;
  static constexpr int kBlockN = 128, kPieceN = kBlockN / kKeyWarps;  // keys of a warpgroup
  static constexpr int kStages = 384 / kHeadDim;                      // 192 KiB
  static constexpr int kRowTiles = 1;
  static constexpr int kOutCols = kHeadDim + 8;

  struct Stage {
    alignas(1024) uint16_t sK[kBlockN * kHeadDim];
    alignas(1024) uint16_t sV[kBlockN * kHeadDim];
  };
  struct SharedStorage {
    union {
      Stage stages[kStages];
      struct {
        float sO[kKeyWarps][kBlockM][kOutCols];
        float sLse[kKeyWarps][kBlockM];
      } after;
    };
    alignas(1024) uint16_t sQ[kBlockM * kHeadDim];
    int first_key, end_key;  // see narrow_to_mask
  };
  static_assert(sizeof(SharedStorage) <= 227 << 10);

  using CopyKv = tile::PanelCopy<kBlockN, kHeadDim, kThreads, kPieceN>;
  static constexpr int kCopyQThreads = kThreads;
  using CopyQ = tile::PanelCopy<kBlockM, kHeadDim, kThreads, kBlockM>;
  using Output = tile::Accumulator<1, kHeadDim / 8>;
  using Scores = tile::Accumulator<1, kPieceN / 8>;
  using Softmax = attn::OnlineSoftmax<1, false>;
};

// The same value, by a warp reduction: what ptxas has to know to be the same in a warp.
FA_DEVICE int uniform(int v) { return __reduce_max_sync(0xffffffff, v); }

template <class Config>
FA_DEVICE void attend_sm90(const DecodeParams& p, const Prepared& prepared) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages, kPieceN = Config::kPieceN;
  constexpr Dtype kDtype = Config::kDtype;
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const int lane = ptx::lane_id(), warpgroup = uniform(threadIdx.x / 128);
  const int row_group = warpgroup / Config::kKeyWarps, key_group = warpgroup % Config::kKeyWarps;
  const int warp_row = row_group * 64 + threadIdx.x / 32 % 4 * 16;

  const bool asks_memory = p.cache.seqlens != nullptr || p.mask != nullptr;  // for its keys
  if (asks_memory) wait_for_kernels_before();
  RowTile t = row_tile<Config>(p, prepared);
  if (p.mask != nullptr) narrow_to_mask<Config>(p, prepared, smem, t);
  const TileRange range = tiles_of_split(t, kBlockN, blockIdx.y, prepared.splits);
  const TileRange tiles = {uniform(range.begin), uniform(range.end)};
  if (!asks_memory) wait_for_kernels_before();

  // ---- Q, the keys of all tiles but one of the ring, and the values of all but two.
  const KvLoader<Config> loader(p, t, /*rows_aligned=*/true);
  using Pages = typename KvLoader<Config>::Pages;
  const auto load_keys = [&](int tile, const Pages& pages, int stage) {
    if (tile < tiles.end)
      loader.load_keys(tile, pages, reinterpret_cast<unsigned char*>(smem.stages[stage].sK));
  };
  const auto load_values = [&](int tile, const Pages& pages, int stage) {
    if (tile < tiles.end)
      loader.load_values(tile, pages, reinterpret_cast<unsigned char*>(smem.stages[stage].sV));
  };
  load_query<Config>(p, prepared, t, reinterpret_cast<unsigned char*>(smem.sQ));
  Pages pages = loader.find_pages(tiles.begin), pages_before = pages;
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    load_keys(tiles.begin + s, pages, s);
    if (s > 0) load_values(tiles.begin + s - 1, pages_before, s - 1);
    ptx::cp_async_commit_group();
    pages_before = pages;
    pages = loader.find_pages(tiles.begin + s + 1);
  }
  if (p.scale <= 0.f) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();  // Q has landed for all
    fold_scale<Config>(smem.sQ, p.scale);
  }
  const float scale = p.scale == 0.f ? 1.f : fabsf(p.scale), scale_log2 = scale * kLog2E;

  typename Config::Output rO;
  typename Config::Scores rS;
  typename Config::Softmax softmax;
  uint32_t rP[kPieceN / 16][4];
  rO.clear();
  constexpr uint32_t kStageStep = sizeof(typename Config::Stage) >> 4;
  constexpr uint32_t kPartBytes = kPieceN * kHeadDim * 2;
  const uint64_t desc_q =
      ptx::matrix_descriptor(ptx::smem_addr(smem.sQ) + row_group * 64 * tile::kPanelRowBytes, 0);
  const uint64_t desc_k =
      ptx::matrix_descriptor(ptx::smem_addr(smem.stages[0].sK) + key_group * kPartBytes, 0);
  const uint64_t desc_v = ptx::matrix_descriptor(
      ptx::smem_addr(smem.stages[0].sV) + key_group * kPartBytes, kPieceN * tile::kPanelRowBytes);
  const auto pin_all = [&] {
    tile::pin(rS);
    tile::pin(rP);
    tile::pin(rO);
  };

  // ---- Main loop: the softmax of a tile, while P V of the one before runs.
  int stage = 0, stage_before = kStages - 1;
  const auto open_tile = [&] {
    ptx::cp_async_wait_group<kStages - 2>();
    ptx::fence_proxy_async();  // the thread's copies, to wgmma
    __syncthreads();  // keys of this tile and values of the one before have landed for all; all
                      // have left the keys of the one before, and the values of the one before that
    pin_all();
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockM>(rS, desc_q, desc_k + stage * kStageStep);
    ptx::wgmma_commit_group();
  };
  // Behind the products, which run meanwhile.
  const auto load_ahead = [&](int tile) {
    load_keys(tile + kStages - 1, pages, stage_before);
    load_values(tile + kStages - 2, pages_before,
                stage_before == 0 ? kStages - 1 : stage_before - 1);
    ptx::cp_async_commit_group();
    pages_before = pages;
    pages = loader.find_pages(tile + kStages);
  };
  const auto enqueue_pv = [&] {
    tile::wgmma_pv<kDtype>(rO, rP, desc_v + stage_before * kStageStep);
    ptx::wgmma_commit_group();
  };
  float alpha[Config::Softmax::kRows];
  const auto exponentiate = [&](int tile) {  // whether O has to follow, by alpha
    tile::pin(rS);
    const int key = tile * kBlockN + key_group * kPieceN;
    if (key < t.full_first || key + kPieceN > t.full_end)
      hide<Config>(rS, p, prepared, t, warp_row, key);
    softmax.scan_max(rS);
    const bool outgrown = softmax.advance_reference(scale_log2, alpha);
    softmax.exponentiate(rS, scale_log2);
    return outgrown;
  };
  const auto close_tile = [&] {
    tile::pack_operand_a<kDtype>(rP, rS);
    stage_before = stage;
    stage = stage == kStages - 1 ? 0 : stage + 1;
  };
  if (tiles.begin < tiles.end) {
    open_tile();
    load_ahead(tiles.begin);
    ptx::wgmma_wait_group<0>();
    exponentiate(tiles.begin);
    close_tile();
#pragma unroll 1
    for (int tile = tiles.begin + 1; tile < tiles.end; ++tile) {
      open_tile();
      enqueue_pv();
      load_ahead(tile);
      ptx::wgmma_wait_group<1>();
      const bool outgrown = exponentiate(tile);
      ptx::wgmma_wait_group<0>();
      tile::pin(rP);
      tile::pin(rO);
      if (outgrown) softmax.scale_output(rO, alpha);
      close_tile();
    }
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async();
    __syncthreads();  // the values of the last tile have landed for all
    pin_all();
    ptx::wgmma_fence();
    enqueue_pv();
    ptx::wgmma_wait_group<0>();
    tile::pin(rO);
  }

  // Not earlier: as in decode.cu.
  let_kernel_after_start();

  // ---- O and LSE of every warp, through the ring.
  float lse[2];
  softmax.finalize(rO, scale, lse);
  __syncthreads();  // all have left the ring
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + lane / 4 + 8 * r;
    if (lane % 4 == 0) smem.after.sLse[key_group][row] = lse[r];
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d)
      *reinterpret_cast<float2*>(&smem.after.sO[key_group][row][8 * d + 2 * (lane % 4)]) =
          make_float2(rO.x[0][d][2 * r], rO.x[0][d][2 * r + 1]);
  }
  __syncthreads();  // O of all warps is there
  store<Config>(p, prepared, t, smem);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    decode_sm90_kernel(const __grid_constant__ DecodeParams p,
                       const __grid_constant__ Prepared prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  attend_sm90<Config>(p, prepared);
#endif
}

// Calls f(head_dim instance, block_m).
template <class F>
cudaError_t dispatch_tile_sm90(int head_dim, int rows, F&& f) {
  return dispatch_value<64, 128>(head_dim <= 64 ? 64 : 128, [&](auto d) {
    return dispatch_value<64, 128>(rows <= 64 ? 64 : 128, [&](auto m) { return f(d, m); });
  });
}

}  // namespace
}  // namespace fa::decode

namespace fa {

DecodeShape describe_decode_sm90(int head_dim, int rows) {
  DecodeShape shape{};
  decode::dispatch_tile_sm90(head_dim, rows, [&](auto d, auto m) {
    using Config = decode::DecodeSm90Config<d(), m(), Dtype::kFloat16>;
    shape = {{Config::kBlockM, Config::kBlockN, Config::kThreads,
              int{sizeof(typename Config::SharedStorage)}},
             Config::kHeadDim};
    return cudaSuccess;
  });
  return shape;
}

cudaError_t launch_decode_sm90(const DecodeParams& p, cudaStream_t stream) {
  const int rows = p.seqlen_q * (p.heads_q / p.heads_k);
  const cudaError_t status = decode::dispatch_tile_sm90(p.head_dim, rows, [&](auto d, auto m) {
    return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(p.dtype, [&](auto dtype) {
      using Config = decode::DecodeSm90Config<d(), m(), dtype()>;
      constexpr int kBytes = sizeof(typename Config::SharedStorage);
      if (const cudaError_t allowed =
              allow_shared_memory<decode::decode_sm90_kernel<Config>>(kBytes);
          allowed != cudaSuccess) {
        return allowed;
      }
      return launch_kernel(LaunchFeatures::kSm90, decode::decode_sm90_kernel<Config>,
                           decode::grid_of<Config>(p), Config::kThreads, kBytes, stream, p,
                           decode::prepare(p));
    });
  });
  if (status != cudaSuccess || p.num_splits == 1) return status;
  return launch_combine(p, LaunchFeatures::kSm90, stream);
}

}  // namespace fa
