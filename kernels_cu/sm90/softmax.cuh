// An online softmax that looks for a new maximum only where a row asks for one.
#pragma once
#include "base/softmax.cuh"
#include "sm90/products.cuh"
#include "sm90/ptx.cuh"
#include "sm90/softcap.cuh"

// P of the true maximum is 1, which rounding to 16 bits leaves alone. Against a maximum that lags
// the largest P is rounded, and where few keys weigh out is off by as much. So a lane's scores may
// come above the maximum by 2^3 times the lane's sum so far, and by 2^8, which float16 holds: no
// key then weighs much and is rounded.
constexpr int FOLLOW_LOG2 = 3, FOLLOW_MAX_LOG2 = 8;
// What sums of P say of their largest is sure but for the rounding of sums and exponentials
constexpr float SURE = 0.99f;

// From which element on a tile is large to a lane's rows
struct Ceilings {
  float of[2];

  __device__ __forceinline__ void follow(const OnlineSoftmax<1>& softmax, const Cap& cap) {
    if constexpr (cfg::HAS_SOFTCAP) {
#pragma unroll
      for (int half = 0; half < 2; ++half) of[half] = cap.ceiling(softmax.row_max[0][half]);
    }
  }
};

// Does a lane whose largest element of a row is this one ask for a new maximum? Under a softcap one
// that is large does.
__device__ __forceinline__ bool asks(const OnlineSoftmax<1>& softmax, int half, float largest,
                                     float scale_log2, const Cap& cap, const Ceilings& ceilings) {
  const float m = cfg::HAS_SOFTCAP ? cap.small(largest, 0.0f) : largest;
  const float sum_log2 = lg2_approx(softmax.row_sum[0][half]);
  const float lag = fminf(fmaxf(sum_log2 + FOLLOW_LOG2, 0.0f), FOLLOW_MAX_LOG2);
  bool grows = m * scale_log2 > softmax.row_max[0][half] * scale_log2 + lag;
  if constexpr (cfg::HAS_SOFTCAP) grows |= largest > ceilings.of[half];
  return grows;
}
// May a row ask for a new maximum, as few do in most tiles? A lane compares the largest of its own
// scores, and no row's lanes meet. Positive floats are ordered as their bits are and the bits of
// negative ones are negative integers, so that the largest of the bits, three at a time, is the largest
// score or, of negative ones alone, 0, for which too many may ask.
template <int NT>
__device__ __forceinline__ bool any_may_ask(const OnlineSoftmax<1>& softmax,
                                            const float (&rS)[1][NT][4], float scale_log2,
                                            const Cap& cap, const Ceilings& ceilings) {
  int bits[2][2] = {};
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int& x = bits[half][j % 2];
      x = max3(__float_as_int(rS[0][j][half * 2]), __float_as_int(rS[0][j][half * 2 + 1]), x);
    }
  }
  bool any = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float largest = __int_as_float(max(bits[half][0], bits[half][1]));
    any |= asks(softmax, half, largest, scale_log2, cap, ceilings);
  }
  return __any_sync(0xffffffff, any);
}
// The same by what a lane's P add up to: an element that asks would make the sum larger alone. P of a
// row that has seen no key are inf or NaN.
__device__ __forceinline__ bool any_may_ask(const OnlineSoftmax<1>& softmax,
                                            const float (&sums)[2]) {
  bool any = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float bound = fminf(fmaxf(softmax.row_sum[0][half] * (SURE * (1 << FOLLOW_LOG2)), SURE),
                              SURE * (1 << FOLLOW_MAX_LOG2));
    any |= !(sums[half] <= bound);
  }
  return __any_sync(0xffffffff, any);
}
// A new maximum for the rows that ask for one, whoever made the warp look: a row's result hangs on no
// other row, and is the same in tiles of any height. scale_rows as in OnlineSoftmax::update_max.
template <int NT, class ScaleRows>
__device__ __forceinline__ void follow_max(OnlineSoftmax<1>& softmax, const float (&rS)[1][NT][4],
                                           float scale_log2, const Cap& cap,
                                           const Ceilings& ceilings, ScaleRows&& scale_rows) {
  float block_max[1][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m = OnlineSoftmax<1>::peak(rS, 0, half);
    int row_asks = asks(softmax, half, m, scale_log2, cap, ceilings);
    row_asks |= __shfl_xor_sync(0xffffffff, row_asks, 1);
    row_asks |= __shfl_xor_sync(0xffffffff, row_asks, 2);
    m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
    block_max[0][half] = row_asks ? cap.of_max(m) : -INF;
  }
  softmax.rescale(block_max, scale_log2, scale_rows, 0.0f);
}

