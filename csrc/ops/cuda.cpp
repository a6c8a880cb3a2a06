// CUDA backend of fa::forward: check, allocate, fill params, launch. Runs on the current stream of
// query's device, never waits for it and keeps nothing between calls, so a call can be captured
// into a CUDA graph.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>
#include <string>
#include <tuple>

#include "../kernels/launch.h"
#include "checks.h"
#include "heuristics.h"

namespace fa {
namespace {

void check_cuda(const at::Tensor& query, const Problem& problem) {
  const at::ScalarType dtype = query.scalar_type();
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16,
              "query: dtype must be float16 or bfloat16 on CUDA, got ", dtype,
              "; convert query, key and value, or use torch's scaled_dot_product_attention");
  const auto check_at_most = [](const char* name, int64_t size, int64_t limit) {
    TORCH_CHECK(size <= limit, name, " must be at most ", limit, ", got ", size);
  };
  constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
  check_at_most("query: batch", problem.batch, kMaxInt);
  check_at_most("query: heads", problem.heads_q, kMaxInt);
  check_at_most("query: seqlen", problem.seqlen_q, kMaxSeqlen);
  check_at_most("key: seqlen", problem.seqlen_k, kMaxSeqlen);
}

// The kernel's grid: one CTA for each block of rows of each head.
void check_grid(const Problem& problem, int block_m) {
  const int64_t pairs = problem.batch * problem.heads_q;  // below 2^62
  const int64_t blocks = (problem.seqlen_q + block_m - 1) / block_m;
  if (blocks == 0) return;
  TORCH_CHECK(pairs <= std::numeric_limits<int>::max() / blocks,
              "query: batch * heads * ceil(seqlen / ", block_m, ") must be below 2^31, got ",
              problem.batch, " * ", problem.heads_q, " * ", blocks);
}

void check_device(const cudaDeviceProp& device) {
  TORCH_CHECK(device.major >= 8, "query: device must have compute capability 8.0 or newer, got ",
              device.name, " with ", device.major, ".", device.minor,
              "; use torch's scaled_dot_product_attention on this GPU");
}

void check_launch(cudaError_t status, const cudaDeviceProp& device) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // the error is reported here, not by the next call that looks for one
  const bool no_kernel = status == cudaErrorNoKernelImageForDevice ||
                         status == cudaErrorInvalidDeviceFunction ||
                         status == cudaErrorUnsupportedPtxVersion;
  TORCH_CHECK(!no_kernel, "fa::forward: no kernel for ", device.name, " (sm_", device.major,
              device.minor, ") in this build, which has ", FA_CUDA_ARCHS, " (",
              cudaGetErrorString(status),
              "); reinstall flashattn_ext with TORCH_CUDA_ARCH_LIST=", device.major, ".",
              device.minor, device.major == 9 ? "a" : "");
  TORCH_CHECK(false, "fa::forward: CUDA error ", cudaGetErrorName(status), ": ",
              cudaGetErrorString(status));
}

