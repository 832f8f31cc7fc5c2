// Which blocks of keys a query sees: lists by query, and back from a block of keys to its queries.
//
//   item   a query token and one of num_heads_sel selection heads; cfg::GROUP query heads share it
//   blocks [selection head][token][width]  block numbers of its sequence, ascending, END behind them
//   slots  [selection head][token][width]  where in block_indices each was named, OWN: nowhere
//   unit   a block of keys: block n of sequence b that starts at key c is unit
//          c / BLOCK_SIZE + b + n; consecutive sequences never share one (see base/varlen.cuh)
//   list   [chunk of queries][kv head][unit]  the items that see the unit: starts, lengths
#pragma once
#include "base/varlen.cuh"

constexpr int END = 0x7fffffff;  // behind an item's last block
constexpr int OWN = -1;          // slot of the own block where it was not selected

// What a selection adds to the Sizes of a struct Args.
struct SelectionSizes {
  int num_heads_sel;
  int num_selected;  // slots of an item in block_indices
  int width;         // blocks that an item can see
  int block_size;
  int chunk;  // query tokens whose items share a list
};

// Was a block named in a slot, and not only seen as the own one?
__device__ __forceinline__ bool is_selected(int slot, const SelectionSizes& selection) {
  return static_cast<uint32_t>(slot) < static_cast<uint32_t>(selection.num_selected);
}
// Units are numbered as the tiles of base/varlen.cuh are.
__device__ __forceinline__ int units_of(const Sizes& sizes, int block_size) {
  return sizes.total_k / block_size + sizes.batch;
}
__device__ __forceinline__ int chunks_of(const Sizes& sizes, const SelectionSizes& selection) {
  return max(1, ceil_div(sizes.total_q, selection.chunk));
}
