// One small kernel for each building block of csrc/ptx, csrc/tile and csrc/attn, with a launcher in
// plain C: what tests/test_primitives.py compiles, calls and compares with loops on the host. And
// csrc/kernels/mask_summary.cu and value_range.cu, whose results no operator returns.
//
// One file, though above 700 lines: one library, compiled once a worker, and one set of helpers.
//
// A launcher takes device pointers (dense tensors, shapes beside the kernels) and int64_t, waits
// for its kernel and returns the cudaError_t. Tiles get into shared memory by store_tile and out of
// registers by each(), so that every kernel depends on as few building blocks as it can.
#include <cuda_runtime.h>

#include "../csrc/attn/block_info.cuh"
#include "../csrc/attn/mask.cuh"
#include "../csrc/attn/mask_summary.cuh"
#include "../csrc/attn/scheduler.cuh"
#include "../csrc/kernels/dispatch.h"
#include "../csrc/kernels/launch.h"
#include "../csrc/params.h"
#include "../csrc/ptx/sm80.cuh"
#include "../csrc/tile/copy.cuh"
#include "../csrc/tile/fragment.cuh"
#include "../csrc/tile/mma_sm80.cuh"
#include "../csrc/tile/swizzle.cuh"

namespace fa {

// A mask tensor, in host memory.
struct MaskCase {
  int64_t batch, heads, seqlen_q, seqlen_k, stride[4], dtype, mask_dtype;
};

// The shapes of query, key and value, in host memory; strides of batch, head and row.
struct ValueCase {
  int64_t batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, dtype;
  int64_t query_stride[3], key_stride[3], value_stride[3];
};

namespace {

constexpr uint16_t kNan = 0x7fff;  // in fp16 and in bf16

// What a launcher gives back for a kernel that was just launched.
cudaError_t finish() {
  const cudaError_t launched = cudaGetLastError();
  const cudaError_t ran = cudaDeviceSynchronize();
  return launched != cudaSuccess ? launched : ran;
}

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, int64_t ctas, int threads, int smem_bytes,
                   Arguments... arguments) {
  if (const cudaError_t status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
      status != cudaSuccess) {
    return status;
  }
  kernel<<<static_cast<unsigned>(ctas), threads, smem_bytes>>>(arguments...);
  return finish();
}

// A kernel that gives each of `items` items a thread, numbered by item_index().
constexpr int kItemThreads = 256;
template <class Kernel, class... Arguments>
cudaError_t launch_items(Kernel kernel, int64_t items, Arguments... arguments) {
  return launch(kernel, (items + kItemThreads - 1) / kItemThreads, kItemThreads, 0, arguments...);
}
__device__ int64_t item_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

extern __shared__ __align__(1024) unsigned char smem[];

// gTile [rows][cols] to the first columns of a swizzled tile [rows][kCols].
template <int kCols>
__device__ void store_tile(unsigned char* sTile, const uint16_t* gTile, int rows,
                           int cols = kCols) {
  for (int i = threadIdx.x; i < rows * cols; i += blockDim.x) {
    const int row = i / cols, col = i % cols;
    *reinterpret_cast<uint16_t*>(sTile + tile::swizzle<kCols>(row, col / 8) + col % 8 * 2) =
        gTile[i];
  }
}

// Calls f(element, row, column) for the elements of an accumulator that a lane holds.
template <int kM, int kN, class F>
__device__ void each(tile::Accumulator<kM, kN>& acc, int lane, F&& f) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        f(acc.x[m][n][e], 16 * m + tile::fragment_row(lane, e),
          8 * n + tile::fragment_col(lane, e));
}

template <Dtype kDtype>
__device__ float to_float(uint16_t bits) {
  if constexpr (kDtype == Dtype::kFloat16) return __half2float(__ushort_as_half(bits));
  return __bfloat162float(__ushort_as_bfloat16(bits));
}

// ---- tile/swizzle.cuh

// gOffsets [rows][kCols / 8].
template <int kCols>
__global__ void swizzle_kernel(int rows, int64_t* gOffsets) {
  constexpr int kChunks = kCols / 8;
  for (int i = threadIdx.x; i < rows * kChunks; i += blockDim.x)
    gOffsets[i] = tile::swizzle<kCols>(i / kChunks, i % kChunks);
}

// ---- tile/copy.cuh

