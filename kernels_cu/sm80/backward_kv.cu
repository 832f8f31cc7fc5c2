// backward_kv: dK = softmax_scale dS^T Q and dV = P^T dO in registers;
//              dQ += dS K by float32 atomic adds (cfg::ATOMIC).
//
//              BLOCK_N keys             A CTA owns BLOCK_N keys of one kv head and walks over the
//            +-------------+            queries of every head of the group: dK and dV are summed
//   BLOCK_M  | S, dP -> P, |  x K -> dQ without atomics. Warps lie as WARPS_M_S x .. over S and dP,
//   queries  |      dS     |            WARPS_N_KV x .. over dK and dV, WARPS_M_DQ x .. over dQ;
//            +-------------+            P and dS pass through shared memory, 16 bits each.
//             ^T x dO, Q -> dV, dK      Grid: (tiles of keys, upper bound; kv heads).
//
// Without cfg::ATOMIC this is the first half of the deterministic backward, before backward_q.
// Twin: rawattn/kernels_numba/backward_kv.py. Source: FlashAttention-2, arXiv 2307.08691, algorithm 2.
#include "base/softcap.cuh"
#include "base/statistics.cuh"
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "base/workspace.cuh"
#include "sm80/key_warps.cuh"

using cfg::NUM_STAGES;

using WarpS = WarpOfScores<BLOCK_N / cfg::PIECES>;
static_assert(KeyWarps<WarpS>::EVERY,
              "cfg::WARPS_M_S, WARPS_N_KV, WARPS_M_DQ: each warp gets whole 16 x 16 squares");

