// CPU backend of fa::forward, and the readable statement of what the op computes: the block loop
// and the online softmax of the GPU kernels in plain C++ over a GEMM. Memory beyond the inputs and
// outputs is O(seqlen).
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

#include "cpu_tile.h"

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

// One block of query rows against all keys that they see. T is the type of all arithmetic; query
// comes multiplied by the scale.
template <typename T>
class BlockForward : QueryBlock<T> {
 public:
  BlockForward(const Problem& problem, const at::Tensor& query, const at::Tensor& key,
               const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
               int64_t block_m)
      : QueryBlock<T>(problem),
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
    const int64_t n_begin = std::max<int64_t>(0, this->first_visible(row_begin_));
    const int64_t n_end = std::min(p_.seqlen_k, this->end_visible(row_begin_ + rows_ - 1));
    for (int64_t n = n_begin; n < n_end; n += kBlockN) step(n, std::min(kBlockN, n_end - n));
    store();
  }

 private:
  using QueryBlock<T>::p_;
  using QueryBlock<T>::batch_idx_;
  using QueryBlock<T>::head_idx_;
  using QueryBlock<T>::row_begin_;
  using QueryBlock<T>::rows_;

  // Online softmax: takes the keys [n, n + cols) into max_, sum_ and acc_.
  void step(int64_t n, int64_t cols) {
    const bool masked = this->needs_mask(n, cols);
    const bool with_tensor = p_.mask_mode == MaskMode::kTensor;
    if (with_tensor && !this->load_mask(n, cols, bias_)) return;

    const int64_t head_dim = p_.head_dim;
    const int64_t kv_head_idx = head_idx_ / (p_.heads_q / p_.heads_k);
    const at::Tensor query = this->rows_of(query_, head_idx_, row_begin_, rows_);
    const at::Tensor key = this->rows_of(key_, kv_head_idx, n, cols);
    const at::Tensor value = this->rows_of(value_, kv_head_idx, n, cols);
    const at::Tensor scores = matrix(scores_, rows_, cols, cols);
    gemm(scores, query, key.t(), /*beta=*/0);

    bool clamped = false;
    for (int64_t i = 0; i < rows_; ++i) {
      T* s = scores_ + i * cols;
      if (with_tensor) {
        add_mask(bias_ + i * cols, cols, s);
      } else if (masked) {
        this->hide_band(n, cols, i, s);
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

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& query, const at::Tensor& key,
                                               const at::Tensor& value,
                                               const std::optional<at::Tensor>& attn_mask,
                                               bool is_causal, std::optional<double> scale,
                                               int64_t window_left, int64_t window_right,
                                               bool bottom_right, bool /*deterministic*/) {
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
