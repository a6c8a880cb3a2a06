// log000.cu: the kernel of the first log from version 5 on, one step at a time: mma.sync, fp16,
// no mask. A rung is an instance of one kernel; the steps below say how they differ.
//
//   A CTA owns 32 query rows of one head. Its four warps stand in 2 x 2, so a row of scores belongs
//   to two column warps, and everything that concerns a whole row goes through shared memory:
//
//     a tile of     | S = Q K^T | sS ─► softmax ─► sP | O = rescale O + P V |
//     64 keys       |           |  8 rows a warp      |                     |
//     warp (i, j)   | rows 16 i, keys 32 j            | rows 16 i, cols 64 j|
//     sKV           | K         | V on its way        | V                   |
//
//     softmax, a row: LDS ─► 5 SHFL (max) ─► exp ─► 5 SHFL (sum) ─► STS
//
//   shared   sQ [32][128]   sKV [64][128]   sS fp32 [32][64 + 8]   sP [32][64 + 8]   38 KiB
//            128-byte XOR swizzle; sS and sP in padded rows, free of bank conflicts
//
// The log prints parts of its source. That the rest is read right follows from the counters that it
// prints: with these tiles and this arithmetic V5 executes 19660800 FP32 instructions that are not
// fused and 1048576 that are, V6 13500416 and 3080192, to the last one. Multiplications that the
// log's counters show apart from their additions are kept apart from the compiler here (__fmul_rn).
#include "whole_rows.cuh"

namespace fa::ladder {
namespace {

// How the operands of Q K^T come from shared memory, a step of 16 columns at a time.
enum class Loads {
  kGeneric,         // by the coordinates of each load, through the swizzle
  kDoubleBuffered,  // the same, one step ahead
  kPrefetchA,       // one step ahead for Q only
  kFixedAddresses,  // the address of step 0, which the others differ from by one XOR
};

struct V5 {
  static constexpr int kRows = 2;                 // that a warp's softmax has in flight
  static constexpr bool kReuseNumerator = false;  // stored at once, not after the sum
  static constexpr bool kPairs = false;           // a lane has neighbouring columns
  static constexpr Loads kLoads = Loads::kGeneric;
  static constexpr bool kFma = false;            // scale and maximum in one FFMA, base 2
  static constexpr bool kSharedRescale = false;  // O's factor through shared memory
  static constexpr bool kFirstApart = false;     // a softmax of its own, without history
};
struct V6 : V5 {
  static constexpr bool kFma = true, kSharedRescale = true, kFirstApart = true;
};
struct V7 : V5 {  // V6 was taken back
  static constexpr int kRows = 4;
  static constexpr bool kReuseNumerator = true;
};
struct V8 : V7 {
  static constexpr bool kPairs = true, kReuseNumerator = false;
};
struct V9DoubleBuffered : V8 {
  static constexpr Loads kLoads = Loads::kDoubleBuffered;
};
struct V9PrefetchA : V8 {
  static constexpr Loads kLoads = Loads::kPrefetchA;
};
struct V9FixedAddresses : V8 {
  static constexpr Loads kLoads = Loads::kFixedAddresses;
};
struct V10 : V9FixedAddresses {
  static constexpr bool kFma = true;
};
struct V11Templates : V10 {
  static constexpr bool kSharedRescale = true, kFirstApart = true;
};
struct V11 : V10 {
  static constexpr bool kSharedRescale = true;
};

constexpr int kBlockM = 32, kBlockN = 64, kPaddedN = kBlockN + 8;
constexpr int kWarpRows = kBlockM / (kThreads / 32);  // of the softmax

struct SharedStorage {
  uint16_t sQ[kBlockM][kHeadDim];
  uint16_t sKV[kBlockN][kHeadDim];
  float sS[kBlockM][kPaddedN];
  uint16_t sP[kBlockM][kPaddedN];
  float row_max[kBlockM];
  float row_sum[kBlockM];
  float row_history[kBlockM];  // the maximum before this tile; with kSharedRescale, O's factor
};

// Operands of one step: rows of Q, and 32 keys.
struct Operands {
  tile::Fragment a, b[2];

