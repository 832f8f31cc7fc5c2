// Which keys a query may see, with shift = seqlen_k - seqlen_q:
//   j allowed for i  <=>  i + shift - left <= j <= i + shift + right
// cfg::HAS_LEFT and cfg::HAS_RIGHT say which bounds exist (causal: right 0).
#pragma once
#include "base/compat.cuh"

struct Mask {
  int seqlen_q, seqlen_k, left, right;

  __device__ __forceinline__ int shift() const { return seqlen_k - seqlen_q; }
  // keys [first_key, end_key) that query `row` may see
  __device__ __forceinline__ int first_key(int row) const {
    return cfg::HAS_LEFT ? max(row + shift() - left, 0) : 0;
  }
  __device__ __forceinline__ int end_key(int row) const {
    return cfg::HAS_RIGHT ? min(row + shift() + right + 1, seqlen_k) : seqlen_k;
  }
  // queries [first_query, end_query) that may see key `col`
  __device__ __forceinline__ int first_query(int col) const {
    return cfg::HAS_RIGHT ? max(col - shift() - right, 0) : 0;
  }
  __device__ __forceinline__ int end_query(int col) const {
    return cfg::HAS_LEFT ? min(col - shift() + left + 1, seqlen_q) : seqlen_q;
  }
  // does no query of [row, row + rows) see a key of [col, col + cols)?
  __device__ __forceinline__ bool hides(int row, int rows, int col, int cols) const {
    return col >= seqlen_k || (cfg::HAS_RIGHT && row + rows <= first_query(col)) ||
           (cfg::HAS_LEFT && row >= end_query(col + cols - 1));
  }
  // does the tile of rows [row, row + rows) and columns [col, col + cols) hold a forbidden pair?
  __device__ __forceinline__ bool cuts(int row, int rows, int col, int cols) const {
    return col + cols > end_key(row) || (cfg::HAS_LEFT && col < first_key(row + rows - 1));
  }
};

// S of one warp (MT x NT accumulators of m16n8): -inf where forbidden. `row` and `col` are those of
// this thread's first element.
template <int MT, int NT>
__device__ __forceinline__ void apply_mask(float (&rS)[MT][NT][4], const Mask& mask, int row,
                                           int col) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = mask.end_key(row + i * 16 + half * 8) - col;
      const int begin = mask.first_key(row + i * 16 + half * 8) - col;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int offset = j * 8 + e;
          if (offset >= end || (cfg::HAS_LEFT && offset < begin)) rS[i][j][half * 2 + e] = -INF;
        }
      }
    }
  }
}
