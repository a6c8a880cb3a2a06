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

// Chosen by measurement on an H200; see benchmarks/results/README.md.
constexpr FwdTile fwd_tile(int head_dim, FwdTileShape shape) {
  if (head_dim == 64)
    return shape == FwdTileShape::kTall ? FwdTile{3, 128, 4, 2} : FwdTile{2, 128, 4, 2};
  if (head_dim == 128) {
    return shape == FwdTileShape::kTall   ? FwdTile{3, 64, 4, 2}
           : shape == FwdTileShape::kWide ? FwdTile{2, 128, 2, 2}
                                          : FwdTile{2, 64, 4, 2};
  }
  return FwdTile{2, 64, 2, 1};
}

// Key blocks of a range of query rows.
struct alignas(16) BlockRange {
  int first, last;            // those with visible keys; none when first > last
  int full_first, full_last;  // those of them that need no mask
};

// What the producer tells the consumers about a tile: it has the time for the arithmetic, some 800
// cycles, which the consumers would spend between two tiles.
template <int kConsumers>
struct TileInfo {
  BlockRange own[kConsumers];  // of each warpgroup
  int row;                     // the first one of the tile; kNoTile after the last tile
  int head_idx, batch_idx;
  int first, last;  // blocks that the CTA loads
};
constexpr int kNoTile = -1;

template <int kHeadDim_, FwdTileShape kShape, Dtype kDtype_>
struct FwdConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Dtype kDtype = kDtype_;
  static constexpr FwdTile kTile = fwd_tile(kHeadDim, kShape);
  static constexpr int kConsumers = kTile.consumers, kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = kTile.block_n, kStages = kTile.stages, kQStages = kTile.q_stages;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // The register file is dealt out again between one producer and the consumers.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
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
    uint64_t full_q[kQStages][kConsumers], empty_q[kQStages];
    uint64_t full_k[kStages], empty_k[kStages];
    uint64_t full_v[kStages], empty_v[kStages];
    TileInfo<kConsumers> tile[2];  // that Q belongs to; by turns, whatever the buffers of Q
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
  constexpr uint32_t kPanelBytes = kBlockN * tile::kPanelRowBytes;
  typename Config::Ring k_pos, v_pos;
  typename Config::QRing q_pos;
  unsigned index = blockIdx.x;
#pragma unroll 1
  while (index < order.num_tiles) {
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
      tile::tma_load<kBlockN, kHeadDim>(ptx::smem_addr(smem.sK[stage]), kPanelBytes, &maps.key,
                                        full, n * kBlockN, work.kv_head_idx, work.batch_idx);
      k_pos.advance();
    };
    auto load_v = [&](int n) {
      const int stage = v_pos.stage();
      ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.empty_v[stage]), v_pos.phase() ^ 1);
      const uint32_t full = ptx::smem_addr(&smem.full_v[stage]);
      ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
      tile::tma_load<kBlockN, kHeadDim>(ptx::smem_addr(smem.sV[stage]), kPanelBytes, &maps.value,
                                        full, n * kBlockN, work.kv_head_idx, work.batch_idx);
      v_pos.advance();
    };

    // Nothing before this touches global memory, and what the consumers write waits for what is
    // loaded here: the start of this kernel overlaps the end of the one before.
    if (index == blockIdx.x) ptx::griddepcontrol_wait();
    const bool any = range.first <= range.last;
    if (Config::kQStages == 1 && any) load_k(range.last);  // Q still waits for its buffer
    const int q_stage = q_pos.stage();
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.empty_q[q_stage]), q_pos.phase() ^ 1);
    // By warpgroups, the last rows first: they have the first key block to start with.
#pragma unroll
    for (int c = Config::kConsumers - 1; c >= 0; --c) {
      const uint32_t full_q = ptx::smem_addr(&smem.full_q[q_stage][c]);
      ptx::mbarrier_arrive_expect_tx(full_q, Config::kQBytes / Config::kConsumers);
      tile::tma_load<64, kHeadDim>(ptx::smem_addr(smem.sQ[q_stage]) + 64 * c * tile::kPanelRowBytes,
                                   kBlockM * tile::kPanelRowBytes, &maps.query, full_q,
                                   row + 64 * c, work.head_idx, work.batch_idx);
      if (Config::kQStages > 1 && any && c == Config::kConsumers - 1) load_k(range.last);
    }
    auto& info = smem.tile[q_pos.state % 2];
    info.row = row;
    info.head_idx = work.head_idx;
    info.batch_idx = work.batch_idx;
    info.first = range.first;
    info.last = range.last;
#pragma unroll 1
    for (int c = 0; c < Config::kConsumers; ++c)
      info.own[c] = block_range<kBlockN>(p, row + 64 * c, 64);
#pragma unroll
    for (int c = 0; c < Config::kConsumers; ++c)
      ptx::mbarrier_arrive(ptx::smem_addr(&smem.full_q[q_stage][c]));
    q_pos.advance();
