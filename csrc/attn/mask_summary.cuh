// What a pass over a mask tensor found in each of its blocks: the layout of
// FwdParams::mask_summary, and how attention kernels read it.
//
//   entries      float     [batch][heads][row blocks][key blocks]  one for each 64 x 64 block
//   bits         uint64_t  [batch][heads][rows][key blocks]        at the next 16-byte boundary
//   normal_rows  uint64_t  [batch][heads][row blocks][key blocks]  additive masks only
//   flags        SkipFlags                                         likewise
//
// Dimensions that the mask broadcasts (stride 0) have size 1 here.
//
// An entry is the bias that all elements of the block inside seqlen_q x seqlen_k share, in units of
// the scores: -inf hides the block, 0 leaves it as it is. Otherwise it is one of the codes below.
// Bits are there for blocks with kMixedBits and kMixedFar: bit j says that key 64 * block + j has
// bias 0 for the row. Those past seqlen_k are 0, except in a mask that broadcasts the keys, whose
// one word per row holds 64 equal bits.
//
// Blocks with an entry below kSkipBias are far. To what a row gets from a key with a normal bias,
// one above kFarBias, a far block adds exactly 0, provided that query and key are so small that
// scores do not make up for the bias, and value is finite (0 * inf is NaN). Attention may leave it
// out then:
// - bit r of normal_rows says that row r of the block has a normal element. Rows past the last one
//   have the bit; where the mask broadcasts the rows, all have that of the one row;
// - the flags say whether there is a far block (far), and whether the tensors or the scale are too
//   large (unsafe; kernels/value_range.cu, which looks at them if there is one).
// Of blocks with kMixedFar it may then take the bits for those of kMixedBits.
#pragma once
#include "../params.h"
#include "../ptx/common.cuh"

namespace fa::attn {

// Bit patterns of entries without a common bias, three quiet NaN in a row.
constexpr uint32_t kMixedBits = 0x7fc00001;      // every element is 0 or -inf
constexpr uint32_t kMixedFar = 0x7fc00002;       // every element is 0 or far, or -inf
constexpr uint32_t kMixedElements = 0x7fc00003;  // there are others, NaN included

FA_DEVICE bool is_constant(float entry) {
  return __float_as_uint(entry) - kMixedBits > kMixedElements - kMixedBits;
}
FA_DEVICE bool is_mixed_bits(float entry) { return __float_as_uint(entry) == kMixedBits; }
FA_DEVICE bool is_mixed_far(float entry) { return __float_as_uint(entry) == kMixedFar; }

// Of biases: beside those below the first, fp32 keeps little of a score, beside the second none.
constexpr float kFarBias = -1e5f, kSkipBias = -1e30f;

FA_DEVICE bool is_far(float entry) { return entry < kSkipBias; }  // false for codes

struct SkipFlags {
  uint32_t far, unsafe;
};

struct MaskSummaryShape {
  int batches, heads, rows, row_blocks, key_blocks;
  bool additive;

  __host__ __device__ constexpr explicit MaskSummaryShape(const FwdParams& p)
      : batches(p.mask_stride[0] ? p.batch : 1),
        heads(p.mask_stride[1] ? p.heads_q : 1),
        rows(p.mask_stride[2] ? p.seqlen_q : 1),
        row_blocks((rows + kMaskSummaryBlock - 1) / kMaskSummaryBlock),
        key_blocks(p.mask_stride[3] ? (p.seqlen_k + kMaskSummaryBlock - 1) / kMaskSummaryBlock : 1),
        additive(p.mask_dtype != MaskDtype::kBool) {}

