// The tile of queries, or of keys, that a CTA works on, and which tiles of the other side meet it.
// No shared memory, no barrier.
#pragma once
#include "base/mask.cuh"
#include "base/varlen.cuh"

// BLOCK_M queries of one head. Tiles of keys [n_begin, n_end) hold keys that some of them may see.
struct QueryTile {
  int batch_index, head, kv_head;
  int row0, valid_rows;  // first row within the sequence; how many of them there are
  int first_row;         // the same row in the packed tensors
  Sequence keys;
  Mask mask;
  int n_begin, n_end;

  // nothing to compute: the rows see no key, belong to no sequence, or do not exist
  __device__ __forceinline__ bool dead() const { return n_end <= n_begin; }
  __device__ __forceinline__ Rows rows() const { return {first_row, head, valid_rows}; }
  __device__ __forceinline__ int end_row() const { return row0 + valid_rows; }
  // of a tile of keys
  template <int BLOCK_N>
  __device__ __forceinline__ Rows keys_of(int n) const {
    return {keys.start + n * BLOCK_N, kv_head, keys.length - n * BLOCK_N};
  }
  // of the first row, in (num_heads_q, total_q) statistics
  __device__ __forceinline__ int64_t statistic(const Sizes& sizes) const {
    return static_cast<int64_t>(head) * sizes.total_q + first_row;
  }
  // of its head, which no row outside of a sequence has
  template <class Args>
  __device__ __forceinline__ float sink(const Args& args) const {
    if constexpr (cfg::HAS_SINKS) return batch_index >= 0 ? args.sinks[head] : -INF;
    return -INF;
  }
};

// Tiles of keys, [begin, end)
struct KeyTiles {
  int begin, end;
};
// Those that hold a key which some of `rows` rows from `row` on may see
template <int BLOCK_N>
__device__ __forceinline__ KeyTiles key_tiles(const Mask& mask, int row, int rows) {
  if (rows <= 0) return {0, 0};
  return {mask.first_key(row) / BLOCK_N, ceil_div(mask.end_key(row + rows - 1), BLOCK_N)};
}

// A tile of a sequence's queries, of one head
template <int BLOCK_M, int BLOCK_N, class Args>
__device__ __forceinline__ QueryTile query_tile(const Args& args, const TileOfSequence& found,
                                                int head) {
  const Sizes& sizes = args.sizes;
  QueryTile tile{found.batch_index, head, head / sizes.group()};
  int block = found.block;
  if (found.batch_index >= 0) {
    tile.keys = keys_in_use(args, found.batch_index);
    // with a right bound the last tiles of a sequence are the longest: they start first
    const int blocks = ceil_div(found.length, BLOCK_M);
    if (cfg::HAS_RIGHT && block < blocks) block = blocks - 1 - block;
  }
  tile.row0 = block * BLOCK_M;
  tile.valid_rows = min(BLOCK_M, found.length - tile.row0);
  tile.first_row = found.start + tile.row0;
  tile.mask = Mask{found.length, tile.keys.length, sizes.window_left, sizes.window_right};
  const KeyTiles keys = key_tiles<BLOCK_N>(tile.mask, tile.row0, tile.valid_rows);
  tile.n_begin = keys.begin;
  tile.n_end = keys.end;
  return tile;
}

// That of this CTA, in a grid of (tiles of queries, upper bound; query heads)
template <int BLOCK_M, int BLOCK_N, class Args>
__device__ __forceinline__ QueryTile find_query_tile(const Args& args) {
  const Sizes& sizes = args.sizes;
  const TileOfSequence found =
      find_tile(args.cu_seqlens_q, sizes.batch, sizes.total_q, BLOCK_M, blockIdx.x);
  return query_tile<BLOCK_M, BLOCK_N>(args, found, blockIdx.y);
}

// BLOCK_N keys of one kv head. Tiles of queries [m_begin, m_end) hold queries that see some of them.
struct KeyTile {
  int batch_index, kv_head;
  int col0, valid_cols;  // first key within the sequence; how many of them there are
  int first_col;         // the same key in the packed tensors
  Sequence queries;
  Mask mask;
  int m_begin, m_end;

  // nothing to compute: nobody sees the keys, they belong to no sequence, or do not exist
  __device__ __forceinline__ bool dead() const { return m_end <= m_begin; }
  __device__ __forceinline__ Rows rows() const { return {first_col, kv_head, valid_cols}; }
  // of the keys those in use, which come first
  __device__ __forceinline__ int used_cols() const {
    return cfg::HAS_SEQUSED_K ? min(valid_cols, mask.seqlen_k - col0) : valid_cols;
  }
  __device__ __forceinline__ Rows used_rows() const { return {first_col, kv_head, used_cols()}; }
};

// Tile `number` of all sequences, of one kv head
template <int BLOCK_M, int BLOCK_N, class Args>
__device__ __forceinline__ KeyTile find_key_tile(const Args& args, int number, int kv_head) {
  const Sizes& sizes = args.sizes;
  const TileOfSequence found =
      find_tile(args.cu_seqlens_k, sizes.batch, sizes.total_k, BLOCK_N, number);
  KeyTile tile{found.batch_index, kv_head, found.block * BLOCK_N, found.valid_rows(BLOCK_N)};
  tile.first_col = found.start + tile.col0;
  if (found.batch_index >= 0) {
    tile.queries = sequence_at(args.cu_seqlens_q, found.batch_index, sizes.total_q);
  }
  int length = found.length;
  if constexpr (cfg::HAS_SEQUSED_K) {
    if (found.batch_index >= 0) length = keys_in_use(args, found.batch_index).length;
  }
  tile.mask = Mask{tile.queries.length, length, sizes.window_left, sizes.window_right};
  if (const int cols = tile.used_cols(); cols > 0) {
    tile.m_begin = tile.mask.first_query(tile.col0) / BLOCK_M;
    tile.m_end = ceil_div(tile.mask.end_query(tile.col0 + cols - 1), BLOCK_M);
  }
  return tile;
}

// That of this CTA, in a grid of (tiles of keys, upper bound; kv heads)
template <int BLOCK_M, int BLOCK_N, class Args>
__device__ __forceinline__ KeyTile find_key_tile(const Args& args) {
  return find_key_tile<BLOCK_M, BLOCK_N>(args, blockIdx.x, blockIdx.y);
}

// The tiles of queries that meet a tile of keys, of one head of its group after the other
struct QueryWalk {
  int m_begin, m_end, end_head;
  int head, m;

  __device__ __forceinline__ QueryWalk(const KeyTile& tile, int group)
      : m_begin(tile.m_begin),
        m_end(tile.m_end),
        end_head((tile.kv_head + 1) * group),
        head(tile.kv_head * group),
        m(tile.m_begin) {}
  __device__ __forceinline__ bool done() const { return head >= end_head; }
  template <int BLOCK_M>
  __device__ __forceinline__ Rows rows(const Sequence& queries) const {
    return {queries.start + m * BLOCK_M, head, queries.length - m * BLOCK_M};
  }
  __device__ __forceinline__ void advance() {
    const bool last_of_head = m + 1 == m_end;
    m = last_of_head ? m_begin : m + 1;
    head += last_of_head;
  }
};
