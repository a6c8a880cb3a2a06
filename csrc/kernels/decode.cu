// decode.cu: attention of few queries over many keys, bound by the reading of K and V once.
//
//   O = softmax(scale * Q K^T) V        LSE[m] = log sum_n exp(scale * q_m . k_n)
//
// All queries that share a KV head, seqlen_q tokens times the query heads of the group, are the
// rows of one tile, so that one pass over the keys serves them all: row r is token r / group, head
// r % group. The keys are split over the CTAs of a row of the grid:
//
//   split 0    | K V | K V | K V |
//   split 1                      | K V | K V | K V |
//   split 2                                        | ...     O, maximum and sum of each go to
//                        combine.cu, or are merged here if their CTAs are a cluster (9.0)
//
//   a CTA      shared   a ring of kStages tiles of keys and values, all but one of them in flight
//                       (cp.async); Q starts in the last, O leaves through the first ones
//              warp     (key warp, row warp): its part of the keys of a tile, which the row warps
//                       of the part copy themselves, and 16 or 32 rows. It has a softmax and an O
//                       of its own; those of the key warps are merged at the end
//
//   time       lengths, pages asked for | wait for kernels before | Q K0 V0 K1 V1 copied, compared
//   |
//              QK0 softmax PV0, K2 V2 copied | QK1 ... | merged over warps, and over splits
//
// How many splits there are is decided on the host from shapes; which keys a split has, here, from
// the length of the sequence. Nothing outside the keys that some row of the tile sees is read:
// slots past a length, or pages left of a window, may hold anything. With a mask these are the keys
// from the first to the last that it shows, which every CTA finds for itself.
//
//   Q [batch][seqlen_q][heads_q][head_dim]   K, V [batch][capacity][heads_k][head_dim] or pages of
//   them, [pages][page_size][heads_k][head_dim], found through block_table [batch][pages]
//
// Units    strides count elements; scores are scaled into base 2 (scale * log2 e); LSE is natural.
// Needs    what DecodeParams says.
// Bounds   on an H200 the memory's bandwidth, 4.2 to 4.5 TB/s of K and V, for up to 32 rows. More
//          would be bound by mma.sync, at 40 % of its peak, and have decode_sm90.cu.
#include <cuda_runtime.h>

#include <atomic>
#include <cmath>

#include "decode_keys.cuh"
#include "decode_store.cuh"
#include "dependent_launch.cuh"
#include "dispatch.h"
#include "shared_memory.h"

namespace fa::decode {
namespace {

template <class Config>
FA_DEVICE void attend(const DecodeParams& p, const Prepared& prepared) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kWarpN = Config::kWarpN;
  constexpr int kStages = Config::kStages, kPieceN = Config::kPieceN;
  constexpr uint32_t kPieceBytes = kPieceN * kHeadDim * 2;
  constexpr int kRowTiles = Config::kRowTiles, kWarpRows = Config::kWarpRows;
  constexpr Dtype kDtype = Config::kDtype;
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  const int warp = ptx::warp_id(), lane = ptx::lane_id();
  const int key_warp = warp / Config::kRowWarps, row_warp = warp % Config::kRowWarps;

  // First: where there are dependent launches, an SM is full of CTAs, so that those of the next
  // kernel take nothing from these. They get ready on the SMs that have room, or have it again.
  let_kernel_after_start();
  const bool ahead = looks_ahead(p), compares = ahead && looks_up(p);
  if (!ahead) wait_for_kernels_before();
  auto found = ask_first<Config::kAllThreads>(p, prepared);
  const bool in_cluster = Config::kClusters && p.num_splits > 1 && p.partial_out == nullptr;
  if (in_cluster) cluster_arrive_early();  // waited for by store_in_cluster
  View view;
  view.t = row_tile<Config>(p, prepared);
  const RowTile& t = view.t;
  const TileRange& tiles = view.tiles;
  const QueryLoader<Config> query(p, prepared, t);
  const KvLoader<Config> loader(p, view, prepared.aligned, smem, key_warp * kWarpN);
  // A group of copies each, empty past the split; keys before values.
  const auto load_keys = [&](int tile, int stage) {
    if (tile < tiles.end) loader.load_keys(tile, smem.stages[stage].sK[key_warp * kWarpN]);
    ptx::cp_async_commit_group();
  };
  const auto load_values = [&](int tile, int stage) {
    if (tile < tiles.end) loader.load_values(tile, smem.stages[stage].sV[key_warp * kWarpN]);
    ptx::cp_async_commit_group();
  };

