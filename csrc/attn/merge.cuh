// Merging parts of a row of attention, each a softmax over its own keys with its LSE: the result
// over all keys is their mean with weights exp(LSE).
#pragma once
#include "../ptx/sm80.cuh"

namespace fa::attn {

// What the LSEs are taken relative to, given their maximum. As a reference, -inf would make NaN of
// parts without keys.
FA_DEVICE float merge_reference(float max_lse) { return max_lse == -INFINITY ? 0.f : max_lse; }

// Weight of a part: 0 without keys; NaN stays NaN.
FA_DEVICE float merge_weight(float lse, float reference) {
  return ptx::ex2_approx_ftz((lse - reference) * kLog2E);
}

// 1 / (sum of the weights); 0 where no part has keys, so that the row becomes 0.
FA_DEVICE float merge_inverse(float sum) { return sum == 0.f ? 0.f : ptx::rcp_approx_ftz(sum); }

// LSE over the keys of all parts.
FA_DEVICE float merge_lse(float reference, float sum) {
  return sum == 0.f ? -INFINITY : reference + __logf(sum);
}

}  // namespace fa::attn
