// Which blocks of keys a query sees: lists by query, and back from a block of keys to its queries.
//
//   item   a query token and one of num_heads_sel selection heads; cfg::GROUP query heads share it
//   blocks [selection head][token][width]  block numbers of its sequence, ascending, END behind them
//   slots  [selection head][token][width]  where in block_indices each was named, OWN: nowhere
//   unit   a block of keys: block n of sequence b that starts at key c is unit
//          c / BLOCK_SIZE + b + n; consecutive sequences never share one (see base/workspace.cuh)
//   list   [chunk of queries][kv head][unit]  the items that see the unit: starts, lengths
#pragma once
#include "base/varlen.cuh"

constexpr int END = 0x7fffffff;  // behind an item's last block
constexpr int OWN = -1;          // slot of the own block where it was not selected

// The end of every struct Args: sizes of the selection.
struct SelectionSizes {
  int num_heads_sel;
  int num_selected;  // slots of an item in block_indices
  int width;         // blocks that an item can see
  int block_size;
  int chunk;  // query tokens whose items share a list
};

__device__ __forceinline__ int unit_of(int start, int batch_index, int block, int block_size) {
  return start / block_size + batch_index + block;
}
__device__ __forceinline__ int units_of(int total_k, int batch, int block_size) {
  return total_k / block_size + batch;
}

// The sequence that a unit belongs to: the last one that begins at or before it. All 32 lanes of a
// warp take part; each looks at one of 32 sequences, then at one of the run that holds it.
__device__ __forceinline__ int sequence_of(const int* cu_seqlens, int batch, int total, int unit,
                                           int block_size) {
  const int lane = threadIdx.x % WARP_SIZE;
  int first = 0, count = batch;
  while (count > 1) {
    const int run = ceil_div(count, WARP_SIZE);
    const int b = first + lane * run;
    const bool before = lane * run < count &&
                        unit_of(sequence_at(cu_seqlens, b, total).start, b, 0, block_size) <= unit;
    const int last = max(__popc(__ballot_sync(0xffffffff, before)) - 1, 0);
    first += last * run;
    count = min(run, count - last * run);
  }
  return first;
}
