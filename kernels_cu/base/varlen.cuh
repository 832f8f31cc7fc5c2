// From a tile number to a tile of a sequence, on the device: the host never reads cu_seqlens.
#pragma once
#include "base/compat.cuh"

struct Sequence {
  int start, length;
};

// Offsets are clamped to the tensor, so that a broken cu_seqlens gives wrong numbers at worst,
// never a wild access.
__device__ __forceinline__ Sequence sequence_at(const int* cu_seqlens, int batch_index, int total) {
  const int start = min(max(cu_seqlens[batch_index], 0), total);
  const int end = min(max(cu_seqlens[batch_index + 1], start), total);
  return {start, end - start};
}

struct TileOfSequence {
  int batch_index;  // -1: no sequence has this tile
  int block;  // tile of the sequence; without a sequence: tile of the rows past cu_seqlens[batch]
  int start, length;
};

// Tile `tile` when every sequence is cut into tiles of `block_rows` rows, in order. All 32 lanes of
// a warp take part; each counts the tiles of a run of sequences, then the run that holds the tile
// is searched again.
__device__ __forceinline__ TileOfSequence find_tile(const int* cu_seqlens, int batch, int total,
                                                    int block_rows, int tile) {
  const int lane = threadIdx.x % WARP_SIZE;
  int first = 0, count = batch;
  while (true) {
    const int run = ceil_div(count, WARP_SIZE);
    const int begin = first + lane * run, end = min(begin + run, first + count);
    int tiles = 0;
    for (int b = begin; b < end; ++b) {
      tiles += ceil_div(max(cu_seqlens[b + 1] - cu_seqlens[b], 0), block_rows);
    }
    int inclusive = tiles;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const int below = __shfl_up_sync(0xffffffff, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    const unsigned past = __ballot_sync(0xffffffff, inclusive > tile);
    if (past == 0) {  // behind the last sequence
      const int end_of_last = min(max(batch > 0 ? cu_seqlens[batch] : 0, 0), total);
      const int block = tile - __shfl_sync(0xffffffff, inclusive, WARP_SIZE - 1);
      return {-1, block, end_of_last, total - end_of_last};
    }
    const int winner = __ffs(past) - 1;
    tile -= __shfl_sync(0xffffffff, inclusive - tiles, winner);
    first += winner * run;
    count = min(run, count - winner * run);
    if (run == 1) break;
  }
  const Sequence sequence = sequence_at(cu_seqlens, first, total);
  return {first, tile, sequence.start, sequence.length};
}
