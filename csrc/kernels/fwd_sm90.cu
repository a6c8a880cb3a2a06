// fwd_sm90.cu: attention forward for Hopper (sm_90a), TMA + wgmma, warp-specialised.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "../attn/block_info.cuh"
#include "../attn/mask.cuh"
#include "../attn/scheduler.cuh"
#include "../attn/softmax.cuh"
#include "../tile/mma_sm90.cuh"
#include "../tile/pipeline.cuh"
#include "../tile/tma.cuh"
#include "dispatch.h"
#include "launch.h"
#include "tensor_map.h"

namespace fa {
namespace {

struct FwdTile {
  int consumers;  // warpgroups of 64 query rows
  int block_n;    // keys of a block
  int stages;     // of the ring of keys and values
  int q_stages;
};

enum class TileShape : int { kTall, kShort };

constexpr FwdTile fwd_tile(int head_dim, TileShape shape) {
  if (head_dim == 64) return shape == TileShape::kTall ? FwdTile{3, 128, 4, 2} : FwdTile{2, 128, 4, 2};
  if (head_dim == 128) return shape == TileShape::kTall ? FwdTile{3, 80, 3, 2} : FwdTile{2, 128, 2, 2};
  return FwdTile{2, 80, 2, 1};
}

template <int kHeadDim_, TileShape kShape, Dtype kDtype_>
struct FwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kShape);
  static constexpr int kConsumers = kTile.consumers, kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = kTile.block_n, kStages = kTile.stages, kQStages = kTile.q_stages;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // The register file is dealt out again between one producer and the consumers.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr uint32_t kQBytes = kBlockM * kHeadDim * 2, kKvBytes = kBlockN * kHeadDim * 2;

  struct SharedStorage {
    alignas(1024) uint16_t sQ[kQStages][kBlockM * kHeadDim];  // O on the way out
    alignas(1024) uint16_t sK[kStages][kBlockN * kHeadDim];
    alignas(1024) uint16_t sV[kStages][kBlockN * kHeadDim];
    uint64_t full_q[kQStages], empty_q[kQStages];
    uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    int tile[kQStages];
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage) + 1024;

  using Output = tile::Accumulator<1, kHeadDim / 8>;
  using Scores = tile::Accumulator<1, kBlockN / 8>;
  using Softmax = attn::OnlineSoftmax<1, false>;
};

struct Maps {
  CUtensorMap query, key, value, out;
};

struct Barriers {
  uint32_t full_q, empty_q, full_k, empty_k, full_v, empty_v;
};

struct BlockRange {
  int first, last;            // blocks with visible keys; none when first > last
  int full_first, full_last;  // blocks that need no mask
};
template <int kBlockN>
FA_DEVICE BlockRange block_range(const attn::KeyRange& keys) {
  if (keys.first >= keys.end) return {0, -1, 0, -1};
  return {keys.first / kBlockN, (keys.end - 1) / kBlockN, (keys.full_first + kBlockN - 1) / kBlockN,
          keys.full_end / kBlockN - 1};
}