// The first maximum of rows. Is any element large? Under a softcap rows past the end have a maximum
// that nothing exceeds: they have no say, so that a sequence's bits are the same alone and in a batch.
template <int NT>
__device__ __forceinline__ bool begin_max(OnlineSoftmax<1>& softmax, const float (&rS)[1][NT][4],
                                          float scale_log2, const Cap& cap, Ceilings& ceilings,
                                          int valid_rows) {
  float largest[1][2];
  OnlineSoftmax<1>::find_max(rS, largest);
  const float block_max[1][2] = {{cap.of_max(largest[0][0]), cap.of_max(largest[0][1])}};
  softmax.follow_max(block_max, scale_log2, [](int, int, float) {}, RESCALE_LOG2);
  if constexpr (!cfg::HAS_SOFTCAP) return false;
  bool large = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool valid = threadIdx.x % WARP_SIZE / 4 + half * 8 < valid_rows;
    if (!valid) softmax.row_max[0][half] = INF;
  }
  ceilings.follow(softmax, cap);
#pragma unroll
  for (int half = 0; half < 2; ++half) large |= largest[0][half] > ceilings.of[half];
  return __any_sync(0xffffffff, large);
}

// Is any element large? To its row, whose maximum may have moved since it asked.
template <int NT>
__device__ __forceinline__ bool any_large(const float (&rS)[1][NT][4], const Ceilings& ceilings) {
  if constexpr (!cfg::HAS_SOFTCAP) return false;
  bool large = false;
  for_each<1, NT>([&](int i, int j, int e) { large |= rS[i][j][e] > ceilings.of[e / 2]; });
  return __any_sync(0xffffffff, large);
}

// S -> P in place, summed up, and as operands; ANY: S may be large
template <bool ANY, int NT>
__device__ __forceinline__ void exponentiate(OnlineSoftmax<1>& softmax, float (&rS)[1][NT][4],
                                             uint32_t (&rP)[NT / 2][4], float scale_log2,
                                             const Cap& cap) {
  if constexpr (!cfg::HAS_SOFTCAP) {
    softmax.exponentiate(rS, scale_log2);
  } else {
    softmax.exponentiate(rS, scale_log2,
                         [&](float s, float offset) { return cap.score<ANY>(s, offset); });
  }
  to_operand(rP, rS);
}

// The same without a softcap, and S stays: P as operands, `sums` of a lane's rows
template <int NT>
__device__ __forceinline__ void try_exponentials(const OnlineSoftmax<1>& softmax,
                                                 const float (&rS)[1][NT][4],
                                                 uint32_t (&rP)[NT / 2][4], float scale_log2,
                                                 float (&sums)[2]) {
  float sum[2][2] = {};
  const float offset[2] = {softmax.row_max[0][0] * scale_log2, softmax.row_max[0][1] * scale_log2};
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      p[e] = ex2_approx(rS[0][j][e] * scale_log2 - offset[e / 2]);
      sum[e / 2][e % 2] += p[e];
    }
    rP[j / 2][j % 2 * 2] = cvt_rn_x2(p[0], p[1]);
    rP[j / 2][j % 2 * 2 + 1] = cvt_rn_x2(p[2], p[3]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) sums[half] = sum[half][0] + sum[half][1];
}
