// mask_summary.cu: what each 64 x 64 block of a mask tensor holds, so that attention skips what is
// hidden, adds what is constant, and reads one bit where every element is 0 or -inf.
//
//   mask [batch][heads][seqlen_q][seqlen_k], by its strides ──► entries, bits; of additive masks,
//                              normal_rows and flags as well    (layout: attn/mask_summary.cuh)
//
//   one warp a block; are its rows contiguous, on 16-byte boundaries, cut off at one?
//     yes   a load is 16 bytes a lane: 8, 4 or 2 rows of elements of 1, 2 or 4 bytes     ─┐
//     no    two loads a row: a key a lane, and the 32nd after it; ballots are the bits   ─┤
//                                                                                         ▼
//     bits of the block in shared memory [64 rows][8 bytes]; lane t reads rows t and t + 32
//     votes: all elements equal to the first? │ all elements 0 or -inf? │ 0 or far?
//     one entry; the bits only where the entry sends attention to them
//
// A dimension that the mask broadcasts (stride 0) is read once. The warps of a CTA share nothing.
//
// Bounds   memory: the mask is read once. To keep up with an H200's, an SM may spend 6 instructions
//          on an element of one byte and 12 on one of two: hence the packed arithmetic below. The
//          registers leave room for 48 to 64 warps an SM, each with 3 or more loads in flight.
// Needs    sm_80 or newer.
#include <cuda_runtime.h>

#include <limits>
#include <type_traits>

#include "../attn/mask.cuh"
#include "../attn/mask_summary.cuh"
#include "launch.h"

namespace fa {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlock = kMaskSummaryBlock;
constexpr unsigned kAllLanes = 0xffffffff;

template <class Element>
constexpr bool kAdditive = !std::is_same_v<Element, uint8_t>;

using BlockBits = unsigned char[kBlock][kBlock / 8];  // [rows][keys / 8]

// A block of the mask, cut off at seqlen_q and seqlen_k, and what a lane has seen of it. Loads past
// the cut go to an element inside instead: that needs no predicates, and what such an element says
// is true of the block. Its bit is dropped at the end.
template <class Element>
struct Block {
  const Element* first;  // row 0, key 0
  int64_t row_stride, key_stride;
  int rows, keys;  // at least 1
  float bias;      // of the first element
  // A bool mask leaves the first to its bits, and has no use for the others.
  bool constant;         // all elements equal bias
  bool binary;           // all elements are 0 or -inf
  bool binary_far;       // all elements are 0, far or -inf
  uint64_t normal_rows;  // bit r: an element of row r is normal
};

// The bits of four bytes: bit i is set where byte i is not 0.
FA_DEVICE uint32_t nonzero_bytes(uint32_t bytes) {
  const uint32_t high = (((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes) & 0x80808080;
  return (high * 0x00204081) >> 28;  // bits 7, 15, 23 and 31 to 28 ... 31; no two terms meet
}

// What the elements in 16 bytes of a row say of it.
struct ChunkBits {
  uint32_t visible;  // one for each element
  bool normal;       // one of them is
};

FA_DEVICE ChunkBits scan_chunk(const uint4& chunk, Block<uint8_t>&) {
  const uint32_t visible = nonzero_bytes(chunk.x) | nonzero_bytes(chunk.y) << 4 |
                           nonzero_bytes(chunk.z) << 8 | nonzero_bytes(chunk.w) << 12;
  return {visible, false};
}

FA_DEVICE ChunkBits scan_chunk(const uint4& chunk, Block<float>& block) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  uint32_t bits = 0;
  float largest = -INFINITY;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float bias = __uint_as_float(words[e]);
    const bool visible = bias == 0.f;
    block.constant &= bias == block.bias;
    block.binary &= visible || bias == -INFINITY;
    block.binary_far &= visible || bias < attn::kSkipBias;
    bits |= static_cast<uint32_t>(visible) << e;
    largest = fmaxf(largest, bias);  // not NaN
  }
  return {bits, largest > attn::kFarBias};
}

FA_DEVICE __half2 splat(__half v) { return __half2half2(v); }
FA_DEVICE __nv_bfloat162 splat(__nv_bfloat16 v) { return __bfloat162bfloat162(v); }

// The largest numbers that are below a limit which has no exact one: of kFarBias -inf and -100352,
// of kSkipBias -inf and -1.0003e30.
FA_DEVICE __half2 largest_below(float limit, __half) { return splat(__float2half_rd(limit)); }
FA_DEVICE __nv_bfloat162 largest_below(float limit, __nv_bfloat16) {
  return splat(__float2bfloat16_rd(limit));
}

template <class Element>  // of 16 bits
FA_DEVICE ChunkBits scan_chunk(const uint4& chunk, Block<Element>& block) {
  const auto first = splat(static_cast<Element>(block.bias)),
             zero = splat(static_cast<Element>(0.f));
  const auto hidden = splat(static_cast<Element>(-INFINITY)),
             far = largest_below(attn::kSkipBias, Element{});
  auto largest = hidden;
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  uint32_t all_equal = ~0u, all_binary = ~0u, all_binary_far = ~0u, bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto& pair = reinterpret_cast<decltype(first)&>(words[i]);
    const uint32_t visible = __heq2_mask(pair, zero);
    all_equal &= __heq2_mask(pair, first);
    all_binary &= visible | __heq2_mask(pair, hidden);
    all_binary_far &= visible | __hle2_mask(pair, far);
    bits |= visible & (0x00020001 << 2 * i);
    largest = __hmax2(largest, pair);  // not NaN
  }
  block.constant &= all_equal == ~0u;
  block.binary &= all_binary == ~0u;
  block.binary_far &= all_binary_far == ~0u;
  return {(bits | bits >> 16) & 0xff,
          __hgt2_mask(largest, largest_below(attn::kFarBias, Element{})) != 0};
}

