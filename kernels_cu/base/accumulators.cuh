// Accumulators of mma.m16n8 and of wgmma, [m16 tiles][n8 tiles][4].
#pragma once
#include "base/compat.cuh"

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
