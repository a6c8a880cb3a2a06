// How a tile of 16-bit elements lies in shared memory: rows one after the other, and inside each
// group of eight 16-byte chunks the chunk index XORed with the row. Eight rows of one chunk column
// then lie in eight different bank groups, which makes ldmatrix and 16-byte stores free of
// conflicts.
#pragma once
#include <cstdint>

namespace fa::tile {

constexpr int kChunkBytes = 16;

// Byte offset of chunk `chunk` (16 bytes) of row `row` in a tile whose rows hold kCols elements.
template <int kCols>
__host__ __device__ constexpr uint32_t swizzle(int row, int chunk) {
  static_assert(kCols % 64 == 0, "a row is a whole number of 128-byte lines");
  return static_cast<uint32_t>(row * (kCols * 2) + ((chunk ^ (row & 7)) * kChunkBytes));
}

}  // namespace fa::tile
