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
  int stages;     // of the rings of K and V
  int q_stages;   // of the ring of Q
};

enum class TileShape : int { kTall, kShort };

constexpr FwdTile fwd_tile(int head_dim, TileShape shape) {
  if (head_dim == 64) return shape == TileShape::kTall ? FwdTile{3, 128, 4, 2} : FwdTile{2, 128, 4, 2};
  if (head_dim == 128) return shape == TileShape::kTall ? FwdTile{3, 64, 3, 2} : FwdTile{2, 128, 2, 2};
  return FwdTile{2, 64, 2, 1};
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
  // With two buffers of Q, O leaves through the rows of Q that it belongs to. With one, the next Q
  // is needed before O has left: then O has a buffer of its own, 128 columns of it at a time.
  static constexpr bool kOutputInQ = kQStages == 2;
  static constexpr int kOutCols = kOutputInQ ? kHeadDim : 128;
  static constexpr int kOutRows = kOutputInQ ? kBlockM : 64;  // between the panels of O
  // A warpgroup that waits for a block holds at most one other one.
  static_assert((kBlockM - 64) / kBlockN < kStages);

  using Ring = tile::RingPosition<kStages>;
  using QRing = tile::RingPosition<kQStages>;
  struct SharedStorage {
    alignas(1024) uint16_t sQ[kQStages][kBlockM * kHeadDim];
    alignas(1024) uint16_t sK[kStages][kBlockN * kHeadDim];
    alignas(1024) uint16_t sV[kStages][kBlockN * kHeadDim];
    alignas(1024) uint16_t sO[kOutputInQ ? 1 : kConsumers][kOutputInQ ? 1 : 64 * kOutCols];
    uint64_t full_q[kQStages], empty_q[kQStages];
    uint64_t full_k[kStages], empty_k[kStages];
    uint64_t full_v[kStages], empty_v[kStages];
    int tile[2];  // index of the tile that Q belongs to
  };

  using Output = tile::Accumulator<1, kHeadDim / 8>;
  using Scores = tile::Accumulator<1, kBlockN / 8>;
  using Softmax = attn::OnlineSoftmax<1, false>;
};

struct Maps {
  CUtensorMap query, key, value, out;
};

// Where CTAs get their tiles from: the first is that of their index, the others are drawn from a
// counter that is 0 between launches, or follow at the distance of the grid where there is none.
struct TileQueue {
  unsigned* counter;
  unsigned num_tiles;
};
constexpr int kNoTile = -1;

struct BlockRange {
  int first, last;            // blocks with visible keys; none when first > last
  int full_first, full_last;  // those of them that need no mask
};
template <int kBlockN>
FA_DEVICE BlockRange block_range(const FwdParams& p, int row, int rows) {
  const attn::KeyRange keys = attn::key_range(p, min(row, p.seqlen_q), min(row + rows, p.seqlen_q));
  if (keys.first >= keys.end) return {0, -1, 0, -1};
  return {keys.first / kBlockN, (keys.end - 1) / kBlockN, (keys.full_first + kBlockN - 1) / kBlockN,
          keys.full_end / kBlockN - 1};
}

