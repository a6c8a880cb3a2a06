// fwd_sm90.cu: attention forward for Hopper (sm_90a), TMA + wgmma, warp-specialised.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "../attn/scheduler.cuh"
#include "dispatch.h"
#include "fwd_sm90_consumer.cuh"
#include "fwd_sm90_producer.cuh"
#include "launch.h"
#include "tensor_map.h"

#pragma nv_diag_suppress 177  // other archs get an empty kernel, which uses none of this

namespace fa {
namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_sm90_kernel(const __grid_constant__ FwdParams p,
                    const __grid_constant__ attn::TileOrder order,
                    const __grid_constant__ sm90::Maps maps,
                    const __grid_constant__ sm90::TileQueue queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&maps.query);
    ptx::prefetch_tensormap(&maps.key);
    ptx::prefetch_tensormap(&maps.value);
    ptx::prefetch_tensormap(&maps.out);
    for (int s = 0; s < Config::kQStages; ++s) {
      for (int c = 0; c < Config::kConsumers; ++c)
        ptx::mbarrier_init(ptx::smem_addr(&smem.full_q[s][c]), 2);  // Q, and the TileInfo
      // One arrival a warpgroup when O has left the buffer, or one a warp after the last Q K^T.
      ptx::mbarrier_init(ptx::smem_addr(&smem.empty_q[s]),
                         Config::kConsumers * (Config::kOutputInQ ? 1 : 4));
    }
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.full_k[s]), 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.full_v[s]), 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.empty_k[s]), 4 * Config::kConsumers);
      ptx::mbarrier_init(ptx::smem_addr(&smem.empty_v[s]), 4 * Config::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = ptx::warpgroup_id();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < (Config::kTensor ? 32 : 1))
      sm90::Producer<Config>(p, order, maps, queue, smem).run();
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    sm90::Consumer<Config>(p, order, maps, smem, warpgroup - 1).run();
  }
#endif
}

// ---- Launcher

__device__ unsigned tile_counters[16384];

unsigned* tile_counter(cudaStream_t stream) {
  static std::mutex mutex;
  static std::unordered_map<unsigned long long, unsigned> slots;
  static unsigned used = 0;
  constexpr unsigned kSlots = sizeof(tile_counters) / sizeof(unsigned);
  cudaStreamCaptureStatus capture;
  unsigned long long id = 0;
  void* base = nullptr;
  if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess) return nullptr;
  if (cudaGetSymbolAddress(&base, tile_counters) != cudaSuccess) return nullptr;
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (!captured && cudaStreamGetId(stream, &id) != cudaSuccess) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  unsigned slot = 0;
  if (captured) {
    slot = used++;
  } else {
    const auto [entry, added] = slots.try_emplace(id, used);
    if (added) ++used;
    slot = entry->second;
  }
  return slot < kSlots ? static_cast<unsigned*>(base) + slot : nullptr;
}

// Half the L2 of an H200, which is two parts: with 48 MiB causal attention of S 512 and 1024 is 2 %
// slower.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

// Lets the kernel take its shared memory, on the first call on each device: asking every time costs
// a tenth of an eager call.
template <class Config>
cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> allowed{0};
  int device;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(fwd_sm90_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           sizeof(typename Config::SharedStorage));
  if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

template <class Config>
cudaError_t launch_config(const FwdParams& p, int num_sms, cudaStream_t stream) {
  cudaError_t status = allow_shared_memory<Config>();
  sm90::Maps maps;
  if (status == cudaSuccess)
    status = encode_tensor_map(&maps.query, p.query, p.dtype, p.head_dim, p.seqlen_q, p.heads_q,
                               p.batch, p.query_stride, 64);
  if (status == cudaSuccess)
    status = encode_tensor_map(&maps.key, p.key, p.dtype, p.head_dim, p.seqlen_k, p.heads_k,
                               p.batch, p.key_stride, Config::kBlockN);
  if (status == cudaSuccess)
    status = encode_tensor_map(&maps.value, p.value, p.dtype, p.head_dim, p.seqlen_k, p.heads_k,
                               p.batch, p.value_stride, Config::kBlockN);
  if (status == cudaSuccess)
    status = encode_tensor_map(&maps.out, p.out, p.dtype, p.head_dim, p.seqlen_q, p.heads_q,
                               p.batch, p.out_stride, 64);
  if (status != cudaSuccess) return status;

  const int64_t m_blocks = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  if (int64_t{p.batch} * p.heads_q * m_blocks > std::numeric_limits<int>::max())
    return cudaErrorInvalidConfiguration;
  const attn::TileOrder order = attn::make_tile_order(p, Config::kBlockM, kSectionBytes);
  const unsigned grid = std::min<unsigned>(order.num_tiles, num_sms);
  unsigned* counter = order.num_tiles > grid ? tile_counter(stream) : nullptr;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = sizeof(typename Config::SharedStorage);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, fwd_sm90_kernel<Config>, p, order, maps,
                            sm90::TileQueue{counter});
}

// Calls f(head_dim instance, shape, mask mode), each an integral_constant. What an instance does
// not have becomes kTall; without a mask the band is unlimited.
template <class F>
cudaError_t dispatch_tile(int head_dim, FwdTileShape shape, MaskMode mask_mode, F&& f) {
  constexpr std::integral_constant<FwdTileShape, FwdTileShape::kTall> tall;
  constexpr std::integral_constant<FwdTileShape, FwdTileShape::kWide> wide;
  constexpr std::integral_constant<FwdTileShape, FwdTileShape::kSmall> small;
  constexpr std::integral_constant<MaskMode, MaskMode::kBand> band;
  constexpr std::integral_constant<MaskMode, MaskMode::kTensor> tensor;
  constexpr std::integral_constant<int, 64> d64;
  constexpr std::integral_constant<int, 128> d128;
  constexpr std::integral_constant<int, 256> d256;
  if (mask_mode == MaskMode::kTensor) {
    return head_dim <= 64    ? f(d64, tall, tensor)
           : head_dim <= 128 ? f(d128, tall, tensor)
                             : f(d256, tall, tensor);
  }
  const bool is_tall = shape == FwdTileShape::kTall;
  if (head_dim <= 64) return is_tall ? f(d64, tall, band) : f(d64, wide, band);
  if (head_dim > 128) return f(d256, tall, band);
  return is_tall                        ? f(d128, tall, band)
         : shape == FwdTileShape::kWide ? f(d128, wide, band)
                                        : f(d128, small, band);
}

}  // namespace

KernelShape describe_fwd_sm90(int head_dim, FwdTileShape shape, MaskMode mask_mode) {
  KernelShape result{};
  dispatch_tile(head_dim, shape, mask_mode, [&](auto d, auto tile_shape, auto mode) {
    using Config = sm90::FwdConfig<d(), tile_shape(), Dtype::kFloat16, mode()>;
    result = {Config::kBlockM, Config::kBlockN, Config::kThreads,
              static_cast<int>(sizeof(typename Config::SharedStorage))};
    return cudaSuccess;
  });
  return result;
}

cudaError_t launch_fwd_sm90(const FwdParams& params, FwdTileShape shape, int num_sms,
                            cudaStream_t stream) {
  return dispatch_tile(
      params.head_dim, shape, params.mask_mode, [&](auto d, auto tile_shape, auto mode) {
        return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.dtype, [&](auto dtype) {
          return launch_config<sm90::FwdConfig<d(), tile_shape(), dtype(), mode()>>(params, num_sms,
                                                                                    stream);
        });
      });
}

}  // namespace fa
