// Products of scores and gradients together with their tangents; every operand is read once. The
// tile of a tangent lies right behind its own: Q tQ, K tK, V tV.
#pragma once
#include "base/tangents.cuh"
#include "sm80/products.cuh"

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

// S and E of a warp's rows. q: X[m][k]; k: Y[n][k], K columns
template <int K, int MT, int NT, class X, class Y>
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
      if constexpr (cfg::HAS_TQ) q.load_tangent(ta[i], i, step);
    }
    multiply_step_pair<cfg::HAS_TQ>(rS, rE, a, ta,
                                    [&](uint32_t (&b)[4], int j) { k.load(b, j, step); });
    if constexpr (cfg::HAS_TK) {
      multiply_step(rE, a, [&](uint32_t (&b)[4], int j) { k.load_tangent(b, j, step); });
    }
  }
}

// dP = dO V^T where there is an E for it to meet, and X = dO tV^T: what dS and its tangent need
template <int K, int MT, int NT, class X, class Y>
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
      multiply_step(rX, a, [&](uint32_t (&b)[4], int j) { v.load_tangent(b, j, step); });
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

// ddO += (P o E) V + P ddV; rounded += rowsum(P o E) as rounded for the product
template <int MT, int NT, int NT_V, class Values>
__device__ __forceinline__ void add_tangent_products(float (&rddO)[MT][NT_V][4],
                                                     const float (&rP)[MT][NT][4],
                                                     const float (&rPE)[MT][NT][4], const Values& v,
                                                     float (&rounded)[MT][4]) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t p[MT][4], pe[MT][4];
    if constexpr (HAS_E) {
      to_operand(pe, rPE, k);
      add_row_sums(rounded, pe);
      multiply_step(rddO, pe, [&](uint32_t (&b)[4], int j) { v.load(b, k, j); });
    }
    if constexpr (cfg::HAS_TV) {
      to_operand(p, rP, k);
      multiply_step(rddO, p, [&](uint32_t (&b)[4], int j) { v.load_tangent(b, k, j); });
    }
  }
}