  // ---- Q, and all tiles but one of the ring. Where that turns out to be what kernels before this
  // one have changed meanwhile, once more.
#pragma unroll 1
  for (bool again = false;; again = true) {
    look<Config>(p, prepared, found, smem, view);
    if (ahead && !again) {
#pragma unroll 1
      for (int s = 0; prepared.prefetch && s < min(kStages - 1, tiles.end - tiles.begin); ++s)
        loader.prefetch(tiles.begin + s);
    }
    const int* own_pages = ptx::found_here(view.row + threadIdx.x);
    if (ahead && !again) wait_for_kernels_before();
    Lookup<Config::kAllThreads> now;
    const bool asks = compares && !again && now.ask(p, own_pages, view.pages);
    if (!again) query.load(reinterpret_cast<unsigned char*>(smem.before.sQ));
    ptx::cp_async_commit_group();
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) {
      load_keys(tiles.begin + s, s);
      load_values(tiles.begin + s, s);
    }
    if (again) break;
    ptx::cp_async_wait_group<2 * (kStages - 1)>();
    // Q has landed for all.
    if (!__syncthreads_or(asks && differs(now, view, smem))) break;
    found = now;
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // no copy is under way
  }

  if (p.scale <= 0.f) fold_scale<Config>(smem.before.sQ[0], p.scale);
  tile::Fragment rQ[kRowTiles][kHeadDim / 16];
  const uint32_t sQ_lane =
      ptx::smem_addr(smem.before.sQ[row_warp * kWarpRows]) + tile::lane_offset_a<kHeadDim>(lane);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k)
      ptx::ldmatrix_x4(rQ[m][k], (sQ_lane ^ (k * 32)) + m * 16 * kHeadDim * 2);
  __syncthreads();  // all have left Q, which the ring overwrites
  const float scale_log2 = positive_scale(p) * kLog2E;

  typename Config::Output rO;
  typename Config::Softmax softmax;
  rO.clear();
  const uint32_t sK_lane = ptx::smem_addr(smem_raw) + key_warp * kWarpN * kHeadDim * 2 +
                           tile::lane_offset_b<kHeadDim>(lane);
  const uint32_t sV_lane = ptx::smem_addr(smem.stages[0].sV[key_warp * kWarpN]) +
                           tile::lane_offset_b_trans<kHeadDim>(lane);

  // After cp.async.wait_group: what the threads of a part of the keys copied is there for all of
  // them, and all have left what the next copies overwrite. A part of one warp waits for no other,
  // but where there are many tiles: memory is 0.3 to 1 % faster with copies side by side, while the
  // first few tiles come later.
  const bool together = !Config::kLarge || tiles.end - tiles.begin > kTilesApart;
  const auto sync_part = [&] {
    if (Config::kKeyThreads > 32 || together) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  };
  auto nothing = [](int) {};
  // ---- Main loop.
  int stage = 0;
  bool fresh = true;  // O is still 0
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int next = tile + kStages - 1, next_stage = stage == 0 ? kStages - 1 : stage - 1;
    ptx::cp_async_wait_group<2 * kStages - 3>();
    sync_part();  // the keys have landed
    // So many pages are more than kTilesApart tiles: sync_part was for all warps.
    static_assert(kTablePages * KvLoader<Config>::kRun / kBlockN > kTilesApart + 1);
    if (loader.refills() && warp == 0) loader.refill_table(tile);
    load_keys(next, next_stage);

    const int key = tile * kBlockN + key_warp * kWarpN;
    const uint32_t offset = stage * sizeof(typename Config::Stage);
    stage = stage == kStages - 1 ? 0 : stage + 1;
