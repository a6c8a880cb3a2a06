// What the CUDA backends of fa::backward and fa::backward_varlen share: parameters, choice of the
// kernel, scratch, launches.
#pragma once
#include "cuda_common.h"

namespace fa {

// A call up to its launches. Tensors are what the kernels read and write: of the layout (batch,
// heads, seqlen, head_dim), in rows that they can take.
struct BwdCall {
  at::Tensor query, key, value, out, lse, grad_out;
  at::Tensor grad_query, grad_key, grad_value;
  BwdParams params;  // but for scratch
  Device device;
  BwdChoice choice;
  BwdShape shape;
};

inline BwdShape describe_bwd(const BwdChoice& choice, int head_dim, const Device& device) {
#if FA_WITH_SM90A
  if (choice.hopper) return describe_bwd_sm90(head_dim);
#endif
  return describe_bwd_sm80(head_dim, device.smem_limit_bytes);
}

// grad_query, grad_key and grad_value are the results. copy_values: fill copies of rows that are
// not aligned.
inline BwdCall make_bwd_call(const Problem& problem, const at::Tensor& grad_out,
                             const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
                             const at::Tensor& grad_query, const at::Tensor& grad_key,
                             const at::Tensor& grad_value, const Device& device, bool copy_values) {
  BwdCall call{};
  call.query = aligned_rows(query, copy_values);
  call.key = aligned_rows(key, copy_values);
  call.value = aligned_rows(value, copy_values);
  call.out = aligned_rows(out, copy_values);
  call.grad_out = aligned_rows(grad_out, copy_values);
  call.lse = lse.contiguous();
  call.grad_query = whole_rows(grad_query);
  call.grad_key = whole_rows(grad_key);
  call.grad_value = whole_rows(grad_value);

  BwdParams& params = call.params;
  params.fwd = make_params(problem, call.query, call.key, call.value, call.out, call.lse);
  params.grad_out = call.grad_out.const_data_ptr();
  params.grad_query = call.grad_query.mutable_data_ptr();
  params.grad_key = call.grad_key.mutable_data_ptr();
  params.grad_value = call.grad_value.mutable_data_ptr();
  fill_strides(call.grad_out, params.grad_out_stride, 3);
  fill_strides(call.grad_query, params.grad_query_stride, 3);
  fill_strides(call.grad_key, params.grad_key_stride, 3);
  fill_strides(call.grad_value, params.grad_value_stride, 3);

  call.device = device;
  call.choice = choose_bwd(params, device);
  call.shape = describe_bwd(call.choice, params.fwd.head_dim, device);
  return call;
}

// Fills params with the scratch of a call, which is one allocation: of `heads` heads of m_blocks
// blocks of rows.
inline at::Tensor allocate_scratch(BwdParams& params, const BwdShape& shape, int64_t heads,
                                   int m_blocks, bool deterministic, c10::Device device) {
  params.rows_rounded = m_blocks * shape.kernel.block_m;
  params.cols_rounded = shape.cols_rounded;
  // None of these overflows: the callers have bounded heads * m_blocks.
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

inline cudaError_t launch_bwd(const BwdCall& call, cudaStream_t stream) {
#if FA_WITH_SM90A
  if (call.choice.hopper) return launch_bwd_sm90(call.params, call.device.num_sms, stream);
#endif
  return launch_bwd_sm80(call.params, call.device.smem_limit_bytes, stream);
}

// Results whose rows the kernels could not write are copied from those that they wrote.
inline void finish_gradient(const at::Tensor& gradient, const at::Tensor& rows) {
  if (!rows.is_same(gradient)) gradient.copy_(rows);
}

}  // namespace fa