// gOut [kRows][kCols]: the tile after a copy out of gMatrix [rows][row_stride], into shared memory
// full of NaN. valid_steps: one bit a step for load_step; negative: load_bounded.
template <int kRows, int kCols, int kThreads>
__global__ void tile_copy_kernel(const uint16_t* gMatrix, int64_t row_stride, int head_dim,
                                 int rows, int64_t valid_steps, uint16_t* gOut) {
  using Copy = tile::TileCopy<kRows, kCols, kThreads>;
  auto* sTile = reinterpret_cast<uint16_t*>(smem);
  for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) sTile[i] = kNan;
  __syncthreads();

  const int thread = threadIdx.x, row = Copy::row(thread), col = Copy::col(thread);
  const uint32_t address = ptx::smem_addr(smem) + Copy::smem_offset(thread);
  const uint16_t* source = gMatrix + row * row_stride + col;
  if (valid_steps < 0) {
    Copy::load_bounded(address, source, row_stride, col, head_dim, rows - row);
  } else {
    for (int i = 0; i < Copy::kSteps; ++i)
      Copy::load_step(address, source + i * Copy::kRowStep * row_stride, i, col, head_dim,
                      valid_steps >> i & 1);
  }
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
    const int r = i / kCols, c = i % kCols;
    gOut[i] = *reinterpret_cast<const uint16_t*>(smem + tile::swizzle<kCols>(r, c / 8) + c % 8 * 2);
  }
}

// gOut [128][kCols]: out of panels of kPanelRows rows after a copy of gMatrix [128][row_stride] by
// groups of kThreads threads, each the same number of rows, into shared memory full of NaN.
template <int kCols, int kThreads, int kPanelRows>
__global__ void panel_copy_kernel(const uint16_t* gMatrix, int64_t row_stride, int head_dim,
                                  uint16_t* gOut) {
  using Copy = tile::PanelCopy<kThreads, kCols, kThreads, kPanelRows>;
  constexpr int kRows = 128, kPanelBytes = kPanelRows * 128;
  for (int i = threadIdx.x; i < kRows * kCols; i += blockDim.x)
    reinterpret_cast<uint16_t*>(smem)[i] = kNan;
  __syncthreads();

  const int first = threadIdx.x / kThreads * Copy::kRows;
  const int row = Copy::row(threadIdx.x), col = Copy::col(threadIdx.x);
  const uint32_t address =
      ptx::smem_addr(smem) + Copy::rows_offset(first) + Copy::smem_offset(threadIdx.x);
  const uint16_t* source = gMatrix + (first + row) * row_stride + col;
  for (int i = 0; i < Copy::kSteps; ++i)
    Copy::load_step(address, source + i * Copy::kRowStep * row_stride, i, col, head_dim, true);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kCols; i += blockDim.x) {
    const int r = i / kCols, c = i % kCols;
    const int panel = r / kPanelRows * (kCols / 64) + c / 64, chunk = c % 64 / 8;
    gOut[i] = *reinterpret_cast<const uint16_t*>(smem + panel * kPanelBytes + r % kPanelRows * 128 +
                                                 (chunk ^ r % 8) * 16 + c % 8 * 2);
  }
}

// ---- tile/fragment.cuh and ldmatrix

// Products D = A B of 16x16 matrices with every way to get an operand into registers: gD [A by
// hand, by as_operand_a, by ldmatrix][B by hand, by ldmatrix, by ldmatrix.trans][16][16]. "By hand"
// follows the figures of mma.m16n8k16 in the PTX manual. gA [16][16], gB [k 16][n 16], gBt [n][k].
template <Dtype kDtype>
__global__ void fragment_kernel(const uint16_t* gA, const uint16_t* gB, const uint16_t* gBt,
                                float* gD) {
  constexpr int kCols = 64, kTileBytes = 16 * kCols * 2;
  const int lane = ptx::lane_id(), group = lane / 4, in_group = lane % 4;
  store_tile<kCols>(smem, gA, 16, 16);
  store_tile<kCols>(smem + kTileBytes, gBt, 16, 16);
  store_tile<kCols>(smem + 2 * kTileBytes, gB, 16, 16);
  __syncthreads();

  const uint32_t base = ptx::smem_addr(smem);
  tile::Fragment a[3], b[3];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint16_t* row_a = gA + (group + i % 2 * 8) * 16 + 2 * in_group + i / 2 * 8;
    a[0][i] = row_a[0] | static_cast<uint32_t>(row_a[1]) << 16;
    const uint16_t* col_b = gBt + (group + i / 2 * 8) * 16 + 2 * in_group + i % 2 * 8;
    b[0][i] = col_b[0] | static_cast<uint32_t>(col_b[1]) << 16;
  }
  tile::Accumulator<1, 2> acc;
  each(acc, lane, [&](float& x, int row, int col) { x = to_float<kDtype>(gA[row * 16 + col]); });
  tile::as_operand_a<kDtype>(a[1], acc, 0, 0);
  ptx::ldmatrix_x4(a[2], base + tile::lane_offset_a<kCols>(lane));
  ptx::ldmatrix_x4(b[1], base + kTileBytes + tile::lane_offset_b<kCols>(lane));
  ptx::ldmatrix_x4_trans(b[2], base + 2 * kTileBytes + tile::lane_offset_b_trans<kCols>(lane));

