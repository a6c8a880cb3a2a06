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
  int state = 0;  // stage + kStages * phase: one register

  FA_DEVICE int stage() const { return state < kStages ? state : state - kStages; }
  FA_DEVICE uint32_t phase() const { return state < kStages ? 0 : 1; }
  FA_DEVICE void advance() { state = state == 2 * kStages - 1 ? 0 : state + 1; }
  FA_DEVICE RingPosition before(int steps) const {  // steps <= kStages
    return {state < steps ? state - steps + 2 * kStages : state - steps};
  }
  FA_DEVICE RingPosition previous() const { return {state == 0 ? 2 * kStages - 1 : state - 1}; }
};

}  // namespace fa::tile
