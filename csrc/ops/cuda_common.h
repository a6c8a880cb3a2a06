// What the CUDA backends of fa::forward and fa::backward share: checks, rows that kernels can read
// and write, parameters, errors.
#pragma once
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <limits>

#include "../kernels/launch.h"
#include "checks.h"
#include "decode_heuristics.h"
#include "heuristics.h"

namespace fa {

// The dispatcher comes here if any tensor is on CUDA.
inline c10::Device cuda_device_of(const at::Tensor& query) {
  TORCH_CHECK(query.is_cuda(), "query: device must be that of the CUDA tensors of the call, got ",
              query.device());
  return query.device();
}

inline void check_cuda(const at::Tensor& query, const Problem& problem) {
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

// A kernel's grid: one CTA for each block of rows of each head of argument `name`.
inline void check_grid(const char* name, int64_t batch, int64_t heads, int64_t seqlen, int block) {
  const int64_t pairs = batch * heads;  // below 2^62
  const int64_t blocks = (seqlen + block - 1) / block;
  if (blocks == 0) return;
  TORCH_CHECK(pairs <= std::numeric_limits<int>::max() / blocks, name,
              ": batch * heads * ceil(seqlen / ", block, ") must be below 2^31, got ", batch, " * ",
              heads, " * ", blocks);
}

inline void check_device(const cudaDeviceProp& device) {
  TORCH_CHECK(device.major >= 8, "query: device must have compute capability 8.0 or newer, got ",
              device.name, " with ", device.major, ".", device.minor,
              "; use torch's scaled_dot_product_attention on this GPU");
}

inline void check_launch(const char* op, cudaError_t status, const cudaDeviceProp& device) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // the error is reported here, not by the next call that looks for one
  const bool no_kernel = status == cudaErrorNoKernelImageForDevice ||
                         status == cudaErrorInvalidDeviceFunction ||
                         status == cudaErrorUnsupportedPtxVersion;
  TORCH_CHECK(!no_kernel, op, ": no kernel for ", device.name, " (sm_", device.major, device.minor,
              ") in this build, which has ", FA_CUDA_ARCHS, " (", cudaGetErrorString(status),
              "); reinstall flashattn_ext with TORCH_CUDA_ARCH_LIST=", device.major, ".",
              device.minor, device.major == 9 ? "a" : "");
  TORCH_CHECK(false, op, ": CUDA error ", cudaGetErrorName(status), ": ",
              cudaGetErrorString(status));
}

// A dimension of size 1 is never stepped along, and its stride may be any number.
inline int64_t stride_of(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

// Kernels copy rows to shared memory in aligned pieces of 16 bytes, asynchronously. A view that
// does not allow it is copied once, to rows padded with zeros to whole pieces: rare, and O(seqlen)
// traffic beside O(seqlen^2) work, where a second, slow load path would burden every kernel.
inline at::Tensor aligned_rows(const at::Tensor& tensor, bool copy_values) {
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

inline MaskDtype mask_dtype_of(const at::Tensor& mask) {
  switch (mask.scalar_type()) {
    case at::kBool:
      return MaskDtype::kBool;
    case at::kFloat:
      return MaskDtype::kFloat32;
    default:
      return MaskDtype::kElement;
  }
}

inline void fill_strides(const at::Tensor& tensor, int64_t* strides, int dims) {
  for (int dim = 0; dim < dims; ++dim) strides[dim] = stride_of(tensor, dim);
}

inline FwdParams make_params(const Problem& problem, const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const at::Tensor& out,
                             const at::Tensor& lse) {
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

// Laid out as empty_like lays it out, past the dispatcher, which would take 2 us of an eager call.
inline at::Tensor empty_like_on_cuda(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense()
             ? at::Tensor(at::detail::empty_strided_cuda(tensor.sizes(), tensor.strides(),
                                                         tensor.scalar_type(), tensor.device()))
             : at::empty_like(tensor);
}

// Kernels write whole rows. A result may have any strides; where its rows have gaps, the kernel
// writes to this and the result is copied from it.
inline at::Tensor whole_rows(const at::Tensor& result) {
  const bool rows_fit = result.size(3) == 1 || result.stride(3) == 1;
  return rows_fit ? result : at::empty(result.sizes(), result.options());
}

inline Device describe(const cudaDeviceProp& device) {
  return {10 * device.major + device.minor, device.multiProcessorCount,
          static_cast<int>(device.sharedMemPerBlockOptin)};
}

// Fills params with its splits and their scratch, which is one allocation.
inline at::Tensor allocate_parts(DecodeParams& params, const DecodeChoice& choice,
                                 c10::Device device) {
  params.num_splits = choice.num_splits;
  if (params.num_splits == 1 || choice.in_cluster) return {};
  const int cols = choice.shape.cols_rounded;
  const int64_t parts =
      int64_t{params.batch} * params.heads_q * params.seqlen_q * params.num_splits;
  at::Tensor scratch(
      at::detail::empty_cuda({parts * (cols + 2)}, at::kFloat, device, std::nullopt));
  params.partial_out = scratch.mutable_data_ptr<float>();
  params.partial_sums = params.partial_out + parts * cols;
  return scratch;
}

inline cudaError_t launch_chosen(const DecodeParams& params, const DecodeChoice& choice,
                                 const Device& device, cudaStream_t stream) {
#if FA_WITH_SM90A
  if (choice.kernel == DecodeKernel::kHopper) return launch_decode_sm90(params, stream);
#endif
  return launch_decode(params, choice.kernel == DecodeKernel::kLarge, launch_features(device),
                       stream);
}

}  // namespace fa