struct SmemPlan {
  TileK k;  // dK at the end
  TileV v;  // dV at the end
  TileQ q[NUM_STAGES];
  TileO dout[NUM_STAGES];
  TileP p, ds;
  float terms[NUM_STAGES][2][BLOCK_M];  // L, D
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  float* dq_accum;          // workspace of dQ, zeroed; unused without cfg::ATOMIC
  Tensor dk;                // (total_k, num_heads_kv, head_dim)
  Tensor dv;                // (total_k, num_heads_kv, head_dim_v)
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/backward_kv.py differ");

// Q, dO, L and D of a tile of queries into a stage. Rows past the sequence's end are zeros
// in all four: P is 1 there and adds nothing.
__device__ __forceinline__ void load_queries(const Args& args, SmemPlan& smem,
                                             const Sequence& queries, const QueryWalk& at,
                                             int stage) {
  const Rows rows = at.rows<BLOCK_M>(queries);
  load_rows<cfg::WIDTH>(smem.q[stage], args.q, rows);
  load_rows<cfg::WIDTH_V>(smem.dout[stage], args.dout, rows);
  const int64_t first = static_cast<int64_t>(rows.head) * args.sizes.total_q + rows.first;
  const uint32_t terms = smem_address(smem.terms[stage]);
  for (int i = threadIdx.x; i < 2 * BLOCK_M; i += NUM_THREADS) {
    cp_async_4(terms + i * sizeof(float),
               (i < BLOCK_M ? args.lse : args.delta) + first + i % BLOCK_M,
               i % BLOCK_M < rows.valid);
  }
  cp_async_commit();
}

// P and dS of this tile into shared memory, cfg::PIECES times BLOCK_N / PIECES columns
__device__ __forceinline__ void make_p_and_ds(SmemPlan& smem, int stage, const Mask& mask,
                                              const WarpS& warp, int row0, int col0,
                                              const Sizes& sizes) {
  const float scale_log2 = score_scale_log2(sizes);
  const int lane = threadIdx.x % WARP_SIZE;
  const OperandA<TileQ> queries(smem.q[stage].address(), warp.row);
  const OperandA<TileO> gradients(smem.dout[stage].address(), warp.row);
  const float* lse = &smem.terms[stage][0][warp.row + lane / 4];
#pragma unroll 1
  for (int piece = 0; piece < BLOCK_N; piece += BLOCK_N / cfg::PIECES) {
    const int col = piece + warp.col;
    float rP[WarpS::MT][WarpS::NT][4], rdS[WarpS::MT][WarpS::NT][4];
    clear(rP);
    multiply_xyt<HEAD_DIM>(rP, queries, OperandB<TileK>(smem.k.address(), col));  // S = Q K^T
    cap_scores(rP, sizes);
    if (mask.cuts(row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, mask, row0 + warp.row + lane / 4, col0 + col + lane % 4 * 2);
    }
    scores_to_p(rP, load_lse_log2<WarpS::MT>(lse, 0, BLOCK_M), scale_log2);
    store_tile(smem.p, rP, warp.row, col);
    clear(rdS);
    multiply_xyt<HEAD_DIM_V>(rdS, gradients,
                             OperandB<TileV>(smem.v.address(), col));  // dP = dO V^T
    // L is read again rather than kept: registers are what this loop is short of
    const auto lse_log2 = load_lse_log2<WarpS::MT>(lse, 0, BLOCK_M);
    dp_to_ds(rdS, rP, load_delta<WarpS::MT>(lse + BLOCK_M, 0, lse_log2));
    slope_ds(rdS, rP, lse_log2, sizes);
    store_tile(smem.ds, rdS, warp.row, col);
  }
}

// dQ of this tile of queries: dS K, added to the workspace
__device__ __forceinline__ void add_dq(const Workspace<cfg::WIDTH>& sums, const SmemPlan& smem,
                                       const WarpQ& warp, int row0) {
  float rdQ[WarpQ::MT][WarpQ::NT][4];
  clear(rdQ);
  multiply_xy<BLOCK_N>(rdQ, OperandA<TileP>(smem.ds.address(), warp.row),
                       OperandBT<TileK, WarpQ::SPAN_N>(smem.k.address(), 0, warp.col));
  add_units<HEAD_DIM>(sums, rdQ, row0 + warp.row, warp.col);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const KeyTile tile = find_key_tile<BLOCK_M, BLOCK_N>(args);
  if (tile.dead()) {
    zero_rows<cfg::WIDTH>(args.dk, tile.rows());
    zero_rows<cfg::WIDTH_V>(args.dv, tile.rows());
    return;
  }
  const KeyWarps<WarpS> warp(threadIdx.x / WARP_SIZE);
  load_rows<cfg::WIDTH>(smem.k, args.k, tile.used_rows());
  load_rows<cfg::WIDTH_V>(smem.v, args.v, tile.used_rows());
  QueryWalk next(tile, args.sizes.group());
  load_queries(args, smem, tile.queries, next, 0);

  float rdK[WarpK::MT][WarpK::NT][4], rdV[WarpV::MT][WarpV::NT][4];
  clear(rdK);
  clear(rdV);
  int stage = 0;
  while (!next.done()) {
    const int head = next.head, row0 = next.m * BLOCK_M;
    next.advance();
    cp_async_wait<0>();
    __syncthreads();  // Q and dO are here; every warp has left P, dS and the other stage
    if (NUM_STAGES == 2 && !next.done()) load_queries(args, smem, tile.queries, next, stage ^ 1);
    make_p_and_ds(smem, stage, tile.mask, warp.s, row0, tile.col0, args.sizes);
    __syncthreads();  // P and dS are whole

    multiply_xty<BLOCK_M>(  // dV += P^T dO
        rdV, OperandAT<TileP, WarpV::SPAN_M>(smem.p.address(), 0, warp.v.row),
        OperandBT<TileO, WarpV::SPAN_N>(smem.dout[stage].address(), 0, warp.v.col));
    if constexpr (cfg::ATOMIC) {
      const Workspace<cfg::WIDTH> sums(args.dq_accum, head, args.sizes.total_q, tile.queries.start,
                                       tile.queries.length);
      add_dq(sums, smem, warp.q, row0);
    }
    multiply_xty<BLOCK_M>(  // dK += dS^T Q
        rdK, OperandAT<TileP, WarpK::SPAN_M>(smem.ds.address(), 0, warp.k.row),
        OperandBT<TileQ, WarpK::SPAN_N>(smem.q[stage].address(), 0, warp.k.col));
    if constexpr (NUM_STAGES == 2) {
      stage ^= 1;
    } else if (!next.done()) {
      __syncthreads();  // every warp has left Q and dO
      load_queries(args, smem, tile.queries, next, 0);
    }
  }

  __syncthreads();  // every warp has left K and V: dK and dV take their place
  store_tile(smem.k, rdK, warp.k.row, warp.k.col,
             [&](int, int) { return args.sizes.softmax_scale; });
  store_tile(smem.v, rdV, warp.v.row, warp.v.col);
  __syncthreads();  // both are whole
  write_rows<cfg::WIDTH>(args.dk, tile.rows(), smem.k);
  write_rows<cfg::WIDTH_V>(args.dv, tile.rows(), smem.v);
}
