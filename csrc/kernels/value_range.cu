// value_range.cu: are query, key and value so small that attention may leave out far blocks of a
// mask (attn/mask_summary.cuh)?
//
//   query, key [batch][heads][seqlen][head_dim] ──► all |x| <= 1e12?  ─┐
//   value      likewise                         ──► all x finite?     ─┴► no: flags.unsafe = 1
//
//   one CTA a chunk of rows; its threads form a grid [rows][16-byte pieces of a row], the pieces
//   rounded up to a power of two; kLoads such grids below each other, all in flight at once
//
// With |query|, |key| <= 1e12, head_dim <= 256 and scale <= 256, scores are at most 6.6e28. Those
// with a far bias, below -1e30, then stay more than 8e29 below one with a normal bias: their
// exponential is 0 in any precision, and value, which it is multiplied with, must not make it NaN.
//
// A dimension without extent or that a tensor expands (stride 0) is read once. Without a far block
// in the mask nothing is read.
//
// Bounds   memory: the tensors are read once. 128 KiB an SM in flight hide the latency of an
// H200's. Needs    sm_80 or newer.
#include <cuda_runtime.h>

#include <algorithm>

#include "../attn/mask_summary.cuh"
#include "launch.h"

namespace fa {
namespace {

constexpr int kThreads = 128, kLoads = 8, kCtasPerSm = 8;
constexpr float kMaxScale = 256.f;
// Bit patterns of the largest numbers accepted, without sign.
constexpr uint32_t kFp16Finite = 0x7bff, kBf16Finite = 0x7f7f, kBf16Below1e12 = 0x5368;

// A tensor [batches][heads][rows][pieces of 16 bytes] as the kernel walks it.
struct Rows {
  const void* first;
  int64_t stride[3];  // batch, head, row; in pieces
  int heads, rows;
  int64_t row_chunks;  // of a head
  int64_t chunks;
  uint32_t limit;
};

struct Tensors {
  Rows tensor[3];  // query, key, value
  int pieces;      // of a row
  int log_pieces;  // of the next power of two
};

// Of a chunk. Loads past its end go to the last row or piece instead, which needs no predicates.
__device__ bool exceeds(const Rows& tensor, int64_t chunk, int pieces, int log_pieces) {
  const int64_t slice = chunk / tensor.row_chunks;
  const int row_step = kThreads >> log_pieces;
  const int64_t row =
      (chunk - slice * tensor.row_chunks) * kLoads * row_step + (threadIdx.x >> log_pieces);
  const int piece = min(static_cast<int>(threadIdx.x & ((1 << log_pieces) - 1)), pieces - 1);
  const uint4* source = static_cast<const uint4*>(tensor.first) +
                        slice / tensor.heads * tensor.stride[0] +
                        slice % tensor.heads * tensor.stride[1] + piece;
  uint4 loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t in_range = min(row + i * row_step, static_cast<int64_t>(tensor.rows - 1));
    loaded[i] = __ldg(source + in_range * tensor.stride[2]);
  }
  // Bit 15 of either half: a sum of at most 0xfffe reaches it if the number exceeds the limit.
  const uint32_t margin = (0x7fff - tensor.limit) * 0x00010001;
  uint32_t sums = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    for (const uint32_t pair : {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w})
      sums |= (pair & 0x7fff7fff) + margin;
  }
  return (sums & 0x80008000) != 0;
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    value_range_kernel(const __grid_constant__ Tensors tensors, attn::SkipFlags* flags,
                       float scale) {
  if (flags->far == 0) return;
  bool unsafe = !(fabsf(scale) <= kMaxScale);
  int64_t chunk = blockIdx.x;
#pragma unroll 1
  for (const Rows& tensor : tensors.tensor) {
#pragma unroll 1
    for (; chunk < tensor.chunks; chunk += gridDim.x)
      unsafe |= exceeds(tensor, chunk, tensors.pieces, tensors.log_pieces);
    chunk -= tensor.chunks;  // on with the next one where this one ended
  }
  if (unsafe) flags->unsafe = 1;  // all writers write the same
}

Rows describe(const void* first, const int64_t (&stride)[3], int batch, int heads, int rows,
              uint32_t limit, int log_pieces) {
  const int chunk_rows = kLoads * (kThreads >> log_pieces);
  Rows result{};
  result.first = first;
  for (int i = 0; i < 3; ++i) result.stride[i] = stride[i] / 8;
  result.heads = stride[1] ? heads : 1;
  result.rows = stride[2] ? rows : 1;
  result.row_chunks = (int64_t{result.rows} + chunk_rows - 1) / chunk_rows;
  result.chunks = int64_t{stride[0] ? batch : 1} * result.heads * result.row_chunks;
  result.limit = limit;
  return result;
}

}  // namespace

cudaError_t launch_value_range(const FwdParams& p, cudaStream_t stream) {
  Tensors tensors{};
  tensors.pieces = (p.head_dim + 7) / 8;
  while ((1 << tensors.log_pieces) < tensors.pieces) ++tensors.log_pieces;
  const bool half = p.dtype == Dtype::kFloat16;
  const uint32_t finite = half ? kFp16Finite : kBf16Finite, small = half ? finite : kBf16Below1e12;
  auto& [query, key, value] = tensors.tensor;
  query =
      describe(p.query, p.query_stride, p.batch, p.heads_q, p.seqlen_q, small, tensors.log_pieces);
  key = describe(p.key, p.key_stride, p.batch, p.heads_k, p.seqlen_k, small, tensors.log_pieces);
  value =
      describe(p.value, p.value_stride, p.batch, p.heads_k, p.seqlen_k, finite, tensors.log_pieces);

  int device, num_sms;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  if (const cudaError_t status =
          cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      status != cudaSuccess) {
    return status;
  }
  const int64_t chunks = query.chunks + key.chunks + value.chunks;
  value_range_kernel<<<static_cast<unsigned>(std::min<int64_t>(chunks, num_sms * kCtasPerSm)),
                       kThreads, 0, stream>>>(
      tensors, attn::MaskSummaryShape(p).flags(p.mask_summary), p.scale);
  return cudaGetLastError();
}

}  // namespace fa
