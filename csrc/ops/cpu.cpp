// CPU backend of fa::forward, and the readable statement of what the op computes: the block loop
// and the online softmax of the GPU kernels in plain C++ over a GEMM. Memory beyond the inputs and
// outputs is O(seqlen).
#include <ATen/Parallel.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "checks.h"

namespace fa {
namespace {

// A tile of scores stays in the L2 cache, and is large enough for the GEMM to run at its best.
constexpr int64_t kMaxBlockM = 256;
constexpr int64_t kBlockN = 512;

// Query rows of a block: fewer where the problem is too small to give every thread a block.
int64_t choose_block_m(int64_t heads, int64_t seqlen_q, int64_t threads) {
  int64_t block_m = kMaxBlockM;
  while (block_m > 32 && heads * ((seqlen_q + block_m - 1) / block_m) < threads) block_m /= 2;
  return std::min(block_m, seqlen_q);
}

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
void gemm(at::Tensor c, const at::Tensor& a, const at::Tensor& b, double beta) {
  at::cpu::addmm_outf(c, a, b, beta, /*alpha=*/1, c);
}

void exp_inplace(at::Tensor x) { at::cpu::exp_(x); }

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

// One block of query rows against all keys that they see. T is the type of all arithmetic; query
// comes multiplied by the scale.
template <typename T>
class BlockForward {
 public:
  BlockForward(const Problem& problem, const at::Tensor& query, const at::Tensor& key,
               const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
               int64_t block_m)
      : p_(problem),
        query_(query),
        key_(key),
        value_(value),
        out_(out),
        lse_(lse),
        block_m_(block_m) {
    const int64_t cols = std::min(kBlockN, problem.seqlen_k);
    const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
    scratch_ = at::empty({block_m * (2 * cols + problem.head_dim + 2)}, options);
    scores_ = scratch_.mutable_data_ptr<T>();
    bias_ = scores_ + block_m * cols;
    acc_ = bias_ + block_m * cols;
    max_ = acc_ + block_m * problem.head_dim;
    sum_ = max_ + block_m;
  }

  void run(int64_t batch_idx, int64_t head_idx, int64_t m_block) {
    batch_idx_ = batch_idx;
    head_idx_ = head_idx;
    row_begin_ = m_block * block_m_;
    rows_ = std::min(block_m_, p_.seqlen_q - row_begin_);
    std::fill_n(acc_, rows_ * p_.head_dim, T(0));
    std::fill_n(max_, rows_, -kInf<T>);
    std::fill_n(sum_, rows_, T(0));

    // The keys that the rows of the block see together: no other key is read.
    const int64_t n_begin = std::max<int64_t>(0, first_visible(row_begin_));
    const int64_t n_end = std::min(p_.seqlen_k, end_visible(row_begin_ + rows_ - 1));
    for (int64_t n = n_begin; n < n_end; n += kBlockN) step(n, std::min(kBlockN, n_end - n));
    store();
  }

 private:
  // The band: row sees the keys from first_visible(row) up to, not including, end_visible(row).
  int64_t first_visible(int64_t row) const { return row + p_.diagonal - p_.window_left; }
  int64_t end_visible(int64_t row) const { return row + p_.diagonal + p_.window_right + 1; }

  // Online softmax: takes the keys [n, n + cols) into max_, sum_ and acc_.
  void step(int64_t n, int64_t cols) {
    const bool masked = needs_mask(n, cols);
    const bool with_tensor = p_.mask_mode == MaskMode::kTensor;
    if (with_tensor && !load_mask(n, cols)) return;

    const int64_t head_dim = p_.head_dim;
    const int64_t kv_head_idx = head_idx_ / (p_.heads_q / p_.heads_k);
    const at::Tensor query = rows_of(query_, head_idx_, row_begin_, rows_);
    const at::Tensor key = rows_of(key_, kv_head_idx, n, cols);
    const at::Tensor value = rows_of(value_, kv_head_idx, n, cols);
    const at::Tensor scores = matrix(scores_, rows_, cols, cols);
    gemm(scores, query, key.t(), /*beta=*/0);

    bool clamped = false;
    for (int64_t i = 0; i < rows_; ++i) {
      T* s = scores_ + i * cols;
      if (with_tensor) {
        add_mask(bias_ + i * cols, cols, s);
      } else if (masked) {
        hide_band(n, cols, i, s);
      }
      const T new_max = std::max(max_[i], row_max(s, cols));
      // Until a row sees its first key, its maximum is -inf: shift by 0 instead, so that its
      // numerators become 0, or NaN where a score is NaN.
      const T shift = new_max == -kInf<T> ? T(0) : new_max;
      clamped |= shift_and_clamp(shift, cols, s);
      const T correction = std::exp(max_[i] - shift);
      max_[i] = new_max;
      sum_[i] *= correction;
      for (int64_t d = 0; d < head_dim; ++d) acc_[i * head_dim + d] *= correction;
    }
    exp_inplace(scores);
    if (clamped) drop_negligible(rows_ * cols, scores_);
    for (int64_t i = 0; i < rows_; ++i) sum_[i] += row_sum(scores_ + i * cols, cols);
    gemm(matrix(acc_, rows_, head_dim, head_dim), scores, value, /*beta=*/1);
  }

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

