// The consumer warpgroups of fwd_sm90.cu.
#pragma once
#include "../attn/mask.cuh"
#include "../attn/mask_summary.cuh"
#include "../attn/scheduler.cuh"
#include "../tile/mma_sm90.cuh"
#include "../tile/tma.cuh"
#include "fwd_sm90_tile.cuh"

namespace fa::sm90 {

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
    if (!open_tile() && kPacked) return;  // the host does not know whether every CTA has one
    bool live = start_tile(), open = true;
#pragma unroll 1
    do {
      ptx::wgmma_wait_group<0>();
      tile::pin(rS_);
      rO_.clear();
      softmax_ = {};
      if constexpr (kTensor) {
        bool more = live;
#pragma unroll 1
        do {
          if (more) main_loop();
          more = last_ >= 0;
          if (more) live = more = pass_over_hidden(live);
        } while (more);
      } else {
        if (live) main_loop();
      }
      release_stored_q();  // if no block did
      if constexpr (!Config::kOutputInQ) arrive(smem_.empty_q[q_pos_.stage()]);
      uint32_t empty_v = 0;
      if (live) empty_v = enqueue_last_pv();
      if constexpr (!Config::kTensor) {
#pragma unroll 1
        for (int n = live ? own_.first - 1 : last_; n >= first_; --n) skip_block();
      }
      q_pos_.advance();
      open = open_tile();
      live = start_tile();
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
  static constexpr bool kTensor = Config::kTensor, kPacked = Config::kPacked;
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

  // Read again each time: kept, they would spill.
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
    if constexpr (kPacked) {
      // Rows of the next sequence: were they NaN or large, a warp would compute all its scores
      // twice.
      const int rows = uniform(info.sequence.seqlen_q - info.row) - 64 * consumer_;
      if (rows > 0 && rows < 64)
        clear_rows<kBlockM>(
            ptx::smem_addr(smem_.sQ[q_pos_.stage()]) + consumer_ * 64 * tile::kPanelRowBytes, rows,
            64);
    }
    return true;
  }

  // Lengths and band of a tile, and where its sequence begins.
  FA_DEVICE const auto& band(const typename Config::Tile& info) const {
    if constexpr (kPacked) {
      return info.sequence;
    } else {
      return p_;
    }
  }
  FA_DEVICE int q_begin(const typename Config::Tile& info) const {
    if constexpr (kPacked) return info.sequence.q_begin;
    return 0;
  }

