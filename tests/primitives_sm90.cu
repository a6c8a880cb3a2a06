// One small kernel for each building block of the Hopper kernels, with a launcher in plain C: what
// tests/test_primitives_sm90.py compiles, calls and compares with plain torch on the host.
//
// A launcher takes device pointers (dense tensors, shapes beside the kernels) and int64_t, waits
// for its kernel and returns the cudaError_t. An "image" is a tile byte by byte as it lies in
// shared memory, in swizzled panels [cols / 64][rows][64]; the host makes it, so that no kernel
// here computes the layout that it tests.
#include <cuda_runtime.h>

#include <cmath>

#include "../csrc/kernels/dispatch.h"
#include "../csrc/kernels/tensor_map.h"
#include "../csrc/params.h"
#include "../csrc/ptx/sm80.cuh"
#include "../csrc/ptx/sm90.cuh"
#include "../csrc/ptx/wgmma.cuh"
#include "../csrc/tile/fragment.cuh"
#include "../csrc/tile/mma_sm90.cuh"
#include "../csrc/tile/pipeline.cuh"
#include "../csrc/tile/tma.cuh"

namespace fa {

// A tensor [batch, heads, seqlen, head_dim] with any strides, in host memory.
struct TensorView {
  int64_t pointer;
  int64_t size[4];
  int64_t stride[3];  // batch, head, row
};

namespace {

constexpr uint16_t kNan = 0x7fff;  // in fp16 and in bf16
constexpr int kWarpgroupRows = 64;

// Waits for the kernel; the first error.
template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, int threads, int smem_bytes, Arguments... arguments) {
  smem_bytes += 1023;  // for aligned_smem
  if (const cudaError_t status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
      status != cudaSuccess) {
    return status;
  }
  kernel<<<1, threads, smem_bytes>>>(arguments...);
  const cudaError_t launched = cudaGetLastError();
  const cudaError_t ran = cudaDeviceSynchronize();
  return launched != cudaSuccess ? launched : ran;
}

// Shared memory from a multiple of 1024 bytes on, where the pattern of the swizzle begins.
extern __shared__ unsigned char smem_raw[];
__device__ unsigned char* aligned_smem() { return smem_raw + (-ptx::smem_addr(smem_raw) & 1023); }

// An image to shared memory, where TMA and wgmma may read it after the barrier.
__device__ void image_to_smem(unsigned char* sTile, const uint16_t* gImage, int elements) {
  for (int i = threadIdx.x; i < elements; i += blockDim.x)
    reinterpret_cast<uint16_t*>(sTile)[i] = gImage[i];
  ptx::fence_proxy_async();
}
__device__ void smem_to_image(uint16_t* gImage, const unsigned char* sTile, int elements) {
  for (int i = threadIdx.x; i < elements; i += blockDim.x)
    gImage[i] = reinterpret_cast<const uint16_t*>(sTile)[i];
}

// Calls f(element, row, column) for the elements of an accumulator that a lane holds.
template <int kN, class F>
__device__ void each(tile::Accumulator<1, kN>& acc, int lane, F&& f) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      f(acc.x[0][n][e], tile::fragment_row(lane, e), 8 * n + tile::fragment_col(lane, e));
}

// ---- tile/tma.cuh

// gImage [kCols / 64][kRows][64]: the tile at (batch, head, row) after it came to shared memory
// full of NaN.
template <int kRows, int kCols>
__global__ void tma_load_kernel(const __grid_constant__ CUtensorMap map, int batch, int head,
                                int row, uint16_t* gImage) {
  unsigned char* const smem = aligned_smem();
  constexpr int kElements = kRows * kCols;
  const uint32_t barrier = ptx::smem_addr(smem) + kElements * 2;
  for (int i = threadIdx.x; i < kElements; i += blockDim.x)
    reinterpret_cast<uint16_t*>(smem)[i] = kNan;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::fence_proxy_async();  // the NaN come before the copy
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&map);
    ptx::mbarrier_arrive_expect_tx(barrier, kElements * 2);
    tile::tma_load<kRows, kCols>(ptx::smem_addr(smem), kRows * tile::kPanelRowBytes, &map, barrier,
                                 row, head, batch);
  }
  ptx::mbarrier_try_wait_parity(barrier, 0);
  smem_to_image(gImage, smem, kElements);
}

// The 64 rows of number `part` of the tile gImage [kCols / 64][kRows][64] to (batch, head, row).
template <int kRows, int kCols>
__global__ void tma_store_kernel(const __grid_constant__ CUtensorMap map, const uint16_t* gImage,
                                 int part, int head_dim, int batch, int head, int row) {
  unsigned char* const smem = aligned_smem();
  image_to_smem(smem, gImage, kRows * kCols);
  __syncthreads();
  if (threadIdx.x == 0) {
    tile::tma_store<kCols>(&map,
                           ptx::smem_addr(smem) + part * kWarpgroupRows * tile::kPanelRowBytes,
                           kRows * tile::kPanelRowBytes, 0, head_dim, row, head, batch);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read_0();
  }
}

