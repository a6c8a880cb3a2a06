// What the two directions of the CPU backend share: GEMM and exponential on tiles, masks, and a
// block of query rows that knows which keys it sees.
#pragma once
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/exp_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "checks.h"

namespace fa {

template <typename T>
constexpr T kInf = std::numeric_limits<T>::infinity();

// Memory as a matrix for ATen, which has no const tensors; only outputs are written.
template <typename T>
at::Tensor matrix(const T* data, int64_t rows, int64_t cols, int64_t row_stride) {
  return at::from_blob(const_cast<T*>(data), {rows, cols}, {row_stride, 1},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
}

// The functions of at::cpu are the CPU kernels without the dispatcher, whose cost would show on
// small tiles.

// c = a @ b + beta * c
inline void gemm(at::Tensor c, const at::Tensor& a, const at::Tensor& b, double beta) {
  at::cpu::addmm_outf(c, a, b, beta, /*alpha=*/1, c);
}

inline void exp_inplace(at::Tensor x) { at::cpu::exp_(x); }

// Folds x[0, n) with combine, in independent lanes: that fills vector registers, and no step waits
// for the one before.
template <typename T, typename Combine>
T reduce(const T* x, int64_t n, T start, Combine combine) {
  constexpr int kLanes = 32;
  T lanes[kLanes];
  std::fill_n(lanes, kLanes, start);
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = combine(x[j + i], lanes[i]);
  }
  for (int i = 0; j < n; ++i, ++j) lanes[i] = combine(x[j], lanes[i]);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = combine(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

// Largest element that is not NaN. NaN needs no care here: it survives the exponential and shows
// in the sum.
template <typename T>
T row_max(const T* x, int64_t n) {
  return reduce(x, n, -kInf<T>, [](T a, T b) { return a > b ? a : b; });
}

template <typename T>
T row_sum(const T* x, int64_t n) {
  return reduce(x, n, T(0), [](T a, T b) { return a + b; });
}

// bias[j] = what the mask adds to the score of key j.
template <typename T, typename M>
void read_mask(const M* mask, int64_t stride, int64_t n, T* bias) {
  for (int64_t j = 0; j < n; ++j) {
    if constexpr (std::is_same_v<M, uint8_t>) {  // a bool mask
      bias[j] = mask[j * stride] ? T(0) : -kInf<T>;
    } else {
      bias[j] = static_cast<T>(mask[j * stride]);
    }
  }
}

template <typename T>
void read_mask_row(const at::Tensor& mask, int64_t offset, int64_t n, T* bias) {
  const int64_t stride = mask.stride(3);
  switch (mask.scalar_type()) {
    case at::kBool:
      // As bytes: a bool tensor viewed from other memory may hold more than 0 and 1.
      return read_mask(static_cast<const uint8_t*>(mask.const_data_ptr()) + offset, stride, n,
                       bias);
    case at::kHalf:
      return read_mask(mask.const_data_ptr<at::Half>() + offset, stride, n, bias);
    case at::kBFloat16:
      return read_mask(mask.const_data_ptr<at::BFloat16>() + offset, stride, n, bias);
    case at::kFloat:
      return read_mask(mask.const_data_ptr<float>() + offset, stride, n, bias);
    default:
      return read_mask(mask.const_data_ptr<double>() + offset, stride, n, bias);
  }
}

// A hidden key is hidden whatever its score, NaN included. Two loops, because compilers do not put
// a conditional addition into vector registers.
template <typename T>
void add_mask(const T* bias, int64_t n, T* s) {
  for (int64_t j = 0; j < n; ++j) s[j] += bias[j];
  for (int64_t j = 0; j < n; ++j) s[j] = bias[j] == -kInf<T> ? bias[j] : s[j];
}

// A numerator of the softmax below this is as good as 0: the largest of its row is 1. Scores are
// clamped to it, since vector libraries take underflow and -inf one element at a time.
template <typename T>
constexpr T kNegligible = 4 * std::numeric_limits<T>::min();

// Returns whether anything was clamped. Keeps NaN.
template <typename T>
bool shift_and_clamp(T shift, int64_t n, T* s) {
  const T lowest = std::log(kNegligible<T>) - T(0.5);
  unsigned clamped = 0;  // a count, which compilers can add up in vector registers
  for (int64_t j = 0; j < n; ++j) {
    const T x = s[j] - shift;
    clamped += lowest > x;
    s[j] = lowest > x ? lowest : x;
  }
  return clamped > 0;
}

// Numerators that were clamped are exactly 0, whatever value they meet. Keeps NaN.
template <typename T>
void drop_negligible(int64_t n, T* p) {
  for (int64_t j = 0; j < n; ++j) p[j] = p[j] < kNegligible<T> ? T(0) : p[j];
}

// A GEMM operand: in the type of the arithmetic, with rows that BLAS can address. Half types are
// converted once here, which costs less than converting each tile for every query block.
inline at::Tensor operand(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::Tensor converted = tensor.to(dtype);
  const bool rows_fit = converted.stride(3) == 1 && converted.stride(2) >= converted.size(3);
  return rows_fit ? converted : converted.contiguous();
}

inline void check_dtype(const at::Tensor& query) {
  const at::ScalarType dtype = query.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "query: dtype must be float16, bfloat16, float32 or float64, got ", dtype);
}

// The rows [row_begin, row_begin + rows) of one query head. T is the type of all arithmetic.
template <typename T>
class QueryBlock {
 protected:
  explicit QueryBlock(const Problem& problem) : p_(problem) {}

  // The band: row sees the keys from first_visible(row) up to, not including, end_visible(row).
  int64_t first_visible(int64_t row) const { return row + p_.diagonal - p_.window_left; }
  int64_t end_visible(int64_t row) const { return row + p_.diagonal + p_.window_right + 1; }

  at::Tensor rows_of(const at::Tensor& tensor, int64_t head, int64_t row, int64_t rows) const {
    const T* data = tensor.const_data_ptr<T>() + batch_idx_ * tensor.stride(0) +
                    head * tensor.stride(1) + row * tensor.stride(2);
    return matrix(data, rows, p_.head_dim, tensor.stride(2));
  }

  // Whether some row may not see some key of the tile.
  bool needs_mask(int64_t n, int64_t cols) const {
    return p_.mask_mode == MaskMode::kTensor || n < first_visible(row_begin_ + rows_ - 1) ||
           n + cols > end_visible(row_begin_);
  }

  // Writes -inf to the columns of the tile at key n that row i of the block does not see. Returns
  // the columns that it sees, [first, end).
  std::pair<int64_t, int64_t> hide_band(int64_t n, int64_t cols, int64_t i, T* x) const {
    const int64_t first = std::clamp<int64_t>(first_visible(row_begin_ + i) - n, 0, cols);
    const int64_t end = std::clamp<int64_t>(end_visible(row_begin_ + i) - n, first, cols);
    std::fill(x, x + first, -kInf<T>);
    std::fill(x + end, x + cols, -kInf<T>);
    return {first, end};
  }

  // Fills tile [rows, cols] with what the mask tensor adds to the scores, -inf outside of the band.
  // Returns whether any row sees any key.
  bool load_mask(int64_t n, int64_t cols, T* tile) const {
    bool visible = false;
    for (int64_t i = 0; i < rows_; ++i) {
      T* bias = tile + i * cols;
      const auto [first, end] = hide_band(n, cols, i, bias);
      const int64_t offset = batch_idx_ * p_.mask.stride(0) + head_idx_ * p_.mask.stride(1) +
                             (row_begin_ + i) * p_.mask.stride(2) + (n + first) * p_.mask.stride(3);
      read_mask_row(p_.mask, offset, end - first, bias + first);
      visible = visible ||
                std::any_of(bias + first, bias + end, [](T value) { return value != -kInf<T>; });
    }
    return visible;
  }

  const Problem& p_;
  int64_t batch_idx_ = 0;
  int64_t head_idx_ = 0;
  int64_t row_begin_ = 0;
  int64_t rows_ = 0;
};

}  // namespace fa
