// fwd_sm90.cu: attention forward for Hopper (sm_90a), TMA + wgmma, warp-specialised.
//
//   O = softmax(scale * Q K^T + mask) V        LSE[m] = log sum_n exp(scale * q_m . k_n + mask)
//
// One CTA per SM stays for the whole grid and draws tiles of query rows of one (batch, head), the
// longest first. A producer warp keeps rings of Q, K and V in shared memory full; each consumer
// warpgroup owns 64 rows of the tile and walks the key blocks from last to first, those that its
// rows see. Its scores S become P and P becomes the operand of P V without leaving its registers.
//
//   time ------>         tile t                                  | tile t + 1
//   producer   TMA       | Q K9 K8  V9 K7  V8 K6  ...  K0 V1 V0 | Q K5 K4  V5 ...    runs ahead
//   consumer   tensor    | S9 | S8  P9 V | S7  P8 V | ... | S0  P1 V | P0 V, S5(t+1) | S4 ...
//   rows 0-63  other     |    P9=m,2^S   P8=2^S     P7=2^S ...    P0=2^S  | store O  P5=m,2^S
//   consumer   the same, on rows 64-127 (and 128-191), drifting freely: the tensor cores take
//              whichever product is ready, and exponentials of one hide behind products of others
//
//   Q K^T of block n and P V of block n + 1 are enqueued together, and the exponentials of block n
//   run over that P V. 2^S is taken against the row's reference, a maximum found in the first block
//   and in blocks that the mask cuts, with no maximum of this block: see "at once" in
//   attn/softmax.cuh. Where accept() says no, that warp computes its 16 rows of S again by
//   mma.sync, for the other warps of the warpgroup may not need theirs, and takes the maximum.
//
//   shared      head_dim 64     sQ [2][192][64]   sK, sV [4][128][64]   176 KiB   (kTall)
//                               sQ [2][128][64]   sK, sV [4][128][64]   160 KiB   (kWide)
//               head_dim 128    sQ [2][192][128]  sK, sV [4][64][128]   224 KiB   (kTall)
//                               sQ [2][128][128]  sK, sV [2][128][128]  192 KiB   (kWide)
//                               sQ [2][128][128]  sK, sV [4][64][128]   192 KiB   (kSmall)
//               head_dim 256    sQ [1][128][256]  sK, sV [2][64][256]   192 KiB   + sO 32 KiB
//   registers   producer 32, three consumers 160 (with a mask tensor 56 and 152);
//               producer 40, two consumers 232 (setmaxnreg)
//
//   barriers    full_q[stage][wg]   TMA of 64 rows and the TileInfo -> that warpgroup
//               empty_q[stage]      O has left the buffer (or the last Q K^T is over) -> producer
//               full_k, full_v      TMA -> consumers
//               empty_k, empty_v    one arrival a warp, after its last read -> producer
//
// With a mask tensor, the producer reads the mask summary (attn/mask_summary.cuh), loads only
// blocks that some row sees and says with each stage what the mask does there: constant blocks take
// the loop above, mixed ones read one 64-bit word a row, or elements.
//
// Packed sequences: tiles come from a list (packed_tiles.cu) whose length only the device knows.
// The producer looks the next one up before it waits to load the last V of this one. A box that
// runs over the end of a sequence brings rows of the next one. Those of Q and V become zeros in
// shared memory before a product reads them, scores of those of K are hidden like all past the end,
// and O of a warpgroup with such rows leaves row by row.
//
// Units    strides count elements; scores are scaled into base 2 (scale * log2 e); LSE is natural.
// Needs    sm_90a; what FwdParams says of rows; scale > 0; head_dim a multiple of 8, filled with
//          zeros up to 64, 128 or 256; rows of out in 16-byte pieces. Otherwise: fwd_sm80.cu.
// Bounds   the tensor cores give 4096 FLOP a cycle and SM, 925 TFLOPS at the clock that they leave;
//          at D 64 the exponential unit binds before them. Long kernels end at the power limit.
// Numbers  benchmarks/results, with what each step brought.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "../attn/scheduler.cuh"
#include "dispatch.h"
#include "fwd_sm90_consumer.cuh"
#include "fwd_sm90_producer.cuh"
#include "launch.h"
#include "shared_memory.h"
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

