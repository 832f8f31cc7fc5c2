// Kernels whose warps own whole rows of queries, WARP_M each: what goes along a row needs no other
// warp.
#pragma once
#include "base/shapes.cuh"

constexpr int WARP_M = BLOCK_M / cfg::NUM_WARPS;
constexpr int MT = WARP_M / 16;  // its m16 tiles
static_assert(WARP_M % 16 == 0 && MT > 0, "cfg::BLOCK_M: 16 rows or more for each of NUM_WARPS");
