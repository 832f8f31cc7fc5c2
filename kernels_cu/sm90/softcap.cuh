// Scores under a softcap c (cfg::HAS_SOFTCAP), c tanh(X / c) with X = softmax_scale Q K^T, where the
// exponential unit is what softmax waits for: a polynomial ends in the multiply and add that makes an
// exponent of a score in any case. Source: arXiv 2408.00118.
#pragma once
#include "base/softcap.cuh"
#include "sm90/ptx.cuh"

// With x = X / c, for |x| <= 0.3: tanh(x) = x (A0 + A1 x^2 + A2 x^4) to 1.7e-7, the least largest
// error. What it comes to for an element S of Q K^T, from ops/softcaps.py.
struct CapSizes {
  float a0;  // S (a0 + a1 S^2 + a2 S^4) is the score in powers of two
  float a1;
  float a2;
  float inverse;  // x / S
  float limit;    // the largest S that is small
  float top;      // c in powers of two
  float bend;     // 1 / top^2
  float masked;   // farther below any L than a power of two can say
  float least;    // of L, from which on what is large and negative has no weight,
  float most;     // and up to which nothing is large and positive; or no L is between
};

// S stays what it is until its exponential; maxima are kept as scores in powers of two. An element's
// bits hang on no other, although a warp looks at all for one that is large.
struct Cap {
  const CapSizes& sizes;

  // what a maximum is kept as, and the factor that makes it a score in powers of two, or a score
  __device__ __forceinline__ float of(float s) const {
    if constexpr (!cfg::HAS_SOFTCAP) return s;
    return is_small(s) ? exponent_small(s, 0.0f) : exponent_large(s, 0.0f);
  }
  static __device__ __forceinline__ float scale_log2(const Sizes& sizes) {
    return cfg::HAS_SOFTCAP ? 1.0f : sizes.softmax_scale * LOG2E;
  }
  static __device__ __forceinline__ float scale(const Sizes& sizes) {
    return cfg::HAS_SOFTCAP ? LN2 : sizes.softmax_scale;
  }

  // what a mask puts in the place of Y
  __device__ __forceinline__ float masked() const { return cfg::HAS_SOFTCAP ? sizes.masked : -INF; }
  __device__ __forceinline__ bool is_small(float s) const { return fabsf(s) <= sizes.limit; }
  // the score of S less `offset`, in powers of two
  __device__ __forceinline__ float exponent_small(float s, float offset) const {
    const float square = s * s;
    return fmaf(s, fmaf(fmaf(sizes.a2, square, sizes.a1), square, sizes.a0), -offset);
  }
  __device__ __forceinline__ float exponent_large(float s, float offset) const {
    return s == -INF ? -INF
                     : sizes.top * tanh_large(s * sizes.inverse) - offset;  // -inf is the mask's
  }

  // S -> its score Y in powers of two, in place
  template <int NT>
  __device__ __forceinline__ void scores(float (&rS)[1][NT][4], bool large) const {
    if (large) {
      for_each<1, NT>([&](int i, int j, int e) { rS[i][j][e] = of(rS[i][j][e]); });
    } else {
      for_each<1, NT>(
          [&](int i, int j, int e) { rS[i][j][e] = exponent_small(rS[i][j][e], 0.0f); });
    }
  }
  // the derivative of Y by X log2(e)
  __device__ __forceinline__ float slope(float y) const { return 1.0f - y * sizes.bend * y; }

  // Has a large element, in a row of this L, any weight? Its P is 1 at most. None in a dead row.
  __device__ __forceinline__ bool may_be_large(float lse) const {
    return !(lse >= sizes.least && lse <= sizes.most) && lse != -INF;
  }
  // The same of rows whose largest elements so far, and score of the maximum, are these
  __device__ __forceinline__ bool may_be_large(float largest, float row_max) const {
    return largest > sizes.limit || (row_max * LN2 < sizes.least && row_max != -INF);
  }
  // Do rows say so? For a small c what is large and negative has weight, and elements are asked.
  __device__ __forceinline__ bool asks_rows() const { return sizes.least < sizes.most; }
  // Is any of the warp's elements large? Before the mask. Of floats' bits as integers the largest is
  // the largest positive one, and as unsigned integers the negative one that is farthest from 0.
  template <int NT>
  __device__ __forceinline__ bool any_large(const float (&rS)[1][NT][4]) const {
    if constexpr (!cfg::HAS_SOFTCAP) return false;
    int above[2] = {};
    uint32_t below[2] = {};
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = rS[0][j][half * 2], y = rS[0][j][half * 2 + 1];
        above[half] = max3(__float_as_int(x), __float_as_int(y), above[half]);
        below[half] = max3(__float_as_uint(x), __float_as_uint(y), below[half]);
      }
    }
    const bool small = is_small(__int_as_float(max(above[0], above[1]))) &&
                       is_small(__uint_as_float(max(below[0], below[1])));
    return __any_sync(0xffffffff, !small);
  }
};
