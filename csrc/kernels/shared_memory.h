// Host: leave for a kernel to take more shared memory than the default of 48 KiB, and to run in
// clusters of more than 8 CTAs.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace fa {

// On the first call on each device: asking every time costs a tenth of an eager call.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes, bool large_clusters = false) {
  static std::atomic<uint64_t> allowed{0};
  int device;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t status =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess && large_clusters) {
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

}  // namespace fa
