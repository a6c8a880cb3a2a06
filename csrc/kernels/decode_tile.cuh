// The tiles of decode.cu: shapes and shared memory, the rows and the keys of a CTA, and how Q, K
// and V get to shared memory.
#pragma once
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

// A CTA has an SM of 9.0 to itself, with 192 KiB for its ring (large); elsewhere it makes do with
// 96 KiB, which every device has. Two 16-row tiles a warp read keys and values from shared memory
// half as often; at head_dim 256 there are no registers for them.
constexpr DecodeTile decode_tile(int head_dim, int block_m, bool large) {
  const int row_tiles = block_m > 16 && head_dim <= 128 ? 2 : 1;
  const int row_warps = block_m / (16 * row_tiles), warps = large ? 8 : 4;
  // 128 rows keep the tensor cores busy, and want the ring in small steps.
  const int block_n = (large && block_m < 128 ? 16384 : 8192) / head_dim;
  const int piece_n = head_dim == 64 ? 32 : 16;
  const int key_warps =
      warps / row_warps < block_n / piece_n ? warps / row_warps : block_n / piece_n;
  const int stages = large && block_m == 128 ? 6 : 3;
  return DecodeTile{row_tiles, row_warps, key_warps, block_n, piece_n, stages};
}

// What the host finds out for all CTAs.
struct Prepared {
  attn::FastDivide heads;   // KV heads
  attn::FastDivide group;   // query heads of a KV head
  attn::FastDivide splits;  // num_splits
  bool aligned;             // rows of query, key and value come in pieces of 16 bytes
  bool out_aligned;         // those of out too
};

template <int kHeadDim_, int kBlockM_, bool kLarge_, Dtype kDtype_>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_;
  static constexpr bool kLarge = kLarge_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr DecodeTile kTile = decode_tile(kHeadDim, kBlockM, kLarge);
  static constexpr int kRowTiles = kTile.row_tiles, kWarpRows = 16 * kRowTiles;
  static constexpr int kRowWarps = kTile.row_warps, kKeyWarps = kTile.key_warps;
  static constexpr int kThreads = 32 * kRowWarps * kKeyWarps;
  static constexpr int kBlockN = kTile.block_n, kWarpN = kBlockN / kKeyWarps;
  static constexpr int kStages = kTile.stages;
  static constexpr int kPieceN = kTile.piece_n, kPieces = kWarpN / kPieceN;
  static constexpr int kOutCols = kHeadDim + 8;  // rows of a quad's columns in different banks
  static_assert(kRowWarps * kWarpRows == kBlockM && kPieces * kPieceN == kWarpN);

  struct Stage {
    uint16_t sK[kBlockN][kHeadDim];
    uint16_t sV[kBlockN][kHeadDim];
  };
  union SharedStorage {
    Stage stages[kStages];
    struct {
      unsigned char ring[sizeof(Stage) * (kStages - 1)];
      uint16_t sQ[kBlockM][kHeadDim];  // until it is in registers
    } before;
    struct {
      float sO[kKeyWarps][kBlockM][kOutCols];
      float sLse[kKeyWarps][kBlockM];
    } after;
  };
  static_assert(sizeof(uint16_t[kBlockM][kHeadDim]) <= sizeof(Stage));

  using CopyKv = tile::TileCopy<kBlockN, kHeadDim, kThreads>;
  static constexpr int kCopyQThreads = kThreads < 8 * kBlockM ? kThreads : 8 * kBlockM;
  using CopyQ = tile::TileCopy<kBlockM, kHeadDim, kCopyQThreads>;
  using Output = tile::Accumulator<kRowTiles, kHeadDim / 8>;  // [kWarpRows][kHeadDim]
  using Scores = tile::Accumulator<kRowTiles, kPieceN / 8>;   // [kWarpRows][kPieceN]
  using Softmax = attn::OnlineSoftmax<kRowTiles, false>;
};

