// The consumer warpgroups of bwd_sm90.cu up to head_dim 128: each has 64 of the CTA's keys.
#pragma once
#include "bwd_sm90_warpgroup.cuh"

namespace fa::bwd_sm90 {

template <class Config>
class KeysConsumer : BwdWarpgroup<Config> {
  using Base = BwdWarpgroup<Config>;
  using Base::arrive, Base::consumer_, Base::kBlockM, Base::kBlockN, Base::kDtype, Base::kHeadDim,
      Base::maps_, Base::p_, Base::smem_, Base::uniform, Base::wait;
  using typename Base::Columns;
  using typename Base::Operand;
  using typename Base::Ring;
  using typename Base::Scores;

 public:
  FA_DEVICE KeysConsumer(const BwdParams& p, const Maps& maps, typename Config::SharedStorage& smem,
                         int consumer)
      : Base(p, maps, smem, consumer) {}

  FA_DEVICE void run() {
    rDk_.clear();
    rDv_.clear();
    if (smem_.work.visits > 0) {
      if constexpr (kParts == 2) {
        loop_of_parts();
      } else {
        loop();
      }
    }
    ptx::bar_sync(1, 256);  // no product reads K and V any more
    Base::store_gradient(rDv_, smem_.sV, 64 * consumer_, maps_.grad_value, p_.grad_value,
                         p_.grad_value_stride);
    scale(rDk_, p_.fwd.scale);
    Base::store_gradient(rDk_, smem_.sK, 64 * consumer_, maps_.grad_key, p_.grad_key,
                         p_.grad_key_stride);
  }

 private:
  static constexpr int kParts = Config::kParts;

  // ---- Products

  FA_DEVICE void enqueue_scores(int stage, int part) {
    tile::pin(rS_);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockN>(rS_, Base::desc_keys(smem_.sK, 64 * consumer_),
                                              Base::desc_rows(smem_.sQ, stage, part));
    ptx::wgmma_commit_group();
  }
  FA_DEVICE void enqueue_dp(int stage, int part) {
    tile::pin(rDp_);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockN>(rDp_, Base::desc_keys(smem_.sV, 64 * consumer_),
                                              Base::desc_rows(smem_.sDo, stage, part));
    ptx::wgmma_commit_group();
  }
  FA_DEVICE void enqueue_dv(int stage, int part) {
    tile::pin(rP_);
    tile::pin(rDv_);
    ptx::wgmma_fence();
    tile::wgmma_pv<kDtype>(rDv_, rP_, Base::desc_cols(smem_.sDo, stage, part));
    ptx::wgmma_commit_group();
  }
  FA_DEVICE void enqueue_dk(int stage, int part) {
    tile::pin(rDs_);
    tile::pin(rDk_);
    ptx::wgmma_fence();
    tile::wgmma_pv<kDtype>(rDk_, rDs_, Base::desc_cols(smem_.sQ, stage, part));
    ptx::wgmma_commit_group();
  }
  // 64 x 64 numbers of dQ^T, over all keys: a panel of head_dim, or a part of the queries.
  FA_DEVICE void enqueue_dq(Scores& rDq, int ds_stage) {
    tile::pin(rDq);
    ptx::wgmma_fence();
    tile::wgmma_outer<kDtype, kBlockN / 16>(rDq, Base::desc_k_panel(kParts == 2 ? 0 : consumer_),
                                            Base::desc_ds(ds_stage, kParts == 2 ? consumer_ : 0));
    ptx::wgmma_commit_group();
  }
  FA_DEVICE void store_dq(const Scores& rDq, const Ring& pos) {
    Base::store_dq(rDq, pos, kParts == 2 ? 0 : consumer_, kParts == 2 ? 64 * consumer_ : 0);
  }

  // ---- Between them

