// double_backward_kv: gK = softmax_scale (tdS^T Q + dS^T ddQ) and gV = tP^T dO in registers;
//                     gQ += tdS K + dS ddK by float32 atomic adds (cfg::ATOMIC).
//   tP = P o (E - e),  dS = P o (dP - D),  tdS = tP o (dP - D) + P o (dO ddV^T - W),
//   E = softmax_scale (ddQ K^T + Q ddK^T); e, D and W come from double_backward_out.
//
//              BLOCK_N keys             A CTA owns BLOCK_N keys of one kv head and walks over the
//            +-------------+            queries of every head of the group: gK and gV are summed
//   BLOCK_M  | S, E, dP, X |  x K, ddK  without atomics. Warps lie as WARPS_M_S x .. over the
//   queries  | -> tP, dS,  |    -> gQ   scores, WARPS_N_KV x .. over gK and gV, WARPS_M_DQ x ..
//            |     tdS     |            over gQ; tP, dS and tdS pass through shared memory, 16
//            +-------------+            bits each.
//     ^T x dO, Q, ddQ -> gV, gK         Grid: (tiles of keys, upper bound; kv heads).
//
// Without cfg::ATOMIC this is the first half of the deterministic form; the second is
// double_backward_q. Twin: rawattn/kernels_numba/double_backward_kv.py. Source: the derivative of
// FlashAttention-2's backward, arXiv 2307.08691, algorithm 2; rawattn/reference has the equations.
#include "base/tiles.cuh"
#include "base/workspace.cuh"
#include "sm80/key_gradients.cuh"

using WarpS = WarpOfScores<BLOCK_N / cfg::PIECES>;
static_assert(KeyWarps<WarpS>::EVERY,
              "cfg::WARPS_M_S, WARPS_N_KV, WARPS_M_DQ: each warp gets whole 16 x 16 squares");

using SmemPlan = KeySide;
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor ddq;               // like q; null without cfg::HAS_TQ
  Tensor ddk;               // like k; null without cfg::HAS_TK
  Tensor ddv;               // like v; null without cfg::HAS_TV
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  const float* ddlse;       // (num_heads_q, total_q)
  const float* ddelta;      // (num_heads_q, total_q)
  float* gq_accum;          // workspace of gQ, zeroed; unused without cfg::ATOMIC
  Tensor gk;                // (total_k, num_heads_kv, head_dim)
  Tensor gv;                // (total_k, num_heads_kv, head_dim_v)
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/double_backward_kv.py differ");

// Q, ddQ, dO and the row terms of a tile of queries. Rows past the sequence's end are
// zeros in all of them: P is 1 there and adds nothing.
__device__ __forceinline__ void load_queries(const Args& args, SmemPlan& smem,
                                             const Sequence& queries, const QueryWalk& at) {
  const Rows rows = at.rows<BLOCK_M>(queries);
  load_rows<cfg::WIDTH>(smem.q, args.q, rows);
  if constexpr (cfg::HAS_TQ) load_rows<cfg::WIDTH>(smem.ddq, args.ddq, rows);
  load_rows<cfg::WIDTH_V>(smem.dout, args.dout, rows);
  const int64_t first = static_cast<int64_t>(rows.head) * args.sizes.total_q + rows.first;
  const uint32_t to = smem_address(smem.terms);
  for (int i = threadIdx.x; i < 4 * BLOCK_M; i += NUM_THREADS) {
    const int term = i / BLOCK_M, row = i % BLOCK_M;
    const float* terms = term == 0   ? args.lse
                         : term == 1 ? args.delta
                         : term == 2 ? args.ddlse
                                     : args.ddelta;
    cp_async_4(to + i * sizeof(float), terms + first + row, row < rows.valid);
  }
  cp_async_commit();
}

