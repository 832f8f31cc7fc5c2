// Kernels with tiles of keys outer: how their warps lie over the products of a tile of queries with a
// tile of keys. STEP columns of scores are made at once.
#pragma once
#include "base/shapes.cuh"
#include "sm80/products.cuh"

template <int STEP>
using WarpOfScores = WarpTile<BLOCK_M, STEP, cfg::WARPS_M_S>;
using WarpK = WarpTile<BLOCK_N, HEAD_DIM, cfg::WARPS_N_KV>;    // dK, or gK
using WarpV = WarpTile<BLOCK_N, HEAD_DIM_V, cfg::WARPS_N_KV>;  // dV, or gV
using WarpQ = WarpTile<BLOCK_M, HEAD_DIM, cfg::WARPS_M_DQ>;    // dQ, or gQ

template <class WarpS>
struct KeyWarps {
  WarpS s;
  WarpK k;
  WarpV v;
  WarpQ q;
  static constexpr bool EVERY = WarpS::EVERY && WarpK::EVERY && WarpV::EVERY && WarpQ::EVERY;
  __device__ __forceinline__ explicit KeyWarps(int warp) : s(warp), k(warp), v(warp), q(warp) {}
};
