// CPU backend of fa::backward, and the readable statement of what the op computes:
//
//   P = exp(S - LSE)   dV = P^T dO   dP = dO V^T   dS = P (dP - delta)   delta = sum O dO
//   dQ = scale dS K    dK = scale dS^T Q           S, P, dP, dS one tile at a time
//
// A thread owns a key head of a batch entry, with all the query heads that it serves, so that
// nothing is added by two threads and results repeat. Where there are fewer key heads than threads,
// it owns a block of keys, and in a second pass over the tiles, which costs 7 products instead of
// 5, a block of query rows. Memory beyond the inputs and outputs is O(seqlen).
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "cpu_tile.h"

namespace fa {
namespace {

// Two tiles, P and dS, stay in the L2 cache.
constexpr int64_t kBlockM = 256;
constexpr int64_t kBlockN = 256;

// Above this LSE has lost so many digits to the size of the scores that P is normalised again,
// where a mask may have made the scores large: their rounding is then part of the definition.
constexpr double kLargeLse = 16;

template <typename T>
constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();

template <typename T>
bool all_finite(const at::Tensor& x) {
  T sum = 0;
  for (int64_t i = 0; i < x.size(0); ++i) {
    sum += reduce(x.const_data_ptr<T>() + i * x.stride(0), x.size(1), T(0),
                  [](T value, T total) { return total + value * T(0); });
  }
  return sum == T(0);
}

// c += a^T b, or a b, without the products whose weight in a is 0: whatever a key or query that is
// hidden holds, NaN included, stays out. For tiles that need that, which are rare.
template <typename T>
void sparse_gemm(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
  T* out = c.mutable_data_ptr<T>();
  const T* weights = a.const_data_ptr<T>();
  const T* x = b.const_data_ptr<T>();
  for (int64_t i = 0; i < a.size(0); ++i) {
    for (int64_t j = 0; j < a.size(1); ++j) {
      const T weight = weights[i * a.stride(0) + j * a.stride(1)];
      if (weight == T(0)) continue;
      for (int64_t d = 0; d < b.size(1); ++d) {
        out[i * c.stride(0) + d] += weight * x[j * b.stride(0) + d];
      }
    }
  }
}

struct Tensors {
  at::Tensor grad_out, query, key, value, out, lse;
  at::Tensor grad_query, grad_key, grad_value;  // zeros
  at::Tensor rows;                              // [3, batch, heads_q, seqlen_q], see BlockBackward
};

// Which gradients a tile is added to.
enum class Add { kAll, kKeys, kQueries };

// The tiles of a block of keys or of a block of query rows. T is the type of all arithmetic; query
// comes multiplied by the scale, and grad_query still lacks it.
template <typename T>
class BlockBackward : QueryBlock<T> {
 public:
  BlockBackward(const Problem& problem, const Tensors& tensors)
      : QueryBlock<T>(problem), t_(tensors), group_(problem.heads_q / problem.heads_k) {
    const int64_t tile = std::min(kBlockM, problem.seqlen_q) * std::min(kBlockN, problem.seqlen_k);
    const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
    scratch_ = at::empty({3 * tile}, options);
    p_tile_ = scratch_.mutable_data_ptr<T>();
    ds_tile_ = p_tile_ + tile;
    bias_ = ds_tile_ + tile;
  }

