// Tiles between global and shared memory by the bulk tensor copy engine. In shared memory a tile is
// a row of panels of 64 columns, [head_dim / 64][rows][64], each with the 128-byte swizzle: what
// the descriptors of ptx/wgmma.cuh name. The tensor map (kernels/tensor_map.h) has the dimensions
// (head_dim, seqlen, heads, batch) and boxes of one panel; columns past head_dim and rows past
// seqlen read as zero and are not written.
#pragma once
#include "../ptx/sm90.cuh"

namespace fa::tile {

constexpr int kPanelCols = 64;  // 128 bytes, the period of the swizzle

// Called by one thread. Completes kCols / 64 boxes of kRows rows on `barrier`, which has to expect
// kRows * kCols * 2 bytes. panel_bytes is the distance between panels in shared memory.
template <int kRows, int kCols>
FA_DEVICE void tma_load(uint32_t smem, uint32_t panel_bytes, const CUtensorMap* map,
                        uint32_t barrier, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < kCols / kPanelCols; ++i)
    ptx::cp_async_bulk_tensor_4d_load(smem + i * panel_bytes, map, barrier, i * kPanelCols, row,
                                      head, batch);
}

// Called by one thread, after a fence_proxy_async of those that wrote the tile: kCols columns from
// first_col on. The box of the map has the rows. Whole pieces of 16 bytes are written: head_dim has
// to be a multiple of 8.
template <int kCols>
FA_DEVICE void tma_store(const CUtensorMap* map, uint32_t smem, uint32_t panel_bytes, int first_col,
                         int head_dim, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < kCols / kPanelCols; ++i) {
    const int col = first_col + i * kPanelCols;
    if (col < head_dim)
      ptx::cp_async_bulk_tensor_4d_store(map, smem + i * panel_bytes, col, row, head, batch);
  }
}

}  // namespace fa::tile
