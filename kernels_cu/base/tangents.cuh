// Tangents of scores, of P and of dS: elementwise, on accumulators. The direction is (tq, tk, tv);
// in a double backward (ddq, ddk, ddv), the cotangents of (dq, dk, dv). cfg::HAS_TQ, HAS_TK and
// HAS_TV say which parts of it exist: the products of an absent part are left out. Scales of blocks
// of keys (cfg::HAS_BLOCK_SCALE) may have a tangent too.
//
//   S = Q K^T     E = tQ K^T + Q tK^T     (both without softmax_scale)
#pragma once
#include "base/softcap.cuh"
#include "base/softmax.cuh"
#include "base/statistics.cuh"

constexpr bool HAS_E = cfg::HAS_TQ || cfg::HAS_TK || cfg::HAS_BLOCK_SCALE;
static_assert(HAS_E || cfg::HAS_TV, "cfg::HAS_TQ, HAS_TK, HAS_TV: a direction has a part");

// With a scale g of each row and its tangent tg:  E -> g E + tg S,  S -> g S
template <int MT, int NT>
__device__ __forceinline__ void apply_block_scale(float (&rS)[MT][NT][4], float (&rE)[MT][NT][4],
                                                  const float (&scale)[MT][2],
                                                  const float (&tangent)[MT][2]) {
  for_each<MT, NT>([&](int i, int j, int e) {
    rE[i][j][e] = scale[i][e / 2] * rE[i][j][e] + tangent[i][e / 2] * rS[i][j][e];
    rS[i][j][e] *= scale[i][e / 2];
  });
}

// E -> P o E softmax_scale, added to this lane's share of each row's sum
template <int MT, int NT>
__device__ __forceinline__ void weigh_tangents(float (&rE)[MT][NT][4], const float (&rP)[MT][NT][4],
                                               float softmax_scale, float (&row_sum)[MT][2]) {
  for_each<MT, NT>([&](int i, int j, int e) {
    rE[i][j][e] *= rP[i][j][e] * softmax_scale;
    row_sum[i][e / 2] += rE[i][j][e];
  });
}

// Two neighbouring elements of a packed row
struct Pair {
  float x, y;
  __device__ __forceinline__ explicit Pair(const uint16_t* element) {
    const uint32_t both = *reinterpret_cast<const uint32_t*>(element);
    x = cvt_f32(static_cast<uint16_t>(both)), y = cvt_f32(static_cast<uint16_t>(both >> 16));
  }
};

// D = dO.O and W = dO.ddO of a row, in all of its lanes
struct RowSums {
  float delta, ddelta;
};
// One row of ddO finished, ddO - e O, and its sums; of a dead row nothing is read. O and dO point at
// this lane's first columns; without SUMS (forward mode) there is no dO. A condition at run time
// would keep the loads of a row from leaving together.
template <bool SUMS, int NT>
__device__ __forceinline__ RowSums finish_ddout(float (&rddO)[NT][4], int half, float e, bool alive,
                                                const uint16_t* gO, const uint16_t* gdO) {
  RowSums sums{0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    if (alive && j * 8 < cfg::WIDTH_V) {
      const Pair out(gO + j * 8);
      float& x = rddO[j][half * 2];
      float& y = rddO[j][half * 2 + 1];
      x -= e * out.x, y -= e * out.y;
      if constexpr (SUMS) {
        const Pair dout(gdO + j * 8);
        sums.delta += dout.x * out.x + dout.y * out.y;
        sums.ddelta += dout.x * x + dout.y * y;
      }
    }
  }
  return {sum_of_row(sums.delta), sum_of_row(sums.ddelta)};
}

// What the second pass knows of a row beside L: D = dO.O - dL, e = ddL and W = dO.ddO.
template <int MT>
struct RowTerms {
  PerRow<MT> lse_log2, delta, ddlse, ddelta;
};

// The same from L, D, e and W of BLOCK_M rows each in shared memory, from this lane's first row on
template <int MT>
__device__ __forceinline__ RowTerms<MT> row_terms(const float* terms) {
  const auto lse_log2 = load_lse_log2<MT>(terms, 0, cfg::BLOCK_M);
  return {lse_log2, load_delta<MT>(terms + cfg::BLOCK_M, 0, lse_log2),
          load_delta<MT>(terms + 2 * cfg::BLOCK_M, 0, lse_log2),
          load_delta<MT>(terms + 3 * cfg::BLOCK_M, 0, lse_log2)};
}

// E -> tP = P (E - e), E times the scale;  dP -> dS = P (dP - D);
// X -> tdS = tP (dP - D) + P (X - W). Under a softcap E is of what it takes, F, and dS and tdS too:
// with t = tanh(X / c), E = (1 - t^2) F,  dS -> (1 - t^2) dS,
// tdS -> (1 - t^2) tdS - 2 t (1 - t^2) / c F dS
template <int MT, int NT>
__device__ __forceinline__ void tangents_of_p_and_ds(
    float (&rE)[MT][NT][4], float (&rdP)[MT][NT][4], float (&rX)[MT][NT][4],
    const float (&rP)[MT][NT][4], const RowTerms<MT>& terms, const Sizes& sizes) {
  for_each<MT, NT>([&](int i, int j, int e) {
    const float p = rP[i][j][e];
    float slope = 1.0f, bend = 0.0f;
    if constexpr (cfg::HAS_SOFTCAP) {
      const float t = Slope(sizes).tanh_of(p, terms.lse_log2.value[i][e / 2]);
      slope = 1.0f - t * t;
      bend = -2.0f * t * slope / sizes.softcap;
    }
    float tds = p * (rX[i][j][e] - terms.ddelta.value[i][e / 2]);
    if constexpr (HAS_E) {
      const float f = rE[i][j][e] * sizes.softmax_scale;
      const float tp = p * ((cfg::HAS_SOFTCAP ? slope * f : f) - terms.ddlse.value[i][e / 2]);
      const float z = rdP[i][j][e] - terms.delta.value[i][e / 2];
      tds += tp * z;
      rE[i][j][e] = tp;
      rdP[i][j][e] = p * z;
      if constexpr (cfg::HAS_SOFTCAP) {
        tds = slope * tds + bend * f * rdP[i][j][e];
        rdP[i][j][e] *= slope;
      }
    } else if constexpr (cfg::HAS_SOFTCAP) {
      tds *= slope;
    }
    rX[i][j][e] = tds;
  });
}