  // S to P, in rS_ and packed.
  FA_DEVICE void exponentiate(const Columns& rLse, int part, int masked_row) {
    tile::pin(rS_);
    if (masked_row >= 0)
      Base::mask(rS_, smem_.work.n_block * kBlockN + 64 * consumer_, masked_row + 64 * part);
    Base::exponentiate(rS_, rLse);
    tile::pack_operand_a<kDtype>(rP_, rS_);
  }

  // ---- The loops. Their bodies have the last products of a query block and the rest of the next,
  // so that nothing is in flight at the ends: ptxas does not follow accumulators around a loop
  // (C7514).

  FA_DEVICE void loop() {
    const int visits = uniform(smem_.work.visits);
    Ring pos;
    wait(smem_.full_k, 0);
    wait(smem_.full_q[0], 0);
    enqueue_scores(0, 0);
    wait(smem_.full_v, 0);
    wait(smem_.full_do[0], 0);
    enqueue_dp(0, 0);
    Columns rLse;
    Base::load_columns(rLse, smem_.sLse[0]);
    ptx::wgmma_wait_group<1>();
    finish_block(rLse, 0, Base::masked_row(0));
#pragma unroll 1
    for (int i = 0; i + 1 < visits; ++i) {
      const int states = uniform(pos.state | consumer_ << 8);
      const Ring now{states & 0xff};
      consumer_ = states >> 8;  // see there
      Ring next = now;
      next.advance();
      enqueue_dk(now.stage(), kParts - 1);
      Base::publish_ds(now.stage(), i > 0);
      wait(smem_.full_ds[now.stage()], now.phase());
      enqueue_dq(rDp_, now.stage());  // in the registers of dP
      ptx::wgmma_wait_group<1>();     // dK, whose operand leaves its registers to the next S
      tile::pin(rDk_);
      tile::pin(rDs_);
      arrive(smem_.empty_q[now.stage()]);
      wait(smem_.full_q[next.stage()], next.phase());
      enqueue_scores(next.stage(), 0);
      const int masked_row = Base::masked_row(next.state);
      ptx::wgmma_wait_group<1>();  // dQ
      tile::pin(rDp_);
      store_dq(rDp_, now);
      wait(smem_.full_do[next.stage()], next.phase());
      enqueue_dp(next.stage(), 0);
      Columns rLse;
      Base::load_columns(rLse, smem_.sLse[next.stage()]);
      ptx::wgmma_wait_group<1>();  // S
      finish_block(rLse, next.stage(), masked_row);
      pos.advance();
    }
    last_products(rDp_, pos, visits);
  }

  // From S, which is there, and dP, which is in flight, to dV and dS.
  FA_DEVICE void finish_block(const Columns& rLse, int stage, int masked_row) {
    exponentiate(rLse, 0, masked_row);
    enqueue_dv(stage, 0);
    Columns rDelta;
    Base::load_columns(rDelta, smem_.sDelta[stage]);
    ptx::wgmma_wait_group<1>();  // dP
    tile::pin(rDp_);
    Base::differentiate(rDs_, rDp_, rDelta, masked_row >= 0,
                        [&](int n, int e) { return rS_.x[0][n][e]; });
    Base::store_ds(rDs_, stage, 0, 64 * consumer_);
    ptx::wgmma_wait_group<0>();
    tile::pin(rDv_);
    tile::pin(rP_);
    arrive(smem_.empty_do[stage]);
  }