  FA_DEVICE void load_a(uint32_t sQ, int warp_m, int lane, int k) {
    ptx::ldmatrix_x4(a, sQ + tile::swizzle<kHeadDim>(warp_m * 16 + lane % 16, 2 * k + lane / 16));
  }
  FA_DEVICE void load_b(uint32_t sK, int warp_n, int lane, int k) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = warp_n * 32 + n * 16 + lane / 16 * 8 + lane % 8;
      ptx::ldmatrix_x4(b[n], sK + tile::swizzle<kHeadDim>(key, 2 * k + lane / 8 % 2));
    }
  }
};

// S [16][32] of the warp = Q K^T.
template <Loads kLoads>
FA_DEVICE void product_qk(tile::Accumulator<1, 4>& rS, uint32_t sQ, uint32_t sK, int warp_m,
                          int warp_n, int lane) {
  rS.clear();
  if constexpr (kLoads == Loads::kFixedAddresses) {
    const tile::Fragment rQ[1][1] = {};  // Q is read out of shared memory
    tile::gemm_qk<kDtype, kHeadDim, 0>(
        rS, rQ, sQ + warp_m * 16 * kHeadDim * 2 + tile::lane_offset_a<kHeadDim>(lane),
        sK + warp_n * 32 * kHeadDim * 2 + tile::lane_offset_b<kHeadDim>(lane), [](int) {});
    return;
  }
  constexpr int kSteps = kHeadDim / 16;
  constexpr bool kAheadA = kLoads != Loads::kGeneric, kAheadB = kLoads == Loads::kDoubleBuffered;
  Operands next;
  if constexpr (kAheadA) next.load_a(sQ, warp_m, lane, 0);
  if constexpr (kAheadB) next.load_b(sK, warp_n, lane, 0);
  // Unrolled wholly, all three would be the same machine code, with loads as far ahead as registers
  // allow; with a step ahead twice, or registers would be copied.
#pragma unroll(kAheadA ? 2 : 1)
  for (int k = 0; k < kSteps; ++k) {
    Operands now = next;
    if constexpr (!kAheadA) now.load_a(sQ, warp_m, lane, k);
    if constexpr (!kAheadB) now.load_b(sK, warp_n, lane, k);
    const int k_next = min(k + 1, kSteps - 1);
    if constexpr (kAheadA) next.load_a(sQ, warp_m, lane, k_next);
    if constexpr (kAheadB) next.load_b(sK, warp_n, lane, k_next);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::mma_m16n8k16<kDtype>(rS.x[0][2 * n], now.a, now.b[n][0], now.b[n][1]);
      ptx::mma_m16n8k16<kDtype>(rS.x[0][2 * n + 1], now.a, now.b[n][2], now.b[n][3]);
    }
  }
}

// The warp's scores to sS.
FA_DEVICE void store_scores(SharedStorage& smem, const tile::Accumulator<1, 4>& rS, int warp_m,
                            int warp_n, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* target =
          &smem.sS[warp_m * 16 + lane / 4 + 8 * half][warp_n * 32 + 8 * n + 2 * (lane % 4)];
      *reinterpret_cast<float2*>(target) =
          make_float2(rS.x[0][n][2 * half], rS.x[0][n][2 * half + 1]);
    }
}

// e^x; the log's counters show no care for denormal numbers.
FA_DEVICE float natural_exp(float x) { return ptx::ex2_approx_ftz(__fmul_rn(x, kLog2E)); }

// What a row's O and sum are multiplied with when its maximum rises.
template <class Step>
FA_DEVICE float history_factor(float old_max, float new_max, float scale_log2) {
  return Step::kFma ? ptx::ex2_approx_ftz((old_max - new_max) * scale_log2)
                    : natural_exp(old_max - new_max);
}

// The lane's two elements of a row of P.
template <class Step>
FA_DEVICE void store_numerators(uint16_t* row, const float (&p)[2], int lane) {
  if constexpr (Step::kPairs) {
    *reinterpret_cast<uint32_t*>(row + 2 * lane) = ptx::cvt_rn_x2<kDtype>(p[0], p[1]);
  } else {
    row[lane] = __half_as_ushort(__float2half_rn(p[0]));
    row[lane + 32] = __half_as_ushort(__float2half_rn(p[1]));
  }
}

