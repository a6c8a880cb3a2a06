// Instructions of sm_80, one function each, named as in the PTX manual.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../params.h"
#include "common.cuh"

namespace fa::ptx {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
// 16 bytes from global to shared memory, past L1. With valid == false nothing is read and zeros are
// written.
FA_DEVICE void cp_async_cg_16(uint32_t smem, const void* gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(valid ? 16 : 0)
               : "memory");
}
// 4 bytes, likewise; only the .ca form has this size.
FA_DEVICE void cp_async_ca_4(uint32_t smem, const void* gmem, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem),
               "r"(valid ? 4 : 0)
               : "memory");
}
FA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
FA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
// What another kernel may be writing: not from L1, which could still have it from before.
FA_DEVICE int ld_relaxed(const int* gmem) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(gmem) : "memory");
  return value;
}
// At this place of the program, not behind the copies issued after it, which it would wait for.
FA_DEVICE int ld_shared(uint32_t smem) {
  int value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
  return value;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
// The line of an address, to L2.
FA_DEVICE void prefetch_global_l2(const void* gmem) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
FA_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
FA_DEVICE void mbarrier_inval(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
FA_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier)
               : "memory");
}
// Arrives once all cp.async issued by this thread so far have landed; counts as one of the
// barrier's arrivals.
FA_DEVICE void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
FA_DEVICE void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "wait%=:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra wait%=;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
FA_DEVICE void ldmatrix_x4(uint32_t (&d)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(smem));
}
FA_DEVICE void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(smem));
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
// d += a b with a 16x16 (row), b 16x8 (col), d 16x8 in fp32.
template <Dtype kDtype>
FA_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kDtype == Dtype::kFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
// Adds four numbers to memory, each for itself; the vector form, one instruction, is of sm_90.
FA_DEVICE void red_global_add_v4_f32(float* gmem, const float (&v)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "f"(v[0]),
               "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(gmem + i), "f"(v[i]) : "memory");
#endif
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
FA_DEVICE float2 ld_shared_v2_f32(uint32_t smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem));
  return v;
}
FA_DEVICE uint4 ld_shared_v4_u32(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(smem));
  return v;
}
FA_DEVICE unsigned ld_acquire_gpu_global_u32(const unsigned* gmem) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(gmem) : "memory");
  return v;
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
FA_DEVICE void st_shared_u32(uint32_t smem, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}
FA_DEVICE void st_shared_v4_u32(uint32_t smem, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
FA_DEVICE void st_release_gpu_global_u32(unsigned* gmem, unsigned v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(gmem), "r"(v) : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
// 2^x with relative error 2^-22; 2^-inf is 0, NaN stays NaN.
FA_DEVICE float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp
// 1 / x with an error of at most 1 ulp.
FA_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
// Two floats rounded to nearest-even and packed, `low` in the low half.
template <Dtype kDtype>
FA_DEVICE uint32_t cvt_rn_x2(float low, float high) {
  uint32_t d;
  if constexpr (kDtype == Dtype::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  }
  return d;
}

}  // namespace fa::ptx
