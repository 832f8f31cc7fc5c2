// From accumulators to shared tiles, from tiles to packed tensors, 16 bytes a lane.
#pragma once
#include "base/layout.cuh"

// Accumulators times `scale(i, half)` as 16-bit elements into a tile, from row `row`, a multiple of
// 8, and column `col`, a multiple of the accumulators' width. Eight rows of a square land in eight
// different chunks: no bank conflict.
template <class TileT, int MT, int NT, class Scale>
__device__ __forceinline__ void store_tile(TileT& tile, const float (&c)[MT][NT][4], int row,
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
        *reinterpret_cast<uint32_t*>(tile.bytes + lane_row.at(i * 16 + half * 8, j)) =
            cvt_rn_x2(c[i][j][2 * half] * factor, c[i][j][2 * half + 1] * factor);
      }
    }
  }
}

// the same, unscaled
template <class TileT, int MT, int NT>
__device__ __forceinline__ void store_tile(TileT& tile, const float (&c)[MT][NT][4], int row,
                                           int col) {
  store_tile(tile, c, row, col, [](int, int) { return 1.0f; });
}

// Rows [row0, row0 + ROWS) of a tile to rows of a packed tensor, from its column `first_col` on, 16
// bytes a lane; rows past the valid ones and columns at or past WIDTH stay unwritten. PADDED as in
// load_rows.
template <int WIDTH, int THREADS, int ROWS, int PADDED, class TileT>
__device__ __forceinline__ void write_rows_by(const Tensor& x, const Rows& rows, const TileT& tile,
                                              int row0, int thread, int first_col) {
  constexpr int TOTAL = ROWS * TileT::CHUNKS;
  uint16_t* gX = x.at(rows.first, rows.head) + first_col;
#pragma unroll
  for (int i = 0; i < ceil_div(TOTAL, THREADS); ++i) {
    const int index = i * THREADS + thread;
    const int row = row0 + index / TileT::CHUNKS, chunk = index % TileT::CHUNKS;
    if ((TOTAL % THREADS == 0 || index < TOTAL) && row < rows.valid &&
        (WIDTH == PADDED || first_col + chunk * 8 < WIDTH)) {
      *reinterpret_cast<uint4*>(gX + row * x.token_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile.bytes + TileT::offset(row, chunk));
    }
  }
}
// by all threads of the CTA: the whole tile
template <int WIDTH, class TileT>
__device__ __forceinline__ void write_rows(const Tensor& x, const Rows& rows, const TileT& tile) {
  write_rows_by<WIDTH, NUM_THREADS, TileT::ROWS, TileT::COLS>(x, rows, tile, 0, threadIdx.x, 0);
}
// by one warp: ROWS rows from `row0` on, which its lanes have written
template <int WIDTH, int ROWS, int PADDED = 0, class TileT>
__device__ __forceinline__ void write_warp_rows(const Tensor& x, const Rows& rows,
                                                const TileT& tile, int row0, int first_col = 0) {
  constexpr int COLUMNS = PADDED ? PADDED : TileT::COLS;
  write_rows_by<WIDTH, WARP_SIZE, ROWS, COLUMNS>(x, rows, tile, row0, threadIdx.x % WARP_SIZE,
                                                 first_col);
}

// A row of accumulators times `factor`, as 16-bit elements, from its four lanes to global memory:
// they exchange what they hold, so that each writes 16 bytes of every four chunks. Columns at or
// past WIDTH stay unwritten, and all of them unless `valid`.
template <int WIDTH, int NT>
__device__ __forceinline__ void write_row_of_quad(uint16_t* row, const float (&c)[1][NT][4],
                                                  int half, float factor, bool valid) {
  static_assert(NT % 4 == 0, "cfg::HEAD_DIM_V: a multiple of 32");
  const int place = threadIdx.x % 4;
  // of a pair each lane keeps one and swaps the other with the lane `far` away
  const auto swap = [&](uint32_t& low, uint32_t& high, int far) {
    const bool upper = place & far;
    const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? low : high, far);
    (upper ? low : high) = got;
  };
#pragma unroll
  for (int j = 0; j < NT; j += 4) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = cvt_rn_x2(c[0][j + i][2 * half] * factor, c[0][j + i][2 * half + 1] * factor);
    }
    swap(x[0], x[1], 1), swap(x[2], x[3], 1);
    swap(x[0], x[2], 2), swap(x[1], x[3], 2);
    if (valid && (j + place) * 8 < WIDTH) {
      *reinterpret_cast<uint4*>(row + (j + place) * 8) = uint4{x[0], x[1], x[2], x[3]};
    }
  }
}

// Zeros to rows of a packed tensor
template <int WIDTH>
__device__ __forceinline__ void zero_rows(const Tensor& x, const Rows& rows) {
  constexpr int CHUNKS = WIDTH / 8;
  uint16_t* gX = x.at(rows.first, rows.head);
  for (int index = threadIdx.x; index < rows.valid * CHUNKS; index += NUM_THREADS) {
    *reinterpret_cast<uint4*>(gX + index / CHUNKS * x.token_stride + index % CHUNKS * 8) =
        uint4{0, 0, 0, 0};
  }
}
// A number to the same rows of (num_heads_q, total_q) statistics, the first of them at `at`
__device__ __forceinline__ void fill_statistic(float* statistic, int64_t at, int rows, float x) {
  for (int row = threadIdx.x; row < rows; row += NUM_THREADS) statistic[at + row] = x;
}
