// Which calls of fa::forward are decoding, and how decoding splits its keys: pure functions of the
// problem and the device.
#pragma once
#include "heuristics.h"

namespace fa {

inline LaunchFeatures launch_features(const Device& device) {
  return FA_WITH_SM90A && device.compute_capability == 90 ? LaunchFeatures::kSm90
                                                          : LaunchFeatures::kSm80;
}

// Those of decode.cu, two CTAs to an SM or one, and that of decode_sm90.cu.
enum class DecodeKernel { kSmall, kLarge, kHopper };

// Which of the decoding kernels takes a call, its tile, and how the keys are split.
struct DecodeChoice {
  DecodeKernel kernel;
  DecodeShape shape;
  int num_splits = 1;
  bool in_cluster = false;  // the splits merge in the kernel itself
};

inline int64_t rows_of(const DecodeParams& p) {
  return int64_t{p.seqlen_q} * (p.heads_q / p.heads_k);
}

// wgmma has 64 rows: up to 32, mma.sync does as well, and reads from memory take longer.
inline DecodeChoice choose_decode(const DecodeParams& p, const Device& device) {
  const LaunchFeatures features = launch_features(device);
  const int rows = static_cast<int>(rows_of(p));
#if FA_WITH_SM90A
  if (features == LaunchFeatures::kSm90 && rows > 32 && p.head_dim <= 128 && p.scale > 0.f &&
      inputs_in_pieces(p)) {
    return {DecodeKernel::kHopper, describe_decode_sm90(p.head_dim, rows)};
  }
#endif
  const bool large = features == LaunchFeatures::kSm90;
  return {large ? DecodeKernel::kLarge : DecodeKernel::kSmall,
          describe_decode(p.head_dim, rows, large)};
}

constexpr int64_t kMaxSplits = 128;

// Splits that depend on neither the batch nor the device: one for every 512 keys, fewer where many
// rows would make many partial results.
inline int invariant_splits(int64_t rows, int64_t keys) {
  const int64_t most = std::clamp<int64_t>(4096 / rows, 1, kMaxSplits);
  return static_cast<int>(std::clamp<int64_t>((keys + 511) / 512, 1, most));
}

// Whether so many splits can be a cluster. All have to run at once: of the SMs they leave more idle
// than single CTAs do.
inline bool merges_in_cluster(const DecodeChoice& choice, const DecodeParams& p, int64_t splits,
                              const Device& device) {
  if (choice.kernel != DecodeKernel::kLarge || splits == 1 || splits > kMaxCluster) return false;
  const int rows = static_cast<int>(rows_of(p));
  const int64_t tiles = (rows + choice.shape.kernel.block_m - 1) / choice.shape.kernel.block_m;
  const int64_t clusters = int64_t{p.batch} * p.heads_k * tiles;
  return clusters <= decode_clusters(p.head_dim, rows, static_cast<int>(splits), /*large=*/true);
}

// Where every SM gets several CTAs, one after the other, two at once fill each other's gaps: 2 % on
// an H200, 6 % with 512 keys. Not if more than 15 % of the places would be empty in the last round:
// an SM with one of them has half as many keys in flight. And not below three for each SM, where it
// makes no difference.
inline void consider_small(DecodeChoice& choice, const DecodeParams& p, const Device& device) {
  const int64_t rows = rows_of(p);
  if (choice.kernel != DecodeKernel::kLarge || choice.num_splits > 1 || rows > kMaxSmallRows)
    return;
  const int64_t ctas = int64_t{p.batch} * p.heads_k, at_once = 2 * std::max(device.num_sms, 1);
  const int64_t places = (ctas + at_once - 1) / at_once * at_once;
  if (2 * ctas < 3 * at_once || 20 * places > 23 * ctas) return;
  choice.kernel = DecodeKernel::kSmall;
  choice.shape = describe_decode(p.head_dim, static_cast<int>(rows), /*large=*/false);
}

// The number of splits of `keys` with the least estimated time on an H200; other devices differ by
// a factor, mostly. Units are microseconds: a tile takes its time alone, or its share of the
// memory's bandwidth when as many CTAs run as there are SMs, and near both, more than either; a CTA
// starts and ends, and so does a merge. Fitted to the times of 1 to 64 splits of nine problems.
inline void choose_splits(DecodeChoice& choice, const DecodeParams& p, int64_t keys,
                          const Device& device) {
  const KernelShape& tile = choice.shape.kernel;
  const int cols = choice.shape.cols_rounded;
  const int64_t rows = rows_of(p), heads = int64_t{p.batch} * p.heads_k;
  constexpr double kBytesPerUs = 4.5e6, kStart = 2.2, kMerge = 2.3, kMergeInCluster = 1.1,
                   kMergeBytesPerUs = 3e6;
  const double tile_bytes = 4.0 * tile.block_n * cols;
  const double alone = tile_bytes / 65536 *
                       (tile.block_m <= 32                       ? 1.1
                        : choice.kernel == DecodeKernel::kHopper ? tile.block_m == 64 ? 1.2 : 1.6
                        : tile.block_m == 64                     ? 2.2
                                                                 : 3.9);
  const int64_t ctas_each = heads * ((rows + tile.block_m - 1) / tile.block_m);
  const int64_t tiles = std::max<int64_t>((keys + tile.block_n - 1) / tile.block_n, 1);
  const int64_t sms = std::max(device.num_sms, 1);
  const auto tile_us = [&](int64_t running) {
    const double share = static_cast<double>(running) * tile_bytes / kBytesPerUs;
    const double a = alone * alone, b = share * share;
    return std::sqrt(std::sqrt(a * a + b * b));
  };
  const int64_t most = std::min({tiles, kMaxSplits, std::max<int64_t>(1, 4 * sms / ctas_each)});
  double least = 0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t ctas = ctas_each * splits, waves = ctas / sms, rest = ctas % sms;
    const auto tiles_each = static_cast<double>((tiles + splits - 1) / splits);
    double us = static_cast<double>(waves) * (tiles_each * tile_us(sms) + kStart);
    if (rest > 0) us += tiles_each * tile_us(rest) + kStart;
    const bool in_cluster = merges_in_cluster(choice, p, splits, device);
    if (in_cluster) {
      us += kMergeInCluster;
    } else if (splits > 1) {
      const double partial_bytes =
          8.0 * static_cast<double>(heads) * static_cast<double>(rows * splits) * cols;
      us += kMerge + partial_bytes / kMergeBytesPerUs;
    }
    if (splits == 1 || us < least) {
      least = us;
      choice.num_splits = static_cast<int>(splits);
      choice.in_cluster = in_cluster;
    }
  }
  consider_small(choice, p, device);
}