// The warp's rows of sS become P in sP; their maxima, sums and history advance. kFirst: the first
// tile, in a step that has no history to read then.
template <class Step, bool kFirst>
FA_DEVICE void softmax(SharedStorage& smem, float scale, float scale_log2, int warp, int lane) {
  constexpr int kRows = Step::kRows;
#pragma unroll 1  // what is in flight is what the step says
  for (int row = warp * kWarpRows; row < (warp + 1) * kWarpRows; row += kRows) {
    float s[kRows][2], tile_max[kRows], old_max[kRows], new_max[kRows], tile_sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* source = smem.sS[row + r];
      if constexpr (Step::kPairs) {
        const float2 pair = *reinterpret_cast<const float2*>(source + 2 * lane);
        s[r][0] = pair.x;
        s[r][1] = pair.y;
      } else {
        s[r][0] = source[lane];
        s[r][1] = source[lane + 32];
      }
      if constexpr (!Step::kFma) {
        s[r][0] = __fmul_rn(s[r][0], scale);
        s[r][1] = __fmul_rn(s[r][1], scale);
      }
      tile_max[r] = fmaxf(s[r][0], s[r][1]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xffffffff, tile_max[r], offset));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      old_max[r] = kFirst ? -INFINITY : smem.row_max[row + r];
      new_max[r] = fmaxf(old_max[r], tile_max[r]);
      const float max_scaled = __fmul_rn(new_max[r], scale_log2);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        s[r][i] = Step::kFma ? ptx::ex2_approx_ftz(fmaf(s[r][i], scale_log2, -max_scaled))
                             : natural_exp(s[r][i] - new_max[r]);
      tile_sum[r] = s[r][0] + s[r][1];
      if constexpr (Step::kReuseNumerator) store_numerators<Step>(smem.sP[row + r], s[r], lane);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        tile_sum[r] += __shfl_xor_sync(0xffffffff, tile_sum[r], offset);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (!Step::kReuseNumerator) store_numerators<Step>(smem.sP[row + r], s[r], lane);
      const float factor = kFirst ? 0.f : history_factor<Step>(old_max[r], new_max[r], scale_log2);
      if (lane == 0) {
        smem.row_sum[row + r] =
            kFirst ? tile_sum[r] : fmaf(smem.row_sum[row + r], factor, tile_sum[r]);
        smem.row_max[row + r] = new_max[r];
        smem.row_history[row + r] = Step::kSharedRescale ? factor : old_max[r];
      }
    }
  }
}

// O [16][64] of the warp *= what its rows' maxima rose by.
template <class Step>
FA_DEVICE void rescale_output(tile::Accumulator<1, 8>& rO, const SharedStorage& smem,
                              float scale_log2, int warp_m, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_m * 16 + lane / 4 + 8 * half;
    const float history = smem.row_history[row];
    const float factor = Step::kSharedRescale
                             ? history
                             : history_factor<Step>(history, smem.row_max[row], scale_log2);
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      rO.x[0][d][2 * half] *= factor;
      rO.x[0][d][2 * half + 1] *= factor;
    }
  }
}

// O [16][64] of the warp += P V.
FA_DEVICE void product_pv(tile::Accumulator<1, 8>& rO, uint32_t sP, uint32_t sV, int warp_m,
                          int warp_n, int lane) {
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    tile::Fragment a;
    ptx::ldmatrix_x4(a, sP + ((warp_m * 16 + lane % 16) * kPaddedN + k * 16 + lane / 16 * 8) * 2);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      tile::Fragment b;
      ptx::ldmatrix_x4_trans(
          b, sV + tile::swizzle<kHeadDim>(k * 16 + lane % 16, warp_n * 8 + n + lane / 16));
      ptx::mma_m16n8k16<kDtype>(rO.x[0][n], a, b[0], b[1]);
      ptx::mma_m16n8k16<kDtype>(rO.x[0][n + 1], a, b[2], b[3]);
    }
  }
}

