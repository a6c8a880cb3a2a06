// Host: functions of the CUDA driver, looked up at run time. The extension does not link libcuda,
// so that it loads where there is no driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fa {

// Null where the driver does not have it. version: of CUDA, when this form of it appeared.
template <class Function>
Function* driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
  const bool ok = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return reinterpret_cast<Function*>(ok ? function : nullptr);
}

}  // namespace fa
