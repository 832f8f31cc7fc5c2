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
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/block_queries.py differ");

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    block_queries(const __grid_constant__ Args args) {
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_q, args.sizes.batch, args.sizes.total_q, BLOCK_M, blockIdx.x);
  if (tile.batch_index < 0) return;
  const SelectionSizes& selection = args.selection;
  const Sequence keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.sizes.total_k);
  const int units = units_of(args.sizes, selection.block_size);
  const int first_unit = first_tile(keys.start, tile.batch_index, selection.block_size);
  const int num_blocks = ceil_div(keys.length, selection.block_size);
  const int head_sel = blockIdx.y, ratio = selection.num_heads_sel / args.sizes.num_heads_kv;
  const int64_t places =
      static_cast<int64_t>(selection.num_heads_sel) * args.sizes.total_q * selection.width;
  const int rows = tile.valid_rows(BLOCK_M);
  for (int i = threadIdx.x; i < rows * selection.width; i += NUM_THREADS) {
    const int64_t token = tile.start + tile.block * BLOCK_M + i / selection.width;
    const int64_t at =
        (static_cast<int64_t>(head_sel) * args.sizes.total_q + token) * selection.width +
        i % selection.width;
    const int block = args.blocks[at];
    // END, or, where offsets fall, a block of another sequence
    if (static_cast<uint32_t>(block) >= static_cast<uint32_t>(num_blocks)) continue;
    const int64_t list =
        (token / selection.chunk * args.sizes.num_heads_kv + head_sel / ratio) * units +
        first_unit + block;
    const int place = args.starts[list] + atomicAdd(args.cursor + 2 + list, 1);
    if (place < 0 || place >= places) continue;  // block_offsets found no room for it either
    args.unsorted[place] = static_cast<int>(token) * ratio + head_sel % ratio;
    args.unsorted_slots[place] = args.slots[at];
  }
}
