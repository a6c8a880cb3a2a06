// decode_sm90.cu: decoding on Hopper for 33 rows and more, where mma.sync is slower than the
// memory; also a chunk of queries over so few key heads that only splits of the keys fill the GPU.
//
//   O = softmax(scale * Q K^T) V        LSE[m] = log sum_n exp(scale * q_m . k_n)
//
// Rows, splits and results are those of decode.cu. A CTA has two warpgroups that compute, on 128 or
// 64 rows, and one that copies:
//
//   128 rows   warpgroup 0: rows 0 to 63, warpgroup 1: rows 64 to 127; both, all 128 keys of a tile
//    64 rows   both have all rows, warpgroup g the keys 64 g to 64 g + 63 of a tile; what they
//              have is merged at the end
//
//   time ──►
//   all              what was looked up ahead is compared (decode_keys.cuh) behind the first copies
//   warpgroup 2      cp.async   Q | K0 | V0 | K1 | V1 | K2 ...   waits empty, signals full
//   warpgroup 0, 1   wgmma      QK0 |     | QK1 PV0  | QK2 PV1 ...
//                    softmax        | of 0     | of 1     | of 2
//
//   shared      sQ [rows][head_dim] and a ring of kStages tiles of keys and values, in panels of
//               64 columns with 128-byte swizzle; O leaves through the ring
//
// Copies are cp.async and not TMA, since rows past a length or in pages that are not ours must
// arrive as zeros, whatever memory holds there. They have threads of their own because wgmma needs
// a proxy fence behind them, and the fence of a thread waits for all its copies, those of later
// tiles too.
//
// Shapes and units are those of decode.cu; a tile has 128 keys.
//
// Needs    what DecodeParams says, scale > 0, head_dim up to 128, rows of query, key and value in
//          16-byte pieces.
#include <cuda_runtime.h>

#include "../ptx/sm90.cuh"
#include "../tile/mma_sm90.cuh"
#include "../tile/pipeline.cuh"
#include "decode_keys.cuh"
#include "decode_store.cuh"
#include "dependent_launch.cuh"
#include "dispatch.h"
#include "shared_memory.h"

namespace fa::decode {
namespace {

template <int kHeadDim_, int kBlockM_, Dtype kDtype_>
struct DecodeSm90Config {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int kThreads = 256, kCopyThreads = 128;  // that compute, that copy
  static constexpr int kAllThreads = kThreads + kCopyThreads;
  static constexpr int kRowGroups = kBlockM / 64, kKeyWarps = 2 / kRowGroups;
  static constexpr int kBlockN = 128, kPieceN = kBlockN / kKeyWarps;  // keys of a warpgroup
  static constexpr int kStages = 384 / kHeadDim;                      // 192 KiB
  static constexpr int kRowTiles = 1, kOutCols = kHeadDim + 8;
  static constexpr bool kSpareRegisters = true;  // see KvLoader
  // The register file is dealt out again between those that copy and those that compute.
  static constexpr int kCopyRegisters = 56, kComputeRegisters = 224;
  static_assert(kCopyThreads * kCopyRegisters + kThreads * kComputeRegisters <=
                    65536 / kAllThreads / 8 * 8 * kAllThreads,
                "setmaxnreg would wait for ever");

  struct Stage {
    alignas(1024) uint16_t sK[kBlockN * kHeadDim];
    alignas(1024) uint16_t sV[kBlockN * kHeadDim];
  };
  struct SharedStorage {
    union {
      Stage stages[kStages];
      struct {
        float sO[kKeyWarps][kBlockM][kOutCols];
        attn::PartSum sums[kKeyWarps][kBlockM];
      } after;
    };
    alignas(1024) uint16_t sQ[kBlockM * kHeadDim];
    uint64_t full_q, full_k[kStages], full_v[kStages], empty_k[kStages], empty_v[kStages];
    int first_key, end_key;    // see narrow_to_mask
    int keys_before;           // see look
    int full_first, full_end;  // see compute
    int table[kTablePages];    // see look
  };
  static_assert(sizeof(SharedStorage) <= 227 << 10);

