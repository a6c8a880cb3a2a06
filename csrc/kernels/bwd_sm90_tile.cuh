// What the producer and the consumers of bwd_sm90.cu share: tile sizes, shared memory, and the work
// of a CTA.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "../attn/packed.cuh"
#include "../attn/scheduler.cuh"
#include "../tile/fragment.cuh"
#include "../tile/pipeline.cuh"
#include "../tile/tma.cuh"
#include "launch.h"

namespace fa::bwd_sm90 {

// How the two consumer warpgroups share the products of a query block.
enum class BwdSplit {
  kKeys,   // each has 64 of 128 keys
  kRoles,  // one has scores and dV of all 64 keys, the other dS and dK
};

struct BwdTile {
  BwdSplit split;
  int block_m;  // queries of a block, in parts of 64
  int stages;   // of the rings of Q and dO
};

constexpr BwdTile bwd_tile(int head_dim) {
  if (head_dim == 64) return {BwdSplit::kKeys, 128, 2};
  if (head_dim == 128) return {BwdSplit::kKeys, 64, 2};
  return {BwdSplit::kRoles, 64, 2};
}

// A key block and the query blocks that see it.
struct BwdWork {
  int n_block, kv_head_idx, batch_idx;
  int first, end;            // query blocks that see some of its keys
  int full_first, full_end;  // those of them that see all, and need no mask
  int visits;                // of query blocks, over all heads of the group

  // Lengths and band, and where the sequence begins in the tensors and in the scratch of a head.
  FA_DEVICE const FwdParams& band(const FwdParams& p) const { return p; }
  static constexpr int q_begin() { return 0; }
  static constexpr int k_begin() { return 0; }
  static constexpr int scratch_begin() { return 0; }

  template <class Config>
  static FA_DEVICE BwdWork of_cta(const BwdParams& params, const attn::TileOrder& order) {
    const FwdParams& p = params.fwd;
    const attn::WorkTile tile = attn::tile_of_cta(order, blockIdx.x);
    // The order counts down the rows of its tiles: the first CTAs get the first keys.
    const int n_block = order.m_blocks - 1 - tile.m_block;
    return of_block<Config>(p, p, {n_block, tile.head_idx, tile.batch_idx, 0, 0, 0, 0, 0});
  }
  // Band: see attn/block_info.cuh.
  template <class Config, class Band>
  static FA_DEVICE BwdWork of_block(const FwdParams& p, const Band& band, BwdWork work) {
    const int key = work.n_block * Config::kBlockN;
    const attn::QueryRange rows =
        attn::query_range(band, key, min(key + Config::kBlockN, band.seqlen_k));
    if (rows.first >= rows.end) return work;
    work.first = rows.first / Config::kBlockM;
    work.end = (rows.end - 1) / Config::kBlockM + 1;
    // Tails, of queries as well, are hidden by the mask.
    const bool whole = key + Config::kBlockN <= band.seqlen_k;
    work.full_first = (rows.full_first + Config::kBlockM - 1) / Config::kBlockM;
    work.full_end = whole ? rows.full_end / Config::kBlockM : 0;
    work.visits = (work.end - work.first) * (p.heads_q / p.heads_k);
    return work;
  }
};

// Of packed sequences; blocks count from the beginning of this one.
struct PackedBwdWork : BwdWork {
  attn::Sequence sequence;
  int first_scratch_row;  // in that of a head
  int keys, rows;         // from the key block, and from the last query block on, to the end

  FA_DEVICE const attn::Sequence& band(const FwdParams&) const { return sequence; }
  FA_DEVICE int q_begin() const { return sequence.q_begin; }
  FA_DEVICE int k_begin() const { return sequence.k_begin; }
  FA_DEVICE int scratch_begin() const { return first_scratch_row; }

