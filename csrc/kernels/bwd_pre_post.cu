// bwd_pre_post.cu: what the backward kernels share, before and after them.
//
//   before   delta[m] = sum_d out[m][d] * grad_out[m][d]     lse_log2[m] = lse[m] * log2 e, or with
//            a mask tensor 0 or the result of bwd_row_sums.cu
//            grad_query_accum, turns = 0
//
//            a CTA takes kRows rows of one (batch, head), 8, 16 or 32 threads a row; a thread has
//            the 16-byte pieces of kPasses rows in flight, and stores its share of the zeros while
//            they come
//
//   after    grad_query[m][d] = scale * grad_query_accum[m][d], rounded
//
//            a thread stores 8 or 16 neighbouring columns of two rows, which the accumulator layout
//            (GradQueryLayout) keeps in the registers of four or of eight lanes
//
// Packed sequences have their rows in the scratch as attn/packed.cuh says: a thread finds what row
// of the tensors its row of scratch belongs to, if any.
//
// Bounds   memory. Every number is read or written once.
// Needs    what BwdParams says of rows.
#include <cuda_runtime.h>

#include <limits>

#include "../attn/packed.cuh"
#include "../ptx/sm80.cuh"
#include "../tile/piece.cuh"
#include "dispatch.h"
#include "launch.h"

namespace fa {
namespace {

constexpr int kThreads = 256;
constexpr int kPasses = 4;  // rows of a thread in bwd_pre

// What BwdParams::lse_log2 holds. Rows without a key get +inf, which makes their P 0. An infinite
// LSE belongs to a row without a softmax; NaN is what plain code makes of its P.
FA_DEVICE float lse_to_log2(float lse, MaskMode mask_mode) {
  if (lse == -INFINITY) return INFINITY;
  if (lse == INFINITY) return NAN;
  return mask_mode == MaskMode::kTensor ? 0.f : lse * kLog2E;
}

// Where a row of scratch lies in the tensors.
template <bool kPacked>
FA_DEVICE attn::ScratchRow find_row(const FwdParams& p, const attn::FastDivide& block_m, int row) {
  if constexpr (kPacked) return attn::row_of_scratch(p, block_m, row);
  return {row, p.seqlen_q - row};
}

template <Dtype kDtype, int kRowThreads, bool kPacked>
__global__ void __launch_bounds__(kThreads, 4)
    bwd_pre_kernel(const __grid_constant__ BwdParams p, attn::FastDivide block_m,
                   attn::FastDivide row_blocks, attn::FastDivide heads) {
  constexpr int kPassRows = kThreads / kRowThreads, kRows = kPassRows * kPasses;
  const FwdParams& f = p.fwd;
  const unsigned pair = row_blocks.quotient(blockIdx.x);  // batch_idx * heads_q + head_idx
  const int row_begin = static_cast<int>(blockIdx.x - pair * row_blocks.divisor) * kRows;
  const int64_t batch_idx = heads.quotient(pair), head_idx = pair - batch_idx * heads.divisor;
  const int thread = threadIdx.x, col = thread % kRowThreads * 8;
  const int first_row = row_begin + thread / kRowThreads;

  const auto* gOut = static_cast<const uint16_t*>(f.out) + batch_idx * f.out_stride[0] +
                     head_idx * f.out_stride[1] + col;
  const auto* gGradOut = static_cast<const uint16_t*>(p.grad_out) +
                         batch_idx * p.grad_out_stride[0] + head_idx * p.grad_out_stride[1] + col;
  uint4 out[kPasses], grad_out[kPasses];
  int rows_of_pass[kPasses];  // -1 where there is none
  attn::ScratchRow at;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    // The rows of a pass lie in one block, and most often in that of the pass before.
    const int pass = row_begin + i * kPassRows;
    if (!kPacked || i == 0 || pass == static_cast<int>(block_m.quotient(pass) * block_m.divisor)) {
      at = find_row<kPacked>(f, block_m, first_row + i * kPassRows);
    } else {
      at = {at.row + kPassRows, at.rows_left - kPassRows};
    }
    const int64_t row = rows_of_pass[i] = at.rows_left > 0 ? at.row : -1;
    out[i] = grad_out[i] = make_uint4(0, 0, 0, 0);
    if (row >= 0 && col < f.head_dim) {
      out[i] = *reinterpret_cast<const uint4*>(gOut + row * f.out_stride[2]);
      grad_out[i] = *reinterpret_cast<const uint4*>(gGradOut + row * p.grad_out_stride[2]);
    }
  }