  // Fills shift, delta and norm of the rows.
  void prepare(int64_t batch_idx, int64_t head_idx, int64_t m) {
    select_rows(batch_idx, head_idx, m, std::min(kBlockM, p_.seqlen_q - m));
    const T* lse = t_.lse.const_data_ptr<T>() + batch_idx * t_.lse.stride(0) +
                   head_idx * t_.lse.stride(1) + m * t_.lse.stride(2);
    const at::Tensor out = rows_of(t_.out), grad_out = rows_of(t_.grad_out);
    bool large = false;
    for (int64_t i = 0; i < rows_; ++i) {
      const T x = lse[i * t_.lse.stride(2)];
      // Without a key P = exp(-inf) = 0. An infinite score leaves no softmax.
      shift_[i] = x == -kInf<T> ? kInf<T> : x == kInf<T> ? kNaN<T> : x;
      large = large || (std::abs(x) > T(kLargeLse) && std::isfinite(x));
      const T* o = out.const_data_ptr<T>() + i * out.stride(0);
      const T* d_o = grad_out.const_data_ptr<T>() + i * grad_out.stride(0);
      delta_[i] = 0;
      for (int64_t d = 0; d < p_.head_dim; ++d) delta_[i] += o[d] * d_o[d];
    }
    std::fill_n(norm_, rows_, T(1));
    if (large && p_.mask_mode == MaskMode::kTensor && p_.mask.scalar_type() != at::kBool) {
      normalise();
    }
  }

  // The tiles of the keys from n on, for all query heads of the key head.
  void run_keys(int64_t batch_idx, int64_t kv_head_idx, int64_t n, Add add) {
    const int64_t cols = std::min(kBlockN, p_.seqlen_k - n);
    // The rows that see the keys of the block together.
    const int64_t begin = std::max<int64_t>(0, n - p_.diagonal - p_.window_right);
    const int64_t end = std::min(p_.seqlen_q, n + cols - p_.diagonal + p_.window_left);
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t m = begin; m < end; m += kBlockM) {
        select_rows(batch_idx, kv_head_idx * group_ + g, m, std::min(kBlockM, end - m));
        select_keys(n, cols);
        step(add);
      }
    }
  }

  // The tiles of the query rows from m on.
  void run_queries(int64_t batch_idx, int64_t head_idx, int64_t m) {
    select_rows(batch_idx, head_idx, m, std::min(kBlockM, p_.seqlen_q - m));
    for_each_key_block([&] { step(Add::kQueries); });
  }

 private:
  using QueryBlock<T>::p_;
  using QueryBlock<T>::batch_idx_;
  using QueryBlock<T>::head_idx_;
  using QueryBlock<T>::row_begin_;
  using QueryBlock<T>::rows_;

  void select_rows(int64_t batch_idx, int64_t head_idx, int64_t row_begin, int64_t rows) {
    batch_idx_ = batch_idx;
    head_idx_ = head_idx;
    row_begin_ = row_begin;
    rows_ = rows;
    const int64_t all = p_.batch * p_.heads_q * p_.seqlen_q;
    shift_ = t_.rows.mutable_data_ptr<T>() + (batch_idx * p_.heads_q + head_idx) * p_.seqlen_q +
             row_begin;
    delta_ = shift_ + all;
    norm_ = delta_ + all;
  }

  void select_keys(int64_t n, int64_t cols) {
    n_ = n;
    cols_ = cols;
  }

  // The blocks of keys that the rows see together.
  template <typename F>
  void for_each_key_block(F&& f) {
    const int64_t begin = std::max<int64_t>(0, this->first_visible(row_begin_));
    const int64_t end = std::min(p_.seqlen_k, this->end_visible(row_begin_ + rows_ - 1));
    for (int64_t n = begin; n < end; n += kBlockN) {
      select_keys(n, std::min(kBlockN, end - n));
      f();
    }
  }

  // norm = 1 / (sum of P) as LSE gives it.
  void normalise() {
    std::fill_n(norm_, rows_, T(0));
    for_each_key_block([&] {
      if (!compute_p()) return;
      for (int64_t i = 0; i < rows_; ++i) norm_[i] += row_sum(p_tile_ + i * cols_, cols_);
    });
    for (int64_t i = 0; i < rows_; ++i) norm_[i] = norm_[i] == T(0) ? T(1) : 1 / norm_[i];
  }

  at::Tensor rows_of(const at::Tensor& tensor) const {
    return QueryBlock<T>::rows_of(tensor, head_idx_, row_begin_, rows_);
  }
  at::Tensor keys_of(const at::Tensor& tensor) const {
    return QueryBlock<T>::rows_of(tensor, head_idx_ / group_, n_, cols_);
  }

