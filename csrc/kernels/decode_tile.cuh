// The tiles of decode.cu: shapes and shared memory, the rows of a CTA and the keys that they see,
// and how Q gets to shared memory.
#pragma once
#include <type_traits>

#include "../attn/merge.cuh"
#include "../attn/paged_kv.cuh"
#include "../attn/scheduler.cuh"
#include "../attn/softmax.cuh"
#include "../tile/copy.cuh"
#include "../tile/mma_sm80.cuh"
#include "launch.h"

namespace fa::decode {

struct DecodeTile {
  int row_tiles;  // 16-row tiles of a warp
  int row_warps;
  int key_warps;
  int block_n;  // keys of a tile
  int piece_n;  // keys that a warp takes at once
  int stages;
};

// A CTA has an SM of 9.0 to itself, with 192 KiB for its ring (large). On other devices, and where
// so many CTAs follow each other that two at once are better, it makes do with 96 KiB. Two 16-row
// tiles a warp read keys and values from shared memory half as often, but with 32 rows they take
// all registers of an SM: the CTAs that merge splits then wait for these to end, and the next ones
// for them (5 % of 14 us, 16 queries and 8192 keys). At head_dim 256 there are no registers.
constexpr DecodeTile decode_tile(int head_dim, int block_m, bool large) {
  const int row_tiles = block_m > 32 && head_dim <= 128 ? 2 : 1;
  const int row_warps = block_m / (16 * row_tiles), warps = large ? 8 : 4;
  const int block_n = (large ? 16384 : 8192) / head_dim;
  const int piece_n = head_dim == 64 ? 32 : 16;
  const int key_warps =
      warps / row_warps < block_n / piece_n ? warps / row_warps : block_n / piece_n;
  return DecodeTile{row_tiles, row_warps, key_warps, block_n, piece_n, /*stages=*/3};
}

constexpr int kTilesApart = 16;   // see attend
constexpr int kTablePages = 512;  // of a sequence, in shared memory at a time

// What the host finds out for all CTAs.
struct Prepared {
  attn::FastDivide heads;   // KV heads
  attn::FastDivide group;   // query heads of a KV head
  attn::FastDivide splits;  // num_splits
  bool aligned;             // rows of query, key and value come in pieces of 16 bytes
  bool out_aligned;         // those of out too
  int pages_of_sequence;    // 0 if there are none, or more than kTablePages
  bool prefetch;            // the kernel before leaves room for this one to start beside it
};

inline Prepared prepare(const DecodeParams& p, bool prefetch = false) {
  const bool whole = p.head_dim % 8 == 0;
  const int pages = ((p.cache.capacity - 1) >> p.cache.page_shift) + 1;
  return {attn::FastDivide(p.heads_k),
          attn::FastDivide(p.heads_q / p.heads_k),
          attn::FastDivide(p.num_splits),
          inputs_in_pieces(p),
          whole && in_pieces(p.out, p.out_stride),
          p.cache.block_table != nullptr && pages <= kTablePages ? pages : 0,
          prefetch};
}

template <class Config>
dim3 grid_of(const DecodeParams& p) {
  const int64_t rows = int64_t{p.seqlen_q} * (p.heads_q / p.heads_k);
  const int64_t m_blocks = (rows + Config::kBlockM - 1) / Config::kBlockM;
  return dim3(p.heads_k * m_blocks, p.num_splits, p.batch);
}

template <int kHeadDim_, int kBlockM_, bool kLarge_, Dtype kDtype_>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_;
  static constexpr bool kLarge = kLarge_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr DecodeTile kTile = decode_tile(kHeadDim, kBlockM, kLarge);
  static constexpr int kRowTiles = kTile.row_tiles, kWarpRows = 16 * kRowTiles;
  static constexpr int kRowWarps = kTile.row_warps, kKeyWarps = kTile.key_warps;
  static constexpr int kThreads = 32 * kRowWarps * kKeyWarps;
  static constexpr int kAllThreads = kThreads;
  static constexpr int kKeyThreads = 32 * kRowWarps;  // that read the same keys, and copy them
  static constexpr int kBlockN = kTile.block_n, kWarpN = kBlockN / kKeyWarps;
  static constexpr int kStages = kTile.stages;
  static constexpr int kPieceN = kTile.piece_n, kPieces = kWarpN / kPieceN;
  static constexpr int kOutCols = kHeadDim + 8;  // rows of a quad's columns in different banks
  static_assert(kRowWarps * kWarpRows == kBlockM && kPieces * kPieceN == kWarpN);
  static constexpr bool kSpareRegisters = kHeadDim <= 128 && kBlockM <= 32;  // see KvLoader