// Walks the tiles of this CTA and keeps the rings of Q, K and V full. Runs in one thread.
template <class Config>
FA_DEVICE void produce(const FwdParams& p, const attn::TileOrder& order, const Maps& maps,
                       const TileQueue& queue, typename Config::SharedStorage& smem) {
  constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  typename Config::Ring k_pos, v_pos;
  typename Config::QRing q_pos;
  ptx::prefetch_tensormap(&maps.query);
  ptx::prefetch_tensormap(&maps.key);
  ptx::prefetch_tensormap(&maps.value);
  ptx::prefetch_tensormap(&maps.out);

  unsigned index = blockIdx.x;
#pragma unroll 1
  while (index < queue.num_tiles) {
    const attn::WorkTile work = attn::tile_of_cta(order, index);
    const int row = work.m_block * kBlockM;
    const BlockRange range = block_range<kBlockN>(p, row, kBlockM);
    unsigned ticket = 0, next = index + gridDim.x;
    // Late, so that the longest tile left goes to the CTA that is free first: taken one tile ahead,
    // causal attention of D 256 lost 5 to 10 %. Three blocks hide the latency of the atomic.
    auto take_next = [&] {
      if (queue.counter == nullptr) return;
      ticket = atomicAdd(queue.counter, 1);
      next = ticket + gridDim.x;
    };

    auto load_k = [&](int n) {
      const int stage = k_pos.stage();
      ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.empty_k[stage]), k_pos.phase() ^ 1);
      const uint32_t full = ptx::smem_addr(&smem.full_k[stage]);
      ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
      tile::tma_load<kBlockN, kHeadDim>(ptx::smem_addr(smem.sK[stage]), &maps.key, full,
                                        n * kBlockN, work.kv_head_idx, work.batch_idx);
      k_pos.advance();
    };
    auto load_v = [&](int n) {
      const int stage = v_pos.stage();
      ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.empty_v[stage]), v_pos.phase() ^ 1);
      const uint32_t full = ptx::smem_addr(&smem.full_v[stage]);
      ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
      tile::tma_load<kBlockN, kHeadDim>(ptx::smem_addr(smem.sV[stage]), &maps.value, full,
                                        n * kBlockN, work.kv_head_idx, work.batch_idx);
      v_pos.advance();
    };

    const bool any = range.first <= range.last;
    if (Config::kQStages == 1 && any) load_k(range.last);  // Q still waits for its buffer
    const int q_stage = q_pos.stage();
    const uint32_t full_q = ptx::smem_addr(&smem.full_q[q_stage]);
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.empty_q[q_stage]), q_pos.phase() ^ 1);
    smem.tile[q_pos.state % 2] = static_cast<int>(index);
    ptx::mbarrier_arrive_expect_tx(full_q, Config::kQBytes);
    tile::tma_load<kBlockM, kHeadDim>(ptx::smem_addr(smem.sQ[q_stage]), &maps.query, full_q, row,
                                      work.head_idx, work.batch_idx);
    q_pos.advance();
    if (Config::kQStages > 1 && any) load_k(range.last);
#pragma unroll 1
    for (int n = range.last; n > range.first; --n) {
      if (n == min(range.last, range.first + 2)) take_next();
      load_k(n - 1);
      load_v(n);
    }
    if (range.first >= range.last) take_next();
    if (any) load_v(range.first);
    // Every CTA draws until it is past the end: this was the last draw of all.
    if (queue.counter != nullptr && ticket == queue.num_tiles - 1) *queue.counter = 0;
    index = next;
  }
  const int q_stage = q_pos.stage();
  ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.empty_q[q_stage]), q_pos.phase() ^ 1);
  smem.tile[q_pos.state % 2] = kNoTile;
  ptx::mbarrier_arrive(ptx::smem_addr(&smem.full_q[q_stage]));
}

// One warpgroup, with 64 of the CTA's query rows.
template <class Config>
class Consumer {
 public:
  FA_DEVICE Consumer(const FwdParams& p, const attn::TileOrder& order, const Maps& maps,
                     typename Config::SharedStorage& smem, int consumer)
      : p_(p), order_(order), maps_(maps), smem_(smem), consumer_(consumer) {}

  // Consecutive tiles overlap: the first Q K^T of the next one is enqueued before O of this one is
  // stored.
  FA_DEVICE void run() {
    open_tile();
    start_tile();
    bool open = true;
#pragma unroll 1
    do {
      ptx::wgmma_wait_group<0>();
      tile::pin(rS_);
      rO_.clear();
      softmax_ = {};
      const bool live = own_.first <= own_.last;
      if (live) {
        main_loop();
      } else {
        release_stored_q();
      }
      const int q_state = q_pos_.state;
      if constexpr (!Config::kOutputInQ) arrive(smem_.empty_q[q_pos_.stage()]);
      const Ring last = pos_.previous();
      if (live) enqueue_last_pv(last);
#pragma unroll 1
      for (int n = live ? own_.first - 1 : range_.last; n >= range_.first; --n) skip_block();
      q_pos_.advance();
      open = open_tile();
      start_tile();
      ptx::wgmma_wait_group<1>();
      tile::pin(rO_);
      if (live) arrive(smem_.empty_v[last.stage()]);
      store_output(q_state);
    } while (open);
    ptx::wgmma_wait_group<0>();
    if (elected()) ptx::cp_async_bulk_wait_group_read_0();
  }

