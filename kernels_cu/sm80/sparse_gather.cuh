// Tiles of gathered queries: the items that see one block of keys, BLOCK_M rows at a time.
//
//   row r of a tile is item r / GROUP of the tile, query head r % GROUP of its selection head;
//   rows past the last item are zeros. Codes and slots of a tile of items arrive with the rows of
//   the tile before it, so that addresses are there when its rows are asked for.
#pragma once
#include "base/selection.cuh"
#include "base/softmax.cuh"
#include "base/store.cuh"
#include "sm80/key_warps.cuh"

using cfg::BLOCK_SIZE, cfg::GROUP;
constexpr int ITEMS = BLOCK_M / GROUP;
static_assert(ITEMS > 0, "cfg::BLOCK_M: the rows of one cfg::GROUP fit");
static_assert(BLOCK_SIZE % BLOCK_N == 0 && BLOCK_N % 16 == 0, "cfg::BLOCK_N divides BLOCK_SIZE");

constexpr int STEP_N = BLOCK_N / cfg::PIECES < 16 ? 16 : BLOCK_N / cfg::PIECES;  // weighed at once
using WarpS = WarpOfScores<STEP_N>;
constexpr int PARTS = BLOCK_SIZE / BLOCK_N;  // of a block

// What a CTA works on: BLOCK_N keys of one block, one kv head, and the lists of items that see them
struct BlockTile {
  int batch_index, unit, kv_head;
  int key, keys;        // first key of the sequence, and how many
  int first_row;        // of the packed keys
  int shift, seqlen_k;  // position of query i among the keys: i + shift
  Sequence queries;

  __device__ __forceinline__ Rows rows() const { return {first_row, kv_head, keys}; }
};

// Tiles of items over the lists of chunks [chunk, end_chunk)
struct ItemWalk {
  const int* starts;
  const int* lengths;
  int64_t chunk_stride;  // between the lists of one unit in neighbouring chunks
  int chunk, end_chunk;
  int first, left;  // the tile's first place in `queries`, items of its list from there on

  // the next list that is not empty; every lane looks at another one
  __device__ __forceinline__ void find_list() {
    const int lane = threadIdx.x % WARP_SIZE;
    left = 0;
    while (chunk < end_chunk) {
      const int at = chunk + lane;
      const int length = at < end_chunk ? lengths[at * chunk_stride] : 0;
      const unsigned some = __ballot_sync(0xffffffff, length > 0);
      if (some) {
        const int winner = __ffs(some) - 1;
        chunk += winner;
        left = __shfl_sync(0xffffffff, length, winner);
        first = starts[chunk * chunk_stride];
        return;
      }
      chunk += WARP_SIZE;
    }
  }
  __device__ __forceinline__ bool done() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    left -= ITEMS, first += ITEMS;
    if (left <= 0) {
      ++chunk;
      find_list();
    }
  }
};

// Codes and slots of a tile's items in shared memory, [code, slot][ITEMS]
struct Items {
  const int* codes;  // then the slots
  int count;
  int ratio;  // selection heads of a kv head

  __device__ __forceinline__ bool valid(int row) const {
    return row < ITEMS * GROUP && row / GROUP < count;
  }
  __device__ __forceinline__ int token(int row) const {
    const int code = codes[row / GROUP];
    return ratio == 1 ? code : code / ratio;
  }
  __device__ __forceinline__ int head_sel(int row, int kv_head) const {
    return kv_head * ratio + (ratio == 1 ? 0 : codes[row / GROUP] % ratio);
  }
  __device__ __forceinline__ int head(int row, int kv_head) const {
    return head_sel(row, kv_head) * GROUP + row % GROUP;
  }
  __device__ __forceinline__ int slot(int row) const { return codes[ITEMS + row / GROUP]; }
};
struct alignas(16) ItemCodes {
  int codes[ITEMS], slots[ITEMS];
};

// Codes and slots of the walk's tile into shared memory
__device__ __forceinline__ void load_items(const ItemCodes& to, const int* queries,
                                           const int* slots, const ItemWalk& walk) {
  const uint32_t address = smem_address(&to);
  for (int i = threadIdx.x; i < 2 * ITEMS; i += NUM_THREADS) {
    const int item = i % ITEMS;
    const bool valid = item < walk.left;
    cp_async_4(address + i * sizeof(int),
               (i < ITEMS ? queries : slots) + (valid ? walk.first + item : 0), valid);
  }
}

