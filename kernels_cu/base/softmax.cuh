// Online softmax on the accumulators of mma.m16n8: a row lies in four lanes, two columns each per
// accumulator.
#pragma once
#include "base/ptx.cuh"

// A new maximum rescales O only when it has grown by more than this many powers of two: P stays
// below 2^8, which float16 holds, and the last division is exact about it. Most tiles then leave O
// alone.
constexpr float RESCALE_LOG2 = 8.0f;

// The sum over a row's four lanes, in each of them
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// What a row comes to
struct RowEnd {
  float lse, inverse;
};

template <int MT>
struct OnlineSoftmax {
  float row_max[MT][2];  // the maximum that P is taken against, in units of S
  float row_sum[MT][2];  // this lane's share; summed over the four lanes at the end

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      row_max[i][0] = row_max[i][1] = -INF;
      row_sum[i][0] = row_sum[i][1] = 0.0f;
    }
  }

  // The maximum over S as well. Where it moved, the sum is rescaled and scale_rows(i, half, factor)
  // has to rescale whatever else was weighed by P. scale_log2 = softmax_scale * log2(e).
  template <int NT, class ScaleRows>
  __device__ __forceinline__ void update_max(const float (&rS)[MT][NT][4], float scale_log2,
                                             ScaleRows&& scale_rows,
                                             float rescale_log2 = RESCALE_LOG2) {
    float block_max[MT][2];
    find_max(rS, block_max);
    follow_max(block_max, scale_log2, scale_rows, rescale_log2);
  }
  template <class ScaleRows>
  __device__ __forceinline__ void follow_max(const float (&block_max)[MT][2], float scale_log2,
                                             ScaleRows&& scale_rows, float rescale_log2) {
    bool grown = false;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        grown |= block_max[i][half] * scale_log2 > row_max[i][half] * scale_log2 + rescale_log2;
      }
    }
    if (__any_sync(0xffffffff, grown)) rescale(block_max, scale_log2, scale_rows, rescale_log2);
  }

  // The largest of S that a lane has of a row
  template <int NT>
  static __device__ __forceinline__ float peak(const float (&rS)[MT][NT][4], int i, int half) {
    float of[2] = {rS[i][0][half * 2], rS[i][0][half * 2 + 1]};
#pragma unroll
    for (int j = 1; j < NT; ++j) {
      of[0] = fmaxf(of[0], rS[i][j][half * 2]);
      of[1] = fmaxf(of[1], rS[i][j][half * 2 + 1]);
    }
    return fmaxf(of[0], of[1]);
  }
  // The same of all of its lanes, in each of them
  template <int NT>
  static __device__ __forceinline__ void find_max(const float (&rS)[MT][NT][4],
                                                  float (&block_max)[MT][2]) {
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = peak(rS, i, half);
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
        block_max[i][half] = m;
      }
    }
  }

  // S -> P = exp2(S scale_log2 - maximum) in place, summed up
  template <int NT>
  __device__ __forceinline__ void exponentiate(float (&rS)[MT][NT][4], float scale_log2) {
    exponentiate(rS, scale_log2, [&](float s, float offset) { return s * scale_log2 - offset; });
  }
  // the same of other exponents; `offset` is the maximum
  template <int NT, class Exponent>
  __device__ __forceinline__ void exponentiate(float (&rS)[MT][NT][4], float scale_log2,
                                               Exponent&& exponent) {
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // a row without any key so far keeps -inf; 0 in its place makes every P exp2(-inf) = 0
        const float offset = row_max[i][half] == -INF ? 0.0f : row_max[i][half] * scale_log2;
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = rS[i][j][half * 2 + e];
            s = ex2_approx(exponent(s, offset));
            sum[e] += s;
          }
        }
        row_sum[i][half] += sum[0] + sum[1];
      }
    }
  }

  // Row by row, although a warp does it together: a row's result then hangs on no other row, and is
  // the same to the last bit in tiles of any height.
  template <class ScaleRows>
  __device__ __forceinline__ void rescale(const float (&block_max)[MT][2], float scale_log2,
                                          ScaleRows&& scale_rows, float rescale_log2) {
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = row_max[i][half], m = block_max[i][half];
        const bool grown = m * scale_log2 > old * scale_log2 + rescale_log2;
        const float factor = grown ? ex2_approx((old - m) * scale_log2) : 1.0f;
        row_max[i][half] = grown ? m : old;
        row_sum[i][half] *= factor;
        scale_rows(i, half, factor);
      }
    }
  }

  // the whole row's sum, in every lane of the row: 0 of a row without keys, NaN of one that saw NaN
  __device__ __forceinline__ float total(int i, int half) const {
    return sum_of_row(row_sum[i][half]);
  }
  // the natural logarithm of the sum of exp(softmax_scale S); `sum` is total(i, half)
  __device__ __forceinline__ float lse(int i, int half, float sum, float softmax_scale) const {
    return sum == 0.0f ? -INF : row_max[i][half] * softmax_scale + lg2_approx(sum) * LN2;
  }
  // L, and the factor that makes probabilities of sums. A sink is one more score, without a value:
  // it counts with cfg::HAS_SINKS alone.
  __device__ __forceinline__ RowEnd end(int i, int half, float scale, float sink) const;
};

// The factor that makes probabilities of sums; 0 for a row without keys
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

template <int MT>
__device__ __forceinline__ RowEnd OnlineSoftmax<MT>::end(int i, int half, float scale,
                                                         float sink) const {
  const float sum = total(i, half);
  if constexpr (cfg::HAS_SINKS) {
    const float own = row_max[i][half] * scale;
    const float largest = fmaxf(own, sink);
    if (largest == -INF) return {-INF, 0.0f};
    const float factor = ex2_approx((own - largest) * LOG2E);
    const float whole = sum * factor + ex2_approx((sink - largest) * LOG2E);
    return {largest + lg2_approx(whole) * LN2, factor / whole};
  }
  return {lse(i, half, sum, scale), inverse_of(sum)};
}
