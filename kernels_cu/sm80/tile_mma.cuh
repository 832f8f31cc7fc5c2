// Products of a warp by mma.m16n8k16: accumulators [MT][NT][4], operands from swizzled shared
// memory or registers. Accumulator element [i][j][2 * half + e] of a lane:
//   row 16 i + 8 half + lane / 4,  column 8 j + 2 (lane % 4) + e
//
// The loops along k are unrolled by cfg::UNROLL_K steps: further ahead the compiler would load
// operands into registers that the accumulators need, and spill.
#pragma once
#include "base/layout.cuh"

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&c)[MT][NT][4]) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][j][e] = 0.0f;
    }
  }
}

// A row of accumulators times `factor`
template <int MT, int NT>
__device__ __forceinline__ void scale_row(float (&c)[MT][NT][4], int i, int half, float factor) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    c[i][j][half * 2] *= factor;
    c[i][j][half * 2 + 1] *= factor;
  }
}

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

// Accumulators times `scale(i, half)` as 16-bit elements into a tile, from row `row`, a multiple of
// 8, and column `col`, a multiple of the accumulators' width. Eight rows of a square land in eight
// different chunks: no bank conflict.
template <class TileT, int MT, int NT, class Scale>
__device__ __forceinline__ void store_tile(char* tile, const float (&c)[MT][NT][4], int row,
                                           int col, Scale&& scale) {
  const int lane = threadIdx.x % WARP_SIZE;
  const RowWalker<TileT, NT * 8> lane_row(lane % 4 * 4, row + lane / 4, col / 8);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = scale(i, half);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        *reinterpret_cast<uint32_t*>(tile + lane_row.at(i * 16 + half * 8, j)) =
            cvt_rn_x2(c[i][j][2 * half] * factor, c[i][j][2 * half + 1] * factor);
      }
    }
  }
}

// Rows [first, first + ROWS) of a tile to a packed tensor, from its column `first_col` on, 16 bytes
// a lane; rows at or past `valid_rows` and columns at or past WIDTH stay unwritten.
template <class TileT, int WIDTH, int NUM_THREADS, int ROWS>
__device__ __forceinline__ void write_rows(uint16_t* gX, int64_t token_stride, const char* tile,
                                           int first, int valid_rows, int thread,
                                           int first_col = 0) {
  constexpr int TOTAL = ROWS * TileT::CHUNKS;
#pragma unroll
  for (int i = 0; i < ceil_div(TOTAL, NUM_THREADS); ++i) {
    const int index = i * NUM_THREADS + thread;
    const int row = first + index / TileT::CHUNKS, chunk = index % TileT::CHUNKS;
    if ((TOTAL % NUM_THREADS == 0 || index < TOTAL) && row < valid_rows &&
        (WIDTH % TileT::COLS == 0 || first_col + chunk * 8 < WIDTH)) {
      *reinterpret_cast<uint4*>(gX + row * token_stride + first_col + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + TileT::offset(row, chunk));
    }
  }
}

// Zeros to rows [0, rows) of a packed tensor.
template <int WIDTH, int NUM_THREADS>
__device__ __forceinline__ void zero_rows(uint16_t* gX, int64_t token_stride, int rows) {
  constexpr int CHUNKS = WIDTH / 8;
  for (int index = threadIdx.x; index < rows * CHUNKS; index += NUM_THREADS) {
    *reinterpret_cast<uint4*>(gX + index / CHUNKS * token_stride + index % CHUNKS * 8) =
        uint4{0, 0, 0, 0};
  }
}