  // p_tile_ = exp(S - LSE), exactly 0 where a key is hidden. Returns false where all are.
  bool compute_p() {
    const bool with_tensor = p_.mask_mode == MaskMode::kTensor;
    if (with_tensor && !this->load_mask(n_, cols_, bias_)) return false;
    const bool masked = this->needs_mask(n_, cols_);
    const at::Tensor p = matrix(p_tile_, rows_, cols_, cols_);
    gemm(p, rows_of(t_.query), keys_of(t_.key).t(), /*beta=*/0);
    bool clamped = false;
    for (int64_t i = 0; i < rows_; ++i) {
      T* s = p_tile_ + i * cols_;
      if (with_tensor) {
        add_mask(bias_ + i * cols_, cols_, s);
      } else if (masked) {
        this->hide_band(n_, cols_, i, s);
      }
      clamped |= shift_and_clamp(shift_[i], cols_, s);
    }
    exp_inplace(p);
    if (clamped) drop_negligible(rows_ * cols_, p_tile_);
    return true;
  }

  // One tile.
  void step(Add add) {
    if (!compute_p()) return;
    const at::Tensor query = rows_of(t_.query), grad_out = rows_of(t_.grad_out);
    const at::Tensor key = keys_of(t_.key);
    const at::Tensor p = matrix(p_tile_, rows_, cols_, cols_);
    const at::Tensor ds = matrix(ds_tile_, rows_, cols_, cols_);
    gemm(ds, grad_out, keys_of(t_.value).t(), /*beta=*/0);
    for (int64_t i = 0; i < rows_; ++i) {
      const T delta = delta_[i], norm = norm_[i];
      T* p_row = p_tile_ + i * cols_;
      T* ds_row = ds_tile_ + i * cols_;
      if (norm != T(1)) {
        for (int64_t j = 0; j < cols_; ++j) p_row[j] *= norm;
      }
      for (int64_t j = 0; j < cols_; ++j) {
        const T x = p_row[j] * (ds_row[j] - delta);
        ds_row[j] = p_row[j] == T(0) ? T(0) : x;  // also where a hidden value is NaN
      }
    }
    const bool clean = !this->needs_mask(n_, cols_) ||
                       (all_finite<T>(query) && all_finite<T>(grad_out) && all_finite<T>(key));
    const auto add_product = [&](const at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
      if (clean) {
        gemm(c, a, b, /*beta=*/1);
      } else {
        sparse_gemm<T>(c, a, b);
      }
    };
    if (add != Add::kQueries) {
      add_product(keys_of(t_.grad_value), p.t(), grad_out);
      add_product(keys_of(t_.grad_key), ds.t(), query);
    }
    if (add != Add::kKeys) add_product(rows_of(t_.grad_query), ds, key);
  }

  const Tensors& t_;
  const int64_t group_;  // query heads of a key head

  at::Tensor scratch_;  // the memory of the next three
  T* p_tile_;           // [rows, cols]: S, then P
  T* ds_tile_;          // [rows, cols]: dP, then dS
  T* bias_;             // [rows, cols], for MaskMode::kTensor

  // Of the rows of the tile, in t_.rows.
  T* shift_ = nullptr;  // [rows]: LSE, +inf in rows that see no key
  T* delta_ = nullptr;  // [rows]: sum of O dO
  T* norm_ = nullptr;   // [rows]: what P is multiplied by, see kLargeLse

  int64_t n_ = 0;     // first key of the tile
  int64_t cols_ = 0;  // keys of the tile
};

// Calls f(block, batch_idx, head_idx, first row) for all blocks of rows of all heads.
template <typename T, typename F>
void for_each_block(const Problem& problem, const Tensors& tensors, int64_t heads, int64_t seqlen,
                    int64_t rows, F f) {
  const int64_t blocks = (seqlen + rows - 1) / rows;
  at::parallel_for(0, problem.batch * heads * blocks, 1, [&](int64_t begin, int64_t end) {
    BlockBackward<T> block(problem, tensors);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / blocks;
      f(block, head / heads, head % heads, item % blocks * rows);
    }
  });
}