// The rows of a CTA and the keys that they see.
struct RowTile {
  int batch_idx;
  int kv_head_idx;
  int row_begin;
  int rows;          // of the whole problem: row_begin + kBlockM may be past them
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
  RowTile t;
  const int m_block = prepared.heads.quotient(blockIdx.x);
  t.kv_head_idx = blockIdx.x - m_block * p.heads_k;
  t.batch_idx = blockIdx.z;
  t.row_begin = m_block * Config::kBlockM;
  t.rows = p.seqlen_q * static_cast<int>(prepared.group.divisor);
  t.length = attn::sequence_length(p.cache, t.batch_idx);
  t.diagonal = int64_t{t.length} - p.seqlen_q + p.diagonal_shift;
  const int top = prepared.group.quotient(t.row_begin);
  const int bottom = prepared.group.quotient(min(t.row_begin + Config::kBlockM, t.rows) - 1);
  t.first = first_key(p, t, top);
  t.end = end_key(p, t, bottom);
  t.full_first = first_key(p, t, bottom);
  t.full_end = end_key(p, t, top);
  return t;
}

// Tiles [begin, end) of a split: all splits have the same number of them, or one less.
struct TileRange {
  int begin;
  int end;
};
FA_DEVICE TileRange tiles_of_split(const RowTile& t, int block_n, int split,
                                   const attn::FastDivide& splits) {
  const int first = t.first / block_n;
  const int tiles = t.end > t.first ? (t.end - 1) / block_n + 1 - first : 0;
  const int each = splits.quotient(tiles), more = tiles - each * static_cast<int>(splits.divisor);
  const int begin = first + split * each + min(split, more);
  return {begin, begin + each + (split < more)};
}

// 16 bytes of a row whose elements start anywhere, columns past head_dim as zeros. For the caches
// and queries that cp.async cannot take: rare, so it is written to be small.
FA_DEVICE void copy_elements(unsigned char* target, const uint16_t* source, int columns) {
#pragma unroll 1
  for (int e = 0; e < 8; ++e)
    reinterpret_cast<uint16_t*>(target)[e] = e < columns ? source[e] : uint16_t{0};
}

// One thread's part in the copies of tiles of keys and values to the ring.
template <class Config>
struct KvLoader {
  using Copy = typename Config::CopyKv;

  // Pages of the thread's keys of one tile, found ahead of the copies that need them.
  struct Pages {
    int index[Copy::kSteps];
  };

  const DecodeParams& p;
  const RowTile& t;
  const bool aligned;
  unsigned char* const ring;

  FA_DEVICE KvLoader(const DecodeParams& params, const RowTile& row_tile, bool rows_aligned,
                     unsigned char* stages)
      : p(params), t(row_tile), aligned(rows_aligned), ring(stages) {}

  FA_DEVICE int key_of_step(int tile, int i) const {
    return tile * Config::kBlockN + Copy::row(ptx::thread_index_again()) + i * Copy::kRowStep;
  }
  FA_DEVICE bool visible(int key) const { return key >= t.first && key < t.end; }

