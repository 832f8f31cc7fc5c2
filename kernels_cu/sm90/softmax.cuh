// An online softmax that looks for a new maximum only where a row asks for one.
#pragma once
#include "base/softmax.cuh"
#include "sm90/ptx.cuh"
#include "sm90/softcap.cuh"

// P of the true maximum is 1, which rounding to 16 bits leaves alone. Against a maximum that lags
// the largest P is rounded, and where few keys weigh out is off by as much. So a lane's scores may
// come above the maximum by 2^3 times the lane's sum so far, and by 2^8, which float16 holds: no
// key then weighs much and is rounded.
constexpr float FOLLOW_LOG2 = 3.0f, FOLLOW_MAX_LOG2 = 8.0f;

// Which rows of a lane ask for a new maximum, as few do in most tiles: a lane compares the largest
// of its own scores, and no row's lanes meet. Positive floats are ordered as their bits are and the
// bits of negative ones are negative integers, so that the largest of the bits, three at a time, is
// the largest score or, of negative ones alone, 0, which asks for one maximum too many at most.
// A row that has seen no key always asks.
struct Growth {
  bool grows[2];
  float largest[2];  // of a lane's scores, before a softcap; 0 of negative ones

  template <int NT>
  __device__ __forceinline__ Growth(const OnlineSoftmax<1>& softmax, const float (&rS)[1][NT][4],
                                    float scale_log2, const Cap& cap) {
    int bits[2][2] = {};
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int& x = bits[half][j % 2];
        x = max3(__float_as_int(rS[0][j][half * 2]), __float_as_int(rS[0][j][half * 2 + 1]), x);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = __int_as_float(max(bits[half][0], bits[half][1]));
      const float m = cap.of(largest[half]);
      const float sum_log2 = lg2_approx(softmax.row_sum[0][half]);
      const float lag = fminf(fmaxf(sum_log2 + FOLLOW_LOG2, 0.0f), FOLLOW_MAX_LOG2);
      grows[half] = m * scale_log2 > softmax.row_max[0][half] * scale_log2 + lag;
    }
  }
  // of any row of the warp
  __device__ __forceinline__ bool any() const {
    return __any_sync(0xffffffff, grows[0] | grows[1]);
  }
  // A new maximum for the rows that ask for one; scale_rows as in OnlineSoftmax::update_max
  template <int NT, class ScaleRows>
  __device__ __forceinline__ void follow(OnlineSoftmax<1>& softmax, const float (&rS)[1][NT][4],
                                         float scale_log2, const Cap& cap,
                                         ScaleRows&& scale_rows) const {
    float block_max[1][2];
    OnlineSoftmax<1>::find_max(rS, block_max);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t lanes = __ballot_sync(0xffffffff, grows[half]);
      const uint32_t of_row = lanes >> (threadIdx.x % WARP_SIZE & ~3) & 0xf;
      block_max[0][half] = of_row ? cap.of(block_max[0][half]) : -INF;
    }
    softmax.rescale(block_max, scale_log2, scale_rows, 0.0f);
  }
};

// The first maximum of rows, whose largest elements become known
template <int NT>
__device__ __forceinline__ void begin_max(OnlineSoftmax<1>& softmax, const float (&rS)[1][NT][4],
                                          float scale_log2, const Cap& cap, float (&largest)[2]) {
  float block_max[1][2];
  OnlineSoftmax<1>::find_max(rS, block_max);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = block_max[0][half];
    block_max[0][half] = cap.of(largest[half]);
  }
  softmax.follow_max(block_max, scale_log2, [](int, int, float) {}, RESCALE_LOG2);
}

// Which scores of a warp's tile ask for more than a polynomial; rows past the end say nothing, so that
// a sequence's bits are the same alone and in a batch.
struct Large {
  bool elements = false;

  template <int NT>
  __device__ __forceinline__ void look(const float (&rS)[1][NT][4], const Cap& cap) {
    if constexpr (cfg::HAS_SOFTCAP) elements = !cap.asks_rows() && cap.any_large(rS);
  }
  __device__ __forceinline__ bool any(const OnlineSoftmax<1>& softmax, const float (&largest)[2],
                                      const Cap& cap, int valid_rows) const {
    if constexpr (!cfg::HAS_SOFTCAP) return false;
    if (!cap.asks_rows()) return elements;
    const int row = threadIdx.x % WARP_SIZE / 4;
    return __any_sync(
        0xffffffff,
        (row < valid_rows && cap.may_be_large(largest[0], softmax.row_max[0][0])) ||
            (row + 8 < valid_rows && cap.may_be_large(largest[1], softmax.row_max[0][1])));
  }
};

// S -> P in place, summed up
template <int NT>
__device__ __forceinline__ void exponentiate(OnlineSoftmax<1>& softmax, float (&rS)[1][NT][4],
                                             float scale_log2, const Cap& cap, bool large) {
  if constexpr (!cfg::HAS_SOFTCAP) {
    softmax.exponentiate(rS, scale_log2);
  } else if (large) {
    softmax.exponentiate(rS, scale_log2, [&](float s, float offset) {
      return cap.is_small(s) ? cap.exponent_small(s, offset) : cap.exponent_large(s, offset);
    });
  } else {
    softmax.exponentiate(rS, scale_log2,
                         [&](float s, float offset) { return cap.exponent_small(s, offset); });
  }
}
