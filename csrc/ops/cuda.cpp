// CUDA backend of fa::forward: check, allocate, fill params, launch. Runs on the current stream of
// query's device, never waits for it and keeps nothing between calls, so a call can be captured
// into a CUDA graph.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "cuda_common.h"

namespace fa {
namespace {

// A call up to its launch.
struct Plan {
  Problem problem;
  at::Tensor out, lse;
  at::Tensor query, key, value, out_rows;  // what the kernel reads and writes
  FwdParams params;
  const char* decode_reason;  // null: a forward kernel, by choice
  DecodeParams decode;
  DecodeChoice decode_choice;
  FwdChoice choice;
  bool empty;  // no kernel is needed
};

// Of the decoding kernels: few queries of a group, whose keys may be split.
void plan_decode(Plan& plan, const Device& device) {
  plan.decode_reason = reason_to_decode(plan.params, device);
  if (plan.decode_reason == nullptr) return;
  plan.decode = as_decode(plan.params);
  plan.decode_choice = choose_decode(plan.decode, device);
  choose_splits(plan.decode_choice, plan.decode, visible_keys(plan.params), device);
}

// Check, allocate, fill params and choose the kernel. copy_values: fill copies of rows that are not
// aligned.
Plan plan_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& attn_mask, bool is_causal,
                  std::optional<double> scale, int64_t window_left, int64_t window_right,
                  bool bottom_right, const cudaDeviceProp& device, bool copy_values) {
  Plan plan{};
  plan.problem = check_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                               window_right, bottom_right);
  const Problem& problem = plan.problem;
  check_cuda(query, problem);
  check_device(device);
  const int block_m = describe_fwd_sm80(static_cast<int>(problem.head_dim),
                                        static_cast<int>(device.sharedMemPerBlockOptin))
                          .block_m;
  check_grid("query", problem.batch, problem.heads_q, problem.seqlen_q, block_m);
  plan.out = empty_like_on_cuda(query);
  plan.lse = at::Tensor(at::detail::empty_cuda({problem.batch, problem.heads_q, problem.seqlen_q},
                                               at::kFloat, query.device(), std::nullopt));
  plan.empty = plan.out.numel() == 0 || problem.seqlen_k == 0;
  if (plan.empty) return plan;
  plan.query = aligned_rows(query, copy_values);
  plan.key = aligned_rows(key, copy_values);
  plan.value = aligned_rows(value, copy_values);
  plan.out_rows = whole_rows(plan.out);
  plan.params = make_params(problem, plan.query, plan.key, plan.value, plan.out_rows, plan.lse);
  plan_decode(plan, describe(device));
  if (plan.decode_reason == nullptr) plan.choice = choose_fwd(plan.params, describe(device));
  return plan;
}

std::tuple<at::Tensor, at::Tensor> forward_cuda(const at::Tensor& query, const at::Tensor& key,
                                                const at::Tensor& value,
                                                const std::optional<at::Tensor>& attn_mask,
                                                bool is_causal, std::optional<double> scale,
                                                int64_t window_left, int64_t window_right,
                                                bool bottom_right, bool /*deterministic*/) {
  const c10::cuda::CUDAGuard guard(cuda_device_of(query));
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  Plan plan = plan_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                           window_right, bottom_right, device, /*copy_values=*/true);
  if (plan.empty) {
    plan.out.zero_();
    plan.lse.fill_(-std::numeric_limits<float>::infinity());
    return {std::move(plan.out), std::move(plan.lse)};
  }

  FwdParams& params = plan.params;
  const auto check = [&](cudaError_t status) { check_launch("fa::forward", status, device); };
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  if (plan.decode_reason != nullptr) {
    const at::Tensor parts = allocate_parts(plan.decode, plan.decode_choice, query.device());
    check(launch_chosen(plan.decode, plan.decode_choice, describe(device), stream));
    if (!plan.out_rows.is_same(plan.out)) plan.out.copy_(plan.out_rows);
    return {std::move(plan.out), std::move(plan.lse)};
  }
  at::Tensor mask_summary;
  if (params.mask_mode == MaskMode::kTensor) {
    mask_summary = at::empty({mask_summary_bytes(params)}, query.options().dtype(at::kByte));
    params.mask_summary = mask_summary.mutable_data_ptr();
    check(launch_mask_summary(params, stream));
  }
#if FA_WITH_SM90A
  if (plan.choice.hopper) {
    check(launch_fwd_sm90(params, plan.choice.shape, device.multiProcessorCount, stream));
  } else
#endif
  {
    check(launch_fwd_sm80(params, static_cast<int>(device.sharedMemPerBlockOptin), stream));
  }
  if (!plan.out_rows.is_same(plan.out)) plan.out.copy_(plan.out_rows);
  return {std::move(plan.out), std::move(plan.lse)};
}

std::string forward_kernel_cuda(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                                bool is_causal, std::optional<double> scale, int64_t window_left,
                                int64_t window_right, bool bottom_right) {
  const c10::cuda::CUDAGuard guard(cuda_device_of(query));
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  const Plan plan = plan_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                                 window_right, bottom_right, device, /*copy_values=*/false);
  if (plan.empty) return "none: no query or no key";
  const auto text = [](const char* name, const KernelShape& tile) {
    return name + std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n);
  };
  if (plan.decode_reason != nullptr) {
    const DecodeChoice& choice = plan.decode_choice;
    return text(choice.kernel == DecodeKernel::kHopper ? "decode_sm90 " : "decode ",
                choice.shape.kernel) +
           ", " + std::to_string(choice.num_splits) +
           (choice.num_splits == 1 ? " split" : " splits") +
           (choice.in_cluster ? " in a cluster: " : ": ") + plan.decode_reason;
  }
  const int head_dim = static_cast<int>(plan.problem.head_dim);
  KernelShape tile = describe_fwd_sm80(head_dim, static_cast<int>(device.sharedMemPerBlockOptin));
#if FA_WITH_SM90A
  if (plan.choice.hopper)
    tile = describe_fwd_sm90(head_dim, plan.choice.shape, plan.params.mask_mode);
#endif
  return text(plan.choice.hopper ? "fwd_sm90 " : "fwd_sm80 ", tile) + ": " + plan.choice.reason;
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CUDA, m) {
  m.impl("forward", &fa::forward_cuda);
  m.impl("forward_kernel", &fa::forward_kernel_cuda);
}
