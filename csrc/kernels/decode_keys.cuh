// Which keys a CTA of the decoding kernels reads, and how it gets them to shared memory.
//
//   kernels before   ... may write lengths and pages ...    |
//   a CTA            ask | addresses | prefetch | wait for them | ask again | copies | the same?
//                                                                       yes: the products
//                                                                       no:  copies once more
//
//   seqlens [batch], block_table [batch][pages of a sequence]
//   smem.table      kTablePages of them, those of the sequence or from the first of the split on;
//                   where there are more, entry i makes room for i + kTablePages
//
// A tile of keys is [kRows][head_dim] of one KV head, in runs of 16 keys, each inside of one page:
// 8 threads copy 128 bytes of a row. Strides count elements.
#pragma once
#include "decode_tile.cuh"
#include "dependent_launch.cuh"

namespace fa::decode {

// Tiles [begin, end) of a split: all splits have the same number of them, or one less.
struct TileRange {
  int begin;
  int end;
};
FA_DEVICE TileRange tiles_of_split(const RowTile& t, int block_n, int split,
                                   const attn::FastDivide& splits) {
  const int first = t.first / block_n;
  const int tiles = t.end > t.first ? (t.end - 1) / block_n + 1 - first : 0;
  const int each = splits.quotient(tiles), more = tiles - each * static_cast<int>(splits.divisor);
  const int begin = first + split * each + min(split, more);
  return {begin, begin + each + (split < more)};
}

// What a CTA looks up before it can copy: the length of its sequence, and pages of it.
struct View {
  RowTile t;
  TileRange tiles;
  const int* row;  // of the block table, from page first_page on
  int first_page;
  int pages;  // from there on; smem.table has the first kTablePages of them
};

// The part of it that one of the kThreads threads of a CTA asks memory for: thread 0 the length,
// for all, and each some of the pages. Nothing is computed from the answers before they are needed,
// so that addresses are found and copies issued meanwhile.
template <int kThreads>
struct Lookup {
  static constexpr int kPages = (kTablePages + kThreads - 1) / kThreads;
  int keys_before;
  int pages[kPages];

  // Which of the pages, counted from the first that is asked for.
  static FA_DEVICE int entry(int i) { return threadIdx.x + i * kThreads; }
  static FA_DEVICE bool exists(int i, int count) { return entry(i) < min(count, kTablePages); }
  // `own`: the row of the table from entry(0) on.
  FA_DEVICE void ask_for_pages(const int* own, int count) {
#pragma unroll
    for (int i = 0; i < kPages; ++i)
      if (exists(i, count)) pages[i] = ptx::ld_relaxed(own + i * kThreads);
  }
  // The length and `count` pages, in warps that have any of it to ask for; returns whether this is
  // one.
  FA_DEVICE bool ask(const DecodeParams& p, const int* own, int count) {
    if (threadIdx.x >= 32 && threadIdx.x / 32 * 32 >= count) return false;
    if (threadIdx.x == 0) keys_before = attn::keys_before(p.cache, blockIdx.z);
    ask_for_pages(own, count);
    return true;
  }
};

// Whether this is looked up while kernels before this one may still change it, and compared when
// they have ended: one wait for memory less between their end and the first copies.
FA_DEVICE bool looks_ahead(const DecodeParams& p) { return kStartsEarly && p.mask == nullptr; }
// Whether there is anything to look up.
FA_DEVICE bool looks_up(const DecodeParams& p) {
  return p.cache.seqlens != nullptr || p.cache.block_table != nullptr;
}

FA_DEVICE const int* table_row(const DecodeParams& p) {
  return p.cache.block_table + blockIdx.z * p.cache.block_table_stride;
}

// What is asked for first of all, so that 150 instructions find addresses while it is on its way:
// the length, and the pages of the sequence if there is room for all.
template <int kThreads>
FA_DEVICE Lookup<kThreads> ask_first(const DecodeParams& p, const Prepared& prepared) {
  Lookup<kThreads> found;
  if (looks_up(p)) found.ask(p, table_row(p) + threadIdx.x, prepared.pages_of_sequence);
  return found;
}

// Fills view, whose t is that of row_tile, from what was found, by all threads and the same for all
// of them. Where there is no room for the pages of a sequence, those of the split are asked for now
// that it is known.
template <class Config>
FA_DEVICE void look(const DecodeParams& p, const Prepared& prepared,
                    Lookup<Config::kAllThreads>& found, typename Config::SharedStorage& smem,
                    View& view) {
  constexpr int kBlockN = Config::kBlockN;
  const auto share_pages = [&] {
#pragma unroll
    for (int i = 0; i < found.kPages; ++i)
      if (found.exists(i, view.pages)) smem.table[found.entry(i)] = found.pages[i];
  };
  view.first_page = 0;
  view.row = table_row(p);
  view.pages = prepared.pages_of_sequence;
  int keys_before = p.cache.capacity - p.cache.seqlen_new;
  if (looks_up(p)) {
    share_pages();
    if (threadIdx.x == 0) smem.keys_before = found.keys_before;
    __syncthreads();  // all know
    keys_before = smem.keys_before;
  }
  see_keys<Config>(p, prepared, attn::sequence_length(p.cache, keys_before), view.t);
  if (p.mask != nullptr) narrow_to_mask<Config>(p, prepared, smem, view.t);
  view.tiles = tiles_of_split(view.t, kBlockN, blockIdx.y, prepared.splits);
  if (p.cache.block_table == nullptr || prepared.pages_of_sequence > 0) return;
  const int end = min(view.tiles.end * kBlockN, view.t.end);
  view.first_page = view.tiles.begin * kBlockN >> p.cache.page_shift;
  view.row += view.first_page;
  view.pages = max(((end - 1) >> p.cache.page_shift) + 1 - view.first_page, 0);
  found.ask_for_pages(view.row + threadIdx.x, view.pages);
  share_pages();
  __syncthreads();  // the pages are there
}

// Whether what a thread finds now is not what look found.
template <int kThreads, class Storage>
FA_DEVICE bool differs(const Lookup<kThreads>& now, const View& view, const Storage& smem) {
  bool differs = threadIdx.x == 0 && now.keys_before != smem.keys_before;
#pragma unroll
  for (int i = 0; i < now.kPages; ++i)
    if (now.exists(i, view.pages)) differs |= now.pages[i] != smem.table[now.entry(i)];
  return differs;
}

// One thread's part in the copies of tiles of keys and values to the ring. The threads of a group
// of Config::CopyKv copy the rows of a tile from first_row on.
template <class Config>
struct KvLoader {
  using Copy = typename Config::CopyKv;
  // Keys in a row that start at a multiple of 16 are in one page: its size is a power of two, and
  // at least this.
  static constexpr int kRun = 16, kRunSteps = kRun / Copy::kRowStep;
  static_assert(Copy::kRows % kRun == 0 && kRun % Copy::kRowStep == 0);

