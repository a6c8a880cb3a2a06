// log002.cu: the kernel of the second log, one step at a time: causal, fp16, heads that share keys.
// There it is Triton; here what Triton makes of it.
//
//   A CTA owns kBlock query rows of one head and walks over blocks of as many keys, from the first
//   on. Its four warps stand side by side: each has all rows, a quarter of the keys of a block and
//   a quarter of the output's columns, so a row's maximum, its sum and P go through shared memory.
//
//     a block   | S = Q K^T | max ─► sMax ─► exp ─► sSum, sP | O = rescale O + P V |
//     warp j    | keys 8 j                                   | columns 32 j        |
//
//   kApart false: two stages of K and V, the next block on its way while one is computed
//     shared   sQ [32][128]   sKV [2][2][32][128]   sP [32][32 + 8]      44 KiB
//   kApart true: K and V through one buffer, V copied beside the softmax, K beside nothing
//     shared   sQ [32][128]   sKV [32][128]         sP [32][32 + 8]      20 KiB
//
// The log names 43.26 KB of shared memory before its step to warp specialisation and 18.43 KB after
// it, with 127 registers and four CTAs an SM. Triton 3.6, given such a kernel for sm_89, makes
// 43008 and 18432 bytes of it, the latter with 128 registers: five tiles of 8 KiB and 2 KiB of P,
// then two tiles and P, and four column warps for blocks of 32 and of 64. Its loop then says
// num_stages = 0, and Q stays in shared memory. So on the log's GPU that step specialised no warps:
// it took the pipeline away, and twice as many CTAs fitted. That is kApart. Of blocks of 64 it
// makes 40960 bytes, 232 registers and no spills: two CTAs, as here. (There a copy without a
// pipeline goes through registers; here P has padded rows, and the exchange places of its own.)
#include "whole_rows.cuh"

namespace fa::ladder {
namespace {

struct Base {
  static constexpr int kBlock = 32;          // query rows of a CTA, and keys of a block
  static constexpr bool kRowsFirst = false;  // neighbouring CTAs share keys
  static constexpr bool kSkip = false;       // blocks above the diagonal
  static constexpr bool kTwoLoops = false;   // only the last block is compared with the diagonal
  static constexpr bool kHalfState = true;   // maximum, sum and O go through fp16 after each block
  static constexpr bool kApart = false;      // loads apart from compute, see above
  static constexpr bool kExp2 = false;       // log2 e is in the scale
  static constexpr bool kFixedStrides = false;
};
struct RowsFirst : Base {
  static constexpr bool kRowsFirst = true;
};
struct Skip : RowsFirst {
  static constexpr bool kSkip = true;
};
struct TwoLoops : Skip {
  static constexpr bool kTwoLoops = true;
};
struct FloatState : TwoLoops {
  static constexpr bool kHalfState = false;
};
struct Apart : FloatState {
  static constexpr bool kApart = true;
};
struct Exp2 : Apart {
  static constexpr bool kExp2 = true;
};
struct FixedStrides : Exp2 {
  static constexpr bool kFixedStrides = true;
};
struct Block64 : FixedStrides {
  static constexpr int kBlock = 64;
};

constexpr int kWarps = kThreads / 32, kWarpCols = kHeadDim / kWarps;  // columns of O

template <class Step>
struct Storage {
  static constexpr int kBlock = Step::kBlock, kTiles = Step::kApart ? 1 : 4;
  uint16_t sQ[kBlock][kHeadDim];
  uint16_t sKV[kTiles][kBlock][kHeadDim];
  uint16_t sP[kBlock][kBlock + 8];  // padded: no bank conflicts
  float sMax[kWarps][kBlock];
  float sSum[kWarps][kBlock];

