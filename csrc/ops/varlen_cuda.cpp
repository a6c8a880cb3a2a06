// CUDA backend of fa::forward_varlen and fa::backward_varlen: check, allocate, fill params, launch.
// The kernels take their tiles from a list that the device makes of the lengths, so that the host
// never waits for these, and a call captured into a CUDA graph can be replayed with others.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "cuda_backward.h"
#include "decode_heuristics.h"
#include "varlen_checks.h"

namespace fa {
namespace {

// A packed tensor in the layout of the kernels: one batch entry.
at::Tensor as_batch(const at::Tensor& tensor) { return tensor.transpose(0, 1).unsqueeze(0); }

// Lengths as the kernels read them.
struct Lengths {
  at::Tensor q, k, used;

  Lengths(const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
          const std::optional<at::Tensor>& seqused_k)
      : q(cu_seqlens_q.contiguous()), k(cu_seqlens_k.contiguous()) {
    if (has(seqused_k)) used = seqused_k->contiguous();
  }

  void fill(FwdParams& params) const {
    params.packed.cu_seqlens_q = q.const_data_ptr<int>();
    params.packed.cu_seqlens_k = k.const_data_ptr<int>();
    params.packed.seqused_k = used.defined() ? used.const_data_ptr<int>() : nullptr;
  }
};

// A kernel's grid: a CTA for each head of every tile of argument `name` that there may be.
int max_tiles(const char* name, int64_t batch, int64_t heads, int64_t total, int block) {
  const int64_t tiles = packed_max_tiles(total, batch, block);
  TORCH_CHECK(tiles <= std::numeric_limits<int>::max() / heads, name, ": heads * (total / ", block,
              " + sequences + 2) must be below 2^31, got ", heads, " * ", tiles);
  TORCH_CHECK(tiles <= std::numeric_limits<int>::max() / block, name, ": total + ", block,
              " * (sequences + 2) must be below 2^31, got ", total, " and ", batch, " sequences");
  return static_cast<int>(tiles);
}

// Fills params with the list of tiles, and enqueues what makes it. Returns its memory.
at::Tensor make_tiles(FwdParams& params, int max_tiles, int block, PackedBy by,
                      const Device& device, cudaStream_t stream, cudaError_t& status) {
  constexpr int kAhead = sizeof(PackedTile) / sizeof(int);  // the count, and what aligns the tiles
  const at::Tensor scratch(at::detail::empty_cuda({kAhead * (1 + int64_t{max_tiles})}, at::kInt,
                                                  at::kCUDA, std::nullopt));
  int* num_tiles = scratch.mutable_data_ptr<int>();
  auto* tiles = reinterpret_cast<PackedTile*>(num_tiles + kAhead);
  params.packed.tiles = tiles;
  params.packed.num_tiles = num_tiles;
  params.packed.max_tiles = max_tiles;
  status =
      launch_packed_tiles(params, block, by, tiles, num_tiles, launch_features(device), stream);
  return scratch;
}

std::tuple<at::Tensor, at::Tensor> forward_varlen_cuda(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, bool is_causal,
    std::optional<double> scale, int64_t window_left, int64_t window_right,
    const std::optional<at::Tensor>& seqused_k, bool /*deterministic*/) {
  const c10::cuda::CUDAGuard guard(cuda_device_of(query));
  const cudaDeviceProp& properties = *at::cuda::getCurrentDeviceProperties();
  const Problem problem = check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal,
                                       scale, window_left, window_right, seqused_k);
  check_cuda(query, problem);
  check_device(properties);
  const at::Tensor out = empty_like_on_cuda(query);
  const at::Tensor lse(at::detail::empty_cuda({problem.heads_q, problem.seqlen_q}, at::kFloat,
                                              query.device(), std::nullopt));
  if (out.numel() == 0 || problem.seqlen_k == 0) {
    return {out.zero_(), lse.fill_(-std::numeric_limits<float>::infinity())};
  }