#pragma unroll 1
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      const int piece_key = key + piece * kPieceN;
      const bool seen = piece_key < t.end && piece_key + kPieceN > t.first;
      const uint32_t piece_offset = offset + piece * kPieceBytes;
      typename Config::Scores rS;
      if (seen) {
        rS.clear();
        tile::gemm_qk<kDtype, kHeadDim, kHeadDim / 16>(rS, rQ, 0, sK_lane + piece_offset, nothing);
        if (piece_key < t.full_first || piece_key + kPieceN > t.full_end)
          hide<Config>(rS, p, prepared, t, row_warp * kWarpRows, piece_key);
        softmax.scan_max(rS);
        float alpha[2 * kRowTiles];
        if (softmax.advance_reference(scale_log2, alpha) && !(Config::kSpareRegisters && fresh))
          softmax.scale_output(rO, alpha);
        fresh = false;
        softmax.exponentiate(rS, scale_log2);
      }
      if (piece == 0) {
        ptx::cp_async_wait_group<2 * kStages - 3>();
        sync_part();  // the values have landed
        load_values(next, next_stage);
      }
      if (seen) tile::gemm_pv<kDtype>(rO, rS, sV_lane + piece_offset, nothing);
    }
  }

  // ---- O of every warp, through the ring.
  softmax.finish_sums();
  const int rows = t.rows - t.row_begin;
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // no copy to the ring is under way, and all have left it
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; ++r) {
    const int row = row_warp * kWarpRows + lane / 4 + 8 * r;
    if (row >= rows) continue;
    if (lane % 4 == 0) smem.after.sums[key_warp][row] = {softmax.row_max[r], softmax.row_sum[r]};
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d)
      *reinterpret_cast<float2*>(&smem.after.sO[key_warp][row][8 * d + 2 * (lane % 4)]) =
          make_float2(rO.x[r / 2][d][2 * (r % 2)], rO.x[r / 2][d][2 * (r % 2) + 1]);
  }
  __syncthreads();  // O of all warps is there
  if constexpr (Config::kClusters) {
    if (in_cluster) return store_in_cluster<Config>(p, prepared, t, smem);
  }
  store<Config>(p, prepared, t, smem);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

// Two CTAs of the small kind fit an SM where registers allow it.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads,
                                  Config::kThreads == 128 && !Config::kLarge ? 2 : 1)
    decode_kernel(const __grid_constant__ DecodeParams p,
                  const __grid_constant__ Prepared prepared) {
  if constexpr (kHopper ? Config::kLarge || Config::kBlockM <= kMaxSmallRows : !Config::kLarge)
    attend<Config>(p, prepared);
}

template <class Config>
constexpr int kSmemBytes = sizeof(typename Config::SharedStorage);

template <class Config>
cudaError_t allow() {
  return allow_shared_memory<decode_kernel<Config>>(kSmemBytes<Config>);
}

// The CTAs of the splits of a row of tiles are a cluster.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config;

  ClusterLaunch(dim3 grid, int threads, int smem_bytes, int cluster, cudaStream_t stream)
      : attributes{}, config{} {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = attributes[1].val.clusterDim.z = 1;
    attributes[1].val.clusterDim.y = cluster;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points into it
};

template <class Config>
cudaError_t launch_config(const DecodeParams& p, LaunchFeatures features, cudaStream_t stream) {
  if (features == LaunchFeatures::kSm90 && !Config::kLarge && Config::kBlockM > kMaxSmallRows)
    return cudaErrorInvalidValue;  // not in code for sm_90a
  if (const cudaError_t status = allow<Config>(); status != cudaSuccess) return status;
  const dim3 grid = grid_of<Config>(p);
  // Half of the SMs of a GPU of 9.0, one CTA each: 10 % of 5 us with 1024 keys. With more CTAs,
  // which start when those of the kernel before have ended, it costs 2 %.
  const bool prefetch = Config::kLarge && int64_t{grid.x} * grid.y * grid.z <= 64;
  if (p.num_splits > 1 && p.partial_out == nullptr) {
    if (!Config::kClusters) return cudaErrorInvalidValue;
    const ClusterLaunch launch(grid, Config::kThreads, kSmemBytes<Config>, p.num_splits, stream);
    return cudaLaunchKernelEx(&launch.config, decode_kernel<Config>, p, prepare(p, prefetch));
  }
  return launch_kernel(features, decode_kernel<Config>, grid, Config::kThreads, kSmemBytes<Config>,
                       stream, p, prepare(p, prefetch));
}