// Gathered rows of a packed tensor into a tile
template <int WIDTH, class TileT>
__device__ __forceinline__ void gather_rows(const TileT& to, const Tensor& x, const Items& items,
                                            int kv_head) {
  constexpr int PER_PANEL = TileT::PANEL / 8;
  constexpr int STEP = NUM_THREADS / PER_PANEL;  // rows at once
  static_assert(STEP % 8 == 0, "cfg::NUM_WARPS: the swizzle repeats after 8 rows");
  const int first = threadIdx.x / PER_PANEL, chunk = threadIdx.x % PER_PANEL;
  const uint32_t dst = to.address() + TileT::offset(first, chunk);
#pragma unroll
  for (int i = 0; i < ceil_div(TileT::ROWS, STEP); ++i) {
    const int row = first + i * STEP;
    if (TileT::ROWS % STEP && row >= TileT::ROWS) break;
    const bool valid_row = items.valid(row);
    const uint16_t* src =
        valid_row ? x.at(items.token(row), items.head(row, kv_head)) + chunk * 8 : x.data;
#pragma unroll
    for (int panel = 0; panel < TileT::COLS / TileT::PANEL; ++panel) {
      const bool valid =
          valid_row && (WIDTH == TileT::COLS || panel * TileT::PANEL + chunk * 8 < WIDTH);
      cp_async(dst + panel * TileT::PANEL_BYTES + i * STEP * TileT::ROW_BYTES,
               src + panel * TileT::PANEL, valid);
    }
  }
}

// Gathered rows of (num_heads_q, total_q) statistics; 0 without an item
__device__ __forceinline__ void gather_statistic(const float (&to)[BLOCK_M], const float* statistic,
                                                 const Items& items, int kv_head, int total_q) {
  const uint32_t address = smem_address(to);
  for (int row = threadIdx.x; row < BLOCK_M; row += NUM_THREADS) {
    const bool valid = items.valid(row);
    const int64_t at =
        valid ? static_cast<int64_t>(items.head(row, kv_head)) * total_q + items.token(row) : 0;
    cp_async_4(address + row * sizeof(float), statistic + at, valid);
  }
}

// Do all rows of a tile see all of its keys? Items are in the order of their tokens.
__device__ __forceinline__ bool whole(const Items& items, const BlockTile& tile) {
  const int first = items.token(0) - tile.queries.start + tile.shift;
  return cfg::HAS_RIGHT && tile.keys == BLOCK_N && first >= tile.key + BLOCK_N - 1;
}

// Columns that a row may see: [0, limit)
__device__ __forceinline__ int limit_of(const Items& items, const BlockTile& tile, int row) {
  int end = tile.seqlen_k;
  if (items.valid(row) && (cfg::HAS_RIGHT || items.slot(row) == OWN)) {
    end = min(end, items.token(row) - tile.queries.start + tile.shift + 1);
  }
  return end - tile.key;
}

// -inf to the scores of a warp that its rows may not see; `row` and `col` are those of its piece.
template <int MT, int NT>
__device__ __forceinline__ void cut_scores(float (&rS)[MT][NT][4], const Items& items,
                                           const BlockTile& tile, int row, int col) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit = limit_of(items, tile, row + i * 16 + half * 8 + lane / 4) - col;
      if (!__any_sync(0xffffffff, limit < NT * 8)) continue;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (j * 8 + lane % 4 * 2 + e >= limit) rS[i][j][half * 2 + e] = -INF;
        }
      }
    }
  }
}

// Scale of each item's selected block, from a (total_q, num_heads_sel, num_selected) array, for the
// rows of a warp's part; `without` where the own block was not selected.
template <int MT>
__device__ __forceinline__ void gather_block_scale(float (&scale)[MT][2], const float* scales,
                                                   const Items& items, const BlockTile& tile,
                                                   const SelectionSizes& selection, int row,
                                                   float without) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + half * 8 + threadIdx.x % WARP_SIZE / 4;
      scale[i][half] = without;
      if (scales && items.valid(r) && items.slot(r) != OWN) {
        const int64_t item = static_cast<int64_t>(items.token(r)) * selection.num_heads_sel +
                             items.head_sel(r, tile.kv_head);
        scale[i][half] = scales[item * selection.num_selected + items.slot(r)];
      }
    }
  }
}

// This warp's row sums to [its place along the columns][BLOCK_M]
template <int MT, class WarpT>
__device__ __forceinline__ void store_scale_sums(float (&sums)[4][BLOCK_M],
                                                 const float (&row_sum)[MT][2], const WarpT& warp) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(row_sum[i][half]);
      const int row = warp.row + i * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0) sums[warp.col / WarpT::SPAN_N][row] = sum;
    }
  }
}

