// Keys and values in shared memory, and what the direction adds right behind each.
#pragma once
#include "base/shapes.cuh"
#include "base/tangents.cuh"

struct TangentKeys {
  TileK k, ddk;
  TileV v, ddv;

  template <class Args>
  __device__ __forceinline__ void load_k(const Args& args, const Rows& rows) const {
    load_rows<cfg::WIDTH>(k, args.k, rows);
    if constexpr (cfg::HAS_TK) load_rows<cfg::WIDTH>(ddk, args.ddk, rows);
  }
  // V only where there is an E for dP to meet
  template <class Args>
  __device__ __forceinline__ void load_v(const Args& args, const Rows& rows) const {
    if constexpr (HAS_E) load_rows<cfg::WIDTH_V>(v, args.v, rows);
    if constexpr (cfg::HAS_TV) load_rows<cfg::WIDTH_V>(ddv, args.ddv, rows);
  }
  template <class Args>
  __device__ __forceinline__ void load(const Args& args, const Rows& rows) const {
    load_k(args, rows);
    load_v(args, rows);
  }
};
