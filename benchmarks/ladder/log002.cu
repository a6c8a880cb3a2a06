// log002.cu: the kernel of the second log, one step at a time: causal, fp16, heads that share keys.
// There it is Triton; here what Triton makes of it, as far as the log's figures tell.
//
//   A CTA owns kBlock query rows of one head and walks over blocks of as many keys, from the first
//   on. Its four warps stand in 2 x 2, as Triton lays them out for such a tile: a row belongs to
//   two column warps, which exchange its maximum, its sum and P through shared memory.
//
//     a block       | S = Q K^T | max ─► sMax ─► exp ─► sSum, sP | O = rescale O + P V  |
//     warp (i, j)   | rows 16 i, keys 16 j                       | rows 16 i, cols 64 j |
//
//   kApart false: two stages of K and V, the next block on its way while one is computed
//     shared   sQ [32][128]   sK, sV [2][32][128]   sP [32][32 + 8]                    43.0 KiB
//   kApart true: one of each, Q in registers; K is on its way from the maximum on, V from the start
//     shared   sK, sV [32][128]   sP [32][32 + 8]                                      19.3 KiB
//
// The log's shared memory, 43.26 KB before its step to warp specialisation and 18.43 KB after it,
// is that of these tiles to the byte: five of 8 KiB, 2 KiB of P and 256 bytes; then two, and P. (P
// has padded rows here, and the exchange places of its own.) So what that step did on the log's GPU
// is what kApart does: no second stage, twice as many CTAs.
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

template <class Step>
struct Storage {
  static constexpr int kBlock = Step::kBlock, kStages = Step::kApart ? 1 : 2;
  uint16_t sK[kStages][kBlock][kHeadDim];  // with kApart, Q on its way to registers
  uint16_t sV[kStages][kBlock][kHeadDim];
  uint16_t sQ[Step::kApart ? 1 : kBlock][kHeadDim];  // without kApart
  uint16_t sP[kBlock][kBlock + 8];                   // padded: no bank conflicts
  float sMax[2][kBlock];                             // by column warp
  float sSum[2][kBlock];
};

// As fp16 holds it.
FA_DEVICE float rounded(float x) { return __half2float(__float2half_rn(x)); }

// Softmax over kBlock keys at a time for the warp's rows, and the output. A lane has two rows of
// each 16-row tile, r and r + 8.
template <class Step>
struct State {
  static constexpr int kBlock = Step::kBlock, kRowTiles = kBlock / 32, kRows = 2 * kRowTiles;
  using Scores = tile::Accumulator<kRowTiles, kBlock / 16>;  // [kBlock / 2][kBlock / 2]
  using Output = tile::Accumulator<kRowTiles, 8>;            // [kBlock / 2][64]

  float row_max[kRows], row_sum[kRows], rescale[kRows];
  Output rO;                         // without kHalfState
  uint32_t packed[kRowTiles][8][2];  // with it

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
  static FA_DEVICE int row(int r, int warp_m, int lane) {
    return warp_m * (kBlock / 2) + r / 2 * 16 + r % 2 * 8 + lane / 4;
  }

  FA_DEVICE void pack() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int d = 0; d < 8; ++d)
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
      for (int d = 0; d < 8; ++d)
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
  static FA_DEVICE void publish_max(Storage<Step>& smem, const Scores& rS, int warp_m, int warp_n,
                                    int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float part = -INFINITY;
#pragma unroll
      for (int n = 0; n < kBlock / 16; ++n)
        part = fmaxf(part, fmaxf(rS.x[r / 2][n][2 * (r % 2)], rS.x[r / 2][n][2 * (r % 2) + 1]));
      part = tile::quad_max(part);
      if (lane % 4 == 0) smem.sMax[warp_n][row(r, warp_m, lane)] = part;
    }
  }

  // Scores to P, in sP, and its sums, for the other column warp.
  FA_DEVICE void exponentiate(Storage<Step>& smem, Scores& rS, int warp_m, int warp_n, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = row(r, warp_m, lane);
      // Finite from the first block on: every row sees key 0.
      float new_max = fmaxf(row_max[r], fmaxf(smem.sMax[0][i], smem.sMax[1][i]));
      if constexpr (Step::kHalfState) new_max = rounded(new_max);
      rescale[r] = power(row_max[r] - new_max);
      row_max[r] = new_max;
      float part = 0.f;
#pragma unroll
      for (int n = 0; n < kBlock / 16; ++n) {
        float& a = rS.x[r / 2][n][2 * (r % 2)];
        float& b = rS.x[r / 2][n][2 * (r % 2) + 1];
        a = power(a - new_max);
        b = power(b - new_max);
        part += a + b;
        uint16_t* target = &smem.sP[i][warp_n * (kBlock / 2) + 8 * n + 2 * (lane % 4)];
        *reinterpret_cast<uint32_t*>(target) = ptx::cvt_rn_x2<kDtype>(a, b);
      }
      part = tile::quad_sum(part);
      if (lane % 4 == 0) smem.sSum[warp_n][i] = part;
    }
  }

  FA_DEVICE void add_sums(const Storage<Step>& smem, int warp_m, int lane) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = row(r, warp_m, lane);
      row_sum[r] = row_sum[r] * rescale[r] + (smem.sSum[0][i] + smem.sSum[1][i]);
      if constexpr (Step::kHalfState) row_sum[r] = rounded(row_sum[r]);
    }
  }
};