 private:
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM,
                       kBlockN = Config::kBlockN;
  static constexpr Dtype kDtype = Config::kDtype;
  using Ring = typename Config::Ring;
  using QRing = typename Config::QRing;

  // ---- Barriers
  FA_DEVICE void wait(uint64_t& barrier, uint32_t phase) {
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&barrier), phase);
  }
  // Once for each warp, after its reads.
  FA_DEVICE void arrive(uint64_t& barrier) {
    if (lane() == 0) ptx::mbarrier_arrive(ptx::smem_addr(&barrier));
  }
  FA_DEVICE int lane() const { return threadIdx.x % 32; }
  FA_DEVICE int warp() const { return threadIdx.x / 32 % 4; }
  FA_DEVICE bool elected() const { return threadIdx.x % 128 == 0; }

  FA_DEVICE uint64_t desc_q(int stage) const {
    return ptx::matrix_descriptor(
        ptx::smem_addr(smem_.sQ[0]) + consumer_ * 64 * tile::kPanelRowBytes, 0) +
           stage * (Config::kQBytes >> 4);
  }
  FA_DEVICE uint64_t desc_k(int stage) const {
    return ptx::matrix_descriptor(ptx::smem_addr(smem_.sK[0]), 0) +
           stage * (Config::kKvBytes >> 4);
  }
  FA_DEVICE uint64_t desc_v(int stage) const {
    return ptx::matrix_descriptor(ptx::smem_addr(smem_.sV[0]), kBlockN * tile::kPanelRowBytes) +
           stage * (Config::kKvBytes >> 4);
  }

  // ---- Tiles

  // Waits for Q of the next tile; false after the last one.
  FA_DEVICE bool open_tile() {
    wait(smem_.full_q[q_pos_.stage()], q_pos_.phase());
    // A warp reduction, for its result lies in a uniform register.
    const int index = __reduce_max_sync(0xffffffff, smem_.tile[q_pos_.state % 2]);
    if (index == kNoTile) {
      own_ = range_ = {0, -1, 0, -1};
      return false;
    }
    const attn::WorkTile work = attn::tile_of_cta(order_, index);
    const int tile_row = work.m_block * kBlockM;
    row_ = tile_row + 64 * consumer_;
    range_ = block_range<kBlockN>(p_, tile_row, kBlockM);
    own_ = block_range<kBlockN>(p_, row_, 64);
    return true;
  }

  // Enqueues the first Q K^T. A warpgroup without visible keys multiplies whatever is there, which
  // costs less than wgmma in a branch of its own.
  FA_DEVICE void start_tile() {
    if (own_.first <= own_.last) {
#pragma unroll 1
      for (int n = range_.last; n > own_.last; --n) skip_block();
      wait(smem_.full_k[pos_.stage()], pos_.phase());
    }
    const int states = __reduce_max_sync(0xffffffff, pos_.state | q_pos_.state << 8);
    tile::pin(rS_);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockM>(rS_, desc_q(QRing{states >> 8}.stage()),
                                              desc_k(Ring{states & 0xff}.stage()));
    ptx::wgmma_commit_group();
  }

  // A block that other warpgroups of the CTA need. Its barriers have to be full before they are
  // released: an arrival for this use must not be counted for the one before.
  FA_DEVICE void skip_block() {
    wait(smem_.full_k[pos_.stage()], pos_.phase());
    arrive(smem_.empty_k[pos_.stage()]);
    wait(smem_.full_v[pos_.stage()], pos_.phase());
    arrive(smem_.empty_v[pos_.stage()]);
    pos_.advance();
  }

  // ---- Blocks

  // All blocks but the P V of the last, which is left in rP. The scores of the first are there.
  FA_DEVICE void main_loop() {
    int n = own_.last;
    arrive(smem_.empty_k[pos_.stage()]);
    pos_.advance();
    if (n > own_.first) wait(smem_.full_k[pos_.stage()], pos_.phase());
    softmax_with_max(n);
    tile::pack_operand_a<kDtype>(rP_, rS_);
    release_stored_q();
    --n;
    int masked_end = max(own_.full_last + 1, own_.first);  // the right edge, then the left one
#pragma unroll 1
    do {
#pragma unroll 1
      for (; n >= masked_end; --n) step<true>(n);
#pragma unroll 1
      for (; n >= own_.full_first && n >= own_.first; --n) step<false>(n);
      masked_end = own_.first;
    } while (n >= own_.first);
  }

  // Softmax of block n while P V of the block before runs.
  template <bool kMasked>
  FA_DEVICE void step(int n) {
    // Through a warp reduction, so that what follows from the positions is computed in uniform
    // registers, where descriptors have to be: without it, 40 more instructions a block.
    const int states = __reduce_max_sync(0xffffffff, pos_.state | q_pos_.state << 8);
    const Ring now = {states & 0xff}, before = now.previous();
    const int q_stage = QRing{states >> 8}.stage();
    tile::pin(rS_);
    tile::pin(rP_);
    tile::pin(rO_);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockM>(rS_, desc_q(q_stage), desc_k(now.stage()));
    ptx::wgmma_commit_group();
    wait(smem_.full_v[before.stage()], before.phase());
    ptx::wgmma_fence();
    tile::wgmma_pv<kDtype>(rO_, rP_, desc_v(before.stage()));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    tile::pin(rS_);
    bool rescale = false;
    if constexpr (kMasked) {
      rescale = softmax_with_max(n);
    } else {
      softmax_.template exponentiate_at_once<1>(rS_, 0, order_.scale_log2);
      if (!softmax_.accept()) {
        tile::warp_qk<kDtype, kHeadDim, kBlockM>(rS_, ptx::smem_addr(smem_.sQ[q_stage]),
                                                 64 * consumer_ + 16 * warp(),
                                                 ptx::smem_addr(smem_.sK[now.stage()]), lane());
        softmax_.scan_max(rS_);
        rescale = softmax_.advance_reference(order_.scale_log2, alpha_);
        softmax_.exponentiate(rS_, order_.scale_log2);
      }
    }
    tile::pin(rS_);
    arrive(smem_.empty_k[now.stage()]);
    pos_.advance();
    // The branch of this wait also keeps ptxas from moving the wait for P V above the exponentials.
    if (n > own_.first) wait(smem_.full_k[pos_.stage()], pos_.phase());
    ptx::wgmma_wait_group<0>();
    tile::pin(rP_);
    tile::pin(rO_);
    arrive(smem_.empty_v[before.stage()]);
    if (rescale) softmax_.scale_output(rO_, alpha_);
    tile::pack_operand_a<kDtype>(rP_, rS_);
  }

  FA_DEVICE bool softmax_with_max(int n) {
    if (n > own_.full_last || n < own_.full_first)
      attn::mask_columns(rS_, p_, row_ + 16 * warp(), n * kBlockN, lane());
    softmax_.scan_max(rS_);
    const bool rescale = softmax_.advance_reference(order_.scale_log2, alpha_);
    softmax_.exponentiate(rS_, order_.scale_log2);
    return rescale;
  }

  FA_DEVICE void enqueue_last_pv(Ring last) {
    wait(smem_.full_v[last.stage()], last.phase());
    tile::pin(rP_);
    tile::pin(rO_);
    ptx::wgmma_fence();
    tile::wgmma_pv<kDtype>(rO_, rP_, desc_v(__reduce_max_sync(0xffffffff, last.stage())));
    ptx::wgmma_commit_group();
  }

  // ---- Epilogue

  // Hands the other buffer of Q back to the producer, once O of the tile before has left it.
  FA_DEVICE void release_stored_q() {
    if constexpr (!Config::kOutputInQ) return;
    if (elected() && stored_) {
      ptx::cp_async_bulk_wait_group_read_0();
      ptx::mbarrier_arrive(ptx::smem_addr(&smem_.empty_q[1 - q_pos_.stage()]));
    }
    stored_ = false;
  }

  // Stores O and LSE of the tile that q_state belongs to. The tile is read from there again, so
  // that nothing of it occupies a register during the main loop.
  FA_DEVICE void store_output(int q_state) {
    const int index = *static_cast<volatile int*>(&smem_.tile[q_state % 2]);
    const attn::WorkTile work = attn::tile_of_cta(order_, index);
    const int row = work.m_block * kBlockM + 64 * consumer_;
    float* gLse =
        p_.lse + (static_cast<int64_t>(work.batch_idx) * p_.heads_q + work.head_idx) * p_.seqlen_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float lse = softmax_.finalize(rO_, r, order_.scale);
      const int lse_row = row + 16 * warp() + lane() / 4 + 8 * r;
      if (lane() % 4 == 0 && lse_row < p_.seqlen_q) gLse[lse_row] = lse;
    }
    uint32_t sO;
    if constexpr (Config::kOutputInQ) {
      sO = ptx::smem_addr(smem_.sQ[QRing{q_state}.stage()]) + consumer_ * 64 * tile::kPanelRowBytes;
    } else {
      sO = ptx::smem_addr(smem_.sO[consumer_]);
    }
