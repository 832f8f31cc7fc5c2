// What both backward kernels do with a tile of scores: P from S and the row statistics, dS from dP.
#pragma once
#include "base/mask.cuh"
#include "base/ptx.cuh"

// a ROWS x COLS product cut into WARPS_M x (NUM_WARPS / WARPS_M) pieces, one a warp
template <int ROWS, int COLS, int WARPS_M, int NUM_WARPS>
struct Cut {
  static constexpr int WARPS_N = NUM_WARPS / WARPS_M;
  static constexpr int MT = ROWS / WARPS_M / 16, NT = COLS / WARPS_N / 8;
  static_assert(NUM_WARPS % WARPS_M == 0 && ROWS % (WARPS_M * 16) == 0 &&
                    COLS % (WARPS_N * 16) == 0,
                "cfg::WARPS_M_S, WARPS_N_KV, WARPS_M_DQ: each warp gets whole 16 x 16 squares");
  static constexpr int SPAN_M = MT * 16, SPAN_N = NT * 8;
  int row, col;  // of this warp's piece
  __device__ __forceinline__ explicit Cut(int warp)
      : row(warp % WARPS_M * SPAN_M), col(warp / WARPS_M * SPAN_N) {}
};
// One number for each row of a warp's accumulators.
template <int MT>
struct PerRow {
  float value[MT][2];
};

// L log2(e) of the rows from `row`. A row without keys and a row past the sequence's end get +inf:
// P = exp2(-inf) = 0 there whatever S is.
template <int MT>
__device__ __forceinline__ PerRow<MT> load_lse_log2(const float* lse, int row, int valid_rows) {
  PerRow<MT> rows;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + half * 8;
      const float natural = r < valid_rows ? lse[r] : -INF;
      rows.value[i][half] = natural == -INF ? INF : natural * LOG2E;
    }
  }
  return rows;
}

// D of the same rows; 0 where L says that the row has no keys, whatever dO and dL are there.
template <int MT>
__device__ __forceinline__ PerRow<MT> load_delta(const float* delta, int row,
                                                 const PerRow<MT>& lse_log2) {
  PerRow<MT> rows;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.value[i][half] = lse_log2.value[i][half] == INF ? 0.0f : delta[row + i * 16 + half * 8];
    }
  }
  return rows;
}

// S -> P = exp2(S scale_log2 - L)
template <int MT, int NT>
__device__ __forceinline__ void scores_to_p(float (&rS)[MT][NT][4], const PerRow<MT>& lse_log2,
                                            float scale_log2) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rS[i][j][e] = ex2_approx(rS[i][j][e] * scale_log2 - lse_log2.value[i][e / 2]);
      }
    }
  }
}

// dP -> dS = P (dP - D)
template <int MT, int NT>
__device__ __forceinline__ void dp_to_ds(float (&rdP)[MT][NT][4], const float (&rP)[MT][NT][4],
                                         const PerRow<MT>& delta) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rdP[i][j][e] = rP[i][j][e] * (rdP[i][j][e] - delta.value[i][e / 2]);
      }
    }
  }
}