  // The CTA's part of what starts as zeros.
  const int rows = min(kRows, p.rows_rounded - row_begin);
  const int64_t first_element = (int64_t{pair} * p.rows_rounded + row_begin) * p.cols_rounded;
  auto* zeros = reinterpret_cast<float4*>(p.grad_query_accum + first_element);
  for (int i = thread; i < rows * p.cols_rounded / 4; i += kThreads)
    zeros[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (p.turns != nullptr) {
    const int size = static_cast<int>(block_m.divisor);
    const int block = block_m.quotient(row_begin + size - 1) + thread;  // first row is the CTA's
    if (block * size < row_begin + rows)
      p.turns[int64_t{pair} * block_m.quotient(p.rows_rounded) + block] = 0;
  }

  const int64_t first_stat = int64_t{pair} * p.rows_rounded;
  const float* gLse = f.lse + int64_t{pair} * f.seqlen_q;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = first_row + i * kPassRows;
    float sum = tile::dot<kDtype>(out[i], grad_out[i]);
#pragma unroll
    for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2)
      sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (col == 0 && row < p.rows_rounded) {
      const float lse = rows_of_pass[i] >= 0 ? gLse[rows_of_pass[i]] : -INFINITY;
      p.delta[first_stat + row] = lse == -INFINITY ? 0.f : sum;  // not 0 * NaN
      p.lse_log2[first_stat + row] = lse_to_log2(lse, f.mask_mode);
    }
  }
}

// Eight columns of a row of grad_query, those below `columns`.
FA_DEVICE void store_piece(uint16_t* gRow, const uint32_t (&pairs)[4], int columns, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(gRow) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < columns) gRow[i] = static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2));
  }
}

// Lane j of a quad gets x[j] of each lane: x[i] becomes that of lane i.
FA_DEVICE void transpose_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = lane & bit;
      const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i | bit], bit);
      (upper ? x[i] : x[i | bit]) = received;
    }
  }
}

// items: threads' shares of a head, of 16 numbers (kRows) or 32 (kTransposed).
template <Dtype kDtype, GradQueryLayout kLayout, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    bwd_post_kernel(const __grid_constant__ BwdParams p, bool aligned, int items,
                    attn::FastDivide block_m, attn::FastDivide ctas_of_head,
                    attn::FastDivide heads) {
  constexpr bool kRowMajor = kLayout == GradQueryLayout::kRows;
  constexpr int kColumns = kRowMajor ? 8 : 16;  // of a block
  const FwdParams& f = p.fwd;
  const unsigned pair = ctas_of_head.quotient(blockIdx.x);  // batch_idx * heads_q + head_idx
  const int item =
      static_cast<int>(blockIdx.x - pair * ctas_of_head.divisor) * kThreads + threadIdx.x;
  if (item >= items) return;  // whole warps
  // kRows: a warp takes four neighbouring blocks and a lane ends up with rows r and r + 8 of one of
  // them, so that a quad stores 64 bytes of a row together. kTransposed: lane t of a quad takes
  // rows 2 t and 2 t + 1 of a block, and stores 32 bytes of each.
  const int lane = item % 32;
  const int block = kRowMajor ? item / 32 * 4 + lane % 4 : item / 4;
  const int blocks_of_row = p.cols_rounded / kColumns;
  const int row_block = block / blocks_of_row, col = (block - row_block * blocks_of_row) * kColumns;
  const auto [row, rows_left] = find_row<kPacked>(
      f, block_m, kRowMajor ? row_block * 16 + lane / 4 : row_block * 8 + 2 * (lane % 4));

  const int64_t head_size = int64_t{p.rows_rounded} * p.cols_rounded;
  const auto* gHead = reinterpret_cast<const float4*>(p.grad_query_accum + pair * head_size);
  const int64_t batch_idx = heads.quotient(pair), head_idx = pair - batch_idx * heads.divisor;
  uint16_t* gRow = static_cast<uint16_t*>(p.grad_query) + batch_idx * p.grad_query_stride[0] +
                   head_idx * p.grad_query_stride[1] + row * p.grad_query_stride[2] + col;
  const int columns = f.head_dim - col;

  if constexpr (kRowMajor) {
    uint32_t pairs[2][4];  // rows r and r + 8, of each of the four blocks
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 x = gHead[(int64_t{item / 32} * 4 + j) * 32 + lane];
      pairs[0][j] = ptx::cvt_rn_x2<kDtype>(f.scale * x.x, f.scale * x.y);
      pairs[1][j] = ptx::cvt_rn_x2<kDtype>(f.scale * x.z, f.scale * x.w);
    }
    transpose_quad(pairs[0], lane);
    transpose_quad(pairs[1], lane);
    if (columns <= 0) return;
    if (rows_left > 0) store_piece(gRow, pairs[0], columns, aligned);
    if (rows_left > 8) store_piece(gRow + 8 * p.grad_query_stride[2], pairs[1], columns, aligned);
  } else {
    if (rows_left <= 0 || columns <= 0) return;
    float x[2][2][8];  // rows 2 t and 2 t + 1; columns 0 to 7 and 8 to 15
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 numbers = gHead[int64_t{block} * 32 + 4 * j + lane % 4];
      x[0][0][j] = numbers.x, x[1][0][j] = numbers.y;
      x[0][1][j] = numbers.z, x[1][1][j] = numbers.w;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r, gRow += p.grad_query_stride[2]) {
      if (r >= rows_left) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          pairs[i] =
              ptx::cvt_rn_x2<kDtype>(f.scale * x[r][half][2 * i], f.scale * x[r][half][2 * i + 1]);
        if (columns > 8 * half) store_piece(gRow + 8 * half, pairs, columns - 8 * half, aligned);
      }
    }
  }
}

