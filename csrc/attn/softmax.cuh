// Online softmax over the rows of an accumulator tile (Milakov and Gimelshein 2018,
// arXiv:1805.02867; in base 2 and with the rescaling of O put off, as in FlashAttention,
// arXiv:2205.14135 and 2307.08691).
//
// A lane holds 2 kM rows (two per 16-row tile), each row spread over the four lanes of a quad.
#pragma once
#include "../tile/fragment.cuh"
#include "mask_summary.cuh"

namespace fa::attn {

// Scores are raw products q.k, turned into exponents by one FFMA with `scale_log2` = scale *
// log2(e); or, with kNatural, finished scores scale * q.k + mask, because a mask that reaches down
// to the lowest float leaves no room for a factor.
template <int kM, bool kNatural>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kM;

  // How far, in base 2, a row may rise above its reference before O is rescaled. Larger
  // values are as exact while P fits fp16 and O, larger than its end value by as much, fp32.
  static constexpr float kRescaleThreshold = 8.f;
  // The same for exponentiate_at_once, as the largest sum of a lane's P in a tile.
  static constexpr float kSumLimit = 32768.f;
  // Scaled references, in base 2, up to which half an ulp is at most 2^-11 and 1/2.
  static constexpr float kExactReference = 8192.f, kNearReference = 8388608.f;

  // See takes_bias: scores that are lower by this have no weight.
  static constexpr float kFarther = 1e30f;
  static constexpr float kSwallowingBias = -1e37f;  // see swallowed

  float row_max[kRows];  // reference of the exponent, in units of the scores; -inf before the first
                         // visible key
  float row_sum[kRows];  // this lane's part of the sum of P
  bool near;             // all references of the lane are below kExactReference, in base 2
  float tile_max[kRows];  // of the tile at hand
  float tile_sum[kRows];

  FA_DEVICE OnlineSoftmax() : near(false) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // From units of the scores to exponents of 2.
  static FA_DEVICE float factor(float scale_log2) { return kNatural ? kLog2E : scale_log2; }

  // ---- With the maximum of every tile: scan_max, rescale, exponentiate, in this order.

