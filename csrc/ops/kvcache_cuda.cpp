// CUDA backend of fa::forward_kvcache: check, allocate, fill params, launch: new keys and values to
// the cache, attention, and the merging of its splits. Nothing depends on the contents of a tensor,
// so that a captured call can be replayed with other lengths and pages.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "cuda_common.h"
#include "kvcache_checks.h"

namespace fa {
namespace {

void check_cuda(const at::Tensor& query, const KvCacheProblem& p) {
  const at::ScalarType dtype = query.scalar_type();
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16,
              "query: dtype must be float16 or bfloat16 on CUDA, got ", dtype);
  const auto check_at_most = [](const char* name, int64_t size, int64_t limit) {
    TORCH_CHECK(size <= limit, name, " must be at most ", limit, " on CUDA, got ", size);
  };
  constexpr int64_t kMaxGrid = 65535;
  check_at_most("query: batch", p.batch, kMaxGrid);
  check_at_most("query: heads", p.heads_q, kMaxGrid);
  check_at_most("query: seqlen_q * heads", p.seqlen_q * p.heads_q, kMaxSeqlen);
  check_at_most("key_cache: capacity of a sequence", p.capacity, kMaxSeqlen);
}

// (batch, seqlen, heads, head_dim) strides as batch, head, row.
void fill_strides_of_rows(const at::Tensor& tensor, int64_t (&strides)[3]) {
  strides[0] = stride_of(tensor, 0);
  strides[1] = stride_of(tensor, 2);
  strides[2] = stride_of(tensor, 1);
}

int log2_of(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}

KvCache make_cache(const KvCacheProblem& p, const at::Tensor& key_cache,
                   const at::Tensor& value_cache, const at::Tensor& seqlens_k,
                   const at::Tensor& block_table) {
  KvCache cache{};
  cache.key = key_cache.data_ptr();
  cache.value = value_cache.data_ptr();
  fill_strides_of_rows(key_cache, cache.key_stride);
  fill_strides_of_rows(value_cache, cache.value_stride);
  if (seqlens_k.defined()) cache.seqlens = seqlens_k.const_data_ptr<int>();
  cache.num_pages = static_cast<uint32_t>(key_cache.size(0));
  cache.page_shift = 31;
  if (block_table.defined()) {
    cache.block_table = block_table.const_data_ptr<int>();
    cache.block_table_stride = stride_of(block_table, 0);
    if (block_table.size(1) > 1) cache.page_shift = log2_of(p.page_size);
  }
  cache.capacity = static_cast<int>(p.capacity);
  cache.seqlen_new = static_cast<int>(p.seqlen_new);
  return cache;
}

cudaError_t append(const KvCacheProblem& p, const KvCache& cache, const at::Tensor& new_key,
                   const at::Tensor& new_value, LaunchFeatures features, cudaStream_t stream) {
  AppendParams params{};
  params.cache = cache;
  params.new_key = new_key.const_data_ptr();
  params.new_value = new_value.const_data_ptr();
  fill_strides_of_rows(new_key, params.new_key_stride);
  fill_strides_of_rows(new_value, params.new_value_stride);
  params.batch = static_cast<int>(p.batch);
  params.heads_k = static_cast<int>(p.heads_k);
  params.head_dim = static_cast<int>(p.head_dim);
  return launch_append_kv(params, features, stream);
}

DecodeParams make_decode_params(const KvCacheProblem& p, const KvCache& cache,
                                const at::Tensor& query, const at::Tensor& out,
                                const at::Tensor& lse) {
  DecodeParams params{};
  params.cache = cache;
  params.query = query.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr<float>();
  fill_strides_of_rows(query, params.query_stride);
  fill_strides_of_rows(out, params.out_stride);
  params.batch = static_cast<int>(p.batch);
  params.heads_q = static_cast<int>(p.heads_q);
  params.heads_k = static_cast<int>(p.heads_k);
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.head_dim = static_cast<int>(p.head_dim);
  params.scale = static_cast<float>(p.scale);
  params.window_left = p.window_left;
  params.window_right = p.window_right;
  params.dtype = query.scalar_type() == at::kHalf ? Dtype::kFloat16 : Dtype::kBFloat16;
  return params;
}

// Keys of a sequence that its queries may see, as far as shapes tell.
int64_t visible_keys(int64_t keys, int64_t seqlen_q, int64_t window_left) {
  return std::min(keys, window_left == kUnlimited ? keys : seqlen_q + window_left);
}

at::Tensor whole_integers(const std::optional<at::Tensor>& tensor) {
  return has(tensor) ? tensor->contiguous() : at::Tensor();
}

// Rows of query that are not aligned would have those of the cache loaded element by element.
at::Tensor query_rows(const at::Tensor& query) {
  const bool aligned = reinterpret_cast<uintptr_t>(query.const_data_ptr()) % 16 == 0 &&
                       stride_of(query, 0) % 8 == 0 && stride_of(query, 1) % 8 == 0 &&
                       stride_of(query, 2) % 8 == 0;
  const bool whole = query.size(3) == 1 || query.stride(3) == 1;
  if (whole && (aligned || query.size(3) % 8 != 0)) return query;
  return query.clone(at::MemoryFormat::Contiguous);
}

// The kernel reads rows of new keys by their strides, but not elements.
at::Tensor whole_elements(const at::Tensor& tensor) {
  return tensor.size(3) == 1 || tensor.stride(3) == 1 ? tensor : tensor.contiguous();
}

std::tuple<at::Tensor, at::Tensor> forward_kvcache_cuda(
    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
    const std::optional<at::Tensor>& seqlens_k, const std::optional<at::Tensor>& block_table,
    const std::optional<at::Tensor>& new_key, const std::optional<at::Tensor>& new_value,
    bool is_causal, std::optional<double> scale, int64_t window_left, int64_t window_right,
    int64_t num_splits, bool batch_invariant) {
  const c10::cuda::CUDAGuard guard(cuda_device_of(query));
  const cudaDeviceProp& properties = *at::cuda::getCurrentDeviceProperties();
  const KvCacheProblem p =
      check_kvcache(query, key_cache, value_cache, seqlens_k, block_table, new_key, new_value,
                    is_causal, scale, window_left, window_right, num_splits, batch_invariant);
  check_cuda(query, p);
  check_device(properties);
  const Device device = describe(properties);
  const LaunchFeatures features = launch_features(device);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const auto check = [&](cudaError_t status) {
    check_launch("fa::forward_kvcache", status, properties);
  };

  const at::Tensor lengths = whole_integers(seqlens_k), table = whole_integers(block_table);
  const KvCache cache = make_cache(p, key_cache, value_cache, lengths, table);
  if (p.seqlen_new > 0 && p.batch > 0 && p.heads_k > 0) {
    count_append(key_cache, value_cache);
    check(append(p, cache, whole_elements(*new_key), whole_elements(*new_value), features, stream));
  }
  // Past the dispatcher, which would take 2 us of an eager call.
  at::Tensor out(
      at::detail::empty_cuda(query.sizes(), query.scalar_type(), query.device(), std::nullopt));
  at::Tensor lse(at::detail::empty_cuda({p.batch, p.heads_q, p.seqlen_q}, at::kFloat,
                                        query.device(), std::nullopt));
  if (out.numel() == 0) return {out, lse};
  if (p.capacity == 0 || key_cache.size(0) == 0) {
    return {out.zero_(), lse.fill_(-std::numeric_limits<float>::infinity())};
  }

  const at::Tensor rows = query_rows(query);
  DecodeParams params = make_decode_params(p, cache, rows, out, lse);
  const int64_t keys = visible_keys(p.capacity, p.seqlen_q, p.window_left);
  DecodeChoice choice = choose_decode(params, device);
  if (batch_invariant) {
    choice.num_splits = invariant_splits(rows_of(params), p.capacity);
  } else if (num_splits > 0) {
    choice.num_splits = static_cast<int>(std::min(num_splits, kMaxSplits));
    choice.in_cluster = merges_in_cluster(choice, params, choice.num_splits, device);
  } else {
    choose_splits(choice, params, keys, device);
  }
  const at::Tensor parts = allocate_parts(params, choice, query.device());
  check(launch_chosen(params, choice, device, stream));
  return {out, lse};
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CUDA, m) { m.impl("forward_kvcache", &fa::forward_kvcache_cuda); }