  FA_DEVICE Pages find_pages(int tile) const {
    Pages pages;
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
      const int key = key_of_step(tile, i);
      pages.index[i] = visible(key) ? attn::page_of(p.cache, t.batch_idx, key) : 0;
    }
    return pages;
  }

  FA_DEVICE void load(int tile, const Pages& pages, int stage) const {
    // All that is the same for every tile is found again, and takes no registers in between.
    const int thread = ptx::thread_index_again(), col = Copy::col(thread);
    unsigned char* sK = ring + stage * sizeof(typename Config::Stage) + Copy::smem_offset(thread);
    const uint16_t* gK =
        static_cast<const uint16_t*>(p.cache.key) + t.kv_head_idx * p.cache.key_stride[1] + col;
    const uint16_t* gV =
        static_cast<const uint16_t*>(p.cache.value) + t.kv_head_idx * p.cache.value_stride[1] + col;
    const int64_t k_row = p.cache.key_stride[2], v_row = p.cache.value_stride[2];
    if (!aligned) {
#pragma unroll 1
      for (int i = 0; i < Copy::kSteps; ++i) {
        const int key = key_of_step(tile, i);
        const int64_t row = attn::row_in_page(p.cache, key);
        // Not pages.index[i]: an index found at run time would move the array to local memory.
        const int64_t page = visible(key) ? attn::page_of(p.cache, t.batch_idx, key) : 0;
        copy_row_by_elements(sK + i * Copy::kRowStep * Config::kHeadDim * 2,
                             gK + page * p.cache.key_stride[0] + row * k_row,
                             gV + page * p.cache.value_stride[0] + row * v_row,
                             visible(key) ? p.head_dim - col : 0);
      }
    } else if (p.cache.block_table == nullptr) {
      const int64_t page = t.batch_idx, row = key_of_step(tile, 0);
      const uint16_t* k = gK + page * p.cache.key_stride[0] + row * k_row;
      const uint16_t* v = gV + page * p.cache.value_stride[0] + row * v_row;
#pragma unroll
      for (int i = 0; i < Copy::kSteps; ++i) {
        load_step(sK, k, v, tile, i, col);
        k += Copy::kRowStep * k_row;
        v += Copy::kRowStep * v_row;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Copy::kSteps; ++i) {
        const int64_t page = pages.index[i];
        const int64_t row = attn::row_in_page(p.cache, key_of_step(tile, i));
        load_step(sK, gK + page * p.cache.key_stride[0] + row * k_row,
                  gV + page * p.cache.value_stride[0] + row * v_row, tile, i, col);
      }
    }
  }

 private:
  FA_DEVICE void load_step(unsigned char* sK, const uint16_t* k, const uint16_t* v, int tile, int i,
                           int col) const {
    const uint32_t address = ptx::smem_addr(sK);
    const bool valid = visible(key_of_step(tile, i));
    Copy::load_step(address, k, i, col, p.head_dim, valid);
    Copy::load_step(address + sizeof(typename Config::Stage) / 2, v, i, col, p.head_dim, valid);
  }

  static FA_DEVICE void copy_row_by_elements(unsigned char* sK, const uint16_t* k,
                                             const uint16_t* v, int columns) {
#pragma unroll 1
    for (int line = 0; line < Copy::kLines; ++line) {
      copy_elements(sK + line * 128, k + line * 64, columns - line * 64);
      copy_elements(sK + sizeof(typename Config::Stage) / 2 + line * 128, v + line * 64,
                    columns - line * 64);
    }
  }
};

template <class Config>
FA_DEVICE void load_query(const DecodeParams& p, const Prepared& prepared, const RowTile& t,
                          unsigned char* sQ) {
  using Copy = typename Config::CopyQ;
  const int thread = threadIdx.x, col = Copy::col(thread), group = prepared.group.divisor;
  if (thread >= Config::kCopyQThreads) return;
  sQ += Copy::smem_offset(thread);
#pragma unroll
  for (int i = 0; i < Copy::kSteps; ++i) {
    const int row = t.row_begin + Copy::row(thread) + i * Copy::kRowStep;
    const int token = prepared.group.quotient(row),
              head = t.kv_head_idx * group + (row - token * group);
    const uint16_t* gQ = static_cast<const uint16_t*>(p.query) + t.batch_idx * p.query_stride[0] +
                         head * p.query_stride[1] + token * p.query_stride[2] + col;
    if (prepared.aligned) {
      Copy::load_step(ptx::smem_addr(sQ), gQ, i, col, p.head_dim, row < t.rows);
    } else {
#pragma unroll 1
      for (int line = 0; line < Copy::kLines; ++line)
        copy_elements(sQ + i * Copy::kRowStep * Config::kHeadDim * 2 + line * 128, gQ + line * 64,
                      row < t.rows ? p.head_dim - col - line * 64 : 0);
    }
  }
}

}  // namespace fa::decode
