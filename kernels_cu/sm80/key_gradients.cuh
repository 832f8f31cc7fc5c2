// What both kernels of gK and gV share: a CTA keeps keys, and queries pass.
//   gV = tP^T dO,  gK = softmax_scale (tdS^T Q + dS^T ddQ)
#pragma once
#include "base/store.cuh"
#include "sm80/key_warps.cuh"
#include "sm80/tangent_products.cuh"
#include "sm80/tangent_tiles.cuh"

struct KeySide {
  TangentKeys keys;  // gK takes the place of k at the end, gV that of v
  TileQ q, ddq;
  TileO dout;
  TileP tp, ds, tds;
  float terms[4][BLOCK_M];  // L, D, e, W

  // a warp's part of the factors, as they come from tangents_of_p_and_ds
  template <int MT, int NT>
  __device__ __forceinline__ void store_factors(const float (&rTP)[MT][NT][4],
                                                const float (&rdS)[MT][NT][4],
                                                const float (&rTdS)[MT][NT][4], int row, int col) {
    if constexpr (HAS_E) {
      store_tile(tp, rTP, row, col);
      store_tile(ds, rdS, row, col);
    }
    store_tile(tds, rTdS, row, col);
  }
};

// A warp's parts of gK and gV
struct KeyGradients {
  float rgK[WarpK::MT][WarpK::NT][4] = {}, rgV[WarpV::MT][WarpV::NT][4] = {};

  // The products of a tile of queries
  template <class WarpS>
  __device__ __forceinline__ void add(const KeySide& side, const KeyWarps<WarpS>& warp) {
    if (HAS_E && warp.v.any()) {
      multiply_xty<BLOCK_M>(rgV, OperandAT<TileP, WarpV::SPAN_M>(side.tp.address(), 0, warp.v.row),
                            OperandBT<TileO, WarpV::SPAN_N>(side.dout.address(), 0, warp.v.col));
    }
    if (warp.k.any()) {
      multiply_xty<BLOCK_M>(rgK, OperandAT<TileP, WarpK::SPAN_M>(side.tds.address(), 0, warp.k.row),
                            OperandBT<TileQ, WarpK::SPAN_N>(side.q.address(), 0, warp.k.col));
    }
    if (cfg::HAS_TQ && warp.k.any()) {
      multiply_xty<BLOCK_M>(rgK, OperandAT<TileP, WarpK::SPAN_M>(side.ds.address(), 0, warp.k.row),
                            OperandBT<TileQ, WarpK::SPAN_N>(side.ddq.address(), 0, warp.k.col));
    }
  }

  // Both in the place of K and V, which every warp has left
  template <class WarpS>
  __device__ __forceinline__ void store(KeySide& side, const KeyWarps<WarpS>& warp,
                                        float softmax_scale) const {
    if (warp.k.any()) {
      store_tile(side.keys.k, rgK, warp.k.row, warp.k.col, [&](int, int) { return softmax_scale; });
    }
    if (warp.v.any()) store_tile(side.keys.v, rgV, warp.v.row, warp.v.col);
  }
};