  // Where in sKV the keys and the values of a block lie.
  static FA_DEVICE int key_tile(int block) { return Step::kApart ? 0 : block % 2 * 2; }
  static FA_DEVICE int value_tile(int block) { return Step::kApart ? 0 : block % 2 * 2 + 1; }
};

// As fp16 holds it.
FA_DEVICE float rounded(float x) { return __half2float(__float2half_rn(x)); }

// Softmax over kBlock keys at a time for the warp's rows, and the output. A lane has two rows of
// each 16-row tile, r and r + 8.
template <class Step>
struct State {
  static constexpr int kBlock = Step::kBlock, kRowTiles = kBlock / 16, kRows = 2 * kRowTiles;
  static constexpr int kWarpKeys = kBlock / kWarps, kKeyTiles = kWarpKeys / 8,
                       kColTiles = kWarpCols / 8;
  using Scores = tile::Accumulator<kRowTiles, kKeyTiles>;  // [kBlock][kWarpKeys]
  using Output = tile::Accumulator<kRowTiles, kColTiles>;  // [kBlock][kWarpCols]

  float row_max[kRows], row_sum[kRows], rescale[kRows];
  Output rO;                                 // without kHalfState
  uint32_t packed[kRowTiles][kColTiles][2];  // with it

  FA_DEVICE State() {
    rO.clear();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
    if constexpr (Step::kHalfState) pack();
  }

  // 2^x or e^x.
  static FA_DEVICE float power(float x) {
    return ptx::ex2_approx_ftz(Step::kExp2 ? x : __fmul_rn(x, kLog2E));
  }

  // The row of the CTA's tile that is the lane's r-th one.
  static FA_DEVICE int row(int r, int lane) { return r / 2 * 16 + r % 2 * 8 + lane / 4; }

  FA_DEVICE void pack() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int d = 0; d < kColTiles; ++d)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          packed[m][d][half] =
              ptx::cvt_rn_x2<kDtype>(rO.x[m][d][2 * half], rO.x[m][d][2 * half + 1]);
  }

  // What P V is added to.
  FA_DEVICE void rescale_output() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int d = 0; d < kColTiles; ++d)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2 o = make_float2(rO.x[m][d][2 * half], rO.x[m][d][2 * half + 1]);
          if constexpr (Step::kHalfState)
            o = __half22float2(reinterpret_cast<const __half2&>(packed[m][d][half]));
          rO.x[m][d][2 * half] = o.x * rescale[2 * m + half];
          rO.x[m][d][2 * half + 1] = o.y * rescale[2 * m + half];
        }
  }

  // The maxima of the warp's part of the rows, for the other column warp.
  static FA_DEVICE void publish_max(Storage<Step>& smem, const Scores& rS, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float part = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
        part = fmaxf(part, fmaxf(rS.x[r / 2][n][2 * (r % 2)], rS.x[r / 2][n][2 * (r % 2) + 1]));
      part = tile::quad_max(part);
      if (lane % 4 == 0) smem.sMax[warp][row(r, lane)] = part;
    }
  }

  // Scores to P, in sP, and its sums, for the other column warp.
  FA_DEVICE void exponentiate(Storage<Step>& smem, Scores& rS, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = row(r, lane);
      // Finite from the first block on: every row sees key 0.
      float new_max = row_max[r];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) new_max = fmaxf(new_max, smem.sMax[w][i]);
      if constexpr (Step::kHalfState) new_max = rounded(new_max);
      rescale[r] = power(row_max[r] - new_max);
      row_max[r] = new_max;
      float part = 0.f;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float& a = rS.x[r / 2][n][2 * (r % 2)];
        float& b = rS.x[r / 2][n][2 * (r % 2) + 1];
        a = power(a - new_max);
        b = power(b - new_max);
        part += a + b;
        uint16_t* target = &smem.sP[i][warp * kWarpKeys + 8 * n + 2 * (lane % 4)];
        *reinterpret_cast<uint32_t*>(target) = ptx::cvt_rn_x2<kDtype>(a, b);
      }
      part = tile::quad_sum(part);
      if (lane % 4 == 0) smem.sSum[warp][i] = part;
    }
  }

  FA_DEVICE void add_sums(const Storage<Step>& smem, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = row(r, lane);
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += smem.sSum[w][i];
      row_sum[r] = row_sum[r] * rescale[r] + sum;
      if constexpr (Step::kHalfState) row_sum[r] = rounded(row_sum[r]);
    }
  }
};

