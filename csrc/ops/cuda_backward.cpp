// CUDA backend of fa::backward: check, allocate gradients and scratch, fill params, launch. Runs on
// the current stream of query's device, never waits for it and keeps nothing between calls, so a
// call can be captured into a CUDA graph.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "cuda_common.h"

namespace fa {
namespace {

// A call up to its launches.
struct Plan {
  at::Tensor grad_query, grad_key, grad_value;
  // What the kernels read and write.
  at::Tensor query, key, value, out, lse, grad_out;
  at::Tensor grad_query_rows, grad_key_rows, grad_value_rows;
  BwdParams params;
  Device device;
  BwdChoice choice;
  BwdShape shape;
  bool empty;  // no kernel is needed
};

BwdShape describe_bwd(const BwdChoice& choice, int head_dim, const Device& device) {
#if FA_WITH_SM90A
  if (choice.hopper) return describe_bwd_sm90(head_dim);
#endif
  return describe_bwd_sm80(head_dim, device.smem_limit_bytes);
}

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

  plan.query = aligned_rows(query, copy_values);
  plan.key = aligned_rows(key, copy_values);
  plan.value = aligned_rows(value, copy_values);
  plan.out = aligned_rows(out, copy_values);
  plan.grad_out = aligned_rows(grad_out, copy_values);
  plan.lse = lse.contiguous();
  plan.grad_query_rows = whole_rows(plan.grad_query);
  plan.grad_key_rows = whole_rows(plan.grad_key);
  plan.grad_value_rows = whole_rows(plan.grad_value);

  BwdParams& params = plan.params;
  params.fwd = make_params(problem, plan.query, plan.key, plan.value, plan.out, plan.lse);
  params.grad_out = plan.grad_out.const_data_ptr();
  params.grad_query = plan.grad_query_rows.mutable_data_ptr();
  params.grad_key = plan.grad_key_rows.mutable_data_ptr();
  params.grad_value = plan.grad_value_rows.mutable_data_ptr();
  fill_strides(plan.grad_out, params.grad_out_stride, 3);
  fill_strides(plan.grad_query_rows, params.grad_query_stride, 3);
  fill_strides(plan.grad_key_rows, params.grad_key_stride, 3);
  fill_strides(plan.grad_value_rows, params.grad_value_stride, 3);

  plan.device = describe(device);
  plan.choice = choose_bwd(params, plan.device);
  plan.shape = describe_bwd(plan.choice, params.fwd.head_dim, plan.device);
  const KernelShape& tile = plan.shape.kernel;
  check_grid("query", problem.batch, problem.heads_q, problem.seqlen_q, tile.block_m);
  check_grid("key", problem.batch, problem.heads_k, problem.seqlen_k, tile.block_n);
  return plan;
}

// Fills params with the scratch of a call, which is one allocation.
at::Tensor allocate_scratch(BwdParams& params, const BwdShape& shape, bool deterministic,
                            c10::Device device) {
  const int block_m = shape.kernel.block_m;
  const int m_blocks = (params.fwd.seqlen_q + block_m - 1) / block_m;
  params.rows_rounded = m_blocks * block_m;
  params.cols_rounded = shape.cols_rounded;
  // None of these overflows: check_grid has bounded heads * m_blocks.
  const int64_t heads = static_cast<int64_t>(params.fwd.batch) * params.fwd.heads_q;
  const int64_t rows = heads * params.rows_rounded;
  const int64_t numbers = rows * (2 + params.cols_rounded) + (deterministic ? heads * m_blocks : 0);
  const at::Tensor scratch(at::detail::empty_cuda({numbers}, at::kFloat, device, std::nullopt));
  params.grad_query_accum = scratch.mutable_data_ptr<float>();
  params.delta = params.grad_query_accum + rows * params.cols_rounded;
  params.lse_log2 = params.delta + rows;
  static_assert(sizeof(unsigned) == sizeof(float));
  params.turns = deterministic ? reinterpret_cast<unsigned*>(params.lse_log2 + rows) : nullptr;
  return scratch;
}

cudaError_t launch_bwd(const Plan& plan, cudaStream_t stream) {
#if FA_WITH_SM90A
  if (plan.choice.hopper) return launch_bwd_sm90(plan.params, plan.device.num_sms, stream);
#endif
  return launch_bwd_sm80(plan.params, plan.device.smem_limit_bytes, stream);
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
  BwdParams& params = plan.params;
  const at::Tensor scratch = allocate_scratch(params, plan.shape, deterministic, query.device());
  at::Tensor mask_summary;
  if (params.fwd.mask_mode == MaskMode::kTensor) {
    mask_summary = at::Tensor(at::detail::empty_cuda({mask_summary_bytes(params.fwd)}, at::kByte,
                                                     query.device(), std::nullopt));
    params.fwd.mask_summary = mask_summary.mutable_data_ptr();
    check(launch_mask_summary(params.fwd, stream));
  }
  check(launch_bwd_pre(params, plan.shape.kernel.block_m, stream));
  check(launch_bwd(plan, stream));
  check(launch_bwd_post(params, plan.shape.kernel.block_m, plan.shape.layout, stream));

  const auto finish = [](const at::Tensor& gradient, const at::Tensor& rows) {
    if (!rows.is_same(gradient)) gradient.copy_(rows);
  };
  finish(plan.grad_query, plan.grad_query_rows);
  finish(plan.grad_key, plan.grad_key_rows);
  finish(plan.grad_value, plan.grad_value_rows);
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
  const KernelShape& tile = plan.shape.kernel;
  return std::string(plan.choice.hopper ? "bwd_sm90 " : "bwd_sm80 ") +
         std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) + ": " +
         plan.choice.reason;
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CUDA, m) {
  m.impl("backward", &fa::backward_cuda);
  m.impl("backward_kernel", &fa::backward_kernel_cuda);
}
