// Host: descriptions of tensors for the bulk tensor copy engine (TMA).
#pragma once
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstring>

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

// A tensor of 16-bit elements, with dimensions (head_dim, seqlen, heads, batch), and boxes of 64
// columns and box_rows rows of one (batch, head). stride: batch, head, row in elements; of a
// dimension that is never stepped along it may be 0. Without padding, so that equality is memcmp.
struct TensorMapKey {
  const void* pointer;
  int64_t stride[3];
  int head_dim, seqlen, heads, batch, box_rows;
  Dtype dtype;
};
static_assert(sizeof(TensorMapKey) == 56, "no padding");

// With 128-byte swizzle; see tile/tma.cuh. Fails with cudaErrorInvalidValue where the copy engine
// cannot take the tensor: addresses or strides off 16 bytes, strides of 2^40 bytes and more.
inline cudaError_t encode_tensor_map(CUtensorMap* map, const TensorMapKey& key) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto size = [](int n) { return static_cast<cuuint64_t>(n); };
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; };
  const cuuint64_t dims[4] = {size(key.head_dim), size(key.seqlen), size(key.heads),
                              size(key.batch)};
  const cuuint64_t strides[3] = {bytes(key.stride[2]), bytes(key.stride[1]), bytes(key.stride[0])};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(key.box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto succeeds = [&] {
    return encode(map,
                  key.dtype == Dtype::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  4, const_cast<void*>(key.pointer), dims, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (succeeds()) return cudaSuccess;
  // The driver wants a context, and a new thread has none before its first call that sets a device.
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  return succeeds() ? cudaSuccess : cudaErrorInvalidValue;
}

// The same out of a small cache of this thread: a model calls with the same addresses again and
// again. A map describes memory and owns none, so an entry never goes stale.
inline cudaError_t cached_tensor_map(CUtensorMap* map, const TensorMapKey& key) {
  struct Entry {
    TensorMapKey key;
    CUtensorMap map;
  };
  constexpr size_t kEntries = 256;
  static thread_local Entry cache[kEntries];  // zeros: a null pointer is never asked for
  const auto address = reinterpret_cast<uintptr_t>(key.pointer);
  Entry& entry = cache[(address >> 4 ^ address >> 12 ^ address >> 20) % kEntries];
  if (std::memcmp(&entry.key, &key, sizeof(key)) != 0) {
    if (const cudaError_t status = encode_tensor_map(&entry.map, key); status != cudaSuccess) {
      entry.key.pointer = nullptr;
      return status;
    }
    entry.key = key;
  }
  *map = entry.map;
  return cudaSuccess;
}

// That of a tensor of a call, which has the batch, head_dim and dtype of its parameters. Packed
// sequences are rows of one entry.
inline cudaError_t cached_tensor_map(CUtensorMap* map, const FwdParams& p, const void* pointer,
                                     const int64_t (&stride)[3], int seqlen, int heads,
                                     int box_rows) {
  return cached_tensor_map(map, {pointer,
                                 {stride[0], stride[1], stride[2]},
                                 p.head_dim,
                                 seqlen,
                                 heads,
                                 p.packed.cu_seqlens_q != nullptr ? 1 : p.batch,
                                 box_rows,
                                 p.dtype});
}

}  // namespace fa
