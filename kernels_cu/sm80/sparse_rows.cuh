// Tiles of queries for block-sparse attention, and what a warp knows of its 16 rows.
//
//   A tile is ITEMS tokens of one sequence with the cfg::GROUP query heads of one selection head:
//   row r is token r / GROUP, head r % GROUP. Warp w of the consumers owns rows 16 w .. + 15; a lane
//   of it knows two of them, 16 w + lane / 4 and the one 8 further down.
#pragma once
#include "base/selection.cuh"
#include "base/shapes.cuh"
#include "base/statistics.cuh"
#include "base/store.cuh"
#include "sm80/products.cuh"

using cfg::BLOCK_SIZE, cfg::GROUP, cfg::NUM_STAGES, cfg::NUM_WARPS;
constexpr int CONSUMERS = BLOCK_M / 16;  // warps of 16 rows
constexpr int ITEMS = BLOCK_M / GROUP;
constexpr int ITEMS_PER_LANE = ceil_div(ITEMS, WARP_SIZE);
static_assert(BLOCK_M % 16 == 0 && NUM_WARPS == CONSUMERS + 1,
              "cfg::NUM_WARPS: one for 16 rows of BLOCK_M, and the producer");
static_assert(NUM_STAGES <= WARP_SIZE, "cfg::NUM_STAGES: a lane of the producer for each");
static_assert(ITEMS > 0, "cfg::BLOCK_M: the rows of one cfg::GROUP fit");
static_assert(BLOCK_SIZE % BLOCK_N == 0 && BLOCK_N % 16 == 0, "cfg::BLOCK_N divides BLOCK_SIZE");
constexpr int STEP_N =
    BLOCK_N / cfg::PIECES < 16 ? 16 : BLOCK_N / cfg::PIECES;  // keys that a warp weighs at once

// A tile of queries: tokens first_token .. + tokens of sequence batch_index, one selection head
struct ItemTile {
  int first_token, tokens, position;  // position: of the first token among the keys
  int head_sel, head, kv_head;        // head: the first of GROUP
  Sequence keys;

  // no tokens, or tokens that belong to no sequence
  __device__ __forceinline__ bool dead() const { return tokens <= 0 || keys.length < 0; }
  // row of the tile -> token and query head; a row past the tokens has none
  __device__ __forceinline__ bool valid(int row) const { return row < tokens * GROUP; }
};

// A row's first column in a packed tensor of query heads
__device__ __forceinline__ uint16_t* row_of(const Tensor& x, const ItemTile& tile, int row) {
  return x.at(tile.first_token + row / GROUP, tile.head + row % GROUP);
}
// A row's place in (num_heads_q, total_q) statistics
__device__ __forceinline__ int64_t statistic_of(const ItemTile& tile, int row, int total_q) {
  return static_cast<int64_t>(tile.head + row % GROUP) * total_q + tile.first_token + row / GROUP;
}

// L log2(e) of this lane's two rows, +inf where there is no key or no row; and another statistic of
// the same rows, 0 there.
__device__ __forceinline__ PerRow<1> own_lse_log2(const float* lse, const ItemTile& tile,
                                                  int warp_row, int total_q) {
  PerRow<1> rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + threadIdx.x % WARP_SIZE / 4;
    const float natural = tile.valid(row) ? lse[statistic_of(tile, row, total_q)] : -INF;
    rows.value[0][half] = natural == -INF ? INF : natural * LOG2E;
  }
  return rows;
}
__device__ __forceinline__ PerRow<1> own_statistic(const float* statistic, const ItemTile& tile,
                                                   int warp_row, int total_q,
                                                   const PerRow<1>& lse_log2) {
  PerRow<1> rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + threadIdx.x % WARP_SIZE / 4;
    const bool alive = lse_log2.value[0][half] != INF;
    rows.value[0][half] = alive ? statistic[statistic_of(tile, row, total_q)] : 0.0f;
  }
  return rows;
}

// The 16 rows of this warp into its rows of a tile; rows without a token are zeros.
template <int WIDTH, class TileT>
__device__ __forceinline__ void load_own_rows(const TileT& to, const Tensor& x,
                                              const ItemTile& tile, int warp_row) {
  const int lane = threadIdx.x % WARP_SIZE;
  const uint32_t tile_address = to.address();
#pragma unroll
  for (int i = 0; i < 16 * TileT::CHUNKS / WARP_SIZE; ++i) {
    const int index = i * WARP_SIZE + lane;
    const int row = warp_row + index / TileT::CHUNKS, chunk = index % TileT::CHUNKS;
    const bool valid = tile.valid(row) && (WIDTH == TileT::COLS || chunk * 8 < WIDTH);
    cp_async(tile_address + TileT::offset(row, chunk),
             valid ? row_of(x, tile, row) + chunk * 8 : x.data, valid);
  }
}