#pragma unroll 1
    for (int n = range.last; n > range.first; --n) {
      if (n == min(range.last, range.first + 2)) take_next();
      load_k(n - 1);
      load_v(n);
    }
    if (range.first >= range.last) take_next();
    if (any) load_v(range.first);
    // Every CTA draws until it is past the end: this was the last draw of all.
    if (queue.counter != nullptr && ticket == order.num_tiles - 1) *queue.counter = 0;
    index = next;
  }
  ptx::griddepcontrol_launch_dependents();
  const int q_stage = q_pos.stage();
  ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.empty_q[q_stage]), q_pos.phase() ^ 1);
  smem.tile[q_pos.state % 2].row = kNoTile;
#pragma unroll
  for (int i = 0; i < 2 * Config::kConsumers; ++i)
    ptx::mbarrier_arrive(ptx::smem_addr(&smem.full_q[q_stage][i / 2]));
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
      if constexpr (!Config::kOutputInQ) arrive(smem_.empty_q[q_pos_.stage()]);
      uint32_t empty_v = 0;
      if (live) empty_v = enqueue_last_pv();
#pragma unroll 1
      for (int n = live ? own_.first - 1 : last_; n >= first_; --n) skip_block();
      q_pos_.advance();
      open = open_tile();
      start_tile();
      ptx::wgmma_wait_group<1>();
      tile::pin(rO_);
      if (empty_v != 0 && ptx::elect_sync()) ptx::mbarrier_arrive(empty_v);
      store_output(q_pos_.previous().state);
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
    if (ptx::elect_sync()) ptx::mbarrier_arrive(ptx::smem_addr(&barrier));
  }
  // The same value, by a warp reduction, whose result lies in a uniform register. Descriptors have
  // to be in those, and without it what they follow from is not: 40 more instructions a block.
  FA_DEVICE static int uniform(int v) { return __reduce_max_sync(0xffffffff, v); }

  FA_DEVICE int lane() const { return ptx::thread_index_again() % 32; }
  FA_DEVICE int warp() const { return ptx::thread_index_again() / 32 % 4; }
  FA_DEVICE bool elected() const { return ptx::thread_index_again() % 128 == 0; }

  FA_DEVICE uint64_t desc_q(int stage) const {
    return ptx::matrix_descriptor(
               ptx::smem_addr(smem_.sQ[0]) + consumer_ * 64 * tile::kPanelRowBytes, 0) +
           stage * (Config::kQBytes >> 4);
  }
  FA_DEVICE uint64_t desc_k(int stage) const {
    return ptx::matrix_descriptor(ptx::smem_addr(smem_.sK[0]), 0) + stage * (Config::kKvBytes >> 4);
  }
  FA_DEVICE uint64_t desc_v(int stage) const {
    return ptx::matrix_descriptor(ptx::smem_addr(smem_.sV[0]), kBlockN * tile::kPanelRowBytes) +
           stage * (Config::kKvBytes >> 4);
  }

  // ---- Tiles

  // Waits for Q of the next tile; false after the last one.
  FA_DEVICE bool open_tile() {
    wait(smem_.full_q[q_pos_.stage()][consumer_], q_pos_.phase());
    const auto& info = smem_.tile[q_pos_.state % 2];
    if (uniform(info.row) == kNoTile) {
      own_ = {0, -1, 0, -1};
      first_ = 0;
      last_ = -1;
      return false;
    }
    const BlockRange own = info.own[consumer_];
    own_ = {uniform(own.first), uniform(own.last), uniform(own.full_first), uniform(own.full_last)};
    first_ = uniform(info.first);
    last_ = uniform(info.last);
    return true;
  }

  // Enqueues the first Q K^T. A warpgroup without visible keys multiplies whatever is there, which
  // costs less than wgmma in a branch of its own.
  FA_DEVICE void start_tile() {
    if (own_.first <= own_.last) {
#pragma unroll 1
      for (int n = last_; n > own_.last; --n) {
        wait(smem_.full_k[pos_.stage()], pos_.phase());
        arrive(smem_.empty_k[pos_.stage()]);
        pos_.advance();
      }
      wait(smem_.full_k[pos_.stage()], pos_.phase());
    }
    const int states = uniform(pos_.state | q_pos_.state << 8);
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
    Ring skipped = pos_.before(last_ - own_.last);
    pos_.advance();
    if (n > own_.first) wait(smem_.full_k[pos_.stage()], pos_.phase());
    softmax_with_max(n);
    tile::pack_operand_a<kDtype>(rP_, rS_);
    // Only now the values of the blocks that start_tile passed over: they come after the keys.
#pragma unroll 1
    for (int i = last_; i > own_.last; --i, skipped.advance()) {
      wait(smem_.full_v[skipped.stage()], skipped.phase());
      arrive(smem_.empty_v[skipped.stage()]);
    }
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
    const int states = uniform(pos_.state | q_pos_.state << 8);
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
    if (n > own_.full_last || n < own_.full_first) {
      const int row = smem_.tile[q_pos_.state % 2].row + 64 * consumer_;
      attn::mask_columns(rS_, p_, row + 16 * warp(), n * kBlockN, lane());
    }
    softmax_.scan_max(rS_);
    const bool rescale = softmax_.advance_reference(order_.scale_log2, alpha_);
    softmax_.exponentiate(rS_, order_.scale_log2);
    return rescale;
  }

  // Returns the barrier to arrive at when it has finished.
  FA_DEVICE uint32_t enqueue_last_pv() {
    const Ring last = Ring{uniform(pos_.state)}.previous();
    wait(smem_.full_v[last.stage()], last.phase());
    tile::pin(rP_);
    tile::pin(rO_);
    ptx::wgmma_fence();
    tile::wgmma_pv<kDtype>(rO_, rP_, desc_v(last.stage()));
    ptx::wgmma_commit_group();
    return ptx::smem_addr(&smem_.empty_v[last.stage()]);
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

  // Stores O and LSE of the tile that q_state belongs to. What it is comes from shared
  // memory, so that nothing of it occupies a register during the main loop.
  FA_DEVICE void store_output(int q_state) {
    const auto& info = smem_.tile[q_state % 2];
    const int row = info.row + 64 * consumer_, head_idx = info.head_idx, batch_idx = info.batch_idx;
    float lse[2];
    softmax_.finalize(rO_, order_.scale, lse);
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
                                          col, p_.head_dim, row, head_idx, batch_idx);
        ptx::cp_async_bulk_commit_group();
      }
    }
    // Last: the fence above would wait for these stores, 500 cycles and more.
    float* gLse = p_.lse + (static_cast<int64_t>(batch_idx) * p_.heads_q + head_idx) * p_.seqlen_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lse_row = row + 16 * warp() + lane() / 4 + 8 * r;
      if (lane() % 4 == 0 && lse_row < p_.seqlen_q) gLse[lse_row] = lse[r];
    }
    stored_ = true;
  }

  const FwdParams& p_;
  const attn::TileOrder& order_;
  const Maps& maps_;
  typename Config::SharedStorage& smem_;
  const int consumer_;

  Ring pos_;          // the next block of K and V
  QRing q_pos_;       // this tile
  BlockRange own_;    // blocks of this warpgroup ...
  int first_, last_;  // ... and of the CTA
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
                    const __grid_constant__ attn::TileOrder order,
                    const __grid_constant__ Maps maps, const __grid_constant__ TileQueue queue) {
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

// Half the L2 of an H200, which is two parts: with 48 MiB causal attention of S 512 and 1024 is 2 %
// slower.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

template <class Config>
cudaError_t launch_config(const FwdParams& p, int num_sms, cudaStream_t stream) {
  const auto kernel = fwd_sm90_kernel<Config>;
  if (const cudaError_t status =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               sizeof(typename Config::SharedStorage));
      status != cudaSuccess) {
    return status;
  }
  Maps maps;
  cudaError_t status = encode_tensor_map(&maps.query, p.query, p.dtype, p.head_dim, p.seqlen_q,
                                         p.heads_q, p.batch, p.query_stride, 64);
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
  return cudaLaunchKernelEx(&config, kernel, p, order, maps, TileQueue{counter});
}

