// How O and LSE leave the decoding kernels: from shared memory, merged over the warps that had
// different keys, to the result or to the part of a split.
#pragma once
#include "../attn/merge.cuh"
#include "cluster.cuh"
#include "decode_tile.cuh"

namespace fa::decode {

// 8 columns of a row of `out`, or of as many as it has.
template <Dtype kDtype>
FA_DEVICE void store_row(uint16_t* gO, const float (&x)[8], int columns, bool aligned) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = ptx::cvt_rn_x2<kDtype>(x[2 * i], x[2 * i + 1]);
  if (aligned) {
    *reinterpret_cast<uint4*>(gO) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < columns) gO[e] = static_cast<uint16_t>(words[e / 2] >> 16 * (e % 2));
  }
}

// 8 columns of a row of the tile, merged from those of the key warps.
struct MergedRow {
  float x[8];
  attn::PartSum part;
};
template <class Config>
FA_DEVICE MergedRow merge_warps(const typename Config::SharedStorage& smem, int row, int col,
                                float scale_log2) {
  float max = -INFINITY, sum = 0.f;
#pragma unroll
  for (int w = 0; w < Config::kKeyWarps; ++w) max = fmaxf(max, smem.after.sums[w][row].max);
  const float reference = attn::merge_reference(max);
  MergedRow merged{};
#pragma unroll
  for (int w = 0; w < Config::kKeyWarps; ++w) {
    const attn::PartSum part = smem.after.sums[w][row];
    const float factor = attn::merge_factor(part, reference, scale_log2);
    const auto* x = reinterpret_cast<const float4*>(&smem.after.sO[w][row][col]);
    const float4 low = x[0], high = x[1];
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    sum += factor * part.sum;
    // Without keys not 0 * value: a hidden V may have brought a NaN.
#pragma unroll
    for (int e = 0; e < 8; ++e) merged.x[e] += part.sum == 0.f ? 0.f : factor * values[e];
  }
  const float inverse = attn::merge_inverse(sum);
#pragma unroll
  for (int e = 0; e < 8; ++e) merged.x[e] *= inverse;
  merged.part = {max, sum};
  return merged;
}

enum class Target { kOut, kPartial };

// 8 columns of a row of the tile to global memory: the result, or the part of this split.
template <class Config>
FA_DEVICE void store_columns(const DecodeParams& p, const Prepared& prepared, const RowTile& t,
                             int row, int col, const MergedRow& merged, Target target) {
  const int group = prepared.group.divisor;
  const int token = prepared.group.quotient(t.row_begin + row);
  const int head = t.kv_head_idx * group + (t.row_begin + row - token * group);
  const int64_t out_row =
      (static_cast<int64_t>(t.batch_idx) * p.heads_q + head) * p.seqlen_q + token;
  if (target == Target::kPartial) {
    const int64_t part = out_row * p.num_splits + blockIdx.y;
    auto* gPart = reinterpret_cast<float4*>(p.partial_out + part * Config::kHeadDim + col);
    gPart[0] = make_float4(merged.x[0], merged.x[1], merged.x[2], merged.x[3]);
    gPart[1] = make_float4(merged.x[4], merged.x[5], merged.x[6], merged.x[7]);
    if (col == 0) reinterpret_cast<attn::PartSum*>(p.partial_sums)[part] = merged.part;
    return;
  }
  if (col == 0) p.lse[out_row] = attn::merge_lse(merged.part, positive_scale(p));
  if (col < p.head_dim) {
    uint16_t* gO = static_cast<uint16_t*>(p.out) + t.batch_idx * p.out_stride[0] +
                   head * p.out_stride[1] + token * p.out_stride[2] + col;
    store_row<Config::kDtype>(gO, merged.x, p.head_dim - col, prepared.out_aligned);
  }
}

// Rows of the tile that exist, in pieces of 8 columns.
template <class Config>
FA_DEVICE int count_pieces(const RowTile& t) {
  return min(Config::kBlockM, t.rows - t.row_begin) * (Config::kHeadDim / 8);
}

// What the warps left in shared memory to global memory.
template <class Config>
FA_DEVICE void store(const DecodeParams& p, const Prepared& prepared, const RowTile& t,
                     const typename Config::SharedStorage& smem) {
  constexpr int kPieces = Config::kHeadDim / 8;
  const int pieces = count_pieces<Config>(t);
  const Target target = p.num_splits > 1 ? Target::kPartial : Target::kOut;
  const float scale_log2 = positive_scale(p) * kLog2E;
#pragma unroll 1
  for (int i = threadIdx.x; i < pieces; i += Config::kThreads) {
    const int row = i / kPieces, col = i % kPieces * 8;
    store_columns<Config>(p, prepared, t, row, col, merge_warps<Config>(smem, row, col, scale_log2),
                          target);
  }
}

// The same where the splits are the CTAs of a cluster. Piece i of all splits is merged by CTA
// i % splits, to whose shared memory the others write it: all wait for each other once. The cluster
// has arrived at its barrier once before, so that all CTAs are there to be written to.
template <class Config>
FA_DEVICE void store_in_cluster(const DecodeParams& p, const Prepared& prepared, const RowTile& t,
                                typename Config::SharedStorage& smem) {
  constexpr int kPieces = Config::kHeadDim / 8;
  const int pieces = count_pieces<Config>(t), splits = p.num_splits, split = blockIdx.y;
  const float scale_log2 = positive_scale(p) * kLog2E;
  cluster_wait();
#pragma unroll 1
  for (int i = threadIdx.x; i < pieces; i += Config::kThreads) {
    const MergedRow merged = merge_warps<Config>(smem, i / kPieces, i % kPieces * 8, scale_log2);
    const int slot = prepared.splits.quotient(i), to = i - slot * splits;
    const int at = slot * splits + split;
    auto* x = reinterpret_cast<float4*>(in_cta(smem.parts.x[at], to));
    x[0] = make_float4(merged.x[0], merged.x[1], merged.x[2], merged.x[3]);
    x[1] = make_float4(merged.x[4], merged.x[5], merged.x[6], merged.x[7]);
    *in_cta(&smem.parts.sums[at], to) = merged.part;
  }
  cluster_arrive();
  cluster_wait();  // the parts of all splits are here, and nobody writes to a CTA that has ended
#pragma unroll 1
  for (int slot = threadIdx.x; slot * splits + split < pieces; slot += Config::kThreads) {
    const int i = slot * splits + split, first = slot * splits;
    float max = -INFINITY, sum = 0.f;
#pragma unroll 1
    for (int s = 0; s < splits; ++s) max = fmaxf(max, smem.parts.sums[first + s].max);
    const float reference = attn::merge_reference(max);
    MergedRow merged{};
#pragma unroll 1
    for (int s = 0; s < splits; ++s) {
      const float weight = attn::merge_weight(smem.parts.sums[first + s], reference, scale_log2);
      sum += weight;
#pragma unroll
      for (int e = 0; e < 8; ++e) merged.x[e] += weight * smem.parts.x[first + s][e];
    }
    const float inverse = attn::merge_inverse(sum);
#pragma unroll
    for (int e = 0; e < 8; ++e) merged.x[e] *= inverse;
    merged.part = {max, sum};
    store_columns<Config>(p, prepared, t, i / kPieces, i % kPieces * 8, merged, Target::kOut);
  }
}

}  // namespace fa::decode