  struct Stage {
    uint16_t sK[kBlockN][kHeadDim];
    uint16_t sV[kBlockN][kHeadDim];
  };
  // Whether splits can merge in a cluster: where there is shared memory left for their parts.
  static constexpr bool kClusters = kLarge && kBlockM * kHeadDim <= 4096;
  static constexpr int kParts = kBlockM * kHeadDim / 8 + kMaxCluster;
  struct Parts {
    float x[kParts][8];
    attn::PartSum sums[kParts];
  };
  struct NoParts {};
  struct SharedStorage {
    union {
      Stage stages[kStages];
      struct {
        unsigned char ring[sizeof(Stage) * (kStages - 1)];
        uint16_t sQ[kBlockM][kHeadDim];  // until it is in registers
      } before;
      struct {
        float sO[kKeyWarps][kBlockM][kOutCols];
        attn::PartSum sums[kKeyWarps][kBlockM];
      } after;
    };
    alignas(16) std::conditional_t<kClusters, Parts, NoParts> parts;  // see store_in_cluster
    int first_key, end_key;                                           // see narrow_to_mask
    int keys_before;                                                  // see look
    int table[kTablePages];                                           // see look
  };
  static_assert(sizeof(SharedStorage) <= (kLarge ? 227 << 10 : 99 << 10));
  static_assert(sizeof(uint16_t[kBlockM][kHeadDim]) <= sizeof(Stage));

  using CopyKv = tile::TileCopy<kWarpN, kHeadDim, kKeyThreads>;
  static constexpr int kCopyQThreads = kThreads < 8 * kBlockM ? kThreads : 8 * kBlockM;
  using CopyQ = tile::TileCopy<kBlockM, kHeadDim, kCopyQThreads>;
  using Output = tile::Accumulator<kRowTiles, kHeadDim / 8>;  // [kWarpRows][kHeadDim]
  using Scores = tile::Accumulator<kRowTiles, kPieceN / 8>;   // [kWarpRows][kPieceN]
  using Softmax = attn::OnlineSoftmax<kRowTiles, false>;
};

// The main loop's: see fold_scale.
FA_DEVICE float positive_scale(const DecodeParams& p) {
  return p.scale == 0.f ? 1.f : fabsf(p.scale);
}

// The rows of a CTA and the keys that they see.
struct RowTile {
  int batch_idx;
  int kv_head_idx;
  int row_begin;
  int rows;  // of the whole problem: row_begin + kBlockM may be past them

  // What depends on the length of the sequence: see see_keys.
  int length;        // keys of the sequence
  int64_t diagonal;  // as in FwdParams
  // As in attn::KeyRange, over all rows.
  int first;
  int end;
  int full_first;
  int full_end;
};

FA_DEVICE int first_key(const DecodeParams& p, const RowTile& t, int token) {
  return static_cast<int>(attn::clamp(token + t.diagonal - p.window_left, 0, t.length));
}
FA_DEVICE int end_key(const DecodeParams& p, const RowTile& t, int token) {
  return static_cast<int>(attn::clamp(token + t.diagonal + p.window_right + 1, 0, t.length));
}

