// append_kv.cu: writes the new keys and values of every sequence to its cache, behind those that
// are there.
//
//   new_key, new_value [batch][seqlen_new][heads_k][head_dim]
//                        row i of sequence b  ──►  slot seqlens_k[b] + i of its cache, or of the
//                                                  page that block_table names for the slot
//
// A thread owns 8 columns of one new row of one head. Rows whose place lies outside of the cache
// are dropped. Strides count elements.
#include <cuda_runtime.h>

#include "../attn/paged_kv.cuh"
#include "dependent_launch.cuh"

namespace fa {
namespace {

constexpr int kThreads = 256;

// 8 columns, or as many as the row has.
FA_DEVICE void copy_columns(uint16_t* target, const uint16_t* source, int columns, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    return;
  }
#pragma unroll 1
  for (int e = 0; e < min(columns, 8); ++e) target[e] = source[e];
}

__global__ void __launch_bounds__(kThreads)
    append_kv_kernel(const __grid_constant__ AppendParams p, bool aligned) {
  wait_for_kernels_before();
  let_kernel_after_start();
  const int chunks = (p.head_dim + 7) / 8, row = blockIdx.x, batch_idx = blockIdx.z;
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= p.heads_k * chunks) return;
  const int head = i / chunks, col = i % chunks * 8;
  const int64_t key = attn::keys_before(p.cache, batch_idx) + row;
  if (key < 0 || key >= p.cache.capacity) return;
  const uint32_t page = attn::page_of(p.cache, batch_idx, static_cast<int>(key));
  if (page >= p.cache.num_pages) return;
  const int64_t page_row = attn::row_in_page(p.cache, static_cast<int>(key));
  auto copy = [&](void* cache, const int64_t (&stride)[3], const void* source,
                  const int64_t (&source_stride)[3]) {
    copy_columns(static_cast<uint16_t*>(cache) + page * stride[0] + head * stride[1] +
                     page_row * stride[2] + col,
                 static_cast<const uint16_t*>(source) + batch_idx * source_stride[0] +
                     head * source_stride[1] + row * source_stride[2] + col,
                 p.head_dim - col, aligned);
  };
  copy(p.cache.key, p.cache.key_stride, p.new_key, p.new_key_stride);
  copy(p.cache.value, p.cache.value_stride, p.new_value, p.new_value_stride);
}

}  // namespace

cudaError_t launch_append_kv(const AppendParams& p, LaunchFeatures features, cudaStream_t stream) {
  const bool aligned = p.head_dim % 8 == 0 && in_pieces(p.cache.key, p.cache.key_stride) &&
                       in_pieces(p.cache.value, p.cache.value_stride) &&
                       in_pieces(p.new_key, p.new_key_stride) &&
                       in_pieces(p.new_value, p.new_value_stride);
  const int64_t columns = int64_t{p.heads_k} * ((p.head_dim + 7) / 8);
  const dim3 grid(p.cache.seqlen_new, (columns + kThreads - 1) / kThreads, p.batch);
  return launch_kernel(features, append_kv_kernel, grid, kThreads, 0, stream, p, aligned);
}

}  // namespace fa
