// double_backward_out: ddO = (P o E) V + P ddV - e o O and e = ddL = rowsum(P o E), with
//                      E = softmax_scale (ddQ K^T + Q ddK^T): the gradients of dO and dL;
//                      for the second pass D = dO.O - dL and its tangent W = dO.ddO, and zeros to
//                      the workspace that gQ is added into.
//
//              BLOCK_N keys               A CTA owns BLOCK_M queries of one head. Its warps own
//            +-------------+              whole rows, BLOCK_M / NUM_WARPS each; P comes from S and
//   BLOCK_M  | S, E -> P,  |  x V, ddV    the given L, so that no maximum is needed.
//   queries  |    P o E    |    -> ddO    Grid: (tiles of queries; query heads).
//            +-------------+
//
// K and ddK arrive by cp.async behind the products with V; V and ddV behind S and E.
// Twin: rawattn/kernels_numba/double_backward_out.py. Source: the derivative of FlashAttention-2's
// backward, arXiv 2307.08691, algorithm 2; rawattn/reference has the equations.
#include "base/softmax.cuh"
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "base/warp_rows.cuh"
#include "base/workspace.cuh"
#include "sm80/tangent_products.cuh"
#include "sm80/tangent_tiles.cuh"

struct SmemPlan {
  union {
    struct {
      TileQ q, ddq;
    };
    TileO ddout;  // at the end: a barrier of the loop lies behind every last read of q and ddq
  };
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
  Tensor out;               // (total_q, num_heads_q, head_dim_v)
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* dlse;        // (num_heads_q, total_q), or null
  Tensor ddout;             // (total_q, num_heads_q, head_dim_v)
  float* ddlse;             // (num_heads_q, total_q)
  float* delta;             // (num_heads_q, total_q)
  float* ddelta;            // (num_heads_q, total_q)
  float* gq_accum;          // (gq_accum_size,), zeroed here, or null
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const float* sinks;       // (num_heads_q,), with cfg::HAS_SINKS
  const float* ddsinks;     // (num_heads_q,), or null
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
  int64_t gq_accum_size;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/double_backward_out.py differ");

// What a sink that moves along ddsinks adds to e of a row, P0 ddsinks
__device__ __forceinline__ float sink_tangent(const Args& args, const QueryTile& tile, float lse) {
  if (!args.ddsinks) return 0.0f;
  return ex2_approx((tile.sink(args) - lse) * LOG2E) * args.ddsinks[tile.head];
}

// S -> P = exp(S scale - L). e is float32, and no float32 is as close to L log2(e) as L is to itself
__device__ __forceinline__ void scores_to_exact_p(float (&rS)[MT][BLOCK_N / 8][4],
                                                  const PerRow<MT>& lse, float scale) {
  for_each<MT, BLOCK_N / 8>([&](int i, int j, int e) {
    rS[i][j][e] = ex2_approx(fmaf(rS[i][j][e], scale, -lse.value[i][e / 2]) * LOG2E);
  });
}

// ddO, e, D and W of this warp's rows. A dead row, or one past the sequence's end, reads nothing.
__device__ __forceinline__ void epilogue(const Args& args, const QueryTile& tile, int warp_row,
                                         const PerRow<MT>& lse, const float (&tangent)[MT][2],
                                         const float (&rounded)[MT][4],
                                         float (&rddO)[MT][HEAD_DIM_V / 8][4], TileO& ddout) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + i * 16 + half * 8 + lane / 4;
      const bool alive = lse.value[i][half] != INF;
      const uint16_t* gO = args.out.at(tile.first_row + row, tile.head) + lane % 4 * 2;
      const uint16_t* gdO = args.dout.at(tile.first_row + row, tile.head) + lane % 4 * 2;
      float ddlse = sum_of_row(tangent[i][half]), e = rounded[i][half * 2];
      if constexpr (cfg::HAS_SINKS) {
        const float own = sink_tangent(args, tile, lse.value[i][half]);
        ddlse += own, e += own;
      }
      const RowSums sums = finish_ddout<true>(rddO[i], half, e, alive, gO, gdO);
      if (lane % 4 == 0 && row < tile.valid_rows) {
        const int64_t index = tile.statistic(args.sizes) + row;
        args.ddlse[index] = ddlse;
        args.delta[index] = alive && args.dlse ? sums.delta - args.dlse[index] : sums.delta;
        args.ddelta[index] = sums.ddelta;
      }
    }
  }
  store_tile(ddout, rddO, warp_row, 0);
  __syncwarp();  // the rows were written by this warp's other lanes
  write_warp_rows<cfg::WIDTH_V, WARP_M>(args.ddout, tile.rows(), ddout, warp_row);
}

