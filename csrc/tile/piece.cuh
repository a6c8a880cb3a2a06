// Pieces of 16 bytes of a row: eight elements, as one load brings them.
#pragma once
#include "../ptx/sm80.cuh"

namespace fa::tile {

// Two elements as floats.
template <Dtype kDtype>
FA_DEVICE float2 unpack(uint32_t pair) {
  if constexpr (kDtype == Dtype::kFloat16) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
}

// The dot product of two pieces.
template <Dtype kDtype>
FA_DEVICE float dot(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = unpack<kDtype>(x[i]), v = unpack<kDtype>(y[i]);
    sum = fmaf(u.x, v.x, sum);
    sum = fmaf(u.y, v.y, sum);
  }
  return sum;
}

}  // namespace fa::tile
