// packed_tiles.cu: the list of tiles of a packed batch, the longest first.
//
//   lengths on the device  ->  tiles [num_tiles] of {sequence, block}
//
// Lengths, [batch + 1] starts and [batch] keys in use, count rows; a block has as many as a tile of
// the kernel that reads the list.
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
//
// By keys, where a head of all sequences does not fit in L2 and lengths are nearly equal, the list
// has sections of sequences that do, each with its longest tiles first: D 256 of 8 x 2048 tokens
// took 802 us instead of 833. Lengths of 69 to 3792 lost 6 to 7 %, as the last section kept too few
// SMs busy beside its longest tile.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "../attn/packed.cuh"
#include "dependent_launch.cuh"

namespace fa {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBuckets = 2 * kThreads;
constexpr int kMaxSections = 64;
constexpr int64_t kSectionBytes = int64_t{32} << 20;  // half the L2 of an H200, which is two parts
constexpr int kNoSections = std::numeric_limits<int>::max();

// `levels` buckets for each section. More work never comes behind less, for all that is rounded.
struct Buckets {
  int last_section, levels;
  float sections_per_row, levels_per_row;

  // longest: the most work of a tile.
  FA_DEVICE Buckets(int section_rows, int total, unsigned longest)
      : last_section(min((total - 1) / section_rows, kMaxSections - 1)),
        levels(kBuckets / (last_section + 1)),
        sections_per_row(1.f / section_rows),
        levels_per_row(levels / (longest + 1.f)) {}

  FA_DEVICE int operator()(int first_row, int work) const {
    const int section = min(static_cast<int>(first_row * sections_per_row), last_section);
    const int level = min(static_cast<int>(work * levels_per_row), levels - 1);
    return (section + 1) * levels - 1 - level;
  }
};

// Calls visit(PackedTile, bucket, valid) for every tile, in whole warps; the first bucket has the
// longest of the first section.
template <class Visit>
FA_DEVICE void for_each_tile(const FwdParams& p, const Buckets& bucket, int block, PackedBy by,
                             Visit&& visit) {
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
      const int first_row = __shfl_sync(kAll, sequence.q_begin, owner);
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
      visit(PackedTile{chunk + owner, index},
            bucket(first_row, static_cast<int>(max(work, int64_t{0}))), tile < all);
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
    packed_tiles_kernel(const __grid_constant__ FwdParams p, int section_rows, int block,
                        PackedBy by, PackedTile* gTiles, int* gNumTiles) {
  __shared__ int sCount[kBuckets];  // tiles of a bucket; then where its next one goes
  __shared__ int sSums[kWarps];
  __shared__ unsigned sLongest;
  const int thread = threadIdx.x, lane = ptx::lane_id(), warp = ptx::warp_id();
  sCount[2 * thread] = sCount[2 * thread + 1] = 0;
  if (thread == 0) sLongest = 0;
  let_kernel_after_start();
  wait_for_kernels_before();
  __syncthreads();  // all are 0

  // A tile by queries works on keys, one by keys on queries. Nobody has checked the numbers.
  const bool by_query = by == PackedBy::kQuery;
  const int* cu_seqlens = by_query ? p.packed.cu_seqlens_k : p.packed.cu_seqlens_q;
  const unsigned total = by_query ? p.seqlen_k : p.seqlen_q;
  const auto rows_between = [&](int i, int j) {
    return min(static_cast<unsigned>(cu_seqlens[j]) - static_cast<unsigned>(cu_seqlens[i]), total);
  };
  bool ordered = true;
  unsigned longest = 0;
#pragma unroll 1
  for (int i = thread; i < p.batch; i += kThreads) {
    ordered = ordered && p.packed.cu_seqlens_q[i] <= p.packed.cu_seqlens_q[i + 1] &&
              p.packed.cu_seqlens_k[i] <= p.packed.cu_seqlens_k[i + 1];
    longest = max(longest, rows_between(i, i + 1));
  }
  longest = __reduce_max_sync(0xffffffff, longest);
  if (lane == 0 && longest > 0) atomicMax(&sLongest, longest);
  // Sequences that overlap are more than there is room for, and would wait for each other's turns
  // for ever: no tiles, and results are whatever memory holds.
  if (!__syncthreads_and(ordered)) {  // and the longest is known
    if (thread == 0) *gNumTiles = 0;
    return;
  }
  longest = sLongest;
  const uint64_t rows = rows_between(0, p.batch);
  const bool nearly_equal = uint64_t{longest} * p.batch <= rows + rows / 8;
  const Buckets buckets(nearly_equal ? section_rows : kNoSections, total, longest);
  for_each_tile(p, buckets, block, by, [&](PackedTile, int bucket, bool valid) {
    const Peers peers = peers_of(bucket, valid);
    if (valid && peers.lead()) atomicAdd(&sCount[bucket], __popc(peers.lanes));
  });
  __syncthreads();  // all are counted

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

  for_each_tile(p, buckets, block, by, [&](PackedTile tile, int bucket, bool valid) {
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
  int section_rows = kNoSections;
  if (by == PackedBy::kKey) {
    // Q, dO and dQ of the query heads of a key head.
    const int64_t row_bytes = int64_t{8} * p.head_dim * (p.heads_q / p.heads_k);
    section_rows = static_cast<int>(std::max<int64_t>(kSectionBytes / row_bytes, 1));
  }
  return launch_kernel(features, packed_tiles_kernel, dim3(1), kThreads, 0, stream, p, section_rows,
                       block, by, tiles, num_tiles);
}

}  // namespace fa