template <class Config>
FA_DEVICE void produce(const FwdParams& p, const attn::TileOrder& order, const Maps& maps,
                       unsigned* counter, unsigned num_tiles,
                       typename Config::SharedStorage& smem, const Barriers& bars) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const uint32_t sQ = ptx::smem_addr(smem.sQ), sK = ptx::smem_addr(smem.sK),
                 sV = ptx::smem_addr(smem.sV);
  tile::RingPosition<Config::kStages> k_pos, v_pos;
  tile::RingPosition<Config::kQStages> q_pos;
  ptx::prefetch_tensormap(&maps.query);
  ptx::prefetch_tensormap(&maps.key);
  ptx::prefetch_tensormap(&maps.value);
  ptx::prefetch_tensormap(&maps.out);
  unsigned index = blockIdx.x;
  while (index < num_tiles) {
    unsigned ticket = 0, next = index + gridDim.x;
    if (counter != nullptr) {
      ticket = atomicAdd(counter, 1);
      next = ticket + gridDim.x;
    }
    const attn::WorkTile work = attn::tile_of_cta(order, index);
    const int row = work.m_block * kBlockM;
    const BlockRange range =
        block_range<kBlockN>(attn::key_range(p, row, min(row + kBlockM, p.seqlen_q)));
    auto load_k = [&](int n) {
      ptx::mbarrier_try_wait_parity(bars.empty_k + 8 * k_pos.stage, k_pos.phase ^ 1);
      const uint32_t full = bars.full_k + 8 * k_pos.stage;
      ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
      tile::tma_load<kBlockN, kHeadDim>(sK + k_pos.stage * Config::kKvBytes, &maps.key, full,
                                        n * kBlockN, work.kv_head_idx, work.batch_idx);
      k_pos.advance();
    };
    auto load_v = [&](int n) {
      ptx::mbarrier_try_wait_parity(bars.empty_v + 8 * v_pos.stage, v_pos.phase ^ 1);
      const uint32_t full = bars.full_v + 8 * v_pos.stage;
      ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
      tile::tma_load<kBlockN, kHeadDim>(sV + v_pos.stage * Config::kKvBytes, &maps.value, full,
                                        n * kBlockN, work.kv_head_idx, work.batch_idx);
      v_pos.advance();
    };
    const bool any = range.first <= range.last;
    if (Config::kQStages == 1 && any) load_k(range.last);
    ptx::mbarrier_try_wait_parity(bars.empty_q + 8 * q_pos.stage, q_pos.phase ^ 1);
    smem.tile[q_pos.stage] = static_cast<int>(index);
    const uint32_t full = bars.full_q + 8 * q_pos.stage;
    ptx::mbarrier_arrive_expect_tx(full, Config::kQBytes);
    tile::tma_load<kBlockM, kHeadDim>(sQ + q_pos.stage * Config::kQBytes, &maps.query, full, row,
                                      work.head_idx, work.batch_idx);
    q_pos.advance();
    if (Config::kQStages > 1 && any) load_k(range.last);
#pragma unroll 1
    for (int n = range.last; n > range.first; --n) {
      load_k(n - 1);
      load_v(n);
    }
    if (any) load_v(range.first);
    if (counter != nullptr && ticket == num_tiles - 1) *counter = 0;
    index = next;
  }
  ptx::mbarrier_try_wait_parity(bars.empty_q + 8 * q_pos.stage, q_pos.phase ^ 1);
  smem.tile[q_pos.stage] = -1;
  ptx::mbarrier_arrive(bars.full_q + 8 * q_pos.stage);
}

