// What the producer and the consumers of fwd_sm90.cu share: tile sizes, shared memory, and what
// they tell each other.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "../attn/packed.cuh"
#include "../attn/softmax.cuh"
#include "../tile/fragment.cuh"
#include "../tile/pipeline.cuh"
#include "launch.h"

namespace fa::sm90 {

struct FwdTile {
  int consumers;  // warpgroups of 64 query rows
  int block_n;    // keys of a block
  int stages;     // of the rings of K and V
  int q_stages;   // of the ring of Q
};

// Chosen by measurement on an H200; see benchmarks/results/README.md. With a mask tensor, blocks
// are those of the mask summary.
constexpr FwdTile fwd_tile(int head_dim, FwdTileShape shape, MaskMode mask_mode) {
  if (head_dim == 64 && mask_mode == MaskMode::kTensor) return FwdTile{3, 64, 4, 2};
  if (head_dim == 64)
    return shape == FwdTileShape::kTall ? FwdTile{3, 128, 4, 2} : FwdTile{2, 128, 4, 2};
  if (head_dim == 128) {
    return shape == FwdTileShape::kTall   ? FwdTile{3, 64, 4, 2}
           : shape == FwdTileShape::kWide ? FwdTile{2, 128, 2, 2}
                                          : FwdTile{2, 64, 4, 2};
  }
  return FwdTile{2, 64, 2, 1};
}

// Key blocks of a range of query rows.
struct alignas(16) BlockRange {
  int first, last;            // those with visible keys; none when first > last
  int full_first, full_last;  // those of them that need no mask
};

// What the producer tells the consumers about a tile: it has the time for the arithmetic, some 800
// cycles, which the consumers would spend between two tiles.
template <int kConsumers>
struct TileInfo {
  BlockRange own[kConsumers];  // of each warpgroup
  int row;                     // the first one of the tile; kNoTile after the last tile
  int head_idx, batch_idx;
  int first, last;  // blocks that the CTA loads; with a mask tensor, first is 0 and last + 1 their
                    // number
};
// Of packed sequences; row counts from the beginning of this one.
template <int kConsumers>
struct PackedTileInfo : TileInfo<kConsumers> {
  attn::Sequence sequence;
};

// Of packed sequences, what the producer knows of its next tile; its registers are too few to keep
// it. m_block is -1 past the last one.
struct NextTile {
  attn::WorkTile work;
  attn::Sequence sequence;
};
struct Nothing {};

// With a mask tensor, what a stage of K and V holds.
template <int kConsumers>
struct BlockInfo {
  int n;                    // key block
  float entry[kConsumers];  // of the mask summary, for the rows of each warpgroup; -inf as well
                            // where the band hides the block
};
constexpr int kNoTile = -1;

template <int kHeadDim_, FwdTileShape kShape, Dtype kDtype_, MaskMode kMaskMode,
          bool kPacked_ = false>
struct FwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kShape, kMaskMode);
  static constexpr bool kTensor = kMaskMode == MaskMode::kTensor, kPacked = kPacked_;
  static_assert(!kTensor || !kPacked);
  static constexpr int kConsumers = kTile.consumers, kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = kTile.block_n, kStages = kTile.stages, kQStages = kTile.q_stages;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // The register file is dealt out again between one producer and the consumers.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : kTensor ? 56 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kTensor ? 152 : 160;
  static constexpr uint32_t kQBytes = kBlockM * kHeadDim * 2, kKvBytes = kBlockN * kHeadDim * 2;
  // With two buffers of Q, O leaves through the rows of Q that it belongs to. With one, the next Q
  // is needed before O has left: then O has a buffer of its own, 128 columns of it at a time.
  static constexpr bool kOutputInQ = kQStages == 2;
  static constexpr int kOutCols = kOutputInQ ? kHeadDim : 128;
  static constexpr int kOutRows = kOutputInQ ? kBlockM : 64;  // between the panels of O
  static_assert(!kTensor || kBlockN == kMaskSummaryBlock);
  // A warpgroup that passes over the blocks of others holds at most one more.
  static_assert((kBlockM - 64 + kBlockN - 1) / kBlockN + 1 <= kStages);

  using Ring = tile::RingPosition<kStages>;
  using QRing = tile::RingPosition<kQStages>;
  using Tile = std::conditional_t<kPacked, PackedTileInfo<kConsumers>, TileInfo<kConsumers>>;
  struct SharedStorage {
    alignas(1024) uint16_t sQ[kQStages][kBlockM * kHeadDim];
    alignas(1024) uint16_t sK[kStages][kBlockN * kHeadDim];
    alignas(1024) uint16_t sV[kStages][kBlockN * kHeadDim];
    alignas(1024) uint16_t sO[kOutputInQ ? 1 : kConsumers][kOutputInQ ? 1 : 64 * kOutCols];
    uint64_t full_q[kQStages][kConsumers], empty_q[kQStages];
    uint64_t full_k[kStages], empty_k[kStages];
    uint64_t full_v[kStages], empty_v[kStages];
    BlockInfo<kConsumers> block[kTensor ? kStages : 1];
    Tile tile[2];  // that Q belongs to; by turns, whatever the buffers of Q
    std::conditional_t<kPacked, NextTile, Nothing> next;
  };

  using Output = tile::Accumulator<1, kHeadDim / 8>;
  using Scores = tile::Accumulator<1, kBlockN / 8>;
  using Softmax = attn::OnlineSoftmax<1, kTensor>;
};

struct Maps {
  CUtensorMap query, key, value, out;
};

// Where CTAs get their tiles from: the first is that of their index, the others are drawn from a
// counter that is 0 between launches, or follow at the distance of the grid where there is none.
struct TileQueue {
  unsigned* counter;
};

// Band: see attn/block_info.cuh.
template <int kBlockN, class Band>
FA_DEVICE BlockRange block_range(const Band& p, int row, int rows) {
  const attn::KeyRange keys = attn::key_range(p, min(row, p.seqlen_q), min(row + rows, p.seqlen_q));
  if (keys.first >= keys.end) return {0, -1, 0, -1};
  return {keys.first / kBlockN, (keys.end - 1) / kBlockN, (keys.full_first + kBlockN - 1) / kBlockN,
          keys.full_end / kBlockN - 1};
}

}  // namespace fa::sm90