template <class Config>
FA_DEVICE RowTile row_tile(const DecodeParams& p, const Prepared& prepared) {
  RowTile t{};
  const int m_block = prepared.heads.quotient(blockIdx.x);
  t.kv_head_idx = blockIdx.x - m_block * p.heads_k;
  t.batch_idx = blockIdx.z;
  t.row_begin = m_block * Config::kBlockM;
  t.rows = p.seqlen_q * static_cast<int>(prepared.group.divisor);
  return t;
}

template <class Config>
FA_DEVICE void see_keys(const DecodeParams& p, const Prepared& prepared, int length, RowTile& t) {
  t.length = length;
  t.diagonal = int64_t{t.length} - p.seqlen_q + p.diagonal_shift;
  const int top = prepared.group.quotient(t.row_begin);
  const int bottom = prepared.group.quotient(min(t.row_begin + Config::kBlockM, t.rows) - 1);
  t.first = first_key(p, t, top);
  t.end = end_key(p, t, bottom);
  t.full_first = first_key(p, t, bottom);
  t.full_end = end_key(p, t, top);
}

FA_DEVICE const uint8_t* mask_row(const DecodeParams& p, const RowTile& t, int token) {
  return static_cast<const uint8_t*>(p.mask) + t.batch_idx * p.mask_stride[0] +
         token * p.mask_stride[1];
}

// First and last + 1 of the bytes [first, end) of a row of the mask that are not 0, for the keys of
// one thread: pieces of 16 bytes, after a head that is not aligned, dealt out to all threads.
FA_DEVICE void scan_mask_row(const uint8_t* row, int first, int end, int threads, int& low,
                             int& high) {
  const auto see = [&](int key, uint32_t byte) {
    if (byte == 0) return;
    low = min(low, key);
    high = max(high, key + 1);
  };
  const int head =
      min(first + static_cast<int>(-reinterpret_cast<uintptr_t>(row + first) % 16), end);
  const int pieces = (end - head) / 16, tail = head + 16 * pieces;
  const int thread = threadIdx.x;
  if (thread < head - first) see(first + thread, row[first + thread]);
  if (thread < end - tail) see(tail + thread, row[tail + thread]);
#pragma unroll 4
  for (int i = thread; i < pieces; i += threads) {
    const int key = head + 16 * i;
    const uint4 piece = *reinterpret_cast<const uint4*>(row + key);
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (words[w] == 0) continue;
      low = min(low, key + 4 * w + (__ffs(words[w]) - 1) / 8);
      high = max(high, key + 4 * w + 4 - __clz(words[w]) / 8);
    }
  }
}

// Narrows the keys of a tile to those from the first to the last that the mask shows to its rows:
// what a cache holds of a length that only the mask knows. Every score is then compared with it.
template <class Config>
FA_DEVICE void narrow_to_mask(const DecodeParams& p, const Prepared& prepared,
                              typename Config::SharedStorage& smem, RowTile& t) {
  if (threadIdx.x == 0) {
    smem.first_key = t.end;
    smem.end_key = t.first;
  }
  __syncthreads();  // before the others change them
  const int top = prepared.group.quotient(t.row_begin);
  const int bottom = prepared.group.quotient(min(t.row_begin + Config::kBlockM, t.rows) - 1);
  int low = t.end, high = t.first;
#pragma unroll 1
  for (int token = top; token <= (p.mask_stride[1] == 0 ? top : bottom); ++token)
    scan_mask_row(mask_row(p, t, token), t.first, t.end, Config::kAllThreads, low, high);
  low = __reduce_min_sync(0xffffffff, low);
  high = __reduce_max_sync(0xffffffff, high);
  if (ptx::lane_id() == 0) {
    atomicMin(&smem.first_key, low);
    atomicMax(&smem.end_key, high);
  }
  __syncthreads();  // all have found theirs
  t.first = smem.first_key;
  t.end = smem.end_key;
  t.full_first = t.full_end = t.end;
}

