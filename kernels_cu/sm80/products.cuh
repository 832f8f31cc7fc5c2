// Products of a warp by mma.m16n8k16: accumulators [MT][NT][4], operands from swizzled shared
// memory or registers. Accumulator element [i][j][2 * half + e] of a lane:
//   row 16 i + 8 half + lane / 4,  column 8 j + 2 (lane % 4) + e
//
// The loops along k are unrolled by cfg::UNROLL_K steps: further ahead the compiler would load
// operands into registers that the accumulators need, and spill.
#pragma once
#include "base/accumulators.cuh"
#include "base/layout.cuh"

__device__ constexpr int largest_divisor(int number, int limit) {
  int divisor = limit < number ? limit : number;
  while (number % divisor) --divisor;
  return divisor;
}
// The part of a ROWS x COLS product that a warp makes: whole 16 x 16 squares. WARPS_M warps lie along
// the rows where there are so many squares, the rest along the columns; EVERY says that none is
// left without a part, whose row would be ROWS.
template <int ROWS, int COLS, int WARPS_M>
struct WarpTile {
  static constexpr int WANTED_M = largest_divisor(ROWS / 16, WARPS_M);
  static constexpr int WARPS_N = largest_divisor(COLS / 16, cfg::NUM_WARPS / WANTED_M);
  static constexpr int ALONG_M = largest_divisor(ROWS / 16, cfg::NUM_WARPS / WARPS_N);
  static constexpr bool EVERY = ALONG_M * WARPS_N == cfg::NUM_WARPS;
  static constexpr int MT = ROWS / ALONG_M / 16, NT = COLS / WARPS_N / 8;
  static constexpr int SPAN_M = MT * 16, SPAN_N = NT * 8;
  static_assert(ROWS % 16 == 0 && COLS % 16 == 0, "cfg::BLOCK_M, BLOCK_N: multiples of 16");
  int row, col;  // of this warp's part
  __device__ __forceinline__ explicit WarpTile(int warp)
      : row(EVERY || warp < ALONG_M * WARPS_N ? warp % ALONG_M * SPAN_M : ROWS),
        col((EVERY ? warp / ALONG_M : warp / ALONG_M % WARPS_N) * SPAN_N) {}
  __device__ __forceinline__ bool any() const { return EVERY || row < ROWS; }
};

// One step of 16 along k: c += a b, B read as NT / 2 squares.
template <int MT, int NT, class LoadB>
__device__ __forceinline__ void multiply_step(float (&c)[MT][NT][4], const uint32_t (&a)[MT][4],
                                              LoadB&& load_b) {
#pragma unroll
  for (int j = 0; j < NT / 2; ++j) {
    uint32_t b[4];
    load_b(b, j);
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      mma_m16n8k16(c[i][2 * j], a[i], b[0], b[1]);
      mma_m16n8k16(c[i][2 * j + 1], a[i], b[2], b[3]);
    }
  }
}

// c += X Y^T: X[m][k], Y[n][k], K columns
template <int K, int MT, int NT, class X, class Y>
__device__ __forceinline__ void multiply_xyt(float (&c)[MT][NT][4], const X& x, const Y& y) {
#pragma unroll cfg::UNROLL_K
  for (int k = 0; k < K / 16; ++k) {
    uint32_t a[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i) x.load(a[i], i, k);
    multiply_step(c, a, [&](uint32_t (&b)[4], int j) { y.load(b, j, k); });
  }
}

// c += X Y: X[m][k] (K columns), Y[k][n]
template <int K, int MT, int NT, class X, class Y>
__device__ __forceinline__ void multiply_xy(float (&c)[MT][NT][4], const X& x, const Y& y) {
#pragma unroll cfg::UNROLL_K
  for (int k = 0; k < K / 16; ++k) {
    uint32_t a[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i) x.load(a[i], i, k);
    multiply_step(c, a, [&](uint32_t (&b)[4], int j) { y.load(b, k, j); });
  }
}

// c += X^T Y: X[k][m], Y[k][n], K rows
template <int K, int MT, int NT, class X, class Y>
__device__ __forceinline__ void multiply_xty(float (&c)[MT][NT][4], const X& x, const Y& y) {
#pragma unroll cfg::UNROLL_K
  for (int k = 0; k < K / 16; ++k) {
    uint32_t a[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i) x.load(a[i], k, i);
    multiply_step(c, a, [&](uint32_t (&b)[4], int j) { y.load(b, k, j); });
  }
}

// Columns 16 k .. + 15 of accumulators as an operand A
template <int MT, int NT>
__device__ __forceinline__ void to_operand(uint32_t (&a)[MT][4], const float (&p)[MT][NT][4],
                                           int k) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    a[i][0] = cvt_rn_x2(p[i][2 * k][0], p[i][2 * k][1]);
    a[i][1] = cvt_rn_x2(p[i][2 * k][2], p[i][2 * k][3]);
    a[i][2] = cvt_rn_x2(p[i][2 * k + 1][0], p[i][2 * k + 1][1]);
    a[i][3] = cvt_rn_x2(p[i][2 * k + 1][2], p[i][2 * k + 1][3]);
  }
}

// c += P Y: P in registers as the accumulators of an earlier product (its columns are k), Y[k][n]
template <int MT, int NT_P, int NT, class Y>
__device__ __forceinline__ void multiply_py(float (&c)[MT][NT][4], const float (&p)[MT][NT_P][4],
                                            const Y& y) {
#pragma unroll
  for (int k = 0; k < NT_P / 2; ++k) {
    uint32_t a[MT][4];
    to_operand(a, p, k);
    multiply_step(c, a, [&](uint32_t (&b)[4], int j) { y.load(b, k, j); });
  }
}