// Of clusters of `cluster` CTAs; 0 where the driver refuses.
template <class Config>
int count_clusters(int cluster) {
  if (!Config::kClusters || cluster > kMaxCluster) return 0;
  static std::atomic<int> known[64][kMaxCluster + 1];  // by device, plus 1
  int device;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return 0;
  std::atomic<int>& entry = known[device][cluster];
  if (const int count = entry.load(std::memory_order_relaxed); count != 0) return count - 1;
  int count = 0;
  const ClusterLaunch launch(dim3(1, cluster), Config::kThreads, kSmemBytes<Config>, cluster,
                             nullptr);
  if (allow<Config>() != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, decode_kernel<Config>, &launch.config) !=
          cudaSuccess) {
    (void)cudaGetLastError();
    count = 0;
  }
  entry.store(count + 1, std::memory_order_relaxed);
  return count;
}

// Rows of the largest tile. At head_dim 256, 128 rows do not leave room for keys; the large tiles
// leave more than 32 rows to decode_sm90.cu, but for caches whose rows it cannot take.
constexpr int most_rows(int head_dim, bool large) {
  return head_dim == 256 ? 64 : large ? 32 : 128;
}

// Calls f(head_dim instance, block_m, large).
template <class F>
cudaError_t dispatch_tile(int head_dim, int rows, bool is_large, F&& f) {
  const int instance = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  const int block_m = rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
  return dispatch_value<64, 128, 256>(instance, [&](auto d) {
    return dispatch_value<false, true>(is_large, [&](auto large) {
      return dispatch_value<16, 32, 64, 128>(block_m, [&](auto m) {
        constexpr int kMost = most_rows(d(), large());
        constexpr std::integral_constant<int, (m() < kMost ? m() : kMost)> fitting;
        return f(d, fitting, large);
      });
    });
  });
}

}  // namespace
}  // namespace fa::decode

namespace fa {

DecodeShape describe_decode(int head_dim, int rows, bool is_large) {
  DecodeShape shape{};
  decode::dispatch_tile(head_dim, rows, is_large, [&](auto d, auto m, auto large) {
    using Config = decode::DecodeConfig<d(), m(), large(), Dtype::kFloat16>;
    shape = {{Config::kBlockM, Config::kBlockN, Config::kThreads,
              int{sizeof(typename Config::SharedStorage)}},
             Config::kHeadDim};
    return cudaSuccess;
  });
  return shape;
}

int decode_clusters(int head_dim, int rows, int num_splits, bool is_large) {
  int count = 0;
  decode::dispatch_tile(head_dim, rows, is_large, [&](auto d, auto m, auto large) {
    count = decode::count_clusters<decode::DecodeConfig<d(), m(), large(), Dtype::kFloat16>>(
        num_splits);
    return cudaSuccess;
  });
  return count;
}

cudaError_t launch_decode(const DecodeParams& p, bool is_large, LaunchFeatures features,
                          cudaStream_t stream) {
  const int rows = p.seqlen_q * (p.heads_q / p.heads_k);
  const cudaError_t status =
      decode::dispatch_tile(p.head_dim, rows, is_large, [&](auto d, auto m, auto large) {
        return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(p.dtype, [&](auto dtype) {
          using Config = decode::DecodeConfig<d(), m(), large(), dtype()>;
          return decode::launch_config<Config>(p, features, stream);
        });
      });
  if (status != cudaSuccess || p.num_splits == 1 || p.partial_out == nullptr) return status;
  return launch_combine(p, features, stream);
}

}  // namespace fa
