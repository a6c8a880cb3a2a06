// The rules for the arguments of fa::forward_varlen and fa::backward_varlen, for both backends.
// What the sequences' lengths are is on the device: only the CPU backend looks.
#pragma once
#include <tuple>

#include "kvcache_checks.h"

namespace fa {

// As one batch entry whose rows are those of all sequences: batch counts sequences, seqlen_q and
// seqlen_k are the rows of the tensors, and the diagonal of each sequence is its own. The band is
// not simplified.
inline Problem check_varlen(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            bool is_causal, std::optional<double> scale, int64_t window_left,
                            int64_t window_right, const std::optional<at::Tensor>& seqused_k) {
  constexpr const char* kLayout = "(total, heads, head_dim)";
  for (const auto& [name, tensor] :
       {std::pair{"query", &query}, std::pair{"key", &key}, std::pair{"value", &value}}) {
    TORCH_CHECK(tensor->dim() == 3, name, ": must have 3 dimensions ", kLayout, ", got ",
                tensor->dim(), ": ", shape_string(tensor->sizes()));
  }
  check_like_query("key", key, query);
  check_like_query("value", value, query);

  Problem problem{};
  problem.seqlen_q = query.size(0);
  problem.seqlen_k = key.size(0);
  problem.heads_q = query.size(1);
  problem.heads_k = key.size(1);
  problem.head_dim = query.size(2);
  TORCH_CHECK(problem.head_dim >= 1 && problem.head_dim <= 256,
              "query: head_dim must be 1 to 256, got ", problem.head_dim);
  TORCH_CHECK(key.size(2) == problem.head_dim, "key: head_dim must equal that of query (",
              problem.head_dim, "), got ", key.size(2));
  TORCH_CHECK(value.sizes() == key.sizes(), "value: shape must equal that of key ",
              shape_string(key.sizes()), ", got ", shape_string(value.sizes()));
  const bool heads_divide =
      problem.heads_k == 0 ? problem.heads_q == 0 : problem.heads_q % problem.heads_k == 0;
  TORCH_CHECK(heads_divide, "key: heads must divide those of query (", problem.heads_q, "), got ",
              problem.heads_k, "; the layout is ", kLayout, ", query is ",
              shape_string(query.sizes()), ", key is ", shape_string(key.sizes()));

  for (const auto& [name, tensor] :
       {std::pair{"cu_seqlens_q", &cu_seqlens_q}, std::pair{"cu_seqlens_k", &cu_seqlens_k}}) {
    check_integers(name, *tensor, query);
    TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) >= 1, name,
                ": shape must be (sequences + 1,), got ", shape_string(tensor->sizes()));
  }
  problem.batch = cu_seqlens_q.size(0) - 1;
  TORCH_CHECK(cu_seqlens_k.sizes() == cu_seqlens_q.sizes(),
              "cu_seqlens_k: shape must equal that of cu_seqlens_q ",
              shape_string(cu_seqlens_q.sizes()), ", got ", shape_string(cu_seqlens_k.sizes()));
  if (has(seqused_k)) {
    check_integers("seqused_k", *seqused_k, query);
    TORCH_CHECK(seqused_k->dim() == 1 && seqused_k->size(0) == problem.batch,
                "seqused_k: shape must be (sequences,) with ", problem.batch,
                " sequences of cu_seqlens_q, got ", shape_string(seqused_k->sizes()));
  }

  problem.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
  problem.window_left = resolve_window("window_left", window_left);
  problem.window_right = resolve_window("window_right", window_right);
  if (is_causal) problem.window_right = std::min<int64_t>(problem.window_right, 0);
  const bool banded = problem.window_left != kUnlimited || problem.window_right != kUnlimited;
  problem.mask_mode = banded ? MaskMode::kBand : MaskMode::kFull;
  return problem;
}

// grad_out, out and lse may have any strides.
inline Problem check_varlen_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                     const at::Tensor& key, const at::Tensor& value,
                                     const at::Tensor& out, const at::Tensor& lse,
                                     const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                     bool is_causal, std::optional<double> scale,
                                     int64_t window_left, int64_t window_right,
                                     const std::optional<at::Tensor>& seqused_k) {
  Problem problem = check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, scale,
                                 window_left, window_right, seqused_k);
  check_saved(grad_out, query, out, lse, {problem.heads_q, problem.seqlen_q});
  return problem;
}

}  // namespace fa