// Calls f(integral_constant head_dim instance, integral_constant shape). What an instance does not
// have becomes kTall.
template <class F>
cudaError_t dispatch_tile(int head_dim, FwdTileShape shape, F&& f) {
  constexpr std::integral_constant<FwdTileShape, FwdTileShape::kTall> tall;
  constexpr std::integral_constant<FwdTileShape, FwdTileShape::kWide> wide;
  constexpr std::integral_constant<FwdTileShape, FwdTileShape::kSmall> small;
  const bool is_tall = shape == FwdTileShape::kTall;
  if (head_dim <= 64) {
    constexpr std::integral_constant<int, 64> d;
    return is_tall ? f(d, tall) : f(d, wide);
  }
  if (head_dim <= 128) {
    constexpr std::integral_constant<int, 128> d;
    return is_tall ? f(d, tall) : shape == FwdTileShape::kWide ? f(d, wide) : f(d, small);
  }
  return f(std::integral_constant<int, 256>{}, tall);
}

}  // namespace

KernelShape describe_fwd_sm90(int head_dim, FwdTileShape shape) {
  KernelShape result{};
  dispatch_tile(head_dim, shape, [&](auto d, auto tile_shape) {
    using Config = FwdConfig<d(), tile_shape(), Dtype::kFloat16>;
    result = {Config::kBlockM, Config::kBlockN, Config::kThreads,
              static_cast<int>(sizeof(typename Config::SharedStorage))};
    return cudaSuccess;
  });
  return result;
}

cudaError_t launch_fwd_sm90(const FwdParams& params, FwdTileShape shape, int num_sms,
                            cudaStream_t stream) {
  return dispatch_tile(params.head_dim, shape, [&](auto d, auto tile_shape) {
    return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.dtype, [&](auto dtype) {
      return launch_config<FwdConfig<d(), tile_shape(), dtype()>>(params, num_sms, stream);
    });
  });
}

}  // namespace fa
