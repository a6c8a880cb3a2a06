// Tiles between global and shared memory by the bulk tensor copy engine. In shared memory a tile is
// a row of panels of 64 columns, [head_dim / 64][rows][64], each with the 128-byte swizzle: what
// the descriptors of ptx/wgmma.cuh name. The tensor map (kernels/tensor_map.h) has the dimensions
// (head_dim, seqlen, heads, batch) and boxes of one panel; columns past head_dim and rows past
// seqlen read as zero and are not written.
#pragma once
#include "../ptx/sm80.cuh"
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

// Zeros in rows [first, end) of a tile whose panels have kRows rows, by kThreads threads that take
// every step together. Before a product or a copy touches the tile, each has to fence_proxy_async.
template <int kRows, int kCols, int kThreads>
FA_DEVICE void clear_rows(uint32_t smem, int first, int end, int thread) {
  constexpr int kStep = kThreads / 8;  // a row of a panel has eight pieces of 16 bytes
#pragma unroll 1
  for (int step = first / kStep * kStep; step < end; step += kStep) {
    const int row = step + thread / 8;
#pragma unroll
    for (int panel = 0; panel < kCols / kPanelCols; ++panel)
      if (row >= first)
        ptx::st_shared_v4_u32(smem + (panel * kRows + row) * kPanelCols * 2 + thread % 8 * 16, {});
  }
}

}  // namespace fa::tile
