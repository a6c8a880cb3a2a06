// mask_summary.cu: what each block of a mask tensor holds, so that attention skips what is hidden.
//
//   mask [batch][heads][seqlen_q][seqlen_k], by its strides ──► summary: one MaskClass per 64 x 64
//   block
//
//   one CTA a block:  thread t reads column t % 64 of rows t / 64, t / 64 + 2, ...  then votes:
//                     all hidden │ all visible with nothing added │ mixed
//
// Dimensions that the mask broadcasts (stride 0) are read once. Against attention this is one pass
// over a mask that is mostly shared by all heads; it costs a launch and buys every block that a
// padding or document mask hides.
//
// Needs    sm_80 or newer.  Layout of the summary: attn/block_info.cuh.
#include <cuda_runtime.h>

#include <limits>

#include "../attn/block_info.cuh"
#include "../attn/mask.cuh"
#include "dispatch.h"
#include "launch.h"

namespace fa {
namespace {

constexpr int kThreads = 128;

template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads)
    mask_summary_kernel(const __grid_constant__ FwdParams p) {
  const attn::MaskSummaryShape shape(p);
  const int64_t block = blockIdx.x;
  const int64_t key_block = block % shape.key_blocks,
                row_block = block / shape.key_blocks % shape.row_blocks;
  const int64_t slice = block / (shape.key_blocks * shape.row_blocks);
  const int64_t offset =
      slice / shape.heads * p.mask_stride[0] + slice % shape.heads * p.mask_stride[1];

  const int64_t rows = p.mask_stride[2] ? p.seqlen_q : 1, keys = p.mask_stride[3] ? p.seqlen_k : 1;
  const int64_t row_end = min(rows, (row_block + 1) * kMaskSummaryBlock);
  const int64_t key = key_block * kMaskSummaryBlock + threadIdx.x % kMaskSummaryBlock;
  bool hidden = true, visible = true;
  if (key < keys) {
    for (int64_t row = row_block * kMaskSummaryBlock + threadIdx.x / kMaskSummaryBlock;
         row < row_end; row += kThreads / kMaskSummaryBlock) {
      const float bias = attn::mask_value<kDtype>(
          p.mask, offset + row * p.mask_stride[2] + key * p.mask_stride[3], p.mask_dtype);
      hidden &= bias == -INFINITY;
      visible &= bias == 0.f;
    }
  }
  const bool all_hidden = __syncthreads_and(hidden), all_visible = __syncthreads_and(visible);
  if (threadIdx.x == 0) {
    p.mask_summary[block] = all_hidden    ? attn::kMaskHidden
                            : all_visible ? attn::kMaskVisible
                                          : attn::kMaskMixed;
  }
}

}  // namespace

int64_t mask_summary_bytes(const FwdParams& params) {
  return attn::MaskSummaryShape(params).size();
}

cudaError_t launch_mask_summary(const FwdParams& params, cudaStream_t stream) {
  const int64_t blocks = mask_summary_bytes(params);
  if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.dtype, [&](auto dtype) {
    mask_summary_kernel<dtype()><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace fa
