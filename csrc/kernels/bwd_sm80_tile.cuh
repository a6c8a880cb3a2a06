// What stands around the main loop of bwd_sm80.cu: tile sizes, shared memory, and the place of a
// CTA.
#pragma once
#include "../attn/mask_transposed.cuh"
#include "../attn/packed.cuh"
#include "../attn/scheduler.cuh"
#include "../tile/fragment.cuh"

namespace fa::bwd_sm80 {

// How the warps share each product. S^T [kBlockN][kBlockM]: in tiles of 16 key_tiles keys and 8
// query_tiles queries. dK, dV [kBlockN][D]: 16 grad_key_tiles keys a warp, the rest across columns.
// dQ [kBlockM][D]: 16 grad_query_tiles rows a warp, grad_query_warps warps one below the other.
struct BwdTile {
  int warps;
  int block_m;   // query rows of a block
  int block_n;   // keys
  int stages;    // of the ring
  int min_ctas;  // per SM, for the register limit
  int key_tiles;
  int query_tiles;
  int grad_key_tiles;
  int grad_query_tiles;
  int grad_query_warps;
};

// What shared memory a CTA gets picks the tile above head_dim 64: 227 KiB on 9.0, 163 on 8.0, 99 on
// 8.6 and 8.9.
enum class SmemSize { kSmall, kMedium, kLarge };
constexpr int smem_bytes_of(SmemSize size) {
  return 1024 * (size == SmemSize::kLarge ? 227 : size == SmemSize::kMedium ? 163 : 99);
}

// Those for 227 KiB are chosen by measurement on an H200, and so is the order of the products. No
// faster, or slower by up to 5 %: more queries a warp in S^T (less traffic from shared memory), a
// warp's own part of P^T and dS^T kept in registers above D 64, dQ one block behind (one barrier
// less), and exponentials between the instructions of dP^T.
constexpr BwdTile bwd_tile(int head_dim, SmemSize size) {
  if (head_dim == 64) return BwdTile{4, 64, 128, 1, 2, 2, 4, 2, 2, 2};
  if (head_dim == 128) {
    if (size == SmemSize::kSmall) return BwdTile{4, 64, 64, 1, 1, 2, 4, 2, 2, 2};
    return BwdTile{8, 64, 128, 2, 1, 2, 4, 2, 2, 2};
  }
  if (size == SmemSize::kLarge) return BwdTile{8, 128, 64, 1, 1, 2, 4, 2, 2, 2};
  if (size == SmemSize::kMedium) return BwdTile{8, 64, 64, 1, 1, 2, 2, 2, 2, 2};
  return BwdTile{4, 32, 32, 1, 1, 1, 2, 2, 2, 1};
}

// The keys of a CTA.
struct KeyPlace {
  int n_block;
  int kv_head_idx;
  int batch_idx;
};

// In shared memory, as registers do not suffice.
struct PackedPlace {
  KeyPlace place;
  attn::Sequence sequence;
};

template <int kHeadDim_, SmemSize kSize, Dtype kDtype_, MaskMode kMaskMode_, bool kPacked_ = false>
struct BwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr SmemSize kSmemSize = kSize;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr MaskMode kMaskMode = kMaskMode_;
  static constexpr bool kPacked = kPacked_;  // see attn/packed.cuh
  static_assert(!kPacked || kMaskMode == MaskMode::kBand);
  static constexpr BwdTile kTile = bwd_tile(kHeadDim, kSize);
  static constexpr int kWarps = kTile.warps, kThreads = 32 * kWarps, kStages = kTile.stages;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;

