// The producer warps of bwd_sm90.cu: a thread that loads, one that adds dQ, and with packed
// sequences a warp that clears rows.
#pragma once
#include "bwd_sm90_tile.cuh"

namespace fa::bwd_sm90 {

// Loads K and V once, and keeps the rings of Q with its LSE, and of dO with its delta, full.
template <class Config>
class BwdProducer {
 public:
  FA_DEVICE BwdProducer(const BwdParams& p, const Maps& maps, typename Config::SharedStorage& smem)
      : p_(p), maps_(maps), smem_(smem), work_(smem.work) {}

  FA_DEVICE void run() {
    // Nothing before this touches global memory, and what the consumers add or write waits for what
    // is loaded here: the start of this kernel overlaps the end of the one before. Packed, the
    // kernel has waited already.
    if constexpr (!Config::kPacked) ptx::griddepcontrol_wait();
    if (work_.visits > 0) {
      head_idx_ = work_.kv_head_idx * (p_.fwd.heads_q / p_.fwd.heads_k);
      m_block_ = work_.end - 1;
      load_keys(maps_.key, smem_.sK, cuts_keys() ? smem_.landed_k : smem_.full_k);
      load_q();
      load_keys(maps_.value, smem_.sV, smem_.full_v);
      load_do();
#pragma unroll 1
      for (int i = 1; i < work_.visits; ++i) {
        // Heads ascend, their query blocks descend.
        if (--m_block_ < work_.first) {
          m_block_ = work_.end - 1;
          ++head_idx_;
        }
        pos_.advance();
        load_q();
        load_do();
      }
    }
    ptx::griddepcontrol_launch_dependents();
  }

 private:
  // Whether the box of keys, or of this query block, runs over the end of a packed sequence.
  FA_DEVICE bool cuts_keys() const {
    if constexpr (Config::kPacked) return work_.keys < Config::kBlockN;
    return false;
  }
  FA_DEVICE bool cuts_rows() const {
    if constexpr (Config::kPacked) return m_block_ == work_.end - 1 && work_.rows < Config::kBlockM;
    return false;
  }

  FA_DEVICE void load_keys(const CUtensorMap& map, void* smem, uint64_t& barrier) {
    const uint32_t full = ptx::smem_addr(&barrier);
    ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
    tile::tma_load<Config::kBlockN, Config::kHeadDim>(
        ptx::smem_addr(smem), Config::kBlockN * tile::kPanelCols * 2, &map, full,
        work_.k_begin() + work_.n_block * Config::kBlockN, work_.kv_head_idx, work_.batch_idx);
  }

  FA_DEVICE int64_t row() const {
    const int64_t pair = int64_t{work_.batch_idx} * p_.fwd.heads_q + head_idx_;
    return pair * p_.rows_rounded + work_.scratch_begin() + m_block_ * Config::kBlockM;
  }

  FA_DEVICE void load_q() {
    const int stage = pos_.stage();
    wait_for_stage(smem_.empty_q[stage]);
    Visit& visit = smem_.visit[pos_.state];
    visit.row = row();
    const bool is_full = m_block_ >= work_.full_first && m_block_ < work_.full_end;
    visit.masked_row = is_full ? -1 : m_block_ * Config::kBlockM;
    if (p_.turns != nullptr) {
      const int row = m_block_ * Config::kBlockM;
      const auto& band = work_.band(p_.fwd);
      const attn::KeyRange keys =
          attn::key_range(band, row, min(row + Config::kBlockM, band.seqlen_q));
      visit.key_blocks_before = work_.n_block - keys.first / Config::kBlockN;
    }
    load(maps_.query, smem_.sQ[stage], p_.lse_log2, smem_.sLse[stage],
         cuts_rows() ? smem_.landed_q[stage] : smem_.full_q[stage]);
  }
  FA_DEVICE void load_do() {
    const int stage = pos_.stage();
    wait_for_stage(smem_.empty_do[stage]);
    load(maps_.grad_out, smem_.sDo[stage], p_.delta, smem_.sDelta[stage],
         cuts_rows() ? smem_.landed_do[stage] : smem_.full_do[stage]);
  }
  FA_DEVICE void wait_for_stage(uint64_t& empty) {
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&empty), pos_.phase() ^ 1);
  }

  // The query block of a tensor, and of a statistic [batch, heads_q, rows_rounded].
  FA_DEVICE void load(const CUtensorMap& map, void* tile, const float* gStat, void* stat,
                      uint64_t& barrier) {
    const uint32_t full = ptx::smem_addr(&barrier);
    ptx::mbarrier_arrive_expect_tx(full, Config::kQBytes + Config::kStatBytes);
    tile::tma_load<Config::kBlockM, Config::kHeadDim>(
        ptx::smem_addr(tile), Config::kBlockM * tile::kPanelCols * 2, &map, full,
        work_.q_begin() + m_block_ * Config::kBlockM, head_idx_, work_.batch_idx);
    // Packed, there are no registers to work it out again.
    const int64_t first = Config::kPacked ? smem_.visit[pos_.state].row : row();
    ptx::cp_async_bulk_load(ptx::smem_addr(stat), gStat + first, Config::kStatBytes, full);
  }

  const BwdParams& p_;
  const Maps& maps_;
  typename Config::SharedStorage& smem_;
  const typename Config::Work& work_;
  typename Config::Ring pos_;
  int head_idx_, m_block_;
};

