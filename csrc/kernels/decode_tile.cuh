// The tiles of decode.cu: shapes and shared memory, the rows and the keys of a CTA, and how Q, K
// and V get to shared memory.
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

// A CTA has an SM of 9.0 to itself, with 192 KiB for its ring (large); elsewhere it makes do with
// 96 KiB, which every device has. Two 16-row tiles a warp read keys and values from shared memory
// half as often; at head_dim 256 there are no registers for them.
constexpr DecodeTile decode_tile(int head_dim, int block_m, bool large) {
  const int row_tiles = block_m > 16 && head_dim <= 128 ? 2 : 1;
  const int row_warps = block_m / (16 * row_tiles), warps = large ? 8 : 4;
  const int block_n = (large ? 16384 : 8192) / head_dim;
  const int piece_n = head_dim == 64 ? 32 : 16;
  const int key_warps =
      warps / row_warps < block_n / piece_n ? warps / row_warps : block_n / piece_n;
  return DecodeTile{row_tiles, row_warps, key_warps, block_n, piece_n, /*stages=*/3};
}

constexpr int kTablePages = 512;  // of a sequence, in shared memory

// What the host finds out for all CTAs.
struct Prepared {
  attn::FastDivide heads;   // KV heads
  attn::FastDivide group;   // query heads of a KV head
  attn::FastDivide splits;  // num_splits
  bool aligned;             // rows of query, key and value come in pieces of 16 bytes
  bool out_aligned;         // those of out too
  bool prefetch;            // the kernel before leaves room for this one to start beside it
};

