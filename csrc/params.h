// The plain structs that cross the wall between the op layer and the kernels: pointers, strides and
// sizes. Plain C++ without torch or CUDA, so that both sides and their tests can include it.
#pragma once
#include <cstdint>

namespace fa {

enum class Dtype : int { kFloat16, kBFloat16 };

// How a score gets masked. Kernels may treat kFull as an unlimited band; everything finer is
// decided at run time.
enum class MaskMode : int {
  kFull,    // every key below seqlen_k is visible
  kBand,    // window_left / window_right around the diagonal; causal is the band (unlimited, 0)
  kTensor,  // a mask tensor, together with the band above (which may be unlimited)
};

enum class MaskDtype : int {
  kBool,     // 1 byte, nonzero = take part
  kElement,  // additive, in the dtype of query
  kFloat32,  // additive
};

// Rows and keys of a block of FwdParams::mask_summary.
constexpr int kMaskSummaryBlock = 64;

// Kernels scale scores into base 2.
constexpr float kLog2E = 1.4426950408889634f;

// "No limit" for window_left and window_right. Small enough that row + window never overflows an
// int64_t.
constexpr int64_t kUnlimited = int64_t{1} << 40;

// A block of rows (forward) or of keys (backward) of a sequence.
struct PackedTile {
  int sequence;
  int block;
};

// Sequences of several lengths, one behind the other in tensors without a batch dimension. Lengths
// are read on the device only, so that a captured graph can be replayed with others; whatever they
// are, nothing outside of the tensors is touched. Rows before the first sequence and behind the
// last are padding: see attn/packed.cuh. All null and 0 where all sequences have the same length.
struct PackedSequences {
  const int* cu_seqlens_q;  // [batch + 1], where the rows of each begin, and where the last ends
  const int* cu_seqlens_k;  // [batch + 1]
  const int* seqused_k;     // [batch], keys of each that take part; null: all
  const PackedTile* tiles;  // the longest first, written by launch_packed_tiles
  const int* num_tiles;
  int max_tiles;  // packed_max_tiles
};

// The room that the host makes, knowing the rows of the tensors and not the lengths: every sequence
// may end in a block that is not whole, and so may the padding at the front and at the end.
constexpr int64_t packed_max_tiles(int64_t total, int64_t batch, int block) {
  return total / block + batch + 2;
}
constexpr int64_t packed_scratch_rows(int64_t total_q, int64_t batch, int block_m) {
  return packed_max_tiles(total_q, batch, block_m) * block_m;
}

// Forward. All strides count elements. The last dimension of query, key, value and out has
// stride 1. Rows of query, key and value start on 16-byte boundaries (pointer and strides), and
// where head_dim is no multiple of 8 they go on with zeros to the next one; rows of out may start
// anywhere.
struct FwdParams {
  const void* query;  // [batch, heads_q, seqlen_q, head_dim]
  const void* key;    // [batch, heads_k, seqlen_k, head_dim]
  const void* value;  // [batch, heads_k, seqlen_k, head_dim]
  const void* mask;   // [batch, heads_q, seqlen_q, seqlen_k], broadcast dimensions have stride 0;
                      // null without mask
  void* out;          // [batch, heads_q, seqlen_q, head_dim]
  float* lse;         // [batch, heads_q, seqlen_q], contiguous, natural logarithm

  // Scratch for MaskMode::kTensor, on a 16-byte boundary: what each block of the mask holds, one
  // bit for each of its elements, and which blocks may be skipped; written by launch_mask_summary,
  // layout in attn/mask_summary.cuh. Null otherwise.
  void* mask_summary;

  int64_t query_stride[3];  // batch, head, row
  int64_t key_stride[3];    // batch, head, row
  int64_t value_stride[3];  // batch, head, row
  int64_t out_stride[3];    // batch, head, row
  int64_t mask_stride[4];   // batch, head, row, column

  int batch;
  int heads_q;
  int heads_k;  // divides heads_q
  int seqlen_q;
  int seqlen_k;
  int head_dim;  // 1 to 256

  float scale;  // multiplies the raw scores; any sign

  // Key j is visible to query i when  i + diagonal - window_left <= j <= i + diagonal +
  // window_right. diagonal is 0 for the top-left corner and seqlen_k - seqlen_q for the
  // bottom-right one.
  int64_t diagonal;
  int64_t window_left;   // >= 0, or kUnlimited
  int64_t window_right;  // >= 0, or kUnlimited

  Dtype dtype;
  MaskMode mask_mode;
  MaskDtype mask_dtype;

  // Packed sequences: batch counts them, seqlen_q and seqlen_k are the rows of the tensors,
  // strides of batch are 0, lse is [heads_q, seqlen_q], and the diagonal of each sequence runs into
  // its bottom-right corner, whatever stands above. No mask tensors.
  PackedSequences packed;
};

// Backward. The gradients of out = softmax(scale * query @ key^T + mask) @ value, from what forward
// saved. Rows of query, key, value, out and grad_out are as FwdParams asks of its inputs; rows of
// the gradients may start anywhere.
//
// The accumulator of grad_query is a sequence of blocks of 128 numbers, each an accumulator of
// mma.m16n8: element e of lane l at 4 l + e. See GradQueryLayout.
struct BwdParams {
  FwdParams fwd;  // out is read, lse as well; mask_summary is filled with MaskMode::kTensor

