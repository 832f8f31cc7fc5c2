// block_lists: the blocks of keys that each item sees: those it named that exist and that it may
//              see, each once, ascending; and how many items of a chunk see each block.
//
//   A CTA owns BLOCK_M tokens of one selection head; a warp takes one item after the other. Blocks
//   come from indices, from a mask, or from a pattern. Grid: (tiles of tokens; selection heads).
// Twin: rawattn/kernels_numba/block_lists.py.
#include "base/selection.cuh"
#include "base/varlen.cuh"

using cfg::BLOCK_M, cfg::NUM_WARPS;
constexpr int MOST_SELECTED = 1024;            // that are ranked in shared memory
enum Source : int { INDICES, MASK, PATTERN };  // what a selection is given as: tables.Kind

struct Args {
  const void* block_indices;  // (total_q, num_heads_sel, num_selected) int32, or uint8 if a mask
  const int* block_counts;    // (total_q, num_heads_sel), or null
  const int* cu_seqlens_q;    // (batch + 1,)
  const int* cu_seqlens_k;    // (batch + 1,)
  int* blocks;                // (num_heads_sel, total_q, width)
  int* slots;                 // (num_heads_sel, total_q, width)
  int* counts;                // (num_heads_sel, total_q)
  int* lengths;               // (chunks, num_heads_kv, units), zeroed, or null
  Sizes sizes;
  SelectionSizes selection;
  int source;         // INDICES, MASK or PATTERN
  int global_blocks;  // of the pattern: blocks 0 .., then the own block and those before it
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/block_lists.py differ");

// An item: where it stands, and where its lists are
struct Item {
  int64_t row;     // of block_indices
  int64_t list;    // of blocks and slots
  int limit;       // the first block that does not exist or that the mask forbids
  int own;         // its own block, where that is to be seen; else -1
  int* histogram;  // of its chunk and kv head at its sequence's first unit, or null
};

// One block of an item's list; every lane may write another one
__device__ __forceinline__ void put(const Args& args, const Item& item, int place, int block) {
  args.blocks[item.list + place] = block;
  if (item.histogram) atomicAdd(item.histogram + block, 1);
}

// The block that slot `slot` names; END where it names none that the item may see
__device__ __forceinline__ int named(const Args& args, const Item& item, int slot, int own,
                                     int count) {
  int block;
  if (args.source == INDICES) {
    block = static_cast<const int*>(args.block_indices)[item.row + slot];
  } else {
    block = slot < args.global_blocks ? slot : own - (slot - args.global_blocks);
  }
  return slot < count && block >= 0 && block < item.limit ? block : END;
}

// From indices or a pattern, by ranks. `candidates` are MOST_SELECTED + 1 numbers of this warp; more
// are ranked in the item's slots, which are then looked up again.
__device__ __forceinline__ int sort_named(const Args& args, const Item& item, int* candidates,
                                          int own, int count) {
  const int lane = threadIdx.x % WARP_SIZE, selected = args.selection.num_selected;
  const int total = selected + (item.own >= 0);  // the own block stands behind all that are named
  int* slots = args.slots + item.list;
  const bool many = selected > MOST_SELECTED;
  if (many) candidates = slots;
  for (int i = lane; i < total; i += WARP_SIZE) {
    candidates[i] = i < selected ? named(args, item, i, own, count) : item.own;
  }
  __syncwarp();  // all candidates are there
  // from the last ones on, so that those before are untouched
  for (int first = (total - 1) / WARP_SIZE * WARP_SIZE; first >= 0; first -= WARP_SIZE) {
    const int i = first + lane;
    bool again = false;
    for (int j = 0; j < min(first + WARP_SIZE, total); ++j) {
      again |= i < total && j < i && candidates[j] == candidates[i];
    }
    __syncwarp();  // all lanes have compared
    if (again) candidates[i] = END;
    __syncwarp();  // for those that compare next
  }
  int kept = 0;
  for (int first = 0; first < total; first += WARP_SIZE) {
    const int i = first + lane;
    const int block = i < total ? candidates[i] : END;
    int rank = 0;
    for (int j = 0; j < total; ++j) rank += candidates[j] < block;
    if (block != END) {
      put(args, item, rank, block);
      if (!many) slots[rank] = i < selected ? i : OWN;
    }
    kept += __popc(__ballot_sync(0xffffffff, block != END));
  }
  __syncwarp();  // the ranks are known: slots, and the next item's candidates, take their place
  for (int place = lane; many && place < kept; place += WARP_SIZE) {
    const int block = args.blocks[item.list + place];
    int slot = 0;
    while (slot < selected && named(args, item, slot, own, count) != block) ++slot;
    slots[place] = slot < selected ? slot : OWN;
  }
  return kept;
}

// From a mask, which is in order as it stands
__device__ __forceinline__ int compact_mask(const Args& args, const Item& item, int count) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int end = max(args.selection.num_selected, item.own + 1);
  const unsigned char* mask = static_cast<const unsigned char*>(args.block_indices) + item.row;
  int kept = 0;
  for (int first = 0; first < end; first += WARP_SIZE) {
    const int block = first + lane;
    const bool marked =
        block < min(min(args.selection.num_selected, count), item.limit) && mask[block];
    const unsigned some = __ballot_sync(0xffffffff, marked || block == item.own);
    if (some >> lane & 1) {
      const int place = kept + __popc(some & ((1u << lane) - 1));
      put(args, item, place, block);
      args.slots[item.list + place] = marked ? block : OWN;
    }
    kept += __popc(some);
  }
  return kept;
}

