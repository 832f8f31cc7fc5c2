// block_offsets: where each list of items begins, and the lists cut into segments of work.
//
//   A CTA takes room for its lists, and for their segments, at once. Lists lie in the order in which
//   CTAs come, which changes nothing that is computed from them. Should cu_seqlens not ascend, there
//   are more items than places: what has none is left out. Grid: (runs of NUM_WARPS x 32 lists).
// Twin: rawattn/kernels_numba/block_offsets.py.
#include "base/selection.cuh"

using cfg::NUM_WARPS;

struct Args {
  int* lengths;  // (chunks, num_heads_kv, units); cut where there is no room
  int* starts;   // (chunks, num_heads_kv, units)
  int* cursor;   // (2 + lists,), zeroed; the first two are items and segments so far
  int* work;     // (segments, 4): list, first place in queries, items, 0; filled with -1
  int batch;
  int total_q;
  int total_k;
  int num_heads_q;
  int num_heads_kv;
  int window_left;
  int window_right;
  float softmax_scale;
  SelectionSizes sizes;
  int segment;  // items of one at most
};

// Sums over the lanes before this one, and over all
struct Scan {
  int before, total;
  __device__ __forceinline__ explicit Scan(int x) {
    int inclusive = x;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const int below = __shfl_up_sync(0xffffffff, inclusive, step);
      if (threadIdx.x % WARP_SIZE >= step) inclusive += below;
    }
    before = inclusive - x;
    total = __shfl_sync(0xffffffff, inclusive, WARP_SIZE - 1);
  }
};

extern "C" __global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE)
    block_offsets(const __grid_constant__ Args args) {
  __shared__ int2 of_warp[NUM_WARPS];  // items and segments of a warp, then those before it
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int chunks = max(1, ceil_div(args.total_q, args.sizes.chunk));
  const int64_t lists = static_cast<int64_t>(chunks) * args.num_heads_kv *
                        units_of(args.total_k, args.batch, args.sizes.block_size);
  const int64_t list = static_cast<int64_t>(blockIdx.x) * NUM_WARPS * WARP_SIZE + threadIdx.x;
  const int length = list < lists ? args.lengths[list] : 0;
  const int segments = ceil_div(length, args.segment);
  const Scan items(length), cuts(segments);
  if (lane == 0) of_warp[warp] = int2{items.total, cuts.total};
  __syncthreads();  // the warps' sums are there
  if (warp == 0) {
    const int2 sums = lane < NUM_WARPS ? of_warp[lane] : int2{0, 0};
    const Scan all_items(sums.x), all_cuts(sums.y);
    int room = 0, cut_room = 0;
    if (lane == 0 && all_items.total > 0) {
      room = atomicAdd(args.cursor, all_items.total);
      cut_room = atomicAdd(args.cursor + 1, all_cuts.total);
    }
    room = __shfl_sync(0xffffffff, room, 0), cut_room = __shfl_sync(0xffffffff, cut_room, 0);
    if (lane < NUM_WARPS) of_warp[lane] = int2{room + all_items.before, cut_room + all_cuts.before};
  }
  __syncthreads();  // so are the warps' places
  if (list >= lists) return;
  const int64_t places =
      static_cast<int64_t>(args.sizes.num_heads_sel) * args.total_q * args.sizes.width;
  const int64_t room_for_work = min(lists, places) + places / args.segment;
  const int start = of_warp[warp].x + items.before;
  const int kept = places - start >= length ? length : max(static_cast<int>(places - start), 0);
  args.starts[list] = start;
  if (kept < length) args.lengths[list] = kept;
  const int64_t first_cut = of_warp[warp].y + cuts.before;
  int4* work = reinterpret_cast<int4*>(args.work) + first_cut;
  for (int i = 0; i < segments && first_cut + i < room_for_work; ++i) {
    const int first = i * args.segment;
    if (first >= kept) break;
    work[i] = int4{static_cast<int>(list), start + first, min(args.segment, kept - first), 0};
  }
}
