// Where the keys of a sequence lie in a cache, and how many there are.
#pragma once
#include "../params.h"
#include "../ptx/sm80.cuh"
#include "block_info.cuh"

namespace fa::attn {

// Keys in the cache before this call appends any.
FA_DEVICE int64_t keys_before(const KvCache& cache, int batch_idx) {
  return cache.seqlens == nullptr ? cache.capacity - cache.seqlen_new
                                  : ptx::ld_relaxed(cache.seqlens + batch_idx);
}

// Keys that its queries may see. Lengths come from the device and nobody has checked them: none
// leads outside of the cache.
FA_DEVICE int sequence_length(const KvCache& cache, int64_t keys_before) {
  return static_cast<int>(clamp(keys_before + cache.seqlen_new, 0, cache.capacity));
}

// The page that holds a key; without a table, each sequence has one page.
FA_DEVICE int page_of(const KvCache& cache, int batch_idx, int key) {
  if (cache.block_table == nullptr) return batch_idx;
  return cache.block_table[batch_idx * cache.block_table_stride + (key >> cache.page_shift)];
}

// Row of a key in its page.
FA_DEVICE int row_in_page(const KvCache& cache, int key) {
  return key & static_cast<int>((1u << cache.page_shift) - 1);
}

}  // namespace fa::attn