  __host__ __device__ constexpr int64_t entries() const {
    return int64_t{batches} * heads * row_blocks * key_blocks;
  }
  __host__ __device__ constexpr int64_t words() const {
    return int64_t{batches} * heads * rows * key_blocks;
  }
  __host__ __device__ constexpr int64_t bits_offset_bytes() const {
    return (entries() * static_cast<int64_t>(sizeof(float)) + 15) / 16 * 16;
  }
  __host__ __device__ constexpr int64_t normal_rows_offset_bytes() const {
    return bits_offset_bytes() + words() * static_cast<int64_t>(sizeof(uint64_t));
  }
  __host__ __device__ constexpr int64_t flags_offset_bytes() const {
    return normal_rows_offset_bytes() + entries() * static_cast<int64_t>(sizeof(uint64_t));
  }
  __host__ __device__ constexpr int64_t total_bytes() const {
    return additive ? flags_offset_bytes() + static_cast<int64_t>(sizeof(SkipFlags))
                    : normal_rows_offset_bytes();
  }
  // Of additive masks: their parts of the scratch.
  __host__ __device__ uint64_t* normal_rows(void* scratch) const {
    return reinterpret_cast<uint64_t*>(static_cast<unsigned char*>(scratch) +
                                       normal_rows_offset_bytes());
  }
  __host__ __device__ SkipFlags* flags(void* scratch) const {
    return reinterpret_cast<SkipFlags*>(static_cast<unsigned char*>(scratch) +
                                        flags_offset_bytes());
  }
};

// The summary for one batch entry and head. Rows and blocks past the last one mean the last one,
// which serves broadcast dimensions and the rows of a tile past seqlen_q.
class MaskSummary {
 public:
  FA_DEVICE MaskSummary(const FwdParams& p, int batch_idx, int head_idx) {
    const MaskSummaryShape shape(p);
    const int64_t slice =
        int64_t{min(batch_idx, shape.batches - 1)} * shape.heads + min(head_idx, shape.heads - 1);
    const auto* scratch = static_cast<const unsigned char*>(p.mask_summary);
    const int64_t first_entry = slice * shape.row_blocks * shape.key_blocks;
    entries_ = reinterpret_cast<const float*>(scratch) + first_entry;
    bits_ = reinterpret_cast<const uint64_t*>(scratch + shape.bits_offset_bytes()) +
            slice * shape.rows * shape.key_blocks;
    normal_rows_ = shape.normal_rows(p.mask_summary) + first_entry;
    flags_ = shape.additive ? shape.flags(p.mask_summary) : nullptr;
    last_row_ = shape.rows - 1;
    key_blocks_ = shape.key_blocks;
  }

  FA_DEVICE float entry(int row_block, int key_block) const {
    return __ldg(entries(row_block) + min(key_block, key_blocks_ - 1));
  }
  FA_DEVICE uint64_t bits(int row, int key_block) const {
    return __ldg(bits_ + int64_t{min(row, last_row_)} * key_blocks_ +
                 min(key_block, key_blocks_ - 1));
  }
  // Whether far blocks may be left out where each row has a normal element elsewhere.
  FA_DEVICE bool may_skip() const {
    return flags_ != nullptr && flags_->far != 0 && flags_->unsafe == 0;
  }
  // Additive masks only.
  FA_DEVICE uint64_t normal_rows(int row_block, int key_block) const {
    return __ldg(normal_rows_ +
                 int64_t{min(row_block, last_row_ / kMaskSummaryBlock)} * key_blocks_ +
                 min(key_block, key_blocks_ - 1));
  }

  // The entries of a row block: [key_blocks()].
  FA_DEVICE const float* entries(int row_block) const {
    return entries_ + int64_t{min(row_block, last_row_ / kMaskSummaryBlock)} * key_blocks_;
  }
  FA_DEVICE int key_blocks() const { return key_blocks_; }

 private:
  const float* entries_;
  const uint64_t* bits_;
  const uint64_t* normal_rows_;
  const SkipFlags* flags_;
  int last_row_;
  int key_blocks_;
};

// What a mask tensor does to a block of a kernel that tells three cases apart.
enum MaskClass {
  kMaskHidden,  // nothing is visible
  kMaskMixed,
  kMaskVisible,  // everything is visible and nothing is added
};

// The key blocks that a mask tensor leaves to the query rows of one CTA, from last to first.
template <int kBlockM, int kBlockN>
class MaskedBlocks {
 public:
  FA_DEVICE MaskedBlocks(const FwdParams& p, int batch_idx, int head_idx, int row_begin) {
    const MaskSummary summary(p, batch_idx, head_idx);
    // The CTA's rows lie in one or two row blocks of the summary.
    const int row_block = row_begin / kMaskSummaryBlock;
    row_ = summary.entries(row_block);
    to_last_row_ =
        static_cast<int>(summary.entries(row_block + (kBlockM - 1) / kMaskSummaryBlock) - row_);
    varies_ = summary.key_blocks() > 1;
  }

  FA_DEVICE MaskClass classify(int block) const {
    const int key_block =
        varies_ ? static_cast<int>(static_cast<int64_t>(block) * kBlockN / kMaskSummaryBlock) : 0;
    const float a = __ldg(row_ + key_block), b = __ldg(row_ + key_block + to_last_row_);
    if (a == -INFINITY && b == -INFINITY) return kMaskHidden;
    return a == 0.f && b == 0.f ? kMaskVisible : kMaskMixed;
  }

  // The last block at or before `block` that is not hidden; below `first` if there is none.
  FA_DEVICE int visible_from(int block, int first) const {
    while (block >= first && classify(block) == kMaskHidden) --block;
    return block;
  }

 private:
  static_assert(kBlockM <= 2 * kMaskSummaryBlock && kMaskSummaryBlock % kBlockN == 0);
  const float* row_;
  int to_last_row_;
  bool varies_;
};

}  // namespace fa::attn