// S [kBlock][kWarpKeys] of the warp = Q K^T. Addresses are those of the tiles.
template <class Step>
FA_DEVICE void product_qk(typename State<Step>::Scores& rS, uint32_t sQ, uint32_t sK, int warp,
                          int lane) {
  constexpr int kRowTiles = State<Step>::kRowTiles, kWarpKeys = State<Step>::kWarpKeys;
  rS.clear();
  const uint32_t sQ_lane = sQ + tile::lane_offset_a<kHeadDim>(lane);
  sK += warp * kWarpKeys * kHeadDim * 2;
  if constexpr (kWarpKeys > 8) {
    const tile::Fragment rQ[kRowTiles][1] = {};  // Q is read out of shared memory
    tile::gemm_qk<kDtype, kHeadDim, 0>(rS, rQ, sQ_lane, sK + tile::lane_offset_b<kHeadDim>(lane),
                                       [](int) {});
  } else {
    // One load brings the B operands [16][8] of two steps.
    const uint32_t sK_lane = sK + tile::swizzle<kHeadDim>(lane % 8, lane / 8);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; k += 2) {
      tile::Fragment b;
      ptx::ldmatrix_x4(b, sK_lane ^ (k * 32));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          tile::Fragment a;
          ptx::ldmatrix_x4(a, (sQ_lane ^ ((k + i) * 32)) + m * 16 * kHeadDim * 2);
          ptx::mma_m16n8k16<kDtype>(rS.x[m][0], a, b[2 * i], b[2 * i + 1]);
        }
    }
  }
}

// O [kBlock][kWarpCols] of the warp += P V.
template <class Step>
FA_DEVICE void product_pv(typename State<Step>::Output& rO, uint32_t sP, uint32_t sV, int warp,
                          int lane) {
  constexpr int kBlock = Step::kBlock, kRowTiles = State<Step>::kRowTiles;
  tile::Fragment rP[kRowTiles][kBlock / 16];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int k = 0; k < kBlock / 16; ++k)
      ptx::ldmatrix_x4(rP[m][k],
                       sP + ((16 * m + lane % 16) * (kBlock + 8) + 16 * k + lane / 16 * 8) * 2);
  const int chunk = warp * (kWarpCols / 8) + lane / 16;
  tile::gemm_fragments<kDtype, kHeadDim>(rO, rP, sV + tile::swizzle<kHeadDim>(lane % 16, chunk));
}

