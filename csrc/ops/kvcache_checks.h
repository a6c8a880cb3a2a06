// The rules for the arguments of fa::forward_kvcache, for both backends.
#pragma once
#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <utility>

#include "checks.h"

namespace fa {

// What to compute, with every default resolved.
struct KvCacheProblem {
  int64_t batch;
  int64_t heads_q;
  int64_t heads_k;  // divides heads_q; 0 only where heads_q is 0
  int64_t seqlen_q;
  int64_t head_dim;
  int64_t page_size;   // rows of a page; without a table, of a sequence
  int64_t capacity;    // keys that a sequence may have
  int64_t seqlen_new;  // keys to append
  double scale;
  // The visible band, as in FwdParams, from the bottom-right corner.
  int64_t window_left;
  int64_t window_right;
};

inline bool has(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

// A tensor of 32-bit integers on the device of query.
inline void check_integers(const char* name, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt, name, ": dtype must be int32, got ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.device() == query.device(), name, ": device must equal that of query (",
              query.device(), "), got ", tensor.device());
}

inline void check_cache(const at::Tensor& query, const at::Tensor& key_cache,
                        const at::Tensor& value_cache) {
  const auto check_rank = [](const char* name, const at::Tensor& tensor, const char* layout) {
    TORCH_CHECK(tensor.dim() == 4, name, ": must have 4 dimensions ", layout, ", got ",
                tensor.dim(), ": ", shape_string(tensor.sizes()));
  };
  constexpr const char* kCacheLayout =
      "(batch, seqlen, heads, head_dim) or, with block_table, (pages, page_size, heads, head_dim)";
  check_rank("query", query, "(batch, seqlen_q, heads, head_dim)");
  check_rank("key_cache", key_cache, kCacheLayout);
  check_rank("value_cache", value_cache, kCacheLayout);
  check_like_query("key_cache", key_cache, query);
  check_like_query("value_cache", value_cache, query);
  const int64_t heads_q = query.size(2), heads_k = key_cache.size(2), head_dim = query.size(3);
  TORCH_CHECK(head_dim >= 1 && head_dim <= 256, "query: head_dim must be 1 to 256, got ", head_dim);
  TORCH_CHECK(key_cache.size(3) == head_dim, "key_cache: head_dim must equal that of query (",
              head_dim, "), got ", key_cache.size(3));
  TORCH_CHECK(value_cache.sizes() == key_cache.sizes(),
              "value_cache: shape must equal that of key_cache ", shape_string(key_cache.sizes()),
              ", got ", shape_string(value_cache.sizes()));
  TORCH_CHECK(heads_k == 0 ? heads_q == 0 : heads_q % heads_k == 0,
              "key_cache: heads must divide those of query (", heads_q, "), got ", heads_k,
              "; the layout is ", kCacheLayout, ", query is ", shape_string(query.sizes()),
              ", key_cache is ", shape_string(key_cache.sizes()));
  // A cache is used in place.
  TORCH_CHECK(head_dim == 1 || key_cache.stride(3) == 1,
              "key_cache: the last dimension must be contiguous, got stride ", key_cache.stride(3));
  TORCH_CHECK(head_dim == 1 || value_cache.stride(3) == 1,
              "value_cache: the last dimension must be contiguous, got stride ",
              value_cache.stride(3));
}

// Pages of any size where a sequence has one, since then no key needs to be looked up in a table.
inline void check_pages(const at::Tensor& block_table, const at::Tensor& query, int64_t page_size) {
  check_integers("block_table", block_table, query);
  TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == query.size(0),
              "block_table: must have shape (batch, pages of a sequence) with batch ",
              query.size(0), ", got ", shape_string(block_table.sizes()));
  const bool power = page_size >= 16 && (page_size & (page_size - 1)) == 0;
  TORCH_CHECK(power || block_table.size(1) <= 1,
              "key_cache: page_size must be a power of two from 16 on where block_table has more "
              "than one page for a sequence, got ",
              page_size);
}

// The bytes from the first to the last element, if there are any.
inline std::pair<const char*, const char*> extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.element_size()};
}

// Whether elements may share memory: sorted by stride, a dimension has to step over all before it.
inline bool may_overlap_itself(const at::Tensor& tensor) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 4> dims;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) > 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t covered = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < covered) return true;
    covered = stride * (size - 1) + covered;
  }
  return false;
}