  // The CTAs past the last tile get key block kNoBlock.
  static constexpr int kNoBlock = -1;
  template <class Config>
  static FA_DEVICE PackedBwdWork of_cta(const BwdParams& params, const attn::TileOrder& order) {
    const FwdParams& p = params.fwd;
    PackedTile tile;
    int kv_head_idx;
    if (!attn::packed_tile(p.packed, order, blockIdx.x, tile, kv_head_idx))
      return {{kNoBlock, 0, 0, 0, 0, 0, 0, 0}, {}, 0, 0, 0};
    const attn::Sequence sequence = attn::sequence_of<true>(p, tile.sequence);
    const int first_scratch_row =
        attn::scratch_begin<true>(p, sequence.q_begin, tile.sequence, Config::kBlockM);
    const BwdWork work = of_block<Config>(p, sequence, {tile.block, kv_head_idx, 0, 0, 0, 0, 0, 0});
    return {work, sequence, first_scratch_row, sequence.seqlen_k - tile.block * Config::kBlockN,
            sequence.seqlen_q - (work.end - 1) * Config::kBlockM};
  }
};

// What the producer tells the consumers about a query block of a head of the group.
struct Visit {
  int64_t row;                 // its first one, counted over batch, heads and rows_rounded
  int masked_row;              // its row in the sequence if the scores need a mask, -1 otherwise
  unsigned key_blocks_before;  // that add to its dQ, with deterministic adding
};

template <int kHeadDim_, Dtype kDtype_, bool kPacked_ = false>
struct BwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr bool kPacked = kPacked_;
  static constexpr BwdTile kTile = bwd_tile(kHeadDim);
  static constexpr BwdSplit kSplit = kTile.split;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kSplit == BwdSplit::kKeys ? 128 : 64;
  static constexpr int kParts = kBlockM / 64;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr uint32_t kRowBytes = kHeadDim * 2;
  static constexpr uint32_t kQBytes = kBlockM * kRowBytes, kKvBytes = kBlockN * kRowBytes;
  static constexpr uint32_t kDsBytes = 64 * kBlockN * 2, kStatBytes = kBlockM * 4;
  static constexpr uint32_t kDqBytes = kBlockM * kHeadDim * 4;
  // Without room for it in shared memory, dQ goes to global memory straight from registers.
  static constexpr bool kDqInSmem = kSplit == BwdSplit::kKeys;

  static_assert(kStages == 2, "dS and dQ have as many, and share the position");

  using Ring = tile::RingPosition<kStages>;
  using Work = std::conditional_t<kPacked, PackedBwdWork, BwdWork>;
  struct SharedStorage {
    alignas(1024) uint16_t sK[kBlockN * kHeadDim];  // dK on its way out
    alignas(1024) uint16_t sV[kBlockN * kHeadDim];  // dV on its way out
    alignas(1024) uint16_t sQ[kStages][kBlockM * kHeadDim];
    alignas(1024) uint16_t sDo[kStages][kBlockM * kHeadDim];
    alignas(1024) uint16_t sDs[kStages][kParts][kBlockN * 64];  // panels [keys][queries]
    alignas(1024) float sDq[kDqInSmem ? kStages : 1]
                           [kDqInSmem ? kBlockM * kHeadDim : 1];  // as in global memory
    uint4 sP[kDqInSmem ? 1 : 4][kDqInSmem ? 1 : 128];             // P as the threads hold it
    alignas(16) float sLse[kStages][kBlockM], sDelta[kStages][kBlockM];
    uint64_t full_k, full_v;
    uint64_t full_q[kStages], empty_q[kStages];
    uint64_t full_do[kStages], empty_do[kStages];
    uint64_t full_ds[kStages], full_p;
    uint64_t full_dq[kStages], empty_dq[kStages];
    Work work;
    // By state of the ring of Q: twice the stages, since dQ is added after Q has been released.
    Visit visit[2 * kStages];
    // Packed sequences only: where copies complete that may bring rows of the next sequence.
    uint64_t landed_k, landed_q[kStages], landed_do[kStages];
  };
  static_assert(sizeof(SharedStorage) <= 232448, "227 KiB");

  using Scores = tile::Accumulator<1, 8>;  // of 64 keys (rows) and the 64 queries of a part
  using Operand = uint32_t[4][4];          // the same, packed
};

struct Maps {
  CUtensorMap query, key, value, grad_out, grad_key, grad_value;
};

}  // namespace fa::bwd_sm90