// ---- tile/mma_sm90.cuh: products

enum class QkForm : int { kSharedQ, kRegisterQ, kOneWarp };

// gS [kQRows][kKeys] = Q K^T with images gQ of [kQRows][kHeadDim], gK of [kKeys][kHeadDim].
template <Dtype kDtype, int kHeadDim, int kQRows, int kKeys, QkForm kForm>
__global__ void __launch_bounds__(2 * kQRows)
    qk_kernel(const uint16_t* gQ, const uint16_t* gK, float* gS) {
  unsigned char* const smem = aligned_smem();
  constexpr int kQBytes = kQRows * kHeadDim * 2, kN = kKeys / 8;
  image_to_smem(smem, gQ, kQRows * kHeadDim);
  image_to_smem(smem + kQBytes, gK, kKeys * kHeadDim);
  __syncthreads();

  const int lane = ptx::lane_id(), row = ptx::warp_id() * 16;
  const uint32_t sQ = ptx::smem_addr(smem), sK = sQ + kQBytes;
  const uint64_t desc_k = ptx::matrix_descriptor(sK, kKeys * tile::kPanelRowBytes);
  tile::Accumulator<1, kN> rS;
  each(rS, lane, [](float& x, int, int) { x = NAN; });  // has to be overwritten
  if constexpr (kForm == QkForm::kOneWarp) {
    tile::warp_qk<kDtype, kHeadDim, kQRows>(rS, sQ, row, sK, lane);
  } else if constexpr (kForm == QkForm::kSharedQ) {
    const uint64_t desc_q =
        ptx::matrix_descriptor(sQ + ptx::warpgroup_id() * kWarpgroupRows * tile::kPanelRowBytes,
                               kQRows * tile::kPanelRowBytes);
    tile::pin(rS);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kQRows>(rS, desc_q, desc_k);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    tile::pin(rS);
  } else {
    uint32_t rQ[kHeadDim / 16][4];
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k)
      ptx::ldmatrix_x4(rQ[k], tile::panel_address<kQRows>(sQ, row, k, lane));
    tile::pin(rQ);
    tile::pin(rS);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim>(rS, rQ, desc_k);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    tile::pin(rQ);
    tile::pin(rS);
  }
  each(rS, lane, [&](float& x, int r, int col) { gS[(row + r) * kKeys + col] = x; });
}

// gO [64][kHeadDim] += P V with gP [64][kKeys] in fp32, gV the image of [kKeys][kHeadDim].
template <Dtype kDtype, int kHeadDim, int kKeys>
__global__ void __launch_bounds__(2 * kWarpgroupRows)
    pv_kernel(const float* gP, const uint16_t* gV, float* gO) {
  unsigned char* const smem = aligned_smem();
  image_to_smem(smem, gV, kKeys * kHeadDim);
  __syncthreads();

  const int lane = ptx::lane_id(), row = ptx::warp_id() * 16;
  tile::Accumulator<1, kKeys / 8> acc;
  tile::Accumulator<1, kHeadDim / 8> rO;
  uint32_t rP[kKeys / 16][4];
  each(acc, lane, [&](float& x, int r, int col) { x = gP[(row + r) * kKeys + col]; });
  each(rO, lane, [&](float& x, int r, int col) { x = gO[(row + r) * kHeadDim + col]; });
  tile::pack_operand_a<kDtype>(rP, acc);
  tile::pin(rP);
  tile::pin(rO);
  ptx::wgmma_fence();
  tile::wgmma_pv<kDtype>(
      rO, rP, ptx::matrix_descriptor(ptx::smem_addr(smem), kKeys * tile::kPanelRowBytes));
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  tile::pin(rP);
  tile::pin(rO);
  each(rO, lane, [&](float& x, int r, int col) { gO[(row + r) * kHeadDim + col] = x; });
}

// ---- tile/mma_sm90.cuh: panel_address, and stmatrix

