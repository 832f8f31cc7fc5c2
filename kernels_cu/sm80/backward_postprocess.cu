// backward_postprocess: gradient = scale * workspace, from float32 sums in accumulator order to
// 16-bit rows.
//
//   A CTA owns BLOCK_M rows of one head; a warp turns whole units of 16 rows, through shared memory
//   so that global rows are written 16 bytes at a time. Grid: (tiles of rows, upper bound; heads).
// Twin: rawattn/kernels_numba/backward_postprocess.py.
#include "base/store.cuh"
#include "base/varlen.cuh"
#include "base/workspace.cuh"

using cfg::BLOCK_M, cfg::HEAD_DIM;
static_assert(BLOCK_M == cfg::NUM_WARPS * UNIT, "cfg::BLOCK_M: one unit for each of NUM_WARPS");
using TileX = Tile<BLOCK_M, HEAD_DIM>;
static_assert(sizeof(TileX) == cfg::SMEM_BYTES, "the row's shared memory and TileX differ");

struct Args {
  float* accum;           // (num_heads * total_rows * head_dim,), see base/workspace.cuh
  Tensor grad;            // (total_rows, num_heads, head_dim)
  const int* cu_seqlens;  // (batch + 1,)
  int batch;
  int total_rows;
  int num_heads;
  float scale;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/backward_postprocess.py differ");

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    backward_postprocess(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  TileX& tile_x = *reinterpret_cast<TileX*>(shared);
  const TileOfSequence tile =
      find_tile(args.cu_seqlens, args.batch, args.total_rows, BLOCK_M, blockIdx.x);
  const int head = blockIdx.y, row0 = tile.block * BLOCK_M;
  const Rows rows{tile.start + row0, head, tile.valid_rows(BLOCK_M)};
  if (tile.batch_index < 0) {
    zero_rows<cfg::WIDTH>(args.grad, rows);
    return;
  }
  const int warp_row = threadIdx.x / WARP_SIZE * UNIT;
  if (warp_row >= rows.valid) return;
  const Workspace<cfg::WIDTH> sums(args.accum, head, args.total_rows, tile.start,
                                   row0 + rows.valid);
  const auto unit = sums.unit(row0 + warp_row);
  float rX[1][HEAD_DIM / 8][4];
#pragma unroll
  for (int j = 0; j < cfg::WIDTH / 8; ++j) unit.read(j * 8, rX[0][j]);
  store_tile(tile_x, rX, warp_row, 0, [&](int, int) { return args.scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_warp_rows<cfg::WIDTH, UNIT>(args.grad, rows, tile_x, warp_row);
}
