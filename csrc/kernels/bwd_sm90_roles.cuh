// The consumer warpgroups of bwd_sm90.cu for head_dim 256: both have all 64 keys of the CTA, one
// their scores, P and dV, the other dS and dK.
#pragma once
#include "bwd_sm90_warpgroup.cuh"

namespace fa::bwd_sm90 {

template <class Config>
class RolesConsumer : BwdWarpgroup<Config> {
  using Base = BwdWarpgroup<Config>;
  using Base::arrive, Base::consumer_, Base::kBlockM, Base::kBlockN, Base::kDtype, Base::kHeadDim,
      Base::maps_, Base::p_, Base::smem_, Base::uniform, Base::wait;
  using typename Base::Columns;
  using typename Base::Operand;
  using typename Base::Ring;
  using typename Base::Scores;

 public:
  FA_DEVICE RolesConsumer(const BwdParams& p, const Maps& maps,
                          typename Config::SharedStorage& smem, int consumer)
      : Base(p, maps, smem, consumer) {}

  FA_DEVICE void run() {
    rSum_.clear();
    if (smem_.work.visits > 0) {
      if (consumer_ == 0) {
        loop<kScores>();
      } else {
        loop<kGradients>();
      }
    }
    ptx::bar_sync(1, 256);  // no product reads K and V any more
    if (consumer_ == 0) {
      Base::store_gradient(rSum_, smem_.sV, 0, maps_.grad_value, p_.grad_value,
                           p_.grad_value_stride);
    } else {
      scale(rSum_, p_.fwd.scale);
      Base::store_gradient(rSum_, smem_.sK, 0, maps_.grad_key, p_.grad_key, p_.grad_key_stride);
    }
  }

 private:
  enum Role { kScores, kGradients };

  // S = K Q^T, or dP = V dO^T.
  FA_DEVICE void enqueue_first(const void* sKeys, const void* sRing, int stage, int zero) {
    tile::pin(rX_);
    ptx::wgmma_fence();
    tile::wgmma_qk<kDtype, kHeadDim, kBlockN>(rX_, Base::desc_keys(sKeys, zero),
                                              Base::desc_rows(sRing, stage, 0));
    ptx::wgmma_commit_group();
  }
  // dV += P dO, or dK += dS Q.
  FA_DEVICE void enqueue_sum(const void* sRing, int stage) {
    tile::pin(rA_);
    tile::pin(rSum_);
    ptx::wgmma_fence();
    tile::wgmma_pv<kDtype>(rSum_, rA_, Base::desc_cols(sRing, stage, 0));
    ptx::wgmma_commit_group();
  }
  // A quarter of dQ^T: 64 columns of head_dim.
  FA_DEVICE void enqueue_dq(int panel, int ds_stage, int zero) {
    tile::pin(rDq_);
    ptx::wgmma_fence();
    tile::wgmma_outer<kDtype, kBlockN / 16>(rDq_, Base::desc_k_panel(panel + zero),
                                            Base::desc_ds(ds_stage, 0));
    ptx::wgmma_commit_group();
  }

  // What a warpgroup reads: its first product is S = K Q^T or dP = V dO^T, its second one adds to
  // dV, P^T dO, or to dK, dS^T Q.
  template <Role kRole>
  struct Operands {
    typename Config::SharedStorage& smem;
    static constexpr bool kS = kRole == kScores;
    FA_DEVICE const void* keys() const { return kS ? smem.sK : smem.sV; }
    FA_DEVICE const void* first() const { return kS ? smem.sQ : smem.sDo; }
    FA_DEVICE const void* second() const { return kS ? smem.sDo : smem.sQ; }
    FA_DEVICE uint64_t& full_first(int s) const { return kS ? smem.full_q[s] : smem.full_do[s]; }
    FA_DEVICE uint64_t& full_second(int s) const { return kS ? smem.full_do[s] : smem.full_q[s]; }
    FA_DEVICE uint64_t& empty_first(int s) const { return kS ? smem.empty_q[s] : smem.empty_do[s]; }
    FA_DEVICE uint64_t& empty_second(int s) const {
      return kS ? smem.empty_do[s] : smem.empty_q[s];
    }
  };

