// packed_tiles.cu: the list of tiles of a packed batch, the longest first.
//
//   lengths on the device  ->  tiles [num_tiles] of {sequence, block}
//
// A counting sort by one CTA, which visits all tiles twice:
//
//   1. count   tiles of each bucket of work      2. scan   where each bucket begins
//   3. place   each tile behind those of its bucket that came before
//
// A warp takes up to 32 neighbouring sequences, one a lane, and then their tiles, one a lane: many
// short sequences and few long ones keep the lanes equally busy.
//
// By queries, the work of a tile is the number of keys that it sees. By keys, it is the number of
// rows that see any key from there on, as far as a band lets one tile reach: that never grows from
// tile to tile of a sequence, so their order stays ascending. Deterministic adding needs that: a
// CTA waits for those of the keys before, which must have started.
#include <cuda_runtime.h>

#include "../attn/packed.cuh"
#include "dependent_launch.cuh"

namespace fa {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBuckets = 2 * kThreads;

// Calls visit(PackedTile, bucket, valid) for every tile, in whole warps; bucket 0 has the longest.
template <class Visit>
FA_DEVICE void for_each_tile(const FwdParams& p, const attn::FastDivide& unit, int block,
                             PackedBy by, Visit&& visit) {
  constexpr unsigned kAll = 0xffffffff;
  const int sequences = p.batch + 2, lane = ptx::lane_id();
  const int per_warp = min(32, (sequences + kWarps - 1) / kWarps);
#pragma unroll 1
  for (int chunk = ptx::warp_id() * per_warp; chunk < sequences; chunk += kWarps * per_warp) {
    const int own = chunk + lane;
    const bool exists = lane < per_warp && own < sequences;
    const attn::Sequence sequence = attn::sequence_of<true>(p, exists ? own : p.batch);
    const int rows = by == PackedBy::kQuery ? sequence.seqlen_q : sequence.rows_k;
    const int tiles = exists ? (rows + block - 1) / block : 0;
    int end = tiles;  // tiles of this lane's sequence and those before
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAll, end, step);
      end += lane >= step ? before : 0;
    }
    const int all = __shfl_sync(kAll, end, 31);
#pragma unroll 1
    for (int first = 0; first < all; first += 32) {
      const int tile = first + lane;
      int owner = 0;  // lanes whose tiles come before
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        owner += __shfl_sync(kAll, end, owner + step - 1) <= tile ? step : 0;
      attn::Sequence at = sequence;
      at.seqlen_q = __shfl_sync(kAll, sequence.seqlen_q, owner);
      at.seqlen_k = __shfl_sync(kAll, sequence.seqlen_k, owner);
      at.diagonal = at.seqlen_k - at.seqlen_q;
      const int index = tile - __shfl_sync(kAll, end - tiles, owner);
      const int begin = index * block;
      int64_t work;
      if (by == PackedBy::kQuery) {
        const attn::KeyRange keys = attn::key_range(at, begin, min(begin + block, at.seqlen_q));
        work = keys.end - keys.first;
      } else {
        const attn::QueryRange seen = attn::query_range(at, begin, at.seqlen_k);
        work = min(int64_t{seen.end} - seen.first, at.window_left + at.window_right + block);
      }
      const unsigned level = unit.quotient(static_cast<unsigned>(max(work, int64_t{0})));
      visit(PackedTile{chunk + owner, index}, kBuckets - 1 - static_cast<int>(level), tile < all);
    }
  }
}

// The lanes of the warp that have a tile of the same bucket, and how many of them come before.
struct Peers {
  unsigned lanes;
  int before;

  FA_DEVICE bool lead() const { return before == 0; }
};

FA_DEVICE Peers peers_of(int bucket, bool valid) {
  const unsigned lanes = __match_any_sync(0xffffffff, valid ? bucket : -1);
  return {lanes, __popc(lanes & ((1u << ptx::lane_id()) - 1))};
}

__global__ void __launch_bounds__(kThreads)
    packed_tiles_kernel(const __grid_constant__ FwdParams p, attn::FastDivide unit, int block,
                        PackedBy by, PackedTile* gTiles, int* gNumTiles) {
  __shared__ int sCount[kBuckets];  // tiles of a bucket; then where its next one goes
  __shared__ int sSums[kWarps];
  const int thread = threadIdx.x, lane = ptx::lane_id(), warp = ptx::warp_id();
  sCount[2 * thread] = sCount[2 * thread + 1] = 0;
  let_kernel_after_start();
  wait_for_kernels_before();
  __syncthreads();  // counts are 0

  bool ordered = true;
#pragma unroll 1
  for (int i = thread; i < p.batch; i += kThreads)
    ordered = ordered && p.packed.cu_seqlens_q[i] <= p.packed.cu_seqlens_q[i + 1] &&
              p.packed.cu_seqlens_k[i] <= p.packed.cu_seqlens_k[i + 1];
  for_each_tile(p, unit, block, by, [&](PackedTile, int bucket, bool valid) {
    const Peers peers = peers_of(bucket, valid);
    if (valid && peers.lead()) atomicAdd(&sCount[bucket], __popc(peers.lanes));
  });
  // Sequences that overlap are more than there is room for, and would wait for each other's turns
  // for ever: no tiles, and results are whatever memory holds.
  if (!__syncthreads_and(ordered)) {  // and all are counted
    if (thread == 0) *gNumTiles = 0;
    return;
  }

  const int first = sCount[2 * thread], second = sCount[2 * thread + 1];
  int end = first + second;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffff, end, step);
    end += lane >= step ? before : 0;
  }
  if (lane == 31) sSums[warp] = end;
  __syncthreads();  // sums of all warps are there
  static_assert(kWarps == 32, "a lane for each");
  end += __reduce_add_sync(0xffffffff, lane < warp ? sSums[lane] : 0);
  sCount[2 * thread] = end - first - second;
  sCount[2 * thread + 1] = end - second;
  if (thread == kThreads - 1) *gNumTiles = end;
  __syncthreads();  // buckets have their places

  for_each_tile(p, unit, block, by, [&](PackedTile tile, int bucket, bool valid) {
    const Peers peers = peers_of(bucket, valid);
    int place = 0;
    if (valid && peers.lead()) place = atomicAdd(&sCount[bucket], __popc(peers.lanes));
    place = __shfl_sync(0xffffffff, place, __ffs(peers.lanes) - 1) + peers.before;
    if (valid) gTiles[place] = tile;
  });
}

}  // namespace

cudaError_t launch_packed_tiles(const FwdParams& p, int block, PackedBy by, PackedTile* tiles,
                                int* num_tiles, LaunchFeatures features, cudaStream_t stream) {
  const int max_work = by == PackedBy::kQuery ? p.seqlen_k : p.seqlen_q;
  const attn::FastDivide unit(max_work / kBuckets + 1);
  return launch_kernel(features, packed_tiles_kernel, dim3(1), kThreads, 0, stream, p, unit, block,
                       by, tiles, num_tiles);
}

}  // namespace fa