#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      acc.clear();
      ptx::mma_m16n8k16<kDtype>(acc.x[0][0], a[i], b[j][0], b[j][1]);
      ptx::mma_m16n8k16<kDtype>(acc.x[0][1], a[i], b[j][2], b[j][3]);
      each(acc, lane,
           [&](float& x, int row, int col) { gD[(i * 3 + j) * 256 + row * 16 + col] = x; });
    }
  }
}

// ---- tile/mma_sm80.cuh: two warps, one above the other, and 32 keys

constexpr int kWarps = 2, kKeys = 32;

// gS [kWarps * 16 kM][kKeys] += Q K^T with gQ [kWarps * 16 kM][kCols], gK [kKeys][kCols].
// gCalls [threads]: how often between() was called; -1 if not with 0, 1, 2, ...
template <Dtype kDtype, int kCols, int kRegSteps, int kM>
__global__ void gemm_qk_kernel(const uint16_t* gQ, const uint16_t* gK, float* gS, int* gCalls) {
  constexpr int kRows = kWarps * 16 * kM;
  unsigned char *sQ = smem, *sK = smem + kRows * kCols * 2;
  const int lane = ptx::lane_id(), warp = ptx::warp_id();
  store_tile<kCols>(sQ, gQ, kRows);
  store_tile<kCols>(sK, gK, kKeys);
  __syncthreads();

  const uint32_t sQ_lane =
      ptx::smem_addr(sQ) + warp * 16 * kM * kCols * 2 + tile::lane_offset_a<kCols>(lane);
  const uint32_t sK_lane = ptx::smem_addr(sK) + tile::lane_offset_b<kCols>(lane);
  tile::Fragment rQ[kM][kRegSteps ? kRegSteps : 1];
  if constexpr (kRegSteps > 0) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int k = 0; k < kRegSteps; ++k)
        ptx::ldmatrix_x4(rQ[m][k], (sQ_lane ^ (k * 32)) + m * 16 * kCols * 2);
    // The copy in shared memory of what lies in registers must not be used any more.
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kRegSteps * 16; i += blockDim.x) {
      const int row = i / (kRegSteps * 16), col = i % (kRegSteps * 16);
      *reinterpret_cast<uint16_t*>(sQ + tile::swizzle<kCols>(row, col / 8) + col % 8 * 2) = kNan;
    }
    __syncthreads();
  }

  gS += warp * 16 * kM * kKeys;
  tile::Accumulator<kM, kKeys / 8> rS;
  each(rS, lane, [&](float& x, int row, int col) { x = gS[row * kKeys + col]; });
  int calls = 0;
  bool ordered = true;
  tile::gemm_qk<kDtype, kCols, kRegSteps>(rS, rQ, sQ_lane, sK_lane,
                                          [&](int g) { ordered &= g == calls++; });
  each(rS, lane, [&](float& x, int row, int col) { gS[row * kKeys + col] = x; });
  gCalls[threadIdx.x] = ordered && calls == tile::kGroupsQk<kCols, kKeys / 8> ? calls : -1;
}

// gO [kWarps * 16 kM][kCols] += P V with gP [kWarps * 16 kM][kKeys] in fp32, gV [kKeys][kCols].
template <Dtype kDtype, int kCols, int kM>
__global__ void gemm_pv_kernel(const float* gP, const uint16_t* gV, float* gO, int* gCalls) {
  const int lane = ptx::lane_id(), warp = ptx::warp_id();
  store_tile<kCols>(smem, gV, kKeys);
  __syncthreads();

  gP += warp * 16 * kM * kKeys;
  gO += warp * 16 * kM * kCols;
  tile::Accumulator<kM, kKeys / 8> rP;
  tile::Accumulator<kM, kCols / 8> rO;
  each(rP, lane, [&](float& x, int row, int col) { x = gP[row * kKeys + col]; });
  each(rO, lane, [&](float& x, int row, int col) { x = gO[row * kCols + col]; });
  int calls = 0;
  bool ordered = true;
  tile::gemm_pv<kDtype>(rO, rP, ptx::smem_addr(smem) + tile::lane_offset_b_trans<kCols>(lane),
                        [&](int g) { ordered &= g == calls++; });
  each(rO, lane, [&](float& x, int row, int col) { gO[row * kCols + col] = x; });
  gCalls[threadIdx.x] = ordered && calls == tile::kGroupsPv<kCols / 8, kKeys / 8> ? calls : -1;
}

// ---- ptx/sm80.cuh: arithmetic

// gPacked [pairs] of gFloats [pairs][2].
template <Dtype kDtype>
__global__ void cvt_rn_x2_kernel(const float* gFloats, int64_t pairs, uint32_t* gPacked) {
  const int64_t i = item_index();
  if (i < pairs) gPacked[i] = ptx::cvt_rn_x2<kDtype>(gFloats[2 * i], gFloats[2 * i + 1]);
}

__global__ void ex2_approx_ftz_kernel(const float* gX, int64_t size, float* gY) {
  const int64_t i = item_index();
  if (i < size) gY[i] = ptx::ex2_approx_ftz(gX[i]);
}

