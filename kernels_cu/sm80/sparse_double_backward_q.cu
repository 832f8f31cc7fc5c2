// sparse_double_backward_q: gQ = softmax_scale ((g tdS + ddg dS) K + (g dS) ddK) over the selected
//                           blocks of keys, in registers.
//   tP = P o (E - e),  dS = P o (dP - D),  tdS = tP o (dP - D) + P o (dO ddV^T - W),
//   E = softmax_scale (g (ddQ K^T + Q ddK^T) + ddg Q K^T); e, D and W come from
//   sparse_double_backward_out.
//
//                     BLOCK_N keys of a        A CTA owns ITEMS tokens of one selection head, with
//                     selected block           the GROUP query heads of each: BLOCK_M rows. Its
//            +-------------+                   consumer warps own 16 rows each and take only the
//   BLOCK_M  | S, E, dP, X |  x K, ddK         blocks that their rows named (sm80/sparse_walk.cuh).
//   rows     |  -> dS, tdS |    -> gQ          Grid: (tiles of tokens; selection heads).
//            +-------------+
//
// Twin: rawattn/kernels_numba/sparse_double_backward_q.py. Source: native sparse attention,
// arXiv 2502.11089; rawattn/reference/sparse.py has the equations.
#include "sm80/sparse_tangents.cuh"

struct SmemPlan {
  TileQ q, ddq;  // gQ takes the place of q at the end: a warp reads and writes its own rows only
  TileO dout;
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
  Tensor dout;                 // (total_q, num_heads_q, head_dim_v)
  const float* lse;            // (num_heads_q, total_q)
  const float* delta;          // (num_heads_q, total_q)
  const float* ddlse;          // (num_heads_q, total_q)
  const float* ddelta;         // (num_heads_q, total_q)
  const int* blocks;           // (num_heads_sel, total_q, width)
  const int* slots;            // (num_heads_sel, total_q, width)
  const float* block_scale;    // (total_q, num_heads_sel, num_selected), or null
  const float* ddblock_scale;  // like block_scale, or null
  const int* cu_seqlens_q;     // (batch + 1,)
  const int* cu_seqlens_k;     // (batch + 1,)
  Tensor gq;                   // (total_q, num_heads_q, head_dim)
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/sparse_double_backward_q.py differ");

// gQ += tdS K + dS ddK
template <int NT, int NT_Q, class Keys>
__device__ __forceinline__ void add_products(float (&rgQ)[1][NT_Q][4],
                                             const float (&rtdS)[1][NT][4],
                                             const float (&rdS)[1][NT][4], const Keys& keys) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t a[1][4];
    to_operand(a, rtdS, k);
    multiply_step(rgQ, a, [&](uint32_t (&b)[4], int j) { keys.load(b, k, j); });
    if constexpr (cfg::HAS_TK) {
      to_operand(a, rdS, k);
      multiply_step(rgQ, a, [&](uint32_t (&b)[4], int j) { keys.load_tangent(b, k, j); });
    }
  }
}

// Rows of this warp: the scores, their tangents and the products with K and ddK of every stage they
// named
__device__ __forceinline__ void make_gq(const Args& args, SmemPlan& smem, const ItemTile& tile,
                                        int warp_row) {
  load_own_rows<cfg::WIDTH>(smem.q, args.q, tile, warp_row);
  if constexpr (cfg::HAS_TQ) load_own_rows<cfg::WIDTH>(smem.ddq, args.ddq, tile, warp_row);
  load_own_rows<cfg::WIDTH_V>(smem.dout, args.dout, tile, warp_row);
  cp_async_commit();
  const float softmax_scale = args.sizes.softmax_scale;
  const OperandA<TileQ> queries(smem.q.address(), warp_row);
  const OperandA<TileO> gradients(smem.dout.address(), warp_row);
  const PerRow<1> lse_log2 = own_lse_log2(args.lse, tile, warp_row, args.sizes.total_q);
  const auto term = [&](const float* x) {
    return own_statistic(x, tile, warp_row, args.sizes.total_q, lse_log2);
  };
  const RowTerms<1> terms{lse_log2, term(args.delta), term(args.ddlse), term(args.ddelta)};
  float rgQ[1][HEAD_DIM / 8][4];
  clear(rgQ);
  cp_async_wait<0>();
  __syncwarp();  // Q, ddQ and dO were loaded by this warp's other lanes
  consume(smem.ring, tile, warp_row, [&](int stage, const RowsOfStage& rows) {
    const uint32_t sK = smem.stages[stage].k.address(), sV = smem.stages[stage].v.address();
    const BlockScales block_scale(args, tile, rows, warp_row);
#pragma unroll 1
    for (int col = 0; col < BLOCK_N; col += STEP_N) {
      float rP[1][STEP_N / 8][4], rE[1][STEP_N / 8][4];
      float rdS[1][STEP_N / 8][4], rtdS[1][STEP_N / 8][4];
      multiply_scores<HEAD_DIM>(rP, rE, queries, OperandB<TileK>(sK, col));
      multiply_gradients<HEAD_DIM_V>(rdS, rtdS, gradients, OperandB<TileV>(sV, col));
      block_scale.apply(rP, rE);
      if (rows.cut) cut_rows(rP, rows, col);
      scores_to_p(rP, lse_log2, softmax_scale * LOG2E);
      tangents_of_p_and_ds(rE, rdS, rtdS, rP, terms, args.sizes);
      block_scale.apply(rdS, rtdS);
      add_products(rgQ, rtdS, rdS, OperandBT<TileK>(sK, col));
    }
  });
  store_tile(smem.q, rgQ, warp_row, 0, [&](int, int) { return softmax_scale; });
  write_own_rows<cfg::WIDTH>(args.gq, tile, smem.q, warp_row);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_double_backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const ItemTile tile = find_item_tile(args);
  if (tile.dead()) {
    zero_own_rows<cfg::WIDTH>(args.gq, tile);
    return;
  }
  smem.ring.init();
  __syncthreads();  // the barriers are there
  walk(args, smem, tile, [&](int warp_row) { make_gq(args, smem, tile, warp_row); });
}
