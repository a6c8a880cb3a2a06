// bwd_row_sums.cu: the sums of P that LSE does not tell, for rows that an additive mask moves far.
//
//   lse_log2[m] = log2 sum_n exp(scale * q_m . k_n + mask - LSE[m])         0 where LSE is exact
//
// exp(S - LSE) makes a P of sum 1 as long as LSE resolves log n. That of a row whose keys all have
// the lowest float for a bias does not: there S and LSE are the same number, and each P would be 1.
// So rows with |LSE| above kLargeLse get the sum of these, by which the backward divides.
//
//   a warp takes kWarpRows rows and a lane every 32nd key of a row
//
// Bounds   of a mask that leaves rows to far keys alone, padding for the most part, these rows: the
//          inputs come from the caches. Otherwise LSE is read once.
// Needs    MaskMode::kTensor and an additive mask; after launch_bwd_pre.
#include <cuda_runtime.h>

#include <limits>
#include <type_traits>

#include "../attn/mask.cuh"
#include "../attn/scheduler.cuh"
#include "../tile/piece.cuh"
#include "dispatch.h"
#include "launch.h"

namespace fa {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kWarpRows = 8;
// Half an ulp of a smaller LSE changes P by at most 2^-14, less than its rounding to fp16 does.
constexpr float kLargeLse = 1024.f;

template <Dtype kDtype, class Element>
__global__ void __launch_bounds__(kThreads)
    bwd_row_sums_kernel(const __grid_constant__ BwdParams p, attn::FastDivide row_blocks,
                        attn::FastDivide heads, attn::FastDivide group) {
  const FwdParams& f = p.fwd;
  const int warp = ptx::warp_id(), lane = ptx::lane_id();
  const unsigned pair = row_blocks.quotient(blockIdx.x);  // batch_idx * heads_q + head_idx
  const int first_row =
      static_cast<int>(blockIdx.x - pair * row_blocks.divisor) * kWarps * kWarpRows;
  const int64_t batch_idx = heads.quotient(pair), head_idx = pair - batch_idx * heads.divisor;
  const float* gLse = f.lse + int64_t{pair} * f.seqlen_q;
  const auto* gQ = static_cast<const uint16_t*>(f.query) + batch_idx * f.query_stride[0] +
                   head_idx * f.query_stride[1];
  const auto* gK = static_cast<const uint16_t*>(f.key) + batch_idx * f.key_stride[0] +
                   group.quotient(static_cast<unsigned>(head_idx)) * f.key_stride[1];
  const auto* gMask = static_cast<const Element*>(f.mask) + batch_idx * f.mask_stride[0] +
                      head_idx * f.mask_stride[1];
#pragma unroll 1
  for (int i = warp; i < kWarps * kWarpRows; i += kWarps) {
    const int row = first_row + i;
    if (row >= f.seqlen_q) return;
    const float lse = __ldg(gLse + row);
    if (!(fabsf(lse) > kLargeLse) || isinf(lse)) continue;
    const attn::KeyRange keys = attn::key_range(f, row, row + 1);
    float sum = 0.f;
#pragma unroll 1
    for (int key = keys.first + lane; key < keys.end; key += 32) {
      float score = 0.f;
      for (int col = 0; col < f.head_dim; col += 8)
        score += tile::dot<kDtype>(
            __ldg(reinterpret_cast<const uint4*>(gQ + row * f.query_stride[2] + col)),
            __ldg(reinterpret_cast<const uint4*>(gK + key * f.key_stride[2] + col)));
      score *= f.scale;
      attn::add_bias(
          score, attn::mask_bias(__ldg(gMask + row * f.mask_stride[2] + key * f.mask_stride[3])));
      sum += ptx::ex2_approx_ftz((score - lse) * kLog2E);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (lane == 0) p.lse_log2[int64_t{pair} * p.rows_rounded + row] = log2f(sum);
  }
}

}  // namespace

cudaError_t launch_bwd_row_sums(const BwdParams& params, cudaStream_t stream) {
  const FwdParams& f = params.fwd;
  const int64_t row_blocks = (f.seqlen_q + kWarps * kWarpRows - 1) / (kWarps * kWarpRows);
  const int64_t ctas = int64_t{f.batch} * f.heads_q * row_blocks;
  if (ctas > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(f.dtype, [&](auto dtype) {
    using Half = std::conditional_t<dtype() == Dtype::kFloat16, __half, __nv_bfloat16>;
    const auto launch = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(
          params, attn::FastDivide(row_blocks), attn::FastDivide(f.heads_q),
          attn::FastDivide(f.heads_q / f.heads_k));
      return cudaGetLastError();
    };
    return f.mask_dtype == MaskDtype::kFloat32 ? launch(bwd_row_sums_kernel<dtype(), float>)
                                               : launch(bwd_row_sums_kernel<dtype(), Half>);
  });
}

}  // namespace fa
