// backward_postprocess: gradient = scale * workspace, from float32 sums in accumulator order to
// 16-bit rows.
//
//   A CTA owns BLOCK_M rows of one head; a warp turns whole units of 16 rows, through shared memory
//   so that global rows are written 16 bytes at a time. Grid: (tiles of rows, upper bound; heads).
// Twin: rawattn/kernels_numba/backward_postprocess.py.
#include "base/varlen.cuh"
#include "base/workspace.cuh"
#include "sm80/tile_mma.cuh"

constexpr int NUM_THREADS = cfg::NUM_WARPS * WARP_SIZE;
static_assert(cfg::BLOCK_M == cfg::NUM_WARPS * UNIT,
              "cfg::BLOCK_M: one unit for each of NUM_WARPS");
using TileX = Tile<cfg::BLOCK_M, cfg::HEAD_DIM>;
static_assert(TileX::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and TileX differ");

struct Args {
  float* accum;           // [head][unit][column / 8][lane][4], see base/workspace.cuh
  Tensor grad;            // (total_rows, num_heads, head_dim)
  const int* cu_seqlens;  // (batch + 1,)
  int batch;
  int total_rows;
  int num_heads;
  float scale;
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    backward_postprocess(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const TileOfSequence tile =
      find_tile(args.cu_seqlens, args.batch, args.total_rows, cfg::BLOCK_M, blockIdx.x);
  const int head = blockIdx.y, row0 = tile.block * cfg::BLOCK_M;
  const int valid_rows = min(cfg::BLOCK_M, tile.length - row0);
  uint16_t* gX = args.grad.at(tile.start + row0, head);
  if (tile.batch_index < 0) {
    zero_rows<cfg::WIDTH, NUM_THREADS>(gX, args.grad.token_stride, valid_rows);
    return;
  }
  const int warp_row = threadIdx.x / WARP_SIZE * UNIT;
  if (warp_row >= valid_rows) return;
  const Workspace<cfg::HEAD_DIM> sums(args.accum, head, args.total_rows, args.batch, tile.start,
                                      tile.batch_index);
  float rX[1][cfg::HEAD_DIM / 8][4];
#pragma unroll
  for (int j = 0; j < cfg::HEAD_DIM / 8; ++j) sums.read((row0 + warp_row) / UNIT, j, rX[0][j]);
  store_tile<TileX>(smem, rX, warp_row, 0, [&](int, int) { return args.scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_rows<TileX, cfg::WIDTH, WARP_SIZE, UNIT>(gX, args.grad.token_stride, smem, warp_row,
                                                 valid_rows, threadIdx.x % WARP_SIZE);
}