// tP, dS and tdS of this tile into shared memory, cfg::PIECES times BLOCK_N / PIECES columns
__device__ __forceinline__ void make_tiles(SmemPlan& smem, const Mask& mask, const WarpS& warp,
                                           int row0, int col0, const Sizes& sizes) {
  constexpr int MT = WarpS::MT, NT = WarpS::NT;
  const int lane = threadIdx.x % WARP_SIZE, stat_row = warp.row + lane / 4;
  const OperandA<TileQ> q(smem.q.address(), warp.row);
  const OperandA<TileO> dout(smem.dout.address(), warp.row);
#pragma unroll 1
  for (int piece = 0; piece < BLOCK_N; piece += BLOCK_N / cfg::PIECES) {
    const int col = piece + warp.col;
    float rP[MT][NT][4], rE[MT][NT][4], rdP[MT][NT][4], rX[MT][NT][4];
    multiply_scores<HEAD_DIM>(rP, rE, q, OperandB<TileK>(smem.keys.k.address(), col));
    cap_scores(rP, sizes);
    if (mask.cuts(row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, mask, row0 + stat_row, col0 + col + lane % 4 * 2);
    }
    scores_to_p(rP, load_lse_log2<MT>(smem.terms[0] + stat_row, 0, BLOCK_M),
                score_scale_log2(sizes));
    multiply_gradients<HEAD_DIM_V>(rdP, rX, dout, OperandB<TileV>(smem.keys.v.address(), col));
    // L is read again rather than kept: registers are what this loop is short of
    tangents_of_p_and_ds(rE, rdP, rX, rP, row_terms<MT>(&smem.terms[0][stat_row]), sizes);
    smem.store_factors(rE, rdP, rX, warp.row, col);
  }
}

// gQ of this tile of queries: tdS K + dS ddK, added to the workspace
__device__ __forceinline__ void add_gq(const Workspace<cfg::WIDTH>& sums, const SmemPlan& smem,
                                       const WarpQ& warp, int row0) {
  float rgQ[WarpQ::MT][WarpQ::NT][4];
  clear(rgQ);
  multiply_xy<BLOCK_N>(rgQ, OperandA<TileP>(smem.tds.address(), warp.row),
                       OperandBT<TileK, WarpQ::SPAN_N>(smem.keys.k.address(), 0, warp.col));
  if constexpr (cfg::HAS_TK) {
    multiply_xy<BLOCK_N>(rgQ, OperandA<TileP>(smem.ds.address(), warp.row),
                         OperandBT<TileK, WarpQ::SPAN_N>(smem.keys.ddk.address(), 0, warp.col));
  }
  add_units<HEAD_DIM>(sums, rgQ, row0 + warp.row, warp.col);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    double_backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const KeyTile tile = find_key_tile<BLOCK_M, BLOCK_N>(args);
  if (tile.dead()) {
    zero_rows<cfg::WIDTH>(args.gk, tile.rows());
    zero_rows<cfg::WIDTH_V>(args.gv, tile.rows());
    return;
  }
  const KeyWarps<WarpS> warp(threadIdx.x / WARP_SIZE);
  smem.keys.load(args, tile.used_rows());
  QueryWalk next(tile, args.sizes.group());
  load_queries(args, smem, tile.queries, next);

  KeyGradients gradients;
  while (!next.done()) {
    const int head = next.head, row0 = next.m * BLOCK_M;
    next.advance();
    cp_async_wait<0>();
    __syncthreads();  // Q, ddQ, dO and the row terms are here; every warp has left tP, dS and tdS
    make_tiles(smem, tile.mask, warp.s, row0, tile.col0, args.sizes);
    __syncthreads();  // tP, dS and tdS are whole

    gradients.add(smem, warp);
    if (!next.done()) {
      __syncthreads();  // every warp has left Q, ddQ and dO: the next ones load behind gQ
      load_queries(args, smem, tile.queries, next);
    }
    if constexpr (cfg::ATOMIC) {
      const Workspace<cfg::WIDTH> sums(args.gq_accum, head, args.sizes.total_q, tile.queries.start,
                                       tile.queries.length);
      add_gq(sums, smem, warp.q, row0);
    }
  }

  __syncthreads();  // every warp has left K and V: gK and gV take their place
  gradients.store(smem, warp, args.sizes.softmax_scale);
  __syncthreads();  // both are whole
  write_rows<cfg::WIDTH>(args.gk, tile.rows(), smem.keys.k);
  write_rows<cfg::WIDTH_V>(args.gv, tile.rows(), smem.keys.v);
}
