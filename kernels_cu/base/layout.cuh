// Shared-memory tiles of 16-bit elements, swizzled so that ldmatrix, 16-byte rows and accumulators
// never conflict.
//
//   a tile of ROWS x COLS = COLS / PANEL panels, one after the other; a panel = ROWS rows of PANEL
//   columns (128 bytes where COLS divides by 64, else 64 bytes); inside a row the 16-byte chunk c
//   lies at c ^ (row mod 8), or c ^ (row / 2 mod 4) for 64-byte rows.
#pragma once
#include "base/ptx.cuh"

template <int ROWS_, int COLS_>
struct alignas(128) Tile {
  static constexpr int ROWS = ROWS_, COLS = COLS_;
  static constexpr int PANEL = COLS % 64 == 0 ? 64 : 32;
  static constexpr int ROW_BYTES = PANEL * ELEMENT_BYTES;
  static constexpr int PANEL_BYTES = ROWS * ROW_BYTES;
  static constexpr int BYTES = ROWS * COLS * ELEMENT_BYTES;
  static constexpr int CHUNKS = COLS / 8;  // 16-byte chunks of a row
  static_assert(COLS % 32 == 0, "a tile's columns (cfg::HEAD_DIM or BLOCK_N) divide by 32");
  static_assert(ROWS % 16 == 0, "a tile's rows (cfg::BLOCK_M or BLOCK_N) divide by 16");

  char bytes[BYTES];

  __device__ __forceinline__ uint32_t address() const { return smem_address(bytes); }
  // byte offset of 16-byte chunk `chunk` of row `row`
  static __device__ __forceinline__ int offset(int row, int chunk) {
    constexpr int PER_PANEL = PANEL / 8;
    const int swizzle = PANEL == 64 ? row & 7 : (row >> 1) & 3;
    return chunk / PER_PANEL * PANEL_BYTES + row * ROW_BYTES +
           (((chunk % PER_PANEL) ^ swizzle) << 4);
  }
};

// Walks over the chunks of one row of a tile, within columns [col, col + SPAN), col a multiple of
// SPAN. Where that range keeps inside a panel or holds whole panels, a chunk (and 8 rows further
// down) costs one exclusive-or with a constant and an immediate offset; else its offset is
// computed.
template <class TileT, int SPAN>
struct RowWalker {
  static constexpr int PER_PANEL = TileT::PANEL / 8;
  static constexpr bool PLAIN = SPAN % TileT::PANEL == 0 || TileT::PANEL % SPAN == 0;
  uint32_t start;  // PLAIN: of the first chunk; else of the row
  int first_chunk, swizzle;

  __device__ __forceinline__ RowWalker(uint32_t tile_start, int row, int chunk)
      : start(tile_start + (PLAIN ? TileT::offset(row, chunk) : row * TileT::ROW_BYTES)),
        first_chunk(chunk),
        swizzle(TileT::PANEL == 64 ? row & 7 : (row >> 1) & 3) {}

  // `rows` further down, a multiple of 8, and `chunks` further right
  __device__ __forceinline__ uint32_t at(int rows, int chunks) const {
    if constexpr (PLAIN) {
      return (start ^ (chunks % PER_PANEL << 4)) + chunks / PER_PANEL * TileT::PANEL_BYTES +
             rows * TileT::ROW_BYTES;
    } else {
      const int chunk = first_chunk + chunks;
      return start + chunk / PER_PANEL * TileT::PANEL_BYTES +
             (((chunk % PER_PANEL) ^ swizzle) << 4) + rows * TileT::ROW_BYTES;
    }
  }
};

// Reads 16 x 16 squares of a tile as mma operands, by ldmatrix.
//   ROWS_FIRST: lanes 0-15 name rows 0-15 of chunk 0, lanes 16-31 of chunk 1: A of X[m][k], and B
//   (TRANS) of X[k][n] otherwise:  lanes alternate chunks before rows:                           B
//   of X[n][k], and A (TRANS) of X[k][m]
template <class TileT, bool ROWS_FIRST, bool TRANS, int SPAN>
struct SquareReader {
  RowWalker<TileT, SPAN> lane_row;