template <class Step>
__global__ void __launch_bounds__(kThreads) column_warps_kernel(const __grid_constant__ Problem p) {
  __shared__ __align__(1024) SharedStorage smem;
  const int thread = threadIdx.x, warp = ptx::warp_id(), lane = ptx::lane_id();
  const int warp_m = warp / 2, warp_n = warp % 2;
  const uint32_t sQ = ptx::smem_addr(smem.sQ), sKV = ptx::smem_addr(smem.sKV),
                 sP = ptx::smem_addr(smem.sP);
  const Place place = place_of_cta<true>();
  const int64_t head = static_cast<int64_t>(place.head) * p.seqlen * kHeadDim;
  const int row_begin = place.m_block * kBlockM;

  load_tile<kBlockM>(sQ, p.query + head + row_begin * kHeadDim, kHeadDim, thread);
  if constexpr (!Step::kFirstApart) {
    if (thread < kBlockM) {
      smem.row_max[thread] = -INFINITY;
      smem.row_sum[thread] = 0.f;
    }
    __syncthreads();  // the state is there for all
  }
  tile::Accumulator<1, 8> rO;
  rO.clear();
#pragma unroll 1
  for (int key = 0; key < p.seqlen; key += kBlockN) {
    load_tile<kBlockN>(sKV, p.key + head + key * kHeadDim, kHeadDim, thread);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // K is there for all
    tile::Accumulator<1, 4> rS;
    product_qk<Step::kLoads>(rS, sQ, sKV, warp_m, warp_n, lane);
    store_scores(smem, rS, warp_m, warp_n, lane);
    __syncthreads();  // the rows of scores are whole; all have read K
    load_tile<kBlockN>(sKV, p.value + head + key * kHeadDim, kHeadDim, thread);
    ptx::cp_async_commit_group();
    if (Step::kFirstApart && key == 0) {
      softmax<Step, true>(smem, p.scale, p.scale_log2, warp, lane);
    } else {
      softmax<Step, false>(smem, p.scale, p.scale_log2, warp, lane);
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // P and V are there for all
    if (!Step::kFirstApart || key > 0) rescale_output<Step>(rO, smem, p.scale_log2, warp_m, lane);
    product_pv(rO, sP, sKV, warp_m, warp_n, lane);
    __syncthreads();  // all have read V and P
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_m * 16 + lane / 4 + 8 * half;
    store_rows(p.out + head + (row_begin + row) * kHeadDim + warp_n * 64, rO.x[0], half,
               ptx::rcp_approx_ftz(smem.row_sum[row]), lane);
  }
}

template <class Step>
constexpr Rung rung(const char* name) {
  return {name, column_warps_kernel<Step>, kBlockM, true};
}

const Rung kRungs[] = {
    rung<V5>("V5"),
    rung<V6>("V6"),
    rung<V7>("V7"),
    rung<V8>("V8"),
    with_unused_smem(rung<V8>("V8 at 4 CTAs"), 8 * 1024),
    rung<V9DoubleBuffered>("V9 double-buffered"),
    rung<V9PrefetchA>("V9 A prefetched"),
    rung<V9FixedAddresses>("V9 fixed addresses"),
    rung<V10>("V10"),
    rung<V11Templates>("V11 two templates"),
    rung<V11>("V11"),
    {"whole rows", whole_rows_kernel<false>, kWholeRowsBlock, true},
};
constexpr int kCount = sizeof(kRungs) / sizeof(Rung);

}  // namespace
}  // namespace fa::ladder

// Return a cudaError_t.
extern "C" int log000_launch(const char* name, const fa::ladder::Problem* p, cudaStream_t stream) {
  using namespace fa::ladder;
  return launch_rung(find_rung(kRungs, kCount, name), *p, stream);
}

extern "C" int log000_describe(const char* name, fa::ladder::Facts* facts) {
  using namespace fa::ladder;
  return describe_rung(find_rung(kRungs, kCount, name), facts);
}
