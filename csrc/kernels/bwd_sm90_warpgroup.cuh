// What the consumer warpgroups of bwd_sm90.cu have in common, however they share the products.
#pragma once
#include "../attn/mask_transposed.cuh"
#include "../tile/mma_sm90.cuh"
#include "bwd_sm90_tile.cuh"

namespace fa::bwd_sm90 {

// Element e of accumulator n out of a packed operand A.
template <Dtype kDtype>
FA_DEVICE float unpack(const uint32_t (&a)[4][4], int n, int e) {
  const uint32_t pair = a[n / 2][n % 2 * 2 + e / 2];
  float2 x;
  if constexpr (kDtype == Dtype::kFloat16) {
    x = __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
  return e % 2 ? x.y : x.x;
}

template <class Config>
class BwdWarpgroup {
 protected:
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM,
                       kBlockN = Config::kBlockN;
  static constexpr Dtype kDtype = Config::kDtype;
  static constexpr uint32_t kQPanelBytes = kBlockM * tile::kPanelRowBytes,
                            kKvPanelBytes = kBlockN * tile::kPanelRowBytes;
  static constexpr int kPartStep = 64 * tile::kPanelRowBytes >> 4;
  using Ring = typename Config::Ring;
  using Scores = typename Config::Scores;
  using Operand = typename Config::Operand;

  FA_DEVICE BwdWarpgroup(const BwdParams& p, const Maps& maps, typename Config::SharedStorage& smem,
                         int consumer)
      : p_(p), maps_(maps), smem_(smem), consumer_(uniform(consumer)) {}

  // ---- Barriers
  FA_DEVICE void wait(uint64_t& barrier, uint32_t phase) {
    ptx::mbarrier_try_wait_parity(ptx::smem_addr(&barrier), phase);
  }
  // Once for each warp, after its reads.
  FA_DEVICE void arrive(uint64_t& barrier) {
    if (ptx::elect_sync()) ptx::mbarrier_arrive(ptx::smem_addr(&barrier));
  }
  // Once for each warp, after all its lanes have written.
  FA_DEVICE void publish(uint64_t& barrier) {
    __syncwarp();
    arrive(barrier);
  }
  // The same value in a uniform register, which descriptors and branches want.
  FA_DEVICE static int uniform(int v) { return __reduce_max_sync(0xffffffff, v); }

  // Read again each time: kept, they would spill.
  FA_DEVICE int lane() const { return ptx::thread_index_again() % 32; }
  FA_DEVICE int warp() const { return ptx::thread_index_again() / 32 % 4; }

  // ---- Descriptors. Operands that are summed over head_dim, ...
  FA_DEVICE uint64_t desc_keys(const void* sTile, int row) const {  // of K and V
    return ptx::matrix_descriptor(ptx::smem_addr(sTile) + row * tile::kPanelRowBytes, 0);
  }
  FA_DEVICE uint64_t desc_rows(const void* sRing, int stage, int part) const {  // of Q and dO
    return ptx::matrix_descriptor(ptx::smem_addr(sRing), 0) + stage * (Config::kQBytes >> 4) +
           part * kPartStep;
  }
  // ... and those that are summed over their rows, queries or keys.
  FA_DEVICE uint64_t desc_cols(const void* sRing, int stage, int part) const {
    return ptx::matrix_descriptor(ptx::smem_addr(sRing), kQPanelBytes) +
           stage * (Config::kQBytes >> 4) + part * kPartStep;
  }
  FA_DEVICE uint64_t desc_k_panel(int panel) const {
    return ptx::matrix_descriptor(ptx::smem_addr(smem_.sK), kKvPanelBytes) +
           panel * (kKvPanelBytes >> 4);
  }
  FA_DEVICE uint64_t desc_ds(int stage, int part) const {
    return ptx::matrix_descriptor(ptx::smem_addr(smem_.sDs), kKvPanelBytes) +
           (stage * Config::kParts + part) * (Config::kDsBytes >> 4);
  }

  // ---- Scores of 64 keys (rows) and the 64 queries of a part of a block (columns)

  // See Visit.
  FA_DEVICE int masked_row(int state) const { return uniform(smem_.visit[state].masked_row); }

  // Scores that the band or the ends of the sequences hide become -inf. key, row: the first ones.
  FA_DEVICE void mask(Scores& rS, int key, int row) const {
    const auto& band = smem_.work.band(p_.fwd);
    const attn::TransposedTile<1, 8> at(band, row, key + 16 * warp());
    attn::mask_band_transposed(rS, band, at, lane());
  }

  // LSE or delta of the lane's columns. Loaded before the wait for the product that they go with:
  // behind it, a fifth of all stalls were for them.
  using Columns = float2[8];
  FA_DEVICE void load_columns(Columns& x, const float* sStat) const {
    const float* sLane = sStat + 2 * (lane() % 4);
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = *reinterpret_cast<const float2*>(sLane + 8 * n);
  }

  // Raw scores to P. A query without keys, or past the end, has an LSE of +inf: P is 0.
  FA_DEVICE void exponentiate(Scores& rS, const Columns& rLse) const {
    const float scale_log2 = p_.fwd.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 lse = rLse[n];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = rS.x[0][n][e];
        s = ptx::ex2_approx_ftz(fmaf(s, scale_log2, -(e % 2 ? lse.y : lse.x)));
      }
    }
  }