// ---- ptx/sm80.cuh: cp.async through a ring of tiles guarded by mbarriers, as in fwd_sm80.cu

constexpr int kRingTile = 2048, kStages = 4, kRingWarps = 4, kRingThreads = 32 * kRingWarps;

struct RingStorage {
  uint16_t tiles[kStages][kRingTile];
  uint64_t full[kStages];   // kRingThreads arrivals: the tile has landed; readers wait
  uint64_t empty[kStages];  // one arrival a warp: the tile has been read; the next copies wait
};

// gTiles [tiles][kRingTile], up to `ahead` (1 to 3) copied in advance. gSums [kRingWarps][tiles]:
// what each warp saw of each tile, as the sum of element * (index + 1).
__global__ void ring_kernel(const uint16_t* gTiles, int tiles, int ahead, int64_t* gSums) {
  auto& storage = *reinterpret_cast<RingStorage*>(smem);
  const uint32_t full = ptx::smem_addr(storage.full), empty = ptx::smem_addr(storage.empty);
  const int lane = ptx::lane_id(), warp = ptx::warp_id();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, kRingThreads);
      ptx::mbarrier_init(empty + 8 * s, kRingWarps);
    }
  }
  __syncthreads();

  auto load = [&](int t) {
    const int stage = t % kStages;
    for (int i = threadIdx.x * 8; i < kRingTile; i += kRingThreads * 8)
      ptx::cp_async_cg_16(ptx::smem_addr(&storage.tiles[stage][i]),
                          gTiles + int64_t{t} * kRingTile + i, true);
    ptx::cp_async_mbarrier_arrive_noinc(full + 8 * stage);
  };
  for (int t = 0; t < min(ahead, tiles); ++t) load(t);
  for (int t = 0; t < tiles; ++t) {
    const int next = t + ahead;
    if (next < tiles) {
      ptx::mbarrier_wait_parity(empty + 8 * (next % kStages), (next / kStages + 1) & 1);
      load(next);
    }
    ptx::mbarrier_wait_parity(full + 8 * (t % kStages), t / kStages & 1);
    __nanosleep((t * 5 + warp * 3) % 8 * 100);  // lets the warps drift apart, each in its turn
    int64_t sum = 0;
    for (int i = lane; i < kRingTile; i += 32)
      sum += int64_t{storage.tiles[t % kStages][i]} * (i + 1);
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
    if (lane == 0) gSums[int64_t{warp} * tiles + t] = sum;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * (t % kStages));
  }
}

// ---- attn/scheduler.cuh

__global__ void fast_divide_kernel(attn::FastDivide divide, const int* gNumerators, int64_t size,
                                   int* gQuotients) {
  const int64_t i = item_index();
  if (i < size) gQuotients[i] = static_cast<int>(divide.quotient(gNumerators[i]));
}

// gTiles [ctas][4]: m_block, head_idx, kv_head_idx, batch_idx.
__global__ void tile_of_cta_kernel(const __grid_constant__ attn::TileOrder order, int64_t ctas,
                                   int* gTiles) {
  const int64_t cta = item_index();
  if (cta >= ctas) return;
  const attn::WorkTile work = attn::tile_of_cta(order, static_cast<unsigned>(cta));
  int* tile = gTiles + 4 * cta;
  tile[0] = work.m_block;
  tile[1] = work.head_idx;
  tile[2] = work.kv_head_idx;
  tile[3] = work.batch_idx;
}

// ---- attn/block_info.cuh, attn/mask.cuh

// A row of the tensors of cases below.
struct BandCase {
  int64_t row_begin, row_end, key_begin, diagonal, window_left, window_right, seqlen_k;
};

__device__ FwdParams params_of(const BandCase& band) {
  FwdParams p{};
  p.seqlen_k = static_cast<int>(band.seqlen_k);
  p.diagonal = band.diagonal;
  p.window_left = band.window_left;
  p.window_right = band.window_right;
  return p;
}

// gRanges [cases][4]: first, end, full_first, full_end.
__global__ void key_range_kernel(const BandCase* gBands, int64_t cases, int* gRanges) {
  const int64_t i = item_index();
  if (i >= cases) return;
  const BandCase band = gBands[i];
  const attn::KeyRange keys = attn::key_range(params_of(band), static_cast<int>(band.row_begin),
                                              static_cast<int>(band.row_end));
  int* range = gRanges + 4 * i;
  range[0] = keys.first;
  range[1] = keys.end;
  range[2] = keys.full_first;
  range[3] = keys.full_end;
}