template <typename T>
void backward_blocks(const Problem& problem, const Tensors& tensors) {
  using Block = BlockBackward<T>;
  const int64_t heads_q = problem.heads_q, seqlen_q = problem.seqlen_q;
  const int64_t heads_k = problem.heads_k, seqlen_k = problem.seqlen_k;
  for_each_block<T>(problem, tensors, heads_q, seqlen_q, kBlockM,
                    [](Block& block, int64_t batch_idx, int64_t head_idx, int64_t m) {
                      block.prepare(batch_idx, head_idx, m);
                    });
  if (problem.batch * heads_k >= at::get_num_threads()) {
    for_each_block<T>(problem, tensors, heads_k, seqlen_k, seqlen_k,
                      [&](Block& block, int64_t batch_idx, int64_t kv_head_idx, int64_t) {
                        for (int64_t n = 0; n < seqlen_k; n += kBlockN) {
                          block.run_keys(batch_idx, kv_head_idx, n, Add::kAll);
                        }
                      });
    return;
  }
  for_each_block<T>(problem, tensors, heads_k, seqlen_k, kBlockN,
                    [](Block& block, int64_t batch_idx, int64_t kv_head_idx, int64_t n) {
                      block.run_keys(batch_idx, kv_head_idx, n, Add::kKeys);
                    });
  for_each_block<T>(problem, tensors, heads_q, seqlen_q, kBlockM,
                    [](Block& block, int64_t batch_idx, int64_t head_idx, int64_t m) {
                      block.run_queries(batch_idx, head_idx, m);
                    });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const std::optional<at::Tensor>& attn_mask, bool is_causal, std::optional<double> scale,
    int64_t window_left, int64_t window_right, bool bottom_right, bool /*deterministic*/) {
  const Problem problem = check_backward(grad_out, query, key, value, out, lse, attn_mask,
                                         is_causal, scale, window_left, window_right, bottom_right);
  check_dtype(query);

  const at::ScalarType dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto accumulator = [&](const at::Tensor& tensor) {
    return at::zeros(tensor.sizes(), tensor.options().dtype(dtype));
  };
  const at::Tensor grad_query = accumulator(query), grad_key = accumulator(key),
                   grad_value = accumulator(value);
  if (query.numel() != 0 && key.numel() != 0) {
    // The scale goes into query as in forward, so that the scores are the same.
    const at::Tensor q = operand(query.to(dtype).mul(problem.scale), dtype);
    const at::Tensor rows = at::empty({3, problem.batch, problem.heads_q, problem.seqlen_q},
                                      query.options().dtype(dtype));
    const auto run = [&](auto zero) {
      using T = decltype(zero);
      backward_blocks<T>(problem,
                         {operand(grad_out, dtype), q, operand(key, dtype), operand(value, dtype),
                          operand(out, dtype), lse, grad_query, grad_key, grad_value, rows});
    };
    dtype == at::kDouble ? run(double{}) : run(float{});
  }
  const auto like = [](const at::Tensor& tensor, const at::Tensor& gradient) {
    return at::empty_like(tensor).copy_(gradient);
  };
  return {like(query, at::mul(grad_query, problem.scale)), like(key, grad_key),
          like(value, grad_value)};
}

std::string backward_kernel_cpu(const at::Tensor& grad_out, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value,
                                const at::Tensor& out, const at::Tensor& lse,
                                const std::optional<at::Tensor>& attn_mask, bool is_causal,
                                std::optional<double> scale, int64_t window_left,
                                int64_t window_right, bool bottom_right, bool /*deterministic*/) {
  check_backward(grad_out, query, key, value, out, lse, attn_mask, is_causal, scale, window_left,
                 window_right, bottom_right);
  check_dtype(query);
  return "cpu: query is on the CPU";
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CPU, m) {
  m.impl("backward", &fa::backward_cpu);
  m.impl("backward_kernel", &fa::backward_kernel_cpu);
}