// 16 bytes of a row whose elements start anywhere, columns past head_dim as zeros. For the caches
// and queries that cp.async cannot take: rare, so it is written to be small.
FA_DEVICE void copy_elements(unsigned char* target, const uint16_t* source, int columns) {
#pragma unroll 1
  for (int e = 0; e < 8; ++e)
    reinterpret_cast<uint16_t*>(target)[e] = e < columns ? source[e] : uint16_t{0};
}

// One thread's part in the copy of Q, whose addresses are found before the wait for other kernels.
template <class Config>
struct QueryLoader {
  using Copy = typename Config::CopyQ;

  FA_DEVICE QueryLoader(const DecodeParams& params, const Prepared& prepared, const RowTile& t)
      : p(params), aligned(prepared.aligned), col(Copy::col(threadIdx.x)) {
    const int group = prepared.group.divisor;
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
      const int row = t.row_begin + Copy::row(threadIdx.x) + i * Copy::kRowStep;
      const int token = prepared.group.quotient(row),
                head = t.kv_head_idx * group + (row - token * group);
      exists[i] = row < t.rows;
      rows[i] = static_cast<const uint16_t*>(p.query) + t.batch_idx * p.query_stride[0] +
                head * p.query_stride[1] + token * p.query_stride[2] + col;
    }
  }

  FA_DEVICE void load(unsigned char* sQ) const {
    if (threadIdx.x >= Config::kCopyQThreads) return;
    const uint32_t start = Copy::smem_offset(threadIdx.x);
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
      if (aligned) {
        Copy::load_step(ptx::smem_addr(sQ) + start, rows[i], i, col, p.head_dim, exists[i]);
      } else {
#pragma unroll 1
        for (int line = 0; line < Copy::kLines; ++line)
          copy_elements(sQ + Copy::place(start, i, line), rows[i] + line * 64,
                        exists[i] ? p.head_dim - col - line * 64 : 0);
      }
    }
  }

  const DecodeParams& p;
  const bool aligned;
  const int col;
  const uint16_t* rows[Copy::kSteps];
  bool exists[Copy::kSteps];
};

// Folds what is special about a scale <= 0 into Q, exactly, so that the main loop sees a positive
// one: negative, the signs change; zero, Q becomes 0 * Q and the scale 1.
template <class Config>
FA_DEVICE void fold_scale(uint16_t* sQ, float scale) {
  constexpr uint16_t kExponent = Config::kDtype == Dtype::kFloat16 ? 0x7c00 : 0x7f80, kNan = 0x7fff;
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kBlockM * Config::kHeadDim; i += Config::kThreads) {
    const bool finite = (sQ[i] & kExponent) != kExponent;
    sQ[i] = scale < 0.f ? sQ[i] ^ 0x8000 : finite ? 0 : kNan;
  }
  __syncthreads();  // before the warps read their rows
}

// -inf to the scores of keys that their rows do not see. The lane's limits are found again here,
// since at head_dim 256 there are no registers to keep them.
template <class Config>
FA_DEVICE void hide(typename Config::Scores& rS, const DecodeParams& p, const Prepared& prepared,
                    const RowTile& t, int warp_row, int key) {
  const int lane = ptx::lane_id(), lane_key = key + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2 * Config::kRowTiles; ++r) {
    const int token = prepared.group.quotient(t.row_begin + warp_row + lane / 4 + 8 * r);
    const int first = first_key(p, t, token) - lane_key, end = end_key(p, t, token) - lane_key;
#pragma unroll
    for (int n = 0; n < Config::kPieceN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i < first || 8 * n + i >= end) rS.x[r / 2][n][2 * (r % 2) + i] = -INFINITY;
      }
    }
    if (p.mask == nullptr) continue;
    const uint8_t* gMask = mask_row(p, t, min(token, p.seqlen_q - 1)) + lane_key;
#pragma unroll
    for (int n = 0; n < Config::kPieceN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool inside = 8 * n + i >= first && 8 * n + i < end;
        if (inside && gMask[8 * n + i] == 0) rS.x[r / 2][n][2 * (r % 2) + i] = -INFINITY;
      }
    }
  }
}

}  // namespace fa::decode
