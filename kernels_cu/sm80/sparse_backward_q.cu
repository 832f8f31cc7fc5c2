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

struct SmemPlan {
  TileQ q;  // dQ takes its place at the end: a warp reads and writes its own rows only
  TileO dout;
  KeyStage stages[NUM_STAGES];
  Ring ring;
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

struct Args {
  Tensor q;                  // (total_q, num_heads_q, head_dim)
  Tensor k;                  // (total_k, num_heads_kv, head_dim)
  Tensor v;                  // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;               // (total_q, num_heads_q, head_dim_v)
  const float* lse;          // (num_heads_q, total_q)
  const float* delta;        // (num_heads_q, total_q)
  const int* blocks;         // (num_heads_sel, total_q, width)
  const int* slots;          // (num_heads_sel, total_q, width)
  const float* block_scale;  // (total_q, num_heads_sel, num_selected), or null
  const int* cu_seqlens_q;   // (batch + 1,)
  const int* cu_seqlens_k;   // (batch + 1,)
  Tensor dq;                 // (total_q, num_heads_q, head_dim)
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/sparse_backward_q.py differ");

// Rows of this warp: S, dP, dS and dS K of every stage they named
__device__ __forceinline__ void make_dq(const Args& args, SmemPlan& smem, const ItemTile& tile,
                                        int warp_row) {
  load_own_rows<cfg::WIDTH>(smem.q, args.q, tile, warp_row);
  load_own_rows<cfg::WIDTH_V>(smem.dout, args.dout, tile, warp_row);
  cp_async_commit();
  const float softmax_scale = args.sizes.softmax_scale;
  const OperandA<TileQ> queries(smem.q.address(), warp_row);
  const OperandA<TileO> gradients(smem.dout.address(), warp_row);
  const PerRow<1> lse_log2 = own_lse_log2(args.lse, tile, warp_row, args.sizes.total_q);
  const PerRow<1> delta = own_statistic(args.delta, tile, warp_row, args.sizes.total_q, lse_log2);
  float rdQ[1][HEAD_DIM / 8][4];
  clear(rdQ);
  cp_async_wait<0>();
  __syncwarp();  // Q and dO were loaded by this warp's other lanes
  consume(smem.ring, tile, warp_row, [&](int stage, const RowsOfStage& rows) {
    const uint32_t sK = smem.stages[stage].k.address(), sV = smem.stages[stage].v.address();
    const BlockScale block_scale(args, tile, rows, warp_row);
#pragma unroll 1
    for (int col = 0; col < BLOCK_N; col += STEP_N) {
      float rP[1][STEP_N / 8][4], rdS[1][STEP_N / 8][4];
      clear(rP);
      multiply_xyt<HEAD_DIM>(rP, queries, OperandB<TileK>(sK, col));
      clear(rdS);
      multiply_xyt<HEAD_DIM_V>(rdS, gradients, OperandB<TileV>(sV, col));
      block_scale.apply(rP);
      if (rows.cut) cut_rows(rP, rows, col);
      scores_to_p(rP, lse_log2, softmax_scale * LOG2E);
      dp_to_ds(rdS, rP, delta);
      block_scale.apply(rdS);
      multiply_py(rdQ, rdS, OperandBT<TileK>(sK, col));
    }
  });
  store_tile(smem.q, rdQ, warp_row, 0, [&](int, int) { return softmax_scale; });
  write_own_rows<cfg::WIDTH>(args.dq, tile, smem.q, warp_row);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const ItemTile tile = find_item_tile(args);
  if (tile.dead()) {
    zero_own_rows<cfg::WIDTH>(args.dq, tile);
    return;
  }
  smem.ring.init();
  __syncthreads();  // the barriers are there
  walk(args, smem, tile, [&](int warp_row) { make_dq(args, smem, tile, warp_row); });
}
