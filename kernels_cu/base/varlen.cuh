// From a tile number to a tile of a sequence, on the device: the host never reads cu_seqlens.
//
//   Sequences are cut into tiles of `rows` rows each. The tiles of sequence b, which starts at row
//   c, are numbered from c / rows + b on: consecutive sequences never share a number, since
//   floor((c + n) / rows) - floor(c / rows) + 1 >= ceil(n / rows), and the number of a tile says by
//   a search of a few steps which sequence it is of. Some numbers have no tile. The rows behind
//   cu_seqlens[batch] are sequence `batch` in this count. total / rows + batch + 1 numbers suffice.
#pragma once
#include "base/compat.cuh"

struct Sequence {
  int start, length;
};

// Offsets are clamped to the tensor, so that a broken cu_seqlens gives wrong numbers at worst,
// never a wild access.
__device__ __forceinline__ int clamped(int offset, int total) { return min(max(offset, 0), total); }
__device__ __forceinline__ Sequence sequence_at(const int* cu_seqlens, int batch_index, int total) {
  const int start = clamped(cu_seqlens[batch_index], total);
  const int end = max(clamped(cu_seqlens[batch_index + 1], total), start);
  return {start, end - start};
}

// Its keys, of which with cfg::HAS_SEQUSED_K there may be more than are in use
template <class Args>
__device__ __forceinline__ Sequence keys_in_use(const Args& args, int batch_index) {
  Sequence keys = sequence_at(args.cu_seqlens_k, batch_index, args.sizes.total_k);
  if constexpr (cfg::HAS_SEQUSED_K) {
    keys.length = min(keys.length, max(args.seqused_k[batch_index], 0));
  }
  return keys;
}

// The number of the first tile of a sequence that starts at row `start`
__device__ __forceinline__ int first_tile(int start, int batch_index, int rows) {
  return start / rows + batch_index;
}

// The last of the first `count` sequences whose tiles begin at or before `tile`. All 32 lanes of a
// warp take part: each looks at one sequence of 32, or at four of 128, then the run that holds the
// tile is searched again. Where offsets fall the answer is some sequence.
__device__ __forceinline__ int sequence_of_tile(const int* cu_seqlens, int count, int total,
                                                int rows, int tile) {
  constexpr int LOOKS = 4;
  const int lane = threadIdx.x % WARP_SIZE;
  int first = 0;
  while (count > 1) {
    const int looks = count > WARP_SIZE ? LOOKS : 1;
    const int run = ceil_div(count, looks * WARP_SIZE);
    int begun = 0;  // runs whose first sequence begins at or before the tile
#pragma unroll
    for (int look = 0; look < LOOKS; ++look) {
      const int at = (look * WARP_SIZE + lane) * run;
      const bool before =
          look < looks && at < count &&
          first_tile(clamped(cu_seqlens[first + at], total), first + at, rows) <= tile;
      begun += __popc(__ballot_sync(0xffffffff, before));
    }
    const int last = max(begun - 1, 0) * run;
    first += last;
    count = min(run, count - last);
  }
  return first;
}

struct TileOfSequence {
  int batch_index;  // -1: rows that belong to no sequence
  int block;        // tile of the sequence, or of the rows behind the last one
  int start, length;

  // how many of the tile's rows there are: none where the number has no tile
  __device__ __forceinline__ int valid_rows(int rows) const {
    return min(rows, length - block * rows);
  }
};

__device__ __forceinline__ TileOfSequence find_tile(const int* cu_seqlens, int batch, int total,
                                                    int rows, int tile) {
  const int b = sequence_of_tile(cu_seqlens, batch + 1, total, rows, tile);
  const int start = clamped(cu_seqlens[b], total);
  const int end = b < batch ? max(clamped(cu_seqlens[b + 1], total), start) : total;
  const int block = tile - first_tile(start, b, rows);
  if (block < 0) return {-1, 0, start, 0};  // in front of the first sequence, which is not at 0
  return {b < batch ? b : -1, block, start, end - start};
}