  FA_DEVICE void loop_of_parts() {
    const int visits = uniform(smem_.work.visits);
    Ring pos;
    wait(smem_.full_k, 0);
    wait(smem_.full_q[0], 0);
    enqueue_scores(0, 0);
    wait(smem_.full_v, 0);
    wait(smem_.full_do[0], 0);
    enqueue_dp(0, 0);
    Columns rLse;
    Base::load_columns(rLse, smem_.sLse[0]);
    ptx::wgmma_wait_group<1>();
    finish_parts(rLse, 0, Base::masked_row(0), [] {});
#pragma unroll 1
    for (int i = 0; i + 1 < visits; ++i) {
      const int states = uniform(pos.state | consumer_ << 8);
      const Ring now{states & 0xff};
      consumer_ = states >> 8;  // see there
      Ring next = now;
      next.advance();
      wait(smem_.full_q[next.stage()], next.phase());
      enqueue_scores(next.stage(), 0);
      const int masked_row = Base::masked_row(next.state);
      enqueue_dk(now.stage(), kParts - 1);
      Base::publish_ds(now.stage(), i > 0);
      wait(smem_.full_ds[now.stage()], now.phase());
      enqueue_dq(rDq_, now.stage());
      wait(smem_.full_do[next.stage()], next.phase());
      enqueue_dp(next.stage(), 0);
      Columns rLse;
      Base::load_columns(rLse, smem_.sLse[next.stage()]);
      ptx::wgmma_wait_group<3>();  // S
      finish_parts(rLse, next.stage(), masked_row, [&] {
        ptx::wgmma_wait_group<3>();  // dK and dQ
        tile::pin(rDk_);
        tile::pin(rDs_);
        tile::pin(rDq_);
        arrive(smem_.empty_q[now.stage()]);
        store_dq(rDq_, now);
      });
      pos.advance();
    }
    last_products(rDq_, pos, visits);
  }

  // From S of the first part, which is there, and its dP, which is in flight, to dV and dS of both.
  // Two parts of 64 queries, so that products of one run below exponentials of the other. P in fp32
  // would have no registers: dS is computed from what dV uses. while_scores_run: the rest of what
  // is in flight.
  template <class F>
  FA_DEVICE void finish_parts(const Columns& rLse, int stage, int masked_row,
                              F&& while_scores_run) {
    exponentiate(rLse, 0, masked_row);
    enqueue_scores(stage, 1);
    enqueue_dv(stage, 0);
    while_scores_run();
    Columns rDelta;
    Base::load_columns(rDelta, smem_.sDelta[stage]);
    ptx::wgmma_wait_group<2>();  // dP
    part_to_ds(rDelta, 0, stage, masked_row >= 0);
    enqueue_dk(stage, 0);
    enqueue_dp(stage, 1);
    Columns rLse1;
    Base::load_columns(rLse1, smem_.sLse[stage] + 64);
    ptx::wgmma_wait_group<2>();  // S, and dV of the first part
    tile::pin(rP_);
    exponentiate(rLse1, 1, masked_row);
    enqueue_dv(stage, 1);
    Columns rDelta1;
    Base::load_columns(rDelta1, smem_.sDelta[stage] + 64);
    ptx::wgmma_wait_group<1>();  // dP, and dK of the first part
    tile::pin(rDs_);
    part_to_ds(rDelta1, 1, stage, masked_row >= 0);
    ptx::wgmma_wait_group<0>();
    tile::pin(rDv_);
    tile::pin(rP_);
    arrive(smem_.empty_do[stage]);
  }
  FA_DEVICE void part_to_ds(const Columns& rDelta, int part, int stage, bool masked) {
    tile::pin(rDp_);
    Base::differentiate(rDs_, rDp_, rDelta, masked,
                        [&](int n, int e) { return unpack<kDtype>(rP_, n, e); });
    Base::store_ds(rDs_, stage, part, 64 * consumer_);
  }

  FA_DEVICE void last_products(Scores& rDq, const Ring& pos, int visits) {
    const Ring last{uniform(pos.state)};
    enqueue_dk(last.stage(), kParts - 1);
    Base::publish_ds(last.stage(), visits > 1);
    wait(smem_.full_ds[last.stage()], last.phase());
    enqueue_dq(rDq, last.stage());
    ptx::wgmma_wait_group<0>();
    tile::pin(rDk_);
    tile::pin(rDs_);
    tile::pin(rDq);
    store_dq(rDq, last);
    Base::publish_dq(last.stage());
  }

  tile::Accumulator<1, kHeadDim / 8> rDk_, rDv_;
  Scores rS_, rDp_, rDq_;  // rDq_ only with two parts
  Operand rP_, rDs_;
};

}  // namespace fa::bwd_sm90