// Counters of TileQueue. A launch needs one that no other launch uses at the same time:
//   - launches on one stream follow each other and share a counter (streams are told apart by their
//     id, which is not used again, unlike their handle);
//   - a captured launch may run whenever its graph is replayed, so it gets a counter of its own,
//   for
//     ever.
// They are 0 when the module is loaded, and the last draw of a launch sets them to 0 again, so no
// launch has to. When all are taken, tiles follow in a fixed order, which is slower by up to a
// fifth.
constexpr unsigned kTileCounters = 1u << 18;
__device__ unsigned tile_counters[kTileCounters];

unsigned* tile_counter(cudaStream_t stream) {
  static std::mutex mutex;
  static std::unordered_map<unsigned long long, unsigned> counter_of_stream;
  static unsigned taken = 0;

  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  void* counters = nullptr;
  cudaError_t status = cudaStreamIsCapturing(stream, &capture);
  if (status == cudaSuccess) status = cudaGetSymbolAddress(&counters, tile_counters);
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (status == cudaSuccess && !captured) status = cudaStreamGetId(stream, &id);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();  // not an error of the launch
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const bool known = !captured && counter_of_stream.count(id) != 0;
  if (!known && taken == kTileCounters) return nullptr;
  const unsigned index = known      ? counter_of_stream[id]
                         : captured ? taken++
                                    : counter_of_stream[id] = taken++;
  return static_cast<unsigned*>(counters) + index;
}

// Half the L2 of an H200, which is two parts: with 48 MiB causal attention of S 512 and 1024 is 2 %
// slower.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

template <class Config>
cudaError_t launch_config(const FwdParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(typename Config::SharedStorage);
  cudaError_t status = allow_shared_memory<fwd_sm90_kernel<Config>>(kSmemBytes);
  sm90::Maps maps;
  const auto describe = [&](CUtensorMap* map, const void* pointer, const int64_t (&stride)[3],
                            int seqlen, int heads, int box_rows) {
    if (status == cudaSuccess)
      status = cached_tensor_map(map, p, pointer, stride, seqlen, heads, box_rows);
  };
  describe(&maps.query, p.query, p.query_stride, p.seqlen_q, p.heads_q, 64);
  describe(&maps.key, p.key, p.key_stride, p.seqlen_k, p.heads_k, Config::kBlockN);
  describe(&maps.value, p.value, p.value_stride, p.seqlen_k, p.heads_k, Config::kBlockN);
  describe(&maps.out, p.out, p.out_stride, p.seqlen_q, p.heads_q, 64);
  if (status != cudaSuccess) return status;

  const int64_t m_blocks = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t tiles_of_head = Config::kPacked ? p.packed.max_tiles : p.batch * m_blocks;
  if (tiles_of_head * p.heads_q > std::numeric_limits<int>::max())
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
  config.dynamicSmemBytes = kSmemBytes;
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

// Packed sequences always have tall tiles.
cudaError_t launch_packed(const FwdParams& p, int num_sms, cudaStream_t stream) {
  return dispatch_tile(p.head_dim, FwdTileShape::kTall, MaskMode::kBand, [&](auto d, auto, auto) {
    return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(p.dtype, [&](auto dtype) {
      return launch_config<
          sm90::FwdConfig<d(), FwdTileShape::kTall, dtype(), MaskMode::kBand, true>>(p, num_sms,
                                                                                     stream);
    });
  });
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
  if (params.packed.cu_seqlens_q != nullptr) return launch_packed(params, num_sms, stream);
  return dispatch_tile(
      params.head_dim, shape, params.mask_mode, [&](auto d, auto tile_shape, auto mode) {
        return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.dtype, [&](auto dtype) {
          return launch_config<sm90::FwdConfig<d(), tile_shape(), dtype(), mode()>>(params, num_sms,
                                                                                    stream);
        });
      });
}

}  // namespace fa