  using Ring = tile::RingPosition<kStages>;
  using CopyKv = tile::PanelCopy<kBlockN / (kCopyThreads / 32), kHeadDim, 32, kPieceN>;
  using CopyQ = tile::PanelCopy<kBlockM, kHeadDim, kCopyThreads, kBlockM>;
  static constexpr int kCopyQThreads = kAllThreads;  // QueryLoader::load turns none away: only the
                                                     // copying threads get there
  using Output = tile::Accumulator<1, kHeadDim / 8>;
  using Scores = tile::Accumulator<1, kPieceN / 8>;
  using Softmax = attn::OnlineSoftmax<1, false>;
};

// The same value, by a warp reduction: what ptxas has to know to be the same in a warp.
FA_DEVICE int uniform(int v) { return __reduce_max_sync(0xffffffff, v); }

FA_DEVICE void wait(uint64_t& barrier, uint32_t phase) {
  ptx::mbarrier_try_wait_parity(ptx::smem_addr(&barrier), phase);
}

template <class Config>
FA_DEVICE void init_barriers(typename Config::SharedStorage& smem, bool again) {
  const auto init = [&](uint64_t& barrier, int count) {
    if (again) ptx::mbarrier_inval(ptx::smem_addr(&barrier));
    ptx::mbarrier_init(ptx::smem_addr(&barrier), count);
  };
  if (threadIdx.x == 0) {
    init(smem.full_q, Config::kCopyThreads);
    for (int s = 0; s < Config::kStages; ++s) {
      init(smem.full_k[s], Config::kCopyThreads);
      init(smem.full_v[s], Config::kCopyThreads);
      init(smem.empty_k[s], Config::kThreads / 32);
      init(smem.empty_v[s], Config::kThreads / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // before anybody waits
}

// The warpgroup that copies.
template <class Config>
struct Copier {
  using Loader = KvLoader<Config>;
  using Storage = typename Config::SharedStorage;

  FA_DEVICE Copier(const DecodeParams& params, const View& what, Storage& storage)
      : view(what),
        smem(storage),
        loader(params, what, /*rows_aligned=*/true, storage, first_row()) {}

  // A warp copies the same rows of every tile, which are in two pages at most.
  static FA_DEVICE int first_row() {
    return threadIdx.x % Config::kCopyThreads / 32 * Config::CopyKv::kRows;
  }
  static FA_DEVICE void* own_rows(uint16_t* tile) {
    return reinterpret_cast<unsigned char*>(tile) + Config::CopyKv::rows_offset(first_row());
  }

  static FA_DEVICE void signal(uint64_t& barrier) {
    ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_addr(&barrier));
  }

  FA_DEVICE void load_keys(int tile, int stage) {
    loader.load_keys(tile, own_rows(smem.stages[stage].sK));
    signal(smem.full_k[stage]);
  }
  FA_DEVICE void load_values(int tile, int stage) {
    loader.load_values(tile, own_rows(smem.stages[stage].sV));
    signal(smem.full_v[stage]);
  }

  // Q and the first tile, which waits for no stage. Without one nobody waits for Q.
  FA_DEVICE void begin(const QueryLoader<Config>& query) {
    const TileRange& tiles = view.tiles;
    if (tiles.begin >= tiles.end) return;
    query.load(reinterpret_cast<unsigned char*>(smem.sQ));
    signal(smem.full_q);
    load_keys(tiles.begin, 0);
    load_values(tiles.begin, 0);
  }

  // Waits until nothing of this is under way.
  FA_DEVICE void finish() {
    if (view.tiles.begin >= view.tiles.end) return;
    wait(smem.full_q, 0);
    wait(smem.full_k[0], 0);
    wait(smem.full_v[0], 0);
  }

  // The other tiles: use 0 of stage 0 was begin's.
  FA_DEVICE void go_on() {
    typename Config::Ring pos;
#pragma unroll 1
    for (int tile = view.tiles.begin + 1; tile < view.tiles.end; ++tile) {
      pos.advance();
      wait(smem.empty_k[pos.stage()], pos.phase() ^ 1);
      // All warps have issued the keys of the tile that was in this stage, and so all before it.
      if (loader.refills() && first_row() == 0) loader.refill_table(tile - Config::kStages);
      load_keys(tile, pos.stage());
      wait(smem.empty_v[pos.stage()], pos.phase() ^ 1);
      load_values(tile, pos.stage());
    }
  }

  const View& view;
  Storage& smem;
  const Loader loader;
};

// The two warpgroups that compute.
template <class Config>
FA_DEVICE void compute(const DecodeParams& p, const Prepared& prepared, const RowTile& t,
                       const TileRange& range, typename Config::SharedStorage& smem) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kPieceN = Config::kPieceN;
  constexpr Dtype kDtype = Config::kDtype;
  using Ring = typename Config::Ring;
  if (threadIdx.x == 0) {  // there are no registers for them
    smem.full_first = t.full_first;
    smem.full_end = t.full_end;
  }
  ptx::bar_sync(1, Config::kThreads);
  const TileRange tiles = {uniform(range.begin), uniform(range.end)};
  const int warpgroup = uniform(threadIdx.x / 128);
  const int row_group = warpgroup / Config::kKeyWarps, key_group = warpgroup % Config::kKeyWarps;
  // Of the warp's first row; found again where it is needed.
  const auto warp_row = [] { return ptx::thread_index_again() / 32 % (kBlockM / 16) * 16; };
  const float scale_log2 = p.scale * kLog2E;

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

  Ring pos;
  const auto release = [](uint64_t& barrier) {  // once for each warp, after its reads
    if (ptx::elect_sync()) ptx::mbarrier_arrive(ptx::smem_addr(&barrier));
  };
  const auto enqueue_qk = [&] {
    tile::pin(rS);
    tile::pin(rP);
    tile::pin(rO);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockM>(rS, desc_q, desc_k + pos.stage() * kStageStep);
    ptx::wgmma_commit_group();
  };
  const auto enqueue_pv = [&](Ring at) {
    tile::wgmma_pv<kDtype>(rO, rP, desc_v + at.stage() * kStageStep);
    ptx::wgmma_commit_group();
  };
  float alpha[Config::Softmax::kRows];
  const auto exponentiate = [&](int tile) {  // whether O has to follow, by alpha
    tile::pin(rS);
    release(smem.empty_k[pos.stage()]);
    const int key = tile * kBlockN + key_group * kPieceN;
    if (key < smem.full_first || key + kPieceN > smem.full_end)
      hide<Config>(rS, p, prepared, t, warp_row(), key);
    softmax.scan_max(rS);
    const bool outgrown = softmax.advance_reference(scale_log2, alpha);
    softmax.exponentiate(rS, scale_log2);
    return outgrown;
  };
  // Copies have landed, and are known here; wgmma reads through another proxy.
  const auto wait_for = [&](uint64_t& barrier, uint32_t phase) {
    wait(barrier, phase);
    ptx::fence_proxy_async();
  };
  if (tiles.begin < tiles.end) {
    wait(smem.full_q, 0);
    wait_for(smem.full_k[pos.stage()], pos.phase());
    enqueue_qk();
    ptx::wgmma_wait_group<0>();
    exponentiate(tiles.begin);
    tile::pack_operand_a<kDtype>(rP, rS);
    // The softmax of a tile, while P V of the one before runs.
#pragma unroll 1
    for (int tile = tiles.begin + 1; tile < tiles.end; ++tile) {
      const Ring before = pos;
      pos.advance();
      wait(smem.full_v[before.stage()], before.phase());
      wait_for(smem.full_k[pos.stage()], pos.phase());
      enqueue_qk();
      enqueue_pv(before);
      ptx::wgmma_wait_group<1>();
      const bool outgrown = exponentiate(tile);
      ptx::wgmma_wait_group<0>();
      tile::pin(rP);
      tile::pin(rO);
      release(smem.empty_v[before.stage()]);
      if (outgrown) softmax.scale_output(rO, alpha);
      tile::pack_operand_a<kDtype>(rP, rS);
    }
    wait_for(smem.full_v[pos.stage()], pos.phase());
    tile::pin(rP);
    tile::pin(rO);
    ptx::wgmma_fence();
    enqueue_pv(pos);
    ptx::wgmma_wait_group<0>();
    tile::pin(rO);
  }

  // ---- O of every warp, through the ring.
  softmax.finish_sums();
  ptx::bar_sync(1, Config::kThreads);  // both have left the ring
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int lane = ptx::lane_id(), row = warp_row() + lane / 4 + 8 * r;
    if (lane % 4 == 0) smem.after.sums[key_group][row] = {softmax.row_max[r], softmax.row_sum[r]};
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d)
      *reinterpret_cast<float2*>(&smem.after.sO[key_group][row][8 * d + 2 * (lane % 4)]) =
          make_float2(rO.x[0][d][2 * r], rO.x[0][d][2 * r + 1]);
  }
  ptx::bar_sync(1, Config::kThreads);  // O of all warps is there
  store<Config>(p, prepared, t, smem);
}

template <class Config>
__global__ void __launch_bounds__(Config::kAllThreads, 1)
    decode_sm90_kernel(const __grid_constant__ DecodeParams p,
                       const __grid_constant__ Prepared prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  let_kernel_after_start();  // first, as in decode.cu
  const bool copies = ptx::warpgroup_id() == 2;
  View view;
  view.t = row_tile<Config>(p, prepared);
  const QueryLoader<Config> query(p, prepared, view.t);
  Copier<Config> copier(p, view, smem);
  const bool ahead = looks_ahead(p), compares = ahead && looks_up(p);
  if (!ahead) wait_for_kernels_before();
  auto found = ask_first<Config::kAllThreads>(p, prepared);
  // The first copies; where these are of what kernels before this one have changed meanwhile, once
  // more. Before the roles part, so that each barrier stands at one place.
#pragma unroll 1
  for (bool again = false;; again = true) {
    init_barriers<Config>(smem, again);
    look<Config>(p, prepared, found, smem, view);
    const int* own_pages = ptx::found_here(view.row + threadIdx.x);
    if (ahead && !again) wait_for_kernels_before();
    Lookup<Config::kAllThreads> now;
    const bool asks = compares && !again && now.ask(p, own_pages, view.pages);
    if (copies) copier.begin(query);
    if (!compares || again || !__syncthreads_or(asks && differs(now, view, smem))) break;
    found = now;
    if (copies) copier.finish();
    __syncthreads();  // no copy is under way
  }
  if (copies) {
    ptx::setmaxnreg_dec<Config::kCopyRegisters>();
    copier.go_on();
  } else {
    ptx::setmaxnreg_inc<Config::kComputeRegisters>();
    compute<Config>(p, prepared, view.t, view.tiles, smem);
  }
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
    shape = {{Config::kBlockM, Config::kBlockN, Config::kAllThreads,
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
                           decode::grid_of<Config>(p), Config::kAllThreads, kBytes, stream, p,
                           decode::prepare(p));
    });
  });
  if (status != cudaSuccess || p.num_splits == 1) return status;
  return launch_combine(p, LaunchFeatures::kSm90, stream);
}

}  // namespace fa
