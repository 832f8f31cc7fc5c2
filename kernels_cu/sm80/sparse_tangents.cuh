// What both second-order kernels with queries outer share: stages with tangents, and the scores and
// tangents of a warp's rows.
#pragma once
#include "sm80/sparse_walk.cuh"
#include "sm80/tangent_products.cuh"
#include "sm80/tangent_tiles.cuh"

// What a stage holds, loaded by the producer
struct TangentStage : TangentKeys {
  template <class Args>
  __device__ __forceinline__ void load(const Args& args, const ItemTile& tile, int key) const {
    load_keys<cfg::WIDTH>(k, args.k, tile, key);
    if constexpr (cfg::HAS_TK) load_keys<cfg::WIDTH>(ddk, args.ddk, tile, key);
    if constexpr (HAS_E) load_keys<cfg::WIDTH_V>(v, args.v, tile, key);
    if constexpr (cfg::HAS_TV) load_keys<cfg::WIDTH_V>(ddv, args.ddv, tile, key);
  }
};

// Scales of the blocks of this lane's two rows in a stage, and their tangents
struct BlockScales {
  float value[1][2], tangent[1][2];

  template <class Args>
  __device__ __forceinline__ BlockScales(const Args& args, const ItemTile& tile,
                                         const RowsOfStage& rows, int warp_row) {
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      load_block_scale(value[0], args.block_scale, tile, rows, warp_row, args.selection, 1.0f);
      load_block_scale(tangent[0], args.ddblock_scale, tile, rows, warp_row, args.selection, 0.0f);
    }
  }
  // E -> g E + tg S,  S -> g S;  the same of dS and its tangent
  template <int NT>
  __device__ __forceinline__ void apply(float (&rS)[1][NT][4], float (&rE)[1][NT][4]) const {
    if constexpr (cfg::HAS_BLOCK_SCALE) apply_block_scale(rS, rE, value, tangent);
  }
};
