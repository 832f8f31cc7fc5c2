// sparse_backward_q: dQ = softmax_scale (g dS) K over the selected blocks of keys, in registers.
//
//                     BLOCK_N keys of a        A CTA owns ITEMS tokens of one selection head, with
//                     selected block           the GROUP query heads of each: BLOCK_M rows. Its
//            +-------------+                   consumer warps own 16 rows each and take only the
//   BLOCK_M  | S, dP -> P, |  x K -> dQ        blocks that their rows named (sm80/sparse_walk.cuh);
//   rows     |      dS     |                   the producer loads each block once for all.
//            +-------------+                   Grid: (tiles of tokens; selection heads).
//
// The second half of the deterministic backward, after sparse_backward_kv.
// Twin: rawattn/kernels_numba/sparse_backward_q.py. Source: native sparse attention, arXiv 2502.11089;
// FlashAttention, arXiv 2205.14135, algorithm 4, loops exchanged.
#include "sm80/sparse_walk.cuh"

using cfg::HEAD_DIM, cfg::HEAD_DIM_V;
constexpr int STEP_N = BLOCK_N >= 16 * cfg::PIECES ? BLOCK_N / cfg::PIECES : 16;  // weighed at once
using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;

struct SmemPlan {
  static constexpr int Q =
      0;  // dQ overlaps Q at the end: a warp reads and writes its own rows only
  static constexpr int DO = Q + TileQ::BYTES;
  static constexpr int K = DO + TileO::BYTES;
  static constexpr int V = K + NUM_STAGES * TileK::BYTES;
  static constexpr int RING = V + NUM_STAGES * TileV::BYTES;
  static constexpr int BYTES = RING + Ring::BYTES;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                  // (total_q, num_heads_q, head_dim)
  Tensor k;                  // (total_k, num_heads_kv, head_dim)
  Tensor v;                  // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;               // (total_q, num_heads_q, head_dim_v)
  const float* lse;          // (num_heads_q, total_q)
  const float* delta;        // (num_heads_q, total_q)
  const int* blocks;         // (num_heads_sel, total_q, width)
  const int* slots;          // (num_heads_sel, total_q, width)
  const float* block_scale;  // (total_q, num_heads_sel, num_selected); null without cfg::HAS_SCALE
  const int* cu_seqlens_q;   // (batch + 1,)
  const int* cu_seqlens_k;   // (batch + 1,)
  Tensor dq;                 // (total_q, num_heads_q, head_dim)
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

// Rows of this warp: S, dP, dS and dS K of every stage they named
__device__ __forceinline__ void differentiate(const Args& args, char* smem, const Ring& ring,
                                              const QueryTile& tile, int warp_row) {
  const uint32_t s0 = smem_address(smem);
  load_own_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::Q, args.q, tile, warp_row);
  load_own_rows<TileO, cfg::WIDTH_V>(s0 + SmemPlan::DO, args.dout, tile, warp_row);
  cp_async_commit();
  const OperandA<TileQ> queries(s0 + SmemPlan::Q, warp_row);
  const OperandA<TileO> gradients(s0 + SmemPlan::DO, warp_row);
  const PerRow<1> lse_log2 = own_lse_log2(args.lse, tile, warp_row, args.total_q);
  const PerRow<1> delta = own_statistic(args.delta, tile, warp_row, args.total_q, lse_log2);
  float rdQ[1][HEAD_DIM / 8][4];
  clear(rdQ);
  cp_async_wait<0>();
  __syncwarp();  // Q and dO were loaded by this warp's other lanes
  consume(ring, tile, warp_row, [&](int stage, const RowsOfStage& rows) {
    const uint32_t sK = s0 + SmemPlan::K + stage * TileK::BYTES;
    const uint32_t sV = s0 + SmemPlan::V + stage * TileV::BYTES;
    float factor[2];
    if constexpr (cfg::HAS_SCALE) {
      load_factors(factor, args.block_scale, tile, rows, warp_row, args.sizes, 1.0f);
    }
#pragma unroll 1
    for (int col = 0; col < BLOCK_N; col += STEP_N) {
      float rP[1][STEP_N / 8][4], rdS[1][STEP_N / 8][4];
      clear(rP);
      multiply_xyt<HEAD_DIM>(rP, queries, OperandB<TileK>(sK, col));
      clear(rdS);
      multiply_xyt<HEAD_DIM_V>(rdS, gradients, OperandB<TileV>(sV, col));
      if constexpr (cfg::HAS_SCALE) {
        scale_row(rP, 0, 0, factor[0]);
        scale_row(rP, 0, 1, factor[1]);
      }
      if (rows.cut) cut_rows(rP, rows, col);
      scores_to_p(rP, lse_log2, args.softmax_scale * LOG2E);
      dp_to_ds(rdS, rP, delta);
      if constexpr (cfg::HAS_SCALE) {
        scale_row(rdS, 0, 0, factor[0]);
        scale_row(rdS, 0, 1, factor[1]);
      }
      multiply_py(rdQ, rdS, OperandBT<TileK>(sK, col));
    }
  });
  store_tile<TileQ>(smem + SmemPlan::Q, rdQ, warp_row, 0,
                    [&](int, int) { return args.softmax_scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_own_rows<TileQ, cfg::WIDTH>(args.dq, tile, smem + SmemPlan::Q, warp_row);
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE, cfg::MIN_CTAS)
    sparse_backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const QueryTile tile = find_query_tile(args);
  if (tile.keys.length < 0) {  // tokens that belong to no sequence
    zero_own_rows<cfg::WIDTH>(args.dq, tile);
    return;
  }
  const Ring ring(smem + SmemPlan::RING);
  ring.init();
  __syncthreads();  // the barriers and queues are there
  const int warp = threadIdx.x / WARP_SIZE;
  if (warp < CONSUMERS) {
    differentiate(args, smem, ring, tile, warp * 16);
    return;
  }
  const uint32_t s0 = smem_address(smem);
  produce(
      ring, tile, args.blocks, args.slots, args.total_q, args.sizes.width, [&](int stage, int key) {
        load_keys<TileK, cfg::WIDTH>(s0 + SmemPlan::K + stage * TileK::BYTES, args.k, tile, key);
        load_keys<TileV, cfg::WIDTH_V>(s0 + SmemPlan::V + stage * TileV::BYTES, args.v, tile, key);
      });
}
