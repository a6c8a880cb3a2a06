// The producer warp of fwd_sm90.cu.
#pragma once
#include "../attn/mask_summary.cuh"
#include "../attn/scheduler.cuh"
#include "../tile/tma.cuh"
#include "fwd_sm90_tile.cuh"

namespace fa::sm90 {

// Walks the tiles of this CTA and keeps the rings of Q, K and V full. Runs in one thread; with a
// mask tensor in one warp, whose lanes look at 32 blocks of the mask at once.
template <class Config>
class Producer {
 public:
  FA_DEVICE Producer(const FwdParams& p, const attn::TileOrder& order, const Maps& maps,
                     const TileQueue& queue, typename Config::SharedStorage& smem)
      : p_(p), order_(order), maps_(maps), queue_(queue), smem_(smem) {}

  FA_DEVICE void run() {
    // First, as an SM has room for one CTA only: the next kernel takes none from this one, and its
    // CTAs start where one of these has ended. Given at the end, this leave cost 1 % of 18 us.
    ptx::griddepcontrol_launch_dependents();
    unsigned index = blockIdx.x;
    // Nothing before this touches global memory, and what the consumers write waits for what is
    // loaded behind it: the start of this kernel overlaps the end of the one before.
    if constexpr (kPacked) ptx::griddepcontrol_wait();
#pragma unroll 1
    while (open_tile(index)) {
      row_ = work_.m_block * kBlockM;
      next_ = index + gridDim.x;
      const BlockRange range = block_range<kBlockN>(band(), row_, kBlockM);
      if (!kPacked && index == blockIdx.x) ptx::griddepcontrol_wait();
      if constexpr (Config::kTensor) {
        load_masked_tile(range);
      } else {
        load_tile(range);
      }
      // Every CTA draws until it is past the end: this was the last draw of all.
      if (leader() && queue_.counter != nullptr && next_ == num_tiles() - 1 + gridDim.x)
        *queue_.counter = 0;
      index = Config::kTensor ? __shfl_sync(0xffffffff, next_, 0) : next_;
    }
    if (!leader()) return;
    wait_for_q_stage();
    smem_.tile[q_pos_.state % 2].row = kNoTile;
#pragma unroll
    for (int i = 0; i < 2 * kConsumers; ++i)
      ptx::mbarrier_arrive(ptx::smem_addr(&smem_.full_q[q_pos_.stage()][i / 2]));
  }

 private:
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM,
                       kBlockN = Config::kBlockN, kConsumers = Config::kConsumers;
  static constexpr bool kPacked = Config::kPacked;

  // How many tiles there are, and the one of this number: false past the last. Of packed sequences
  // only the device knows.
  FA_DEVICE unsigned num_tiles() const {
    return kPacked ? *p_.packed.num_tiles * order_.heads.divisor : order_.num_tiles;
  }
  FA_DEVICE bool open_tile(unsigned index) {
    if constexpr (kPacked) {
      if (!looked_up_) look_up(index);
      looked_up_ = false;
      ptx::keep_order_of_accesses();  // nothing of look_up stays in registers
      work_ = smem_.next.work;
      if (work_.m_block < 0) return false;
      k_begin_ = smem_.next.sequence.k_begin;
      work_.batch_idx = 0;  // of the tensor maps
    } else {
      if (index >= order_.num_tiles) return false;
      work_ = attn::work_of_cta<false>(p_, order_, index);
    }
    return true;
  }
  FA_DEVICE void look_up(unsigned index) {
    const attn::WorkTile work = attn::work_of_cta<true>(p_, order_, index);
    smem_.next.work = work;
    if (work.m_block >= 0) smem_.next.sequence = attn::sequence_of<true>(p_, work.batch_idx);
    looked_up_ = true;
  }
  // Of this tile, until the next one is looked up.
  FA_DEVICE const auto& band() const {
    if constexpr (kPacked) {
      return smem_.next.sequence;
    } else {
      return p_;
    }
  }
  // Where the sequence begins in the tensors.
  FA_DEVICE int q_begin() const {
    if constexpr (kPacked) return smem_.next.sequence.q_begin;
    return 0;
  }
  FA_DEVICE int k_begin() const { return kPacked ? k_begin_ : 0; }

  FA_DEVICE bool leader() const { return !Config::kTensor || ptx::lane_id() == 0; }

  // Draws the next tile. Late, so that the longest tile left goes to the CTA that is free first:
  // drawn one tile ahead, causal attention of D 256 lost 5 to 10 %. Three blocks hide the latency
  // of the atomic.
  FA_DEVICE void take_next() {
    if (queue_.counter == nullptr) return;
    next_ = atomicAdd(queue_.counter, 1) + gridDim.x;
  }

