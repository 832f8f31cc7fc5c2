// Products of a warpgroup by wgmma, and the descriptors of their operands in shared memory.
#pragma once
#include "base/layout.cuh"
#include "sm90/wgmma.cuh"

// The descriptor of a tile as an operand, from row `row` on (a multiple of 8), at its first step
// along k. Steps are added to it.
template <class TileT, Major MAJOR>
struct Operand {
  // 16 of k: 32 bytes of a row, then the next panel; or 16 rows
  static __device__ __forceinline__ constexpr uint64_t step(int k) {
    if constexpr (MAJOR == K_MAJOR) {
      constexpr int PER_PANEL = TileT::PANEL / 16;
      return (k / PER_PANEL * TileT::PANEL_BYTES + k % PER_PANEL * 32) >> 4;
    } else {
      return (k * 16 * TileT::ROW_BYTES) >> 4;
    }
  }
  uint64_t first;

  __device__ __forceinline__ explicit Operand(uint32_t address, int row = 0) {
    constexpr uint64_t SWIZZLE = TileT::PANEL == 64 ? 1 : 2;  // of 128 or 64 bytes
    constexpr uint64_t STRIDE = 8 * TileT::ROW_BYTES >> 4;    // from 8 rows to the next 8
    constexpr uint64_t LEADING = MAJOR == K_MAJOR ? 1 : TileT::PANEL_BYTES >> 4;
    first = SWIZZLE << 62 | STRIDE << 32 | LEADING << 16 |
            (address + row * TileT::ROW_BYTES & 0x3ffff) >> 4;
  }
  __device__ __forceinline__ uint64_t at(int k) const { return first + step(k); }
};

// c (+)= X Y^T, rows of 64 of X[m][k] from `x` on and all of Y[n][k]; K of k
template <int K, bool ACCUMULATE, int NT, class TileX, class TileY>
__device__ __forceinline__ void multiply_xyt(float (&c)[1][NT][4], const Operand<TileX, K_MAJOR>& x,
                                             const Operand<TileY, K_MAJOR>& y) {
  Wgmma<NT * 8>::template multiply<ACCUMULATE, K_MAJOR, K_MAJOR>(c, x.at(0), y.at(0));
#pragma unroll
  for (int k = 1; k < K / 16; ++k) {
    Wgmma<NT * 8>::template multiply<true, K_MAJOR, K_MAJOR>(c, x.at(k), y.at(k));
  }
}
// c = X Y^T as above, the first KT steps of X from registers
template <int K, int KT, int NT, class TileX, class TileY>
__device__ __forceinline__ void multiply_xyt(float (&c)[1][NT][4], const uint32_t (&x)[KT][4],
                                             const Operand<TileX, K_MAJOR>& others,
                                             const Operand<TileY, K_MAJOR>& y) {
  Wgmma<NT * 8>::template multiply<false, K_MAJOR>(c, x[0], y.at(0));
#pragma unroll
  for (int k = 1; k < KT; ++k) Wgmma<NT * 8>::template multiply<true, K_MAJOR>(c, x[k], y.at(k));
#pragma unroll
  for (int k = KT; k < K / 16; ++k) {
    Wgmma<NT * 8>::template multiply<true, K_MAJOR, K_MAJOR>(c, others.at(k), y.at(k));
  }
}
// c (+)= X^T Y, 64 columns of X[k][m] (those of the panel at `x`) and all of Y[k][n]; K of k
template <int K, bool ACCUMULATE, int NT, class TileX, class TileY>
__device__ __forceinline__ void multiply_xty(float (&c)[1][NT][4],
                                             const Operand<TileX, MN_MAJOR>& x,
                                             const Operand<TileY, MN_MAJOR>& y) {
  Wgmma<NT * 8>::template multiply<ACCUMULATE, MN_MAJOR, MN_MAJOR>(c, x.at(0), y.at(0));
#pragma unroll
  for (int k = 1; k < K / 16; ++k) {
    Wgmma<NT * 8>::template multiply<true, MN_MAJOR, MN_MAJOR>(c, x.at(k), y.at(k));
  }
}
// c += P Y, P in registers and Y[k][n]
template <int KT, int NT, class TileY>
__device__ __forceinline__ void multiply_py(float (&c)[1][NT][4], const uint32_t (&p)[KT][4],
                                            const Operand<TileY, MN_MAJOR>& y) {
#pragma unroll
  for (int k = 0; k < KT; ++k) Wgmma<NT * 8>::template multiply<true, MN_MAJOR>(c, p[k], y.at(k));
}
// Accumulators as 16-bit operands A: the same elements in the same lanes
template <int NT>
__device__ __forceinline__ void to_operand(uint32_t (&a)[NT / 2][4], const float (&c)[1][NT][4]) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&half)[4] = c[0][2 * k + i / 2];
      a[k][i] = cvt_rn_x2(half[i % 2 * 2], half[i % 2 * 2 + 1]);
    }
  }
}