// For rows that are contiguous and start on 16-byte boundaries, if no 16 bytes lie across seqlen_k.
template <class Element>
FA_DEVICE void scan_chunks(Block<Element>& block, BlockBits& sBits, int lane) {
  constexpr int kElements = 16 / sizeof(Element), kChunks = kBlock / kElements;  // of a row
  constexpr int kRows = 32 / kChunks, kBatch = 8;  // rows of a load, loads of a lane
  const int chunk = lane % kChunks, lane_row = lane / kChunks;
  const Element* source = block.first + min(lane_row, block.rows - 1) * block.row_stride +
                          min(chunk * kElements, block.keys - kElements);
#pragma unroll 1
  for (int first = 0; first < block.rows; first += kBatch * kRows) {
    uint4 chunks[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      chunks[i] = __ldg(reinterpret_cast<const uint4*>(source));
      if (first + lane_row + (i + 1) * kRows < block.rows) source += kRows * block.row_stride;
    }
    uint32_t normal_rows = 0;  // bit i * kRows: of the row of load i
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      auto [bits, normal] = scan_chunk(chunks[i], block);
      if constexpr (kAdditive<Element>) normal_rows |= static_cast<uint32_t>(normal) << i * kRows;
      unsigned char* row_bits = sBits[first + lane_row + i * kRows];
      if constexpr (kElements == 16) {
        *reinterpret_cast<uint16_t*>(row_bits + 2 * chunk) = static_cast<uint16_t>(bits);
      } else if constexpr (kElements == 8) {
        row_bits[chunk] = static_cast<unsigned char>(bits);
      } else {
        bits |= __shfl_down_sync(kAllLanes, bits, 1) << 4;
        if (chunk % 2 == 0) row_bits[chunk / 2] = static_cast<unsigned char>(bits);
      }
    }
    if constexpr (kAdditive<Element>)
      block.normal_rows |= uint64_t{normal_rows} << (first + lane_row);
  }
}