bool is_packed(const FwdParams& p) { return p.packed.cu_seqlens_q != nullptr; }

// One CTA for each of `per_pair` parts of every (batch, head).
bool grid_of(const FwdParams& p, int64_t per_pair, unsigned& ctas) {
  const int64_t all = (is_packed(p) ? 1 : int64_t{p.batch}) * p.heads_q * per_pair;
  ctas = static_cast<unsigned>(all);
  return all <= std::numeric_limits<int>::max();
}

}  // namespace

cudaError_t launch_bwd_pre(const BwdParams& params, int block_m, cudaStream_t stream) {
  const int head_dim = params.fwd.head_dim;
  const int row_threads = head_dim <= 64 ? 8 : head_dim <= 128 ? 16 : 32;
  const int rows = kThreads / row_threads * kPasses;
  const int row_blocks = (params.rows_rounded + rows - 1) / rows;
  unsigned ctas;
  if (!grid_of(params.fwd, row_blocks, ctas)) return cudaErrorInvalidConfiguration;
  const cudaError_t status = dispatch_value<8, 16, 32>(row_threads, [&](auto threads) {
    return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.fwd.dtype, [&](auto dtype) {
      return dispatch_value<false, true>(is_packed(params.fwd), [&](auto packed) {
        bwd_pre_kernel<dtype(), threads(), packed()><<<ctas, kThreads, 0, stream>>>(
            params, attn::FastDivide(block_m), attn::FastDivide(row_blocks),
            attn::FastDivide(params.fwd.heads_q));
        return cudaGetLastError();
      });
    });
  });
  const bool additive =
      params.fwd.mask_mode == MaskMode::kTensor && params.fwd.mask_dtype != MaskDtype::kBool;
  return additive && status == cudaSuccess ? launch_bwd_row_sums(params, stream) : status;
}

cudaError_t launch_bwd_post(const BwdParams& params, int block_m, GradQueryLayout layout,
                            cudaStream_t stream) {
  const int64_t* stride = params.grad_query_stride;
  const bool aligned = params.fwd.head_dim % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(params.grad_query) % 16 == 0 &&
                       stride[0] % 8 == 0 && stride[1] % 8 == 0 && stride[2] % 8 == 0;
  const int64_t items = int64_t{params.rows_rounded} * params.cols_rounded /
                        (layout == GradQueryLayout::kRows ? 16 : 32);
  const int64_t ctas_of_head = (items + kThreads - 1) / kThreads;
  unsigned ctas;
  if (ctas_of_head * kThreads > std::numeric_limits<int>::max() ||
      !grid_of(params.fwd, ctas_of_head, ctas))
    return cudaErrorInvalidConfiguration;
  return dispatch_value<GradQueryLayout::kRows, GradQueryLayout::kTransposed>(
      layout, [&](auto layout) {
        return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.fwd.dtype, [&](auto dtype) {
          return dispatch_value<false, true>(is_packed(params.fwd), [&](auto packed) {
            bwd_post_kernel<dtype(), layout(), packed()><<<ctas, kThreads, 0, stream>>>(
                params, aligned, static_cast<int>(items), attn::FastDivide(block_m),
                attn::FastDivide(ctas_of_head), attn::FastDivide(params.fwd.heads_q));
            return cudaGetLastError();
          });
        });
      });
}

}  // namespace fa