  FA_DEVICE KvLoader(const DecodeParams& params, const View& what, bool rows_aligned,
                     typename Config::SharedStorage& storage, int row_of_tile)
      : p(params),
        view(what),
        smem(storage),
        aligned(rows_aligned),
        first_row(row_of_tile),
        start(0),
        key_source(nullptr),
        value_source(nullptr) {
    if constexpr (Config::kSpareRegisters) {
      const int thread = threadIdx.x % Copy::kThreads;
      start = Copy::smem_offset(thread);
      key_source = own_row(p.cache.key, p.cache.key_stride, thread);
      value_source = own_row(p.cache.value, p.cache.value_stride, thread);
    }
  }

  // By one warp, when all have issued the copies of the tiles before `tile`: the places of their
  // pages in smem.table get those kTablePages further on, in the thread's next group of copies. A
  // load for each tile would come behind the copies before it: 5 % with 131072 keys in pages of 16.
  // Copies of 4 bytes read through L1, and only here: ld_relaxed leaves nothing in it that kernels
  // before this one could have changed since.
  FA_DEVICE void refill_table(int tile) const {
    static_assert(Config::kBlockN / kRun <= 32);
    const int first = ((tile - 1) * Config::kBlockN >> p.cache.page_shift) - view.first_page;
    const int end = (tile * Config::kBlockN >> p.cache.page_shift) - view.first_page;
    const int entry = first + ptx::lane_id(), next = entry + kTablePages;
    if (entry >= 0 && entry < end && next < view.pages)
      ptx::cp_async_ca_4(ptx::smem_addr(&smem.table[entry % kTablePages]), view.row + next, true);
  }
  FA_DEVICE bool refills() const { return view.pages > kTablePages; }

  // Asks L2 for a tile. No value is taken, so that kernels before this one may still be writing.
  FA_DEVICE void prefetch(int tile) const {
    constexpr int kLines = 2 * Copy::kLines;  // of a key and its value
    for (int i = ptx::lane_id(); i < Copy::kRows * kLines; i += 32) {
      const int key = first_key(tile) + i / kLines, line = i % kLines / 2 * 64;
      if (!visible(key) || line >= p.head_dim) continue;
      const void* tensor = i % 2 == 0 ? p.cache.key : p.cache.value;
      const auto& stride = i % 2 == 0 ? p.cache.key_stride : p.cache.value_stride;
      ptx::prefetch_global_l2(static_cast<const uint16_t*>(tensor) +
                              product(view.t.kv_head_idx, stride[1]) +
                              run_offset(stride, page_of(key), key) + line);
    }
  }

