// Float32 sums of a gradient that many CTAs add into, as many as the gradient has elements.
//
//   Each sequence's rows of a head are cut into units of 16, from its first row on. A unit begins
//   where its rows would: [head][token][WIDTH]. Inside, the order is that of the accumulators, so
//   that atomic adds are wide and coalesced: [column / 8][lane][4], each 16 x 8 square is one mma
//   accumulator. A sequence's last unit may have fewer rows; there it is [row][column].
//
// WIDTH: columns of the gradient, of which accumulators may have more. Size: ops/workspaces.py.
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

// Sixteen rows, of which the first `rows` are there. A lane has four numbers of each square: two
// columns of a row of the upper eight and of one of the lower eight.
template <int WIDTH>
struct UnitOfSums {
  static constexpr int SQUARE = UNIT * 8;
  float* data;
  int rows;

  // Sums of NT squares from column `col` of PADDED on. Addresses differ by constants: registers and
  // instructions are dear where this stands.
  template <int PADDED, int NT>
  __device__ __forceinline__ void add(int col, const float (&c)[NT][4]) const {
    if (whole()) {
      float* to = first_of(col);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        if (WIDTH < PADDED && col + j * 8 >= WIDTH) break;
#if __CUDA_ARCH__ >= 900
        red_add_v4(to + j * SQUARE, c[j]);
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) red_add(to + j * SQUARE + e * WARP_SIZE, c[j][e]);
#endif
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has(half)) break;
      float* to = pair_of(col, half);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        // sums past WIDTH are zeros: to the last columns with them, to leave them out costs spills
        const int at = WIDTH < PADDED ? min(j * 8, WIDTH - 8 - col) : j * 8;
        red_add_v2(to + at, c[j][half * 2], c[j][half * 2 + 1]);
      }
    }
  }
  // the square from column `col` on
  __device__ __forceinline__ void read(int col, float (&x)[4]) const {
    if (!whole()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* from = pair_of(col, half);
        x[half * 2] = has(half) ? from[0] : 0.0f;
        x[half * 2 + 1] = has(half) ? from[1] : 0.0f;
      }
      return;
    }
#if __CUDA_ARCH__ >= 900
    const float4 four = *reinterpret_cast<const float4*>(first_of(col));
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = first_of(col)[e * WARP_SIZE];
#endif
  }

 private:
  static __device__ __forceinline__ int lane() { return read_lane(); }
  __device__ __forceinline__ bool whole() const { return rows >= UNIT; }
  // the first of this lane's numbers in a square of a unit that is whole
  __device__ __forceinline__ float* first_of(int col) const {
    return data + col * UNIT + lane() * (__CUDA_ARCH__ >= 900 ? 4 : 1);
  }
  // two of them in one that is not, and whether that has their row
  __device__ __forceinline__ bool has(int half) const { return half * 8 + lane() / 4 < rows; }
  __device__ __forceinline__ float* pair_of(int col, int half) const {
    return data + (half * 8 + lane() / 4) * WIDTH + col + lane() % 4 * 2;
  }
};

// A sequence's rows of a head
template <int WIDTH>
struct Workspace {
  float* data;
  int rows;

  __device__ __forceinline__ Workspace(float* base, int head, int total, int start, int rows)
      : data(base + (static_cast<int64_t>(head) * total + start) * WIDTH), rows(rows) {}
  __device__ __forceinline__ UnitOfSums<WIDTH> unit(int row) const {
    return {data + static_cast<int64_t>(row) * WIDTH, rows - row};
  }
};

// A product of a warp, rows `row` .. of a sequence, some of which may be past its last one, from
// column `col` of PADDED, added
template <int PADDED, int WIDTH, int MT, int NT>
__device__ __forceinline__ void add_units(const Workspace<WIDTH>& sums, const float (&c)[MT][NT][4],
                                          int row, int col) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const auto unit = sums.unit(row + i * UNIT);
    if (unit.rows <= 0) break;
    unit.template add<PADDED>(col, c[i]);
  }
}
