// Attention over KV caches: the schemas, the CPU backend, one sequence after the other through
// fa::forward, and the merging of partial results.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <utility>

#include "cpu_tile.h"
#include "kvcache_checks.h"

TORCH_LIBRARY_FRAGMENT(fa, m) {
  // Attention of a few new queries over the keys and values of a cache. Shapes: query and out
  // [batch, seqlen_q, heads_q, head_dim]; key_cache and value_cache [batch, capacity, heads_k,
  // head_dim], or with block_table [pages, page_size, heads_k, head_dim]; block_table [batch, pages
  // of a sequence], int32; seqlens_k [batch], int32; new_key and new_value [batch, seqlen_new,
  // heads_k, head_dim]; lse [batch, heads_q, seqlen_q], natural logarithm, in float32 (float64 for
  // float64). seqlens_k: keys in the cache before the call, by default all that it holds. new_key
  // and new_value are written behind them and take part. The band is that of forward with
  // bottom_right: the last query stands at the last key. Slots behind a sequence, and pages before
  // its window, may hold anything. Lengths are not read by the host; on CUDA, those that do not fit
  // the cache are clamped.
  //
  // num_splits: into how many parts the keys of a sequence are cut on CUDA; 0 chooses it from the
  // shapes. batch_invariant: chooses it from the capacity alone, so that the bits of a sequence's
  // result do not depend on what else is in the batch, nor on how much. Not differentiable.
  m.def(
      "forward_kvcache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor? seqlens_k=None, Tensor? block_table=None, Tensor? new_key=None, "
      "Tensor? new_value=None, bool is_causal=False, float? scale=None, *, "
      "SymInt window_left=-1, SymInt window_right=-1, SymInt num_splits=0, "
      "bool batch_invariant=False) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
  // The result over all keys from those over two parts of them, each with its LSE: out_a and out_b
  // [..., head_dim], lse_a and lse_b [...]. A part without keys, LSE -inf, weighs nothing, whatever
  // its out holds. Differentiable.
  m.def(
      "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> "
      "(Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});
}

namespace fa {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// fa::forward, of the layout (batch, heads, seqlen, head_dim).
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                           const at::Tensor& value, double scale,
                                           int64_t window_left, int64_t window_right) {
  using Forward = std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
      bool, std::optional<double>, int64_t, int64_t, bool, bool);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fa::forward", "").typed<Forward>();
  return op.call(query, key, value, std::nullopt, /*is_causal=*/false, scale, window_left,
                 window_right, /*bottom_right=*/true, /*deterministic=*/false);
}

// The cache of one sequence on the CPU.
class Sequence {
 public:
  Sequence(const KvCacheProblem& problem, const std::optional<at::Tensor>& block_table,
           int64_t batch_idx)
      : p_(problem), batch_idx_(batch_idx) {
    if (has(block_table)) pages_ = block_table->select(0, batch_idx);
  }

  // That keys from `first` up to, not including, `end` lie in pages that there are.
  void check_pages(const at::Tensor& cache, int64_t first, int64_t end) const {
    if (!pages_.defined() || first == end) return;
    for (int64_t i = first / p_.page_size; i <= (end - 1) / p_.page_size; ++i) page(cache, i);
  }

  // Rows of a cache from key `first` up to, not including, `end`: [keys, heads_k, head_dim].
  at::Tensor rows(const at::Tensor& cache, int64_t first, int64_t end) const {
    if (!pages_.defined()) return cache.select(0, batch_idx_).slice(0, first, end);
    if (first == end) return cache.flatten(0, 1).slice(0, 0, 0);
    check_pages(cache, first, end);
    const int64_t first_page = first / p_.page_size, end_page = (end - 1) / p_.page_size + 1;
    const at::Tensor used = pages_.slice(0, first_page, end_page);
    return cache.index_select(0, used).flatten(0, 1).slice(0, first - first_page * p_.page_size,
                                                           end - first_page * p_.page_size);
  }

  void append(const at::Tensor& cache, const at::Tensor& rows, int64_t key) const {
    for (int64_t i = 0; i < rows.size(0);) {
      const int64_t in_page = pages_.defined() ? (key + i) % p_.page_size : key + i;
      const int64_t count = std::min(rows.size(0) - i, p_.page_size - in_page);
      const int64_t index = pages_.defined() ? page(cache, (key + i) / p_.page_size) : batch_idx_;
      cache.select(0, index).narrow(0, in_page, count).copy_(rows.narrow(0, i, count));
      i += count;
    }
  }

 private:
  int64_t page(const at::Tensor& cache, int64_t i) const {
    const int64_t page = pages_[i].item<int>();
    TORCH_CHECK(page >= 0 && page < cache.size(0), "block_table: pages in use must be 0 to ",
                cache.size(0) - 1, ", got ", page, " at (", batch_idx_, ", ", i, ")");
    return page;
  }

  const KvCacheProblem& p_;
  const int64_t batch_idx_;
  at::Tensor pages_;  // undefined without a table
};

std::tuple<at::Tensor, at::Tensor> forward_kvcache_cpu(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const std::optional<at::Tensor>& seqlens_k, const std::optional<at::Tensor>& block_table,
    const std::optional<at::Tensor>& new_key, const std::optional<at::Tensor>& new_value,
    bool is_causal, std::optional<double> scale, int64_t window_left, int64_t window_right,
    int64_t num_splits, bool batch_invariant) {
  const KvCacheProblem p =
      check_kvcache(query, key_cache, value_cache, seqlens_k, block_table, new_key, new_value,
                    is_causal, scale, window_left, window_right, num_splits, batch_invariant);
  check_dtype(query);  // before anything is written
  const at::ScalarType lse_dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor out = at::empty(query.sizes(), query.options());
  at::Tensor lse = at::empty({p.batch, p.heads_q, p.seqlen_q}, query.options().dtype(lse_dtype));
  const auto side = [](int64_t window) { return window == kUnlimited ? -1 : window; };
  const auto keys_before = [&](int64_t b) {
    return has(seqlens_k) ? int64_t{(*seqlens_k)[b].item<int>()} : p.capacity - p.seqlen_new;
  };
  // Keys left of the window of the first query are not looked at, and without one, none.
  const auto first_seen = [&](int64_t end) {
    return p.seqlen_q == 0 ? end : std::clamp<int64_t>(end - p.seqlen_q - p.window_left, 0, end);
  };
  for (int64_t b = 0; b < p.batch; ++b) {  // before anything is written
    const int64_t before = keys_before(b);
    TORCH_CHECK(before >= 0 && before + p.seqlen_new <= p.capacity, "seqlens_k: must be 0 to ",
                p.capacity - p.seqlen_new, ", which with ", p.seqlen_new,
                " new keys fits the cache, got ", before, " for sequence ", b);
    const int64_t end = before + p.seqlen_new;
    Sequence(p, block_table, b).check_pages(key_cache, std::min(before, first_seen(end)), end);
  }
  if (p.seqlen_new > 0) count_append(key_cache, value_cache);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t before = keys_before(b);
    const Sequence sequence(p, block_table, b);
    if (p.seqlen_new > 0) {
      sequence.append(key_cache, new_key->select(0, b), before);
      sequence.append(value_cache, new_value->select(0, b), before);
    }
    const int64_t end = before + p.seqlen_new, first = first_seen(end);
    const auto [out_b, lse_b] =
        forward(query.narrow(0, b, 1).transpose(1, 2),
                sequence.rows(key_cache, first, end).transpose(0, 1).unsqueeze(0),
                sequence.rows(value_cache, first, end).transpose(0, 1).unsqueeze(0), p.scale,
                side(p.window_left), side(p.window_right));
    out.narrow(0, b, 1).copy_(out_b.transpose(1, 2));
    lse.narrow(0, b, 1).copy_(lse_b);
  }
  return {out, lse};
}