// gOffsets [kRows / 16][kCols / 16][32]: what panel_address gives each lane. gImage
// [kCols / 64][kRows][64]: gTile [kRows][kCols] after stmatrix at these addresses, one warp for
// every 16 rows. Its operand follows the figures of the PTX manual.
template <int kRows, int kCols>
__global__ void stmatrix_kernel(const uint16_t* gTile, int* gOffsets, uint16_t* gImage) {
  unsigned char* const smem = aligned_smem();
  for (int i = threadIdx.x; i < kRows * kCols; i += blockDim.x)
    reinterpret_cast<uint16_t*>(smem)[i] = kNan;
  __syncthreads();
  const int lane = ptx::lane_id(), warp = ptx::warp_id();
  const uint32_t base = ptx::smem_addr(smem);
  for (int k = 0; k < kCols / 16; ++k) {
    uint32_t d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + lane / 4 + i % 2 * 8, col = 16 * k + lane % 4 * 2 + i / 2 * 8;
      const uint16_t* pair = gTile + row * kCols + col;
      d[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
    const uint32_t address = tile::panel_address<kRows>(base, 16 * warp, k, lane);
    gOffsets[(warp * (kCols / 16) + k) * 32 + lane] = static_cast<int>(address - base);
    ptx::stmatrix_x4(address, d);
  }
  __syncthreads();
  smem_to_image(gImage, smem, kRows * kCols);
}

// ---- tile/pipeline.cuh

// gWalk [steps][2]: stage and phase.
template <int kStages>
__global__ void ring_position_kernel(int steps, int* gWalk) {
  tile::RingPosition<kStages> position;
  for (int i = 0; i < steps; ++i) {
    gWalk[2 * i] = position.stage();
    gWalk[2 * i + 1] = static_cast<int>(position.phase());
    position.advance();
  }
}

constexpr int kRingRows = 64, kRingCols = 128, kRingTile = kRingRows * kRingCols;

template <int kStages>
struct RingStorage {
  uint16_t tiles[kStages][kRingTile];
  uint64_t full[kStages];   // the producer's arrival and its bytes; the consumer waits
  uint64_t empty[kStages];  // the consumer's arrival; the producer waits before it overwrites
};

// gSums [tiles]: what warp 1 saw of each tile that warp 0 sent through the ring, as the sum of
// element * (index + 1) over the image.
template <int kStages>
__global__ void ring_kernel(const __grid_constant__ CUtensorMap map, int tiles, int64_t* gSums) {
  unsigned char* const smem = aligned_smem();
  auto& storage = *reinterpret_cast<RingStorage<kStages>*>(smem);
  const uint32_t full = ptx::smem_addr(storage.full), empty = ptx::smem_addr(storage.empty);
  const int lane = ptx::lane_id();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  // For eight tiles the producer is the slow one, then the consumer: the ring runs empty and full.
  tile::RingPosition<kStages> position;
  if (ptx::warp_id() == 0) {
    for (int t = 0; t < tiles && lane == 0; ++t, position.advance()) {
      const uint32_t full_now = full + 8 * position.stage();
      ptx::mbarrier_try_wait_parity(empty + 8 * position.stage(), position.phase() ^ 1);
      __nanosleep(t / 8 % 2 ? 0 : 2000);
      ptx::mbarrier_arrive_expect_tx(full_now, kRingTile * 2);
      tile::tma_load<kRingRows, kRingCols>(ptx::smem_addr(storage.tiles[position.stage()]),
                                           kRingRows * tile::kPanelRowBytes, &map, full_now,
                                           t * kRingRows, 0, 0);
    }
  } else {
    for (int t = 0; t < tiles; ++t, position.advance()) {
      ptx::mbarrier_try_wait_parity(full + 8 * position.stage(), position.phase());
      __nanosleep(t / 8 % 2 ? 2000 : 0);
      int64_t sum = 0;
      for (int i = lane; i < kRingTile; i += 32)
        sum += int64_t{storage.tiles[position.stage()][i]} * (i + 1);
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
      if (lane == 0) gSums[t] = sum;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * position.stage());
    }
  }
}

// ---- Launchers

// Calls f(dtype constant).
template <class F>
cudaError_t dispatch_dtype(int64_t dtype, F&& f) {
  return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(static_cast<Dtype>(dtype), f);
}

// Calls f(head_dim, Q rows, keys as constants) for the tiles of the kernels.
constexpr int64_t tile_key(int64_t head_dim, int64_t q_rows, int64_t keys) {
  return head_dim << 16 | q_rows << 8 | keys;
}
template <class F>
cudaError_t dispatch_tile(int64_t head_dim, int64_t q_rows, int64_t keys, F&& f) {
  return dispatch_value<tile_key(64, 192, 128), tile_key(64, 192, 64), tile_key(128, 192, 80),
                        tile_key(128, 192, 64), tile_key(128, 128, 128), tile_key(256, 128, 80),
                        tile_key(256, 128, 64)>(tile_key(head_dim, q_rows, keys), [&](auto key) {
    return f(std::integral_constant<int, (key() >> 16)>{},
             std::integral_constant<int, (key() >> 8 & 255)>{},
             std::integral_constant<int, (key() & 255)>{});
  });
}