  // Zeros in rows [first, end) of a tile of kRows rows, before this warpgroup multiplies it.
  template <int kRows>
  FA_DEVICE void clear_rows(uint32_t smem, int first, int end) {
    tile::clear_rows<kRows, kHeadDim, 128>(smem, first, end, ptx::thread_index_again() % 128);
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + consumer_, 128);
  }

  // Before the first P V of a tile, that of block n. What the stage holds behind the last key
  // belongs to the next sequence, and NaN there would outlast P = 0. Several warpgroups write the
  // same zeros, each before it reads or releases the stage.
  FA_DEVICE void clear_value_tail(int n) {
    const int keys = uniform(smem_.tile[q_pos_.state % 2].sequence.seqlen_k) - n * kBlockN;
    if (keys >= kBlockN) return;
    const Ring now = Ring{uniform(pos_.state)}.previous();
    wait(smem_.full_v[now.stage()], now.phase());
    clear_rows<kBlockN>(ptx::smem_addr(smem_.sV[now.stage()]), keys, kBlockN);
  }

  // Enqueues the first Q K^T; false if this warpgroup has none. It then multiplies whatever is
  // there, which costs less than wgmma in a branch of its own.
  FA_DEVICE bool start_tile() {
    bool live = own_.first <= own_.last;
    if constexpr (kTensor) {
      live = next_is_visible();
    } else if (live) {
#pragma unroll 1
      for (int n = last_; n > own_.last; --n) {
        wait(smem_.full_k[pos_.stage()], pos_.phase());
        arrive(smem_.empty_k[pos_.stage()]);
        pos_.advance();
      }
      wait(smem_.full_k[pos_.stage()], pos_.phase());
    }
    enqueue_first_qk();
    return live;
  }

  FA_DEVICE void enqueue_first_qk() {
    const int states = uniform(pos_.state | q_pos_.state << 8);
    tile::pin(rS_);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockM>(rS_, desc_q(QRing{states >> 8}.stage()),
                                              desc_k(Ring{states & 0xff}.stage()));
    ptx::wgmma_commit_group();
  }

  // A block that only other warpgroups of the CTA need. Its barriers have to be full before they
  // are released: an arrival for this use must not be counted for the one before.
  FA_DEVICE void skip_block() {
    wait(smem_.full_k[pos_.stage()], pos_.phase());
    arrive(smem_.empty_k[pos_.stage()]);
    wait(smem_.full_v[pos_.stage()], pos_.phase());
    arrive(smem_.empty_v[pos_.stage()]);
    pos_.advance();
  }

  // With a mask tensor: last_ counts down the blocks of the tile that are left, and each stage says
  // which one it holds. Waits for the keys of the next.
  FA_DEVICE bool next_is_visible() {
    if (last_ < 0) return false;
    wait(smem_.full_k[pos_.stage()], pos_.phase());
    const float entry = smem_.block[pos_.stage()].entry[consumer_];
    return uniform(entry != -INFINITY);
  }

  // With a mask tensor: passes over blocks that are hidden from this warpgroup, up to the scores of
  // the next one that is not; false if there is none. No P V is left in flight across those
  // blocks: its values hold a stage that the producer could need for them.
  FA_DEVICE bool pass_over_hidden(bool live) {
    if (live) {
      const uint32_t empty_v = enqueue_last_pv();
      ptx::wgmma_wait_group<0>();
      tile::pin(rO_);
      if (ptx::elect_sync()) ptx::mbarrier_arrive(empty_v);
    }
#pragma unroll 1
    do {
      skip_block();
      --last_;
      if (last_ < 0) return false;
    } while (!next_is_visible());
    enqueue_first_qk();
    ptx::wgmma_wait_group<0>();
    tile::pin(rS_);
    return true;
  }

  // ---- Blocks

  // All blocks but the P V of the last, which is left in rP. The scores of the first are there.
  FA_DEVICE void main_loop() {
    if constexpr (kTensor) {
      masked_loop();
    } else {
      band_loop();
    }
  }

  FA_DEVICE void band_loop() {
    int n = own_.last;
    arrive(smem_.empty_k[pos_.stage()]);
    Ring skipped = pos_.before(last_ - own_.last);
    pos_.advance();
    if (n > own_.first) wait(smem_.full_k[pos_.stage()], pos_.phase());
    softmax_with_max(n, 0.f);
    tile::pack_operand_a<kDtype>(rP_, rS_);
    // Only now the values of the blocks that start_tile passed over: they come after the keys.
#pragma unroll 1
    for (int i = last_; i > own_.last; --i, skipped.advance()) {
      wait(smem_.full_v[skipped.stage()], skipped.phase());
      arrive(smem_.empty_v[skipped.stage()]);
    }
    if constexpr (kPacked) clear_value_tail(n);
    release_stored_q();
    --n;
    int masked_end = max(own_.full_last + 1, own_.first);  // the right edge, then the left one
#pragma unroll 1
    do {
#pragma unroll 1
      for (; n >= masked_end; --n) step<true>(n, 0.f);
#pragma unroll 1
      for (; n >= own_.full_first && n >= own_.first; --n) step<false>(n, 0.f);
      masked_end = own_.first;
    } while (n >= own_.first);
  }

  FA_DEVICE void masked_loop() {
    {
      const auto& block = smem_.block[pos_.stage()];
      // O is there already after hidden blocks, and 0 in the first loop of a tile.
      if (softmax_with_max(block.n, block.entry[consumer_])) softmax_.scale_output(rO_, alpha_);
    }
    arrive(smem_.empty_k[pos_.stage()]);
    pos_.advance();
    --last_;
    tile::pack_operand_a<kDtype>(rP_, rS_);
    release_stored_q();
    bool next = next_is_visible();
#pragma unroll 1
    while (next) {
      const auto& block = smem_.block[pos_.stage()];
      const int n = uniform(block.n);
      const float entry = block.entry[consumer_];
      const bool whole = uniform(attn::is_constant(entry) && !is_cut(n));
      if (whole && all_swallowed(entry)) {
        next = step_of_ones();
      } else if (whole) {
        next = step<false>(n, entry);
      } else {
        next = step<true>(n, entry);
      }
    }
  }

  // Softmax of block n while P V of the block before runs. entry: of the mask summary. Returns,
  // with a mask tensor, whether the next block is one of this warpgroup.
  template <bool kMasked>
  FA_DEVICE bool step(int n, float entry) {
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
      rescale = softmax_with_max(n, entry);
    } else {
      const bool at_once = softmax_.takes_bias(entry);
      bool done = false;
      if (at_once) {
        softmax_.template exponentiate_at_once<1>(rS_, 0, order_.scale_log2, entry);
        done = softmax_.template accept<true>(order_.scale_log2, entry);
      } else if (attn::MaskSummary(p_, 0, 0).may_skip() && softmax_.swallowed(entry)) {
        softmax_.fill_with_ones(rS_);
        done = true;
      }
      if (!done) {
        if (at_once) {
          tile::warp_qk<kDtype, kHeadDim, kBlockM>(rS_, ptx::smem_addr(smem_.sQ[q_stage]),
                                                   64 * consumer_ + 16 * warp(),
                                                   ptx::smem_addr(smem_.sK[now.stage()]), lane());
        }
        rescale = softmax_with_max<false>(n, entry);
      }
    }
    tile::pin(rS_);
    arrive(smem_.empty_k[now.stage()]);
    pos_.advance();
    // The branch of this wait also keeps ptxas from moving the wait for P V above the exponentials.
    bool next = true;
    if constexpr (kTensor) {
      --last_;
      next = next_is_visible();
    } else {
      if (n > own_.first) wait(smem_.full_k[pos_.stage()], pos_.phase());
    }
    ptx::wgmma_wait_group<0>();
    tile::pin(rP_);
    tile::pin(rO_);
    arrive(smem_.empty_v[before.stage()]);
    if (rescale) softmax_.scale_output(rO_, alpha_);
    tile::pack_operand_a<kDtype>(rP_, rS_);
    return next;
  }

  // With a mask tensor: whether P of a whole block is 1 in all rows of the warpgroup. Few blocks
  // get as far as the vote: the far ones that some row needs.
  FA_DEVICE bool all_swallowed(float entry) {
    if (!uniform(entry < Config::Softmax::kSwallowingBias) ||
        !attn::MaskSummary(p_, 0, 0).may_skip()) {
      return false;
    }
    return uniform(ptx::bar_red_and(1 + consumer_, 128, softmax_.swallowed(entry)));
  }

  // Such a block: step without Q K^T, which is half of the work.
  FA_DEVICE bool step_of_ones() {
    const uint32_t empty_v = enqueue_last_pv();
    arrive(smem_.empty_k[pos_.stage()]);
    pos_.advance();
    --last_;
    const bool next = next_is_visible();
    ptx::wgmma_wait_group<0>();
    tile::pin(rP_);
    tile::pin(rO_);
    if (ptx::elect_sync()) ptx::mbarrier_arrive(empty_v);
    softmax_.fill_with_ones(rS_);
    tile::pack_operand_a<kDtype>(rP_, rS_);
    return next;
  }

  // Whether the band or the end of the sequence hides some of block n.
  FA_DEVICE bool is_cut(int n) const { return n > own_.full_last || n < own_.full_first; }

  // Scores in rS to probabilities, with the maximum; true if O is to be rescaled by alpha. kMasked:
  // the block may be cut or its entry not constant.
  template <bool kMasked = true>
  FA_DEVICE bool softmax_with_max(int n, float entry) {
    const auto& info = smem_.tile[q_pos_.state % 2];
    if constexpr (kTensor) add_mask<kMasked>(info, n, entry);
    if (kMasked && is_cut(n))
      attn::mask_columns(rS_, band(info), info.row + 64 * consumer_ + 16 * warp(), n * kBlockN,
                         lane());
    softmax_.scan_max(rS_);
    const bool rescale = softmax_.advance_reference(order_.scale_log2, alpha_);
    softmax_.exponentiate(rS_, order_.scale_log2);
    return rescale;
  }

  // Raw scores to finished ones.
  template <bool kMasked>
  FA_DEVICE void add_mask(const TileInfo<Config::kConsumers>& info, int n, float entry) {
    const bool constant = !kMasked || attn::is_constant(entry);
    const float bias = constant ? entry : 0.f;
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) rS_.x[0][i][e] = fmaf(rS_.x[0][i][e], order_.scale, bias);
    if (constant) return;
    const int row = info.row + 64 * consumer_ + 16 * warp();
    if (attn::is_mixed_bits(entry)) {
      const attn::MaskSummary summary(p_, info.batch_idx, info.head_idx);
      const int lane_row = row + lane() / 4;
      const uint64_t bits[2][1] = {{summary.bits(lane_row, n)}, {summary.bits(lane_row + 8, n)}};
      attn::mask_bits(rS_, bits, lane());
    } else {
      const int64_t slice = info.batch_idx * p_.mask_stride[0] + info.head_idx * p_.mask_stride[1];
      attn::mask_tensor<kDtype, true>(rS_, p_, slice, row, n * kBlockN, lane());
    }
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

  // Stores O and LSE of the tile that q_state belongs to. Which one that is comes from shared
  // memory, so that nothing of it occupies a register during the main loop.
  FA_DEVICE void store_output(int q_state) {
    const auto& info = smem_.tile[q_state % 2];
    const int row = info.row + 64 * consumer_, head_idx = info.head_idx, batch_idx = info.batch_idx;
    // Read before the barriers below: behind the last one the producer may write the next tile.
    const int first_row = q_begin(info), seqlen_q = band(info).seqlen_q;
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
      if (kPacked && seqlen_q - row < 64) {
        store_rows(sO, col, head_idx, first_row + row, seqlen_q - row);
      } else if (elected() && row < seqlen_q) {
        tile::tma_store<Config::kOutCols>(&maps_.out, sO, Config::kOutRows * tile::kPanelRowBytes,
                                          col, p_.head_dim, first_row + row, head_idx, batch_idx);
        ptx::cp_async_bulk_commit_group();
      }
    }
    // Last: the fence above would wait for these stores, 500 cycles and more.
    float* gLse = p_.lse + (static_cast<int64_t>(batch_idx) * p_.heads_q + head_idx) * p_.seqlen_q +
                  first_row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lse_row = row + 16 * warp() + lane() / 4 + 8 * r;
      if (lane() % 4 == 0 && lse_row < seqlen_q) gLse[lse_row] = lse[r];
    }
    stored_ = true;
  }

  // The rows of O that belong to the sequence, where the store of a box would run into the next
  // one. Afterwards the buffer is free.
  FA_DEVICE void store_rows(uint32_t sO, int first_col, int head_idx, int first_row, int rows) {
    constexpr int kChunks = Config::kOutCols / 8;
    const int thread = ptx::thread_index_again() % 128, chunk = thread % kChunks;
    const int col = first_col + 8 * chunk;
    auto* gO = static_cast<uint16_t*>(p_.out) + head_idx * p_.out_stride[1] + col;
    if (col < p_.head_dim) {
#pragma unroll 1
      for (int row = thread / kChunks; row < rows; row += 128 / kChunks) {
        const uint32_t address = sO + (chunk / 8 * Config::kOutRows + row) * tile::kPanelRowBytes +
                                 ((chunk % 8 ^ (row & 7)) << 4);
        *reinterpret_cast<uint4*>(gO + (first_row + row) * p_.out_stride[2]) =
            ptx::ld_shared_v4_u32(address);
      }
    }
    ptx::bar_sync(1 + consumer_, 128);
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

}  // namespace fa::sm90
