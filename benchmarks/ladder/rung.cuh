// What the kernels of both logs share: the problem, the copy of a tile, how a rung is launched and
// what it takes from an SM. Which rungs there are stands at the foot of log000.cu and log002.cu.
#pragma once
#include <cuda_runtime.h>

#include <cstring>

#include "../../csrc/tile/copy.cuh"
#include "../../csrc/tile/mma_sm80.cuh"

namespace fa::ladder {

constexpr int kHeadDim = 128;
constexpr int kThreads = 128;
constexpr Dtype kDtype = Dtype::kFloat16;

struct Strides {
  int64_t batch, head, row;  // in elements
};

// Mirrored in benchmarks/ladder_kernels.py.
struct Problem {
  const uint16_t* query;  // [batch, heads_q, seqlen, kHeadDim], contiguous, as all of them
  const uint16_t* key;    // [batch, heads_k, seqlen, kHeadDim]
  const uint16_t* value;  // [batch, heads_k, seqlen, kHeadDim]
  uint16_t* out;          // [batch, heads_q, seqlen, kHeadDim]
  Strides query_stride, key_stride, value_stride, out_stride;
  int batch;
  int heads_q;
  int heads_k;  // divides heads_q
  int seqlen;   // a multiple of 64
  float scale;
  float scale_log2;  // scale * log2 e
};

struct Rung {
  const char* name;
  void (*kernel)(Problem);
  int block_m;      // query rows of a CTA
  bool rows_first;  // blockIdx.x counts blocks of rows, blockIdx.y heads; otherwise the other way
  int unused_smem_bytes = 0;  // of a CTA, so that fewer of them share an SM
};

// Not in the logs: a rung at the occupancy of another, to tell what occupancy alone does.
constexpr Rung with_unused_smem(Rung rung, int bytes) {
  rung.unused_smem_bytes = bytes;
  return rung;
}

struct Place {
  int m_block;
  int head;  // of all heads of the batch
};

template <bool kRowsFirst>
FA_DEVICE Place place_of_cta() {
  if constexpr (kRowsFirst) return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)};
  return {static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x)};
}

// Enqueues the copy of kRows rows that all exist; the caller commits.
template <int kRows>
FA_DEVICE void load_tile(uint32_t smem, const uint16_t* source, int64_t row_stride, int thread) {
  using Copy = tile::TileCopy<kRows, kHeadDim, kThreads>;
  source += Copy::row(thread) * row_stride + Copy::col(thread);
#pragma unroll
  for (int i = 0; i < Copy::kSteps; ++i, source += Copy::kRowStep * row_stride)
    Copy::load_step(smem + Copy::smem_offset(thread), source, i, 0, kHeadDim, true);
}

// Stores 8 rows of an accumulator, the upper or the lower ones, scaled and rounded. row: where the
// lane's row starts in global memory, at the accumulator's first column.
template <int kN>
FA_DEVICE void store_rows(uint16_t* row, const float (&x)[kN][4], int half, float factor,
                          int lane) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
    *reinterpret_cast<uint32_t*>(row + 8 * n + 2 * (lane % 4)) =
        ptx::cvt_rn_x2<kDtype>(x[n][2 * half] * factor, x[n][2 * half + 1] * factor);
}

// ---- Host

inline const Rung* find_rung(const Rung* rungs, int count, const char* name) {
  for (int i = 0; i < count; ++i)
    if (std::strcmp(rungs[i].name, name) == 0) return rungs + i;
  return nullptr;
}

// Only ever raises the limit: rungs that share a kernel are replayed from graphs later.
inline cudaError_t allow_unused_smem(const Rung& rung) {
  if (rung.unused_smem_bytes == 0) return cudaSuccess;
  return cudaFuncSetAttribute(rung.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              rung.unused_smem_bytes);
}

inline int launch_rung(const Rung* rung, const Problem& p, cudaStream_t stream) {
  if (rung == nullptr || p.seqlen <= 0 || p.seqlen % 64 != 0 || p.heads_k <= 0 ||
      p.heads_q % p.heads_k != 0) {
    return cudaErrorInvalidValue;
  }
  const unsigned m_blocks = p.seqlen / rung->block_m, heads = p.batch * p.heads_q;
  const dim3 grid = rung->rows_first ? dim3(m_blocks, heads) : dim3(heads, m_blocks);
  if (const cudaError_t status = allow_unused_smem(*rung); status != cudaSuccess) return status;
  rung->kernel<<<grid, kThreads, rung->unused_smem_bytes, stream>>>(p);
  return cudaGetLastError();
}

// Mirrored in benchmarks/ladder_kernels.py.
struct Facts {
  int registers;    // of a thread
  int smem_bytes;   // of a CTA
  int local_bytes;  // of a thread: spills, and arrays that are indexed at run time
  int ctas_per_sm;
};

inline int describe_rung(const Rung* rung, Facts* facts) {
  if (rung == nullptr) return cudaErrorInvalidValue;
  cudaFuncAttributes found;
  if (const cudaError_t status = cudaFuncGetAttributes(&found, rung->kernel);
      status != cudaSuccess) {
    return status;
  }
  if (const cudaError_t status = allow_unused_smem(*rung); status != cudaSuccess) return status;
  facts->registers = found.numRegs;
  facts->smem_bytes = static_cast<int>(found.sharedSizeBytes) + rung->unused_smem_bytes;
  facts->local_bytes = static_cast<int>(found.localSizeBytes);
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&facts->ctas_per_sm, rung->kernel, kThreads,
                                                       rung->unused_smem_bytes);
}

}  // namespace fa::ladder