  // S^T: kKeyWarps x kQueryWarps warps, each in kPasses tiles one beside the other.
  static constexpr int kKeyTiles = kTile.key_tiles, kWarpKeys = 16 * kKeyTiles;
  static constexpr int kQueryTiles = kTile.query_tiles, kTileQueries = 8 * kQueryTiles;
  static constexpr int kKeyWarps = kBlockN / kWarpKeys, kQueryWarps = kWarps / kKeyWarps;
  static constexpr int kWarpQueries = kBlockM / kQueryWarps, kPasses = kWarpQueries / kTileQueries;
  // dK and dV.
  static constexpr int kGradKeyTiles = kTile.grad_key_tiles;
  static constexpr int kGradKeyWarps = kBlockN / (16 * kGradKeyTiles);
  static constexpr int kGradKeyColWarps = kWarps / kGradKeyWarps;
  static constexpr int kGradKeyCols = kHeadDim / kGradKeyColWarps;  // of a warp
  // dQ, in kGradQueryPasses tiles one below the other.
  static constexpr int kGradQueryTiles = kTile.grad_query_tiles;
  static constexpr int kGradQueryWarps = kTile.grad_query_warps;
  static constexpr int kGradQueryRows = 16 * kGradQueryTiles * kGradQueryWarps;  // of a pass
  static constexpr int kGradQueryPasses = kBlockM / kGradQueryRows;
  static constexpr int kGradQueryColWarps = kWarps / kGradQueryWarps;
  static constexpr int kGradQueryCols = kHeadDim / kGradQueryColWarps;  // of a warp
  // P^T and dS^T of a warp are operands of its own dK and dV.
  static constexpr bool kOwnRows = kQueryWarps == 1 && kGradKeyColWarps == 1;
  static_assert(!kOwnRows || kKeyTiles == kGradKeyTiles);

  static_assert(kKeyWarps * kQueryWarps == kWarps && kPasses * kTileQueries == kWarpQueries);
  static_assert(kGradQueryPasses * kGradQueryRows == kBlockM);

  static constexpr int kPairCols = kBlockM < 64 ? 64 : kBlockM;  // the swizzle wants 64
  struct SharedStorage {
    alignas(1024) uint16_t sK[kBlockN][kHeadDim];  // dK on the way out
    uint16_t sV[kBlockN][kHeadDim];                // dV on the way out
    uint16_t sQ[kStages][kBlockM][kHeadDim];
    uint16_t sdO[kStages][kBlockM][kHeadDim];
    uint16_t sdS[kBlockN][kPairCols];
    uint16_t sP[kOwnRows ? 1 : kBlockN][kPairCols];
    alignas(16) float lse[kStages][kBlockM];  // in base 2; with a mask tensor natural, and what
    float delta[kStages][kBlockM];            // BwdParams::lse_log2 adds to it in rest
    float rest[kMaskMode == MaskMode::kTensor ? kStages : 1][kBlockM];
    PackedPlace packed[kPacked ? 1 : 0];
  };
  static constexpr uint32_t kQueryBytes = kBlockM * kHeadDim * 2, kStatBytes = kBlockM * 4;

  using Scores = tile::Accumulator<kKeyTiles, kQueryTiles>;
  using GradKey = tile::Accumulator<kGradKeyTiles, kGradKeyCols / 8>;
  using GradQuery = tile::Accumulator<kGradQueryTiles, kGradQueryCols / 8>;
};

// What the host works out for all CTAs. CTAs start in the order of their index: key blocks run
// fastest, so that neighbours read the same Q and dO from L2, and first those that a causal band
// leaves the most queries to.
struct BwdOrder {
  attn::FastDivide n_blocks, heads_k;
  int group;  // query heads of a key head
  float scale_log2;
  bool grad_key_aligned, grad_value_aligned;  // rows take 16-byte stores
  attn::MaskSummaryView summary;              // with MaskMode::kTensor
};

FA_DEVICE KeyPlace place_of_cta(const BwdOrder& order, unsigned cta) {
  const unsigned pair = order.n_blocks.quotient(cta), batch = order.heads_k.quotient(pair);
  return {static_cast<int>(cta - pair * order.n_blocks.divisor),
          static_cast<int>(pair - batch * order.heads_k.divisor), static_cast<int>(batch)};
}

// The same for packed sequences; n_block is -1 past the last tile.
FA_DEVICE KeyPlace packed_place_of_cta(const PackedSequences& packed, const BwdOrder& order,
                                       unsigned cta) {
  PackedTile tile;
  int kv_head_idx;
  if (!attn::packed_tile(packed, order.heads_k, cta, tile, kv_head_idx)) return {-1, 0, 0};
  return {tile.block, kv_head_idx, tile.sequence};
}

}  // namespace fa::bwd_sm80