  // Rows run fastest: the chains of different rows hide each other's latency.
  template <int kN>
  FA_DEVICE void scan_max(const tile::Accumulator<kM, kN>& rS) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float v = fmaxf(rS.x[r / 2][n][2 * (r % 2)], rS.x[r / 2][n][2 * (r % 2) + 1]);
        tile_max[r] = n == 0 ? v : fmaxf(tile_max[r], v);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) tile_max[r] = tile::quad_max(tile_max[r]);
  }

  // Moves the references of rows that outgrew theirs up to the tile's maximum. Returns whether O
  // has to follow, by scale_output with these factors. One vote for the warp: in most tiles no row
  // outgrew its reference and the whole rescaling is jumped over.
  FA_DEVICE bool advance_reference(float scale_log2, float (&alpha)[kRows]) {
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Never true for two -inf (their difference is NaN), always for the first finite maximum.
      outgrown |= (tile_max[r] - row_max[r]) * factor(scale_log2) > kRescaleThreshold;
    }
    if (!__any_sync(0xffffffff, outgrown)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float old_max = row_max[r];
      row_max[r] = fmaxf(old_max, tile_max[r]);
      // old_max is -inf before the first visible key: then alpha is 0, and so are O and the sum.
      alpha[r] = ptx::ex2_approx_ftz((old_max - finite_or_zero(row_max[r])) * factor(scale_log2));
      row_sum[r] *= alpha[r];
    }
    note_references(scale_log2);
    return true;
  }

  FA_DEVICE void note_references(float scale_log2) {
    near = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      near &= fabsf(row_max[r] * factor(scale_log2)) < kExactReference;
  }

  template <int kD>
  FA_DEVICE void scale_output(tile::Accumulator<kM, kD>& rO, const float (&alpha)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        rO.x[r / 2][d][2 * (r % 2)] *= alpha[r];
        rO.x[r / 2][d][2 * (r % 2) + 1] *= alpha[r];
      }
    }
  }

  template <int kD>
  FA_DEVICE void rescale(tile::Accumulator<kM, kD>& rO, float scale_log2) {
    float alpha[kRows];
    if (advance_reference(scale_log2, alpha)) scale_output(rO, alpha);
  }

  template <int kN>
  FA_DEVICE void exponentiate(tile::Accumulator<kM, kN>& rS, float scale_log2) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float reference = finite_or_zero(row_max[r]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& s = rS.x[r / 2][n][2 * (r % 2) + i];
          // Not one FFMA: the rounded product of a large reference would be off by more than 1.
          s = ptx::ex2_approx_ftz((s - reference) * factor(scale_log2));
        }
        row_sum[r] += rS.x[r / 2][n][2 * (r % 2)] + rS.x[r / 2][n][2 * (r % 2) + 1];
      }
    }
  }

  // ---- Without it: once a row has a reference, later scores are exponentiated against it at once,
  // with no maximum, no shuffle and no wait for the whole tile. Scores far above the reference show
  // in the sums (at or above kSumLimit, inf or NaN, and so does a row that has no reference yet):
  // then accept() is false, nothing was added, and the caller computes these scores again for the
  // three functions above. As exact as they are: O may be 2^15 larger than its end value meanwhile,
  // which fits fp32 for |V| up to 1e33; and the exponent, one FFMA, is off by half an ulp of the
  // scaled reference, so accept() is false as well where that is large.

  // Gives rows without a reference (nothing summed so far) the maximum of some of their raw scores.
  template <int kN>
  FA_DEVICE void seed_reference(const tile::Accumulator<kM, kN>& rS, float scale) {
    scan_max(rS);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row_max[r] == -INFINITY) row_max[r] = kNatural ? tile_max[r] * scale : tile_max[r];
    }
    note_references(scale * kLog2E);
  }

  // Raw scores to P. In slices (slice g of kSlices) that a product can interleave with its own
  // instructions. bias, with kNatural: what is added to all finished scores; see takes_bias.
  template <int kSlices, int kN>
  FA_DEVICE void exponentiate_at_once(tile::Accumulator<kM, kN>& rS, int g, float scale_log2,
                                      float bias = 0.f) {
    constexpr int kItems = kN * kRows;
#pragma unroll
    for (int t = g * kItems / kSlices; t < (g + 1) * kItems / kSlices; ++t) {
      const int n = t / kRows, r = t % kRows, e = 2 * (r % 2);
#pragma unroll
      for (int i = e; i < e + 2; ++i) {
        float& s = rS.x[r / 2][n][i];
        const float reference = kNatural ? row_max[r] - bias : row_max[r];
        s = ptx::ex2_approx_ftz(fmaf(s, scale_log2, -(reference * factor(scale_log2))));
      }
      const float sum = rS.x[r / 2][n][e] + rS.x[r / 2][n][e + 1];
      tile_sum[r] = n == 0 ? sum : tile_sum[r] + sum;
    }
  }

  // Whether that is right with a bias, for all rows of the warp. A far one swallows the score that
  // it is added to, and here it is added to the reference: no difference only where the rows have
  // seen scores so much higher that all is 0.
  FA_DEVICE bool takes_bias(float bias) const {
    if (!kNatural || fabsf(bias) < -kFarBias) return true;
    bool farther = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) farther &= row_max[r] - bias > kFarther;
    return __all_sync(0xffffffff, farther);
  }

  // Whether all rows of the warp have seen nothing but scores with this bias, and it is so large
  // that it swallowed them: then P is 1. Scores have to be below 1e29, half an ulp of such a bias.
  FA_DEVICE bool swallowed(float bias) const {
    bool all = bias < kSwallowingBias;
#pragma unroll
    for (int r = 0; r < kRows; ++r) all &= row_max[r] == bias;
    return __all_sync(0xffffffff, all);
  }

  template <int kN>
  FA_DEVICE void fill_with_ones(tile::Accumulator<kM, kN>& rS) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) rS.x[m][n][e] = 1.f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_sum[r] += 2.f * kN;
  }

  // Adds the sums of exponentiate_at_once, unless something is wrong with them: see there. kNoted:
  // `near` is kept in a register; otherwise found again from the references, for kernels
  // that have none to spare.
  template <bool kNoted>
  FA_DEVICE bool accept(float scale_log2, float bias = 0.f) {
    bool good = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) good &= tile_sum[r] < kSumLimit;  // false for NaN
    if constexpr (!kNoted) note_references(scale_log2);
    const bool exact = near && (!kNatural || fabsf(bias) * kLog2E < kExactReference);
    if (!__all_sync(0xffffffff, good && exact) &&
        !__all_sync(0xffffffff, good && (exact || kills(scale_log2, bias)))) {
      return false;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_sum[r] += tile_sum[r];
    return true;
  }

  // Whether all of the lane's P are 0 in the rows whose reference is large: half a unit of the
  // exponent does not matter to what is 0 with it, nor does any error to what a far bias makes 0.
  FA_DEVICE bool kills(float scale_log2, float bias) const {
    bool all = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float reference = kNatural ? row_max[r] - bias : row_max[r];
      const float exponent = fabsf(reference * factor(scale_log2));
      all &= exponent < kExactReference || (tile_sum[r] == 0.f && exponent < kNearReference) ||
             (kNatural && reference > kFarther);
    }
    return all;
  }

  // Of the sums of the lanes of a quad, the sum of the row.
  FA_DEVICE void finish_sums() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_sum[r] = tile::quad_sum(row_sum[r]);
  }

  // Divides the rows of rO by their sums and returns their LSE. A row without a visible key gets 0
  // and -inf.
  template <int kD>
  FA_DEVICE void finalize(tile::Accumulator<kM, kD>& rO, float scale, float (&lse)[kRows]) {
    bool empty = false;
    finish_sums();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      empty |= row_sum[r] == 0.f;
      lse[r] = row_sum[r] == 0.f
                   ? -INFINITY
                   : finite_or_zero(row_max[r]) * (kNatural ? 1.f : scale) + __logf(row_sum[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // The sum is at least about 1, the term of the reference itself: no denormal, no overflow.
      const float inverse = ptx::rcp_approx_ftz(row_sum[r]);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
#pragma unroll
        for (int i = 0; i < 2; ++i) rO.x[r / 2][d][2 * (r % 2) + i] *= inverse;
      }
    }
    if (!__any_sync(0xffffffff, empty)) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int d = 0; d < kD; ++d) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& o = rO.x[r / 2][d][2 * (r % 2) + i];
          o = row_sum[r] == 0.f ? 0.f : o;  // not 0 * o: a hidden V may have brought a NaN
        }
      }
    }
  }

  // As a reference, -inf would turn hidden scores (-inf) into NaN; a row of NaN scores stays NaN
  // with 0 as well.
  static FA_DEVICE float finite_or_zero(float v) { return v == -INFINITY ? 0.f : v; }
};

}  // namespace fa::attn
