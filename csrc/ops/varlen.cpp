// Packed sequences: the schemas, and the CPU backend, one sequence after the other through
// fa::forward and fa::backward.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "cpu_tile.h"
#include "varlen_checks.h"

TORCH_LIBRARY_FRAGMENT(fa, m) {
  // fa::forward for sequences of several lengths, one behind the other. Shapes: query and out
  // [total_q, heads_q, head_dim]; key and value [total_k, heads_k, head_dim]; lse [heads_q,
  // total_q]; cu_seqlens_q and cu_seqlens_k [sequences + 1], int32: sequence i has the rows
  // cu_seqlens[i] up to, not including, cu_seqlens[i + 1]; seqused_k [sequences], int32: only the
  // first keys of each take part. The band of each sequence is that of forward with bottom_right.
  // Rows before the first sequence and behind the last are padding: out 0, lse -inf, gradients 0.
  // Lengths are not read by the host; on CUDA, those that lead out of the tensors are clamped, and
  // where a sequence begins before the one in front of it, results are undefined. Derivatives as of
  // forward.
  m.def(
      "forward_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, bool is_causal=False, float? scale=None, *, SymInt window_left=-1, "
      "SymInt window_right=-1, Tensor? seqused_k=None, bool deterministic=False) -> "
      "(Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
  // The gradients of out with respect to query, key and value, as fa::backward.
  m.def(
      "backward_varlen(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, bool is_causal=False, "
      "float? scale=None, *, SymInt window_left=-1, SymInt window_right=-1, "
      "Tensor? seqused_k=None, bool deterministic=False) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
}

namespace fa {
namespace {

using Outputs = std::tuple<at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Rows of one sequence; of its keys, those that take part.
struct Sequence {
  int64_t q_begin, seqlen_q;
  int64_t k_begin, seqlen_k;

  // Rows of a packed tensor in the layout of fa::forward.
  at::Tensor queries(const at::Tensor& tensor) const {
    return tensor.narrow(0, q_begin, seqlen_q).transpose(0, 1).unsqueeze(0);
  }
  at::Tensor keys(const at::Tensor& tensor) const {
    return tensor.narrow(0, k_begin, seqlen_k).transpose(0, 1).unsqueeze(0);
  }
  at::Tensor lse(const at::Tensor& tensor) const {
    return tensor.narrow(1, q_begin, seqlen_q).unsqueeze(0);
  }
};

class Lengths {
 public:
  Lengths(const Problem& problem, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
          const std::optional<at::Tensor>& seqused_k)
      : q_(cu_seqlens_q.contiguous()), k_(cu_seqlens_k.contiguous()) {
    check("cu_seqlens_q", q_, "query", problem.seqlen_q);
    check("cu_seqlens_k", k_, "key", problem.seqlen_k);
    if (!has(seqused_k)) return;
    used_ = seqused_k->contiguous();
    for (int64_t b = 0; b < problem.batch; ++b) {
      const int64_t rows = at(k_, b + 1) - at(k_, b), used = at(used_, b);
      TORCH_CHECK(used >= 0 && used <= rows, "seqused_k: must be 0 to the keys of the sequence (",
                  rows, "), got ", used, " for sequence ", b);
    }
  }

  Sequence operator[](int64_t b) const {
    const int64_t q = at(q_, b), k = at(k_, b);
    return {q, at(q_, b + 1) - q, k, used_.defined() ? at(used_, b) : at(k_, b + 1) - k};
  }

 private:
  static int64_t at(const at::Tensor& tensor, int64_t i) { return tensor.const_data_ptr<int>()[i]; }

  static void check(const char* name, const at::Tensor& cu_seqlens, const char* tensor,
                    int64_t total) {
    int64_t before = 0;
    for (int64_t i = 0; i < cu_seqlens.size(0); ++i) {
      const int64_t next = at(cu_seqlens, i);
      TORCH_CHECK(next >= before && next <= total, name, ": must ascend from 0 to at most the ",
                  total, " rows of ", tensor, ", got ", next, " after ", before, " at ", i);
      before = next;
    }
  }

  at::Tensor q_, k_, used_;
};

int64_t side(int64_t window) { return window == kUnlimited ? -1 : window; }

Outputs forward_varlen_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                           bool is_causal, std::optional<double> scale, int64_t window_left,
                           int64_t window_right, const std::optional<at::Tensor>& seqused_k,
                           bool deterministic) {
  using Forward = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const std::optional<at::Tensor>&, bool, std::optional<double>, int64_t,
                          int64_t, bool, bool);
  static const auto forward =
      c10::Dispatcher::singleton().findSchemaOrThrow("fa::forward", "").typed<Forward>();
  const Problem p = check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, scale,
                                 window_left, window_right, seqused_k);
  check_dtype(query);
  const Lengths lengths(p, cu_seqlens_q, cu_seqlens_k, seqused_k);
  const at::ScalarType lse_dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor out = at::zeros_like(query);
  const at::Tensor lse = at::empty({p.heads_q, p.seqlen_q}, query.options().dtype(lse_dtype));
  lse.fill_(-std::numeric_limits<double>::infinity());
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = lengths[b];
    if (s.seqlen_q == 0) continue;
    const auto [out_b, lse_b] =
        forward.call(s.queries(query), s.keys(key), s.keys(value), std::nullopt,
                     /*is_causal=*/false, p.scale, side(p.window_left), side(p.window_right),
                     /*bottom_right=*/true, deterministic);
    s.queries(out).copy_(out_b);
    s.lse(lse).copy_(lse_b);
  }
  return {out, lse};
}