#pragma unroll
    for (int col = 0; col < kHeadDim; col += Config::kOutCols) {
      if (!Config::kOutputInQ && elected()) ptx::cp_async_bulk_wait_group_read_0();
      ptx::bar_sync(1 + consumer_, 128);  // all have read their Q, or the store before has left
#pragma unroll
      for (int k = 0; k < Config::kOutCols / 16; ++k) {
        uint32_t a[4];
        tile::as_operand_a<kDtype>(a, rO_, 0, col / 16 + k);
        ptx::stmatrix_x4(tile::panel_address<Config::kOutRows>(sO, 16 * warp(), k, lane()), a);
      }
      ptx::fence_proxy_async();
      ptx::bar_sync(1 + consumer_, 128);
      if (elected() && row < p_.seqlen_q) {
        tile::tma_store<Config::kOutCols>(&maps_.out, sO, Config::kOutRows * tile::kPanelRowBytes,
                                          col, p_.head_dim, row, work.head_idx, work.batch_idx);
        ptx::cp_async_bulk_commit_group();
      }
    }
    stored_ = true;
  }

  const FwdParams& p_;
  const attn::TileOrder& order_;
  const Maps& maps_;
  typename Config::SharedStorage& smem_;
  const int consumer_;

  Ring pos_;     // the next block of K and V
  QRing q_pos_;  // this tile
  BlockRange range_, own_;  // of the CTA and of this warpgroup
  int row_;
  bool stored_ = false;
  typename Config::Output rO_;
  typename Config::Scores rS_;
  uint32_t rP_[kBlockN / 16][4];
  typename Config::Softmax softmax_;
  float alpha_[2];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_sm90_kernel(const __grid_constant__ FwdParams p,
                    const __grid_constant__ attn::TileOrder order, const __grid_constant__ Maps maps,
                    const __grid_constant__ TileQueue queue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kQStages; ++s) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.full_q[s]), 1);
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
    if (threadIdx.x == 0) produce<Config>(p, order, maps, queue, smem);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer<Config>(p, order, maps, smem, warpgroup - 1).run();
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
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(typename Config::SharedStorage));
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
  kernel<<<grid, Config::kThreads, sizeof(typename Config::SharedStorage), stream>>>(
      p, order, maps, TileQueue{counter, num_tiles});
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