// The 1 tells ptxas not to aim at an occupancy, as Triton does not; it would spill for it.
template <class Step>
__global__ void __launch_bounds__(kThreads, 1)
    column_blocks_kernel(const __grid_constant__ Problem p) {
  constexpr int kBlock = Step::kBlock;
  constexpr uint32_t kTileBytes = kBlock * kHeadDim * 2;
  using Rows = State<Step>;
  using Smem = Storage<Step>;
  __shared__ __align__(1024) Smem smem;
  const int thread = threadIdx.x, warp = ptx::warp_id(), lane = ptx::lane_id();
  const uint32_t sQ = ptx::smem_addr(smem.sQ), sKV = ptx::smem_addr(smem.sKV),
                 sP = ptx::smem_addr(smem.sP);

  const Place place = place_of_cta<Step::kRowsFirst>();
  const int batch_idx = place.head / p.heads_q, head_idx = place.head % p.heads_q;
  const int kv_head_idx = head_idx / (p.heads_q / p.heads_k);
  const int row_begin = place.m_block * kBlock;
  auto row_stride = [](const Strides& of) {
    return Step::kFixedStrides ? int64_t{kHeadDim} : of.row;
  };
  auto matrix = [&](auto* tensor, const Strides& of, int head) {
    return tensor + batch_idx * of.batch + head * of.head;
  };
  const uint16_t* gK = matrix(p.key, p.key_stride, kv_head_idx);
  const uint16_t* gV = matrix(p.value, p.value_stride, kv_head_idx);
  const int64_t q_row = row_stride(p.query_stride), k_row = row_stride(p.key_stride),
                v_row = row_stride(p.value_stride);
  const int num_blocks = Step::kSkip ? place.m_block + 1 : p.seqlen / kBlock;
  auto load_k = [&](int block) {
    load_tile<kBlock>(sKV + Smem::key_tile(block) * kTileBytes, gK + block * kBlock * k_row, k_row,
                      thread);
  };
  auto load_v = [&](int block) {
    load_tile<kBlock>(sKV + Smem::value_tile(block) * kTileBytes, gV + block * kBlock * v_row,
                      v_row, thread);
  };

  load_tile<kBlock>(sQ, matrix(p.query, p.query_stride, head_idx) + row_begin * q_row, q_row,
                    thread);
  load_k(0);
  if constexpr (!Step::kApart) load_v(0);
  ptx::cp_async_commit_group();

  const float scale = Step::kExp2 ? p.scale_log2 : p.scale;
  Rows rows;
  auto step = [&](int block, auto masked) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // K, and V without kApart, are there for all; all have left the block before
    if (!Step::kApart && block + 1 < num_blocks) {
      load_k(block + 1);
      load_v(block + 1);
    }
    ptx::cp_async_commit_group();

    typename Rows::Scores rS;
    product_qk<Step>(rS, sQ, sKV + Smem::key_tile(block) * kTileBytes, warp, lane);
    const int first_key = block * kBlock + warp * Rows::kWarpKeys;
#pragma unroll
    for (int m = 0; m < Rows::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < Rows::kKeyTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& s = rS.x[m][n][e];
          s *= scale;
          const int row = row_begin + Rows::row(2 * m + e / 2, lane);
          if (masked && first_key + 8 * n + tile::fragment_col(lane, e) > row) s = -INFINITY;
        }
    Rows::publish_max(smem, rS, warp, lane);
    __syncthreads();  // the maxima are there; all have read K
    if constexpr (Step::kApart) {
      load_v(block);
      ptx::cp_async_commit_group();
    }
    rows.exponentiate(smem, rS, warp, lane);
    if constexpr (Step::kApart) ptx::cp_async_wait_group<0>();
    __syncthreads();  // P and its sums, and with kApart V, are there for all
    rows.add_sums(smem, lane);
    rows.rescale_output();
    product_pv<Step>(rows.rO, sP, sKV + Smem::value_tile(block) * kTileBytes, warp, lane);
    if constexpr (Step::kHalfState) rows.pack();
    if constexpr (Step::kApart) {
      __syncthreads();  // all have read V
      if (block + 1 < num_blocks) load_k(block + 1);
      ptx::cp_async_commit_group();
    }
  };
  int block = 0;
  if constexpr (Step::kTwoLoops) {
#pragma unroll 1
    for (; block < num_blocks - 1; ++block) step(block, std::false_type());
  }
#pragma unroll 1
  for (; block < num_blocks; ++block) step(block, std::true_type());

  uint16_t* gO = matrix(p.out, p.out_stride, head_idx) + warp * kWarpCols;
  const int64_t o_row = row_stride(p.out_stride);
#pragma unroll
  for (int r = 0; r < Rows::kRows; ++r)
    store_rows(gO + (row_begin + Rows::row(r, lane)) * o_row, rows.rO.x[r / 2], r % 2,
               ptx::rcp_approx_ftz(rows.row_sum[r]), lane);
}

template <class Step>
constexpr Rung rung(const char* name) {
  return {name, column_blocks_kernel<Step>, Step::kBlock, Step::kRowsFirst};
}

const Rung kRungs[] = {
    rung<Base>("base"),
    rung<RowsFirst>("rows first"),
    rung<Skip>("skip"),
    rung<TwoLoops>("two loops"),
    rung<FloatState>("fp32 state"),
    with_unused_smem(rung<FloatState>("fp32 state at 2 CTAs"), 36 * 1024),
    rung<Apart>("loads apart"),
    rung<Exp2>("exp2"),
    rung<FixedStrides>("fixed strides"),
    rung<Block64>("64-wide"),
    {"whole rows", whole_rows_kernel<true>, kWholeRowsBlock, true},
};
constexpr int kCount = sizeof(kRungs) / sizeof(Rung);

}  // namespace
}  // namespace fa::ladder

// Return a cudaError_t.
extern "C" int log002_launch(const char* name, const fa::ladder::Problem* p, cudaStream_t stream) {
  using namespace fa::ladder;
  return launch_rung(find_rung(kRungs, kCount, name), *p, stream);
}

extern "C" int log002_describe(const char* name, fa::ladder::Facts* facts) {
  using namespace fa::ladder;
  return describe_rung(find_rung(kRungs, kCount, name), facts);
}