void check_states(const at::Tensor& out_a, const at::Tensor& lse_a, const at::Tensor& out_b,
                  const at::Tensor& lse_b) {
  TORCH_CHECK(out_a.dim() >= 1, "out_a: must have at least 1 dimension (..., head_dim), got 0");
  const auto check_shape = [](const char* name, const at::Tensor& tensor, const char* other,
                              c10::SymIntArrayRef shape) {
    TORCH_CHECK(tensor.sym_sizes() == shape, name, ": shape must be ", other, " ", shape, ", got ",
                tensor.sym_sizes());
  };
  check_shape("out_b", out_b, "that of out_a", out_a.sym_sizes());
  const auto rows = out_a.sym_sizes().slice(0, out_a.dim() - 1);
  check_shape("lse_a", lse_a, "that of out_a without its last dimension", rows);
  check_shape("lse_b", lse_b, "that of out_a without its last dimension", rows);
  for (const auto& [name, tensor] : {std::pair{"out_a", &out_a}, std::pair{"lse_a", &lse_a},
                                     std::pair{"out_b", &out_b}, std::pair{"lse_b", &lse_b}}) {
    const at::ScalarType dtype = tensor->scalar_type();
    TORCH_CHECK(
        dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
        name, ": dtype must be float16, bfloat16, float32 or float64, got ", dtype);
  }
}