__device__ __forceinline__ void write_dead_rows(const Args& args, const QueryTile& tile) {
  zero_rows<cfg::WIDTH_V>(args.ddout, tile.rows());
  for (float* x : {args.ddlse, args.delta, args.ddelta}) {
    fill_statistic(x, tile.statistic(args.sizes), tile.valid_rows, 0.0f);
  }
  if constexpr (cfg::HAS_SINKS) {  // of a sequence: L is its sink, and O 0
    if (tile.batch_index < 0) return;
    for (int row = threadIdx.x; row < tile.valid_rows; row += NUM_THREADS) {
      const int64_t index = tile.statistic(args.sizes) + row;
      if (args.lse[index] == -INF) continue;
      args.ddlse[index] = sink_tangent(args, tile, args.lse[index]);
      if (args.dlse) args.delta[index] = -args.dlse[index];
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    double_backward_out(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  if (args.gq_accum) zero_workspace(args.gq_accum, args.gq_accum_size);
  const QueryTile tile = find_query_tile<BLOCK_M, BLOCK_N>(args);
  if (tile.dead()) {
    write_dead_rows(args, tile);
    return;
  }
  const auto load_keys = [&](int n) {
    smem.keys.load_k(args, tile.keys_of<BLOCK_N>(n));
    cp_async_commit();
  };
  const auto load_values = [&](int n) {
    smem.keys.load_v(args, tile.keys_of<BLOCK_N>(n));
    cp_async_commit();
  };
  load_rows<cfg::WIDTH>(smem.q, args.q, tile.rows());
  if constexpr (cfg::HAS_TQ) load_rows<cfg::WIDTH>(smem.ddq, args.ddq, tile.rows());
  load_keys(tile.n_end - 1);
  const int warp_row = threadIdx.x / WARP_SIZE * WARP_M, lane = threadIdx.x % WARP_SIZE;
  const auto lse =
      load_lse<MT>(args.lse + tile.statistic(args.sizes), warp_row + lane / 4, tile.valid_rows);

  const float softmax_scale = args.sizes.softmax_scale;
  const OperandA<TileQ> q(smem.q.address(), warp_row);
  const OperandB<TileK> k(smem.keys.k.address());
  const OperandBT<TileV> v(smem.keys.v.address());
  float rddO[MT][HEAD_DIM_V / 8][4], rP[MT][BLOCK_N / 8][4], rE[MT][BLOCK_N / 8][4];
  float tangent[MT][2] = {}, rounded[MT][4] = {};
  clear(rddO);
  for (int n = tile.n_end - 1; n >= tile.n_begin; --n) {
    cp_async_wait<0>();
    __syncthreads();  // K and ddK of this tile are here; every warp has left V and ddV
    load_values(n);
    multiply_scores<HEAD_DIM>(rP, rE, q, k);  // S and E  [WARP_M, BLOCK_N]
    cp_async_wait<0>();
    __syncthreads();  // V and ddV are here; every warp has left K and ddK
    if (n > tile.n_begin) load_keys(n - 1);
    cap_scores(rP, args.sizes);
    if constexpr (HAS_E) slope_tangents(rE, rP);
    if (tile.mask.cuts(tile.row0, BLOCK_M, n * BLOCK_N, BLOCK_N)) {
      apply_mask(rP, tile.mask, tile.row0 + warp_row + lane / 4, n * BLOCK_N + lane % 4 * 2);
    }
    scores_to_exact_p(rP, lse, score_scale(args.sizes));
    if constexpr (HAS_E) weigh_tangents(rE, rP, softmax_scale, tangent);
    add_tangent_products(rddO, rP, rE, v, rounded);  // ddO  [WARP_M, HEAD_DIM_V]
  }
  epilogue(args, tile, warp_row, lse, tangent, rounded, rddO, smem.ddout);
}
