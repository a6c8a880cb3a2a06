// Tiles between global and shared memory: rows of 16-bit elements, 16 bytes at a time, swizzled.
#pragma once
#include "../ptx/sm80.cuh"
#include "swizzle.cuh"

namespace fa::tile {

// Where one of kThreads threads stands in the copy of a tile [kRows][kCols]. Eight threads cover
// 128 bytes of a row; a thread keeps its row and column for the other 128-byte lines of the row
// (constant offsets, no address arithmetic) and walks the rows in steps of kRowStep.
template <int kRows_, int kCols, int kThreads_>
struct TileCopy {
  static constexpr int kRows = kRows_, kThreads = kThreads_;
  static constexpr int kLines = kCols / 64;
  static constexpr int kRowStep = kThreads / 8;
  static constexpr int kSteps = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0 && (kRowStep % 8 == 0 || kRowStep == 4));

  static FA_DEVICE int row(int thread) { return thread / 8; }
  static FA_DEVICE int col(int thread) { return thread % 8 * 8; }
  static FA_DEVICE uint32_t smem_offset(int thread) {
    return swizzle<kCols>(row(thread), thread % 8);
  }
  // From there to step i and 128-byte line `line`. Row & 7, which is what the swizzle takes of it,
  // is the same in every step, or in steps of 4 rows changes between two values.
  static FA_DEVICE uint32_t place(uint32_t start, int i, int line) {
    const uint32_t flip = kRowStep == 4 && i % 2 == 1 ? 4 * kChunkBytes : 0;
    return (start ^ flip) + i * kRowStep * kCols * 2 + line * 128;
  }

  // Enqueues step i of the copy of a tile that lies inside the matrix. address: smem_offset added
  // to the tile; source: the thread's element of this step; col: its column. Columns past head_dim,
  // and everything if valid is false, become zeros and are not read. The caller commits.
  static FA_DEVICE void load_step(uint32_t address, const uint16_t* source, int i, int col,
                                  int head_dim, bool valid) {
#pragma unroll
    for (int line = 0; line < kLines; ++line)
      ptx::cp_async_cg_16(place(address, i, line), source + line * 64,
                          valid && col + line * 64 < head_dim);
  }

  // Enqueues the whole copy of a tile of which rows_left rows, counted from the thread's first,
  // exist; the rest becomes zeros, whatever memory holds there.
  static FA_DEVICE void load_bounded(uint32_t address, const uint16_t* source, int64_t row_stride,
                                     int col, int head_dim, int rows_left) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_step(address, source, i, col, head_dim, i * kRowStep < rows_left);
      source += kRowStep * row_stride;
    }
  }
};

// The same into panels of 64 columns, as wgmma wants its operands: a tile of [kPanelRows][kCols]
// after the other, each [kCols / 64][kPanelRows][64] with 128-byte swizzle. The threads are those
// of any range of the CTA whose first index is a multiple of kThreads.
template <int kRows_, int kCols, int kThreads_, int kPanelRows>
struct PanelCopy {
  static constexpr int kRows = kRows_, kThreads = kThreads_;
  static constexpr int kLines = kCols / 64;
  static constexpr int kRowStep = kThreads / 8;
  static constexpr int kSteps = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0 && (kRowStep % 8 == 0 || kRowStep == 4));
  static_assert(kPanelRows % kRowStep == 0 && (kRows % kPanelRows == 0 || kPanelRows % kRows == 0));

  static FA_DEVICE int row(int thread) { return thread % kThreads / 8; }
  static FA_DEVICE int col(int thread) { return thread % 8 * 8; }
  static FA_DEVICE uint32_t smem_offset(int thread) { return swizzle<64>(row(thread), thread % 8); }
  // Of a row from the start of the first panel, but for the swizzle.
  static FA_DEVICE uint32_t rows_offset(int first) {
    return first / kPanelRows * kPanelRows * kCols * 2 + first % kPanelRows * 128;
  }
  static FA_DEVICE uint32_t place(uint32_t start, int i, int line) {
    const uint32_t flip = kRowStep == 4 && i % 2 == 1 ? 4 * kChunkBytes : 0;
    return (start ^ flip) + rows_offset(i * kRowStep) + line * kPanelRows * 128;
  }

  static FA_DEVICE void load_step(uint32_t address, const uint16_t* source, int i, int col,
                                  int head_dim, bool valid) {
#pragma unroll
    for (int line = 0; line < kLines; ++line)
      ptx::cp_async_cg_16(place(address, i, line), source + line * 64,
                          valid && col + line * 64 < head_dim);
  }
};

}  // namespace fa::tile