// gS [cases][16 kM][8 kN], one warp a case.
template <int kM, int kN>
__global__ void mask_columns_kernel(const BandCase* gBands, float* gS) {
  constexpr int kCols = 8 * kN;
  const BandCase band = gBands[blockIdx.x];
  const int lane = ptx::lane_id();
  gS += int64_t{blockIdx.x} * 16 * kM * kCols;
  tile::Accumulator<kM, kN> rS;
  each(rS, lane, [&](float& x, int row, int col) { x = gS[row * kCols + col]; });
  attn::mask_columns(rS, params_of(band), static_cast<int>(band.row_begin),
                     static_cast<int>(band.key_begin), lane);
  each(rS, lane, [&](float& x, int row, int col) { gS[row * kCols + col] = x; });
}

// gBits [cases][16][kN / 8] words, gS [cases][16][8 kN], one warp a case.
template <int kN>
__global__ void mask_bits_kernel(const uint64_t* gBits, float* gS) {
  constexpr int kCols = 8 * kN, kWords = kN / 8;
  const int lane = ptx::lane_id();
  gS += int64_t{blockIdx.x} * 16 * kCols;
  gBits += int64_t{blockIdx.x} * 16 * kWords;
  tile::Accumulator<1, kN> rS;
  each(rS, lane, [&](float& x, int row, int col) { x = gS[row * kCols + col]; });
  uint64_t row_bits[2][kWords];
  for (int r = 0; r < 2; ++r)
    for (int w = 0; w < kWords; ++w)
      row_bits[r][w] = gBits[tile::fragment_row(lane, 2 * r) * kWords + w];
  attn::mask_bits(rS, row_bits, lane);
  each(rS, lane, [&](float& x, int row, int col) { gS[row * kCols + col] = x; });
}

FwdParams params_of(const MaskCase& mask, const void* gMask, void* summary) {
  FwdParams p{};
  p.batch = static_cast<int>(mask.batch);
  p.heads_q = static_cast<int>(mask.heads);
  p.seqlen_q = static_cast<int>(mask.seqlen_q);
  p.seqlen_k = static_cast<int>(mask.seqlen_k);
  for (int i = 0; i < 4; ++i) p.mask_stride[i] = mask.stride[i];
  p.dtype = static_cast<Dtype>(mask.dtype);
  p.mask_dtype = static_cast<MaskDtype>(mask.mask_dtype);
  p.mask = gMask;
  p.mask_summary = summary;
  return p;
}

// gS [batch][heads][16 kM][8 kN], one warp each: the same tile of every slice of the mask.
template <Dtype kDtype, int kM, int kN>
__global__ void mask_tensor_kernel(const __grid_constant__ FwdParams p, int row_begin,
                                   int key_begin, float* gS) {
  constexpr int kCols = 8 * kN;
  const int lane = ptx::lane_id(), slice = blockIdx.x;
  gS += int64_t{slice} * 16 * kM * kCols;
  tile::Accumulator<kM, kN> rS;
  each(rS, lane, [&](float& x, int row, int col) { x = gS[row * kCols + col]; });
  attn::mask_tensor<kDtype>(
      rS, p, slice / p.heads_q * p.mask_stride[0] + slice % p.heads_q * p.mask_stride[1], row_begin,
      key_begin, lane);
  each(rS, lane, [&](float& x, int row, int col) { gS[row * kCols + col] = x; });
}

// ---- attn/mask_summary.cuh

// gEntries [batch][heads][row_blocks][key_blocks] of a mask without broadcast.
__global__ void mask_entries_kernel(const __grid_constant__ FwdParams p, int row_blocks,
                                    int key_blocks, float* gEntries) {
  int64_t i = item_index();
  if (i >= int64_t{p.batch} * p.heads_q * row_blocks * key_blocks) return;
  float& entry = gEntries[i];
  const int key_block = i % key_blocks, row_block = (i /= key_blocks) % row_blocks;
  const int head_idx = (i /= row_blocks) % p.heads_q, batch_idx = i / p.heads_q;
  entry = attn::MaskSummary(p, batch_idx, head_idx).entry(row_block, key_block);
}

// gBits [batch][heads][seqlen_q][key_blocks] likewise; 0 where the entry does not point to bits.
__global__ void mask_words_kernel(const __grid_constant__ FwdParams p, int key_blocks,
                                  uint64_t* gBits) {
  int64_t i = item_index();
  if (i >= int64_t{p.batch} * p.heads_q * p.seqlen_q * key_blocks) return;
  uint64_t& bits = gBits[i];
  const int key_block = i % key_blocks, row = (i /= key_blocks) % p.seqlen_q;
  const int head_idx = (i /= p.seqlen_q) % p.heads_q, batch_idx = i / p.heads_q;
  const attn::MaskSummary summary(p, batch_idx, head_idx);
  const float entry = summary.entry(row / kMaskSummaryBlock, key_block);
  const bool stored = attn::is_mixed_bits(entry) || attn::is_mixed_far(entry);
  bits = stored ? summary.bits(row, key_block) : 0;
}

