// block_queries: every item into the lists of the blocks that it sees, in any order.
//
//   A CTA owns BLOCK_M tokens of one selection head; a thread takes one item after the other.
//   Grid: (tiles of tokens; selection heads).
// Twin: rawattn/kernels_numba/block_queries.py.
#include "base/selection.cuh"
#include "base/varlen.cuh"

using cfg::BLOCK_M, cfg::NUM_WARPS;

struct Args {
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const int* blocks;        // (num_heads_sel, total_q, width)
  const int* slots;         // (num_heads_sel, total_q, width)
  const int* starts;        // (chunks, num_heads_kv, units)
  int* cursor;              // (2 + lists,): behind the first two, how many each list has so far
  int* unsorted;            // (num_heads_sel * total_q * width,)
  int* unsorted_slots;      // of the same shape
  int batch;
  int total_q;
  int total_k;
  int num_heads_q;
  int num_heads_kv;
  int window_left;
  int window_right;
  float softmax_scale;
  SelectionSizes sizes;
};

extern "C" __global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE)
    block_queries(const __grid_constant__ Args args) {
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_q, args.batch, args.total_q, BLOCK_M, blockIdx.x);
  if (tile.batch_index < 0) return;
  const SelectionSizes& sizes = args.sizes;
  const Sequence keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.total_k);
  const int units = units_of(args.total_k, args.batch, sizes.block_size);
  const int first_unit = unit_of(keys.start, tile.batch_index, 0, sizes.block_size);
  const int head_sel = blockIdx.y, ratio = sizes.num_heads_sel / args.num_heads_kv;
  const int64_t places = static_cast<int64_t>(sizes.num_heads_sel) * args.total_q * sizes.width;
  const int rows = min(BLOCK_M, tile.length - tile.block * BLOCK_M);
  for (int i = threadIdx.x; i < rows * sizes.width; i += NUM_WARPS * WARP_SIZE) {
    const int64_t token = tile.start + tile.block * BLOCK_M + i / sizes.width;
    const int64_t at =
        (static_cast<int64_t>(head_sel) * args.total_q + token) * sizes.width + i % sizes.width;
    const int block = args.blocks[at];
    if (block == END) continue;
    const int64_t list =
        (token / sizes.chunk * args.num_heads_kv + head_sel / ratio) * units + first_unit + block;
    const int place = args.starts[list] + atomicAdd(args.cursor + 2 + list, 1);
    if (place >= places) continue;  // block_offsets found no room for it either
    args.unsorted[place] = static_cast<int>(token) * ratio + head_sel % ratio;
    args.unsorted_slots[place] = args.slots[at];
  }
}