// After 9.0 the compiler of CUDA 13.5 takes too few registers on its own, and spills.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, __CUDA_ARCH__ < 1000 ? 0 : 1)
    block_lists(const __grid_constant__ Args args) {
  __shared__ int candidates[NUM_WARPS][MOST_SELECTED + 1];
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_q, args.sizes.batch, args.sizes.total_q, BLOCK_M, blockIdx.x);
  const SelectionSizes& selection = args.selection;
  const int head_sel = blockIdx.y, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  Sequence keys{0, 0};
  if (tile.batch_index >= 0)
    keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.sizes.total_k);
  const int num_blocks = ceil_div(keys.length, selection.block_size);
  const int end = min((tile.block + 1) * BLOCK_M, tile.length);
  for (int i = tile.block * BLOCK_M + warp; i < end; i += NUM_WARPS) {
    const int64_t token = tile.start + i;
    const int64_t at = static_cast<int64_t>(head_sel) * args.sizes.total_q + token;
    const int position = i + keys.length - tile.length;
    const int own = position >= 0 && tile.batch_index >= 0 ? position / selection.block_size : -1;
    Item item;
    item.row = (token * selection.num_heads_sel + head_sel) * selection.num_selected;
    item.list = at * selection.width;
    item.limit = args.sizes.window_right >= 0 ? own + 1 : num_blocks;
    item.own = selection.width > selection.num_selected ? own : -1;
    item.histogram = nullptr;
    if (args.lengths) {
      const int ratio = selection.num_heads_sel / args.sizes.num_heads_kv;
      const int units = units_of(args.sizes, selection.block_size);
      const int64_t list = token / selection.chunk * args.sizes.num_heads_kv + head_sel / ratio;
      item.histogram = args.lengths + list * units +
                       first_tile(keys.start, tile.batch_index, selection.block_size);
    }
    int kept = 0;
    if (tile.batch_index >= 0) {
      const int count = args.block_counts
                            ? args.block_counts[token * selection.num_heads_sel + head_sel]
                            : selection.num_selected;
      kept = args.source == MASK ? compact_mask(args, item, count)
                                 : sort_named(args, item, candidates[warp], own, count);
    }
    for (int place = kept + lane; place < selection.width; place += WARP_SIZE) {
      args.blocks[item.list + place] = END;
      args.slots[item.list + place] = OWN;
    }
    if (lane == 0) args.counts[at] = kept;
  }
}