// A dimension of size 1 is never stepped along, and its stride may be any number.
int64_t stride_of(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

// Kernels copy rows to shared memory in aligned pieces of 16 bytes, asynchronously. A view that
// does not allow it is copied once, to rows padded with zeros to whole pieces: rare, and O(seqlen)
// traffic beside O(seqlen^2) work, where a second, slow load path would burden every kernel.
at::Tensor aligned_rows(const at::Tensor& tensor, bool copy_values) {
  constexpr int64_t kPieceBytes = 16;
  const int64_t piece = kPieceBytes / static_cast<int64_t>(tensor.element_size());
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kPieceBytes == 0 &&
                       stride_of(tensor, 0) % piece == 0 && stride_of(tensor, 1) % piece == 0 &&
                       stride_of(tensor, 2) % piece == 0 && tensor.size(3) % piece == 0;
  if (aligned && tensor.stride(3) == 1) return tensor;

  const int64_t head_dim = tensor.size(3);
  const int64_t padded = (head_dim + piece - 1) / piece * piece;
  at::Tensor copy =
      at::empty({tensor.size(0), tensor.size(1), tensor.size(2), padded}, tensor.options());
  if (!copy_values) return copy;
  copy.narrow(3, 0, head_dim).copy_(tensor);
  if (padded != head_dim) copy.narrow(3, head_dim, padded - head_dim).zero_();
  return copy;
}

MaskDtype mask_dtype_of(const at::Tensor& mask) {
  switch (mask.scalar_type()) {
    case at::kBool:
      return MaskDtype::kBool;
    case at::kFloat:
      return MaskDtype::kFloat32;
    default:
      return MaskDtype::kElement;
  }
}

void fill_strides(const at::Tensor& tensor, int64_t* strides, int dims) {
  for (int dim = 0; dim < dims; ++dim) strides[dim] = stride_of(tensor, dim);
}

FwdParams make_params(const Problem& problem, const at::Tensor& query, const at::Tensor& key,
                      const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse) {
  FwdParams params{};
  params.query = query.const_data_ptr();
  params.key = key.const_data_ptr();
  params.value = value.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr<float>();
  fill_strides(query, params.query_stride, 3);
  fill_strides(key, params.key_stride, 3);
  fill_strides(value, params.value_stride, 3);
  fill_strides(out, params.out_stride, 3);

  params.batch = static_cast<int>(problem.batch);
  params.heads_q = static_cast<int>(problem.heads_q);
  params.heads_k = static_cast<int>(problem.heads_k);
  params.seqlen_q = static_cast<int>(problem.seqlen_q);
  params.seqlen_k = static_cast<int>(problem.seqlen_k);
  params.head_dim = static_cast<int>(problem.head_dim);
  params.scale = static_cast<float>(problem.scale);
  params.diagonal = problem.diagonal;
  params.window_left = problem.window_left;
  params.window_right = problem.window_right;

  params.dtype = query.scalar_type() == at::kHalf ? Dtype::kFloat16 : Dtype::kBFloat16;
  params.mask_mode = problem.mask_mode;
  if (problem.mask_mode == MaskMode::kTensor) {
    params.mask = problem.mask.const_data_ptr();
    params.mask_dtype = mask_dtype_of(problem.mask);
    fill_strides(problem.mask, params.mask_stride, 4);
  }
  return params;
}

// A call up to its launch.
struct Plan {
  Problem problem;
  at::Tensor out, lse;
  at::Tensor query, key, value, out_rows;  // what the kernel reads and writes
  FwdParams params;
  FwdChoice choice;
  bool empty;  // no kernel is needed
};

Device describe(const cudaDeviceProp& device) {
  return {10 * device.major + device.minor, device.multiProcessorCount,
          static_cast<int>(device.sharedMemPerBlockOptin)};
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
  check_grid(problem, describe_fwd_sm80(static_cast<int>(problem.head_dim),
                                        static_cast<int>(device.sharedMemPerBlockOptin))
                          .block_m);
  // Past the dispatcher, which would take 2 us of an eager call.
  plan.out = query.is_non_overlapping_and_dense()
                 ? at::Tensor(at::detail::empty_strided_cuda(query.sizes(), query.strides(),
                                                             query.scalar_type(), query.device()))
                 : at::empty_like(query);
  plan.lse = at::Tensor(at::detail::empty_cuda({problem.batch, problem.heads_q, problem.seqlen_q},
                                               at::kFloat, query.device(), std::nullopt));
  plan.empty = plan.out.numel() == 0 || problem.seqlen_k == 0;
  if (plan.empty) return plan;
  plan.query = aligned_rows(query, copy_values);
  plan.key = aligned_rows(key, copy_values);
  plan.value = aligned_rows(value, copy_values);
  // Kernels write whole rows; out has the strides of query, whatever they are.
  const bool rows_fit = plan.out.size(3) == 1 || plan.out.stride(3) == 1;
  plan.out_rows = rows_fit ? plan.out : at::empty(plan.out.sizes(), plan.out.options());
  plan.params = make_params(problem, plan.query, plan.key, plan.value, plan.out_rows, plan.lse);
  plan.choice = choose_fwd(plan.params, describe(device));
  return plan;
}

std::tuple<at::Tensor, at::Tensor> forward_cuda(const at::Tensor& query, const at::Tensor& key,
                                                const at::Tensor& value,
                                                const std::optional<at::Tensor>& attn_mask,
                                                bool is_causal, std::optional<double> scale,
                                                int64_t window_left, int64_t window_right,
                                                bool bottom_right) {
  const c10::cuda::CUDAGuard guard(query.device());
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  Plan plan = plan_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                           window_right, bottom_right, device, /*copy_values=*/true);
  if (plan.empty) {
    plan.out.zero_();
    plan.lse.fill_(-std::numeric_limits<float>::infinity());
    return {plan.out, plan.lse};
  }

  FwdParams& params = plan.params;
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  at::Tensor mask_summary;
  if (params.mask_mode == MaskMode::kTensor) {
    mask_summary = at::empty({mask_summary_bytes(params)}, query.options().dtype(at::kByte));
    params.mask_summary = mask_summary.mutable_data_ptr();
    check_launch(launch_mask_summary(params, stream), device);
  }
#if FA_WITH_SM90A
  if (plan.choice.hopper) {
    check_launch(launch_fwd_sm90(params, plan.choice.shape, device.multiProcessorCount, stream),
                 device);
  } else
#endif
  {
    check_launch(launch_fwd_sm80(params, static_cast<int>(device.sharedMemPerBlockOptin), stream),
                 device);
  }
  if (!plan.out_rows.is_same(plan.out)) plan.out.copy_(plan.out_rows);
  return {plan.out, plan.lse};
}

std::string forward_kernel_cuda(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                                bool is_causal, std::optional<double> scale, int64_t window_left,
                                int64_t window_right, bool bottom_right) {
  const c10::cuda::CUDAGuard guard(query.device());
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  const Plan plan = plan_forward(query, key, value, attn_mask, is_causal, scale, window_left,
                                 window_right, bottom_right, device, /*copy_values=*/false);
  if (plan.empty) return "none: no query or no key";
  const int head_dim = static_cast<int>(plan.problem.head_dim);
  KernelShape tile = describe_fwd_sm80(head_dim, static_cast<int>(device.sharedMemPerBlockOptin));
#if FA_WITH_SM90A
  if (plan.choice.hopper)
    tile = describe_fwd_sm90(head_dim, plan.choice.shape, plan.params.mask_mode);
#endif
  return std::string(plan.choice.hopper ? "fwd_sm90 " : "fwd_sm80 ") +
         std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) + ": " +
         plan.choice.reason;
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, CUDA, m) {
  m.impl("forward", &fa::forward_cuda);
  m.impl("forward_kernel", &fa::forward_kernel_cuda);
}
