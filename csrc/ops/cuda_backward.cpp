// CUDA backend of fa::backward: check, allocate gradients and scratch, fill params, launch. Runs on
// the current stream of query's device, never waits for it and keeps nothing between calls, so a
// call can be captured into a CUDA graph.
#include "cuda_backward.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

namespace fa {
namespace {

// A call up to its launches.
struct Plan {
  at::Tensor grad_query, grad_key, grad_value;
  BwdCall call;
  bool empty;  // no kernel is needed
};

// Check, allocate gradients, fill params but for scratch, and choose the kernel. copy_values: fill
// copies of rows that are not aligned.
Plan plan_backward(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
                   const std::optional<at::Tensor>& attn_mask, bool is_causal,
                   std::optional<double> scale, int64_t window_left, int64_t window_right,
                   bool bottom_right, const cudaDeviceProp& device, bool copy_values) {
  const Problem problem = check_backward(grad_out, query, key, value, out, lse, attn_mask,
                                         is_causal, scale, window_left, window_right, bottom_right);
  check_cuda(query, problem);
  check_device(device);
  Plan plan{};
  plan.grad_query = empty_like_on_cuda(query);
  plan.grad_key = empty_like_on_cuda(key);
  plan.grad_value = empty_like_on_cuda(value);
  plan.empty = query.numel() == 0 || key.numel() == 0;
  if (plan.empty) return plan;

  plan.call = make_bwd_call(problem, grad_out, query, key, value, out, lse, plan.grad_query,
                            plan.grad_key, plan.grad_value, describe(device), copy_values);
  const KernelShape& tile = plan.call.shape.kernel;
  check_grid("query", problem.batch, problem.heads_q, problem.seqlen_q, tile.block_m);
  check_grid("key", problem.batch, problem.heads_k, problem.seqlen_k, tile.block_n);
  return plan;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cuda(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const std::optional<at::Tensor>& attn_mask, bool is_causal, std::optional<double> scale,
    int64_t window_left, int64_t window_right, bool bottom_right, bool deterministic) {
  const c10::cuda::CUDAGuard guard(cuda_device_of(query));
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  Plan plan = plan_backward(grad_out, query, key, value, out, lse, attn_mask, is_causal, scale,
                            window_left, window_right, bottom_right, device, /*copy_values=*/true);
  if (plan.empty) {
    plan.grad_query.zero_();
    plan.grad_key.zero_();
    plan.grad_value.zero_();
    return {plan.grad_query, plan.grad_key, plan.grad_value};
  }

  const auto check = [&](cudaError_t status) { check_launch("fa::backward", status, device); };
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  BwdCall& call = plan.call;
  BwdParams& params = call.params;
  const int block_m = call.shape.kernel.block_m;
  const at::Tensor scratch = allocate_scratch(
      params, call.shape, int64_t{params.fwd.batch} * params.fwd.heads_q,
      (params.fwd.seqlen_q + block_m - 1) / block_m, deterministic, query.device());
  at::Tensor mask_summary;
  if (params.fwd.mask_mode == MaskMode::kTensor) {
    mask_summary = at::Tensor(at::detail::empty_cuda({mask_summary_bytes(params.fwd)}, at::kByte,
                                                     query.device(), std::nullopt));
    params.fwd.mask_summary = mask_summary.mutable_data_ptr();
    check(launch_mask_summary(params.fwd, stream));
  }
  check(launch_bwd_pre(params, block_m, stream));
  check(launch_bwd(call, stream));
  check(launch_bwd_post(params, block_m, call.shape.layout, stream));
  finish_gradient(plan.grad_query, call.grad_query);
  finish_gradient(plan.grad_key, call.grad_key);
  finish_gradient(plan.grad_value, call.grad_value);
  return {plan.grad_query, plan.grad_key, plan.grad_value};
}

std::string backward_kernel_cuda(const at::Tensor& grad_out, const at::Tensor& query,
                                 const at::Tensor& key, const at::Tensor& value,
                                 const at::Tensor& out, const at::Tensor& lse,
                                 const std::optional<at::Tensor>& attn_mask, bool is_causal,
                                 std::optional<double> scale, int64_t window_left,
                                 int64_t window_right, bool bottom_right, bool /*deterministic*/) {
  const c10::cuda::CUDAGuard guard(cuda_device_of(query));
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  const Plan plan =
      plan_backward(grad_out, query, key, value, out, lse, attn_mask, is_causal, scale, window_left,
                    window_right, bottom_right, device, /*copy_values=*/false);
  if (plan.empty) return "none: no query or no key";
  const KernelShape& tile = plan.call.shape.kernel;
  return std::string(plan.call.choice.hopper ? "bwd_sm90 " : "bwd_sm80 ") +
         std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) + ": " +
         plan.call.choice.reason;
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CUDA, m) {
  m.impl("backward", &fa::backward_cuda);
  m.impl("backward_kernel", &fa::backward_kernel_cuda);
}
