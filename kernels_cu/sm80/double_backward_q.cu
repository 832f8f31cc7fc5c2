// double_backward_q: gQ = softmax_scale (tdS K + dS ddK) in registers, without atomics: the second
//                    half of the deterministic form; the first is double_backward_kv, whose head
//                    has tdS and dS.
//
//              BLOCK_N keys             A CTA owns BLOCK_M queries of one head and walks over their
//            +-------------+            keys. Its warps own whole rows: tdS and dS feed gQ straight
//   BLOCK_M  | S, E, dP, X |  x K, ddK  from registers.
//   queries  | -> dS, tdS  |    -> gQ   Grid: (tiles of queries, upper bound; query heads).
//            +-------------+
//
// Twin: rawattn/kernels_numba/double_backward_q.py. Source: the derivative of FlashAttention's
// backward, arXiv 2205.14135, algorithm 4, loops exchanged; rawattn/reference has the equations.
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "base/warp_rows.cuh"
#include "sm80/tangent_products.cuh"
#include "sm80/tangent_tiles.cuh"

struct SmemPlan {
  TileQ q, ddq;  // gQ takes the place of q at the end: a warp reads and writes its own rows only
  TileO dout;
  TangentKeys keys;
};
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
  Tensor gq;                // (total_q, num_heads_q, head_dim)
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/double_backward_q.py differ");

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    double_backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const QueryTile tile = find_query_tile<BLOCK_M, BLOCK_N>(args);
  if (tile.dead()) {
    zero_rows<cfg::WIDTH>(args.gq, tile.rows());
    return;
  }
  const auto load_step = [&](int n) {
    smem.keys.load(args, tile.keys_of<BLOCK_N>(n));
    cp_async_commit();
  };
  load_rows<cfg::WIDTH>(smem.q, args.q, tile.rows());
  if constexpr (cfg::HAS_TQ) load_rows<cfg::WIDTH>(smem.ddq, args.ddq, tile.rows());
  load_rows<cfg::WIDTH_V>(smem.dout, args.dout, tile.rows());
  load_step(tile.n_end - 1);
  const int warp_row = threadIdx.x / WARP_SIZE * WARP_M, lane = threadIdx.x % WARP_SIZE;
  const int64_t statistic = tile.statistic(args.sizes);
  const int stat_row = warp_row + lane / 4;
  const auto lse_log2 = load_lse_log2<MT>(args.lse + statistic, stat_row, tile.valid_rows);
  const RowTerms<MT> terms{lse_log2, load_delta<MT>(args.delta + statistic, stat_row, lse_log2),
                           load_delta<MT>(args.ddlse + statistic, stat_row, lse_log2),
                           load_delta<MT>(args.ddelta + statistic, stat_row, lse_log2)};

  const float softmax_scale = args.sizes.softmax_scale;
  const OperandA<TileQ> q(smem.q.address(), warp_row);
  const OperandA<TileO> dout(smem.dout.address(), warp_row);
  const OperandB<TileK> k(smem.keys.k.address());
  const OperandB<TileV> v(smem.keys.v.address());
  float rgQ[MT][HEAD_DIM / 8][4];
  clear(rgQ);
  for (int n = tile.n_end - 1; n >= tile.n_begin; --n) {
    const int col0 = n * BLOCK_N;
    cp_async_wait<0>();
    __syncthreads();  // K, ddK, V and ddV are here
    float rP[MT][BLOCK_N / 8][4], rE[MT][BLOCK_N / 8][4];
    float rdS[MT][BLOCK_N / 8][4], rtdS[MT][BLOCK_N / 8][4];
    multiply_scores<HEAD_DIM>(rP, rE, q, k);             // S and E  [WARP_M, BLOCK_N]
    multiply_gradients<HEAD_DIM_V>(rdS, rtdS, dout, v);  // dP and X
    cap_scores(rP, args.sizes);
    if (tile.mask.cuts(tile.row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, tile.mask, tile.row0 + stat_row, col0 + lane % 4 * 2);
    }
    scores_to_p(rP, lse_log2, score_scale_log2(args.sizes));
    tangents_of_p_and_ds(rE, rdS, rtdS, rP, terms, args.sizes);
    multiply_py(rgQ, rtdS, OperandBT<TileK>(smem.keys.k.address()));  // gQ += tdS K + dS ddK
    if constexpr (cfg::HAS_TK) multiply_py(rgQ, rdS, OperandBT<TileK>(smem.keys.ddk.address()));
    if (n > tile.n_begin) {
      __syncthreads();  // every warp has left K, ddK, V and ddV
      load_step(n - 1);
    }
  }

  __syncwarp();  // every lane has left the warp's rows of Q
  store_tile(smem.q, rgQ, warp_row, 0, [&](int, int) { return softmax_scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_warp_rows<cfg::WIDTH, WARP_M>(args.gq, tile.rows(), smem.q, warp_row);
}
