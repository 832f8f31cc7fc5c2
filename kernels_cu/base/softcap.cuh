// Scores under a softcap c, S = c tanh(X / c) with X = softmax_scale Q K^T (cfg::HAS_SOFTCAP):
// accumulators of Q K^T become T = tanh(X / c), and c has the place of softmax_scale. Source: arXiv
// 2408.00118.
#pragma once
#include "base/statistics.cuh"

// What an accumulator is times as a score, and as one in powers of two
__device__ __forceinline__ float score_scale(const Sizes& sizes) {
  return cfg::HAS_SOFTCAP ? sizes.softcap : sizes.softmax_scale;
}
__device__ __forceinline__ float score_scale_log2(const Sizes& sizes) {
  return score_scale(sizes) * LOG2E;
}

// 1 / x as float32 has it
__device__ __forceinline__ float inverse_of_cap(float x) {
  const float y = rcp_approx(x);
  return fmaf(y, fmaf(-x, y, 1.0f), y);
}

// to 2e-7 of itself: a polynomial where 1 - 2 / (1 + e^2x) would lose digits
__device__ __forceinline__ float tanh_exact(float x) {
  constexpr float A3 = -0.33332958f, A5 = 0.13320942f, A7 = -0.05268414f, A9 = 0.01645875f;
  const float square = x * x;
  const float tail = fmaf(fmaf(fmaf(A9, square, A7), square, A5), square, A3);
  const float large = 1.0f - 2.0f * rcp_approx(1.0f + ex2_approx(x * (2.0f * LOG2E)));
  return square < 0.3f ? fmaf(x * square, tail, x) : large;
}

// Q K^T -> T, before the mask
template <int MT, int NT>
__device__ __forceinline__ void cap_scores(float (&rS)[MT][NT][4], const Sizes& sizes) {
  if constexpr (cfg::HAS_SOFTCAP) {
    const float inverse = sizes.softmax_scale * inverse_of_cap(sizes.softcap);
    for_each<MT, NT>([&](int i, int j, int e) { rS[i][j][e] = tanh_exact(rS[i][j][e] * inverse); });
  }
}

// E -> slope E, where the slope is 1 - tanh(X / c)^2: the tangent of scores, from that of X
template <int MT, int NT>
__device__ __forceinline__ void slope_tangents(float (&rE)[MT][NT][4],
                                               const float (&rT)[MT][NT][4]) {
  if constexpr (cfg::HAS_SOFTCAP) {
    for_each<MT, NT>([&](int i, int j, int e) { rE[i][j][e] *= 1.0f - rT[i][j][e] * rT[i][j][e]; });
  }
}

// The slope again, from P = exp(c tanh - L), in the place of registers to keep it: 0 where P is 0
struct Slope {
  float inverse;  // 1 / (c log2(e))

  __device__ __forceinline__ explicit Slope(const Sizes& sizes)
      : inverse(inverse_of_cap(sizes.softcap * LOG2E)) {}
  __device__ __forceinline__ float tanh_of(float p, float lse_log2) const {
    return fminf(fmaxf((lg2_approx(p) + lse_log2) * inverse, -1.0f), 1.0f);
  }
  __device__ __forceinline__ float at(float p, float lse_log2) const {
    const float t = (lg2_approx(p) + lse_log2) * inverse;
    return 1.0f - fminf(t * t, 1.0f);  // where P is 0 the square is infinite, or NaN
  }
};

// dS -> slope dS
template <int MT, int NT>
__device__ __forceinline__ void slope_ds(float (&rdS)[MT][NT][4], const float (&rP)[MT][NT][4],
                                         const PerRow<MT>& lse_log2, const Sizes& sizes) {
  if constexpr (cfg::HAS_SOFTCAP) {
    const Slope slope(sizes);
    for_each<MT, NT>([&](int i, int j, int e) {
      rdS[i][j][e] *= slope.at(rP[i][j][e], lse_log2.value[i][e / 2]);
    });
  }
}
