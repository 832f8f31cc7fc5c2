// Buffers that producers fill and consumers empty, in a ring.
#pragma once
#include "sm90/ptx.cuh"

// The barriers of a ring. A phase of `full` ends when a buffer holds what was asked for, one of
// `empty` when all of its readers have left it.
template <int STAGES_>
struct Ring {
  static constexpr int STAGES = STAGES_;
  uint64_t full[STAGES], empty[STAGES];

  // by one thread, before anybody waits; `writers` arrive on `full`
  __device__ __forceinline__ void init(int readers, int writers = 1) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(smem_address(full + stage), writers);
      mbarrier_init(smem_address(empty + stage), readers);
    }
  }
};

// Where one thread stands in a ring
template <int STAGES>
struct Place {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    stage = STAGES == 2 ? stage ^ 1 : stage + 1 == STAGES ? 0 : stage + 1;
    parity ^= stage == 0;
  }
  __device__ __forceinline__ void wait_full(const Ring<STAGES>& ring) const {
    mbarrier_wait(smem_address(ring.full + stage), parity);
  }
  // A new ring is empty: the first round does not wait.
  __device__ __forceinline__ void wait_empty(const Ring<STAGES>& ring) const {
    mbarrier_wait(smem_address(ring.empty + stage), parity ^ 1);
  }
  // by one lane of a warp, for all of them
  __device__ __forceinline__ void release(const Ring<STAGES>& ring) const {
    if (threadIdx.x % WARP_SIZE == 0) mbarrier_arrive(smem_address(ring.empty + stage));
  }
};

// A tile of rows from token `token` and column `first_col` on, by one thread; `full` counts its bytes.
template <class TileT>
__device__ __forceinline__ void load_tile(const TileT& tile, const TensorMap& map, int head,
                                          int token, const uint64_t& full, uint64_t policy,
                                          int first_col = 0) {
  const uint32_t barrier = smem_address(&full), dst = tile.address();
  mbarrier_arrive_expect_tx(barrier, TileT::BYTES);
#pragma unroll
  for (int panel = 0; panel < TileT::COLS / TileT::PANEL; ++panel) {
    cp_async_bulk_tensor_3d(dst + panel * TileT::PANEL_BYTES, map, first_col + panel * TileT::PANEL,
                            head, token, barrier, policy);
  }
}