// The 16 rows of this warp from its rows of a tile to a packed tensor
template <int WIDTH, class TileT>
__device__ __forceinline__ void write_own_rows(const Tensor& x, const ItemTile& tile,
                                               const TileT& rows, int warp_row) {
  const int lane = threadIdx.x % WARP_SIZE;
  __syncwarp();  // the rows were written by this warp's other lanes
#pragma unroll
  for (int i = 0; i < 16 * TileT::CHUNKS / WARP_SIZE; ++i) {
    const int index = i * WARP_SIZE + lane;
    const int row = warp_row + index / TileT::CHUNKS, chunk = index % TileT::CHUNKS;
    if (tile.valid(row) && (WIDTH == TileT::COLS || chunk * 8 < WIDTH)) {
      *reinterpret_cast<uint4*>(row_of(x, tile, row) + chunk * 8) =
          *reinterpret_cast<const uint4*>(rows.bytes + TileT::offset(row, chunk));
    }
  }
}

// Zeros to the rows of all tokens of a tile
template <int WIDTH>
__device__ __forceinline__ void zero_own_rows(const Tensor& x, const ItemTile& tile) {
  constexpr int CHUNKS = WIDTH / 8;
  for (int i = threadIdx.x; i < tile.tokens * GROUP * CHUNKS; i += NUM_THREADS) {
    *reinterpret_cast<uint4*>(row_of(x, tile, i / CHUNKS) + i % CHUNKS * 8) = uint4{0, 0, 0, 0};
  }
}

// A number to the same rows of statistics
__device__ __forceinline__ void fill_own_statistic(float* statistic, const ItemTile& tile,
                                                   int total_q, float x) {
  for (int row = threadIdx.x; tile.valid(row); row += NUM_THREADS) {
    statistic[statistic_of(tile, row, total_q)] = x;
  }
}

// The tile of a CTA: tile blockIdx.x of selection head blockIdx.y. keys.length is -1 for tokens that
// belong to no sequence.
template <class Args>
__device__ __forceinline__ ItemTile find_item_tile(const Args& args) {
  const TileOfSequence found =
      find_tile(args.cu_seqlens_q, args.sizes.batch, args.sizes.total_q, ITEMS, blockIdx.x);
  const int row = found.block * ITEMS;
  ItemTile tile;
  tile.first_token = found.start + row;
  tile.tokens = found.valid_rows(ITEMS);
  tile.head_sel = blockIdx.y;
  tile.head = tile.head_sel * GROUP;
  tile.kv_head = tile.head / args.sizes.group();
  tile.keys = Sequence{0, -1};
  if (found.batch_index >= 0) {
    tile.keys = sequence_at(args.cu_seqlens_k, found.batch_index, args.sizes.total_k);
  }
  tile.position = row + tile.keys.length - found.length;
  return tile;
}

// What this lane's two rows may see of a stage: columns [0, limit); and where they named its block.
struct RowsOfStage {
  int limit[2];
  int slot[2];
  bool cut;  // some row of the warp sees less than the whole stage
};

// -inf where a row sees less than the stage; `col` is that of the piece's first column.
template <int NT>
__device__ __forceinline__ void cut_rows(float (&rS)[1][NT][4], const RowsOfStage& rows, int col) {
  const int first = col + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first + j * 8 + e % 2 >= rows.limit[e / 2]) rS[0][j][e] = -INF;
    }
  }
}

// Scale of the scores of this lane's two rows, from a (total_q, num_heads_sel, num_selected) array
__device__ __forceinline__ void load_block_scale(float (&scale)[2], const float* scales,
                                                 const ItemTile& tile, const RowsOfStage& rows,
                                                 int warp_row, const SelectionSizes& selection,
                                                 float without) {
  const int row = warp_row + threadIdx.x % WARP_SIZE / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale[half] = without;
    if (scales && is_selected(rows.slot[half], selection)) {
      const int64_t token = tile.first_token + (row + half * 8) / GROUP;
      scale[half] =
          scales[(token * selection.num_heads_sel + tile.head_sel) * selection.num_selected +
                 rows.slot[half]];
    }
  }
}
// That scale, where blocks have one
struct BlockScale {
  float value[2];

  template <class Args>
  __device__ __forceinline__ BlockScale(const Args& args, const ItemTile& tile,
                                        const RowsOfStage& rows, int warp_row) {
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      load_block_scale(value, args.block_scale, tile, rows, warp_row, args.selection, 1.0f);
    }
  }
  // g S, or g dS
  template <int NT>
  __device__ __forceinline__ void apply(float (&c)[1][NT][4]) const {
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      scale_row(c, 0, 0, value[0]);
      scale_row(c, 0, 1, value[1]);
    }
  }
};