// Row sums of a tile, from WARPS_N warps along the columns, to the gradients of the items' scales: a
// slot gets its sum from one CTA, or from two where a block is cut in two, whose order does not
// matter.
template <int WARPS_N>
__device__ __forceinline__ void write_scale_gradients(float* gradients,
                                                      const float (&sums)[4][BLOCK_M],
                                                      const Items& items, const BlockTile& tile,
                                                      const SelectionSizes& selection) {
  static_assert(WARPS_N <= 4, "cfg::WARPS_M_S: four warps along the keys at most");
  static_assert(PARTS <= 2, "cfg::BLOCK_N: two halves of a block at most");
  for (int item = threadIdx.x; item < min(items.count, ITEMS); item += NUM_THREADS) {
    const int row = item * GROUP;
    if (items.slot(row) == OWN) continue;
    float sum = 0.0f;
    for (int i = 0; i < WARPS_N * GROUP; ++i) sum += sums[i / GROUP][row + i % GROUP];
    const int64_t at = (static_cast<int64_t>(items.token(row)) * selection.num_heads_sel +
                        items.head_sel(row, tile.kv_head)) *
                           selection.num_selected +
                       items.slot(row);
    if constexpr (PARTS == 1) {
      gradients[at] = sum;
    } else {
      red_add(gradients + at, sum);
    }
  }
}

// Float32 sums that CTAs add into, (tokens, heads, COLS): inside 16 columns those of one lane of
// the accumulators lie together (see ops/sparse_postprocess.py), so that 16 bytes are added at once.
//   place 4 q + (0 1 2 3)  <->  columns 2 q, 2 q + 1, 8 + 2 q, 8 + 2 q + 1
template <int MT, int NT, class Row>
__device__ __forceinline__ void add_rows(const float (&c)[MT][NT][4], int col, Row&& row_address) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = row_address(i * 16 + half * 8 + lane / 4);
      if (row == nullptr) continue;
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        const float four[4] = {c[i][j][half * 2], c[i][j][half * 2 + 1], c[i][j + 1][half * 2],
                               c[i][j + 1][half * 2 + 1]};
        red_add_v4(row + col + j * 8 + lane % 4 * 4, four);
      }
    }
  }
}

// The tile of a CTA: BLOCK_N keys, blockIdx.x, of kv head blockIdx.y; queries.length is -1 for keys
// of no sequence.
template <class Args>
__device__ __forceinline__ BlockTile find_block_tile(const Args& args) {
  const int unit = blockIdx.x / PARTS;
  const TileOfSequence found =
      find_tile(args.cu_seqlens_k, args.sizes.batch, args.sizes.total_k, BLOCK_SIZE, unit);
  BlockTile tile;
  tile.batch_index = found.batch_index;
  tile.unit = unit;
  tile.kv_head = blockIdx.y;
  tile.key = found.block * BLOCK_SIZE + blockIdx.x % PARTS * BLOCK_N;
  tile.keys = min(BLOCK_N, found.length - tile.key);
  tile.first_row = found.start + tile.key;
  tile.seqlen_k = found.length;
  tile.queries = Sequence{0, -1};
  if (found.batch_index >= 0) {
    tile.queries = sequence_at(args.cu_seqlens_q, found.batch_index, args.sizes.total_q);
  }
  tile.shift = found.length - tile.queries.length;
  return tile;
}
// The tile and the walk of a segment of work, four ints of block_offsets.cu: one list, or a part.
template <class Args>
__device__ __forceinline__ BlockTile find_work(const Args& args, const int4& work, ItemWalk& walk) {
  const int units = units_of(args.sizes, BLOCK_SIZE);
  BlockTile tile;
  tile.unit = work.x % units;
  tile.kv_head = work.x / units % args.sizes.num_heads_kv;
  tile.batch_index = sequence_of_tile(args.cu_seqlens_k, args.sizes.batch, args.sizes.total_k,
                                      BLOCK_SIZE, tile.unit);
  const Sequence keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.sizes.total_k);
  const int block = tile.unit - first_tile(keys.start, tile.batch_index, BLOCK_SIZE);
  tile.key = block * BLOCK_SIZE + blockIdx.x % PARTS * BLOCK_N;
  tile.keys = block < 0 ? 0 : min(BLOCK_N, keys.length - tile.key);  // less: offsets fall
  tile.first_row = keys.start + tile.key;
  tile.seqlen_k = keys.length;
  tile.queries = sequence_at(args.cu_seqlens_q, tile.batch_index, args.sizes.total_q);
  tile.shift = keys.length - tile.queries.length;
  walk = ItemWalk{};
  walk.first = work.y;
  walk.left = work.z;
  return tile;
}
// The walk over all lists of a key tile, chunk after chunk.
template <class Args>
__device__ __forceinline__ ItemWalk walk_items(const Args& args, const BlockTile& tile) {
  const int units = units_of(args.sizes, BLOCK_SIZE);
  const int64_t list = static_cast<int64_t>(tile.kv_head) * units + tile.unit;
  ItemWalk walk;
  walk.starts = args.starts + list;
  walk.lengths = args.lengths + list;
  walk.chunk_stride = static_cast<int64_t>(args.sizes.num_heads_kv) * units;
  walk.chunk = 0;
  walk.end_chunk = chunks_of(args.sizes, args.selection);
  walk.find_list();
  return walk;
}
