// combine.cu: merges what the splits of the decoding kernels found, O of the same row over
// different keys, weighted by the sums of their exponentials.
//
//   partial_out [splits][cols]   slice 0:  splits 0, kSlices, ...     \
//                                slice 1:  splits 1, kSlices + 1, ...  >  sum over slices  ──►  out
//                                                                     /
//
// A CTA owns one row; a thread four columns in one slice of the splits. Splits without keys
// weigh nothing; a row of nothing else is 0 with LSE -inf.
//
//   partial_out [rows][splits][cols_rounded], partial_sums [rows][splits], in fp32; rows are
//   [batch] [heads_q][seqlen_q]. LSEs are natural.
#include <cuda_runtime.h>

#include "../attn/merge.cuh"
#include "dependent_launch.cuh"
#include "dispatch.h"

namespace fa {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // splits of a thread that are under way at once
constexpr int kMaxSplits = 128;

template <int kCols, Dtype kDtype>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ DecodeParams p, bool out_aligned) {
  constexpr int kVectors = kCols / 4, kSlices = kThreads / kVectors;
  __shared__ float4 sPart[kSlices][kVectors];
  __shared__ float sWeight[kMaxSplits];
  const int lane = ptx::lane_id(), slice = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
  let_kernel_after_start();
  wait_for_kernels_before();

  const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y * gridDim.x +
                      static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const auto* gSums = reinterpret_cast<const attn::PartSum*>(p.partial_sums) + row * p.num_splits;
  const float scale = p.scale == 0.f ? 1.f : fabsf(p.scale), scale_log2 = scale * kLog2E;
  const auto* gPart =
      reinterpret_cast<const float4*>(p.partial_out) + row * p.num_splits * kVectors + vector;
  auto part = [&](int split) {
    return split < p.num_splits ? gPart[static_cast<int64_t>(split) * kVectors]
                                : make_float4(0.f, 0.f, 0.f, 0.f);
  };
  // Under way while the weights are found.
  float4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = part(slice + i * kSlices);

  // Every warp finds the maximum and the sum of the weights for itself.
  float max = -INFINITY, sum = 0.f;
#pragma unroll 1
  for (int s = lane; s < p.num_splits; s += 32) max = fmaxf(max, gSums[s].max);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, mask));
  const float reference = attn::merge_reference(max);
#pragma unroll 1
  for (int s = lane; s < p.num_splits; s += 32) {
    const float weight = attn::merge_weight(gSums[s], reference, scale_log2);
    sum += weight;
    if (threadIdx.x < 32) sWeight[s] = weight;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);

  __syncthreads();  // the weights are there

  float4 mine = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int s = slice; s < p.num_splits; s += kAhead * kSlices) {
    float4 now[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      now[i] = ahead[i];
      ahead[i] = part(s + (kAhead + i) * kSlices);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int split = s + i * kSlices;
      const float weight = split < p.num_splits ? sWeight[split] : 0.f;
      mine.x += weight * now[i].x;
      mine.y += weight * now[i].y;
      mine.z += weight * now[i].z;
      mine.w += weight * now[i].w;
    }
  }
  sPart[slice][vector] = mine;
  __syncthreads();  // the sums of all slices are there
  if (slice != 0) return;
#pragma unroll
  for (int i = 1; i < kSlices; ++i) {
    mine.x += sPart[i][vector].x;
    mine.y += sPart[i][vector].y;
    mine.z += sPart[i][vector].z;
    mine.w += sPart[i][vector].w;
  }
  const float inverse = attn::merge_inverse(sum);
  const int col = 4 * vector;
  const uint2 words = {ptx::cvt_rn_x2<kDtype>(mine.x * inverse, mine.y * inverse),
                       ptx::cvt_rn_x2<kDtype>(mine.z * inverse, mine.w * inverse)};
  uint16_t* gO = static_cast<uint16_t*>(p.out) + blockIdx.z * p.out_stride[0] +
                 blockIdx.y * p.out_stride[1] + blockIdx.x * p.out_stride[2] + col;
  if (threadIdx.x == 0) p.lse[row] = attn::merge_lse({reference, sum}, scale);
  if (out_aligned) {
    if (col < p.head_dim) *reinterpret_cast<uint2*>(gO) = words;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const uint32_t word = e < 2 ? words.x : words.y;
    if (col + e < p.head_dim) gO[e] = static_cast<uint16_t>(word >> 16 * (e % 2));
  }
}

}  // namespace

cudaError_t launch_combine(const DecodeParams& p, LaunchFeatures features, cudaStream_t stream) {
  if (p.num_splits > kMaxSplits) return cudaErrorInvalidValue;
  const bool out_aligned = p.head_dim % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0 &&
                           p.out_stride[0] % 4 == 0 && p.out_stride[1] % 4 == 0 &&
                           p.out_stride[2] % 4 == 0;
  const dim3 grid(p.seqlen_q, p.heads_q, p.batch);
  const int cols = p.head_dim <= 64 ? 64 : p.head_dim <= 128 ? 128 : 256;
  return dispatch_value<64, 128, 256>(cols, [&](auto d) {
    return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(p.dtype, [&](auto dtype) {
      return launch_kernel(features, combine_kernel<d(), dtype()>, grid, kThreads, 0, stream, p,
                           out_aligned);
    });
  });
}

}  // namespace fa
