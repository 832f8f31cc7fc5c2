// Scores and their tangent. The direction is (tq, tk, tv); in a double backward (ddq, ddk, ddv),
// the cotangents of (dq, dk, dv). cfg::HAS_TQ, HAS_TK and HAS_TV say which parts of it exist: the
// products of an absent part are left out. Factors of blocks of keys (cfg::HAS_SCALE) may have a
// tangent too.
//
//   S = Q K^T     E = tQ K^T + Q tK^T     (both without softmax_scale)
#pragma once
#include "sm80/gradient.cuh"
#include "sm80/tile_mma.cuh"

constexpr bool HAS_E = cfg::HAS_TQ || cfg::HAS_TK || cfg::HAS_SCALE;
static_assert(HAS_E || cfg::HAS_TV, "cfg::HAS_TQ, HAS_TK, HAS_TV: a direction has a part");

// A step of 16 along k for two products that share an operand: c += a b and, where BOTH, d += a2 b.
template <bool BOTH, int MT, int NT, class LoadB>
__device__ __forceinline__ void multiply_step_pair(float (&c)[MT][NT][4], float (&d)[MT][NT][4],
                                                   const uint32_t (&a)[MT][4],
                                                   const uint32_t (&a2)[MT][4], LoadB&& load_b) {
#pragma unroll
  for (int j = 0; j < NT / 2; ++j) {
    uint32_t b[4];
    load_b(b, j);
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      mma_m16n8k16(c[i][2 * j], a[i], b[0], b[1]);
      mma_m16n8k16(c[i][2 * j + 1], a[i], b[2], b[3]);
      if constexpr (BOTH) {
        mma_m16n8k16(d[i][2 * j], a2[i], b[0], b[1]);
        mma_m16n8k16(d[i][2 * j + 1], a2[i], b[2], b[3]);
      }
    }
  }
}

// S and E of a warp's rows; every operand is read once. q: X[m][k]; k: Y[n][k], K columns; tq and tk
// lie TQ_BEHIND and TK_BEHIND bytes behind them.
template <int K, int TQ_BEHIND, int TK_BEHIND, int MT, int NT, class X, class Y>
__device__ __forceinline__ void multiply_scores(float (&rS)[MT][NT][4], float (&rE)[MT][NT][4],
                                                const X& q, const Y& k) {
  clear(rS);
  clear(rE);
#pragma unroll cfg::UNROLL_K
  for (int step = 0; step < K / 16; ++step) {
    uint32_t a[MT][4], ta[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      q.load(a[i], i, step);
      if constexpr (cfg::HAS_TQ) q.load(ta[i], i, step, TQ_BEHIND);
    }
    multiply_step_pair<cfg::HAS_TQ>(rS, rE, a, ta,
                                    [&](uint32_t (&b)[4], int j) { k.load(b, j, step); });
    if constexpr (cfg::HAS_TK) {
      multiply_step(rE, a, [&](uint32_t (&b)[4], int j) { k.load(b, j, step, TK_BEHIND); });
    }
  }
}

// dP = dO V^T where there is an E for it to meet, and X = dO tV^T: what dS and its tangent need. tv
// lies TV_BEHIND bytes behind v.
template <int K, int TV_BEHIND, int MT, int NT, class X, class Y>
__device__ __forceinline__ void multiply_gradients(float (&rdP)[MT][NT][4], float (&rX)[MT][NT][4],
                                                   const X& dout, const Y& v) {
  clear(rdP);
  clear(rX);
#pragma unroll cfg::UNROLL_K
  for (int step = 0; step < K / 16; ++step) {
    uint32_t a[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i) dout.load(a[i], i, step);
    if constexpr (HAS_E) {
      multiply_step(rdP, a, [&](uint32_t (&b)[4], int j) { v.load(b, j, step); });
    }
    if constexpr (cfg::HAS_TV) {
      multiply_step(rX, a, [&](uint32_t (&b)[4], int j) { v.load(b, j, step, TV_BEHIND); });
    }
  }
}

// With a factor g of each row and its tangent tg:  E -> g E + tg S,  S -> g S
template <int MT, int NT>
__device__ __forceinline__ void apply_factors(float (&rS)[MT][NT][4], float (&rE)[MT][NT][4],
                                              const float (&factor)[MT][2],
                                              const float (&tangent)[MT][2]) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rE[i][j][e] = factor[i][e / 2] * rE[i][j][e] + tangent[i][e / 2] * rS[i][j][e];
        rS[i][j][e] *= factor[i][e / 2];
      }
    }
  }
}

// E -> P o E softmax_scale, added to this lane's share of each row's sum
template <int MT, int NT>
__device__ __forceinline__ void weigh_tangents(float (&rE)[MT][NT][4], const float (&rP)[MT][NT][4],
                                               float softmax_scale, float (&row_sum)[MT][2]) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rE[i][j][e] *= rP[i][j][e] * softmax_scale;
        row_sum[i][e / 2] += rE[i][j][e];
      }
    }
  }
}

// Row sums of P o E as the products with V see it, rounded to 16 bits: they take e O away from
// (P o E) V without leaving e's share of the roundings behind. By a product with ones, whose columns
// are all the sum.
template <int MT>
__device__ __forceinline__ void add_row_sums(float (&sums)[MT][4], const uint32_t (&a)[MT][4]) {
  constexpr uint32_t ONES = cfg::BF16 ? 0x3f803f80 : 0x3c003c00;
#pragma unroll
  for (int i = 0; i < MT; ++i) mma_m16n8k16(sums[i], a[i], ONES, ONES);
}

// Two neighbouring elements of a packed row
struct Pair {
  float x, y;
  __device__ __forceinline__ explicit Pair(const uint16_t* element) {
    const uint32_t both = *reinterpret_cast<const uint32_t*>(element);
    x = cvt_f32(static_cast<uint16_t>(both)), y = cvt_f32(static_cast<uint16_t>(both >> 16));
  }
};

// What the second pass knows of a row beside L: D = dO.O - dL, e = ddL and W = dO.ddO.
template <int MT>
struct RowTerms {
  PerRow<MT> delta, ddlse, ddelta;
};

// E -> tP = P (E - e), E times the scale;  dP -> dS = P (dP - D);
// X -> tdS = tP (dP - D) + P (X - W)
template <int MT, int NT>
__device__ __forceinline__ void tangents_of_p_and_ds(
    float (&rE)[MT][NT][4], float (&rdP)[MT][NT][4], float (&rX)[MT][NT][4],
    const float (&rP)[MT][NT][4], const RowTerms<MT>& terms, float softmax_scale) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = rP[i][j][e];
        float tds = p * (rX[i][j][e] - terms.ddelta.value[i][e / 2]);
        if constexpr (HAS_E) {
          const float tp = p * (rE[i][j][e] * softmax_scale - terms.ddlse.value[i][e / 2]);
          const float z = rdP[i][j][e] - terms.delta.value[i][e / 2];
          tds += tp * z;
          rE[i][j][e] = tp;
          rdP[i][j][e] = p * z;
        }
        rX[i][j][e] = tds;
      }
    }
  }
}
