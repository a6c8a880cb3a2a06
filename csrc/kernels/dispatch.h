// Run-time values to compile-time constants.
#pragma once
#include <cuda_runtime_api.h>

#include <type_traits>

namespace fa {

// Calls f(integral_constant<T, value>) if value is one of kValues; cudaErrorInvalidValue otherwise.
template <auto... kValues, class T, class F>
cudaError_t dispatch_value(T value, F&& f) {
  cudaError_t status = cudaErrorInvalidValue;
  (void)((value == kValues ? (status = f(std::integral_constant<T, kValues>{}), true) : false) ||
         ...);
  return status;
}

}  // namespace fa