// What an append in place would lose, silently, or read half written.
inline void check_append(const at::Tensor& query, const at::Tensor& key_cache,
                         const at::Tensor& value_cache, const at::Tensor& new_key,
                         const at::Tensor& new_value) {
  for (const auto& [name, cache] :
       {std::pair{"key_cache", &key_cache}, std::pair{"value_cache", &value_cache}}) {
    TORCH_CHECK(cache->numel() == 0 || !may_overlap_itself(*cache), name,
                ": must have memory of its own for every element to append to it, got strides ",
                shape_string(cache->strides()), " with shape ", shape_string(cache->sizes()));
    TORCH_CHECK(!c10::GradMode::is_enabled() || !cache->requires_grad(), name,
                ": must not require grad to append to it, which would lose its gradient, got "
                "requires_grad=True; call under torch.no_grad()");
  }
  const at::MemOverlapStatus status = at::get_overlap_status(key_cache, value_cache);
  TORCH_CHECK(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial,
              "value_cache: must not share memory with key_cache to append to them, got the same ",
              status == at::MemOverlapStatus::Full ? "tensor" : "memory in part");
  for (const auto& [name, source] : {std::pair{"query", &query}, std::pair{"new_key", &new_key},
                                     std::pair{"new_value", &new_value}}) {
    for (const at::Tensor* cache : {&key_cache, &value_cache}) {
      if (source->numel() == 0 || cache->numel() == 0 || !source->is_alias_of(*cache)) continue;
      const auto [begin, end] = extent(*source);
      const auto [cache_begin, cache_end] = extent(*cache);
      TORCH_CHECK(end <= cache_begin || cache_end <= begin, name,
                  ": must not lie inside of a cache that is appended to, got a view of it");
    }
  }
}

inline void check_new(const at::Tensor& query, const at::Tensor& key_cache,
                      const at::Tensor& value_cache, const std::optional<at::Tensor>& seqlens_k,
                      const std::optional<at::Tensor>& new_key,
                      const std::optional<at::Tensor>& new_value) {
  TORCH_CHECK(has(new_key) && has(new_value),
              "new_value: must be given together with new_key, got only ",
              has(new_key) ? "new_key" : "new_value");
  TORCH_CHECK(has(seqlens_k), "seqlens_k: must be given with new_key, got None");
  check_like_query("new_key", *new_key, query);
  check_like_query("new_value", *new_value, query);
  TORCH_CHECK(new_key->dim() == 4 && new_key->size(0) == query.size(0) &&
                  new_key->size(2) == key_cache.size(2) && new_key->size(3) == query.size(3),
              "new_key: must have shape (batch, new keys, heads, head_dim) with batch ",
              query.size(0), ", heads ", key_cache.size(2), " and head_dim ", query.size(3),
              ", got ", shape_string(new_key->sizes()));
  TORCH_CHECK(new_value->sizes() == new_key->sizes(),
              "new_value: shape must equal that of new_key ", shape_string(new_key->sizes()),
              ", got ", shape_string(new_value->sizes()));
  check_append(query, key_cache, value_cache, *new_key, *new_value);
}

inline KvCacheProblem check_kvcache(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const std::optional<at::Tensor>& seqlens_k, const std::optional<at::Tensor>& block_table,
    const std::optional<at::Tensor>& new_key, const std::optional<at::Tensor>& new_value,
    bool is_causal, std::optional<double> scale, int64_t window_left, int64_t window_right,
    int64_t num_splits, bool batch_invariant) {
  check_cache(query, key_cache, value_cache);
  KvCacheProblem problem{};
  problem.batch = query.size(0);
  problem.seqlen_q = query.size(1);
  problem.heads_q = query.size(2);
  problem.heads_k = key_cache.size(2);
  problem.head_dim = query.size(3);
  problem.page_size = key_cache.size(1);
  if (has(block_table)) {
    check_pages(*block_table, query, problem.page_size);
    problem.capacity = block_table->size(1) * problem.page_size;
  } else {
    TORCH_CHECK(key_cache.size(0) == problem.batch, "key_cache: batch must equal that of query (",
                problem.batch, "), got ", key_cache.size(0), "; pages need a block_table");
    problem.capacity = problem.page_size;
  }
  if (has(seqlens_k)) {
    check_integers("seqlens_k", *seqlens_k, query);
    TORCH_CHECK(seqlens_k->dim() == 1 && seqlens_k->size(0) == problem.batch,
                "seqlens_k: must have shape (", problem.batch, ",), got ",
                shape_string(seqlens_k->sizes()));
  }
  if (has(new_key) || has(new_value)) {
    check_new(query, key_cache, value_cache, seqlens_k, new_key, new_value);
    problem.seqlen_new = new_key->size(1);
    TORCH_CHECK(problem.seqlen_new <= problem.capacity, "new_key: must have at most ",
                problem.capacity, " keys, the capacity of the cache, got ", problem.seqlen_new);
  }
  TORCH_CHECK(num_splits >= 0, "num_splits: must be 0 (chosen) or at least 1, got ", num_splits);
  TORCH_CHECK(num_splits == 0 || !batch_invariant,
              "num_splits: must be 0 with batch_invariant, which chooses it, got ", num_splits);
  problem.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
  problem.window_left = resolve_window("window_left", window_left);
  problem.window_right = resolve_window("window_right", window_right);
  if (is_causal) problem.window_right = std::min<int64_t>(problem.window_right, 0);
  return problem;
}

// So that autograd notices when a cache that it has saved is written to: the kernels, and what they
// call, work below the dispatch key that would count.
inline void count_append(const at::Tensor& key_cache, const at::Tensor& value_cache) {
  for (const at::Tensor& cache : {key_cache, value_cache}) {
    if (!cache.is_inference()) cache.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace fa