  // Rows of one tile of keys, or of values, to `target`, where the rows from first_row on are.
  FA_DEVICE void load_keys(int tile, void* target) const {
    load(p.cache.key, p.cache.key_stride, key_source, tile, static_cast<unsigned char*>(target));
  }
  FA_DEVICE void load_values(int tile, void* target) const {
    load(p.cache.value, p.cache.value_stride, value_source, tile,
         static_cast<unsigned char*>(target));
  }

 private:
  FA_DEVICE int first_key(int tile) const { return tile * Config::kBlockN + first_row; }
  FA_DEVICE bool visible(int key) const { return key >= view.t.first && key < view.t.end; }

  FA_DEVICE bool starts_page(int key) const { return attn::row_in_page(p.cache, key) == 0; }

  // What the table says, or anything for a page without a key of the split. Entries come from the
  // device and nobody has checked them: none leads outside of the cache.
  FA_DEVICE uint32_t page_of(int key) const {
    if (p.cache.block_table == nullptr) return view.t.batch_idx;
    const int entry = ((key >> p.cache.page_shift) - view.first_page) % unsigned{kTablePages};
    const uint32_t page = ptx::ld_shared(ptx::smem_addr(smem.table) + 4 * entry);
    return min(page, p.cache.num_pages - 1);
  }

  // Of the product of 64-bit factors, half the instructions.
  static FA_DEVICE uint64_t product(uint32_t a, int64_t b) { return uint64_t{a} * b; }

  // The row of a tensor's first page that the thread copies of every run, and its column.
  FA_DEVICE const uint16_t* own_row(const void* tensor, const int64_t (&stride)[3],
                                    int thread) const {
    return static_cast<const uint16_t*>(tensor) + product(view.t.kv_head_idx, stride[1]) +
           product(Copy::row(thread), stride[2]) + Copy::col(thread);
  }
  // From there to the same row of a run that starts at `key`.
  FA_DEVICE uint64_t run_offset(const int64_t (&stride)[3], uint32_t page, int key) const {
    return product(page, stride[0]) + product(attn::row_in_page(p.cache, key), stride[2]);
  }

  FA_DEVICE void load(const void* tensor, const int64_t (&stride)[3], const uint16_t* kept,
                      int tile, unsigned char* target) const {
    // Where registers are few, all that is the same for every tile is found again.
    const int thread = static_cast<unsigned>(ptx::thread_index_again()) % Copy::kThreads;
    const uint32_t offset = Config::kSpareRegisters ? start : Copy::smem_offset(thread);
    const uint16_t* source = Config::kSpareRegisters ? kept : own_row(tensor, stride, thread);
    const int begin = first_key(tile);
    if (!aligned) {
      load_elements(source, stride, begin, thread, target, offset);
    } else if (begin >= view.t.first && begin + Copy::kRows <= view.t.end) {
      load_runs<true>(source, stride, begin, thread, ptx::smem_addr(target) + offset);
    } else {
      load_runs<false>(source, stride, begin, thread, ptx::smem_addr(target) + offset);
    }
  }

  template <bool kWhole>
  FA_DEVICE void load_runs(const uint16_t* source, const int64_t (&stride)[3], int begin,
                           int thread, uint32_t address) const {
    const int own = begin + Copy::row(thread);
    const uint16_t* rows = source + run_offset(stride, page_of(begin), begin);
    const auto step = [&](int i) {
      Copy::load_step(address, rows, i, Copy::col(thread), p.head_dim,
                      kWhole || visible(own + i * Copy::kRowStep));
      rows += Copy::kRowStep * stride[2];
    };
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
      const int key = begin + i * Copy::kRowStep;
      if (i > 0 && i % kRunSteps == 0 && starts_page(key))
        rows = source + product(page_of(key), stride[0]);
      step(i);
    }
  }

  FA_DEVICE void load_elements(const uint16_t* source, const int64_t (&stride)[3], int begin,
                               int thread, unsigned char* target, uint32_t offset) const {
#pragma unroll 1
    for (int i = 0; i < Copy::kSteps; ++i) {
      const int step = i * Copy::kRowStep, run = begin + step / kRun * kRun;
      const bool exists = visible(begin + step + Copy::row(thread));
      const uint16_t* row = source + run_offset(stride, exists ? page_of(run) : 0, run) +
                            product(step % kRun, stride[2]);
#pragma unroll 1
      for (int line = 0; line < Copy::kLines; ++line)
        copy_elements(target + Copy::place(offset, i, line), row + line * 64,
                      exists ? p.head_dim - Copy::col(thread) - line * 64 : 0);
    }
  }

  const DecodeParams& p;
  const View& view;
  typename Config::SharedStorage& smem;
  const bool aligned;
  const int first_row;
  // With Config::kSpareRegisters, what load would find again.
  uint32_t start;
  const uint16_t* key_source;
  const uint16_t* value_source;
};

}  // namespace fa::decode