// gRows [batch][heads][row_blocks][key_blocks]: normal_rows of an additive mask without broadcast.
__global__ void normal_rows_kernel(const __grid_constant__ FwdParams p, int row_blocks,
                                   int key_blocks, uint64_t* gRows) {
  int64_t i = item_index();
  if (i >= int64_t{p.batch} * p.heads_q * row_blocks * key_blocks) return;
  uint64_t& rows = gRows[i];
  const int key_block = i % key_blocks, row_block = (i /= key_blocks) % row_blocks;
  const int head_idx = (i /= row_blocks) % p.heads_q, batch_idx = i / p.heads_q;
  rows = attn::MaskSummary(p, batch_idx, head_idx).normal_rows(row_block, key_block);
}

// gMaySkip [1].
__global__ void may_skip_kernel(const __grid_constant__ FwdParams p, int* gMaySkip) {
  *gMaySkip = attn::MaskSummary(p, 0, 0).may_skip();
}

// gClasses [batch][heads][m_blocks][n_blocks][2]: the class of the block, and the block that
// visible_from finds between it and half its index.
template <int kBlockM, int kBlockN>
__global__ void masked_blocks_kernel(const __grid_constant__ FwdParams p, int m_blocks,
                                     int n_blocks, int* gClasses) {
  int64_t i = item_index();
  if (i >= int64_t{p.batch} * p.heads_q * m_blocks * n_blocks) return;
  int* classes = gClasses + 2 * i;
  const int n_block = i % n_blocks, m_block = (i /= n_blocks) % m_blocks;
  const int head_idx = (i /= m_blocks) % p.heads_q, batch_idx = i / p.heads_q;
  const attn::MaskedBlocks<kBlockM, kBlockN> blocks(p, batch_idx, head_idx, m_block * kBlockM);
  classes[0] = blocks.classify(n_block);
  classes[1] = blocks.visible_from(n_block, n_block / 2);
}

// Calls f(dtype constant).
template <class F>
cudaError_t dispatch_dtype(int64_t dtype, F&& f) {
  return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(static_cast<Dtype>(dtype), f);
}

}  // namespace