// For any strides.
template <class Element>
FA_DEVICE void scan_elements(Block<Element>& block, BlockBits& sBits, int lane) {
  constexpr int kBatch = 8;  // rows
  const Element* source = block.first + min(lane, block.keys - 1) * block.key_stride;
  const int64_t to_second =
      (min(lane + 32, block.keys - 1) - min(lane, block.keys - 1)) * block.key_stride;
#pragma unroll 1
  for (int first = 0; first < block.rows; first += kBatch) {
    Element elements[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      elements[i][0] = __ldg(source);
      elements[i][1] = __ldg(source + to_second);
      if (first + i + 1 < block.rows) source += block.row_stride;
    }
    uint32_t normal_rows = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      uint32_t words[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float bias = attn::mask_bias(elements[i][half]);
        const bool visible = bias == 0.f;
        if constexpr (kAdditive<Element>) {
          block.constant &= bias == block.bias;
          block.binary &= visible || bias == -INFINITY;
          block.binary_far &= visible || bias < attn::kSkipBias;
          normal_rows |= static_cast<uint32_t>(bias > attn::kFarBias) << i;
        }
        words[half] = __ballot_sync(kAllLanes, visible);
      }
      if (lane == 0) *reinterpret_cast<uint2*>(sBits[first + i]) = make_uint2(words[0], words[1]);
    }
    if constexpr (kAdditive<Element>) block.normal_rows |= uint64_t{normal_rows} << first;
  }
}

// What attention needs to know to leave out far blocks. entry: of this block, in lane 0.
template <class Element>
FA_DEVICE void store_normal_rows(const Block<Element>& block, const attn::MaskSummaryShape& shape,
                                 void* scratch, unsigned block_idx, float entry, int lane) {
  const uint32_t low = static_cast<uint32_t>(block.normal_rows),
                 high = static_cast<uint32_t>(block.normal_rows >> 32);
  uint64_t rows = __reduce_or_sync(kAllLanes, low) | uint64_t{__reduce_or_sync(kAllLanes, high)}
                                                         << 32;
  if (shape.rows == 1) rows = rows & 1 ? ~uint64_t{0} : 0;  // it stands for all
  if (block.rows < kBlock && shape.rows > 1) rows |= ~uint64_t{0} << block.rows;
  if (lane != 0) return;
  shape.normal_rows(scratch)[block_idx] = rows;
  if (attn::is_far(entry) && entry != -INFINITY) shape.flags(scratch)->far = 1;
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    mask_summary_kernel(const __grid_constant__ FwdParams p, unsigned num_blocks,
                        bool rows_aligned) {
  __shared__ __align__(16) BlockBits sBits[kWarps];
  const int warp = ptx::warp_id(), lane = ptx::lane_id();
  const unsigned block_idx = blockIdx.x * kWarps + warp;
  if (block_idx >= num_blocks) return;

  const attn::MaskSummaryShape shape(p);
  const unsigned key_blocks = shape.key_blocks, row_blocks = shape.row_blocks, heads = shape.heads;
  const unsigned key_block = block_idx % key_blocks, block_row = block_idx / key_blocks;
  const unsigned row_block = block_row % row_blocks, slice = block_row / row_blocks;
  const int row_begin = row_block * kBlock, key_begin = key_block * kBlock;

  Block<Element> block;
  block.row_stride = p.mask_stride[2];
  block.key_stride = p.mask_stride[3];
  block.first = static_cast<const Element*>(p.mask) + slice / heads * p.mask_stride[0] +
                slice % heads * p.mask_stride[1] + row_begin * block.row_stride +
                key_begin * block.key_stride;
  block.rows = min(kBlock, shape.rows - row_begin);
  // One broadcast key stands for 64, which all read it.
  block.keys = block.key_stride ? min(kBlock, p.seqlen_k - key_begin) : kBlock;
  block.bias = attn::mask_bias(__ldg(block.first));
  block.constant = block.binary = block.binary_far = true;
  block.normal_rows = 0;
  if (rows_aligned && block.keys % (16 / sizeof(Element)) == 0) {
    scan_chunks(block, sBits[warp], lane);
  } else {
    scan_elements(block, sBits[warp], lane);
  }
  __syncwarp();  // all lanes have written their bits; below, others read them

  const uint64_t inside = ~uint64_t{0} >> (kBlock - block.keys);
  uint64_t bits[2];  // of rows lane and lane + 32
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane + 32 * i;
    bits[i] = *reinterpret_cast<const uint64_t*>(sBits[warp][row]) & inside;
    if constexpr (!kAdditive<Element>)
      block.constant &= row >= block.rows || bits[i] == (block.bias == 0.f ? inside : 0);
  }
  const bool constant = __all_sync(kAllLanes, block.constant);
  const bool binary = __all_sync(kAllLanes, block.binary);
  const float bias = block.bias == 0.f ? 0.f : block.bias;  // not -0
  const bool has_bits = !kAdditive<Element> || __all_sync(kAllLanes, block.binary_far);
  const float code = __uint_as_float(binary     ? attn::kMixedBits
                                     : has_bits ? attn::kMixedFar
                                                : attn::kMixedElements);
  const float entry = constant ? bias : code;
  if (lane == 0) static_cast<float*>(p.mask_summary)[block_idx] = entry;
  if constexpr (kAdditive<Element>)
    store_normal_rows(block, shape, p.mask_summary, block_idx, entry, lane);
  if (constant || !has_bits) return;
  auto* gBits = reinterpret_cast<uint64_t*>(static_cast<unsigned char*>(p.mask_summary) +
                                            shape.bits_offset_bytes());
  gBits += (static_cast<int64_t>(slice) * shape.rows + row_begin) * key_blocks + key_block;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane + 32 * i;
    if (row < block.rows) gBits[static_cast<int64_t>(row) * key_blocks] = bits[i];
  }
}