  const void* grad_out;  // [batch, heads_q, seqlen_q, head_dim]
  void* grad_query;      // [batch, heads_q, seqlen_q, head_dim]
  void* grad_key;        // [batch, heads_k, seqlen_k, head_dim]
  void* grad_value;      // [batch, heads_k, seqlen_k, head_dim]

  int64_t grad_out_stride[3];    // batch, head, row
  int64_t grad_query_stride[3];  // batch, head, row
  int64_t grad_key_stride[3];    // batch, head, row
  int64_t grad_value_stride[3];  // batch, head, row

  // Scratch in float32, on 16-byte boundaries; filled by launch_bwd_pre. rows_rounded is seqlen_q
  // rounded up to whole blocks of rows of the kernel, cols_rounded head_dim to its instance. With
  // packed sequences, batch is 1 in these shapes, and rows are as packed_scratch_rows says.
  float* delta;     // [batch, heads_q, rows_rounded], sum of out * grad_out; 0 past the end
  float* lse_log2;  // [batch, heads_q, rows_rounded], LSE in base 2, or with a mask tensor what is
                    // missing in fwd.lse: see kernels/bwd_row_sums.cu; +inf, which makes P = 0, for
                    // rows past the end and for rows that see no key
  float* grad_query_accum;  // [batch, heads_q, rows_rounded * cols_rounded], zeros
  // Deterministic only, null otherwise: how many key blocks have added to a block of query rows.
  unsigned* turns;  // [batch, heads_q, rows_rounded / block_m], zeros

  int rows_rounded;
  int cols_rounded;
};

// Keys and values of every sequence of a batch: rows of one tensor each, or spread over pages.
// Strides count elements; the last dimension has stride 1.
struct KvCache {
  void* key;    // [pages, page_size, heads_k, head_dim]; without a table, page b is sequence b
  void* value;  // [pages, page_size, heads_k, head_dim]

  // [batch, pages of a sequence]: the pages of each, in order. Those beyond its length may hold any
  // number. Null: one page a sequence.
  const int* block_table;
  const int* seqlens;  // [batch], keys in the cache before new ones; null: it is full

  int64_t key_stride[3];    // page, head, row
  int64_t value_stride[3];  // page, head, row
  int64_t block_table_stride;

  uint32_t num_pages;  // of all sequences
  int page_shift;  // a page has 2^page_shift rows; 31 where a sequence has only one, of any size
  int capacity;    // of a sequence; lengths outside 0 to capacity are clamped
  int seqlen_new;  // appended to every sequence by this call: they count, see launch_append_kv
};

// Attention of few queries over many keys.
struct DecodeParams {
  KvCache cache;
  const void* query;  // [batch, heads_q, seqlen_q, head_dim], by its strides
  void* out;          // [batch, heads_q, seqlen_q, head_dim], by its strides
  float* lse;         // [batch, heads_q, seqlen_q], contiguous, natural logarithm

  // What the splits of the keys contribute, for num_splits > 1: each its own softmax over its keys,
  // and what is known of its sum (attn::PartSum). On 16-byte boundaries; cols_rounded is that of
  // describe_decode. Null: the CTAs of the splits are a cluster and merge there; decode_clusters
  // says how many run at once.
  float* partial_out;   // [batch, heads_q, seqlen_q, num_splits, cols_rounded]
  float* partial_sums;  // [batch, heads_q, seqlen_q, num_splits, 2]

  // [batch, seqlen_q, capacity], for all heads, columns with stride 1: bytes, nonzero = take part,
  // beside the band. Keys before the first and behind the last that a tile's rows see are not read.
  // Null without mask.
  const void* mask;

  int64_t query_stride[3];  // batch, head, row
  int64_t out_stride[3];    // batch, head, row
  int64_t mask_stride[2];   // batch, row

  int batch;
  int heads_q;
  int heads_k;  // divides heads_q
  int seqlen_q;
  int head_dim;  // 1 to 256
  int num_splits;
  bool zero_tails;  // rows of query, key and value are as FwdParams asks, also where head_dim is no
                    // multiple of 8; otherwise they may start and end anywhere

  float scale;  // multiplies the raw scores; any sign

  // As in FwdParams, with diagonal = (keys of the sequence) - seqlen_q + diagonal_shift: 0 is the
  // bottom-right corner.
  int64_t diagonal_shift;
  int64_t window_left;   // >= 0, or kUnlimited
  int64_t window_right;  // >= 0, or kUnlimited

  Dtype dtype;
};

// Whether rows of 16-bit elements start on 16-byte boundaries.
inline bool in_pieces(const void* pointer, const int64_t (&stride)[3]) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride[0] % 8 == 0 &&
         stride[1] % 8 == 0 && stride[2] % 8 == 0;
}

// Whether those of query, key and value do and consist of whole pieces of 16 bytes.
inline bool inputs_in_pieces(const DecodeParams& p) {
  return (p.head_dim % 8 == 0 || p.zero_tails) && in_pieces(p.query, p.query_stride) &&
         in_pieces(p.cache.key, p.cache.key_stride) &&
         in_pieces(p.cache.value, p.cache.value_stride);
}

// New keys and values, written behind those that are there.
struct AppendParams {
  KvCache cache;
  const void* new_key;    // [batch, heads_k, seqlen_new, head_dim], by its strides
  const void* new_value;  // [batch, heads_k, seqlen_new, head_dim], by its strides

  int64_t new_key_stride[3];    // batch, head, row
  int64_t new_value_stride[3];  // batch, head, row

  int batch;
  int heads_k;
  int head_dim;
};

}  // namespace fa
