// block_order: each list of items ascending, so that sums over it have one order.
//
//   A warp owns a list. Up to 32 items are ranked by comparison; more are marked in a bitmap of
//   SPAN of the chunk's items after the other, where an item's rank is the number of marks before
//   it. Grid: (runs of NUM_WARPS lists).
//
// Should cu_seqlens not ascend, a list may have an item twice, or places that nobody wrote: items are
// copied first, so that no place stays empty, and brought into range.
// Twin: rawattn/kernels_numba/block_order.py.
#include "base/selection.cuh"

using cfg::NUM_WARPS;
constexpr int WORDS = 512;  // of a bitmap
constexpr int SPAN = 32 * WORDS;

struct Args {
  const int* starts;          // (chunks, num_heads_kv, units)
  const int* lengths;         // (chunks, num_heads_kv, units)
  const int* unsorted;        // (num_heads_sel * total_q * width,)
  const int* unsorted_slots;  // of the same shape
  int* queries;               // of the same shape
  int* query_slots;           // of the same shape
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/block_order.py differ");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    block_order(const __grid_constant__ Args args) {
  __shared__ uint32_t bitmaps[NUM_WARPS][WORDS];
  __shared__ int before[NUM_WARPS][WORDS];  // marks in the words before a word
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int units = units_of(args.sizes, args.selection.block_size);
  const int chunks = chunks_of(args.sizes, args.selection);
  const int64_t list = static_cast<int64_t>(blockIdx.x) * NUM_WARPS + warp;
  if (list >= static_cast<int64_t>(chunks) * args.sizes.num_heads_kv * units) return;
  const int length = args.lengths[list];
  if (length == 0) return;
  const int start = args.starts[list];
  const int ratio = args.selection.num_heads_sel / args.sizes.num_heads_kv;
  const int last = static_cast<int>(static_cast<int64_t>(args.sizes.total_q) * ratio - 1);
  const auto item_at = [&](int i) { return min(max(args.unsorted[start + i], 0), last); };
  const auto slot_at = [&](int i) {
    const int slot = args.unsorted_slots[start + i];
    return is_selected(slot, args.selection) ? slot : OWN;
  };
  for (int i = lane; i < length; i += WARP_SIZE) {
    args.queries[start + i] = item_at(i);
    args.query_slots[start + i] = slot_at(i);
  }
  __syncwarp();  // every place has an item
  if (length <= WARP_SIZE) {
    const int item = lane < length ? item_at(lane) : END;
    int rank = 0;
    for (int j = 0; j < length; ++j) rank += __shfl_sync(0xffffffff, item, j) < item;
    if (lane < length) {
      args.queries[start + rank] = item;
      args.query_slots[start + rank] = slot_at(lane);
    }
    return;
  }
  const int64_t chunk = list / (static_cast<int64_t>(args.sizes.num_heads_kv) * units);
  const int64_t items = static_cast<int64_t>(args.selection.chunk) * ratio;
  uint32_t* bitmap = bitmaps[warp];
  int marks = 0;
  for (int64_t first = chunk * items; first < (chunk + 1) * items; first += SPAN) {
    const int64_t left = (chunk + 1) * items - first;
    const int words = left < SPAN ? ceil_div(static_cast<int>(left), 32) : WORDS;
    for (int w = lane; w < words; w += WARP_SIZE) bitmap[w] = 0;
    __syncwarp();  // the bitmap is empty
    for (int i = lane; i < length; i += WARP_SIZE) {
      const int64_t bit = item_at(i) - first;
      if (bit >= 0 && bit < words * 32) atomicOr(bitmap + bit / 32, 1u << (bit % 32));
    }
    __syncwarp();  // the span's items are marked
    for (int w0 = 0; w0 < words; w0 += WARP_SIZE) {
      const int count = w0 + lane < words ? __popc(bitmap[w0 + lane]) : 0;
      int inclusive = count;
#pragma unroll
      for (int step = 1; step < WARP_SIZE; step *= 2) {
        const int below = __shfl_up_sync(0xffffffff, inclusive, step);
        if (lane >= step) inclusive += below;
      }
      if (w0 + lane < words) before[warp][w0 + lane] = marks + inclusive - count;
      marks += __shfl_sync(0xffffffff, inclusive, WARP_SIZE - 1);
    }
    __syncwarp();  // all words are counted
    for (int i = lane; i < length; i += WARP_SIZE) {
      const int item = item_at(i);
      const int64_t bit = item - first;
      if (bit < 0 || bit >= words * 32) continue;
      const uint32_t below = bitmap[bit / 32] & ((1u << (bit % 32)) - 1);
      const int place = start + before[warp][bit / 32] + __popc(below);
      args.queries[place] = item;
      args.query_slots[place] = slot_at(i);
    }
    __syncwarp();  // every lane has left the bitmap
  }
}
