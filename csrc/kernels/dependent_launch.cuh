// Programmatic dependent launch in kernels that run on every GPU: before 9.0 there is none, and
// they are launched one after the other.
#pragma once
#include <cuda_runtime.h>

#include "../ptx/common.cuh"
#include "launch.h"

namespace fa {

// Whether a kernel may start while those before it on the stream still run.
#if __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif

// Until the kernels before this one on the stream have finished and their writes are visible. What
// is read from global memory earlier may have changed since.
FA_DEVICE void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The kernel after this one may start, as far as its own wait, once all CTAs got here.
FA_DEVICE void let_kernel_after_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <class... Params, class... Args>
cudaError_t launch_kernel(LaunchFeatures features, void (*kernel)(Params...), dim3 grid,
                          int threads, int smem_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = features == LaunchFeatures::kSm90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

}  // namespace fa
