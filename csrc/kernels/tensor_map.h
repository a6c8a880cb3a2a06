// Host: descriptions of tensors for the bulk tensor copy engine (TMA).
#pragma once
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "../params.h"

namespace fa {

// The driver's encoder, looked up once (null without one): the extension does not link libcuda, so
// that it loads where there is no driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    const bool ok = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(ok ? function : nullptr);
  }();
  return encoder;
}

// Dimensions (head_dim, seqlen, heads, batch), boxes of 64 columns and box_rows rows of one (batch,
// head), 128-byte swizzle; see tile/tma.cuh. stride: batch, head, row in elements; of a dimension
// that is never stepped along it may be 0. Fails with cudaErrorInvalidValue where the copy engine
// cannot take the tensor: addresses or strides off 16 bytes, strides of 2^40 bytes and more.
inline cudaError_t encode_tensor_map(CUtensorMap* map, const void* pointer, Dtype dtype,
                                     int head_dim, int seqlen, int heads, int batch,
                                     const int64_t (&stride)[3], int box_rows) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto size = [](int n) { return static_cast<cuuint64_t>(n); };
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t dims[4] = {size(head_dim), size(seqlen), size(heads), size(batch)};
  const cuuint64_t strides[3] = {bytes(stride[2]), bytes(stride[1]), bytes(stride[0])};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(
      map,
      dtype == Dtype::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, const_cast<void*>(pointer), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace fa