  const Device device = describe(properties);
  const Lengths lengths(cu_seqlens_q, cu_seqlens_k, seqused_k);
  const at::Tensor query_rows = aligned_rows(as_batch(query), /*copy_values=*/true);
  const at::Tensor key_rows = aligned_rows(as_batch(key), /*copy_values=*/true);
  const at::Tensor value_rows = aligned_rows(as_batch(value), /*copy_values=*/true);
  const at::Tensor result = as_batch(out), out_rows = whole_rows(result);
  FwdParams params = make_params(problem, query_rows, key_rows, value_rows, out_rows, lse);
  lengths.fill(params);
  const bool hopper = obstacle_to_sm90(params, device) == nullptr;
  KernelShape shape = describe_fwd_sm80(params.head_dim, device.smem_limit_bytes);
#if FA_WITH_SM90A
  if (hopper) shape = describe_fwd_sm90(params.head_dim, FwdTileShape::kTall, MaskMode::kBand);
#endif

  const auto check = [&](cudaError_t status) {
    check_launch("fa::forward_varlen", status, properties);
  };
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  cudaError_t status;
  const at::Tensor tiles = make_tiles(
      params, max_tiles("query", problem.batch, problem.heads_q, problem.seqlen_q, shape.block_m),
      shape.block_m, PackedBy::kQuery, device, stream, status);
  check(status);
#if FA_WITH_SM90A
  if (hopper) {
    check(launch_fwd_sm90(params, FwdTileShape::kTall, device.num_sms, stream));
  } else
#endif
  {
    check(launch_fwd_sm80(params, device.smem_limit_bytes, stream));
  }
  if (!out_rows.is_same(result)) result.copy_(out_rows);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_varlen_cuda(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, bool is_causal,
    std::optional<double> scale, int64_t window_left, int64_t window_right,
    const std::optional<at::Tensor>& seqused_k, bool deterministic) {
  const c10::cuda::CUDAGuard guard(cuda_device_of(query));
  const cudaDeviceProp& properties = *at::cuda::getCurrentDeviceProperties();
  const Problem problem =
      check_varlen_backward(grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k,
                            is_causal, scale, window_left, window_right, seqused_k);
  check_cuda(query, problem);
  check_device(properties);
  const at::Tensor grad_query = empty_like_on_cuda(query), grad_key = empty_like_on_cuda(key),
                   grad_value = empty_like_on_cuda(value);
  if (query.numel() == 0 || key.numel() == 0) {
    return {grad_query.zero_(), grad_key.zero_(), grad_value.zero_()};
  }

  const at::Tensor results[] = {as_batch(grad_query), as_batch(grad_key), as_batch(grad_value)};
  BwdCall call = make_bwd_call(problem, as_batch(grad_out), as_batch(query), as_batch(key),
                               as_batch(value), as_batch(out), lse, results[0], results[1],
                               results[2], describe(properties), /*copy_values=*/true);
  const Lengths lengths(cu_seqlens_q, cu_seqlens_k, seqused_k);
  lengths.fill(call.params.fwd);

  const KernelShape& shape = call.shape.kernel;
  const int m_blocks =
      max_tiles("query", problem.batch, problem.heads_q, problem.seqlen_q, shape.block_m);
  const int n_tiles =
      max_tiles("key", problem.batch, problem.heads_k, problem.seqlen_k, shape.block_n);
  BwdParams& params = call.params;
  const at::Tensor scratch = allocate_scratch(params, call.shape, problem.heads_q, m_blocks,
                                              deterministic, query.device());
  const auto check = [&](cudaError_t status) {
    check_launch("fa::backward_varlen", status, properties);
  };
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  cudaError_t status;
  const at::Tensor tiles =
      make_tiles(params.fwd, n_tiles, shape.block_n, PackedBy::kKey, call.device, stream, status);
  check(status);
  check(launch_bwd_pre(params, shape.block_m, stream));
  check(launch_bwd(call, stream));
  check(launch_bwd_post(params, shape.block_m, call.shape.layout, stream));
  finish_gradient(results[0], call.grad_query);
  finish_gradient(results[1], call.grad_key);
  finish_gradient(results[2], call.grad_value);
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CUDA, m) {
  m.impl("forward_varlen", &fa::forward_varlen_cuda);
  m.impl("backward_varlen", &fa::backward_varlen_cuda);
}
