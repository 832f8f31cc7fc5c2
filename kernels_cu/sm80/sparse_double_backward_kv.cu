// sparse_double_backward_kv: gK = softmax_scale ((g tdS + ddg dS)^T Q + (g dS)^T ddQ) and
//                            gV = tP^T dO of selected blocks of keys, and the gradient of g:
//                            rowsum over a block of  tdS o S + dS o (ddQ K^T + Q ddK^T).
//   tP = P o (E - e),  dS = P o (dP - D),  tdS = tP o (dP - D) + P o (dO ddV^T - W),
//   E = softmax_scale (g (ddQ K^T + Q ddK^T) + ddg Q K^T); e, D and W come from
//   sparse_double_backward_out.
//
//              BLOCK_N keys             A CTA owns BLOCK_N keys of one block and one kv head, and
//            +-------------+            walks over the queries that selected the block, gathered by
//   BLOCK_M  | S, E, dP, X |            the lists of base/selection.cuh (sm80/sparse_gather.cuh), all
//   gathered | -> tP, dS,  |            chunks in order. Warps lie as WARPS_M_S x .. over the scores,
//   rows     |     tdS     |            WARPS_N_KV x .. over gK and gV.
//            +-------------+            Grid: (parts of blocks of keys; kv heads).
//     ^T x dO, Q, ddQ -> gV, gK
//
// Twin: rawattn/kernels_numba/sparse_double_backward_kv.py. Source: native sparse attention,
// arXiv 2502.11089; rawattn/reference/sparse.py has the equations.
#include "sm80/key_gradients.cuh"
#include "sm80/sparse_gather.cuh"

struct SmemPlan {
  KeySide side;
  float scale_sums[4][BLOCK_M];  // [place of a warp along the keys][row]
  ItemCodes items[2];
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
  const int* starts;           // (chunks, num_heads_kv, units)
  const int* lengths;          // (chunks, num_heads_kv, units)
  const int* queries;          // items of all lists
  const int* query_slots;      // their slots
  const float* block_scale;    // (total_q, num_heads_sel, num_selected), or null
  const float* ddblock_scale;  // like block_scale, or null
  float* gblock_scale;         // like block_scale, zeroed, or null
  const int* cu_seqlens_q;     // (batch + 1,)
  const int* cu_seqlens_k;     // (batch + 1,)
  Tensor gk;                   // (total_k, num_heads_kv, head_dim)
  Tensor gv;                   // (total_k, num_heads_kv, head_dim_v)
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/sparse_double_backward_kv.py differ");

// Q, ddQ, dO and the row terms of a tile of items. Rows without an item are zeros in all of them: P
// is 1 there and adds nothing.
__device__ __forceinline__ void load_queries(const Args& args, KeySide& side, const Items& items,
                                             int kv_head) {
  gather_rows<cfg::WIDTH>(side.q, args.q, items, kv_head);
  if constexpr (cfg::HAS_TQ) gather_rows<cfg::WIDTH>(side.ddq, args.ddq, items, kv_head);
  gather_rows<cfg::WIDTH_V>(side.dout, args.dout, items, kv_head);
  const float* terms[4] = {args.lse, args.delta, args.ddlse, args.ddelta};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    gather_statistic(side.terms[i], terms[i], items, kv_head, args.sizes.total_q);
  }
}