  FA_DEVICE void load_tile(const BlockRange& range) {
    const bool any = range.first <= range.last;
    if (Config::kQStages == 1 && any) load_k(range.last);  // Q still waits for its buffer
    wait_for_q_stage();
    // The last rows have the first key block to start with.
    load_q(kConsumers - 1);
    if (Config::kQStages > 1 && any) load_k(range.last);
#pragma unroll
    for (int c = kConsumers - 2; c >= 0; --c) load_q(c);
    // Before the arithmetic of publish_tile, which would delay it; not with two stages, where this
    // would wait for the consumers, and they for publish_tile.
    constexpr bool kEarly = Config::kStages > 2;
    if (kEarly && range.first < range.last) load_k(range.last - 1);
    publish_tile(range.first, range.last);
#pragma unroll 1
    for (int n = range.last; n > range.first; --n) {
      if (n == min(range.last, range.first + 2)) take_next();
      if (!kEarly || n < range.last) load_k(n - 1);
      load_v(n);
    }
    if (range.first >= range.last) take_next();
    // The last wait for the consumers hides the latency of the list. Of fewer blocks, the values
    // would wait for the draw.
    if constexpr (kPacked)
      if (range.last - range.first > 1) look_up(next_);
    if (any) load_v(range.first);
  }

  FA_DEVICE void wait_for_q_stage() {
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem_.empty_q[q_pos_.stage()]),
                                  q_pos_.phase() ^ 1);
  }

  FA_DEVICE void load_q(int c) {
    const int stage = q_pos_.stage();
    const uint32_t full = ptx::smem_addr(&smem_.full_q[stage][c]);
    ptx::mbarrier_arrive_expect_tx(full, Config::kQBytes / kConsumers);
    tile::tma_load<64, kHeadDim>(ptx::smem_addr(smem_.sQ[stage]) + 64 * c * tile::kPanelRowBytes,
                                 kBlockM * tile::kPanelRowBytes, &maps_.query, full,
                                 q_begin() + row_ + 64 * c, work_.head_idx, work_.batch_idx);
  }

  FA_DEVICE void publish_tile(int first, int last) {
    auto& info = smem_.tile[q_pos_.state % 2];
    info.row = row_;
    info.head_idx = work_.head_idx;
    info.batch_idx = work_.batch_idx;
    info.first = first;
    info.last = last;
    if constexpr (kPacked) info.sequence = smem_.next.sequence;
#pragma unroll 1
    for (int c = 0; c < kConsumers; ++c)
      info.own[c] = block_range<kBlockN>(band(), row_ + 64 * c, 64);
#pragma unroll
    for (int c = 0; c < kConsumers; ++c)
      ptx::mbarrier_arrive(ptx::smem_addr(&smem_.full_q[q_pos_.stage()][c]));
    q_pos_.advance();
  }

  FA_DEVICE void wait_for_k_stage() {
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem_.empty_k[k_pos_.stage()]),
                                  k_pos_.phase() ^ 1);
  }
  FA_DEVICE void load_k(int n) {
    wait_for_k_stage();
    fill_k(n);
  }
  FA_DEVICE void fill_k(int n) {
    const int stage = k_pos_.stage();
    load_block(ptx::smem_addr(smem_.sK[stage]), maps_.key, smem_.full_k[stage], n);
    k_pos_.advance();
  }
  FA_DEVICE void load_v(int n) {
    const int stage = v_pos_.stage();
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&smem_.empty_v[stage]), v_pos_.phase() ^ 1);
    load_block(ptx::smem_addr(smem_.sV[stage]), maps_.value, smem_.full_v[stage], n);
    v_pos_.advance();
  }
  FA_DEVICE void load_block(uint32_t smem, const CUtensorMap& map, uint64_t& barrier, int n) {
    const uint32_t full = ptx::smem_addr(&barrier);
    ptx::mbarrier_arrive_expect_tx(full, Config::kKvBytes);
    tile::tma_load<kBlockN, kHeadDim>(smem, kBlockN * tile::kPanelRowBytes, &map, full,
                                      k_begin() + n * kBlockN, work_.kv_head_idx, work_.batch_idx);
  }

  // ---- With a mask tensor

  // The entry of the mask summary for block n and the rows of each warpgroup.
  struct Entries {
    float x[kConsumers];

    FA_DEVICE bool visible() const {
      bool any = false;
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) any |= x[c] != -INFINITY;
      return any;
    }
    // Whether it is worth visiting early: some scores may be normal ones.
    FA_DEVICE bool normal() const {
      bool any = false;
#pragma unroll
      for (int c = 0; c < kConsumers; ++c)
        any |= !(x[c] < attn::kFarBias);  // true for mixed entries
      return any;
    }
  };

  // A bit for each warpgroup whose rows get exactly nothing from far blocks: each row sees a normal
  // bias in a block that the band leaves whole, and query, key and value are safe.
  FA_DEVICE unsigned find_skips(const attn::MaskSummary& summary) const {
    if (!summary.may_skip()) return 0;
    unsigned skips = 0;
#pragma unroll 1
    for (int c = 0; c < kConsumers; ++c) {
      const BlockRange own = block_range<kBlockN>(p_, row_ + 64 * c, 64);
      const int first = max(own.first, own.full_first), last = min(own.last, own.full_last);
      uint64_t rows = 0;
#pragma unroll 1
      for (int n = last - ptx::lane_id(); n >= first; n -= 32)
        rows |= summary.normal_rows(row_ / kBlockN + c, n);
      const uint32_t low = __reduce_or_sync(0xffffffff, static_cast<uint32_t>(rows)),
                     high = __reduce_or_sync(0xffffffff, static_cast<uint32_t>(rows >> 32));
      if ((low & high) == ~0u) skips |= 1u << c;
    }
    return skips;
  }

  // Two passes over the blocks from last to first: in the second, those that the mask moves so far
  // down that they count only in rows that see nothing else. So the rows have their references from
  // normal scores by then, and these blocks need no maximum.
  FA_DEVICE void load_masked_tile(const BlockRange& range) {
    const attn::MaskSummary summary(p_, work_.batch_idx, work_.head_idx);
    const unsigned skips = find_skips(summary);
    BlockRange own[kConsumers];
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) own[c] = block_range<kBlockN>(p_, row_ + 64 * c, 64);
    auto entries_of = [&](int n) {
      Entries entries;
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        const bool inside = n >= own[c].first && n <= own[c].last;
        entries.x[c] = inside ? summary.entry(row_ / kBlockN + c, n) : -INFINITY;
        if (skips >> c & 1) {
          if (attn::is_far(entries.x[c])) entries.x[c] = -INFINITY;
          if (attn::is_mixed_far(entries.x[c])) entries.x[c] = __uint_as_float(attn::kMixedBits);
        }
      }
      return entries;
    };

    int count = 0;
