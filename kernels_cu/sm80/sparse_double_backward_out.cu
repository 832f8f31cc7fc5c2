// sparse_double_backward_out: ddO = (P o E) V + P ddV - e o O and e = ddL = rowsum(P o E) over the
//                             selected blocks of keys, with
//                             E = softmax_scale (g (ddQ K^T + Q ddK^T) + ddg Q K^T);
//                             for the second pass D = dO.O - dL and its tangent W = dO.ddO.
//
//                     BLOCK_N keys of a        A CTA owns ITEMS tokens of one selection head, with
//                     selected block           the GROUP query heads of each: BLOCK_M rows. Its
//            +-------------+                   consumer warps own 16 rows each and take only the
//   BLOCK_M  | S, E -> P,  |  x V, ddV         blocks that their rows named (sm80/sparse_walk.cuh).
//   rows     |    P o E    |    -> ddO         P comes from S and the given L.
//            +-------------+                   Grid: (tiles of tokens; selection heads).
//
// Without dout (forward mode) there is no second pass, and D and W are left out.
// Twin: rawattn/kernels_numba/sparse_double_backward_out.py. Source: native sparse attention,
// arXiv 2502.11089; rawattn/reference/sparse.py has the equations.
#include "sm80/sparse_tangents.cuh"

struct SmemPlan {
  TileQ q, ddq;
  TileO ddout;
  TangentStage stages[NUM_STAGES];
  Ring ring;
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

struct Args {
  Tensor q;                    // (total_q, num_heads_q, head_dim)
  Tensor k;                    // (total_k, num_heads_kv, head_dim)
  Tensor v;                    // (total_k, num_heads_kv, head_dim_v)
  Tensor ddq;                  // like q; null without cfg::HAS_TQ
  Tensor ddk;                  // like k; null without cfg::HAS_TK
  Tensor ddv;                  // like v; null without cfg::HAS_TV
  Tensor out;                  // (total_q, num_heads_q, head_dim_v)
  Tensor dout;                 // (total_q, num_heads_q, head_dim_v), or null
  const float* lse;            // (num_heads_q, total_q)
  const float* dlse;           // (num_heads_q, total_q), or null
  const int* blocks;           // (num_heads_sel, total_q, width)
  const int* slots;            // (num_heads_sel, total_q, width)
  const float* block_scale;    // (total_q, num_heads_sel, num_selected), or null
  const float* ddblock_scale;  // like block_scale, or null
  const int* cu_seqlens_q;     // (batch + 1,)
  const int* cu_seqlens_k;     // (batch + 1,)
  Tensor ddout;                // (total_q, num_heads_q, head_dim_v)
  float* ddlse;                // (num_heads_q, total_q)
  float* delta;                // (num_heads_q, total_q), or null without dout
  float* ddelta;               // (num_heads_q, total_q), or null without dout
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/sparse_double_backward_out.py differ");

// ddO, e, D and W of this warp's rows. A dead row, or one past the tokens, reads nothing.
__device__ __forceinline__ void epilogue(const Args& args, const ItemTile& tile, int warp_row,
                                         const PerRow<1>& lse_log2, const float (&tangent)[1][2],
                                         const float (&rounded)[1][4],
                                         float (&rddO)[1][HEAD_DIM_V / 8][4], TileO& ddout) {
  const int lane = threadIdx.x % WARP_SIZE;
  const bool second = args.dout.data != nullptr;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + lane / 4;
    const bool alive = lse_log2.value[0][half] != INF;
    const uint16_t* gO = alive ? row_of(args.out, tile, row) + lane % 4 * 2 : nullptr;
    const uint16_t* gdO = alive && second ? row_of(args.dout, tile, row) + lane % 4 * 2 : nullptr;
    const float ddlse = sum_of_row(tangent[0][half]);
    const float e = rounded[0][half * 2];
    const RowSums sums = second ? finish_ddout<true>(rddO[0], half, e, alive, gO, gdO)
                                : finish_ddout<false>(rddO[0], half, e, alive, gO, gdO);
    if (lane % 4 == 0 && tile.valid(row)) {
      const int64_t index = statistic_of(tile, row, args.sizes.total_q);
      args.ddlse[index] = ddlse;
      if (second) {
        args.delta[index] = alive && args.dlse ? sums.delta - args.dlse[index] : sums.delta;
        args.ddelta[index] = sums.ddelta;
      }
    }
  }
  store_tile(ddout, rddO, warp_row, 0);
  write_own_rows<cfg::WIDTH_V>(args.ddout, tile, ddout, warp_row);
}

// Rows of this warp: S, E and the products with V and ddV of every stage they named
__device__ __forceinline__ void make_ddout(const Args& args, SmemPlan& smem, const ItemTile& tile,
                                           int warp_row) {
  load_own_rows<cfg::WIDTH>(smem.q, args.q, tile, warp_row);
  if constexpr (cfg::HAS_TQ) load_own_rows<cfg::WIDTH>(smem.ddq, args.ddq, tile, warp_row);
  cp_async_commit();
  const float softmax_scale = args.sizes.softmax_scale;
  const OperandA<TileQ> queries(smem.q.address(), warp_row);
  const PerRow<1> lse_log2 = own_lse_log2(args.lse, tile, warp_row, args.sizes.total_q);
  float rddO[1][HEAD_DIM_V / 8][4], tangent[1][2] = {}, rounded[1][4] = {};
  clear(rddO);
  cp_async_wait<0>();
  __syncwarp();  // Q and ddQ were loaded by this warp's other lanes
  consume(smem.ring, tile, warp_row, [&](int stage, const RowsOfStage& rows) {
    const auto& keys = smem.stages[stage];
    const BlockScales block_scale(args, tile, rows, warp_row);
#pragma unroll 1
    for (int col = 0; col < BLOCK_N; col += STEP_N) {
      float rP[1][STEP_N / 8][4], rE[1][STEP_N / 8][4];
      multiply_scores<HEAD_DIM>(rP, rE, queries, OperandB<TileK>(keys.k.address(), col));
      block_scale.apply(rP, rE);
      if (rows.cut) cut_rows(rP, rows, col);
      scores_to_p(rP, lse_log2, softmax_scale * LOG2E);
      if constexpr (HAS_E) weigh_tangents(rE, rP, softmax_scale, tangent);
      add_tangent_products(rddO, rP, rE, OperandBT<TileV>(keys.v.address(), col), rounded);
    }
  });
  epilogue(args, tile, warp_row, lse_log2, tangent, rounded, rddO, smem.ddout);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_double_backward_out(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const ItemTile tile = find_item_tile(args);
  if (tile.dead()) {
    zero_own_rows<cfg::WIDTH_V>(args.ddout, tile);
    fill_own_statistic(args.ddlse, tile, args.sizes.total_q, 0.0f);
    if (args.delta) {
      fill_own_statistic(args.delta, tile, args.sizes.total_q, 0.0f);
      fill_own_statistic(args.ddelta, tile, args.sizes.total_q, 0.0f);
    }
    return;
  }
  smem.ring.init();
  __syncthreads();  // the barriers are there
  walk(args, smem, tile, [&](int warp_row) { make_ddout(args, smem, tile, warp_row); });
}