// tP, g dS and g tdS + tg dS of this tile into shared memory, STEP_N columns at a time; with scales
// of blocks also the row sums of their gradient.
__device__ __forceinline__ void make_tiles(const Args& args, SmemPlan& smem, const Items& items,
                                           const BlockTile& tile, const WarpS& warp) {
  if (!warp.any()) return;
  constexpr int MT = WarpS::MT, NT = WarpS::NT;
  const float softmax_scale = args.sizes.softmax_scale;
  KeySide& side = smem.side;
  const OperandA<TileQ> q(side.q.address(), warp.row);
  const OperandA<TileO> dout(side.dout.address(), warp.row);
  const float* terms = &side.terms[0][warp.row + threadIdx.x % WARP_SIZE / 4];
  float scale[MT][2], scale_tangent[MT][2], scale_sum[MT][2] = {};
  if constexpr (cfg::HAS_BLOCK_SCALE) {
    gather_block_scale(scale, args.block_scale, items, tile, args.selection, warp.row, 1.0f);
    gather_block_scale(scale_tangent, args.ddblock_scale, items, tile, args.selection, warp.row,
                       0.0f);
  }
#pragma unroll 1
  for (int part = 0; part < BLOCK_N; part += STEP_N) {
    const int col = part + warp.col;
    float rP[MT][NT][4], rE[MT][NT][4];
    float rS[cfg::HAS_BLOCK_SCALE ? MT : 1][cfg::HAS_BLOCK_SCALE ? NT : 1]
            [4];  // as they are without scales
    float rtS[cfg::HAS_BLOCK_SCALE ? MT : 1][cfg::HAS_BLOCK_SCALE ? NT : 1]
             [4];  // ddQ K^T + Q ddK^T
    multiply_scores<HEAD_DIM>(rP, rE, q, OperandB<TileK>(side.keys.k.address(), col));
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      for_each<MT, NT>([&](int i, int j, int e) {
        rS[i][j][e] = rP[i][j][e];
        rtS[i][j][e] = rE[i][j][e];
      });
      apply_block_scale(rP, rE, scale, scale_tangent);
    }
    if (!whole(items, tile)) cut_scores(rP, items, tile, warp.row, col);
    scores_to_p(rP, load_lse_log2<MT>(terms, 0, BLOCK_M), softmax_scale * LOG2E);
    float rdP[MT][NT][4], rX[MT][NT][4];
    multiply_gradients<HEAD_DIM_V>(rdP, rX, dout, OperandB<TileV>(side.keys.v.address(), col));
    // L is read again rather than kept: registers are what this loop is short of
    tangents_of_p_and_ds(rE, rdP, rX, rP, row_terms<MT>(terms), args.sizes);
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      for_each<MT, NT>([&](int i, int j, int e) {
        scale_sum[i][e / 2] +=
            softmax_scale * (rX[i][j][e] * rS[i][j][e] + rdP[i][j][e] * rtS[i][j][e]);
      });
      apply_block_scale(rdP, rX, scale, scale_tangent);
    }
    side.store_factors(rE, rdP, rX, warp.row, col);
  }
  if constexpr (cfg::HAS_BLOCK_SCALE) store_scale_sums(smem.scale_sums, scale_sum, warp);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_double_backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const BlockTile tile = find_block_tile(args);
  if (tile.keys <= 0) return;
  ItemWalk walk{};
  if (tile.batch_index >= 0) walk = walk_items(args, tile);
  if (walk.done()) {  // nobody sees these keys, or they belong to no sequence
    zero_rows<cfg::WIDTH>(args.gk, tile.rows());
    zero_rows<cfg::WIDTH_V>(args.gv, tile.rows());
    return;
  }
  const int ratio = args.selection.num_heads_sel / args.sizes.num_heads_kv;
  const KeyWarps<WarpS> warp(threadIdx.x / WARP_SIZE);
  smem.side.keys.load_k(args, tile.rows());
  smem.side.keys.load_v(args, tile.rows());
  load_items(smem.items[0], args.queries, args.query_slots, walk);
  cp_async_commit();

  KeyGradients gradients;
  for (int buffer = 0; !walk.done(); buffer ^= 1) {
    const Items items{smem.items[buffer].codes, walk.left, ratio};
    cp_async_wait<0>();
    __syncthreads();  // the items are here; every warp has left Q, ddQ, dO, tP, dS and tdS
    load_queries(args, smem.side, items, tile.kv_head);
    walk.advance();
    if (!walk.done()) load_items(smem.items[buffer ^ 1], args.queries, args.query_slots, walk);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // Q, ddQ, dO and the row terms are here
    make_tiles(args, smem, items, tile, warp.s);
    __syncthreads();  // tP, dS and tdS are whole
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      if (args.gblock_scale) {
        write_scale_gradients<WarpS::WARPS_N>(args.gblock_scale, smem.scale_sums, items, tile,
                                              args.selection);
      }
    }
    gradients.add(smem.side, warp);  // of g tdS + tg dS and g dS: scales are in the factors
  }

  __syncthreads();  // every warp has left K and V: gK and gV take their place
  gradients.store(smem.side, warp, args.sizes.softmax_scale);
  __syncthreads();  // both are whole
  write_rows<cfg::WIDTH>(args.gk, tile.rows(), smem.side.keys.k);
  write_rows<cfg::WIDTH_V>(args.gv, tile.rows(), smem.side.keys.v);
}
