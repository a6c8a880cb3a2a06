// The wall: all that the op layer knows about the kernels. Plain structs in, cudaError_t out;
// nothing here allocates, synchronises or throws. Work is enqueued on the given stream of the
// current device.
#pragma once
#include <cuda_runtime_api.h>

#include "../params.h"

namespace fa {

// What one kernel instance takes from an SM; for the op layer and the compile report.
struct KernelShape {
  int block_m;     // query rows of a CTA
  int block_n;     // keys of a tile
  int threads;     // of a CTA
  int smem_bytes;  // dynamic shared memory of a CTA
};

enum class LaunchFeatures {
  kSm80,
  kSm90,  // programmatic dependent launch, and tiles for the shared memory of an SM of 9.0. If, and
          // only if, the device runs code compiled for 9.0a
};

// The list of tiles for a kernel on packed sequences (params.packed), the longest first; by keys, a
// sequence's tiles stay in ascending order. block: block_m of the kernel by queries, block_n by
// keys. tiles: room for packed_max_tiles.
enum class PackedBy {
  kQuery,
  kKey,
};
cudaError_t launch_packed_tiles(const FwdParams& params, int block, PackedBy by, PackedTile* tiles,
                                int* num_tiles, LaunchFeatures features, cudaStream_t stream);

// Portable forward (mma.sync, sm_80 and newer). smem_limit_bytes is the device's opt-in maximum per
// CTA; it picks the tile above head_dim 128. Lengths are 1 to kMaxSeqlen, batch and heads at least
// 1, batch * heads_q * (query blocks) at most 2^31 - 1; packed, heads_q * max_tiles. With
// MaskMode::kTensor, launch_mask_summary must have been enqueued before on the same stream, with
// packed sequences launch_packed_tiles.
constexpr int kMaxSeqlen = 2147483647 - 255;  // the end of the last block still fits an int
KernelShape describe_fwd_sm80(int head_dim, int smem_limit_bytes);
cudaError_t launch_fwd_sm80(const FwdParams& params, int smem_limit_bytes, cudaStream_t stream);

// Hopper forward (TMA and wgmma, sm_90a), for a positive scale and what ops/heuristics.h asks of
// rows. num_sms: CTAs that run at once. Lengths, grid and mask tensors as above. shape: the hint is
// followed where the instance for head_dim and mask_mode has it.
enum class FwdTileShape : int {
  kTall,   // as many query rows as the registers hold; the others have 128
  kWide,   // more keys a block
  kSmall,  // fewer, for short rows of blocks
};
KernelShape describe_fwd_sm90(int head_dim, FwdTileShape shape, MaskMode mask_mode);
cudaError_t launch_fwd_sm90(const FwdParams& params, FwdTileShape shape, int num_sms,
                            cudaStream_t stream);

// Finds what every kMaskSummaryBlock x kMaskSummaryBlock block of a mask tensor holds
// (attn/mask_summary.cuh), so that attention kernels skip what is hidden, add what is constant and
// read bits where every element is 0 or -inf. launch_value_range, which it calls for additive
// masks, reads query, key and value: may attention skip what a mask moves far down as well?
int64_t mask_summary_bytes(const FwdParams& params);
cudaError_t launch_mask_summary(const FwdParams& params, cudaStream_t stream);
cudaError_t launch_value_range(const FwdParams& params, cudaStream_t stream);

// Backward, in three launches on one stream: launch_bwd_pre, one of the two kernels, and
// launch_bwd_post, which rounds grad_query_accum to grad_query. grad_key and grad_value are summed
// over the query heads of a key head inside a CTA. With params.turns, key blocks add to a block of
// query rows in a fixed order, so that results repeat bit by bit.
//
// How a head's grad_query_accum [rows_rounded][cols_rounded] is cut into accumulators of mma.m16n8:
enum class GradQueryLayout : int {
  kRows,        // of 16 rows and 8 columns: block (row / 16) * (cols_rounded / 8) + col / 8
  kTransposed,  // of 16 columns and 8 rows: block (row / 8) * (cols_rounded / 16) + col / 16
};
struct BwdShape {
  KernelShape kernel;
  int cols_rounded;  // the instance of head_dim
  GradQueryLayout layout;
};
// Portable (mma.sync, sm_80 and newer); takes everything.
BwdShape describe_bwd_sm80(int head_dim, int smem_limit_bytes);
cudaError_t launch_bwd_sm80(const BwdParams& params, int smem_limit_bytes, cudaStream_t stream);
// Hopper (TMA and wgmma, sm_90a): no mask tensor, scale > 0, rows of every tensor in 16-byte
// pieces.
BwdShape describe_bwd_sm90(int head_dim);
cudaError_t launch_bwd_sm90(const BwdParams& params, int num_sms, cudaStream_t stream);

// The first calls the second for additive masks.
cudaError_t launch_bwd_pre(const BwdParams& params, int block_m, cudaStream_t stream);
cudaError_t launch_bwd_row_sums(const BwdParams& params, cudaStream_t stream);
cudaError_t launch_bwd_post(const BwdParams& params, int block_m, GradQueryLayout layout,
                            cudaStream_t stream);

// Decoding: few queries over many keys, from a cache or from tensors (mma.sync, sm_80 and newer).
// The rows of a tile are all queries that share a key head: seqlen_q times the query heads of a
// group. The keys are split over num_splits CTAs; more than one leave params.partial_*, which
// launch_combine, enqueued by launch_decode itself, merges.
struct DecodeShape {
  KernelShape kernel;
  int cols_rounded;  // the instance of head_dim
};
// rows: seqlen_q times the query heads of a group. More than block_m take several CTAs. large: a
// CTA has an SM to itself; only in code for sm_90a, which has the others for up to kMaxSmallRows
// rows.
constexpr int kMaxSmallRows = 32;
DecodeShape describe_decode(int head_dim, int rows, bool large);
// How many clusters of num_splits CTAs run at once on the current device; 0 where the kernel does
// not merge in clusters or they are too large: one of 8 starts later than its merging saves. Asks
// the driver once and then knows.
constexpr int kMaxCluster = 4;
int decode_clusters(int head_dim, int rows, int num_splits, bool large);
// batch is at most 65535, num_splits 128, heads_k * ceil(rows / block_m) at most 2^31 - 1.
cudaError_t launch_decode(const DecodeParams& params, bool large, LaunchFeatures features,
                          cudaStream_t stream);
// The same on Hopper (wgmma, sm_90a): scale > 0, head_dim up to 128, rows of query, key and value
// in 16-byte pieces, also where head_dim is no multiple of 8.
DecodeShape describe_decode_sm90(int head_dim, int rows);
cudaError_t launch_decode_sm90(const DecodeParams& params, cudaStream_t stream);
cudaError_t launch_combine(const DecodeParams& params, LaunchFeatures features,
                           cudaStream_t stream);
// Writes new keys and values to the cache. Those past its capacity, or in no page of it, are
// dropped.
cudaError_t launch_append_kv(const AppendParams& params, LaunchFeatures features,
                             cudaStream_t stream);

}  // namespace fa