// The thread that adds dQ to global memory, from where the consumers leave it.
template <class Config>
FA_DEVICE void add_dq_blocks(const BwdParams& p, typename Config::SharedStorage& smem) {
  const int visits = smem.work.visits;
  typename Config::Ring pos;
  Visit visit, next;
#pragma unroll 1
  for (int i = 0; i < visits; ++i, visit = next) {
    const int stage = pos.stage();
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem.full_dq[stage]), pos.phase());
    // The next visit is known, since the consumers had its Q before they stored this dQ. Read now:
    // once they may store two blocks ahead, nothing keeps the producer from its place.
    if (i == 0) visit = smem.visit[pos.state];
    pos.advance();
    next = smem.visit[pos.state];
    const int64_t row = visit.row;
    // Deterministic: key blocks add to a query block in ascending order. A CTA waits only for CTAs
    // before it, which started no later.
    if (p.turns != nullptr) {
      const unsigned before = visit.key_blocks_before;
      while (ptx::ld_acquire_gpu_global_u32(p.turns + row / Config::kBlockM) != before) {
      }
    }
    ptx::cp_reduce_async_bulk_add_f32(p.grad_query_accum + row * Config::kHeadDim,
                                      ptx::smem_addr(smem.sDq[stage]), Config::kDqBytes);
    ptx::cp_async_bulk_commit_group();
    if (p.turns != nullptr) {
      ptx::cp_async_bulk_wait_group_0();
      ptx::red_release_gpu_global_add_u32(p.turns + row / Config::kBlockM, 1);
    } else {
      ptx::cp_async_bulk_wait_group_read_0();
    }
    ptx::mbarrier_arrive(ptx::smem_addr(&smem.empty_dq[stage]));
  }
}

// The warp that clears rows of Q, dO and K that belong to the next sequence: products that are
// summed over rows would multiply them by 0, and NaN would come of NaN. Such boxes do not complete
// on the barrier that consumers wait for; this warp arrives there once they are clean.
template <class Config>
FA_DEVICE void clear_tails(typename Config::SharedStorage& smem) {
  const auto& work = smem.work;
  if (work.visits == 0) return;
  const auto clear = [](auto rows, void* tile, int first, uint64_t& landed, uint32_t phase,
                        uint64_t& full) {
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&landed), phase);
    tile::clear_rows<rows(), Config::kHeadDim, 32>(ptx::smem_addr(tile), first, rows(),
                                                   ptx::lane_id());
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect_sync()) ptx::mbarrier_arrive(ptx::smem_addr(&full));
  };
  if (work.keys < Config::kBlockN)
    clear(std::integral_constant<int, Config::kBlockN>{}, smem.sK, work.keys, smem.landed_k, 0,
          smem.full_k);
  if (work.rows >= Config::kBlockM) return;
  const std::integral_constant<int, Config::kBlockM> block_m;
  uint32_t phases = 0;  // of each stage
  // The last query block of each head.
#pragma unroll 1
  for (int i = 0; i < work.visits; i += work.end - work.first) {
    const int stage = i % Config::kStages;
    const uint32_t phase = phases >> stage & 1;
    clear(block_m, smem.sQ[stage], work.rows, smem.landed_q[stage], phase, smem.full_q[stage]);
    clear(block_m, smem.sDo[stage], work.rows, smem.landed_do[stage], phase, smem.full_do[stage]);
    phases ^= 1u << stage;
  }
}

}  // namespace fa::bwd_sm90