// In plain operators, so that every device, autograd and tracing have it.
// The weights of the parts follow from lse: with a constant one, gradients would be wrong,
// silently.
void check_gradient(const char* name, const at::Tensor& lse, const char* out_name,
                    const at::Tensor& out) {
  TORCH_CHECK(!c10::GradMode::is_enabled() || !out.requires_grad() || lse.requires_grad(), name,
              ": must require grad where ", out_name,
              " does, got requires_grad=False; fa::forward returns an lse without gradient, so "
              "attention that trains has to see all keys in one call");
}

std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& out_a, const at::Tensor& lse_a,
                                                const at::Tensor& out_b, const at::Tensor& lse_b) {
  check_states(out_a, lse_a, out_b, lse_b);
  check_gradient("lse_a", lse_a, "out_a", out_a);
  check_gradient("lse_b", lse_b, "out_b", out_b);
  // The weights are not taken from the merged LSE: a large one has no digits left for them. Nothing
  // may be NaN and be masked afterwards, since its gradient would be NaN all the same.
  const at::Tensor empty_a = lse_a.eq(-kInf), empty_b = lse_b.eq(-kInf);
  const at::Tensor empty = empty_a.logical_and(empty_b);
  const at::Tensor reference = at::maximum(lse_a, lse_b).masked_fill(empty, 0).detach();
  const at::Tensor weight_a = lse_a.sub(reference).exp(), weight_b = lse_b.sub(reference).exp();
  const at::Tensor sum = weight_a.add(weight_b).masked_fill(empty, 1);
  const auto part = [&](const at::Tensor& out, const at::Tensor& weight,
                        const at::Tensor& empty_part) {
    const at::Tensor wide = out.to(c10::promoteTypes(out.scalar_type(), weight.scalar_type()));
    return wide.masked_fill(empty_part.unsqueeze(-1), 0).mul(weight.unsqueeze(-1));
  };
  const at::Tensor out = part(out_a, weight_a, empty_a).add(part(out_b, weight_b, empty_b));
  return {out.div(sum.unsqueeze(-1)).to(out_a.scalar_type()),
          reference.add(sum.log()).masked_fill(empty, -kInf).to(lse_a.scalar_type())};
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CPU, m) { m.impl("forward_kvcache", &fa::forward_kvcache_cpu); }

TORCH_LIBRARY_IMPL(fa, CompositeImplicitAutograd, m) { m.impl("merge_states", &fa::merge_states); }

// Without this, an output would silently come without a gradient.
TORCH_LIBRARY_IMPL(fa, Autograd, m) {
  m.impl("forward_kvcache", torch::autograd::autogradNotImplementedFallback());
}