inline Prepared prepare(const DecodeParams& p, bool prefetch = false) {
  const bool whole = p.head_dim % 8 == 0;
  return {attn::FastDivide(p.heads_k),
          attn::FastDivide(p.heads_q / p.heads_k),
          attn::FastDivide(p.num_splits),
          inputs_in_pieces(p),
          whole && in_pieces(p.out, p.out_stride),
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
  static constexpr int kBlockN = kTile.block_n, kWarpN = kBlockN / kKeyWarps;
  static constexpr int kStages = kTile.stages;
  static constexpr int kPieceN = kTile.piece_n, kPieces = kWarpN / kPieceN;
  static constexpr int kOutCols = kHeadDim + 8;  // rows of a quad's columns in different banks
  static_assert(kRowWarps * kWarpRows == kBlockM && kPieces * kPieceN == kWarpN);

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
    int table[kTablePages];                                           // see ask_for_table
  };
  static_assert(sizeof(SharedStorage) <= (kLarge ? 227 << 10 : 99 << 10));
  static_assert(sizeof(uint16_t[kBlockM][kHeadDim]) <= sizeof(Stage));

  using CopyKv = tile::TileCopy<kBlockN, kHeadDim, kThreads>;
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
    scan_mask_row(mask_row(p, t, token), t.first, t.end, Config::kThreads, low, high);
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

// The row of the block table of the CTA's sequence: in shared memory, where it fits, since a load
// for each tile would come behind that of the length, and the keys behind both.
template <class Config>
FA_DEVICE const int* ask_for_table(const DecodeParams& p, typename Config::SharedStorage& smem) {
  if (p.cache.block_table == nullptr) return nullptr;
  const int* row = p.cache.block_table + blockIdx.z * p.cache.block_table_stride;
  const int pages = ((p.cache.capacity - 1) >> p.cache.page_shift) + 1;
  if (pages > kTablePages) return row;
  for (int i = threadIdx.x; i < pages; i += Config::kThreads)
    ptx::cp_async_ca_4(ptx::smem_addr(&smem.table[i]), row + i, /*valid=*/true);
  return smem.table;
}
FA_DEVICE void wait_for_table(const int* table) {
  if (table == nullptr) return;
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // all of it is there
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

  // pages_of_sequence: its row of the block table, or null without one.
  FA_DEVICE KvLoader(const DecodeParams& params, const RowTile& row_tile, bool rows_aligned,
                     const int* pages_of_sequence)
      : p(params), t(row_tile), aligned(rows_aligned), table(pages_of_sequence) {}

  FA_DEVICE int key_of_step(int tile, int i) const {
    return tile * Config::kBlockN + Copy::row(ptx::thread_index_again()) + i * Copy::kRowStep;
  }
  FA_DEVICE bool visible(int key) const { return key >= t.first && key < t.end; }

  FA_DEVICE Pages find_pages(int tile) const {
    Pages pages;
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
      const int key = key_of_step(tile, i);
      pages.index[i] = visible(key) ? page_of(key) : 0;
    }
    return pages;
  }

  // Asks L2 for a tile of a cache without pages. No value is taken, so that kernels before this one
  // may still be writing them.
  FA_DEVICE void prefetch(int tile) const {
    const int chunk = threadIdx.x % 8, line = chunk % 4;  // of keys, from 4 on of values
    if (line >= Copy::kLines || line * 64 >= p.head_dim) return;
    const void* tensor = chunk < 4 ? p.cache.key : p.cache.value;
    const auto& stride = chunk < 4 ? p.cache.key_stride : p.cache.value_stride;
    const uint16_t* source = static_cast<const uint16_t*>(tensor) + t.batch_idx * stride[0] +
                             t.kv_head_idx * stride[1] + line * 64;
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
      const int key = key_of_step(tile, i);
      if (visible(key)) ptx::prefetch_global_l2(source + key * stride[2]);
    }
  }

  // Rows of one tile of keys, or of values, to `target` in shared memory.
  FA_DEVICE void load_keys(int tile, const Pages& pages, unsigned char* target) const {
    load_rows(p.cache.key, p.cache.key_stride, tile, pages, target);
  }
  FA_DEVICE void load_values(int tile, const Pages& pages, unsigned char* target) const {
    load_rows(p.cache.value, p.cache.value_stride, tile, pages, target);
  }

 private:
  FA_DEVICE void load_rows(const void* tensor, const int64_t (&stride)[3], int tile,
                           const Pages& pages, unsigned char* target) const {
    // All that is the same for every tile is found again, and takes no registers in between.
    const int thread = ptx::thread_index_again(), col = Copy::col(thread);
    target += Copy::smem_offset(thread);
    const uint32_t address = ptx::smem_addr(target);
    const uint16_t* source = static_cast<const uint16_t*>(tensor) + t.kv_head_idx * stride[1] + col;
    if (!aligned) {
#pragma unroll 1
      for (int i = 0; i < Copy::kSteps; ++i) {
        const int key = key_of_step(tile, i);
        // Not pages.index[i]: an index found at run time would move the array to local memory.
        const int64_t page = visible(key) ? page_of(key) : 0;
        const uint16_t* row =
            source + page * stride[0] + int64_t{attn::row_in_page(p.cache, key)} * stride[2];
#pragma unroll 1
        for (int line = 0; line < Copy::kLines; ++line)
          copy_elements(target + Copy::offset(i, line), row + line * 64,
                        visible(key) ? p.head_dim - col - line * 64 : 0);
      }
    } else if (p.cache.block_table == nullptr) {
      source += int64_t{t.batch_idx} * stride[0] + int64_t{key_of_step(tile, 0)} * stride[2];
#pragma unroll
      for (int i = 0; i < Copy::kSteps; ++i, source += Copy::kRowStep * stride[2])
        Copy::load_step(address, source, i, col, p.head_dim, visible(key_of_step(tile, i)));
    } else {
#pragma unroll
      for (int i = 0; i < Copy::kSteps; ++i) {
        const int key = key_of_step(tile, i);
        const uint16_t* row = source + int64_t{pages.index[i]} * stride[0] +
                              int64_t{attn::row_in_page(p.cache, key)} * stride[2];
        Copy::load_step(address, row, i, col, p.head_dim, visible(key));
      }
    }
  }

  FA_DEVICE int page_of(int key) const {
    return table == nullptr ? t.batch_idx : table[key >> p.cache.page_shift];
  }

  const DecodeParams& p;
  const RowTile& t;
  const bool aligned;
  const int* const table;
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
        copy_elements(sQ + Copy::offset(i, line), gQ + line * 64,
                      row < t.rows ? p.head_dim - col - line * 64 : 0);
    }
  }
}

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
