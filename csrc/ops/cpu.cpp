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

#include <limits>
#include <tuple>
#include <vector>

#include "checks.h"

namespace fa {
namespace {

// A tile of scores stays in the L2 cache, and is large enough for the GEMM to run at its best.
constexpr int64_t kBlockM = 128;
constexpr int64_t kBlockN = 512;

template <typename T>
constexpr T kInf = std::numeric_limits<T>::infinity();

// Memory as a matrix for ATen. ATen has no const tensors; only outputs are written.
template <typename T>
at::Tensor matrix(const T* data, int64_t rows, int64_t cols, int64_t row_stride,
                  int64_t col_stride) {
  return at::from_blob(const_cast<T*>(data), {rows, cols}, {row_stride, col_stride},
                       at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
}

// c = alpha * a @ b + beta * c. The functions of at::cpu are the CPU kernels themselves, without
// dispatcher: threads of at::parallel_for do not inherit the caller's dispatch state.
void gemm(at::Tensor c, const at::Tensor& a, const at::Tensor& b, double alpha, double beta) {
  at::cpu::addmm_outf(c, a, b, beta, alpha, c);
}

// Largest element that is not NaN. NaN needs no care here: it survives the exponential and shows
// in the sum. Eight independent lanes let the compiler use vector registers.
template <typename T>
T row_max(const T* x, int64_t n) {
  T lanes[8];
  std::fill_n(lanes, 8, -kInf<T>);
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      lanes[lane] = x[j + lane] > lanes[lane] ? x[j + lane] : lanes[lane];
    }
  }
  for (; j < n; ++j) lanes[0] = x[j] > lanes[0] ? x[j] : lanes[0];
  return *std::max_element(lanes, lanes + 8);
}

template <typename T>
T row_sum(const T* x, int64_t n) {
  T lanes[8] = {};
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += x[j + lane];
  }
  for (; j < n; ++j) lanes[0] += x[j];
  T sum = 0;
  for (T lane : lanes) sum += lane;
  return sum;
}

