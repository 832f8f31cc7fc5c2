// sparse_forward: O = softmax(softmax_scale g Q K^T) V and L over the selected blocks of keys.
//
//                     BLOCK_N keys of a        A CTA owns ITEMS tokens of one selection head, with
//                     selected block           the GROUP query heads of each: BLOCK_M rows. Its
//            +-----------+                     consumer warps own 16 rows each and take only the
//   BLOCK_M  |  S -> P   |  x V -> O           blocks that their rows named (sm80/sparse_walk.cuh);
//   rows     +-----------+                     the producers load each block once for all.
//                                              Grid: (tiles of tokens; selection heads).
//
// Twin: rawattn/kernels_numba/sparse_forward.py. Source: native sparse attention, arXiv 2502.11089,
// section 3.4; FlashAttention-2, arXiv 2307.08691, algorithm 1.
#include "base/softmax.cuh"
#include "sm80/sparse_walk.cuh"

constexpr int STEP_N =
    BLOCK_N >= 16 * cfg::PIECES ? BLOCK_N / cfg::PIECES : 16;  // keys that a warp weighs at once
using TileQ = Tile<BLOCK_M, cfg::HEAD_DIM>;
using TileK = Tile<BLOCK_N, cfg::HEAD_DIM>;
using TileV = Tile<BLOCK_N, cfg::HEAD_DIM_V>;
using TileO = Tile<BLOCK_M, cfg::HEAD_DIM_V>;

struct SmemPlan {
  static constexpr int Q = 0;
  // O overlaps Q where a row has its place in both: no other warp may still want that of Q
  static constexpr bool OVERLAP = TileQ::PANEL == TileO::PANEL;
  static constexpr int O = OVERLAP ? Q : TileQ::BYTES;
  static constexpr int K = OVERLAP && TileQ::BYTES > TileO::BYTES ? TileQ::BYTES : O + TileO::BYTES;
  static constexpr int V = K + NUM_STAGES * TileK::BYTES;
  static constexpr int RING = V + NUM_STAGES * TileV::BYTES;
  static constexpr int BYTES = RING + Ring::BYTES;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                  // (total_q, num_heads_q, head_dim)
  Tensor k;                  // (total_k, num_heads_kv, head_dim)
  Tensor v;                  // (total_k, num_heads_kv, head_dim_v)
  const int* blocks;         // (num_heads_sel, total_q, width)
  const int* slots;          // (num_heads_sel, total_q, width)
  const float* block_scale;  // (total_q, num_heads_sel, num_selected); null without cfg::HAS_SCALE
  const int* cu_seqlens_q;   // (batch + 1,)
  const int* cu_seqlens_k;   // (batch + 1,)
  Tensor out;                // (total_q, num_heads_q, head_dim_v)
  float* lse;                // (num_heads_q, total_q)
  int batch;
  int total_q;
  int total_k;
  int num_heads_q;
  int num_heads_kv;
  int window_left;
  int window_right;
  float softmax_scale;
  SelectionSizes sizes;
};

// Rows of this warp: S, softmax and P V of every stage they named
__device__ __forceinline__ void attend(const Args& args, char* smem, const Ring& ring,
                                       const QueryTile& tile, int warp_row) {
  const int lane = threadIdx.x % WARP_SIZE;
  const uint32_t s0 = smem_address(smem);
  load_own_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::Q, args.q, tile, warp_row);
  cp_async_commit();
  const OperandA<TileQ> queries(s0 + SmemPlan::Q, warp_row);
  OnlineSoftmax<1> softmax;
  const float scale_log2 = args.softmax_scale * LOG2E;
  float rO[1][cfg::HEAD_DIM_V / 8][4];
  clear(rO);
  cp_async_wait<0>();
  __syncwarp();  // Q was loaded by this warp's other lanes
  consume(ring, tile, warp_row, [&](int stage, const RowsOfStage& rows) {
    float factor[2];
    if constexpr (cfg::HAS_SCALE) {
      load_factors(factor, args.block_scale, tile, rows, warp_row, args.sizes, 1.0f);
    }
#pragma unroll 1
    for (int col = 0; col < BLOCK_N; col += STEP_N) {
      float rS[1][STEP_N / 8][4];
      clear(rS);
      multiply_xyt<cfg::HEAD_DIM>(rS, queries,
                                  OperandB<TileK>(s0 + SmemPlan::K + stage * TileK::BYTES, col));
      if constexpr (cfg::HAS_SCALE) {
        scale_row(rS, 0, 0, factor[0]);
        scale_row(rS, 0, 1, factor[1]);
      }
      if (rows.cut) cut_rows(rS, rows, col);
      softmax.update_max(rS, scale_log2,
                         [&](int i, int half, float by) { scale_row(rO, i, half, by); });
      softmax.exponentiate(rS, scale_log2);
      multiply_py(rO, rS, OperandBT<TileV>(s0 + SmemPlan::V + stage * TileV::BYTES, col));
    }
  });
  store_tile<TileO>(smem + SmemPlan::O, rO, warp_row, 0, [&](int i, int half) {
    const float sum = softmax.total(i, half);
    const int row = warp_row + half * 8 + lane / 4;
    if (lane % 4 == 0 && tile.valid(row)) {
      const float natural = softmax.row_max[i][half] * args.softmax_scale + lg2_approx(sum) * LN2;
      args.lse[statistic_of(tile, row, args.total_q)] = sum > 0.0f ? natural : -INF;
    }
    return sum > 0.0f ? 1.0f / sum : 0.0f;
  });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_own_rows<TileO, cfg::WIDTH_V>(args.out, tile, smem + SmemPlan::O, warp_row);
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE, cfg::MIN_CTAS)
    sparse_forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const QueryTile tile = find_query_tile(args);
  if (tile.keys.length < 0) {  // tokens that belong to no sequence
    zero_own_rows<cfg::WIDTH_V>(args.out, tile);
    for (int r = threadIdx.x; tile.valid(r); r += NUM_WARPS * WARP_SIZE) {
      args.lse[statistic_of(tile, r, args.total_q)] = -INF;
    }
    return;
  }
  const Ring ring(smem + SmemPlan::RING);
  ring.init();
  __syncthreads();  // the barriers are there
  const int warp = threadIdx.x / WARP_SIZE;
  if (warp < CONSUMERS) {
    attend(args, smem, ring, tile, warp * 16);
    return;
  }
  const uint32_t s0 = smem_address(smem);
  produce(
      ring, tile, args.blocks, args.slots, args.total_q, args.sizes.width, [&](int stage, int key) {
        load_keys<TileK, cfg::WIDTH>(s0 + SmemPlan::K + stage * TileK::BYTES, args.k, tile, key);
        load_keys<TileV, cfg::WIDTH_V>(s0 + SmemPlan::V + stage * TileV::BYTES, args.v, tile, key);
      });
}
