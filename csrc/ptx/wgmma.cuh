// wgmma (sm_90a): the warpgroup product d += a b in fp32 with 64 rows, its shared-memory operands,
// and the fences around it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once
#include "../params.h"
#include "common.cuh"

namespace fa::ptx {

// Orders this warp's accesses to the registers of the products that follow.
FA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FA_DEVICE void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
FA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to a register across this place: it does not know that
// products in flight read and write registers.
FA_DEVICE void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
FA_DEVICE void pin(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }

// Descriptor of an operand in shared memory: 16-bit elements in panels of 64 columns, each panel
// [rows][64] with 128-byte swizzle, 1024-byte aligned. (Figures "K-major" and "MN-major" of the
// manual's section on matrix descriptors.) Addresses inside it count 16 bytes.
//   K-major   the 16 columns of one product lie in one panel: +2 a step inside the panel
//   MN-major  one product takes 16 rows of all panels, which are `panel_bytes` apart: +128 a step
FA_DEVICE uint64_t matrix_descriptor(uint32_t smem, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kStride = 1024 >> 4;  // the next 8 rows
  return (smem & 0x3ffff) >> 4 | static_cast<uint64_t>(panel_bytes >> 4) << 16 | kStride << 32 |
         kSwizzle128;
}

// wgmma.m64n<kN>k16: d [64][kN], a [64][16], b [16][kN]. A warp of the warpgroup holds 16 rows, as
// kN / 8 accumulators of mma.m16n8. With accumulate == false d is overwritten.
//   ss     a and b in shared memory, both K-major
//   ss_mn  the same, both MN-major
//   rs     a in registers (operand A of mma.m16n8k16); b K-major, or MN-major with kTransposeB
template <Dtype kDtype, int kN>
struct Wgmma;

// clang-format off
#define FA_OUT4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FA_OUT16(n) FA_OUT4(n), FA_OUT4(n + 1), FA_OUT4(n + 2), FA_OUT4(n + 3)
#define FA_OUT32(n) FA_OUT16(n), FA_OUT16(n + 4)
#define FA_OUT64(n) FA_OUT32(n), FA_OUT32(n + 8)
#define FA_REGS_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_REGS_40 FA_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FA_REGS_64 FA_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_REGS_128 FA_REGS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// r0 to r6 number the operands after the accumulators.
#define FA_WGMMA(kN_, dtype, suffix, regs, outs, r0, r1, r2, r3, r4, r5, r6)                           \
  template <>                                                                                         \
  struct Wgmma<dtype, kN_> {                                                                          \
    static FA_DEVICE void ss(float (&d)[kN_ / 8][4], uint64_t a, uint64_t b, bool accumulate) {       \
      asm volatile("{.reg .pred p;\n"                                                                 \
                   "setp.ne.b32 p, " r2 ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #kN_ "k16.f32." suffix "." suffix              \
                   " {" regs "}, " r0 ", " r1 ", p, 1, 1, 0, 0;}"                                     \
                   : outs                                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                              \
    }                                                                                                 \
    static FA_DEVICE void ss_mn(float (&d)[kN_ / 8][4], uint64_t a, uint64_t b, bool accumulate) {    \
      asm volatile("{.reg .pred p;\n"                                                                 \
                   "setp.ne.b32 p, " r2 ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #kN_ "k16.f32." suffix "." suffix              \
                   " {" regs "}, " r0 ", " r1 ", p, 1, 1, 1, 1;}"                                     \
                   : outs                                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                              \
    }                                                                                                 \
    template <bool kTransposeB>                                                                       \
    static FA_DEVICE void rs(float (&d)[kN_ / 8][4], const uint32_t (&a)[4], uint64_t b,              \
                             bool accumulate) {                                                       \
      asm volatile("{.reg .pred p;\n"                                                                 \
                   "setp.ne.b32 p, " r5 ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #kN_ "k16.f32." suffix "." suffix              \
                   " {" regs "}, {" r0 ", " r1 ", " r2 ", " r3 "}, " r4 ", p, 1, 1, " r6 ";}"         \
                   : outs                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                              \
                     "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposeB)));          \
    }                                                                                                 \
  };
#define FA_OUTS_64 FA_OUT32(0)
FA_WGMMA(64, Dtype::kFloat16, "f16", FA_REGS_32, FA_OUTS_64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
FA_WGMMA(64, Dtype::kBFloat16, "bf16", FA_REGS_32, FA_OUTS_64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
#undef FA_OUTS_64
#define FA_OUTS_80 FA_OUT32(0), FA_OUT4(8), FA_OUT4(9)
FA_WGMMA(80, Dtype::kFloat16, "f16", FA_REGS_40, FA_OUTS_80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
FA_WGMMA(80, Dtype::kBFloat16, "bf16", FA_REGS_40, FA_OUTS_80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
#undef FA_OUTS_80
#define FA_OUTS_128 FA_OUT64(0)
FA_WGMMA(128, Dtype::kFloat16, "f16", FA_REGS_64, FA_OUTS_128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
FA_WGMMA(128, Dtype::kBFloat16, "bf16", FA_REGS_64, FA_OUTS_128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#undef FA_OUTS_128
#define FA_OUTS_256 FA_OUT64(0), FA_OUT64(16)
FA_WGMMA(256, Dtype::kFloat16, "f16", FA_REGS_128, FA_OUTS_256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
FA_WGMMA(256, Dtype::kBFloat16, "bf16", FA_REGS_128, FA_OUTS_256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef FA_OUTS_256
#undef FA_WGMMA
#undef FA_REGS_128
#undef FA_REGS_64
#undef FA_REGS_40
#undef FA_REGS_32
#undef FA_OUT64
#undef FA_OUT32
#undef FA_OUT16
#undef FA_OUT4
// clang-format on

}  // namespace fa::ptx
