// Numbers of a row, L and D, and what they make of scores and of dP: elementwise, on accumulators.
#pragma once
#include "base/ptx.cuh"

// body(i, j, e) for every element of a warp's accumulators, whose row is that of (i, e / 2)
template <int MT, int NT, class Body>
__device__ __forceinline__ void for_each(Body&& body) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(i, j, e);
    }
  }
}

// One number for each row of a warp's accumulators.
template <int MT>
struct PerRow {
  float value[MT][2];
};

// L of the rows from `row`. A row without keys and a row past the sequence's end get +inf: P = 0
// there whatever S is.
template <int MT>
__device__ __forceinline__ PerRow<MT> load_lse(const float* lse, int row, int valid_rows) {
  PerRow<MT> rows;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + half * 8;
      const float natural = r < valid_rows ? lse[r] : -INF;
      rows.value[i][half] = natural == -INF ? INF : natural;
    }
  }
  return rows;
}

// L log2(e) of the same rows
template <int MT>
__device__ __forceinline__ PerRow<MT> load_lse_log2(const float* lse, int row, int valid_rows) {
  PerRow<MT> rows = load_lse<MT>(lse, row, valid_rows);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.value[i][half] *= LOG2E;
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
  for_each<MT, NT>([&](int i, int j, int e) {
    rS[i][j][e] = ex2_approx(rS[i][j][e] * scale_log2 - lse_log2.value[i][e / 2]);
  });
}

// dP -> dS = P (dP - D)
template <int MT, int NT>
__device__ __forceinline__ void dp_to_ds(float (&rdP)[MT][NT][4], const float (&rP)[MT][NT][4],
                                         const PerRow<MT>& delta) {
  for_each<MT, NT>([&](int i, int j, int e) {
    rdP[i][j][e] = rP[i][j][e] * (rdP[i][j][e] - delta.value[i][e / 2]);
  });
}