#pragma unroll 1
    for (int base = range.last; base >= range.first; base -= 32)
      count += __popc(__ballot_sync(0xffffffff, entries_of(base - ptx::lane_id()).visible()));

    if (leader()) {
      wait_for_q_stage();
#pragma unroll
      for (int c = kConsumers - 1; c >= 0; --c) load_q(c);
      publish_tile(0, count - 1);
      if (count == 0) take_next();
    }
    int before = -1;  // the block whose V comes next
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
      for (int base = range.last; base >= range.first; base -= 32) {
        const Entries entries = entries_of(base - ptx::lane_id());
        unsigned chosen =
            __ballot_sync(0xffffffff, entries.visible() && entries.normal() == (pass == 0));
#pragma unroll 1
        for (; chosen != 0; chosen &= chosen - 1) {
          const int lane = __ffs(chosen) - 1, n = base - lane;
          Entries here;
#pragma unroll
          for (int c = 0; c < kConsumers; ++c)
            here.x[c] = __shfl_sync(0xffffffff, entries.x[c], lane);
          if (leader()) {
            if (--count == 2 || (count < 2 && before < 0)) take_next();
            wait_for_k_stage();
            auto& info = smem_.block[k_pos_.stage()];
            info.n = n;
#pragma unroll
            for (int c = 0; c < kConsumers; ++c) info.entry[c] = here.x[c];
            fill_k(n);
            if (before >= 0) load_v(before);
          }
          before = n;
        }
      }
    }
    if (leader() && before >= 0) load_v(before);
  }

  const FwdParams& p_;
  const attn::TileOrder& order_;
  const Maps& maps_;
  const TileQueue& queue_;
  typename Config::SharedStorage& smem_;

  typename Config::Ring k_pos_, v_pos_;
  typename Config::QRing q_pos_;
  attn::WorkTile work_;
  int k_begin_;             // of packed sequences
  bool looked_up_ = false;  // smem_.next is the tile after this one
  int row_;
  unsigned next_;
};

}  // namespace fa::sm90
