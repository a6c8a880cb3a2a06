// Clusters in kernels that run on every GPU: CTAs on neighbouring SMs that write to each other's
// shared memory. Before 9.0 there are none, and nobody gets here.
#pragma once
#include <cuda_runtime.h>

#include "../ptx/common.cuh"

namespace fa {

// The barrier of all threads of a cluster, in two halves; between them a thread goes on alone. What
// was written before the first half is visible after the second.
FA_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive();
#endif
}
// The first half where nothing was written that others will read: without the fence of the other.
FA_DEVICE void cluster_arrive_early() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive_relaxed();
#endif
}
FA_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_wait();
#endif
}

// The same place in the shared memory of CTA `rank` of the cluster.
template <class T>
FA_DEVICE T* in_cta(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  return static_cast<T*>(__cluster_map_shared_rank(shared, rank));
#else
  return shared;
#endif
}

}  // namespace fa
