// What every kernel needs of the machine: addresses in shared memory and thread indices.
#pragma once
#include <cstdint>

#define FA_DEVICE __device__ __forceinline__

namespace fa::ptx {

// Shared-memory address as the 32-bit operand of ldmatrix, cp.async and friends.
FA_DEVICE uint32_t smem_addr(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

FA_DEVICE int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// threadIdx.x read once more. What is computed from it inside a loop is computed there, instead of
// being kept in registers across the loop (or spilled) because it does not change.
FA_DEVICE int thread_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// An address that is found at this place, where there is time, and not where it is needed.
template <class T>
FA_DEVICE T* found_here(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

FA_DEVICE unsigned block_index_again() {
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// No access to memory moves across this in compilation, so that loads are not all issued, and their
// results kept, before the first is used.
FA_DEVICE void keep_order_of_accesses() { asm volatile("" ::: "memory"); }

// Broadcast from lane 0 so that the compiler knows the value is the same in the whole warp.
FA_DEVICE int warp_id() { return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0); }

}  // namespace fa::ptx
