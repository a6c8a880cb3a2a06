// Merging parts of a row of attention, each a softmax over its own keys: the result over all keys
// is their mean, weighted by the sums of their exponentials.
#pragma once
#include "../ptx/sm80.cuh"

namespace fa::attn {

// What a part has of its softmax. Not its LSE, which has no digits left for the sum where scores
// are large.
struct alignas(8) PartSum {
  float max;  // the reference of its exponents, in units of the scores; -inf without keys
  float sum;  // of the exponentials relative to it; 0 without keys
};

// What the parts are taken relative to, given the largest of their references. As a reference, -inf
// would make NaN of parts without keys.
FA_DEVICE float merge_reference(float max) { return max == -INFINITY ? 0.f : max; }

// What takes the exponentials of a part from its own reference to another: 0 without keys.
// scale_log2: see OnlineSoftmax.
FA_DEVICE float merge_factor(const PartSum& part, float reference, float scale_log2) {
  return part.sum == 0.f ? 0.f : ptx::ex2_approx_ftz((part.max - reference) * scale_log2);
}
// Weight of a part whose row is already divided by its sum. NaN stays NaN.
FA_DEVICE float merge_weight(const PartSum& part, float reference, float scale_log2) {
  return part.sum * merge_factor(part, reference, scale_log2);
}

// 1 / (sum of the weights); 0 where no part has keys, so that the row becomes 0.
FA_DEVICE float merge_inverse(float sum) { return sum == 0.f ? 0.f : ptx::rcp_approx_ftz(sum); }

// LSE over the keys of all parts.
FA_DEVICE float merge_lse(const PartSum& merged, float scale) {
  return merged.sum == 0.f ? -INFINITY : merged.max * scale + __logf(merged.sum);
}

}  // namespace fa::attn
