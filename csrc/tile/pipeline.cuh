// A ring of stages in shared memory, filled by one thread's copies and emptied by many: where in
// the ring a producer or a consumer stands.
#pragma once
#include "../ptx/common.cuh"

namespace fa::tile {

// Every stage has two mbarriers, `full` (the copies have landed) and `empty` (all have read it).
// The n-th use of a stage waits for the n-th phase of its barriers. A consumer waits for the parity
// `phase` of full; the producer for the parity `phase ^ 1` of empty, so that its first pass over
// the ring, one phase ahead of any arrival, does not wait.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  FA_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace fa::tile