// fa::forward as decoding, but for the splits: the keys of a sequence are its cache, which is full.
inline DecodeParams as_decode(const FwdParams& p) {
  DecodeParams d{};
  d.cache.key = const_cast<void*>(p.key);
  d.cache.value = const_cast<void*>(p.value);
  d.cache.num_pages = p.batch;
  d.cache.page_shift = 31;
  d.cache.capacity = p.seqlen_k;
  d.query = p.query;
  d.out = p.out;
  d.lse = p.lse;
  for (int i = 0; i < 3; ++i) {
    d.cache.key_stride[i] = p.key_stride[i];
    d.cache.value_stride[i] = p.value_stride[i];
    d.query_stride[i] = p.query_stride[i];
    d.out_stride[i] = p.out_stride[i];
  }
  d.batch = p.batch;
  d.heads_q = p.heads_q;
  d.heads_k = p.heads_k;
  d.seqlen_q = p.seqlen_q;
  d.head_dim = p.head_dim;
  d.num_splits = 1;
  d.zero_tails = true;
  d.scale = p.scale;
  d.diagonal_shift = p.diagonal - (int64_t{p.seqlen_k} - p.seqlen_q);
  d.window_left = p.window_left;
  d.window_right = p.window_right;
  d.dtype = p.dtype;
  if (p.mask_mode == MaskMode::kTensor) {
    d.mask = p.mask;
    d.mask_stride[0] = p.mask_stride[0];
    d.mask_stride[1] = p.mask_stride[2];
  }
  return d;
}

// Keys that some query sees, as far as the band tells.
inline int64_t visible_keys(const FwdParams& p) {
  const auto key = [&](int64_t k) { return std::clamp<int64_t>(k, 0, p.seqlen_k); };
  const int64_t bottom = p.seqlen_q - 1 + p.diagonal;
  return std::max<int64_t>(key(bottom + p.window_right + 1) - key(p.diagonal - p.window_left), 0);
}

// Whether the decoding kernels take the mask tensor: bool, and the same for all heads, as those of
// a padded batch or of a static cache are. Every CTA reads all of it: not for many queries.
inline bool masks_keys(const FwdParams& p) {
  return p.mask_dtype == MaskDtype::kBool && (p.heads_q == 1 || p.mask_stride[1] == 0) &&
         (p.seqlen_k == 1 || p.mask_stride[3] == 1) && p.seqlen_q <= 8;
}

// Why fa::forward takes the decoding kernels, which read the keys of a group of query heads once
// and can split them; null where the forward kernels are as good or the only ones.
inline const char* reason_to_decode(const FwdParams& p, const Device& device) {
  constexpr int kMaxGrid = 65535;
  if (p.mask_mode == MaskMode::kTensor && !masks_keys(p)) return nullptr;
  if (p.batch > kMaxGrid || p.heads_q > kMaxGrid) return nullptr;
  const int64_t group = p.heads_q / p.heads_k, rows = p.seqlen_q * group;
  if (int64_t{p.seqlen_q} * p.heads_q > kMaxSeqlen) return nullptr;
  const int64_t heads = int64_t{p.batch} * p.heads_q, keys = visible_keys(p);
  // Without a group both read the same, and the forward kernels overlap the end of a tile with the
  // start of the next.
  if (group == 1 && heads >= device.num_sms && (p.seqlen_q > 16 || keys <= 512)) return nullptr;
  if (rows <= 128) return "few queries";
  // A chunk of queries beside many more keys: the tiles of the forward kernels, of 128 rows and all
  // keys, would leave most of the GPU idle.
  const int64_t tiles = heads * ((p.seqlen_q + 127) / 128);
  if (2 * tiles <= device.num_sms && keys >= 4 * std::max(p.seqlen_q, 512)) {
    return "few tiles of queries, many keys";
  }
  return nullptr;
}

}  // namespace fa
