// Which kernel takes a call, and why: pure functions of the problem and the device.
#pragma once
#include <algorithm>
#include <cmath>

#include "../kernels/launch.h"

namespace fa {

struct Device {
  int compute_capability;  // 10 * major + minor
  int num_sms;
  int smem_limit_bytes;  // of a CTA, opt-in
};

struct FwdChoice {
  bool hopper;
  FwdTileShape shape;  // where hopper
  const char* reason;
};

// Of the bulk copy engine, in elements: 2^40 bytes.
constexpr int64_t kMaxTmaStride = int64_t{1} << 39;

// What stands against the Hopper kernel; null if nothing does.
inline const char* obstacle_to_sm90(const FwdParams& p, const Device& device) {
  if (!FA_WITH_SM90A) return "this build has no code for sm_90a";
  if (device.compute_capability != 90) return "the GPU is not sm_90";
  if (!(p.scale > 0.f)) return "scale is not positive";
  if (p.head_dim % 8 != 0) return "head_dim is no multiple of 8";
  // The bulk copy engine wants out in rows of 16 bytes, as the inputs are.
  if (reinterpret_cast<uintptr_t>(p.out) % 16 != 0) return "out is not 16-byte aligned";
  for (int i = 0; i < 3; ++i) {
    if (p.out_stride[i] % 8 != 0) return "rows of out are not 16-byte aligned";
    for (const int64_t stride :
         {p.query_stride[i], p.key_stride[i], p.value_stride[i], p.out_stride[i]}) {
      if (stride < 0 || stride >= kMaxTmaStride) return "a stride is 2^40 bytes or more";
    }
  }
  return nullptr;
}

#if FA_WITH_SM90A
// Clock cycles that a tile of each shape takes on an H200: a part for each key block and one for
// the rest. Fitted to the times of 24 problems of 512 to 2048 tokens.
struct TileCost {
  int per_block;
  int per_tile;
};
inline TileCost tile_cost(int head_dim, FwdTileShape shape) {
  if (head_dim <= 64) {
    return shape == FwdTileShape::kTall ? TileCost{2217, 4000} : TileCost{1666, 4500};
  }
  if (head_dim <= 128) {
    return shape == FwdTileShape::kTall   ? TileCost{1550, 3500}
           : shape == FwdTileShape::kWide ? TileCost{2142, 4500}
                                          : TileCost{1145, 3300};
  }
  return TileCost{2150, 4000};
}

// Estimated cycles of the whole grid: the share of an SM, but at least the longest tile, and whole
// rounds where all tiles are equal.
inline double estimate_cycles(const FwdParams& p, const Device& device, FwdTileShape shape) {
  const KernelShape tile = describe_fwd_sm90(p.head_dim, shape, p.mask_mode);
  const TileCost cost = tile_cost(p.head_dim, shape);
  const double heads = static_cast<double>(p.batch) * p.heads_q;
  const int64_t m_blocks = (p.seqlen_q + tile.block_m - 1) / tile.block_m;
  // A band has about the same number of keys in every row; a causal triangle grows.
  const double keys = p.seqlen_k, window = static_cast<double>(std::min<int64_t>(
                                      p.window_left + p.window_right + tile.block_m, p.seqlen_k));
  const double longest =
      cost.per_tile + cost.per_block * std::ceil(std::min(keys, window) / tile.block_n);
  const bool triangle = p.window_right < p.seqlen_k && p.window_left >= p.seqlen_k;
  if (!triangle) {
    return std::ceil(heads * static_cast<double>(m_blocks) / device.num_sms) * longest;
  }
  const double right = static_cast<double>(p.diagonal + p.window_right);
  const double first = std::clamp(right + tile.block_m, 0.0, keys),
               last = std::clamp(right + p.seqlen_q, 0.0, keys);
  const double mean_blocks = (first + last) / 2 / tile.block_n + 0.5;
  // The last tile of a head computes on the rows that it has.
  const double full_tiles = static_cast<double>(p.seqlen_q) / tile.block_m;
  const double head =
      static_cast<double>(m_blocks) * cost.per_tile + full_tiles * mean_blocks * cost.per_block;
  return std::max(longest, heads * head / device.num_sms);
}
#endif

inline FwdChoice choose_fwd(const FwdParams& p, const Device& device) {
  if (const char* obstacle = obstacle_to_sm90(p, device)) {
    return {false, FwdTileShape::kTall, obstacle};
  }
  FwdChoice best{true, FwdTileShape::kTall, "sm_90, rows that the bulk copy engine can take"};
#if FA_WITH_SM90A
  if (p.head_dim > 128 || p.mask_mode == MaskMode::kTensor) return best;  // one shape
  double cycles = estimate_cycles(p, device, best.shape);
  for (const FwdTileShape shape : {FwdTileShape::kWide, FwdTileShape::kSmall}) {
    if (shape == FwdTileShape::kSmall && p.head_dim <= 64) continue;
    if (const double other = estimate_cycles(p, device, shape); other < cycles) {
      cycles = other;
      best.shape = shape;
    }
  }
#endif
  return best;
}

struct BwdChoice {
  bool hopper;
  const char* reason;
};

inline BwdChoice choose_bwd(const BwdParams& p, const Device& device) {
  if (p.fwd.mask_mode == MaskMode::kTensor) return {false, "there is a mask tensor"};
  if (const char* obstacle = obstacle_to_sm90(p.fwd, device)) return {false, obstacle};
  for (const void* gradient : {p.grad_query, p.grad_key, p.grad_value}) {
    if (reinterpret_cast<uintptr_t>(gradient) % 16 != 0) {
      return {false, "a gradient is not 16-byte aligned"};
    }
  }
  for (int i = 0; i < 3; ++i) {
    for (const int64_t stride : {p.grad_out_stride[i], p.grad_query_stride[i], p.grad_key_stride[i],
                                 p.grad_value_stride[i]}) {
      if (stride % 8 != 0) return {false, "rows of a gradient are not 16-byte aligned"};
      if (stride < 0 || stride >= kMaxTmaStride) return {false, "a stride is 2^40 bytes or more"};
    }
  }
  return {true, "sm_90, rows that the bulk copy engine can take"};
}

}  // namespace fa