Gradients backward_varlen_cpu(const at::Tensor& grad_out, const at::Tensor& query,
                              const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
                              const at::Tensor& lse, const at::Tensor& cu_seqlens_q,
                              const at::Tensor& cu_seqlens_k, bool is_causal,
                              std::optional<double> scale, int64_t window_left,
                              int64_t window_right, const std::optional<at::Tensor>& seqused_k,
                              bool deterministic) {
  using Backward =
      Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, bool,
                std::optional<double>, int64_t, int64_t, bool, bool);
  static const auto backward =
      c10::Dispatcher::singleton().findSchemaOrThrow("fa::backward", "").typed<Backward>();
  const Problem p =
      check_varlen_backward(grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k,
                            is_causal, scale, window_left, window_right, seqused_k);
  check_dtype(query);
  const Lengths lengths(p, cu_seqlens_q, cu_seqlens_k, seqused_k);
  const at::Tensor grad_query = at::zeros_like(query), grad_key = at::zeros_like(key),
                   grad_value = at::zeros_like(value);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = lengths[b];
    if (s.seqlen_q == 0 || s.seqlen_k == 0) continue;
    const auto [grad_query_b, grad_key_b, grad_value_b] = backward.call(
        s.queries(grad_out), s.queries(query), s.keys(key), s.keys(value), s.queries(out),
        s.lse(lse), std::nullopt, /*is_causal=*/false, p.scale, side(p.window_left),
        side(p.window_right), /*bottom_right=*/true, deterministic);
    s.queries(grad_query).copy_(grad_query_b);
    s.keys(grad_key).copy_(grad_key_b);
    s.keys(grad_value).copy_(grad_value_b);
  }
  return {grad_query, grad_key, grad_value};
}

// Without this, vmap would call the op once for each entry.
void refuse_vmap(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.operator_name().name,
              ": has no vmap rule; pack the mapped sequences into one call");
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CPU, m) {
  m.impl("forward_varlen", &fa::forward_varlen_cpu);
  m.impl("backward_varlen", &fa::backward_varlen_cpu);
}

TORCH_LIBRARY_IMPL(fa, FuncTorchBatched, m) {
  m.impl("forward_varlen", torch::CppFunction::makeFromBoxedFunction<&fa::refuse_vmap>());
  m.impl("backward_varlen", torch::CppFunction::makeFromBoxedFunction<&fa::refuse_vmap>());
}
