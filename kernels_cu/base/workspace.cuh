// Float32 sums that many CTAs add into, kept in the order of the accumulators so that atomic adds
// are wide and coalesced.
//
//   [head][unit][column / 8][lane][4]
//
// A unit is 16 rows of one sequence; each 16 x 8 square is one mma accumulator. Sequence b begins
// at unit start / 16 + b: consecutive sequences never share a unit, since
// floor((c + n) / 16) - floor(c / 16) + 1 >= ceil(n / 16). Size: ops/backward_postprocess.py.
#pragma once
#include "base/ptx.cuh"

constexpr int UNIT = 16;

// Zeros to a whole workspace, a multiple of 4 floats, by all CTAs of a grid (x, y) together.
__device__ __forceinline__ void zero_workspace(float* data, int64_t size) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * gridDim.y * NUM_THREADS;
  const int64_t cta = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  for (int64_t i = cta * NUM_THREADS + threadIdx.x; i < size / 4; i += threads) {
    reinterpret_cast<float4*>(data)[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
}

// Of all heads; a sequence's first one of a head
__device__ __forceinline__ int64_t units_of(int heads, int total, int batch) {
  return static_cast<int64_t>(heads) * (total / UNIT + batch);
}
__device__ __forceinline__ int64_t unit_of(int head, int total, int batch, int start,
                                           int batch_index) {
  return units_of(head, total, batch) + start / UNIT + batch_index;
}

template <int COLS>
struct Workspace {
  float* data;  // this head's first unit of this sequence

  __device__ __forceinline__ Workspace(float* base, int head, int total, int batch, int start,
                                       int batch_index)
      : data(base + unit_of(head, total, batch, start, batch_index) * (UNIT * COLS)) {}
  // the square of rows 16 * row16 .. and columns 8 * col8 .. ; this lane's four floats
  __device__ __forceinline__ void add(int row16, int col8, const float (&x)[4]) const {
    float* square = data + (row16 * (COLS / 8) + col8) * (UNIT * 8);
    const int lane = threadIdx.x % WARP_SIZE;
#if __CUDA_ARCH__ >= 900
    red_add_v4(square + lane * 4, x);
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) red_add(square + e * WARP_SIZE + lane, x[e]);
#endif
  }
  __device__ __forceinline__ void read(int row16, int col8, float (&x)[4]) const {
    const float* square = data + (row16 * (COLS / 8) + col8) * (UNIT * 8);
    const int lane = threadIdx.x % WARP_SIZE;
#if __CUDA_ARCH__ >= 900
    const float4 four = reinterpret_cast<const float4*>(square)[lane];
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = square[e * WARP_SIZE + lane];
#endif
  }
};

// A product of a warp, rows `row0` + `row` .. of a sequence from column `col` on, added to its units;
// none at or past `valid_rows`, counted from `row0`: that unit may belong to the next sequence
template <int COLS, int MT, int NT>
__device__ __forceinline__ void add_units(const Workspace<COLS>& sums, const float (&c)[MT][NT][4],
                                          int row0, int row, int col, int valid_rows) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    if (row + i * 16 >= valid_rows) break;
#pragma unroll
    for (int j = 0; j < NT; ++j) sums.add((row0 + row) / UNIT + i, col / 8 + j, c[i][j]);
  }
}
