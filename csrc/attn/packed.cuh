// Sequences of several lengths, one behind the other in tensors without a batch dimension.
//
//   rows of query   | padding |  sequence 0  | sequence 1 | ... | sequence batch - 1 |  padding  |
//                   0         cu[0]          cu[1]        cu[2]                      cu[batch]
//                   total
//   index           batch + 1       0              1                                     batch
//
// Padding is two more sequences, of rows that see no key and of keys that no row sees, so that
// kernels give it the results of such. Lengths come from the device and nobody has checked them:
// sequence_of clamps them, so that what kernels touch lies inside the tensors.
//
// Scratch of the backward keeps the rows of each sequence in blocks of their own:
//
//   block of row r of sequence b    first row of b / block_m + b + 1 + r / block_m
//
// with b = -1 for the padding at the front. Blocks of two sequences never meet, as
// floor(x / m) + ceil(n / m) <= floor((x + n) / m) + 1; some belong to none.
#pragma once
#include "block_info.cuh"
#include "scheduler.cuh"

namespace fa::attn {

// What a CTA has to know of its sequence: a Band of block_info.cuh, and where its rows lie. Without
// packing, rows count from the beginning of the batch entry, which strides lead to.
struct Sequence {
  int q_begin, seqlen_q;
  int k_begin, seqlen_k;  // keys that take part ...
  int rows_k;             // ... and rows that the sequence has for keys
  int64_t diagonal, window_left, window_right;
};

// [begin, end) of sequence batch_idx in one of the tensors, which has `total` rows.
struct RowRange {
  int begin, end;
};
FA_DEVICE RowRange packed_rows(const int* cu_seqlens, int batch, int batch_idx, int total) {
  const auto boundary = [&](int i, int low) { return min(max(cu_seqlens[i], low), total); };
  const int begin = batch_idx > batch ? 0 : boundary(batch_idx, 0);
  if (batch_idx == batch) return {begin, total};
  return {begin, boundary(batch_idx > batch ? 0 : batch_idx + 1, begin)};
}

template <bool kPacked>
FA_DEVICE Sequence sequence_of(const FwdParams& p, int batch_idx) {
  if constexpr (!kPacked) {
    return {0, p.seqlen_q, 0, p.seqlen_k, p.seqlen_k, p.diagonal, p.window_left, p.window_right};
  } else {
    const PackedSequences& packed = p.packed;
    const RowRange q = packed_rows(packed.cu_seqlens_q, p.batch, batch_idx, p.seqlen_q);
    const RowRange k = packed_rows(packed.cu_seqlens_k, p.batch, batch_idx, p.seqlen_k);
    const int seqlen_q = q.end - q.begin, rows_k = k.end - k.begin;
    int seqlen_k = rows_k;
    if (batch_idx >= p.batch) {
      seqlen_k = 0;
    } else if (packed.seqused_k != nullptr) {
      seqlen_k = min(max(packed.seqused_k[batch_idx], 0), rows_k);
    }
    return {q.begin,       seqlen_q,      k.begin, seqlen_k, rows_k, seqlen_k - seqlen_q,
            p.window_left, p.window_right};
  }
}

// What key_range and masks ask: without packing the parameters themselves, which take no registers.
template <bool kPacked>
FA_DEVICE const auto& band_of(const FwdParams& p, const Sequence& sequence) {
  if constexpr (kPacked) {
    return sequence;
  } else {
    return p;
  }
}

// Number of a (sequence, head) among the heads of LSE and scratch, which packed sequences share.
template <bool kPacked>
FA_DEVICE int64_t head_of(const FwdParams& p, int batch_idx, int head_idx) {
  return kPacked ? head_idx : int64_t{batch_idx} * p.heads_q + head_idx;
}

// First row of a sequence in the scratch of a head, BwdParams::rows_rounded.
template <bool kPacked>
FA_DEVICE int scratch_begin(const FwdParams& p, int q_begin, int batch_idx, int block_m) {
  if constexpr (!kPacked) return 0;
  const int before = batch_idx > p.batch ? 0 : batch_idx + 1;  // sequences
  return (q_begin / block_m + before) * block_m;
}

// The way back: a row of the tensors from a row of scratch, and how many rows of its sequence there
// are from it on; none, or fewer, for scratch that belongs to no row.
struct ScratchRow {
  int row;
  int rows_left;
};
FA_DEVICE ScratchRow row_of_scratch(const FwdParams& p, const FastDivide& block_m, int row) {
  // By place in the scratch: 0 is the padding at the front.
  const auto first_block = [&](int place) {
    const int begin = place == 0 ? 0 : min(max(p.packed.cu_seqlens_q[place - 1], 0), p.seqlen_q);
    return static_cast<int>(block_m.quotient(begin)) + place;
  };
  const int block = static_cast<int>(block_m.quotient(row));
  int place = 0, last = p.batch + 1;
#pragma unroll 1
  while (place < last) {
    const int middle = (place + last + 1) / 2;
    if (first_block(middle) <= block) {
      place = middle;
    } else {
      last = middle - 1;
    }
  }
  const RowRange rows =
      packed_rows(p.packed.cu_seqlens_q, p.batch, place == 0 ? p.batch + 1 : place - 1, p.seqlen_q);
  const int at = rows.begin + row - first_block(place) * static_cast<int>(block_m.divisor);
  return {at, rows.end - at};
}

// Tile number `index` of a packed batch, whose heads follow each other; false past the last one.
// heads: query heads forward, key heads backward.
FA_DEVICE bool packed_tile(const PackedSequences& packed, const FastDivide& heads, unsigned index,
                           PackedTile& tile, int& head_idx) {
  const unsigned i = heads.quotient(index);
  if (i >= static_cast<unsigned>(*packed.num_tiles)) return false;
  tile = packed.tiles[i];
  head_idx = static_cast<int>(index - i * heads.divisor);
  return true;
}

// The same in sections of heads, whose keys and values fit in L2 together.
FA_DEVICE bool packed_tile(const PackedSequences& packed, const TileOrder& order, unsigned index,
                           PackedTile& tile, int& head_idx) {
  const unsigned num_tiles = *packed.num_tiles, section_heads = order.section_heads.divisor;
  const unsigned section = index / max(num_tiles * section_heads, 1u);
  if (section >= order.num_sections) return false;
  const FastDivide& heads =
      section + 1 == order.num_sections ? order.last_heads : order.section_heads;
  const unsigned in_section = index - section * num_tiles * section_heads;
  const unsigned i = heads.quotient(in_section);
  if (i >= num_tiles) return false;
  tile = packed.tiles[i];
  head_idx = static_cast<int>(section * section_heads + in_section - i * heads.divisor);
  return true;
}

// The tile of a CTA of the forward; m_block is -1 past the last one of a packed batch.
template <bool kPacked>
FA_DEVICE WorkTile work_of_cta(const FwdParams& p, const TileOrder& order, unsigned cta) {
  if constexpr (!kPacked) {
    return tile_of_cta(order, cta);
  } else {
    PackedTile tile;
    int head_idx;
    if (!packed_tile(p.packed, order, cta, tile, head_idx)) return {-1, 0, 0, 0};
    return {tile.block, head_idx, static_cast<int>(order.group.quotient(head_idx)), tile.sequence};
  }
}

}  // namespace fa::attn