extern "C" {

const char* error_string(cudaError_t status) { return cudaGetErrorString(status); }

cudaError_t launch_swizzle(int64_t cols, int64_t rows, int64_t* offsets) {
  return dispatch_value<64, 128, 256>(cols, [&](auto c) {
    return launch(swizzle_kernel<c()>, 1, 256, 0, static_cast<int>(rows), offsets);
  });
}

// Tiles [64][64] by 128 threads, [32][128] by 64 and [64][256] by 256; half the rows by a warp.
cudaError_t launch_tile_copy(int64_t cols, int64_t by_warp, const uint16_t* matrix,
                             int64_t row_stride, int64_t head_dim, int64_t rows,
                             int64_t valid_steps, uint16_t* out) {
  return dispatch_value<64, 128, 256>(cols, [&](auto c) {
    return dispatch_value<false, true>(by_warp != 0, [&](auto warp) {
      constexpr int kCols = c(), kRows = (kCols == 128 ? 32 : 64) / (warp() ? 2 : 1);
      constexpr int kThreads = warp() ? 32 : kCols == 64 ? 128 : kCols == 128 ? 64 : 256;
      return launch(tile_copy_kernel<kRows, kCols, kThreads>, 1, kThreads, kRows * kCols * 2,
                    matrix, row_stride, static_cast<int>(head_dim), static_cast<int>(rows),
                    valid_steps, out);
    });
  });
}

// by_warp: each of four warps copies 32 rows, else all 128 threads copy all rows.
cudaError_t launch_panel_copy(int64_t cols, int64_t by_warp, int64_t panel_rows,
                              const uint16_t* matrix, int64_t row_stride, int64_t head_dim,
                              uint16_t* out) {
  return dispatch_value<64, 128>(cols, [&](auto c) {
    return dispatch_value<false, true>(by_warp != 0, [&](auto warp) {
      return dispatch_value<64, 128>(panel_rows, [&](auto panel) {
        return launch(panel_copy_kernel < c(), warp() ? 32 : 128, panel() >, 1, 128, 128 * c() * 2,
                      matrix, row_stride, static_cast<int>(head_dim), out);
      });
    });
  });
}

cudaError_t launch_fragment(int64_t dtype, const uint16_t* a, const uint16_t* b,
                            const uint16_t* b_transposed, float* d) {
  return dispatch_dtype(dtype, [&](auto t) {
    return launch(fragment_kernel<t()>, 1, 32, 3 * 16 * 64 * 2, a, b, b_transposed, d);
  });
}

// quarters: how many quarters of Q lie in registers. Two row tiles with float16, one with bfloat16.
cudaError_t launch_gemm_qk(int64_t dtype, int64_t cols, int64_t quarters, const uint16_t* q,
                           const uint16_t* k, float* s, int* calls) {
  return dispatch_dtype(dtype, [&](auto t) {
    return dispatch_value<64, 128, 256>(cols, [&](auto c) {
      return dispatch_value<0, 1, 4>(quarters, [&](auto part) {
        constexpr int kCols = c(), kM = t() == Dtype::kFloat16 ? 2 : 1;
        return launch(gemm_qk_kernel<t(), kCols, kCols / 64 * part(), kM>, 1, 32 * kWarps,
                      (kWarps * 16 * kM + kKeys) * kCols * 2, q, k, s, calls);
      });
    });
  });
}

// Two row tiles of 256 columns do not fit into registers.
cudaError_t launch_gemm_pv(int64_t dtype, int64_t cols, int64_t row_tiles, const float* p,
                           const uint16_t* v, float* o, int* calls) {
  return dispatch_dtype(dtype, [&](auto t) {
    return dispatch_value<64, 128, 256>(cols, [&](auto c) {
      return dispatch_value<1, 2>(row_tiles, [&](auto m) {
        constexpr int kCols = c(), kM = m();
        if constexpr (kCols * kM > 256) {
          return cudaErrorInvalidValue;
        } else {
          return launch(gemm_pv_kernel<t(), kCols, kM>, 1, 32 * kWarps, kKeys * kCols * 2, p, v, o,
                        calls);
        }
      });
    });
  });
}

cudaError_t launch_cvt_rn_x2(int64_t dtype, const float* floats, int64_t pairs, uint32_t* packed) {
  return dispatch_dtype(dtype, [&](auto t) {
    return launch_items(cvt_rn_x2_kernel<t()>, pairs, floats, pairs, packed);
  });
}

cudaError_t launch_ex2_approx_ftz(const float* x, int64_t size, float* y) {
  return launch_items(ex2_approx_ftz_kernel, size, x, size, y);
}

cudaError_t launch_ring(const uint16_t* tiles, int64_t num_tiles, int64_t ahead, int64_t* sums) {
  return launch(ring_kernel, 1, kRingThreads, sizeof(RingStorage), tiles,
                static_cast<int>(num_tiles), static_cast<int>(ahead), sums);
}

// numerators and quotients [num_divisors][size]; divisors is in host memory.
cudaError_t launch_fast_divide(const int64_t* divisors, int64_t num_divisors, const int* numerators,
                               int64_t size, int* quotients) {
  for (int64_t i = 0; i < num_divisors; ++i) {
    const attn::FastDivide divide(static_cast<unsigned>(divisors[i]));
    const cudaError_t status = launch_items(fast_divide_kernel, size, divide, numerators + i * size,
                                            size, quotients + i * size);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// section: (batch, head) pairs of a section, at most batch * heads.
cudaError_t launch_tile_of_cta(int64_t batch, int64_t heads, int64_t group, int64_t m_blocks,
                               int64_t section, int* tiles) {
  const int64_t pairs = batch * heads;
  attn::TileOrder order{};
  order.m_blocks = static_cast<unsigned>(m_blocks);
  order.num_sections = static_cast<unsigned>((pairs + section - 1) / section);
  order.per_section = attn::FastDivide(static_cast<unsigned>(section * m_blocks));
  order.section_heads = attn::FastDivide(static_cast<unsigned>(section));
  order.last_heads =
      attn::FastDivide(static_cast<unsigned>(pairs - (order.num_sections - 1) * section));
  order.heads = attn::FastDivide(static_cast<unsigned>(heads));
  order.group = attn::FastDivide(static_cast<unsigned>(group));
  return launch_items(tile_of_cta_kernel, pairs * m_blocks, order, pairs * m_blocks, tiles);
}

cudaError_t launch_key_range(const void* bands, int64_t cases, int* ranges) {
  return launch_items(key_range_kernel, cases, static_cast<const BandCase*>(bands), cases, ranges);
}

// Tiles [16][64] with one row tile, [32][32] with two.
cudaError_t launch_mask_columns(int64_t row_tiles, const void* bands, int64_t cases,
                                float* scores) {
  return dispatch_value<1, 2>(row_tiles, [&](auto m) {
    return launch(mask_columns_kernel<m(), 8 / m()>, cases, 32, 0,
                  static_cast<const BandCase*>(bands), scores);
  });
}

// Tiles [16][64] with one word a row, [16][128] with two.
cudaError_t launch_mask_bits(int64_t words, const uint64_t* bits, int64_t cases, float* scores) {
  return dispatch_value<1, 2>(
      words, [&](auto w) { return launch(mask_bits_kernel<8 * w()>, cases, 32, 0, bits, scores); });
}

// Tiles as in launch_mask_columns.
cudaError_t launch_mask_tensor(const MaskCase* mask_case, const void* mask, int64_t row_tiles,
                               int64_t row_begin, int64_t key_begin, float* scores) {
  const FwdParams p = params_of(*mask_case, mask, nullptr);
  return dispatch_dtype(mask_case->dtype, [&](auto t) {
    return dispatch_value<1, 2>(row_tiles, [&](auto m) {
      return launch(mask_tensor_kernel<t(), m(), 8 / m()>, int64_t{p.batch} * p.heads_q, 32, 0, p,
                    static_cast<int>(row_begin), static_cast<int>(key_begin), scores);
    });
  });
}

// summary_bytes: what the caller takes for the size of the summary. values [8]: every row of query,
// key and value.
cudaError_t launch_summarize_mask(const MaskCase* mask_case, const void* mask, void* summary,
                                  int64_t summary_bytes, const uint16_t* values) {
  FwdParams p = params_of(*mask_case, mask, summary);
  p.query = p.key = p.value = values;
  p.heads_k = 1;
  p.head_dim = 8;
  p.scale = 1.f;
  if (mask_summary_bytes(p) != summary_bytes) return cudaErrorInvalidValue;
  const cudaError_t launched = launch_mask_summary(p, nullptr);
  const cudaError_t ran = finish();
  return launched != cudaSuccess ? launched : ran;
}

cudaError_t launch_read_mask_summary(const MaskCase* mask_case, void* summary, float* entries,
                                     uint64_t* bits) {
  const FwdParams p = params_of(*mask_case, nullptr, summary);
  const int row_blocks = (p.seqlen_q + kMaskSummaryBlock - 1) / kMaskSummaryBlock;
  const int key_blocks = (p.seqlen_k + kMaskSummaryBlock - 1) / kMaskSummaryBlock;
  const int64_t slices = int64_t{p.batch} * p.heads_q;
  const cudaError_t status = launch_items(mask_entries_kernel, slices * row_blocks * key_blocks, p,
                                          row_blocks, key_blocks, entries);
  if (status != cudaSuccess) return status;
  return launch_items(mask_words_kernel, slices * p.seqlen_q * key_blocks, p, key_blocks, bits);
}

// rows as gRows, may_skip as gMaySkip.
cudaError_t launch_read_normal_rows(const MaskCase* mask_case, void* summary, uint64_t* rows,
                                    int* may_skip) {
  const FwdParams p = params_of(*mask_case, nullptr, summary);
  const int row_blocks = (p.seqlen_q + kMaskSummaryBlock - 1) / kMaskSummaryBlock;
  const int key_blocks = (p.seqlen_k + kMaskSummaryBlock - 1) / kMaskSummaryBlock;
  const cudaError_t status =
      launch_items(normal_rows_kernel, int64_t{p.batch} * p.heads_q * row_blocks * key_blocks, p,
                   row_blocks, key_blocks, rows);
  return status != cudaSuccess ? status : launch(may_skip_kernel, 1, 1, 0, p, may_skip);
}

// flags [2]: those of a mask, before and after.
cudaError_t launch_value_range(const ValueCase* c, const uint16_t* query, const uint16_t* key,
                               const uint16_t* value, int64_t scale, uint32_t* flags) {
  FwdParams p{};
  p.query = query;
  p.key = key;
  p.value = value;
  p.batch = static_cast<int>(c->batch);
  p.heads_q = static_cast<int>(c->heads_q);
  p.heads_k = static_cast<int>(c->heads_k);
  p.seqlen_q = static_cast<int>(c->seqlen_q);
  p.seqlen_k = static_cast<int>(c->seqlen_k);
  p.head_dim = static_cast<int>(c->head_dim);
  p.dtype = static_cast<Dtype>(c->dtype);
  p.scale = static_cast<float>(scale);
  p.mask_dtype = MaskDtype::kFloat32;
  for (int i = 0; i < 3; ++i) {
    p.query_stride[i] = c->query_stride[i];
    p.key_stride[i] = c->key_stride[i];
    p.value_stride[i] = c->value_stride[i];
  }
  const int64_t offset = attn::MaskSummaryShape(p).flags_offset_bytes();
  p.mask_summary = reinterpret_cast<unsigned char*>(flags) - offset;
  const cudaError_t launched = fa::launch_value_range(p, nullptr);
  const cudaError_t ran = finish();
  return launched != cudaSuccess ? launched : ran;
}

cudaError_t launch_masked_blocks(const MaskCase* mask_case, void* summary, int64_t block_m,
                                 int64_t block_n, int* classes) {
  const FwdParams p = params_of(*mask_case, nullptr, summary);
  return dispatch_value<64, 128>(block_m, [&](auto m) {
    return dispatch_value<32, 64>(block_n, [&](auto n) {
      constexpr int kBlockM = m(), kBlockN = n();
      const int m_blocks = (p.seqlen_q + kBlockM - 1) / kBlockM;
      const int n_blocks = (p.seqlen_k + kBlockN - 1) / kBlockN;
      return launch_items(masked_blocks_kernel<kBlockM, kBlockN>,
                          int64_t{p.batch} * p.heads_q * m_blocks * n_blocks, p, m_blocks, n_blocks,
                          classes);
    });
  });
}

}  // extern "C"
}  // namespace fa
