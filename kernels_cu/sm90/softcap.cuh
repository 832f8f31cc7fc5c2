// Scores under a softcap c (cfg::HAS_SOFTCAP), c tanh(X / c) with X = softmax_scale Q K^T, where the
// exponential unit is what softmax waits for: a polynomial ends in the multiply and add that makes an
// exponent of a score in any case. Source: arXiv 2408.00118.
#pragma once
#include "base/softcap.cuh"
#include "sm90/ptx.cuh"

// A softcap's numbers, from ops/softcaps.py. Scores, maxima and L are in powers of two.
struct CapSizes {
  float a0;     // of an element S of Q K^T that is small, S (a0 + a1 S^2 + a2 S^4) is the score, or
  float a1;     // in a backward kernel tanh(X / c)
  float a2;     // positive: of -inf comes -inf
  float limit;  // up to the largest S, and down to the smallest, that is small
  float twice;  // 2 log2(e) X / (c S)
  float top;    // c
  float masked;  // as tanh(X / c) makes a P of 0, and its square is finite
  float least;  // of a row's maximum, or L, from which on what is large and negative has no weight,
  float most;   // and of L up to which nothing is large and positive
};

// Whether a warp looks at its elements one by one hangs on all of its rows. What comes of an element
// hangs on its own row.
struct Cap {
  const CapSizes& sizes;

  // what is kept as a maximum times this is a score, or a natural one
  static __device__ __forceinline__ float scale_log2(const Sizes& sizes) {
    return cfg::HAS_SOFTCAP ? 1.0f : sizes.softmax_scale * LOG2E;
  }
  static __device__ __forceinline__ float scale(const Sizes& sizes) {
    return cfg::HAS_SOFTCAP ? LN2 : sizes.softmax_scale;
  }

  // of small S the polynomial, less `offset`
  __device__ __forceinline__ float small(float s, float offset) const {
    const float square = s * s;
    return fmaf(s, fmaf(fmaf(sizes.a2, square, sizes.a1), square, sizes.a0), -offset);
  }
  // S -> tanh(X / c), times `by` and more by `more`; at once, or a compiler branches for each element
  __device__ __forceinline__ float tanh_of(float s, float by = 1.0f, float more = 0.0f) const {
    const float r = rcp_approx(1.0f + ex2_approx(s * sizes.twice));
    float y = fmaf(-2.0f * by, r, by + more);
    hold(y);
    return y;
  }

  // S of a row with this maximum -> its score less the maximum; ANY: S may be large
  template <bool ANY>
  __device__ __forceinline__ float score(float s, float row_max) const {
    const float y = small(s, row_max);
    if constexpr (!ANY) return y;
    const float least = row_max >= sizes.least ? -INF : -sizes.limit;
    const bool large = s > sizes.limit || (s < least && s != -INF);  // -inf is the mask's
    const float z = tanh_of(s, sizes.top, -row_max);
    return large ? z : y;
  }
  // S -> what is kept as a maximum
  __device__ __forceinline__ float of_max(float s) const {
    if (!cfg::HAS_SOFTCAP) return s;
    return fabsf(s) <= sizes.limit ? small(s, 0.0f) : s == -INF ? s : tanh_of(s, sizes.top);
  }
  // From which element on a tile is large to a row with this maximum so far
  __device__ __forceinline__ float ceiling(float row_max) const {
    return row_max == INF ? INF : row_max >= sizes.least ? sizes.limit : -INF;
  }

  // Has a large element any weight, in a row of this L? Its P is 1 at most.
  __device__ __forceinline__ bool may_be_large(float lse_log2) const {
    return !(lse_log2 >= sizes.least && lse_log2 <= sizes.most);
  }
  // S^T -> tanh(X^T / c), in place; of a stage, where any L says so, each as its own L does
  template <int NT>
  __device__ __forceinline__ void to_tanh(float (&rS)[1][NT][4], const float* lse_log2,
                                          bool any) const {
    if (any) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const float2 of = *reinterpret_cast<const float2*>(lse_log2 + j * 8);
        const bool by_row[2] = {may_be_large(of.x), may_be_large(of.y)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& s = rS[0][j][e];
          const float t = tanh_of(s);
          s = fabsf(s) > sizes.limit && by_row[e % 2] ? t : small(s, 0.0f);
        }
      }
    } else {
      for_each<1, NT>([&](int i, int j, int e) { rS[i][j][e] = small(rS[i][j][e], 0.0f); });
    }
  }
  // what a mask puts in the place of tanh(X / c), or of S without a softcap
  __device__ __forceinline__ float masked() const { return cfg::HAS_SOFTCAP ? sizes.masked : -INF; }
};
