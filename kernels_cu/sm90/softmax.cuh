// Whether the online softmax of a warpgroup's rows has anything to do but exponentiate.
#pragma once
#include "base/softmax.cuh"
#include "sm90/ptx.cuh"

// False where softmax.update_max(rS, ...) would change nothing for any row of the warp, as of most
// tiles: a lane compares the largest of its own scores, and no row's lanes meet. Positive floats are
// ordered as their bits are and the bits of negative ones are negative integers, so that the largest
// of the bits, three at a time, is the largest score or, of negative ones alone, 0: which is enough
// while the threshold is not negative either. A row that has seen no key always grows.
template <int NT>
__device__ __forceinline__ bool may_grow(const OnlineSoftmax<1>& softmax,
                                         const float (&rS)[1][NT][4], float scale_log2) {
  int largest[2][2] = {};
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int& x = largest[half][j % 2];
      x = max3(__float_as_int(rS[0][j][half * 2]), __float_as_int(rS[0][j][half * 2 + 1]), x);
    }
  }
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = __int_as_float(max(largest[half][0], largest[half][1]));
    grows |= m * scale_log2 > softmax.row_max[0][half] * scale_log2 + RESCALE_LOG2;
  }
  return __any_sync(0xffffffff, grows);
}