template <class Step>
__global__ void __launch_bounds__(kThreads) two_by_two_kernel(const __grid_constant__ Problem p) {
  constexpr int kBlock = Step::kBlock, kRowTiles = kBlock / 32;
  constexpr uint32_t kTileBytes = kBlock * kHeadDim * 2;
  using Rows = State<Step>;
  __shared__ __align__(1024) Storage<Step> smem;
  const int thread = threadIdx.x, warp = ptx::warp_id(), lane = ptx::lane_id();
  const int warp_m = warp / 2, warp_n = warp % 2;
  const uint32_t sQ = ptx::smem_addr(Step::kApart ? smem.sK[0] : smem.sQ),
                 sK = ptx::smem_addr(smem.sK), sV = ptx::smem_addr(smem.sV),
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
  const uint16_t* gQ = matrix(p.query, p.query_stride, head_idx);
  const uint16_t* gK = matrix(p.key, p.key_stride, kv_head_idx);
  const uint16_t* gV = matrix(p.value, p.value_stride, kv_head_idx);
  const int64_t q_row = row_stride(p.query_stride), k_row = row_stride(p.key_stride),
                v_row = row_stride(p.value_stride);
  const int num_blocks = Step::kSkip ? place.m_block + 1 : p.seqlen / kBlock;

  auto load_k = [&](int block, int stage) {
    load_tile<kBlock>(sK + stage * kTileBytes, gK + block * kBlock * k_row, k_row, thread);
  };
  auto load_v = [&](int block, int stage) {
    load_tile<kBlock>(sV + stage * kTileBytes, gV + block * kBlock * v_row, v_row, thread);
  };

  const uint32_t sQ_lane = sQ + warp_m * (kTileBytes / 2) + tile::lane_offset_a<kHeadDim>(lane);
  constexpr int kRegSteps = Step::kApart ? kHeadDim / 16 : 0;
  tile::Fragment rQ[kRowTiles][Step::kApart ? kHeadDim / 16 : 1];
  load_tile<kBlock>(sQ, gQ + row_begin * q_row, q_row, thread);
  if constexpr (Step::kApart) {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // Q is there for all
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int k = 0; k < kRegSteps; ++k)
        ptx::ldmatrix_x4(rQ[m][k], (sQ_lane ^ (k * 32)) + m * 16 * kHeadDim * 2);
    __syncthreads();  // all have read Q, which K overwrites
  }
  load_k(0, 0);
  if constexpr (!Step::kApart) load_v(0, 0);
  ptx::cp_async_commit_group();

  const float scale = Step::kExp2 ? p.scale_log2 : p.scale;
  Rows rows;
  auto step = [&](int block, auto masked) {
    const int stage = Step::kApart ? 0 : block % 2;
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // K, and V without kApart, are there for all; all have read those before
    if constexpr (Step::kApart) {
      load_v(block, 0);
    } else if (block + 1 < num_blocks) {
      load_k(block + 1, 1 - stage);
      load_v(block + 1, 1 - stage);
    }
    ptx::cp_async_commit_group();

    typename Rows::Scores rS;
    rS.clear();
    tile::gemm_qk<kDtype, kHeadDim, kRegSteps>(
        rS, rQ, sQ_lane,
        sK + stage * kTileBytes + warp_n * (kTileBytes / 2) + tile::lane_offset_b<kHeadDim>(lane),
        [](int) {});
    const int first_key = block * kBlock + warp_n * (kBlock / 2);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kBlock / 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& s = rS.x[m][n][e];
          s *= scale;
          const int row = row_begin + Rows::row(2 * m + e / 2, warp_m, lane);
          if (masked && first_key + 8 * n + tile::fragment_col(lane, e) > row) s = -INFINITY;
        }
    Rows::publish_max(smem, rS, warp_m, warp_n, lane);
    __syncthreads();  // the maxima are there; all have read K
    if (Step::kApart && block + 1 < num_blocks) load_k(block + 1, 0);
    if constexpr (Step::kApart) ptx::cp_async_commit_group();
    rows.exponentiate(smem, rS, warp_m, warp_n, lane);
    if constexpr (Step::kApart) ptx::cp_async_wait_group<1>();  // V, not the next K
    __syncthreads();  // P and its sums, and with kApart V, are there for all
    rows.add_sums(smem, warp_m, lane);
    rows.rescale_output();
    tile::Fragment rP[kRowTiles][kBlock / 16];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int k = 0; k < kBlock / 16; ++k) {
        const int row = warp_m * (kBlock / 2) + 16 * m + lane % 16;
        ptx::ldmatrix_x4(rP[m][k], sP + (row * (kBlock + 8) + 16 * k + lane / 16 * 8) * 2);
      }
    tile::gemm_fragments<kDtype, kHeadDim>(
        rows.rO, rP,
        sV + stage * kTileBytes + warp_n * 128 + tile::lane_offset_b_trans<kHeadDim>(lane));
    if constexpr (Step::kHalfState) rows.pack();
  };
  int block = 0;
  if constexpr (Step::kTwoLoops) {
#pragma unroll 1
    for (; block < num_blocks - 1; ++block) step(block, std::false_type());
  }
#pragma unroll 1
  for (; block < num_blocks; ++block) step(block, std::true_type());

  uint16_t* gO = matrix(p.out, p.out_stride, head_idx) + warp_n * 64;
  const int64_t o_row = row_stride(p.out_stride);
#pragma unroll
  for (int r = 0; r < Rows::kRows; ++r)
    store_rows(gO + (row_begin + Rows::row(r, warp_m, lane)) * o_row, rows.rO.x[r / 2], r % 2,
               ptx::rcp_approx_ftz(rows.row_sum[r]), lane);
}

template <class Step>
constexpr Rung rung(const char* name) {
  return {name, two_by_two_kernel<Step>, Step::kBlock, Step::kRowsFirst};
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