  // The body of the loop has the last quarter of dQ of a query block, all else of the next one, and
  // S or dP of the one after that. Nothing is in flight at its ends: ptxas does not follow
  // accumulators around a loop (C7514).
  template <Role kRole>
  FA_DEVICE void loop() {
    const Operands<kRole> operands{smem_};
    constexpr int panel = kRole == kScores ? 0 : 2;  // the first of its two of head_dim
    Ring pos;
    wait(smem_.full_k, 0);
    wait(smem_.full_v, 0);
    wait(operands.full_first(0), 0);
    enqueue_first(operands.keys(), operands.first(), 0, 0);
    ptx::wgmma_wait_group<0>();
    const int visits = uniform(smem_.work.visits);
    finish_block<kRole>(pos, 0, visits > 1, [] {});
#pragma unroll 1
    for (int left = visits - 1; left > 0; --left) {
      const int states = uniform(pos.state);
      const Ring now{states & 0xff};
      // What the compiler does not know to be 0. Otherwise it would compute all descriptors of K
      // and V before the loop, for which there are not enough uniform registers.
      const int zero = states >> 8;
      Ring next = now;
      next.advance();
      const auto& visit = smem_.visit[now.state];
      Base::take_turn(visit);
      Base::add_dq(rDq_, visit, panel);
      enqueue_dq(panel + 1, now.stage(), zero);
      finish_block<kRole>(next, zero, left > 1, [&] {
        ptx::wgmma_wait_group<1>();
        tile::pin(rDq_);
        Base::add_dq(rDq_, visit, panel + 1);
        Base::pass_turn(visit);
      });
      pos.advance();
    }
    const auto& visit = smem_.visit[uniform(pos.state)];
    Base::take_turn(visit);
    Base::add_dq(rDq_, visit, panel);
    enqueue_dq(panel + 1, Ring{uniform(pos.state)}.stage(), 0);
    ptx::wgmma_wait_group<0>();
    tile::pin(rDq_);
    Base::add_dq(rDq_, visit, panel + 1);
    Base::pass_turn(visit);
  }

  // From S or dP of a block, which is there, to the first quarter of its dQ and S or dP of the
  // next, if there is one. while_sum_runs: the rest of what is in flight.
  template <Role kRole, class F>
  FA_DEVICE void finish_block(const Ring& pos, int zero, bool more, F&& while_sum_runs) {
    const Operands<kRole> operands{smem_};
    const int stage = pos.stage();
    const int masked_row = Base::masked_row(pos.state);
    tile::pin(rX_);
    if constexpr (kRole == kScores) {
      scores_to_p(stage, masked_row);
    } else {
      wait(smem_.full_p, stage);  // as the stages, its phases take turns
      dp_to_ds(stage, masked_row >= 0);
    }
    arrive(operands.empty_first(stage));
    wait(operands.full_second(stage), pos.phase());
    enqueue_sum(operands.second(), stage);
    while_sum_runs();
    Ring next = pos;
    next.advance();
    if (more) wait(operands.full_first(next.stage()), next.phase());
    enqueue_first(operands.keys(), operands.first(), next.stage(), zero);
    wait(smem_.full_ds[stage], pos.phase());
    enqueue_dq(kRole == kScores ? 0 : 2, stage, zero);
    ptx::wgmma_wait_group<2>();  // dV or dK
    arrive(operands.empty_second(stage));
    ptx::wgmma_wait_group<0>();
    tile::pin(rSum_);
    tile::pin(rA_);
    tile::pin(rX_);
    tile::pin(rDq_);
  }

  // Leaves P in rA_, and for the same threads of the other warpgroup in sP. The P before has been
  // read: the dS of it, which this warpgroup has waited for, came after.
  FA_DEVICE void scores_to_p(int stage, int masked_row) {
    if (masked_row >= 0) Base::mask(rX_, smem_.work.n_block * kBlockN, masked_row);
    Columns rLse;
    Base::load_columns(rLse, smem_.sLse[stage]);
    Base::exponentiate(rX_, rLse);
    tile::pack_operand_a<kDtype>(rA_, rX_);
    const int thread = ptx::thread_index_again() % 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      smem_.sP[k][thread] = make_uint4(rA_[k][0], rA_[k][1], rA_[k][2], rA_[k][3]);
    Base::publish(smem_.full_p);
  }

  // P, as the same thread of the other warpgroup left it, to dS.
  FA_DEVICE void dp_to_ds(int stage, bool masked) {
    const int thread = ptx::thread_index_again() % 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 a = smem_.sP[k][thread];
      rA_[k][0] = a.x, rA_[k][1] = a.y, rA_[k][2] = a.z, rA_[k][3] = a.w;
    }
    Columns rDelta;
    Base::load_columns(rDelta, smem_.sDelta[stage]);
    // In place: a step of dS is packed after its P has been read.
    Base::differentiate(rA_, rX_, rDelta, masked,
                        [&](int n, int e) { return unpack<kDtype>(rA_, n, e); });
    Base::store_ds(rA_, stage, 0, 0);
    // Who sees this dS knows that no warp here reads the one before any more. The P after next, and
    // with it the dS that overwrites that, waits for it.
    ptx::wgmma_wait_group<0>();
    tile::pin(rDq_);
    Base::publish_ds(stage, false);
  }

  tile::Accumulator<1, kHeadDim / 8> rSum_;  // dV or dK
  Scores rX_;                                // S or dP
  Scores rDq_;
  Operand rA_;  // P or dS
};

}  // namespace fa::bwd_sm90