cudaError_t encode(CUtensorMap* map, int64_t dtype, const TensorView& view, int box_rows) {
  return cached_tensor_map(map, {reinterpret_cast<const void*>(view.pointer),
                                 {view.stride[0], view.stride[1], view.stride[2]},
                                 static_cast<int>(view.size[3]),
                                 static_cast<int>(view.size[2]),
                                 static_cast<int>(view.size[1]),
                                 static_cast<int>(view.size[0]),
                                 box_rows,
                                 static_cast<Dtype>(dtype)});
}

}  // namespace

extern "C" {

const char* error_string(cudaError_t status) { return cudaGetErrorString(status); }

cudaError_t launch_tma_load(int64_t dtype, int64_t rows, int64_t cols, const TensorView* view,
                            int64_t batch, int64_t head, int64_t row, uint16_t* image) {
  CUtensorMap map;
  const cudaError_t status = encode(&map, dtype, *view, static_cast<int>(rows));
  if (status != cudaSuccess) return status;
  return dispatch_value<64, 80, 128, 192>(rows, [&](auto r) {
    return dispatch_value<64, 128, 256>(cols, [&](auto c) {
      return launch(tma_load_kernel<r(), c()>, 128, r() * c() * 2 + 8, map, static_cast<int>(batch),
                    static_cast<int>(head), static_cast<int>(row), image);
    });
  });
}

// The tile has 192 rows up to 128 columns, otherwise 128.
cudaError_t launch_tma_store(int64_t dtype, int64_t cols, const TensorView* view,
                             const uint16_t* image, int64_t part, int64_t batch, int64_t head,
                             int64_t row) {
  CUtensorMap map;
  const cudaError_t status = encode(&map, dtype, *view, kWarpgroupRows);
  if (status != cudaSuccess) return status;
  return dispatch_value<64, 128, 256>(cols, [&](auto c) {
    constexpr int kCols = c(), kRows = kCols == 256 ? 128 : 192;
    return launch(tma_store_kernel<kRows, kCols>, 128, kRows * kCols * 2, map, image,
                  static_cast<int>(part), static_cast<int>(view->size[3]), static_cast<int>(batch),
                  static_cast<int>(head), static_cast<int>(row));
  });
}

// form: a QkForm.
cudaError_t launch_qk(int64_t form, int64_t dtype, int64_t head_dim, int64_t q_rows, int64_t keys,
                      const uint16_t* q, const uint16_t* k, float* s) {
  return dispatch_dtype(dtype, [&](auto t) {
    return dispatch_tile(head_dim, q_rows, keys, [&](auto d, auto rows, auto n) {
      return dispatch_value<QkForm::kSharedQ, QkForm::kRegisterQ, QkForm::kOneWarp>(
          static_cast<QkForm>(form), [&](auto by) {
            return launch(qk_kernel<t(), d(), rows(), n(), by()>, 2 * rows(),
                          (rows() + n()) * d() * 2, q, k, s);
          });
    });
  });
}

cudaError_t launch_pv(int64_t dtype, int64_t head_dim, int64_t keys, const float* p,
                      const uint16_t* v, float* o) {
  return dispatch_dtype(dtype, [&](auto t) {
    return dispatch_value<64, 128, 256>(head_dim, [&](auto d) {
      return dispatch_value<64, 80, 128>(keys, [&](auto n) {
        return launch(pv_kernel<t(), d(), n()>, 2 * kWarpgroupRows, n() * d() * 2, p, v, o);
      });
    });
  });
}

cudaError_t launch_stmatrix(int64_t rows, int64_t cols, const uint16_t* tile, int* offsets,
                            uint16_t* image) {
  return dispatch_value<64, 80, 128, 192>(rows, [&](auto r) {
    return dispatch_value<64, 128, 256>(cols, [&](auto c) {
      return launch(stmatrix_kernel<r(), c()>, 2 * r(), r() * c() * 2, tile, offsets, image);
    });
  });
}

cudaError_t launch_ring_position(int64_t stages, int64_t steps, int* walk) {
  return dispatch_value<2, 3, 4>(stages, [&](auto n) {
    return launch(ring_position_kernel<n()>, 1, 0, static_cast<int>(steps), walk);
  });
}

cudaError_t launch_ring(int64_t dtype, int64_t stages, const TensorView* view, int64_t tiles,
                        int64_t* sums) {
  CUtensorMap map;
  const cudaError_t status = encode(&map, dtype, *view, kRingRows);
  if (status != cudaSuccess) return status;
  return dispatch_value<2, 3, 4>(stages, [&](auto n) {
    return launch(ring_kernel<n()>, 64, sizeof(RingStorage<n()>), map, static_cast<int>(tiles),
                  sums);
  });
}

}  // extern "C"
}  // namespace fa