  static __device__ __forceinline__ int lane() { return threadIdx.x % WARP_SIZE; }
  // squares are counted from row `row`, a multiple of 8, and column `col`, a multiple of SPAN
  __device__ __forceinline__ SquareReader(uint32_t tile_address, int row = 0, int col = 0)
      : lane_row(tile_address,
                 row + (ROWS_FIRST ? lane() & 15 : (lane() & 7) + ((lane() >> 4) << 3)),
                 col / 8 + (ROWS_FIRST ? lane() >> 4 : (lane() >> 3) & 1)) {}

  // rows 16 * row16 .. + 15, columns 16 * col16 .. + 15
  __device__ __forceinline__ void load(uint32_t (&r)[4], int row16, int col16) const {
    load_at(r, lane_row.at(row16 * 16, col16 * 2));
  }
  // the same square of the tile behind, which holds the tangent of this one
  __device__ __forceinline__ void load_tangent(uint32_t (&r)[4], int row16, int col16) const {
    load_at(r, lane_row.at(row16 * 16, col16 * 2) + TileT::BYTES);
  }
  static __device__ __forceinline__ void load_at(uint32_t (&r)[4], uint32_t address) {
    if constexpr (TRANS) {
      ldmatrix_x4_trans(r, address);
    } else {
      ldmatrix_x4(r, address);
    }
  }
};
template <class TileT, int SPAN = TileT::COLS>
using OperandA = SquareReader<TileT, true, false, SPAN>;  // A = X, stored X[m][k]
template <class TileT, int SPAN = TileT::COLS>
using OperandAT = SquareReader<TileT, false, true, SPAN>;  // A = X^T, stored X[k][m]
template <class TileT, int SPAN = TileT::COLS>
using OperandB = SquareReader<TileT, false, false, SPAN>;  // B = X^T, stored X[n][k]
template <class TileT, int SPAN = TileT::COLS>
using OperandBT = SquareReader<TileT, true, true, SPAN>;  // B = X, stored X[k][n]

// Rows of a packed tensor into a tile, from column `first_col` on. The tile's rows past the valid
// ones and columns at or past WIDTH are filled with zeros, so that nothing of a neighbour, NaN
// included, gets in. PADDED columns are what all tiles of a row have together, the tile's own
// unless given. Panel by panel: a thread keeps its chunk and swizzle, so that its addresses differ
// by constants.
template <int WIDTH, int PADDED = 0, class TileT>
__device__ __forceinline__ void load_rows(const TileT& tile, const Tensor& x, const Rows& rows,
                                          int first_col = 0) {
  constexpr int COLUMNS = PADDED ? PADDED : TileT::COLS;
  constexpr int PER_PANEL = TileT::PANEL / 8;
  constexpr int STEP = NUM_THREADS / PER_PANEL;  // rows at once
  static_assert(STEP % 8 == 0, "cfg::NUM_WARPS: the swizzle repeats after 8 rows");
  const int row = threadIdx.x / PER_PANEL, chunk = threadIdx.x % PER_PANEL;
  const uint16_t* src = x.at(rows.first, rows.head) + row * x.token_stride + first_col + chunk * 8;
  const uint32_t dst = tile.address() + TileT::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < ceil_div(TileT::ROWS, STEP); ++i) {
    const bool valid_row = row + i * STEP < rows.valid;
#pragma unroll
    for (int panel = 0; panel < TileT::COLS / TileT::PANEL; ++panel) {
      if (TileT::ROWS % STEP == 0 || row + i * STEP < TileT::ROWS) {
        const bool valid =
            valid_row && (WIDTH == COLUMNS || first_col + panel * TileT::PANEL + chunk * 8 < WIDTH);
        cp_async(dst + panel * TileT::PANEL_BYTES + i * STEP * TileT::ROW_BYTES,
                 src + panel * TileT::PANEL, valid);
      }
    }
    src += STEP * x.token_stride;
  }
}