template <class Element>
cudaError_t launch_element(const FwdParams& p, cudaStream_t stream) {
  const attn::MaskSummaryShape shape(p);
  const int64_t blocks = shape.entries();
  if (blocks > std::numeric_limits<int>::max()) return cudaErrorInvalidConfiguration;
  if (shape.additive) {
    if (const cudaError_t status =
            cudaMemsetAsync(shape.flags(p.mask_summary), 0, sizeof(attn::SkipFlags), stream);
        status != cudaSuccess) {
      return status;
    }
  }
  constexpr int64_t kElements = 16 / sizeof(Element);
  const bool rows_aligned = reinterpret_cast<uintptr_t>(p.mask) % 16 == 0 &&
                            p.mask_stride[0] % kElements == 0 &&
                            p.mask_stride[1] % kElements == 0 &&
                            p.mask_stride[2] % kElements == 0 && p.mask_stride[3] == 1;
  mask_summary_kernel<Element>
      <<<static_cast<unsigned>((blocks + kWarps - 1) / kWarps), kThreads, 0, stream>>>(
          p, static_cast<unsigned>(blocks), rows_aligned);
  const cudaError_t status = cudaGetLastError();
  return shape.additive && status == cudaSuccess ? launch_value_range(p, stream) : status;
}

}  // namespace

int64_t mask_summary_bytes(const FwdParams& params) {
  return attn::MaskSummaryShape(params).total_bytes();
}

cudaError_t launch_mask_summary(const FwdParams& params, cudaStream_t stream) {
  switch (params.mask_dtype) {
    case MaskDtype::kBool:
      return launch_element<uint8_t>(params, stream);
    case MaskDtype::kFloat32:
      return launch_element<float>(params, stream);
    case MaskDtype::kElement:
      return params.dtype == Dtype::kFloat16 ? launch_element<__half>(params, stream)
                                             : launch_element<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fa
