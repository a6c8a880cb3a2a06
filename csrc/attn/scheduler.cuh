// Which tile of work a CTA takes.
#pragma once
#include <algorithm>
#include <cmath>

#include "../params.h"
#include "../ptx/common.cuh"

namespace fa::attn {

// Division of 0 <= n < 2^31 by a divisor known on the host, as a multiplication and a shift
// (Granlund and Montgomery 1994). The divisions a CTA starts with would cost it some hundred
// instructions each; and a product and a shift, unlike a division, run in the uniform datapath and
// leave their results in uniform registers.
struct FastDivide {
  unsigned divisor = 1, multiplier = 0, shift = 0;

  FastDivide() = default;
  explicit FastDivide(unsigned d) : divisor(d) {
    if (d <= 1) return;
    unsigned log = 0;
    while ((1ull << log) < d) ++log;
    multiplier = static_cast<unsigned>(((1ull << (31 + log)) + d - 1) / d);
    shift = log - 1;
  }
#ifdef __CUDACC__
  FA_DEVICE unsigned quotient(unsigned n) const {
    return divisor == 1 ? n : __umulhi(n, multiplier) >> shift;
  }
#endif
};

struct WorkTile {
  int m_block;
  int head_idx;
  int kv_head_idx;
  int batch_idx;
};

// Order of the tiles. CTAs start in the order of their index, so:
// - without a right limit, m_block runs fastest: neighbours read the same keys from L2;
// - with one, the last rows see the most keys and go first, so that no long tile is left for the
//   end, across a section of (batch, head) pairs whose keys and values fit in L2 together.
// The last section may be smaller than the others. Tiles of packed sequences come from a list, the
// longest first, in sections of heads.
struct TileOrder {
  FastDivide per_section;    // tiles of a section
  FastDivide section_heads;  // (batch, head) pairs of a section ...
  FastDivide last_heads;     // ... and of the last one
  FastDivide heads;          // query heads
  FastDivide group;          // query heads of a key head
  unsigned m_blocks;
  unsigned num_sections;
  float scale;       // positive: see fold_scale
  float scale_log2;  // scale * log2(e)
  bool out_aligned;  // rows of out take 16-byte stores

  unsigned num_tiles;
};

// For tiles of block_m query rows and sections whose keys and values take section_bytes. Of
// packed sequences, num_tiles is the host's bound.
inline TileOrder make_tile_order(const FwdParams& p, int block_m, int64_t section_bytes) {
  const bool packed = p.packed.tiles != nullptr;
  const int64_t m_blocks = (p.seqlen_q + block_m - 1) / block_m;
  const int64_t pairs = (packed ? 1 : int64_t{p.batch}) * p.heads_q, group = p.heads_q / p.heads_k;
  int64_t section = 1;
  if (packed || p.window_right < p.seqlen_k) {
    const int64_t kv_bytes = int64_t{4} * p.seqlen_k * p.head_dim;
    section = std::min(
        pairs, std::max<int64_t>(section_bytes / std::max<int64_t>(kv_bytes, 1), 1) * group);
  }
  TileOrder order;
  order.m_blocks = m_blocks;
  order.num_tiles = pairs * (packed ? p.packed.max_tiles : m_blocks);
  order.num_sections = (pairs + section - 1) / section;
  const int64_t last = pairs - (order.num_sections - 1) * section;
  order.per_section = FastDivide(section * m_blocks);
  order.section_heads = FastDivide(section);
  order.last_heads = FastDivide(last);
  order.heads = FastDivide(p.heads_q);
  order.group = FastDivide(group);
  order.scale = p.scale == 0.f ? 1.f : std::abs(p.scale);
  order.scale_log2 = order.scale * kLog2E;
  order.out_aligned = p.head_dim % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 &&
                      p.out_stride[0] % 8 == 0 && p.out_stride[1] % 8 == 0 &&
                      p.out_stride[2] % 8 == 0;
  return order;
}

FA_DEVICE WorkTile tile_of_cta(const TileOrder& order, unsigned cta) {
  const unsigned section = order.per_section.quotient(cta);
  const unsigned in_section = cta - section * order.per_section.divisor;
  const FastDivide& heads =
      section + 1 == order.num_sections ? order.last_heads : order.section_heads;
  const unsigned level = heads.quotient(in_section);
  const unsigned pair = section * order.section_heads.divisor + in_section - level * heads.divisor;
  const unsigned batch = order.heads.quotient(pair);
  const unsigned head = pair - batch * order.heads.divisor;
  return {static_cast<int>(order.m_blocks - 1 - level), static_cast<int>(head),
          static_cast<int>(order.group.quotient(head)), static_cast<int>(batch)};
}

}  // namespace fa::attn
