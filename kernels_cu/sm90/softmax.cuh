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
constexpr float FOLLOW_LOG2 = 3.0f, FOLLOW_MAX_LOG2 = 8.0f;

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

// Which rows of a lane ask for a new maximum, as few do in most tiles: a lane compares the largest
// of its own scores, and no row's lanes meet. Positive floats are ordered as their bits are and the
// bits of negative ones are negative integers, so that the largest of the bits, three at a time, is
// the largest score or, of negative ones alone, 0, which asks for one maximum too many at most.
// A row that has seen no key always asks, and under a softcap one with an element that is large.
template <int NT>
__device__ __forceinline__ bool any_grows(bool (&grows)[2], const OnlineSoftmax<1>& softmax,
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
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float largest = __int_as_float(max(bits[half][0], bits[half][1]));
    const float m = cfg::HAS_SOFTCAP ? cap.small(largest, 0.0f) : largest;
    const float sum_log2 = lg2_approx(softmax.row_sum[0][half]);
    const float lag = fminf(fmaxf(sum_log2 + FOLLOW_LOG2, 0.0f), FOLLOW_MAX_LOG2);
    grows[half] = m * scale_log2 > softmax.row_max[0][half] * scale_log2 + lag;
    if constexpr (cfg::HAS_SOFTCAP) grows[half] |= largest > ceilings.of[half];
  }
  return __any_sync(0xffffffff, grows[0] | grows[1]);
}
// A new maximum for the rows that ask for one; scale_rows as in OnlineSoftmax::update_max
template <int NT, class ScaleRows>
__device__ __forceinline__ void follow_max(OnlineSoftmax<1>& softmax, const float (&rS)[1][NT][4],
                                           const bool (&grows)[2], float scale_log2, const Cap& cap,
                                           ScaleRows&& scale_rows) {
  float block_max[1][2];
  OnlineSoftmax<1>::find_max(rS, block_max);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t lanes = __ballot_sync(0xffffffff, grows[half]);
    const uint32_t of_row = lanes >> (threadIdx.x % WARP_SIZE & ~3) & 0xf;
    block_max[0][half] = of_row ? cap.of_max(block_max[0][half]) : -INF;
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
