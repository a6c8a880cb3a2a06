// Instructions of sm_90 and sm_90a apart from wgmma, one function each, named as in the PTX manual.
#pragma once
#include <cuda.h>

#include "common.cuh"

namespace fa::ptx {

// ---- mbarrier
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier

// Makes initialised barriers known to the async proxy, which completes transactions on them.
FA_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One arrival, and `bytes` more that copies have to complete before the phase does.
FA_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is complete. try_wait sleeps in hardware meanwhile.
FA_DEVICE void mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "wait%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait%=;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- Bulk tensor copies (TMA) of rank 4
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor

FA_DEVICE void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box at coordinates (x, y, z, w), innermost first, to shared memory; its bytes complete on
// `barrier`. What lies outside the tensor becomes zero and counts as well.
FA_DEVICE void cp_async_bulk_tensor_4d_load(uint32_t smem, const CUtensorMap* map, uint32_t barrier,
                                            int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// The reverse. What lies outside the tensor is not written.
FA_DEVICE void cp_async_bulk_tensor_4d_store(const CUtensorMap* map, uint32_t smem, int x, int y,
                                             int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
      "[%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// ---- Bulk copies
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk

// `bytes` contiguous bytes to shared memory, completing on `barrier`; all multiples of 16.
FA_DEVICE void cp_async_bulk_load(uint32_t smem, const void* gmem, uint32_t bytes,
                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(smem),
      "l"(gmem), "r"(bytes), "r"(barrier)
      : "memory");
}
// Adds floats in shared memory to as many in global memory, each for itself. Joins a bulk group.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-reduce-async-bulk
FA_DEVICE void cp_reduce_async_bulk_add_f32(float* gmem, uint32_t smem, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
      "r"(smem), "r"(bytes)
      : "memory");
}
FA_DEVICE void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all stores of this thread have read their shared memory.
FA_DEVICE void cp_async_bulk_wait_group_read_0() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// The same, and have written.
FA_DEVICE void cp_async_bulk_wait_group_0() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Shared memory written by ordinary stores becomes visible to the async proxy (TMA, wgmma).
FA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Order in global memory
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red

// After everything that this thread has seen or done.
FA_DEVICE void red_release_gpu_global_add_u32(unsigned* gmem, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

// ---- Programmatic dependent launch
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol

// Until the kernels before this one on the stream have finished and their writes are visible.
FA_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The kernel after this one may start, as far as its griddepcontrol_wait.
FA_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Warps and warpgroups

// True in one lane of the warp, the same one every time.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-elect-sync
FA_DEVICE bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(elected));
  return elected != 0;
}

FA_DEVICE int warpgroup_id() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int kRegisters>
FA_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FA_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
FA_DEVICE void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same, and whether the value is true in all these threads.
FA_DEVICE bool bar_red_and(int barrier, int threads, bool value) {
  uint32_t all;
  asm volatile(
      "{.reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.and.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return all != 0;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
FA_DEVICE void stmatrix_x4(uint32_t smem, const uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

}  // namespace fa::ptx