// bias[j] = what the mask adds to the score of key j.
template <typename T, typename M>
void read_mask(const M* mask, int64_t stride, int64_t n, T* bias) {
  for (int64_t j = 0; j < n; ++j) {
    if constexpr (std::is_same_v<M, bool>) {
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
      return read_mask(mask.const_data_ptr<bool>() + offset, stride, n, bias);
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

// One block of query rows against all keys that they see. T is the type of all arithmetic.
template <typename T>
class BlockForward {
 public:
  BlockForward(const Problem& problem, const at::Tensor& query, const at::Tensor& key,
               const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse)
      : p_(problem),
        query_(query),
        key_(key),
        value_(value),
        out_(out),
        lse_(lse),
        scores_(kBlockM * kBlockN),
        bias_(problem.mask_mode == MaskMode::kFull ? 0 : kBlockM * kBlockN),
        acc_(kBlockM * problem.head_dim),
        max_(kBlockM),
        sum_(kBlockM) {}

  void run(int64_t batch_idx, int64_t head_idx, int64_t m_block) {
    batch_idx_ = batch_idx;
    head_idx_ = head_idx;
    kv_head_idx_ = head_idx / (p_.heads_q / p_.heads_k);
    row_begin_ = m_block * kBlockM;
    rows_ = std::min(kBlockM, p_.seqlen_q - row_begin_);
    std::fill(acc_.begin(), acc_.end(), T(0));
    std::fill(max_.begin(), max_.end(), -kInf<T>);
    std::fill(sum_.begin(), sum_.end(), T(0));

    // Keys outside of these bounds are visible to no row of the block.
    const int64_t first = std::max<int64_t>(0, row_begin_ + p_.diagonal - p_.window_left);
    const int64_t last = row_begin_ + rows_ - 1 + p_.diagonal + p_.window_right;
    const int64_t end = std::min(p_.seqlen_k, last + 1);
    for (int64_t n = first; n < end; n += kBlockN) step(n, std::min(kBlockN, end - n));
    store();
  }

 private:
  // Online softmax: takes the keys [n, n + cols) into max_, sum_ and acc_.
  void step(int64_t n, int64_t cols) {
    const bool masked = needs_mask(n, cols);
    if (masked && !load_bias(n, cols)) return;

    const int64_t head_dim = p_.head_dim;
    const T* query = query_.const_data_ptr<T>() + batch_idx_ * query_.stride(0) +
                     head_idx_ * query_.stride(1) + row_begin_ * query_.stride(2);
    const T* key = key_.const_data_ptr<T>() + batch_idx_ * key_.stride(0) +
                   kv_head_idx_ * key_.stride(1) + n * key_.stride(2);
    const T* value = value_.const_data_ptr<T>() + batch_idx_ * value_.stride(0) +
                     kv_head_idx_ * value_.stride(1) + n * value_.stride(2);

    at::Tensor scores = matrix(scores_.data(), rows_, cols, cols, 1);
    gemm(scores, matrix(query, rows_, head_dim, query_.stride(2), 1),
         matrix(key, head_dim, cols, 1, key_.stride(2)), p_.scale, 0);

    for (int64_t i = 0; i < rows_; ++i) {
      T* s = scores_.data() + i * cols;
      if (masked) {
        // A hidden key stays hidden whatever its score, NaN included.
        const T* bias = bias_.data() + i * cols;
        for (int64_t j = 0; j < cols; ++j) s[j] = bias[j] == -kInf<T> ? -kInf<T> : s[j] + bias[j];
      }
      const T new_max = std::max(max_[i], row_max(s, cols));
      // Until a row sees its first key, its maximum is -inf: shift by 0 instead, for which exp
      // gives 0, and NaN where a score is NaN.
      const T shift = new_max == -kInf<T> ? T(0) : new_max;
      for (int64_t j = 0; j < cols; ++j) s[j] -= shift;
      const T correction = std::exp(max_[i] - shift);
      max_[i] = new_max;
      sum_[i] *= correction;
      if (correction != T(1)) {
        for (int64_t d = 0; d < head_dim; ++d) acc_[i * head_dim + d] *= correction;
      }
    }
    at::cpu::exp_(scores);
    for (int64_t i = 0; i < rows_; ++i) sum_[i] += row_sum(scores_.data() + i * cols, cols);

    gemm(matrix(acc_.data(), rows_, head_dim, head_dim, 1), scores,
         matrix(value, cols, head_dim, value_.stride(2), 1), 1, 1);
  }

  // Whether some (row, key) pair of the tile may be hidden.
  bool needs_mask(int64_t n, int64_t cols) const {
    const int64_t last_row = row_begin_ + rows_ - 1;
    return p_.mask_mode == MaskMode::kTensor || n < last_row + p_.diagonal - p_.window_left ||
           n + cols - 1 > row_begin_ + p_.diagonal + p_.window_right;
  }

  // What mask and band add to the scores of the tile; -inf hides. Returns whether any key is
  // visible to any row.
  bool load_bias(int64_t n, int64_t cols) {
    bool visible = false;
    for (int64_t i = 0; i < rows_; ++i) {
      T* bias = bias_.data() + i * cols;
      const int64_t row = row_begin_ + i;
      const int64_t first = std::clamp<int64_t>(row + p_.diagonal - p_.window_left - n, 0, cols);
      const int64_t end =
          std::clamp<int64_t>(row + p_.diagonal + p_.window_right + 1 - n, first, cols);
      std::fill(bias, bias + first, -kInf<T>);
      std::fill(bias + end, bias + cols, -kInf<T>);
      if (p_.mask.defined()) {
        const int64_t offset = batch_idx_ * p_.mask.stride(0) + head_idx_ * p_.mask.stride(1) +
                               row * p_.mask.stride(2) + (n + first) * p_.mask.stride(3);
        read_mask_row(p_.mask, offset, end - first, bias + first);
      } else {
        std::fill(bias + first, bias + end, T(0));
      }
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
    for (int64_t i = 0; i < rows_; ++i) {
      // The sum is 0 only where the row sees no key: the largest score adds 1 to it.
      const bool empty = sum_[i] == T(0);
      lse[i] = empty ? -kInf<T> : max_[i] + std::log(sum_[i]);
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        out[i * out_.stride(2) + d * out_.stride(3)] =
            empty ? T(0) : acc_[i * p_.head_dim + d] / sum_[i];
      }
    }
  }

  const Problem& p_;
  const at::Tensor& query_;
  const at::Tensor& key_;
  const at::Tensor& value_;
  const at::Tensor& out_;
  const at::Tensor& lse_;
  std::vector<T> scores_;  // [rows, cols], later the numerators of the softmax
  std::vector<T> bias_;    // [rows, cols]
  std::vector<T> acc_;     // [rows, head_dim]
  std::vector<T> max_;     // [rows]
  std::vector<T> sum_;     // [rows]
  int64_t batch_idx_;
  int64_t head_idx_;
  int64_t kv_head_idx_;
  int64_t row_begin_;
  int64_t rows_;
};

template <typename T>
void forward_blocks(const Problem& problem, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse) {
  const int64_t m_blocks = (problem.seqlen_q + kBlockM - 1) / kBlockM;
  const int64_t items = problem.batch * problem.heads_q * m_blocks;
  at::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
    BlockForward<T> block(problem, query, key, value, out, lse);
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

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& query, const at::Tensor& key,
                                               const at::Tensor& value,
                                               const std::optional<at::Tensor>& attn_mask,
                                               bool is_causal, std::optional<double> scale,
                                               int64_t window_left, int64_t window_right,
                                               bool bottom_right) {
  const Problem problem = check_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                                        window_right, bottom_right);
  const at::ScalarType dtype = query.scalar_type();
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
      "query: dtype must be float16, bfloat16, float32 or float64, got ", dtype);

  const at::ScalarType compute = dtype == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor out = at::empty_like(query);
  at::Tensor lse =
      at::empty({problem.batch, problem.heads_q, problem.seqlen_q}, query.options().dtype(compute));
  const at::Tensor out_compute =
      dtype == compute ? out : at::empty(query.sizes(), query.options().dtype(compute));
  const at::Tensor q = operand(query, compute);
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

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CPU, m) { m.impl("forward", &fa::forward_cpu); }
