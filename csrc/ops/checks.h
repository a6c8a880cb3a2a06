// The rules for the arguments of fa::forward and fa::backward, for both backends: what is wrong
// raises a RuntimeError with argument, rule and value; what is right comes out as one Problem.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>

#include "../params.h"

namespace fa {

// What to compute, with every default resolved.
struct Problem {
  int64_t batch;
  int64_t heads_q;
  int64_t heads_k;  // divides heads_q; 0 only where heads_q is 0
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  double scale;
  // The visible band, as in FwdParams.
  int64_t diagonal;
  int64_t window_left;
  int64_t window_right;
  MaskMode mask_mode;
  at::Tensor mask;  // [batch, heads_q, seqlen_q, seqlen_k], broadcast dimensions have stride 0;
                    // undefined without mask
};

inline std::string shape_string(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

inline void check_tensor(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 4, name,
              ": must have 4 dimensions (batch, heads, seqlen, head_dim), got ", tensor.dim(), ": ",
              shape_string(tensor.sizes()));
}

inline void check_like_query(const char* name, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK(tensor.scalar_type() == query.scalar_type(), name,
              ": dtype must equal that of query (", query.scalar_type(), "), got ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.device() == query.device(), name, ": device must equal that of query (",
              query.device(), "), got ", tensor.device());
}

// The mask as a 4-D view with stride 0 where it is broadcast.
inline at::Tensor expand_mask(const at::Tensor& mask, const at::Tensor& query, int64_t seqlen_k) {
  const at::ScalarType dtype = mask.scalar_type();
  TORCH_CHECK(dtype == at::kBool || dtype == at::kFloat || dtype == query.scalar_type(),
              "attn_mask: dtype must be bool, float32 or that of query (", query.scalar_type(),
              "), got ", dtype);
  TORCH_CHECK(mask.device() == query.device(), "attn_mask: device must equal that of query (",
              query.device(), "), got ", mask.device());
  const int64_t shape[4] = {query.size(0), query.size(1), query.size(2), seqlen_k};
  bool broadcasts = mask.dim() <= 4;
  for (int64_t i = 1; broadcasts && i <= mask.dim(); ++i) {
    broadcasts = mask.size(-i) == 1 || mask.size(-i) == shape[4 - i];
  }
  TORCH_CHECK(broadcasts,
              "attn_mask: shape must broadcast to (batch, heads, seqlen_q, seqlen_k) = ",
              shape_string(shape), ", got ", shape_string(mask.sizes()));
  return mask.expand(shape);
}

inline int64_t resolve_window(const char* name, int64_t window) {
  TORCH_CHECK(window >= -1, name, ": must be -1 (unlimited) or at least 0, got ", window);
  return window == -1 ? kUnlimited : std::min(window, kUnlimited);
}

inline Problem check_forward(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                             bool is_causal, std::optional<double> scale, int64_t window_left,
                             int64_t window_right, bool bottom_right) {
  check_tensor("query", query);
  check_tensor("key", key);
  check_tensor("value", value);
  check_like_query("key", key, query);
  check_like_query("value", value, query);

  Problem problem{};
  problem.batch = query.size(0);
  problem.heads_q = query.size(1);
  problem.heads_k = key.size(1);
  problem.seqlen_q = query.size(2);
  problem.seqlen_k = key.size(2);
  problem.head_dim = query.size(3);

  TORCH_CHECK(problem.head_dim >= 1, "query: head_dim must be at least 1, got 0");
  TORCH_CHECK(problem.head_dim <= 256, "query: head_dim must be at most 256, got ",
              problem.head_dim);
  TORCH_CHECK(key.size(0) == problem.batch, "key: batch must equal that of query (", problem.batch,
              "), got ", key.size(0), "; the layout is (batch, heads, seqlen, head_dim), query is ",
              shape_string(query.sizes()), ", key is ", shape_string(key.sizes()));
  TORCH_CHECK(key.size(3) == problem.head_dim, "key: head_dim must equal that of query (",
              problem.head_dim, "), got ", key.size(3));
  TORCH_CHECK(value.sizes() == key.sizes(), "value: shape must equal that of key ",
              shape_string(key.sizes()), ", got ", shape_string(value.sizes()));
  const bool heads_divide =
      problem.heads_k == 0 ? problem.heads_q == 0 : problem.heads_q % problem.heads_k == 0;
  TORCH_CHECK(heads_divide, "key: heads must divide those of query (", problem.heads_q, "), got ",
              problem.heads_k, "; the layout is (batch, heads, seqlen, head_dim), query is ",
              shape_string(query.sizes()), ", key is ", shape_string(key.sizes()));

  problem.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
  problem.diagonal = bottom_right ? problem.seqlen_k - problem.seqlen_q : 0;
  problem.window_left = resolve_window("window_left", window_left);
  problem.window_right = resolve_window("window_right", window_right);
  if (is_causal) problem.window_right = std::min<int64_t>(problem.window_right, 0);

  // A band that hides nothing, such as causal with one query at the bottom right, is no band. The
  // left limit cuts most at the last query, the right one at the first.
  if (problem.window_left >= problem.seqlen_q - 1 + problem.diagonal) {
    problem.window_left = kUnlimited;
  }
  if (problem.window_right >= problem.seqlen_k - 1 - problem.diagonal) {
    problem.window_right = kUnlimited;
  }
  const bool banded = problem.window_left != kUnlimited || problem.window_right != kUnlimited;
  problem.mask_mode = banded ? MaskMode::kBand : MaskMode::kFull;
  if (attn_mask.has_value() && attn_mask->defined()) {
    problem.mask = expand_mask(*attn_mask, query, problem.seqlen_k);
    problem.mask_mode = MaskMode::kTensor;
  }
  return problem;
}

// What a backward gets beside the arguments of its forward.
inline void check_saved(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& out,
                        const at::Tensor& lse, at::IntArrayRef lse_shape) {
  const auto check_shape = [](const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {
    TORCH_CHECK(tensor.sizes() == shape, name, ": shape must be ", shape_string(shape), ", got ",
                shape_string(tensor.sizes()));
  };
  check_shape("grad_out", grad_out, query.sizes());
  check_like_query("grad_out", grad_out, query);
  check_shape("out", out, query.sizes());
  check_like_query("out", out, query);
  check_shape("lse", lse, lse_shape);
  const at::ScalarType lse_dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(lse.scalar_type() == lse_dtype, "lse: dtype must be ", lse_dtype, " beside query in ",
              query.scalar_type(), ", got ", lse.scalar_type());
  TORCH_CHECK(lse.device() == query.device(), "lse: device must equal that of query (",
              query.device(), "), got ", lse.device());
}

// grad_out, out and lse may have any strides.
inline Problem check_backward(const at::Tensor& grad_out, const at::Tensor& query,
                              const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
                              const at::Tensor& lse, const std::optional<at::Tensor>& attn_mask,
                              bool is_causal, std::optional<double> scale, int64_t window_left,
                              int64_t window_right, bool bottom_right) {
  Problem problem = check_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                                  window_right, bottom_right);
  check_saved(grad_out, query, out, lse, query.sizes().slice(0, 3));
  return problem;
}

}  // namespace fa
