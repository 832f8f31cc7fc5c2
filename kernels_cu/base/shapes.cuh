// The tiles of an attention kernel by the names of cfg. Q and K have HEAD_DIM columns, V and O
// HEAD_DIM_V; BLOCK_M rows of queries meet BLOCK_N rows of keys.
#pragma once
#include "base/layout.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::HEAD_DIM, cfg::HEAD_DIM_V;
using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;
using TileP = Tile<BLOCK_M, (BLOCK_N < 32 ? 32 : BLOCK_N)>;  // P, dS and their tangents