  // Fills bias_ with what the mask tensor adds to the scores of the tile, -inf outside of the band.
  // Returns whether any row sees any key.
  bool load_mask(int64_t n, int64_t cols) {
    bool visible = false;
    for (int64_t i = 0; i < rows_; ++i) {
      T* bias = bias_ + i * cols;
      const auto [first, end] = hide_band(n, cols, i, bias);
      const int64_t offset = batch_idx_ * p_.mask.stride(0) + head_idx_ * p_.mask.stride(1) +
                             (row_begin_ + i) * p_.mask.stride(2) + (n + first) * p_.mask.stride(3);
      read_mask_row(p_.mask, offset, end - first, bias + first);
      visible = visible ||
                std::any_of(bias + first, bias + end, [](T value) { return value != -kInf<T>; });
    }
    return visible;
  }

  void store() {
    T* lse = lse_.mutable_data_ptr<T>() + (batch_idx_ * p_.heads_q + head_idx_) * p_.seqlen_q +
             row_begin_;
    T* out = out_.mutable_data_ptr<T>() + batch_idx_ * out_.stride(0) + head_idx_ * out_.stride(1) +
             row_begin_ * out_.stride(2);
    const int64_t head_dim = p_.head_dim;
    const int64_t row_stride = out_.stride(2);
    const int64_t col_stride = out_.stride(3);
    for (int64_t i = 0; i < rows_; ++i) {
      // Scores are -inf where they are hidden; NaN is not, but only the sum shows it.
      const T sum = sum_[i];
      const bool empty = max_[i] == -kInf<T> && !std::isnan(sum);
      lse[i] = empty ? -kInf<T> : max_[i] + std::log(sum);
      T* row = acc_ + i * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) row[d] = empty ? T(0) : row[d] / sum;
      for (int64_t d = 0; d < head_dim; ++d) out[i * row_stride + d * col_stride] = row[d];
    }
  }

  const Problem& p_;
  const at::Tensor& query_;
  const at::Tensor& key_;
  const at::Tensor& value_;
  const at::Tensor& out_;
  const at::Tensor& lse_;
  const int64_t block_m_;

  at::Tensor scratch_;  // the memory of the next five
  T* scores_;           // [rows, cols], then the numerators of the softmax
  T* bias_;             // [rows, cols], for MaskMode::kTensor
  T* acc_;              // [rows, head_dim]
  T* max_;              // [rows], of the scores so far
  T* sum_;              // [rows], of exp(score - max) so far

  int64_t batch_idx_;
  int64_t head_idx_;
  int64_t row_begin_;
  int64_t rows_;
};

template <typename T>
void forward_blocks(const Problem& problem, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse) {
  const int64_t heads = problem.batch * problem.heads_q;
  const int64_t block_m = choose_block_m(heads, problem.seqlen_q, at::get_num_threads());
  const int64_t m_blocks = (problem.seqlen_q + block_m - 1) / block_m;
  const int64_t items = heads * m_blocks;
  at::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
    BlockForward<T> block(problem, query, key, value, out, lse, block_m);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / m_blocks;
      block.run(head / problem.heads_q, head % problem.heads_q, item % m_blocks);
    }
  });
}

// A GEMM operand: in the type of the arithmetic, with rows that BLAS can address. Half types are
// converted once here, which costs less than converting each tile for every query block.
at::Tensor operand(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::Tensor converted = tensor.to(dtype);
  const bool rows_fit = converted.stride(3) == 1 && converted.stride(2) >= converted.size(3);
  return rows_fit ? converted : converted.contiguous();
}

void check_dtype(const at::Tensor& query) {
  const at::ScalarType dtype = query.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "query: dtype must be float16, bfloat16, float32 or float64, got ", dtype);
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& query, const at::Tensor& key,
                                               const at::Tensor& value,
                                               const std::optional<at::Tensor>& attn_mask,
                                               bool is_causal, std::optional<double> scale,
                                               int64_t window_left, int64_t window_right,
                                               bool bottom_right) {
  const Problem problem = check_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                                        window_right, bottom_right);
  check_dtype(query);

  const at::ScalarType dtype = query.scalar_type();
  const at::ScalarType compute = dtype == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor out = at::empty_like(query);
  at::Tensor lse =
      at::empty({problem.batch, problem.heads_q, problem.seqlen_q}, query.options().dtype(compute));
  if (query.numel() == 0) return {out, lse};
  const at::Tensor out_compute =
      dtype == compute ? out : at::empty(query.sizes(), query.options().dtype(compute));
  // The scale goes into query and not into the GEMM: BLAS does not look at what it multiplies by 0,
  // and would lose NaN.
  const at::Tensor q = operand(query.to(compute).mul(problem.scale), compute);
  const at::Tensor k = operand(key, compute);
  const at::Tensor v = operand(value, compute);
  if (compute == at::kDouble) {
    forward_blocks<double>(problem, q, k, v, out_compute, lse);
  } else {
    forward_blocks<float>(problem, q, k, v, out_compute, lse);
  }
  if (dtype != compute) out.copy_(out_compute);
  return {out, lse};
}

std::string forward_kernel_cpu(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                               bool is_causal, std::optional<double> scale, int64_t window_left,
                               int64_t window_right, bool bottom_right) {
  check_forward(query, key, value, attn_mask, is_causal, scale, window_left, window_right,
                bottom_right);
  check_dtype(query);
  return "cpu: query is on the CPU";
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CPU, m) {
  m.impl("forward", &fa::forward_cpu);
  m.impl("forward_kernel", &fa::forward_kernel_cpu);
}