  // dS = P (dP - delta), packed. probability(n, e) is P. hides: some P are 0 because their pairs
  // are hidden; dP, which may be NaN there, must not count.
  template <class F>
  FA_DEVICE void differentiate(Operand& rDs, Scores& rDp, const Columns& rDelta, bool hides,
                               F&& probability) const {
    if (hides) {
      differentiate_as<true>(rDs, rDp, rDelta, probability);
    } else {
      differentiate_as<false>(rDs, rDp, rDelta, probability);
    }
  }
  template <bool kHides, class F>
  FA_DEVICE void differentiate_as(Operand& rDs, Scores& rDp, const Columns& rDelta,
                                  F&& probability) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        const float2 delta = rDelta[n];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = rDp.x[0][n][e];
          const float p = probability(n, e);
          x = p * (x - (e % 2 ? delta.y : delta.x));
          if (kHides && p == 0.f) x = 0.f;
        }
      }
      tile::as_operand_a<kDtype>(rDs[k], rDp, 0, k);
    }
  }

  // Writes 64 rows of dS, from row on, as [keys][queries].
  FA_DEVICE void store_ds(const Operand& rDs, int stage, int part, int row) {
    const uint32_t sDs = ptx::smem_addr(smem_.sDs[stage][part]);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ptx::stmatrix_x4(tile::panel_address<kBlockN>(sDs, row + 16 * warp(), k, lane()), rDs[k]);
  }
  // dS of a block is there, for the dQ of both warpgroups; with_dq: so is dQ of the block before.
  // The fence waits for earlier stores, some hundred cycles: one does for both.
  FA_DEVICE void publish_ds(int stage, bool with_dq) {
    ptx::fence_proxy_async();
    publish(smem_.full_ds[stage]);
    if (with_dq) publish(smem_.full_dq[1 - stage]);
  }
  FA_DEVICE void publish_dq(int stage) {
    ptx::fence_proxy_async();
    publish(smem_.full_dq[stage]);
  }

  // ---- dQ

  // Where this lane has its numbers of dQ^T of a query block, counted from its first: 64 columns of
  // head_dim (a panel) and 8 queries from `query` on; 8 more queries are kDqStep further.
  static constexpr int kDqStep = kHeadDim / 16 * 128;  // see GradQueryLayout
  FA_DEVICE int dq_offset(int panel, int query) const {
    return query / 8 * kDqStep + (4 * panel + warp()) * 128 + lane() * 4;
  }
  FA_DEVICE void add_dq(const Scores& rDq, const Visit& visit, int panel) const {
    float* gAccum = p_.grad_query_accum + visit.row * kHeadDim + dq_offset(panel, 0);
#pragma unroll
    for (int n = 0; n < 8; ++n) ptx::red_global_add_v4_f32(gAccum + n * kDqStep, rDq.x[0][n]);
  }
  // Leaves them to add_dq_blocks, once it has read what was there two blocks ago.
  FA_DEVICE void store_dq(const Scores& rDq, const Ring& pos, int panel, int query) {
    wait(smem_.empty_dq[pos.stage()], pos.phase() ^ 1);
    float* sDq = smem_.sDq[pos.stage()] + dq_offset(panel, query);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float (&x)[4] = rDq.x[0][n];
      *reinterpret_cast<float4*>(sDq + n * kDqStep) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  // The turns of add_dq_blocks, with straight adds: here all 8 warps of a key block count, and some
  // may have passed theirs before others take it.
  FA_DEVICE void take_turn(const Visit& visit) const {
    if (p_.turns == nullptr) return;
    const unsigned* gTurn = p_.turns + visit.row / kBlockM;
    const unsigned before = 8 * visit.key_blocks_before;
    while (!__all_sync(0xffffffff, ptx::ld_acquire_gpu_global_u32(gTurn) >= before)) {
    }
  }
  FA_DEVICE void pass_turn(const Visit& visit) const {
    if (p_.turns == nullptr) return;
    __syncwarp();
    if (ptx::elect_sync()) ptx::red_release_gpu_global_add_u32(p_.turns + visit.row / kBlockM, 1);
  }

  // ---- Epilogue

  // Once nobody reads K and V any more: 64 rows of dK or dV, from row on, leave through its tile.
  // stride: of the gradient, batch, head and row.
  template <int kN>
  FA_DEVICE void store_gradient(const tile::Accumulator<1, kN>& acc, void* sTile, int row,
                                const CUtensorMap& map, void* gradient,
                                const int64_t (&stride)[3]) {
    const uint32_t smem = ptx::smem_addr(sTile);
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) {
      uint32_t a[4];
      tile::as_operand_a<kDtype>(a, acc, 0, k);
      ptx::stmatrix_x4(tile::panel_address<kBlockN>(smem, row + 16 * warp(), k, lane()), a);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(2 + consumer_, 128);
    const int key = smem_.work.n_block * kBlockN + row;
    if constexpr (Config::kPacked) {
      // Where the store of a box would run into the next sequence, or there are keys unused.
      if (smem_.work.keys - row < 64) {
        store_rows(smem, row, static_cast<uint16_t*>(gradient), stride);
        return;
      }
    }
    if (threadIdx.x % 128 == 0 && key < p_.fwd.seqlen_k) {
      ptx::griddepcontrol_wait();  // where nothing was loaded, nothing has waited yet
      tile::tma_store<kHeadDim>(&map, smem + row * tile::kPanelRowBytes, kKvPanelBytes, 0,
                                p_.fwd.head_dim, smem_.work.k_begin() + key, smem_.work.kv_head_idx,
                                smem_.work.batch_idx);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read_0();
    }
  }

  // Those of the 64 rows that the sequence has; zeros where they are not used.
  FA_DEVICE void store_rows(uint32_t smem, int row, uint16_t* gGradient,
                            const int64_t (&stride)[3]) const {
    constexpr int kChunks = kHeadDim / 8;
    const auto& work = smem_.work;
    const int thread = ptx::thread_index_again() % 128, chunk = thread % kChunks;
    const int first_key = work.n_block * kBlockN;
    const int end = min(work.sequence.rows_k - first_key, row + 64);
    if (8 * chunk >= p_.fwd.head_dim) return;
    gGradient += work.kv_head_idx * stride[1] + 8 * chunk;
#pragma unroll 1
    for (int r = row + thread / kChunks; r < end; r += 128 / kChunks) {
      const uint32_t address =
          smem + (chunk / 8 * kBlockN + r) * tile::kPanelRowBytes + ((chunk % 8 ^ (r & 7)) << 4);
      const uint4 piece = r < work.keys ? ptx::ld_shared_v4_u32(address) : uint4{};
      *reinterpret_cast<uint4*>(gGradient + (work.k_begin() + first_key + r) * stride[2]) = piece;
    }
  }

  const BwdParams& p_;
  const Maps& maps_;
  typename Config::SharedStorage& smem_;
  // Written anew in every step of a loop, with the same value, which the compiler does not know: it
  // would compute the descriptors of K and V before the loop, for which there are not enough
  // uniform registers.
  int consumer_;
};

template <int kN>
FA_DEVICE void scale(tile::Accumulator<1, kN>& acc, float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc.x[0][n][e] *= factor;
}

}  // namespace fa::bwd_sm90