template <class Config>
FA_DEVICE void consume(const FwdParams& p, const attn::TileOrder& order, const Maps& maps,
                       typename Config::SharedStorage& smem, const Barriers& bars, int consumer) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr Dtype kDtype = Config::kDtype;
  constexpr uint32_t kKvStep = Config::kKvBytes >> 4, kQStep = Config::kQBytes >> 4;
  const int lane = ptx::lane_id(), warp = threadIdx.x / 32 % 4;
  const uint32_t sQ_all = ptx::smem_addr(smem.sQ);
  const uint64_t desc_q_all = ptx::matrix_descriptor(sQ_all + consumer * 64 * tile::kPanelRowBytes, 0);
  const uint64_t desc_k_all = ptx::matrix_descriptor(ptx::smem_addr(smem.sK), 0);
  const uint64_t desc_v_all =
      ptx::matrix_descriptor(ptx::smem_addr(smem.sV), kBlockN * tile::kPanelRowBytes);
  tile::RingPosition<Config::kStages> pos;
  tile::RingPosition<Config::kQStages> q_pos;
  const bool elected = threadIdx.x % 128 == 0;
  uint32_t release_q = 0;  // barrier that waits for this warpgroup's O to leave sQ

  auto release_stored_q = [&] {
    if (elected && release_q != 0) {
      ptx::cp_async_bulk_wait_group_read_0();
      ptx::mbarrier_arrive(release_q);
    }
    release_q = 0;
  };
  auto arrive = [&](uint32_t barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

#pragma unroll 1
  for (;;) {
    ptx::mbarrier_try_wait_parity(bars.full_q + 8 * q_pos.stage, q_pos.phase);
    const int index = __shfl_sync(0xffffffff, smem.tile[q_pos.stage], 0);
    if (index < 0) break;
    const attn::WorkTile work = attn::tile_of_cta(order, index);
    const int tile_row = work.m_block * kBlockM, row = tile_row + 64 * consumer;
    const BlockRange range =
        block_range<kBlockN>(attn::key_range(p, tile_row, min(tile_row + kBlockM, p.seqlen_q)));
    const BlockRange own = block_range<kBlockN>(
        attn::key_range(p, min(row, p.seqlen_q), min(row + 64, p.seqlen_q)));
    const uint64_t desc_q = desc_q_all + q_pos.stage * kQStep;

    typename Config::Output rO;
    typename Config::Softmax softmax;
    typename Config::Scores rS;
    uint32_t rP[kBlockN / 16][4];
    float alpha[2];
    rO.clear();

    auto skip = [&] {
      ptx::mbarrier_try_wait_parity(bars.full_k + 8 * pos.stage, pos.phase);
      arrive(bars.empty_k + 8 * pos.stage);
      ptx::mbarrier_try_wait_parity(bars.full_v + 8 * pos.stage, pos.phase);
      arrive(bars.empty_v + 8 * pos.stage);
      pos.advance();
    };
    auto softmax_with_max = [&](int n) {
      if (n > own.full_last || n < own.full_first)
        attn::mask_columns(rS, p, row + 16 * warp, n * kBlockN, lane);
      softmax.scan_max(rS);
      const bool rescale = softmax.advance_reference(order.scale_log2, alpha);
      softmax.exponentiate(rS, order.scale_log2);
      return rescale;
    };

    int n = range.last;
#pragma unroll 1
    for (; n > own.last && n >= range.first; --n) skip();
    if (n >= own.first && own.first <= own.last) {
      ptx::mbarrier_try_wait_parity(bars.full_k + 8 * pos.stage, pos.phase);
      ptx::wgmma_fence();
      tile::wgmma_qk<kDtype, kHeadDim, kBlockM>(rS, desc_q, desc_k_all + pos.stage * kKvStep);
      ptx::wgmma_commit_group();
      release_stored_q();
      ptx::wgmma_wait_group<0>();
      tile::pin(rS);
      arrive(bars.empty_k + 8 * pos.stage);
      softmax_with_max(n);
      tile::pack_operand_a<kDtype>(rP, rS);
      tile::RingPosition<Config::kStages> pv = pos;
      pos.advance();
      if (n > own.first) ptx::mbarrier_try_wait_parity(bars.full_k + 8 * pos.stage, pos.phase);

      auto step = [&](auto masked) {
        tile::pin(rS);
        tile::pin(rP);
        tile::pin(rO);
        ptx::wgmma_fence();
        tile::wgmma_qk<kDtype, kHeadDim, kBlockM>(rS, desc_q, desc_k_all + pos.stage * kKvStep);
        ptx::wgmma_commit_group();
        ptx::mbarrier_try_wait_parity(bars.full_v + 8 * pv.stage, pv.phase);
        ptx::wgmma_fence();
        tile::wgmma_pv<kDtype>(rO, rP, desc_v_all + pv.stage * kKvStep);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        tile::pin(rS);
        bool rescale = false;
        if constexpr (masked()) {
          rescale = softmax_with_max(n);
        } else {
          softmax.template exponentiate_at_once<1>(rS, 0, order.scale_log2);
          if (!softmax.accept()) {
            tile::warp_qk<kDtype, kHeadDim, kBlockM>(
                rS, sQ_all + q_pos.stage * Config::kQBytes, 64 * consumer + 16 * warp,
                ptx::smem_addr(smem.sK) + pos.stage * Config::kKvBytes, lane);
            softmax.scan_max(rS);
            rescale = softmax.advance_reference(order.scale_log2, alpha);
            softmax.exponentiate(rS, order.scale_log2);
          }
        }
        tile::pin(rS);
        arrive(bars.empty_k + 8 * pos.stage);
        const uint32_t empty_v = bars.empty_v + 8 * pv.stage;
        pv = pos;
        pos.advance();
        // The branch of this wait also keeps ptxas from moving the wait for P V above the
        // exponentials.
        if (n > own.first) ptx::mbarrier_try_wait_parity(bars.full_k + 8 * pos.stage, pos.phase);
        ptx::wgmma_wait_group<0>();
        tile::pin(rP);
        tile::pin(rO);
        arrive(empty_v);
        if (rescale) softmax.scale_output(rO, alpha);
        tile::pack_operand_a<kDtype>(rP, rS);
      };

      --n;
      int masked_until = max(own.full_last + 1, own.first);
#pragma unroll 1
      do {
#pragma unroll 1
        for (; n >= masked_until; --n) step(std::true_type{});
#pragma unroll 1
        for (; n >= own.full_first && n >= own.first && n <= own.full_last; --n) step(std::false_type{});
        masked_until = own.first;
      } while (n >= own.first);

      ptx::mbarrier_try_wait_parity(bars.full_v + 8 * pv.stage, pv.phase);
      tile::pin(rP);
      tile::pin(rO);
      ptx::wgmma_fence();
      tile::wgmma_pv<kDtype>(rO, rP, desc_v_all + pv.stage * kKvStep);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      tile::pin(rO);
      arrive(bars.empty_v + 8 * pv.stage);
    } else {
      release_stored_q();
    }
#pragma unroll 1
    for (; n >= range.first; --n) skip();

    // ---- Epilogue
    float* gLse = p.lse + (static_cast<int64_t>(work.batch_idx) * p.heads_q + work.head_idx) * p.seqlen_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float lse = softmax.finalize(rO, r, order.scale);
      const int lse_row = row + 16 * warp + lane / 4 + 8 * r;
      if (lane % 4 == 0 && lse_row < p.seqlen_q) gLse[lse_row] = lse;
    }
    const uint32_t sO = sQ_all + q_pos.stage * Config::kQBytes;
    ptx::bar_sync(1 + consumer, 128);  // all four warps have read their Q
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      tile::as_operand_a<kDtype>(a, rO, 0, k);
      ptx::stmatrix_x4(tile::panel_address<kBlockM>(sO, 64 * consumer + 16 * warp, k, lane), a);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + consumer, 128);
    if (elected && row < p.seqlen_q) {
      tile::tma_store<kHeadDim>(&maps.out, sO + 64 * consumer * tile::kPanelRowBytes,
                                kBlockM * tile::kPanelRowBytes, p.head_dim, row, work.head_idx,
                                work.batch_idx);
      ptx::cp_async_bulk_commit_group();
    }
    release_q = bars.empty_q + 8 * q_pos.stage;
    if constexpr (Config::kQStages == 1) release_stored_q();
    q_pos.advance();
  }
  if (elected) ptx::cp_async_bulk_wait_group_read_0();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_sm90_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ attn::TileOrder order,
                    const __grid_constant__ Maps maps, unsigned* counter, unsigned num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(
      smem_raw + (-ptx::smem_addr(smem_raw) & 1023));
  const Barriers bars = {ptx::smem_addr(smem.full_q), ptx::smem_addr(smem.empty_q),
                         ptx::smem_addr(smem.full_k), ptx::smem_addr(smem.empty_k),
                         ptx::smem_addr(smem.full_v), ptx::smem_addr(smem.empty_v)};
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kQStages; ++s) {
      ptx::mbarrier_init(bars.full_q + 8 * s, 1);
      ptx::mbarrier_init(bars.empty_q + 8 * s, Config::kConsumers);
    }
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(bars.full_k + 8 * s, 1);
      ptx::mbarrier_init(bars.empty_k + 8 * s, 4 * Config::kConsumers);
      ptx::mbarrier_init(bars.full_v + 8 * s, 1);
      ptx::mbarrier_init(bars.empty_v + 8 * s, 4 * Config::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = ptx::warpgroup_id();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(p, order, maps, counter, num_tiles, smem, bars);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config>(p, order, maps, smem, bars, warpgroup - 1);
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

template <class Config>
cudaError_t launch_config(const FwdParams& p, int num_sms, cudaStream_t stream) {
  const auto kernel = fwd_sm90_kernel<Config>;
  if (const cudaError_t status = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSmemBytes);
      status != cudaSuccess) {
    return status;
  }
  Maps maps;
  cudaError_t status = encode_tensor_map(&maps.query, p.query, p.dtype, p.head_dim, p.seqlen_q,
                                         p.heads_q, p.batch, p.query_stride, Config::kBlockM);
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
  const int64_t pairs = int64_t{p.batch} * p.heads_q, group = p.heads_q / p.heads_k;
  if (pairs * m_blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  int64_t section = 1;
  if (p.window_right < p.seqlen_k) {
    constexpr int64_t kSectionBytes = int64_t{48} << 20;
    const int64_t kv_bytes = int64_t{4} * p.seqlen_k * p.head_dim;
    section = std::min(
        pairs, std::max<int64_t>(kSectionBytes / std::max<int64_t>(kv_bytes, 1), 1) * group);
  }
  attn::TileOrder order;
  order.m_blocks = m_blocks;
  order.num_sections = (pairs + section - 1) / section;
  order.per_section = attn::FastDivide(section * m_blocks);
  order.section_heads = attn::FastDivide(section);
  order.last_heads = attn::FastDivide(pairs - (order.num_sections - 1) * section);
  order.heads = attn::FastDivide(p.heads_q);
  order.group = attn::FastDivide(group);
  order.scale = p.scale;
  order.scale_log2 = order.scale * attn::kLog2E;
  order.out_aligned = true;
  const unsigned num_tiles = pairs * m_blocks;
  const unsigned grid = std::min<unsigned>(num_tiles, num_sms);
  unsigned* counter = num_tiles > grid ? tile_counter(stream) : nullptr;
  kernel<<<grid, Config::kThreads, Config::kSmemBytes, stream>>>(p, order, maps, counter, num_tiles);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_fwd_sm90(const FwdParams& params, int num_sms, int shape, cudaStream_t stream) {
  return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.dtype, [&](auto dtype) {
    const int d = params.head_dim <= 64 ? 64 : params.head_dim <= 128 ? 128 : 256;
    return dispatch_value<64, 128, 256>(d, [&](auto head_dim) {
      return dispatch_value<TileShape::kTall, TileShape::kShort>(
          static_cast<TileShape>(shape), [&](auto s) {
            return launch_config<FwdConfig<head_dim(), s(), dtype()>>(params, num_sms, stream);
          });
    });
  });
}

}  // namespace fa
