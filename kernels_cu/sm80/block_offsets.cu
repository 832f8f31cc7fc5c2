// block_offsets: where each list of items begins, and the lists cut into segments of work.
//
//   A CTA takes room for its lists, and for their segments, at once. Lists lie in the order in which
//   CTAs come, which changes nothing that is computed from them. Should cu_seqlens not ascend, there
//   are more items than places: what has none is left out. Grid: (runs of NUM_WARPS x 32 lists).
// Twin: rawattn/kernels_numba/block_offsets.py.
#include "base/selection.cuh"

using cfg::NUM_WARPS;

struct Args {
  int* lengths;      // (chunks, num_heads_kv, units); cut where there is no room
  int* starts;       // (chunks, num_heads_kv, units)
  uint32_t* cursor;  // (2 + lists,), zeroed; the first two are items and segments so far
  int* work;         // (segments, 4): list, first place in queries, items, 0; filled with -1
  Sizes sizes;
  SelectionSizes selection;
  int segment;  // items of one at most
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/block_offsets.py differ");

// Sums over the lanes before this one, and over all
struct Scan {
  uint32_t before, total;
  __device__ __forceinline__ explicit Scan(uint32_t x) {
    uint32_t inclusive = x;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const uint32_t below = __shfl_up_sync(0xffffffff, inclusive, step);
      if (threadIdx.x % WARP_SIZE >= step) inclusive += below;
    }
    before = inclusive - x;
    total = __shfl_sync(0xffffffff, inclusive, WARP_SIZE - 1);
  }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    block_offsets(const __grid_constant__ Args args) {
  __shared__ uint2 of_warp[NUM_WARPS];  // items and segments of a warp, then those before it
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int64_t lists = static_cast<int64_t>(chunks_of(args.sizes, args.selection)) *
                        args.sizes.num_heads_kv * units_of(args.sizes, args.selection.block_size);
  const int64_t list = static_cast<int64_t>(blockIdx.x) * NUM_THREADS + threadIdx.x;
  const int length = list < lists ? max(args.lengths[list], 0) : 0;
  const int segments = length / args.segment + (length % args.segment > 0);
  const Scan items(length), cuts(segments);
  if (lane == 0) of_warp[warp] = uint2{items.total, cuts.total};
  __syncthreads();  // the warps' sums are there
  if (warp == 0) {
    const uint2 sums = lane < NUM_WARPS ? of_warp[lane] : uint2{0, 0};
    const Scan all_items(sums.x), all_cuts(sums.y);
    uint32_t room = 0, cut_room = 0;
    if (lane == 0 && all_items.total > 0) {
      room = atomicAdd(args.cursor, all_items.total);
      cut_room = atomicAdd(args.cursor + 1, all_cuts.total);
    }
    room = __shfl_sync(0xffffffff, room, 0), cut_room = __shfl_sync(0xffffffff, cut_room, 0);
    if (lane < NUM_WARPS) {
      of_warp[lane] = uint2{room + all_items.before, cut_room + all_cuts.before};
    }
  }
  __syncthreads();  // so are the warps' places
  if (list >= lists) return;
  // 64 bits: where sequences overlap, the sums may pass what 31 hold
  const int64_t places = static_cast<int64_t>(args.selection.num_heads_sel) * args.sizes.total_q *
                         args.selection.width;
  const int64_t room_for_work = min(lists, places) + places / args.segment;
  const int64_t start = min(static_cast<int64_t>(of_warp[warp].x + items.before), places);
  const int kept = static_cast<int>(min(places - start, static_cast<int64_t>(length)));
  args.starts[list] = static_cast<int>(start);
  args.lengths[list] = kept;
  const int64_t first_cut = of_warp[warp].y + cuts.before;
  int4* work = reinterpret_cast<int4*>(args.work);
  for (int i = 0; i < segments && first_cut + i < room_for_work; ++i) {
    const int first = i * args.segment;
    if (first >= kept) break;
    work[first_cut + i] = int4{static_cast<int>(list), static_cast<int>(start) + first,
                               min(args.segment, kept - first), 0};
  }
}
